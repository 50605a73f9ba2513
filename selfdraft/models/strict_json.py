"""JSON of which there is one reading: a key that stands twice in an object is an error, not the last one's win."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["parse"]


def parse(text: str | bytes) -> Any:
    """What a JSON text holds.

    Raises:
        ValueError: not JSON, too deep, or a key that stands twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return found
