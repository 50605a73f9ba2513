"""What the command line does with the session cache: look, check, empty, tidy up. Imports no MLX; knows no model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...errors import InvalidRequest
from .archive import Archive
from .catalogue import Entry
from .folder import Blob, Damaged, Folder, Held

__all__ = ["Checked", "Group", "Held", "Survey", "check", "collect", "empty", "survey"]


@dataclass(frozen=True)
class Group:
    """Records of one model and one owner.

    Attributes:
        identity: of the model and all that its arrays depend on.
        model: its name.
        scope: whose tokens these are.
        records, tokens: how many.
        bytes: of the files that these records need; files may be shared between groups.
        used: when one of them was last used: the larger, the later.
    """

    identity: str
    model: str
    scope: str
    records: int
    tokens: int
    bytes: int
    used: int


@dataclass(frozen=True)
class Survey:
    """What a folder holds.

    Attributes:
        bytes: of the whole folder.
        groups: the one used last comes first.
        orphans: files that no sound record needs; a process that writes may be about to name them.
        incomplete: records that cannot be read whole.
    """

    bytes: int
    groups: list[Group]
    orphans: int
    incomplete: int


@dataclass(frozen=True)
class Checked:
    """What a check found.

    Attributes:
        records, bytes: looked at.
        damaged: records that are not what was written, and those behind them.
        index: whether the index itself was damaged, so that nothing could be looked at.
        dropped: whether what is damaged was deleted; not while another process writes.
    """

    records: int
    bytes: int
    damaged: int
    index: bool
    dropped: bool


def survey(root: Path) -> Survey:
    """Say what is there. Changes nothing.

    Raises:
        OSError, sqlite3.Error: it cannot be read.
    """
    archive = Archive(root, 0, writing=False)
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in archive.entries():
        groups.setdefault((entry.row.identity, entry.row.scope), []).append(entry)
    found = [_group(entries) for entries in groups.values()]
    orphans = len(archive.folder.unknown(archive.catalogue.references))
    ordered = sorted(found, key=lambda group: -group.used)
    return Survey(archive.folder.bytes, ordered, orphans, len(archive.incomplete))


def check(root: Path) -> Checked:
    """Hash every file, and drop the records that are damaged, if no other process writes.

    Raises:
        OSError, sqlite3.Error: it cannot be read.
    """
    if not Folder(root).index.exists():
        return Checked(0, 0, 0, index=False, dropped=True)
    try:
        archive = Archive(root, 0, writing=True)
    except (Held, OSError):
        archive = Archive(root, 0, writing=False)
    try:
        entries = archive.entries()
        bad = _damaged(archive, entries)
        damaged = archive.incomplete | {entry.number for entry in bad}
        if damaged and not archive.writing:  # what another process evicted meanwhile is gone from the index, too
            again = Archive(root, 0, writing=False)
            damaged &= again.incomplete | {entry.number for entry in _damaged(again, again.entries())}
        if archive.writing:
            for entry in bad:
                archive.forget(entry)
            archive.tidy()
        size = sum(_sizes(entries).values())
        records = len(entries) + len(archive.incomplete)
        return Checked(records, size, len(damaged), index=archive.anew, dropped=archive.writing)
    finally:
        archive.close()


def empty(root: Path) -> int:
    """Delete everything.

    Returns:
        Bytes that this set free.

    Raises:
        Held: another process writes. OSError: it cannot be deleted.
    """
    folder = Folder(root)
    if not root.exists():
        return 0
    folder.check_owner()
    folder.lock()
    try:
        before = folder.measure()
        folder.clear()
        return before - folder.bytes
    finally:
        folder.unlock()


def collect(root: Path, max_bytes: int, keep: str) -> int:
    """Delete what nobody needs, and what is too much.

    Args:
        max_bytes: most bytes of the whole folder.
        keep: identities that stay: those that begin so; "last" for the one used last; "all".

    Returns:
        Bytes that this set free.

    Raises:
        InvalidRequest: no identity begins like `keep`. Held: another process writes. OSError, sqlite3.Error: it cannot
            be changed.
    """
    if not root.exists():
        return 0
    archive = Archive(root, max_bytes, writing=True)
    try:
        before = archive.folder.bytes
        entries = archive.entries()
        for entry in _others(entries, keep):
            archive.forget(entry)
        archive.reconcile()
        archive.folder.remove_other_layouts()
        return before - archive.folder.bytes
    finally:
        archive.close()


def _others(entries: list[Entry], keep: str) -> list[Entry]:
    """Records that are none of those to keep."""
    if keep == "all" or not entries:
        return []
    if keep == "last":
        keep = max(entries, key=lambda entry: entry.used).row.identity
    others = [entry for entry in entries if not entry.row.identity.startswith(keep)]
    if len(others) == len(entries):
        raise InvalidRequest(f"no identity begins with {keep!r}; `selfdraft cache list` shows them", param="keep")
    return others


def _group(entries: list[Entry]) -> Group:
    newest = max(entries, key=lambda entry: entry.used)
    return Group(
        identity=newest.row.identity,
        model=newest.row.model,
        scope=newest.row.scope,
        records=len(entries),
        tokens=sum(len(entry.row.ids) // 4 for entry in entries),
        bytes=sum(_sizes(entries).values()),
        used=newest.used,
    )


def _damaged(archive: Archive, entries: Iterable[Entry]) -> list[Entry]:
    """Records with a damaged file, and all behind them."""
    entries = list(entries)
    bad = set()
    for name, size in _sizes(entries).items():
        try:
            archive.folder.read(Blob(name, size))
        except Damaged:
            bad.add(name)
    return [entry for entry in entries if any(bad & each.row.blobs.keys() for each in entry.path)]


def _sizes(entries: Iterable[Entry]) -> dict[str, int]:
    return {name: size for entry in entries for name, size in entry.row.blobs.items()}
