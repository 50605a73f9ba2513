"""Pulling a model: small files first, so that one that cannot run is refused early; then its weights, several at once.

Weights get their names in the model folder when all of them are there and verified. Until then nobody can take what
lies there for a model.
"""

from __future__ import annotations

import contextlib
import glob
import os
import queue
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError, DownloadFailed
from .cache import blobs_folder, cache_folder, point, removal
from .listing import Listing, RemoteFile, explained
from .names import is_commit
from .pins import Pin, keep_pin
from .transfer import Stopped, fetch, is_whole, partial_path, sweep

__all__ = ["RESERVE", "Plan", "Watch", "plan", "pull"]

RESERVE = 1_000_000_000  # bytes that stay free on the disk

_AT_ONCE = 4  # files


@dataclass(frozen=True)
class Plan:
    """What a pull would do.

    Attributes:
        listing: what the Hub has.
        missing: bytes that are to be fetched.
        free: bytes that are free where they go.
    """

    listing: Listing
    missing: int
    free: int

    @property
    def fits(self) -> bool:
        """Whether the disk has room for it, with a reserve."""
        return self.missing == 0 or self.missing + RESERVE <= self.free


@dataclass(frozen=True)
class Watch:
    """Who looks on. Calls come from several threads, one at a time.

    Attributes:
        progress: called with (bytes done, bytes in all): verified or fetched.
        damaged: called with each file that was there already and is not what the Hub lists.
    """

    progress: Callable[[int, int], None] = lambda done, total: None
    damaged: Callable[[RemoteFile], None] = lambda file: None


def plan(listing: Listing) -> Plan:
    """Compare a listing with what lies in the cache, by size alone."""
    missing = sum(file.size - _bytes_there(listing, file) for file in _distinct(listing.files))
    place = cache_folder().absolute()
    while not place.exists():
        place = place.parent
    return Plan(listing, missing, shutil.disk_usage(place).free)


def pull(
    planned: Plan, watch: Watch, *, accept: Callable[[Path, Sequence[str]], None], examine: Callable[[Path], None]
) -> Pin:
    """Fetch what is missing, verify everything, and pin the name.

    Args:
        accept: called with the folder and the names of all files once the small ones are there; raises
            CheckpointError for a model that cannot run.
        examine: the same once everything is there.

    Returns:
        The pin that now holds.

    Raises:
        CheckpointError: no model that can run; what was fetched of it is removed.
        DownloadFailed: something did not come, or is damaged; what else came stays, to go on from.
    """
    listing = planned.listing
    if not planned.fits:
        raise DownloadFailed(
            f"{listing.model} needs {planned.missing + RESERVE:,} bytes in {cache_folder()}, a reserve of "
            f"{RESERVE:,} among them; {planned.free:,} are free. Make room, or set HF_HOME to a folder on another disk"
        )
    revision = listing.model.revision or "main"
    new = not listing.folder.exists()
    small = [file for file in listing.files if not file.is_weights]
    weights = [file for file in listing.files if file.is_weights]
    teller = _Teller(watch, sum(file.size for file in _distinct(small)) + sum(file.size for file in _distinct(weights)))
    try:
        _bring(listing, small, teller)
        _judged(accept, listing, new)
        _bring(listing, weights, teller)
        _judged(lambda folder, _: examine(folder), listing, new)
        if not is_commit(revision):
            point(listing.model.repository, revision, listing.commit)
    except OSError as error:
        raise DownloadFailed(
            f"{listing.model}: {error.strerror or error} ({cache_folder()}); what was fetched stays: see to that, and "
            f"`selfdraft pull {listing.model}` goes on from there"
        ) from error
    pin = Pin(listing.model.repository, revision, listing.commit)
    keep_pin(pin)
    sweep(blobs_folder(listing.model.repository))
    return pin


class _Teller:
    """Tells a watch what threads did, in turn."""

    def __init__(self, watch: Watch, total: int) -> None:
        self._watch, self._total, self._done = watch, total, 0
        self._lock = threading.Lock()

    def count(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            self._watch.progress(self._done, self._total)

    def damaged(self, file: RemoteFile) -> None:
        with self._lock:
            self._watch.damaged(file)


def _judged(judge: Callable[[Path, Sequence[str]], None], listing: Listing, new: bool) -> None:
    try:
        judge(listing.folder, [file.name for file in listing.files])
    except CheckpointError:
        found = removal(listing.model.repository, listing.commit) if new else None
        if found is not None:
            found.execute()
        raise


def _bring(listing: Listing, files: Sequence[RemoteFile], teller: _Teller) -> None:
    """See that files are there and right, and give them their names."""
    stop = threading.Event()

    def bring(file: RemoteFile) -> None:
        if _verified(listing, file, teller, stop):
            teller.count(file.size)
        else:
            fetch(listing, file, teller.count, stop)

    _for_each(_distinct(files), bring, stop)
    _link(listing, files)


def _verified(listing: Listing, file: RemoteFile, teller: _Teller, stop: threading.Event) -> bool:
    """Whether a file is there and right. A damaged one is removed."""
    names = [listing.folder / each.name for each in listing.files if each.digest == file.digest]
    places = [listing.blob(file), *names]
    there = {place.resolve() for place in places if place.exists()}
    if there and all(is_whole(place, file, stop) for place in there):
        return True
    for place in places:
        place.unlink(missing_ok=True)
    if there:
        teller.damaged(file)
    return False


def _for_each(files: Sequence[RemoteFile], work: Callable[[RemoteFile], None], stop: threading.Event) -> None:
    """Do work on files, several at once; the first error ends all. Ctrl-C does so too, and waits for nobody."""
    waiting: queue.SimpleQueue[RemoteFile] = queue.SimpleQueue()
    for file in files:
        waiting.put(file)
    errors: list[Exception] = []

    def run() -> None:
        with contextlib.suppress(queue.Empty, Stopped):
            while not stop.is_set():
                try:
                    work(waiting.get_nowait())
                except (queue.Empty, Stopped):
                    raise
                except Exception as error:
                    errors.append(error)
                    stop.set()

    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(_AT_ONCE, len(files)))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        stop.set()
        raise
    if errors:
        raise errors[0]


def _link(listing: Listing, files: Sequence[RemoteFile]) -> None:
    """Have the Hub's client put contents under their names in the model folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    patterns = [glob.escape(file.name) for file in files]
    try:
        snapshot_download(listing.model.repository, revision=listing.commit, allow_patterns=patterns)
    except Exception as error:  # see `list_files`
        if getattr(error, "errno", None):  # of the disk
            raise
        raise explained(listing.model, error) from error
    for file in files:
        name, blob = listing.folder / file.name, listing.blob(file)
        if not name.exists() or name.stat().st_size != file.size:
            raise DownloadFailed(f"{listing.model}: {file.name} is not in the cache; `selfdraft pull` once more")
        if not name.is_symlink() and blob.exists() and not os.path.samefile(name, blob):
            blob.unlink()  # a disk without links: the name has a copy of its own


def _bytes_there(listing: Listing, file: RemoteFile) -> int:
    for place in (listing.folder / file.name, listing.blob(file), partial_path(listing.blob(file))):
        if place.exists():
            return min(place.stat().st_size, file.size)
    return 0


def _distinct(files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """One of each content."""
    return list({file.digest: file for file in files}.values())
