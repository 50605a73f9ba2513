"""Records and their blobs on disk, under a cap. One process writes, others may read. Knows no arrays and no threads but
for one lock: writing is for one thread, reading and forgetting for any.
"""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading
from collections.abc import Collection
from pathlib import Path

from .catalogue import Catalogue, Entry
from .folder import Blob, Folder
from .index import Index, Row, is_corrupt

__all__ = ["Archive", "NoRoom"]

log = logging.getLogger(__name__)

_SLACK = 2**16  # bytes of pages that a transaction changes beside the rows themselves
_MEASURED_EVERY = 32  # records; what others put into the folder counts, too


class NoRoom(Exception):
    """A record does not fit under the cap."""


class Archive:
    """What the folder holds.

    Args:
        root: the folder that the user named.
        max_bytes: most bytes of all of it.
        writing: be the one that writes; else nothing there is changed.

    Attributes:
        catalogue: what is there; guarded by `lock`.
        evicted: how many records left for others.
        incomplete: numbers of rows that were no sound record when it was opened.
        anew: whether the index was damaged, so that everything is lost.

    Raises:
        Held: another process writes. OSError, sqlite3.Error: it cannot be opened.
    """

    def __init__(self, root: Path, max_bytes: int, *, writing: bool) -> None:
        self.folder = Folder(root)
        self.max_bytes = max_bytes
        self.writing = writing
        self.lock = threading.RLock()
        self.catalogue = Catalogue()
        self.evicted = 0
        self.incomplete: frozenset[int] = frozenset()
        self.anew = False
        self._used: dict[int, int] = {}  # by number; yet to be written, as the next two
        self._rows_to_go: set[int] = set()
        self._blobs_to_go: set[str] = set()
        self._until_measured = _MEASURED_EVERY
        self._index: Index | None = None
        if writing:
            self._begin()
        else:
            self._look()

    def _begin(self) -> None:
        self.folder.prepare()
        self.folder.lock()
        try:
            try:
                self._index = Index(self.folder.index, writing=True)
                self._take_in(self._index)
            except sqlite3.Error as error:
                if not is_corrupt(error):
                    raise
                self._start_anew(error)
            self.folder.measure()
        except BaseException:
            self.close()
            raise

    def _look(self) -> None:
        self.folder.check_owner()
        if self.folder.index.exists():
            index = Index(self.folder.index, writing=False)
            try:
                self._take_in(index)
            finally:
                index.close()
        self.folder.measure()

    def _take_in(self, index: Index) -> None:
        kept, damaged = index.load()
        refused = self.catalogue.fill(kept, lambda row: all(self.folder.has(Blob(*blob)) for blob in row.blobs.items()))
        self.incomplete = frozenset((*damaged, *refused))
        self._rows_to_go = set(self.incomplete)
        if self.incomplete:
            log.info("%d records in %s are incomplete; they are forgotten", len(self.incomplete), self.folder.root)

    def _start_anew(self, reason: object) -> None:
        log.warning("the index of the session cache in %s is damaged (%s); it begins anew", self.folder.root, reason)
        self.anew = True
        with self.lock:
            self.catalogue.clear()
        self._used, self._rows_to_go, self._blobs_to_go = {}, set(), set()
        if self._index is not None:
            self._index.close()
        self.folder.prepare()
        self.folder.remove_index()
        self._index = Index(self.folder.index, writing=True)
        self.folder.sweep(())

    def recover(self, error: BaseException) -> None:
        """After an error: begin anew if the index is what failed, or somebody deleted the folder.

        Raises:
            Held, OSError, sqlite3.Error: that does not go.
        """
        if not self.folder.locked:
            self.folder.unlock()
            self.folder.prepare()
            self.folder.lock()
            self._start_anew("it was deleted")
        elif isinstance(error, sqlite3.Error) and is_corrupt(error):
            self._start_anew(error)

    def reconcile(self) -> int:
        """Delete what no record needs, then what is too much.

        Returns:
            How many files no record knew.
        """
        with self.lock:
            known = set(self.catalogue.references)
        gone = self.folder.sweep(known)
        self.tidy()
        self.make_room(0)
        return gone

    def entries(self) -> list[Entry]:
        """All records that are there, each behind its parent."""
        with self.lock:
            return [entry for entry in self.catalogue.entries.values() if entry.there]

    def touch(self, entry: Entry) -> None:
        """Count a record as used now, if it is there."""
        with self.lock:
            if entry.there:
                self.catalogue.touch(entry)
                self._used[entry.number] = entry.used

    @property
    def touched(self) -> int:
        """How many records were used since that was last written."""
        return len(self._used)

    def forget(self, entry: Entry) -> list[Entry]:
        """Let a record go, with all behind it; `tidy` deletes them from disk.

        Returns:
            What went; none if it was forgotten before.
        """
        with self.lock:
            gone = self.catalogue.drop(entry)
            self._rows_to_go.update(each.number for each in gone)
            self._blobs_to_go.update(name for each in gone for name in each.row.blobs)
        return gone

    @property
    def untidy(self) -> bool:
        """Whether there is something that `tidy` deletes."""
        return bool(self._rows_to_go or self._blobs_to_go)

    def tidy(self) -> None:
        """Delete what was let go, and write down what was used. Blobs go first: on a full disk the rest needs room.

        Raises:
            OSError, sqlite3.Error: that does not go now.
        """
        assert self._index is not None
        with self.lock:
            unknown = self._blobs_to_go - self.catalogue.references.keys()
            rows, used = set(self._rows_to_go), dict(self._used)
        for name in unknown:
            self.folder.remove(name)
        if rows or used:
            self._index.update(rows, used)
        with self.lock:
            self._blobs_to_go -= unknown | self.catalogue.references.keys()  # as they are now
            self._rows_to_go -= rows
            self._used = {number: when for number, when in self._used.items() if used.get(number) != when}

    def make_room(
        self, nbytes: int, index_bytes: int = 0, spared: Collection[Entry] = (), *, scope: str | None = None
    ) -> None:
        """Let records go until a new one fits under the cap (see `Catalogue.oldest`); none if it never will.

        Args:
            nbytes, index_bytes: of it; 0 if it is only about what is there.
            spared: what must stay.
            scope: whose it is.

        Raises:
            NoRoom: it does not fit. OSError, sqlite3.Error: they cannot be deleted now.
        """
        if not self.folder.locked:
            raise FileNotFoundError(errno.ENOENT, "was deleted while it was in use", str(self.folder.root))
        if self.untidy:
            self.tidy()
        self._until_measured -= 1
        if self._until_measured < 0:
            self._until_measured = _MEASURED_EVERY
            self.folder.measure()
        with self.lock:
            largest = max((entry.row.in_index for entry in self.catalogue.entries.values()), default=0)
        with_new = self.max_bytes - nbytes - _in_log(max(largest, index_bytes))
        if self.folder.bytes > with_new:
            self.folder.remove_other_layouts()
        with self.lock:
            oldest, enough = self.catalogue.oldest(
                self.folder.bytes - with_new, spared, {scope: nbytes} if scope is not None else None
            )
        most = with_new if enough else self.max_bytes - _in_log(largest)
        for entry in oldest:
            if self.folder.bytes <= most:
                break
            self.evicted += len(self.forget(entry))
            self.tidy()
        if nbytes and not enough:
            raise NoRoom

    def add(self, row: Row) -> Entry | None:
        """Store a record whose blobs are stored.

        Returns:
            It, or the same that is there already; None if its parent is gone, so that it is not stored.

        Raises:
            OSError, sqlite3.Error: it cannot be stored.
        """
        assert self._index is not None
        with self.lock:
            if row.key in self.catalogue.entries:
                return self.catalogue.entries[row.key]
            if row.parent and row.parent not in self.catalogue.entries:
                return None
            entry = self.catalogue.add(row)
        try:
            entry.number = self._index.add(row, entry.used)
        except BaseException:
            self.forget(entry)
            raise
        with self.lock:
            entry.there = self.catalogue.entries.get(row.key) is entry
            if not entry.there:  # its parent went meanwhile
                self._rows_to_go.add(entry.number)
        return entry

    def discard(self, blobs: Collection[Blob]) -> None:
        """Delete blobs that were stored for a record which is not, after all."""
        with self.lock:
            self._blobs_to_go.update(blob.name for blob in blobs)

    def close(self) -> None:
        """Give the index and the folder back."""
        if self._index is not None:
            self._index.close()
            self._index = None
        self.folder.unlock()


def _in_log(index_bytes: int) -> int:
    """Bytes that a row may take for a moment beside itself: it goes through the log, and others are moved for it."""
    return _SLACK + 3 * index_bytes
