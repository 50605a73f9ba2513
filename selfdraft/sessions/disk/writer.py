"""The thread that writes boundaries to disk, behind a bounded queue: it yields to requests, keeps to an hour's budget,
and rests after an error. Knows arrays only as what is to be written.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..payload import Arrays
from .archive import Archive, NoRoom
from .catalogue import Entry
from .folder import Blob, Held
from .index import Part, Row
from .tensors import Unit, split

__all__ = ["Offer", "Stored", "Writer"]

log = logging.getLogger(__name__)

_BLOCK = 4096  # of a file system: what a file takes beside its bytes, and a folder
_HOUR = 3600.0
_REST = 60.0  # seconds without writing after an error
_GLANCE, _PATIENCE = 0.02, 100  # seconds between looks, and how many, before a unit is written although requests run
_TOUCHED = 256  # records used until that is written down


class Stored:
    """What the disk holds of a boundary. Shared by the bank and the thread that writes.

    Attributes:
        waiting: it is yet to be written.
        failed: it never will be.
        entry: its record, even if that has left; for this package.
    """

    def __init__(self, entry: Entry | None = None, *, waiting: bool = False, failed: bool = False) -> None:
        self.entry = entry
        self.waiting = waiting
        self.failed = failed

    @property
    def key(self) -> str | None:
        """Of its record while that is there; None before, and again once it has left or was found damaged."""
        return self.entry.row.key if self.entry and self.entry.there else None

    @property
    def whole(self) -> bool:
        """Whether its moment is there, too, so that a row can go on from it."""
        return self.key is not None and self.entry is not None and bool(self.entry.row.moment.blobs)


@dataclass(frozen=True, eq=False)
class Offer:
    """A boundary to be written; see `DiskStore.offer`. `identity` and `model` say whose it is."""

    identity: str
    model: str
    parent: Stored | None
    scope: str
    ids: bytes
    cuts: tuple[tuple[int, bool], ...]
    drafts: bool
    reply: bool
    span: Arrays
    moment: Arrays
    nbytes: int


class Writer:
    """Writes to an archive, in the order of what is offered.

    Args:
        archive: closed at the end.
        writes_per_hour, max_pending, owners, unit: bounds; see `DiskStore`.
        busy, clock: see there.
    """

    def __init__(
        self,
        archive: Archive,
        *,
        writes_per_hour: int,
        max_pending: int,
        owners: int,
        unit: int,
        busy: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._archive = archive
        self._writes_per_hour = writes_per_hour // owners  # of each of them
        self._max_pending = max_pending // owners
        self._unit = unit
        self._busy = busy
        self._clock = clock
        self.written_bytes = self.refused = self.failed = 0
        self._pending: Counter[str] = Counter()  # bytes that wait, by scope
        self._changed = threading.Condition()
        self._queue: deque[tuple[Offer, Stored]] = deque()
        self._hurry = threading.Event()
        self._working = True
        self._closed = False
        self._spent: deque[tuple[float, str, int]] = deque()  # when, whose, how many bytes
        self._resting_since: float | None = None
        self._told: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="session-writer", daemon=True)
        self._thread.start()

    @property
    def pending_bytes(self) -> int:
        """Of arrays that are yet to be written."""
        return self._pending.total()

    @property
    def writing(self) -> bool:
        """Whether it still takes offers at all."""
        return not self._closed

    def offer(self, offer: Offer) -> Stored:
        """Queue a boundary, or refuse it."""
        with self._changed:
            if not self._takes(offer):
                self.refused += 1
                return Stored(failed=True)
            stored = Stored(waiting=True)
            self._queue.append((offer, stored))
            self._pending[offer.scope] += offer.nbytes
            self._changed.notify_all()
        return stored

    def wake(self) -> None:
        """There may be something to tidy up."""
        with self._changed:
            self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until everything taken is written or has failed; requests are not waited for meanwhile.

        Returns:
            False if that took longer than `timeout` seconds.
        """
        self._hurry.set()
        try:
            with self._changed:
                self._changed.notify_all()
                return self._changed.wait_for(lambda: self._closed or not (self._working or self._due()), timeout)
        finally:
            self._hurry.clear()

    def close(self, timeout: float) -> None:
        """Flush, then end; what is left by then has failed."""
        self.flush(timeout)
        with self._changed:
            self._closed = True
            self._hurry.set()
            self._changed.notify_all()
        self._thread.join(timeout)

    def _takes(self, offer: Offer) -> bool:
        parent = offer.parent
        if self._closed or self._resting() or (parent and parent.key is None and not parent.waiting):
            return False
        pending = self._pending[offer.scope]
        if pending and pending + offer.nbytes > self._max_pending:
            return False
        now = self._clock()
        while self._spent and not 0 <= now - self._spent[0][0] < _HOUR:
            self._spent.popleft()
        spent = sum(nbytes for _, scope, nbytes in self._spent if scope == offer.scope)
        return spent + pending + offer.nbytes <= self._writes_per_hour

    def _resting(self) -> bool:
        return self._resting_since is not None and 0 <= self._clock() - self._resting_since < _REST

    def _due(self) -> bool:
        """Whether there is something to do."""
        if self._queue:
            return True
        touched = self._archive.touched >= (1 if self._hurry.is_set() else _TOUCHED)
        return not self._resting() and (touched or self._archive.untidy)

    def _run(self) -> None:
        with self._errors():
            self._archive.reconcile()
        while True:
            with self._changed:
                self._working = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or self._due(), _REST)
                if self._closed:
                    break
                self._working = True
                offer, stored = self._queue.popleft() if self._queue else (None, None)
            if offer and stored:
                self._write(offer, stored)
                del offer  # with its arrays
            elif not self._resting():
                with self._errors():
                    self._archive.tidy()
        for _, stored in self._queue:
            stored.waiting, stored.failed = False, True
        self._queue.clear()
        self._archive.close()

    def _write(self, offer: Offer, stored: Stored) -> None:
        if not self._resting():
            with self._errors():
                stored.entry = self._keep(offer)
        stored.failed = stored.entry is None
        stored.waiting = False
        with self._changed:
            self._pending[offer.scope] -= offer.nbytes

    def _keep(self, offer: Offer) -> Entry | None:
        """Write a boundary: its blobs, then its row; None if what it stands behind is gone."""
        parent = offer.parent.entry if offer.parent else None
        if offer.parent and (parent is None or not parent.there):
            return None
        span, cut_span = split(offer.span, self._unit)
        moment, cut_moment = split(offer.moment, self._unit)
        named = len(span + moment) + len(cut_span) + len(cut_moment) + 8
        in_index = len(offer.ids) + 16 * len(offer.cuts) + 128 * named
        room = in_index + 4 * _BLOCK + sum(unit.size + 2 * _BLOCK for unit in span + moment)
        self._archive.make_room(room, in_index, parent.path if parent else (), scope=offer.scope)
        fresh: list[Blob] = []
        entry = None
        try:
            row = Row(
                identity=offer.identity,
                model=offer.model,
                scope=offer.scope,
                parent=parent.row.key if parent else None,
                ids=offer.ids,
                cuts=offer.cuts,
                drafts=offer.drafts,
                reply=offer.reply,
                span=Part(tuple(self._put(unit, offer.scope, fresh) for unit in span), cut_span),
                moment=Part(tuple(self._put(unit, offer.scope, fresh) for unit in moment), cut_moment),
            )
            entry = self._archive.add(row)
        finally:
            if entry is None:
                self._archive.discard(fresh)
                with contextlib.suppress(OSError, sqlite3.Error):  # at once: the disk may be full
                    self._archive.tidy()
        self._told.discard("error")
        return entry

    def _put(self, unit: Unit, scope: str, fresh: list[Blob]) -> Blob:
        for _ in range(_PATIENCE):
            if self._hurry.is_set() or not self._busy():
                break
            self._hurry.wait(_GLANCE)
        blob, written = self._archive.folder.write(unit.content)
        if written:
            fresh.append(blob)
            with self._changed:
                self.written_bytes += blob.size
                self._spent.append((self._clock(), scope, blob.size))
        return blob

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Errors end here. Those of the disk begin a rest."""
        root = self._archive.folder.root
        try:
            yield
        except NoRoom:
            self.refused += 1
            self._tell(
                "room",
                f"{self._archive.max_bytes:,} bytes are too few for what is to be stored in {root}; "
                "give the session cache more (--ssd-session-cache-max-bytes)",
            )
        except (OSError, sqlite3.Error) as error:
            self.failed += 1
            self._resting_since = self._clock()
            self._tell("error", f"the session cache in {root} cannot be written ({error}); tried again after a minute")
            self._recover(error)
        except Exception:
            self.failed += 1
            log.exception("a boundary was not stored")

    def _recover(self, error: Exception) -> None:
        try:
            self._archive.recover(error)
        except Held as held:
            self._tell("held", f"{held}: nothing more is stored there by this one")
            with self._changed:
                self._closed = True
        except (OSError, sqlite3.Error):
            log.debug("the session cache did not recover", exc_info=True)  # the next error tries again

    def _tell(self, what: str, message: str) -> None:
        """Log it once."""
        if what not in self._told:
            self._told.add(what)
            log.warning("%s", message)
