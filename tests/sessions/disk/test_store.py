"""What the store promises its caller: exact arrays or a miss, at once, within bounds, for its owner's eyes alone."""

from __future__ import annotations

import os
import stat
import threading
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.engine import Cut
from selfdraft.sessions.disk.folder import Damaged
from selfdraft.sessions.disk.index import Index, Row
from selfdraft.sessions.disk.store import Stored

from .support import bits, files, is_right, moment, offered, opened, right_ones, span, stored, taken


def test_what_was_offered_is_there_after_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path)
    first = stored(store, 1)
    second = stored(store, 2, first, size=9000, cuts=(Cut(2, True), Cut(3, False)), drafts=False, reply=True)
    assert bits(store.read_span(second)) == bits(span(2, 9000))
    store.close()

    store = opened(tmp_path)
    (one, handle), (two, behind) = store.records()
    assert (one.key, one.parent, one.drafts, one.reply) == (first.key, None, True, False)
    assert (two.key, two.parent, two.drafts, two.reply) == (second.key, one.key, False, True)
    assert two.cuts == (Cut(2, True), Cut(3, False))
    assert one.scope == two.scope == "me"
    assert one.ids.dtype == np.int32
    assert one.ids.tolist() == [1, 300]
    assert two.nbytes > 2 * 9000 * 3 * 2
    assert bits(store.read_span(handle)) == bits(span(1))
    assert bits(store.read_span(behind)) == bits(span(2, 9000))
    assert bits(store.read_moment(behind)) == bits(moment(2))
    store.close()


def test_other_identities_see_nothing_and_lose_nothing(tmp_path: Path) -> None:
    for identity, seed in (("aa", 1), ("bb", 2)):
        store = opened(tmp_path, identity=identity)
        stored(store, seed)
        store.close()
    for identity, seed in (("aa", 1), ("bb", 2), ("cc", None)):
        store = opened(tmp_path, identity=identity)
        assert right_ones(store) == ({seed} if seed else set())
        assert store.figures.records == 2
        store.close()


def test_write_only_hands_out_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path)
    stored(store, 1)
    store.close()
    store = opened(tmp_path, read=False)
    assert store.records() == []
    again = stored(store, 1)
    assert store.figures.records == 1
    assert again.key
    assert store.figures.written_bytes == 0
    store.close()


def test_files_are_shared(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=2**30)
    stored(store, 1, scope="one")
    before = files(tmp_path)
    other = stored(store, 1, scope="other")
    assert files(tmp_path) == before
    assert store.figures.records == 2
    first, _ = (handle for _, handle in store.records())
    damaged = next((tmp_path / "v1/blobs").rglob("*.safetensors"))
    damaged.write_bytes(bytes(damaged.stat().st_size))
    with pytest.raises(Damaged):
        store.read_span(first), store.read_moment(first)
    store.flush(10)
    assert files(tmp_path) == before  # the other still refers to them
    fresh = stored(store, 1, scope="third")  # a damaged file is written anew
    assert bits(store.read_span(fresh)) == bits(span(1))
    assert bits(store.read_moment(fresh)) == bits(moment(1))
    assert bits(store.read_moment(other)) == bits(moment(1))
    store.close()


