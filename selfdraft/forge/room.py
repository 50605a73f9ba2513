"""What a build takes of disk and memory, and what there is."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from ..errors import SelfdraftError
from ..memory import free_memory
from .plan import Plan

__all__ = ["Room", "room"]

_LEFT_OVER = 2**30  # bytes of disk
_TENSORS = 6  # of the size of the largest, as stored, that are in memory while it is read, cast and quantised
_HEADS = 4  # as its file, dense, rounded, calibrated


@dataclass(frozen=True)
class Room:
    """Bytes needed and free.

    Attributes:
        place: whose disk it is.
        for_head: whether memory is needed to measure the head, beside the whole package.
    """

    place: Path
    disk_needed: int
    disk_free: int
    memory_needed: int
    memory_free: int
    for_head: bool

    @property
    def fits_disk(self) -> bool:
        """Whether the disk suffices."""
        return self.disk_needed <= self.disk_free

    @property
    def fits_memory(self) -> bool:
        """Whether memory suffices."""
        return self.memory_needed <= self.memory_free

    def check(self) -> None:
        """Raise SelfdraftError, with figures and a remedy, if either does not suffice."""
        if not self.fits_disk:
            raise SelfdraftError(
                f"the package needs {self.disk_needed / 1e9:.1f} GB on the disk of {self.place}, where "
                f"{self.disk_free / 1e9:.1f} GB are free: make room, or choose another --output"
            )
        if not self.fits_memory:
            what = "measuring the head, on the whole package," if self.for_head else "quantising the largest tensor"
            remedy = ", or take --head dense, for which an embedded head is not measured" if self.for_head else ""
            raise SelfdraftError(
                f"{what} needs {self.memory_needed / 1e9:.1f} GB of memory, where {self.memory_free / 1e9:.1f} GB are "
                f"free: close other programs{remedy}"
            )


def room(wanted: Plan, place: Path, written: int = 0) -> Room:
    """For a package in a folder that is there, of which some bytes are written."""
    heads = wanted.head.nbytes if wanted.head and wanted.loads_model else 0
    tensors = _TENSORS * wanted.largest
    package = wanted.nbytes + _HEADS * heads if wanted.loads_model else 0
    return Room(
        place=place,
        disk_needed=max(wanted.nbytes + heads - written, 0) + _LEFT_OVER,
        disk_free=shutil.disk_usage(place).free,
        memory_needed=max(tensors, package),
        memory_free=free_memory(),
        for_head=package > tensors,
    )
