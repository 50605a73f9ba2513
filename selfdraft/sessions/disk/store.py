"""The SSD tier as the bank sees it: boundaries are read at once and written behind. Knows arrays and records, no tree.

Whatever the disk does, the caller meets no error but `Damaged`, which is a miss.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ...engine import Cut
from ..payload import Arrays, expanded, nbytes, quantised
from .archive import Archive
from .catalogue import Entry
from .folder import Damaged, Held
from .index import Part, Row
from .shared import Opened, Shared
from .tensors import join
from .writer import Offer, Stored, Writer

__all__ = ["Damaged", "DiskFigures", "DiskStore", "Record", "Stored"]

log = logging.getLogger(__name__)

_UNIT = 32 * 2**20  # bytes of a file, and of what is written between two looks at whether requests run
_PENDING = 256 * 2**20


@dataclass(frozen=True, eq=False)
class Record:
    """A boundary on disk, but for its arrays.

    Attributes:
        key, parent: its own key, and that of the record it stands behind, if it does.
        scope: whose tokens these are.
        ids: tokens since the parent's end.
        cuts, drafts: see `engine.Boundary`.
        reply: whether it is a reply's end.
        nbytes: bytes of its files.
        used: when it was last used: the larger, the later.
    """

    key: str
    parent: str | None
    scope: str
    ids: NDArray[np.int32]
    cuts: tuple[Cut, ...]
    drafts: bool
    reply: bool
    nbytes: int
    used: int


@dataclass(frozen=True)
class DiskFigures:
    """What the store did since it was opened, and what is there now.

    Attributes:
        writing: whether this process writes there.
        bytes: of the whole folder. records: of any model.
        pending_bytes: of arrays that are yet to be written.
        written_bytes, read_bytes: of files.
        refused: boundaries that were not taken: too many at once, the hour's budget, the cap, a rest after an error.
        failed: errors of the disk.
        evicted: records that left for others. damaged: records that were not what was written.
    """

    writing: bool
    bytes: int
    records: int
    pending_bytes: int
    written_bytes: int
    read_bytes: int
    refused: int
    failed: int
    evicted: int
    damaged: int


class DiskStore:
    """Boundaries of one model on disk. Called from one thread, but for `figures`.

    Opening it never fails: at worst nothing is there, and nothing is taken.

    Args:
        root: the folder; made if it is not there.
        identity: of the model and all that its arrays depend on, as hex.
        max_bytes: most bytes of the whole folder.
        writes_per_hour: most bytes written in an hour; what would be more is not taken.
        model: its name, for people.
        read: whether to hand out what is there.
        busy: whether requests run; called from another thread.
        clock: monotonic time in seconds.
        unit: most bytes of a file.
        max_pending: most bytes of arrays that wait to be written, if more than one boundary waits.
        owners: how many scopes there may be: each has an equal part of what waits and of an hour's writes.
        kv_bits: 8 to store spans quantised, smaller but not exact; None as they are. Part of the identity.
        shared: of all stores of this process on the folder, where there are several: the bounds of the first hold, and
            the figures are those of all.
    """

    def __init__(
        self,
        root: Path,
        identity: str,
        *,
        max_bytes: int,
        writes_per_hour: int,
        model: str = "",
        read: bool = True,
        busy: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        unit: int = _UNIT,
        max_pending: int = _PENDING,
        owners: int = 1,
        kv_bits: int | None = None,
        shared: Shared | None = None,
    ) -> None:
        self._identity = identity if kv_bits is None else f"{identity}-kv{kv_bits}"
        self._model = model
        self._kv_bits = kv_bits
        self._reads = read
        self._read_bytes = self._damaged = 0
        self._shared: Shared | None = shared or Shared()
        write = partial(
            Writer,
            writes_per_hour=writes_per_hour,
            max_pending=max_pending,
            owners=owners,
            unit=unit,
            busy=busy,
            clock=clock,
        )
        self._archive, self._writer = self._shared.take(lambda: _opened(root, max_bytes, write))

    @property
    def reads(self) -> bool:
        """Whether what is there may be read, or only more be written."""
        return self._reads

    def records(self) -> list[tuple[Record, Stored]]:
        """All records of this identity, each behind its parent."""
        if self._archive is None or not self._reads:
            return []
        entries = self._archive.entries()
        return [(_record(entry), Stored(entry)) for entry in entries if entry.row.identity == self._identity]

    def read_span(self, stored: Stored) -> dict[str, mx.array]:
        """What a boundary adds to the one before it.

        Raises:
            Damaged: it is not there any more, or not what was written; then it and all behind it are forgotten.
        """
        return expanded(self._read(stored, lambda row: row.span))

    def read_moment(self, stored: Stored) -> dict[str, mx.array]:
        """What is of a boundary's last token alone; see `read_span`."""
        return self._read(stored, lambda row: row.moment)

    def offer(
        self,
        *,
        parent: Stored | None,
        scope: str,
        ids: Sequence[int] | NDArray[np.int32],
        cuts: Sequence[Cut],
        drafts: bool,
        reply: bool,
        span: Arrays,
        moment: Arrays,
    ) -> Stored:
        """Have a boundary written, some time. Returns at once.

        Args:
            parent: what it stands behind; None if it begins.
            scope: whose tokens these are. It is stored and shown: a digest, never a secret.
            ids: tokens since the parent's end.
            cuts, drafts, reply: see `Record`.
            span, moment: evaluated arrays, which nobody writes into any more. Without a moment no row goes on from
                this boundary, but from those behind it.
        """
        if self._writer is None:
            return Stored(failed=True)
        if self._kv_bits is not None:
            span = quantised(span, self._kv_bits)
        return self._writer.offer(
            Offer(
                identity=self._identity,
                model=self._model,
                parent=parent,
                scope=scope,
                ids=np.asarray(ids, dtype="<i4").tobytes(),
                cuts=tuple((int(cut.end), bool(cut.chunk)) for cut in cuts),
                drafts=drafts,
                reply=reply,
                span=span,
                moment=moment,
                nbytes=nbytes(span) + nbytes(moment),
            )
        )

    def touch(self, stored: Stored) -> None:
        """Count a boundary as used now; what it stands behind stays as long as it does."""
        if self._archive and stored.entry:
            self._archive.touch(stored.entry)

    @property
    def figures(self) -> DiskFigures:
        """See `DiskFigures`."""
        archive, writer = self._archive, self._writer
        return DiskFigures(
            writing=writer is not None and writer.writing,
            bytes=archive.folder.bytes if archive else 0,
            records=len(archive.catalogue.entries) if archive else 0,
            pending_bytes=writer.pending_bytes if writer else 0,
            written_bytes=writer.written_bytes if writer else 0,
            read_bytes=self._read_bytes,
            refused=writer.refused if writer else 0,
            failed=writer.failed if writer else 0,
            evicted=archive.evicted if archive else 0,
            damaged=self._damaged,
        )

    def flush(self, timeout: float) -> bool:
        """Wait until everything taken is written or has failed.

        Returns:
            False if that took longer than `timeout` seconds.
        """
        return self._writer is None or self._writer.flush(timeout)

    def close(self, timeout: float = 10.0) -> None:
        """Write what was taken, for `timeout` seconds at most, and give the folder back."""
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.give(timeout)

    def _read(self, stored: Stored, part_of: Callable[[Row], Part]) -> dict[str, mx.array]:
        archive, entry = self._archive, stored.entry
        if archive is None or entry is None or not entry.there:
            raise Damaged("it is not on disk")
        part = part_of(entry.row)
        try:
            return join(self._contents(archive, part), part.split)
        except (Damaged, RuntimeError, ValueError, KeyError, TypeError) as error:
            if archive.forget(entry):  # else it was evicted while it was read
                self._damaged += 1
                log.warning("a stored prefix is lost: %s", error)
                if self._writer:
                    self._writer.wake()
            raise Damaged(str(error)) from error

    def _contents(self, archive: Archive, part: Part) -> Iterator[bytes]:
        for blob in part.blobs:
            content = archive.folder.read(blob)
            self._read_bytes += len(content)
            yield content


def _opened(root: Path, max_bytes: int, write: Callable[[Archive], Writer]) -> Opened:
    """The folder, to write there or, if that does not go, to read there."""
    try:
        archive = Archive(root, max_bytes, writing=True)
        return archive, write(archive)
    except Held as held:
        log.warning("%s: what is there is read, and nothing is stored", held)
    except (OSError, sqlite3.Error) as error:
        log.warning("the session cache in %s cannot be written (%s): what is there is read", root, error)
    try:
        return Archive(root, max_bytes, writing=False), None
    except (OSError, sqlite3.Error) as error:
        log.debug("nor can it be read: %s", error)
        return None, None


def _record(entry: Entry) -> Record:
    row = entry.row
    return Record(
        key=row.key,
        parent=row.parent,
        scope=row.scope,
        ids=np.frombuffer(row.ids, dtype="<i4"),
        cuts=tuple(Cut(end, chunk) for end, chunk in row.cuts),
        drafts=row.drafts,
        reply=row.reply,
        nbytes=row.nbytes,
        used=entry.used,
    )