def test_a_shared_file_goes_with_the_last_that_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last is found damaged while the first is being deleted."""
    store = opened(tmp_path)
    first, last = stored(store, 1, scope="one"), stored(store, 1, scope="other")
    archive = store._archive
    assert archive
    assert first.entry
    update = Index.update

    def meanwhile(index: Index, removed: set[int], used: dict[int, int]) -> None:
        if last.key and last.entry:
            archive.forget(last.entry)
        update(index, removed, used)

    monkeypatch.setattr(Index, "update", meanwhile)
    archive.forget(first.entry)
    assert store.flush(10)
    assert store.figures.records == 0
    assert files(tmp_path) == set()
    store.close()


def test_offering_returns_at_once_and_requests_go_first(tmp_path: Path) -> None:
    running = threading.Event()
    running.set()
    store = opened(tmp_path, busy=running.is_set)
    made = offered(store, 1)
    assert (made.key, made.waiting, made.failed) == (None, True, False)
    assert store.figures.pending_bytes > 0
    time.sleep(0.3)
    assert made.waiting
    assert files(tmp_path) == set()
    running.clear()
    deadline = time.monotonic() + 10
    while made.waiting and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (made.waiting, made.failed, made.key is None) == (False, False, False)
    assert store.figures.pending_bytes == 0
    store.close()


def test_writing_goes_on_under_constant_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfdraft.sessions.disk.writer._PATIENCE", 3)
    store = opened(tmp_path, busy=lambda: True)
    made = offered(store, 1)
    deadline = time.monotonic() + 10
    while made.waiting and time.monotonic() < deadline:
        time.sleep(0.01)
    assert made.key
    store.close()


def test_a_child_of_what_is_not_there_fails(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for parent in (Stored(failed=True), Stored()):
        child = offered(store, 2, parent)
        assert (child.failed, child.waiting) == (True, False)
    store.close()


def test_a_child_of_a_parent_that_fails_later_fails(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=200_000, busy=lambda: True)
    first = stored(store, 1)
    offered(store, 9)  # keeps the thread waiting
    parent = offered(store, 2, first, size=50_000)  # larger than the cap, as will turn out
    child = offered(store, 3, parent)
    assert (parent.waiting, child.waiting) == (True, True)
    store.flush(10)
    assert (parent.failed, child.failed, first.failed) == (True, True, False)
    assert (parent.waiting, child.waiting) == (False, False)
    assert right_ones(store) == {1, 9}
    store.close()


def test_a_child_whose_parent_goes_while_it_is_written_goes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    parent = stored(store, 1)
    archive = store._archive
    assert archive
    assert parent.entry
    add = Index.add

    def meanwhile(index: Index, row: Row, used: int) -> int:
        assert parent.entry
        archive.forget(parent.entry)  # as when it is found damaged
        return add(index, row, used)

    with monkeypatch.context() as patch:
        patch.setattr(Index, "add", meanwhile)
        assert stored(store, 2, parent).key is None
    assert files(tmp_path) == set()
    store.close()
    store = opened(tmp_path)
    assert store._archive
    assert store._archive.incomplete == set()  # its row is gone, too
    store.close()


def test_pending_arrays_are_bounded(tmp_path: Path) -> None:
    store = opened(tmp_path, busy=lambda: True, max_pending=20_000)
    offers = [offered(store, seed) for seed in range(10)]  # about 3.6 KB each
    assert [offer.failed for offer in offers] == [False] * 5 + [True] * 5
    assert store.figures.refused == 5
    assert store.figures.pending_bytes < 20_000
    store.flush(10)
    assert stored(store, 11, size=20_000).key  # one alone may be larger
    store.close()


def test_the_budget_of_an_hour(tmp_path: Path) -> None:
    now = [1000.0]
    store = opened(tmp_path, writes_per_hour=10_000, clock=lambda: now[0])
    assert [stored(store, seed).failed for seed in range(4)] == [False, False, True, True]
    now[0] += 3500
    assert stored(store, 5).failed
    now[0] += 101
    assert not stored(store, 6).failed
    assert store.figures.refused == 3
    store.close()


def test_owners_have_equal_parts(tmp_path: Path) -> None:
    store = opened(tmp_path, busy=lambda: True, max_pending=40_000, writes_per_hour=60_000, owners=2)
    loud = [offered(store, seed, scope="loud") for seed in range(10)]
    assert [offer.failed for offer in loud] == [False] * 5 + [True] * 5
    assert not offered(store, 11, scope="quiet").failed
    assert store.flush(30)
    for seed in range(20, 40):
        stored(store, seed, scope="loud")
    assert offered(store, 41, scope="loud").failed  # its half of the hour is spent
    assert stored(store, 42, scope="quiet").key
    store.close()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_spans_in_eight_bits_are_smaller_and_nearly_the_same(tmp_path: Path, dtype: mx.Dtype) -> None:
    span = {
        "attention.0.keys": mx.random.normal((1, 2, 50, 128), key=mx.random.key(1)).astype(dtype),
        "attention.0.values": mx.random.normal((1, 2, 50, 96), key=mx.random.key(2)).astype(dtype),
        "head.0.keys": mx.random.normal((1, 2, 0, 64)).astype(dtype),
        "head.0.values": mx.random.normal((1, 2, 50, 20), key=mx.random.key(3)).astype(dtype),
    }
    mx.eval(span)
    exact = opened(tmp_path)
    plain = stored(exact, 1, span=span)
    written = exact.figures.written_bytes
    assert bits(exact.read_span(plain)) == bits(span)
    exact.close()
    store = opened(tmp_path, kv_bits=8)
    assert store.records() == []  # what is exact is another's
    small = stored(store, 1, span=span)
    assert small.key
    assert store.figures.written_bytes < written * (0.72 if dtype.size == 2 else 0.42)
    store.close()
    store = opened(tmp_path, kv_bits=8)
    ((_, handle),) = store.records()
    found = store.read_span(handle)
    assert {name: (x.shape, x.dtype) for name, x in found.items()} == {n: (x.shape, x.dtype) for n, x in span.items()}
    for name, array in span.items():
        if array.size:
            assert mx.abs(found[name] - array).max().item() < (0.06 if dtype == mx.bfloat16 else 0.03)
    assert bits({"x": found["head.0.values"]}) == bits({"x": span["head.0.values"]})
    assert bits(store.read_moment(handle)) == bits(moment(1))
    store.close()


@pytest.mark.parametrize("jump", [-1e9, 1e9, -5.0])
def test_clock_jumps_are_harmless(tmp_path: Path, jump: float) -> None:
    now = [1e6]
    store = opened(tmp_path, clock=lambda: now[0])
    first = stored(store, 1)
    now[0] += jump
    assert stored(store, 2, first).key
    now[0] -= jump
    store.touch(first)
    assert stored(store, 3).key
    store.close()
    for path in tmp_path.rglob("*"):
        os.utime(path, (0, 0))  # nor do the files' times count
    store = opened(tmp_path, clock=lambda: now[0])
    assert right_ones(store) == {1, 2, 3}
    store.close()


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_everything_is_for_its_owner_alone(tmp_path: Path, umask: int) -> None:
    root = tmp_path / "some" / "cache"
    before = os.umask(umask)
    try:
        store = opened(root)
        stored(store, 1)
        paths = [root.parent, root, *root.rglob("*")]  # while the index's log is there, too
        modes = {str(path.relative_to(tmp_path)): stat.S_IMODE(path.stat().st_mode) for path in paths}
        assert {name.rpartition("/")[2] for name in modes} >= {"index.sqlite-wal", "index.sqlite-shm", "lock"}
        assert all(mode == (0o700 if (tmp_path / name).is_dir() else 0o600) for name, mode in modes.items()), modes
        store.close()
    finally:
        os.umask(before)


def test_a_folder_that_others_could_fill_is_closed_to_them(tmp_path: Path) -> None:
    store = opened(tmp_path)
    stored(store, 1)
    store.close()
    mode = stat.S_IMODE(tmp_path.stat().st_mode)
    (tmp_path / "v1").chmod(0o777)
    opened(tmp_path).close()
    assert stat.S_IMODE((tmp_path / "v1").stat().st_mode) == 0o700
    assert stat.S_IMODE(tmp_path.stat().st_mode) == mode  # the folder named by the user stays as it is


def test_a_folder_of_somebody_else_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    stored(store, 1)
    store.close()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    store = opened(tmp_path)
    assert store.records() == []
    assert stored(store, 2).failed
    assert not store.figures.writing
    store.close()


def test_a_link_in_place_of_the_layout_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "v1").symlink_to(tmp_path / "elsewhere")
    store = opened(tmp_path / "cache")
    assert stored(store, 1).failed
    store.close()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_figures(tmp_path: Path) -> None:
    store = opened(tmp_path)
    made = stored(store, 1)
    figures = store.figures
    assert figures.writing
    assert figures.records == 1
    assert figures.bytes == taken(tmp_path)
    assert figures.written_bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert (figures.read_bytes, figures.refused, figures.failed, figures.damaged, figures.evicted) == (0, 0, 0, 0, 0)
    assert is_right(store, store.records()[0][0], made)
    assert store.figures.read_bytes == figures.written_bytes
    store.close()
    assert not store.figures.writing


def test_nothing_is_taken_after_the_end(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.close()
    assert offered(store, 1).failed
    store.close()
    assert store.flush(1)


def test_what_is_left_at_the_end_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    write = os.write

    def slow(descriptor: int, content: bytes) -> int:
        gate.wait(10)
        return write(descriptor, content)

    store = opened(tmp_path)
    monkeypatch.setattr(os, "write", slow)
    first, second = offered(store, 1), offered(store, 2)
    store.close(timeout=0.1)
    gate.set()
    deadline = time.monotonic() + 10
    while second.waiting and time.monotonic() < deadline:
        time.sleep(0.01)
    assert first.key
    assert second.failed


def test_empty_parts_are_stored(tmp_path: Path) -> None:
    store = opened(tmp_path)
    made = stored(store, 1, span={}, moment={"x": mx.array(1)})
    assert store.read_span(made) == {}
    assert bits(store.read_moment(made)) == bits({"x": mx.array(1)})
    store.close()


def test_an_array_that_cannot_be_stored_is_no_error(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with mx.stream(mx.cpu):
        strange = mx.array([1j])
    assert stored(store, 1, moment={"x": strange}).failed
    assert store.figures.failed == 1
    assert stored(store, 2).key
    store.close()
