"""Two processes on one folder: one writes, the other reads what is there and copes with what vanishes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import selfdraft

from .support import files, opened, right_ones, stored, taken

REPOSITORY = Path(selfdraft.__file__).parent.parent


def beside(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.sessions.disk.beside", *map(str, arguments)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def counts_of(process: subprocess.Popen[str]) -> dict[str, int]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err[-3000:]
    counts: dict[str, int] = json.loads(out)
    return counts


def test_one_writes_and_the_other_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = opened(tmp_path)
    first = stored(writer, 1)
    reader = opened(tmp_path)
    assert (writer.figures.writing, reader.figures.writing) == (True, False)
    assert right_ones(reader) == {1}
    assert stored(reader, 2).failed
    assert len([line for line in caplog.messages if f"process {os.getpid()}" in line]) == 1
    stored(writer, 3, first)
    assert right_ones(reader) == {1}  # as it was when it was opened
    reader.close()
    assert right_ones(writer) == {1, 3}
    writer.close()
    following = opened(tmp_path)
    assert following.figures.writing
    following.close()


def test_what_vanishes_under_a_reader_is_a_miss(tmp_path: Path) -> None:
    writer = opened(tmp_path, max_bytes=400_000)
    for seed in range(4):
        stored(writer, seed, size=2000)
    reader = opened(tmp_path)
    for seed in range(10, 16):
        stored(writer, seed, size=2000)
    kept = files(tmp_path)
    assert right_ones(reader) < set(range(4))
    assert files(tmp_path) == kept
    reader.close()
    writer.close()


def test_a_writer_that_was_killed_leaves_the_folder_to_the_next(tmp_path: Path) -> None:
    process = beside(tmp_path, "write", 60)
    while not (tmp_path / "v1" / "index.sqlite-wal").exists() and process.poll() is None:
        pass
    process.kill()
    process.communicate(timeout=60)
    store = opened(tmp_path)
    assert store.figures.writing
    assert stored(store, 2000).key
    store.close()


def test_a_folder_deleted_and_taken_over_is_left_to_the_other(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    first = opened(root)
    stored(first, 1)
    shutil.rmtree(root)
    second = opened(root)
    stored(second, 2)
    kept = files(root)
    assert stored(first, 3).failed
    assert (first.figures.writing, second.figures.writing) == (False, True)
    assert stored(first, 4).failed
    assert files(root) == kept
    first.close()
    assert right_ones(second) == {2}
    assert stored(second, 5).key
    second.close()


def test_processes_that_write_read_and_evict_at_once(tmp_path: Path) -> None:
    """Each checks every array that it reads."""
    processes = [beside(tmp_path, role, 2) for role in ("write", "read", "read")]
    most = 0
    while any(process.poll() is None for process in processes):
        most = max(most, taken(tmp_path))
    all_counts = [counts_of(process) for process in processes]
    assert sum(counts["writing"] for counts in all_counts) > 0
    assert any(counts["writing"] < counts["opened"] for counts in all_counts)
    assert all(counts["right"] > 0 for counts in all_counts)
    assert most <= 500_000
    store = opened(tmp_path)
    left = right_ones(store)
    assert len(left) == len({record.ids[0] for record, _ in store.records()})
    assert store.figures.damaged == 0
    store.close()
