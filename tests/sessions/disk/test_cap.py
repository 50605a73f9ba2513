"""The cap means the whole folder, at every moment; what leaves is what was used longest ago, and nothing in vain."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from selfdraft.sessions.disk.index import Index
from selfdraft.sessions.disk.store import Stored

from .support import files, offered, opened, right_ones, stored, taken

CAP = 600_000


@contextmanager
def watched(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What the folder takes before and after everything that is done to it."""
    seen: list[int] = []

    def look() -> int:
        seen.append(taken(root))
        return 0

    def around(act: Callable[..., object]) -> Callable[..., object]:
        def measured(*args: object, **kwargs: object) -> object:
            look()
            done = act(*args, **kwargs)
            look()
            return done

        return measured

    with monkeypatch.context() as patch:
        for name in ("open", "write", "fsync", "replace", "unlink", "mkdir", "rmdir"):
            patch.setattr(os, name, around(getattr(os, name)))
        change = Index._change

        def stepwise(index: Index, statements: object) -> int:
            index._connection.set_progress_handler(look, 40)
            index._connection.set_trace_callback(lambda _: look() and None)  # also before the log is emptied
            try:
                return change(index, statements)  # type: ignore[arg-type]
            finally:
                index._connection.set_progress_handler(None, 0)
                index._connection.set_trace_callback(None)
                look()

        patch.setattr(Index, "_change", stepwise)
        yield seen


def test_the_whole_folder_stays_under_the_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path, max_bytes=CAP)
    with watched(tmp_path, monkeypatch) as seen:
        handle: Stored | None = None
        for seed in range(20):
            handle = stored(store, seed, handle if seed % 4 else None, size=300 + 300 * seed)
            if seed % 3 == 0:
                store.touch(handle)
            assert store.figures.bytes == taken(tmp_path)
        store.close()
    assert len(seen) > 1000
    assert max(seen) <= CAP
    assert max(seen) > CAP * 0.7  # it is made use of
    assert store.figures.evicted > 5


