"""The index of the session cache: a row for each record, in sqlite. Knows how rows are kept and checked, no arrays.

A record's key is the hash of all that it says, its parent's key and its blobs' names among that, so a row cannot change
without being found out, nor stand behind another parent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from .folder import LAYOUT, Blob, Damaged, is_name

__all__ = ["Index", "Kept", "Part", "Row", "is_corrupt"]

log = logging.getLogger(__name__)

_MOST_USES = 2**62  # sqlite counts up to 2 ** 63

_TABLE = """CREATE TABLE IF NOT EXISTS records (
    id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT, head BLOB, ids BLOB, used INTEGER
)"""


@dataclass(frozen=True)
class Part:
    """A dict of arrays, as blobs.

    Attributes:
        blobs: where the arrays are.
        split: arrays that lie in several pieces, and their shapes.
    """

    blobs: tuple[Blob, ...] = ()
    split: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """What a record says.

    Attributes:
        identity: whose arrays these are: model, precision and so on, as a hash.
        model: its name, for people.
        scope: whose tokens these are.
        parent: key of the record before it; None if it begins.
        ids: tokens since the parent's end, int32, little-endian.
        cuts: (end, chunk) of all chunks from the first token on.
        drafts: whether the spans up to here hold the head's history.
        reply: whether it is a reply's end.
        span, moment: its arrays.
    """

    identity: str
    model: str
    scope: str
    parent: str | None
    ids: bytes = field(repr=False)
    cuts: tuple[tuple[int, bool], ...]
    drafts: bool
    reply: bool
    span: Part
    moment: Part

    @cached_property
    def head(self) -> bytes:
        """All but the ids, as JSON in one line."""
        content = {**asdict(self), "layout": LAYOUT, "ids": len(self.ids)}
        return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()

    @cached_property
    def key(self) -> str:
        """Its name."""
        return _key(self.head, self.ids)

    @property
    def blobs(self) -> dict[str, int]:
        """Names and sizes of its blobs."""
        return dict((*self.span.blobs, *self.moment.blobs))

    @property
    def nbytes(self) -> int:
        """Bytes of its blobs."""
        return sum(self.blobs.values())

    @property
    def in_index(self) -> int:
        """Bytes of its row, about."""
        return len(self.head) + len(self.ids)

    @classmethod
    def parse(cls, key: object, head: object, ids: object) -> Row:
        """The row that was stored under a key.

        Raises:
            Damaged: it was another one.
        """
        if not isinstance(head, bytes) or not isinstance(ids, bytes) or _key(head, ids) != key:
            raise Damaged("a row of the index is not what was written")
        try:
            content = json.loads(head)
            del content["layout"]
            cuts = tuple((int(end), bool(chunk)) for end, chunk in content.pop("cuts"))
            span, moment = _part(content.pop("span")), _part(content.pop("moment"))
            return cls(**{**content, "ids": ids, "cuts": cuts, "span": span, "moment": moment})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Damaged(f"a row of the index cannot be understood: {error}") from error


class Kept(NamedTuple):
    """A row with its number in the table and when it was last used: the larger, the later."""

    number: int
    row: Row
    used: int


class Index:
    """Rows on disk. Every change is one transaction, after which the write-ahead log is empty again.

    Args:
        path: the file; the folder must be there.
        writing: make it where there is none; else it must be there, and stays as it is.

    Raises:
        OSError, sqlite3.Error: it cannot be opened; see `is_corrupt`.
    """

    def __init__(self, path: Path, *, writing: bool) -> None:
        if writing:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            os.fchmod(descriptor, 0o600)  # the files beside it get the same
            os.close(descriptor)
        mode = "rw" if writing else "ro"
        try:
            self._connection = _connect(path, f"mode={mode}")
            self._begin(writing)
        except sqlite3.OperationalError:
            if writing:
                raise
            self._connection = _connect(path, "immutable=1")  # where not even a reader's lock can be written
            self._begin(writing)

    def _begin(self, writing: bool) -> None:
        try:
            if writing:
                for pragma in ("auto_vacuum=FULL", "journal_mode=WAL", "synchronous=NORMAL"):
                    self._connection.execute(f"PRAGMA {pragma}")
                self._connection.execute(_TABLE)
            (verdict,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != b"ok":
                raise sqlite3.DatabaseError(f"database disk image is malformed: {verdict!r}")
        except BaseException:
            self._connection.close()
            raise

    def load(self) -> tuple[list[Kept], list[int]]:
        """All rows that are what was written, and the numbers of the others."""
        kept, damaged = [], []
        for number, key, head, ids, used in self._connection.execute("SELECT id, key, head, ids, used FROM records"):
            try:
                if not isinstance(used, int) or not 0 <= used < _MOST_USES or not isinstance(key, bytes):
                    raise Damaged("a row of the index is not what was written")
                kept.append(Kept(number, Row.parse(key.decode("ascii", "replace"), head, ids), used))
            except Damaged:
                damaged.append(number)
        return kept, damaged

    def add(self, row: Row, used: int) -> int:
        """Store a row.

        Returns:
            Its number.
        """
        values = (row.key, row.head, row.ids, used)
        return self._change([("INSERT INTO records (key, head, ids, used) VALUES (?, ?, ?, ?)", [values])])

    def update(self, removed: Iterable[int], used: Mapping[int, int]) -> None:
        """Delete rows, by number, and say when others were used."""
        remove = ("DELETE FROM records WHERE id = ?", [(number,) for number in removed])
        use = ("UPDATE records SET used = ? WHERE id = ?", [(when, number) for number, when in used.items()])
        self._change([remove, use])

    def close(self) -> None:
        """Give the file back."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()

    def _change(self, statements: list[tuple[str, list[tuple[Any, ...]]]]) -> int:
        number = 0
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            for statement, rows in statements:
                for values in rows:
                    number = self._connection.execute(statement, values).lastrowid or 0
            self._connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise
        with contextlib.suppress(sqlite3.OperationalError):  # it is stored; the log can be emptied next time
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return number


def is_corrupt(error: sqlite3.Error) -> bool:
    """Whether an index that raises this is no index of ours, as opposed to one that cannot be read or written now."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)
    return code & 0xFF in (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT)


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{quote(str(path))}?{mode}", uri=True, isolation_level=None, check_same_thread=False, timeout=1.0
    )
    connection.text_factory = bytes  # a flipped bit may be no UTF-8
    return connection


def _key(head: bytes, ids: bytes) -> str:
    return hashlib.sha256(head + b"\n" + ids).hexdigest()


def _part(content: Any) -> Part:
    blobs = tuple(Blob(name, int(size)) for name, size in content["blobs"])
    if not all(is_name(blob.name) for blob in blobs):
        raise ValueError(f"no name of a blob: {blobs}")
    return Part(blobs, {name: tuple(shape) for name, shape in content["split"].items()})
