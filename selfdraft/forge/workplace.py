"""The folder in which a package is made: by one build at a time, over interruptions, renamed when it is whole."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import SelfdraftError
from ..files import write_atomically

__all__ = ["refuse_target", "workplace"]

_JOURNAL = ".journal.json"


def refuse_target(target: Path) -> None:
    """Raise SelfdraftError if a package cannot come to lie there."""
    if target.exists() or target.is_symlink():
        raise SelfdraftError(f"{target} is there already: remove it, or choose another --output")
    if not target.parent.is_dir():
        raise SelfdraftError(f"{target.parent} is no folder: make it first, or choose another --output")


@contextmanager
def workplace(target: Path, journal: str) -> Iterator[Path]:
    """A folder beside the target, which is the target once the block ends.

    What an earlier build with the same journal left there is kept, of another dropped. A build that is refused
    (SelfdraftError) leaves nothing; one that is interrupted, or meets a full disk, what it has.

    Raises:
        SelfdraftError: the target is there, or is being made; the folder cannot be written.
    """
    refuse_target(target)
    work = target.parent / f".{target.name}.building"
    try:
        work.mkdir(exist_ok=True)
        with _locked(work, target):
            try:
                _keep(work, journal)
                yield work
                (work / _JOURNAL).unlink()
                refuse_target(target)
                work.rename(target)
            except SelfdraftError:
                shutil.rmtree(work, ignore_errors=True)
                raise
    except (OSError, RuntimeError) as error:  # the latter is MLX's, for files and memory
        kept = f"; what was made is kept in {work}, and the same command goes on from it" if work.exists() else ""
        raise SelfdraftError(f"{target} could not be made ({error}){kept}") from error


@contextmanager
def _locked(work: Path, target: Path) -> Iterator[None]:
    """Hold a folder until the block ends, wherever it is moved."""
    descriptor = os.open(work, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = work.exists() and os.path.samestat(os.fstat(descriptor), work.stat())
        except BlockingIOError:
            held = False
        if not held:
            raise SelfdraftError(f"{target} is being made by another process: wait for it, or choose another --output")
        yield
    finally:
        os.close(descriptor)


def _keep(work: Path, journal: str) -> None:
    """Drop all that is not of this build."""
    there = work / _JOURNAL
    if not there.exists() or there.read_text(encoding="utf-8") != journal:
        for path in work.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_atomically(there, journal)
