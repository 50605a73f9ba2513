"""Whatever happens to the files: an exact array or a miss, and the folder mends itself."""

from __future__ import annotations

import logging
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from selfdraft.sessions.disk.folder import Damaged
from selfdraft.sessions.disk.index import Index
from selfdraft.sessions.disk.store import DiskStore

from .support import change, files, opened, right_ones, stored

CHAIN = (1, 2, 3)  # each behind the one before; 4 stands alone
ALL = {*CHAIN, 4}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a chain of three records and one beside it."""
    store = opened(tmp_path)
    handle = None
    for seed in CHAIN:
        handle = stored(store, seed, handle, size=40)
    stored(store, 4, size=40)
    store.close()
    assert not (tmp_path / "v1/index.sqlite-wal").exists()
    return tmp_path


def blobs_of(root: Path, seed: int) -> list[Path]:
    """Files of a record."""
    store = opened(root)
    (entry,) = [handle.entry for record, handle in store.records() if record.ids[0] == seed]
    store.close()
    assert entry
    return [root / "v1" / "blobs" / name[:2] / f"{name}.safetensors" for name in entry.row.blobs]


def reopened(root: Path) -> Iterator[DiskStore]:
    """Open it twice: the second time all is in order."""
    for _ in range(2):
        store = opened(root)
        yield store
        store.close()


def flip(position: int, bit: int = 0) -> Callable[[bytearray], None]:
    def edit(content: bytearray) -> None:
        content[position % len(content)] ^= 1 << bit

    return edit


@pytest.mark.parametrize("seed", [1, 3])
def test_a_flipped_bit_anywhere_in_a_blob_is_a_miss(root: Path, seed: int) -> None:
    for path in blobs_of(root, seed):
        sound = path.read_bytes()
        for position in (0, 7, 8, 20, len(sound) // 2, len(sound) - 1):
            change(path, flip(position, position % 8))
            store = opened(root)
            expected = ALL - set(CHAIN[CHAIN.index(seed) :])
            assert right_ones(store) == expected
            assert store.figures.damaged == 1
            assert store.flush(10)
            assert path.name not in files(root)  # at once
            assert right_ones(store) == expected
            handle = None
            for each, known in store.records():
                handle = known if each.ids[0] == seed - 1 else handle
            for again in CHAIN[CHAIN.index(seed) :]:
                handle = stored(store, again, handle, size=40)  # it can be stored once more
            assert right_ones(store) == ALL
            store.close()
            assert path.read_bytes() == sound


@pytest.mark.parametrize("length", [0, 1, 8, 100, -1])
def test_a_truncated_blob_is_dropped_when_it_opens(root: Path, length: int) -> None:
    (path, *_) = blobs_of(root, 2)
    change(path, lambda content: content.__delitem__(slice(length, None)))
    for store in reopened(root):
        assert {int(record.ids[0]) for record, _ in store.records()} == {1, 4}
        assert right_ones(store) == {1, 4}
    assert path.name not in files(root)
    assert len(files(root)) == 4


def test_a_longer_blob_is_dropped(root: Path) -> None:
    (path, *_) = blobs_of(root, 4)
    change(path, lambda content: content.append(0))
    for store in reopened(root):
        assert right_ones(store) == set(CHAIN)


@pytest.mark.parametrize("when", ["while open", "before"])
def test_a_missing_blob_is_a_miss(root: Path, when: str) -> None:
    (path, *_) = blobs_of(root, 2)
    if when == "before":
        path.unlink()
    store = opened(root)
    if when == "while open":
        path.unlink()
    assert right_ones(store) == {1, 4}
    assert store.flush(10)
    assert len(files(root)) == 4
    store.close()


def test_all_that_stands_behind_is_forgotten(root: Path) -> None:
    (path, *_) = blobs_of(root, 2)
    store = opened(root)
    handles = {int(record.ids[0]): handle for record, handle in store.records()}
    change(path, flip(-1))
    with pytest.raises(Damaged):
        store.read_span(handles[2]), store.read_moment(handles[2])
    assert {seed: bool(handle.key) for seed, handle in handles.items()} == {1: True, 2: False, 3: False, 4: True}
    with pytest.raises(Damaged):
        store.read_span(handles[3])
    assert store.figures.damaged == 1
    assert stored(store, 5, handles[3]).failed
    store.close()


@pytest.mark.parametrize("column", ["key", "head", "ids"])
def test_a_flipped_bit_anywhere_in_a_row_is_a_miss(root: Path, column: str) -> None:
    index = root / "v1" / "index.sqlite"
    sound = index.read_bytes()
    with sqlite3.connect(index) as connection:
        rows = connection.execute(f"SELECT id, CAST({column} AS BLOB) FROM records").fetchall()
    connection.close()
    whole = dict(rows)
    keep = {path: path.read_bytes() for path in (root / "v1/blobs").rglob("*.safetensors")}
    for number in whole:
        for position in range(0, len(whole[number]), 1 + len(whole[number]) // 6):
            changed = bytearray(whole[number])
            flip(position, position % 7)(changed)
            connection = sqlite3.connect(index)
            connection.execute(f"UPDATE records SET {column} = ? WHERE id = ?", (bytes(changed), number))
            connection.commit()
            connection.close()
            store = opened(root)
            assert right_ones(store) == ALL - ({4} if number == 4 else set(CHAIN[number - 1 :]))
            store.close()
            index.write_bytes(sound)
            for path, content in keep.items():
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(content)


@pytest.mark.parametrize("value", [None, "text", b"\xff\xfe", -1, 2**63 - 1, 1.5])
@pytest.mark.parametrize("column", ["key", "head", "ids", "used"])
def test_nonsense_in_a_row_is_a_miss(root: Path, column: str, value: object) -> None:
    connection = sqlite3.connect(root / "v1" / "index.sqlite")
    connection.execute(f"UPDATE records SET {column} = ? WHERE id = 4", (value,))
    connection.commit()
    connection.close()
    for store in reopened(root):
        assert right_ones(store) == set(CHAIN)
        store.touch(store.records()[0][1])
    assert len(files(root)) == 6


def test_records_of_another_owner_cannot_be_stood_behind(root: Path) -> None:
    """Rows that are sound each by itself."""
    store = opened(root)
    handles = {int(record.ids[0]): handle for record, handle in store.records()}
    stored(store, 9, handles[1], scope="somebody", size=40)
    store.close()
    for store in reopened(root):
        assert right_ones(store) == ALL


def test_a_row_twice_counts_once(root: Path) -> None:
    connection = sqlite3.connect(root / "v1" / "index.sqlite")
    connection.execute("INSERT INTO records (key, head, ids, used) SELECT key, head, ids, used FROM records")
    connection.commit()
    connection.close()
    for store in reopened(root):
        assert right_ones(store) == ALL
        assert store.figures.records == 4


@pytest.mark.parametrize("position", range(0, 16384, 397))
def test_a_flipped_byte_anywhere_in_the_index(root: Path, position: int) -> None:
    index = root / "v1" / "index.sqlite"
    change(index, lambda content: content.__setitem__(position % len(content), content[position % len(content)] ^ 0xFF))
    store = opened(root)
    left = right_ones(store)
    assert left <= ALL
    assert stored(store, 7, size=40).key
    store.close()
    for store in reopened(root):
        assert right_ones(store) == left | {7}
        assert len(files(root)) == 2 * len(left) + 2  # nothing is left behind


@pytest.mark.parametrize("content", [b"", b"x", b"SQLite format 3\0" + b"\0" * 5000, b"no database at all" * 500])
def test_another_file_in_place_of_the_index(root: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (root / "v1" / "index.sqlite").write_bytes(content)
    store = opened(root)
    assert store.records() == []
    assert files(root) == set()
    assert stored(store, 7).key
    store.close()
    assert len([line for line in caplog.messages if "begins anew" in line]) == (1 if len(content) > 1 else 0)
    for store in reopened(root):
        assert right_ones(store) == {7}


def test_another_table_in_the_index(root: Path) -> None:
    connection = sqlite3.connect(root / "v1" / "index.sqlite")
    connection.execute("ALTER TABLE records RENAME COLUMN head TO tail")
    connection.close()
    store = opened(root)
    assert store.records() == []
    assert stored(store, 7).key
    store.close()
    for store in reopened(root):
        assert right_ones(store) == {7}


@pytest.mark.parametrize("position", [0, 20, 30, 60, 500, 4000])
def test_a_damaged_log(root: Path, position: int) -> None:
    store = opened(root)
    reader = sqlite3.connect(root / "v1" / "index.sqlite")  # as long as it reads, the log is not emptied
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM records").fetchone()
    stored(store, 5, size=40)
    log, shared = (root / "v1" / f"index.sqlite-{end}" for end in ("wal", "shm"))
    saved = {path: path.read_bytes() for path in (root / "v1" / "index.sqlite", log, shared)}
    assert len(saved[log]) > 4000
    reader.close()
    store.close()
    for path, content in saved.items():
        path.write_bytes(content)
    change(log, flip(position, 3))
    for store in reopened(root):
        assert right_ones(store) in (ALL, ALL | {5})


def test_an_index_overwritten_while_open(root: Path) -> None:
    store = opened(root)
    index = root / "v1" / "index.sqlite"
    index.write_bytes(b"\x00" * index.stat().st_size)
    assert right_ones(store) == ALL
    stored(store, 7, size=40)
    store.close()
    for store in reopened(root):
        assert right_ones(store) <= ALL | {7}


def test_an_index_that_breaks_while_open_begins_anew(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object) -> int:
        error = sqlite3.DatabaseError("database disk image is malformed")
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error

    caplog.set_level(logging.WARNING)
    now = [0.0]
    store = opened(root, clock=lambda: now[0])
    handles = [handle for _, handle in store.records()]
    with monkeypatch.context() as patch:
        patch.setattr(Index, "_change", breaks)
        assert stored(store, 7, size=40).failed
    assert [handle.key for handle in handles] == [None] * 4
    assert store.records() == []
    assert files(root) == set()
    now[0] += 61
    assert stored(store, 8, size=40).key
    store.close()
    assert len([line for line in caplog.messages if "begins anew" in line]) == 1
    for store in reopened(root):
        assert right_ones(store) == {8}


def test_a_folder_deleted_while_open_is_made_anew(root: Path) -> None:
    now = [0.0]
    store = opened(root, clock=lambda: now[0])
    handles = [handle for _, handle in store.records()]
    shutil.rmtree(root)
    with pytest.raises(Damaged):
        store.read_span(handles[0])
    stored(store, 7, size=40)
    now[0] += 61
    assert stored(store, 8, size=40).key
    assert [handle.key for handle in handles] == [None] * 4
    other = opened(root)
    assert not other.figures.writing
    other.close()
    store.close()
    for store in reopened(root):
        assert right_ones(store) == {8}
