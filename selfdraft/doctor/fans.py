"""Fan control, which mode max wants on a Mac: whether ThermalForge is there."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator

from .context import Context
from .finding import Finding
from .registry import check

__all__: list[str] = []


@check("fans")
def _fans(context: Context) -> Iterator[Finding]:
    if sys.platform != "darwin":
        yield Finding("fans", "skip", "fans are controlled on macOS alone")
    elif found := shutil.which("thermalforge"):
        yield Finding("fans", "ok", f"ThermalForge: {found}")
    else:
        install = "brew install ProducerGuy/tap/thermalforge, then once: sudo thermalforge install"
        yield Finding("fans", "skip", "ThermalForge is not installed, and only mode max wants it", fix=install)
