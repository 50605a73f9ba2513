"""Fan control, which mode max wants on a Mac: whether ThermalForge is there, and answers."""

from __future__ import annotations

from collections.abc import Iterator

from .context import Context
from .finding import Finding
from .registry import check

__all__: list[str] = []


@check("fans")
def _fans(context: Context) -> Iterator[Finding]:
    from ..errors import FanError
    from ..fans import thermalforge

    try:
        fans = thermalforge.find()
    except FanError as error:
        said, _, remedy = str(error).rpartition(": ")
        yield Finding("fans", "skip", f"{said}; only the mode max wants them", fix=remedy)
        return
    try:
        yield Finding("fans", "ok", f"ThermalForge: {fans.executable}, fans {fans.status()}")
    except FanError as error:
        said, _, remedy = str(error).rpartition(": ")
        yield Finding("fans", "warn", said, "fans that the mode max can hold", remedy)