def test_rows_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prefixes with small arrays: rows of some size, which pass through the log."""
    store = opened(tmp_path, max_bytes=CAP)
    with watched(tmp_path, monkeypatch) as seen:
        for seed in range(30):
            stored(store, seed, ids=[seed, 300, *range(8000)])
        store.close()
    assert max(seen) <= CAP
    assert store.figures.evicted > 5


def test_what_was_used_longest_ago_leaves_first(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=CAP)
    handles = {seed: stored(store, seed, size=3000) for seed in range(4)}
    store.touch(handles[0])
    store.touch(handles[2])
    order: list[int] = []
    for added in range(10, 30):
        before = {seed for seed, handle in handles.items() if handle.key}
        assert stored(store, added, size=1000).key
        order += sorted(before - {seed for seed, handle in handles.items() if handle.key})
    assert order == [1, 3, 0, 2]
    store.close()


def test_who_holds_more_than_a_share_gives_first(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=CAP)
    quiet = [stored(store, seed, size=2000, scope="quiet") for seed in range(3)]
    loud = [stored(store, seed, size=2000, scope="loud") for seed in range(10, 60)]
    assert all(handle.key for handle in quiet)  # used longest ago, but little
    assert not loud[0].key
    newcomer = [stored(store, seed, size=2000, scope="third") for seed in range(70, 73)]
    assert all(handle.key for handle in (*quiet, *newcomer))
    assert stored(store, 73, size=2000, scope="third").key  # beyond its share: its own oldest goes
    assert [bool(handle.key) for handle in newcomer] == [False, True, True]
    assert all(handle.key for handle in quiet)
    store.close()


def test_a_parent_stays_while_a_child_does(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=CAP)
    root = stored(store, 1, size=3000)
    child = stored(store, 2, root, size=3000)
    for seed in range(10, 40):
        stored(store, seed, size=3000)
        assert root.key or not child.key
        if seed % 2:
            store.touch(child)  # and with it its parent
    assert child.key
    for seed in range(40, 60):
        stored(store, seed, size=3000)
        assert root.key or not child.key
    assert root.key is None
    assert child.key is None
    store.close()


def test_the_order_outlives_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=CAP)
    handles = [stored(store, seed, size=3000) for seed in range(4)]
    store.touch(handles[0])
    store.close()
    store = opened(tmp_path, max_bytes=CAP)
    assert right_ones(store) == {0, 1, 2, 3}
    for added in range(10, 30):
        stored(store, added, size=1000)
        if (old := right_ones(store) & {0, 1, 2, 3}) <= {0}:
            break
    assert old == {0}
    store.close()


def test_what_a_new_record_stands_behind_is_spared(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=CAP)
    root = stored(store, 1, size=3000)
    for seed in range(10, 13):
        stored(store, seed, size=3000)
    child = stored(store, 2, root, size=14_000)  # needs more than the others take
    assert root.key
    assert child.key
    store.close()


def test_what_is_larger_than_the_cap_costs_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=CAP)
    handles = [stored(store, seed) for seed in range(3)]
    written = store.figures.written_bytes
    large = stored(store, 9, size=40_000)
    assert large.failed
    assert all(handle.key for handle in handles)
    assert store.figures.written_bytes == written
    assert stored(store, 10).key
    store.close()


def test_a_smaller_cap_counts_from_the_start(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for seed in range(30):
        stored(store, seed, size=3000)
    store.close()
    assert taken(tmp_path) > CAP
    store = opened(tmp_path, max_bytes=CAP)
    assert taken(tmp_path) <= CAP
    left = right_ones(store)
    assert left == set(range(30 - len(left), 30))
    store.close()


def test_what_others_put_there_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(tmp_path, max_bytes=CAP)
    stored(store, 1)
    store.close()
    (tmp_path / "holiday.jpg").write_bytes(bytes(CAP - 100_000))
    store = opened(tmp_path, max_bytes=CAP)
    assert stored(store, 2, size=3000).failed
    assert stored(store, 3, size=3000).failed
    store.close()
    assert (tmp_path / "holiday.jpg").exists()
    assert taken(tmp_path) <= CAP
    assert len([line for line in caplog.messages if "--ssd-session-cache-max-bytes" in line]) == 1


def test_what_others_put_there_later_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfdraft.sessions.disk.archive._MEASURED_EVERY", 2)
    store = opened(tmp_path, max_bytes=CAP)
    (tmp_path / "holiday.jpg").write_bytes(bytes(CAP))
    for seed in range(5):
        stored(store, seed)
    assert not right_ones(store)
    store.close()


def test_another_layout_leaves_before_any_of_ours(tmp_path: Path) -> None:
    other = tmp_path / "v0"
    other.mkdir()
    (other / "index.sqlite").write_bytes(bytes(CAP // 2))
    for name in ("v12", "voyage"):  # without an index, or of another name, it is no layout
        (tmp_path / name).mkdir()
    store = opened(tmp_path, max_bytes=CAP)
    assert other.exists()
    for seed in range(30):
        assert stored(store, seed, size=1000).key
        if not other.exists():
            break
    assert not other.exists()
    assert store.figures.evicted == 0
    assert {path.name for path in tmp_path.iterdir()} == {"lock", "v1", "v12", "voyage"}
    store.close()


def test_leftovers_go_when_it_opens(tmp_path: Path) -> None:
    store = opened(tmp_path)
    stored(store, 1)
    store.close()
    sound = files(tmp_path)
    fan = tmp_path / "v1" / "blobs" / "0f"
    fan.mkdir()
    for name in ("0f" * 32 + ".safetensors", "0f" * 32 + ".part", ".DS_Store"):
        (fan / name).write_bytes(b"x" * 1000)
    misplaced = tmp_path / "v1" / "blobs" / next(iter(sound))
    misplaced.write_bytes(b"x")
    store = opened(tmp_path)
    assert files(tmp_path) == sound
    assert not fan.exists()
    assert not misplaced.exists()
    assert right_ones(store) == {1}
    store.close()


def test_offers_in_a_row_fit(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=CAP)
    handle: Stored | None = None
    handles = [handle := offered(store, seed, handle, size=900) for seed in range(60)]
    store.flush(30)
    kept = [bool(each.key) for each in handles]
    assert kept == sorted(kept, reverse=True)  # a chain is kept from its beginning
    assert any(kept)
    assert taken(tmp_path) <= CAP
    store.close()
