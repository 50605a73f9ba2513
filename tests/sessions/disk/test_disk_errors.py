"""A disk that is full or may not be written: no error for the caller, what is there is read, and writing resumes."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from selfdraft.sessions.disk.index import Index
from selfdraft.sessions.disk.store import DiskStore

from .support import files, opened, right_ones, stored

NOBODY = 65534


class Failing:
    """Calls that fail from the n-th on.

    Attributes:
        at: which is the first to fail; None for none.
        calls: how many there were.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, names: tuple[str, ...]) -> None:
        self.at: int | None = None
        self.calls = 0
        for name in names:
            monkeypatch.setattr(os, name, self.wrapped(getattr(os, name), number))

    def wrapped(self, act: Callable[..., Any], number: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if act is not OPEN or args[1] & os.O_CREAT:
                self.calls += 1
                if self.at is not None and self.calls > self.at:
                    raise OSError(number, os.strerror(number))
            return act(*args, **kwargs)

        return call


OPEN = os.open


def tried(store: DiskStore, now: list[float], seed: int) -> bool:
    """Try to store a record after whatever rest there was."""
    now[0] += 61
    return stored(store, seed, size=9000).key is not None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_every_call_that_can_fail_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """The disk is full from the n-th call of a write on, for every n, until somebody makes room."""
    now = [0.0]
    store = opened(tmp_path, clock=lambda: now[0])
    stored(store, 1)
    before = files(tmp_path)
    failing = Failing(monkeypatch, number, ("open", "write", "fsync", "mkdir", "replace"))
    assert tried(store, now, 100)
    seeds = {1, 100}
    for count in itertools.count(0, 3):
        caplog.clear()
        kept = len(files(tmp_path))
        failing.calls, failing.at = 0, count
        seeds.add(200 + count)
        if tried(store, now, 200 + count):
            break
        assert stored(store, 3).failed  # it rests
        assert len(files(tmp_path)) == kept  # nothing half-written is left
        failing.at = None
        assert tried(store, now, 200 + count)
        assert len([line for line in caplog.messages if os.strerror(number) in line]) == 1
    assert len(seeds) > 15
    assert before < files(tmp_path)
    assert right_ones(store) == seeds
    store.close()
    store = opened(tmp_path)
    assert right_ones(store) == seeds
    store.close()


def test_a_full_disk_in_the_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    store = opened(tmp_path, clock=lambda: now[0])
    stored(store, 1)
    before = files(tmp_path)
    assert store._archive
    assert store._archive._index
    connection = store._archive._index._connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    assert stored(store, 2, ids=[2, 300, *range(3000)]).failed
    assert files(tmp_path) == before
    assert right_ones(store) == {1}
    connection.execute("PRAGMA max_page_count = 1000000")
    assert tried(store, now, 3)
    assert [line for line in caplog.messages if "full" in line]
    store.close()
    store = opened(tmp_path)
    assert right_ones(store) == {1, 3}
    store.close()


def test_writing_rests_for_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    store = opened(tmp_path, clock=lambda: now[0])
    failing = Failing(monkeypatch, errno.ENOSPC, ("write",))
    failing.at = 0
    assert stored(store, 1).failed
    failing.at = None
    now[0] += 59
    assert stored(store, 2).failed
    assert (store.figures.failed, store.figures.refused) == (1, 1)
    now[0] += 2
    assert stored(store, 3).key
    failing.at = failing.calls
    assert stored(store, 4).failed
    failing.at = None
    now[0] -= 1e6  # a clock that jumps does not make a rest longer
    assert stored(store, 5).key
    store.close()


def test_what_cannot_be_deleted_now_is_deleted_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    store = opened(tmp_path, max_bytes=400_000, clock=lambda: now[0])  # room for one
    assert tried(store, now, 1)
    with monkeypatch.context() as patch:
        failing = Failing(patch, errno.EACCES, ("unlink",))
        failing.at = 0
        assert not tried(store, now, 2)
        assert store.figures.failed
    assert tried(store, now, 3)
    left = files(tmp_path)
    store.close()
    opened(tmp_path, max_bytes=400_000).close()
    assert files(tmp_path) == left  # nothing was left for the next start to clear away


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder of a user whom permissions bind: the superuser becomes one for a while."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        superuser = os.geteuid() == 0
        if superuser:
            os.chown(root, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        try:
            yield root
        finally:
            if superuser:
                os.seteuid(0)
            for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
                folder.chmod(0o700)


@pytest.mark.parametrize("killed", [False, True])
def test_a_read_only_folder_is_read(unprivileged: Path, caplog: pytest.LogCaptureFixture, killed: bool) -> None:
    root = unprivileged / "cache"
    store = opened(root)
    handle = stored(store, 1)
    stored(store, 2, handle)
    if killed:  # the index's log stays
        kept = {path: path.read_bytes() for path in (root / "v1").glob("index*")}
    store.close()
    if killed:
        for path, content in kept.items():
            path.write_bytes(content)
    for path in (root, *root.rglob("*")):
        path.chmod(0o500 if path.is_dir() else 0o400)
    store = opened(root)
    assert right_ones(store) == {1, 2}
    assert stored(store, 3).failed
    assert (store.figures.writing, store.figures.records) == (False, 2)
    store.touch(store.records()[0][1])
    store.close()
    assert len([line for line in caplog.messages if "what is there is read" in line]) == 1


def test_a_folder_that_cannot_be_made(unprivileged: Path, caplog: pytest.LogCaptureFixture) -> None:
    unprivileged.chmod(0o500)
    store = opened(unprivileged / "cache")
    assert store.records() == []
    assert stored(store, 1).failed
    store.close()
    (line,) = caplog.messages
    assert str(unprivileged / "cache") in line
    assert os.strerror(errno.EACCES) in line


@pytest.mark.parametrize("place", ["root", "v1", "v1/blobs", "v1/index.sqlite", "lock"])
def test_something_else_in_its_place(tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "root"
    path = tmp_path / place if place == "root" else root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    if place in ("v1/index.sqlite", "lock"):
        path.mkdir()
    else:
        path.write_text("mine")
    store = opened(root)
    assert store.records() == []
    assert stored(store, 1).failed
    store.close()
    assert path.is_dir() or path.read_text() == "mine"
    assert len([line for line in caplog.records if line.levelno >= logging.WARNING]) == 1


def test_a_folder_that_turns_read_only_is_read_on(unprivileged: Path) -> None:
    now = [0.0]
    root = unprivileged / "cache"
    store = opened(root, clock=lambda: now[0])
    stored(store, 1)
    folders = [path for path in (root / "v1", *(root / "v1").rglob("*")) if path.is_dir()]
    for folder in folders:
        folder.chmod(0o500)
    assert not tried(store, now, 2)
    assert right_ones(store) == {1}
    for folder in folders:
        folder.chmod(0o700)
    assert tried(store, now, 3)
    store.close()


def test_an_index_in_use_by_a_stranger(tmp_path: Path) -> None:
    """Somebody's sqlite shell holds the index for writing."""
    now = [0.0]
    store = opened(tmp_path, clock=lambda: now[0])
    stored(store, 1)
    stranger = sqlite3.connect(tmp_path / "v1" / "index.sqlite", isolation_level=None)
    stranger.execute("BEGIN IMMEDIATE")
    assert not tried(store, now, 2)
    stranger.execute("ROLLBACK")
    stranger.close()
    assert tried(store, now, 3)
    assert right_ones(store) == {1, 3}
    store.close()


def test_an_index_that_fails_at_the_end_of_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been stored or not; either way the folder is in order."""
    now = [0.0]
    store = opened(tmp_path, clock=lambda: now[0])
    change = Index._change

    def late(index: Index, statements: Any) -> int:
        change(index, statements)
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(Index, "_change", late)
        assert not tried(store, now, 1)
    assert tried(store, now, 2)
    store.close()
    store = opened(tmp_path)
    assert right_ones(store) == {2}
    assert store.figures.records == 1
    store.close()
