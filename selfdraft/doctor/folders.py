"""Whether files can be written to a folder, told by trying."""

from __future__ import annotations

import tempfile
from pathlib import Path

__all__ = ["nearest", "write_problem"]


def nearest(folder: Path) -> Path:
    """The folder, or what there is of its parents."""
    return next((each for each in (folder, *folder.parents) if each.exists()), Path(folder.anchor))


def write_problem(folder: Path) -> str:
    """Why nothing can be written there, or the folder not be made; empty if it can. Leaves nothing behind."""
    place = nearest(folder)
    try:
        with tempfile.TemporaryFile(dir=place):
            return ""
    except OSError as error:
        return f"{place}: {error.strerror or error}"
