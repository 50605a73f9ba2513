"""Spans of time as people write them: a number of seconds, or 90s, 5m, 1h30m, 2d. Knows not what they are for."""

from __future__ import annotations

import math
import re

__all__ = ["seconds"]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_MOST = 10 * 365 * 86400  # seconds; a longer time is a mistake


def seconds(given: str | float) -> float:
    """The seconds of a span; below 0 for a negative number.

    Raises:
        ValueError: no span, with what one looks like; longer than ten years.
    """
    try:
        value = float(given)
    except ValueError:
        parts = _PART.findall(str(given).strip())
        if not parts or "".join(number + unit for number, unit in parts) != str(given).strip():
            raise ValueError("give a number of seconds, or a span such as 90s, 5m, 1h30m or 2d") from None
        value = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if not math.isfinite(value) or value > _MOST:
        raise ValueError("give a span of at most ten years")
    return value
