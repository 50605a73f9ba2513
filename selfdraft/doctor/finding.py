"""What a check says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = ["Finding", "Status"]

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: of what was looked at; the same in every report.
        status: "fail" keeps Selfdraft from working, "warn" makes it worse, "skip" was not looked at.
        observed: what is.
        expected: what should be.
        fix: what to do; never empty for "warn" and "fail".
        figures: numbers behind `observed`, for programs.
    """

    name: str
    status: Status
    observed: str
    expected: str = ""
    fix: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "figures": {name: _json(value) for name, value in self.figures.items()}}


def _json(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
