"""Writes to a folder in a process that kills itself at the n-th step, for every n, and looks at what it left.

A step comes before each system call of this package that changes the folder, with half of a write done, and after some
instructions of sqlite. Run as `python -m tests.sessions.disk.killed FOLDER FIRST STRIDE`; prints how many times
it was killed. Each attempt is a fork of this process, in which MLX was imported and never used.
"""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selfdraft.sessions.disk.store import Stored

from .support import UNIT, files, offered, opened, right_ones, stored, taken

ROOM = 125_000  # under the cap: for what sqlite and the index take, but not for the child
INSTRUCTIONS = 200  # of sqlite, a step


class Steps:
    """Counts steps, and dies at one of them."""

    def __init__(self, last: int) -> None:
        self.left = last

    def __call__(self) -> int:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0

    def watch(self) -> None:
        """Count what this process does from here on."""
        for name in ("open", "fsync", "fchmod", "replace", "unlink", "mkdir", "rmdir", "chmod"):
            setattr(os, name, self.around(getattr(os, name)))
        os.write = self.halves(os.write)  # type: ignore[assignment]
        connect = sqlite3.connect

        def connected(*args: Any, **kwargs: Any) -> sqlite3.Connection:
            connection = connect(*args, **kwargs)
            connection.set_progress_handler(self, INSTRUCTIONS)
            connection.set_trace_callback(lambda _: self() and None)
            return connection

        sqlite3.connect = connected  # type: ignore[assignment]

    def around(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self()
            return act(*args, **kwargs)

        return call

    def halves(self, write: Callable[[int, Any], int]) -> Callable[[int, Any], int]:
        def call(descriptor: int, content: Any) -> int:
            self()  # and once more before the other half
            return write(descriptor, memoryview(content)[: (len(content) + 1) // 2])

        return call


def prepare(root: Path) -> None:
    """A parent with a child, and two that may leave."""
    store = opened(root)
    first = stored(store, 1)
    stored(store, 2, first)
    for seed in (3, 4):
        assert stored(store, seed, size=2000).key
    store.touch(first)
    store.close()


def work(root: Path, cap: int) -> None:
    """Write a child in several files, which makes two others leave, and something small."""
    store = opened(root, max_bytes=cap)
    parent = next(handle for record, handle in store.records() if record.ids[0] == 1)
    child = offered(store, 5, parent, size=2000)
    last: Stored = offered(store, 6, child, size=50)
    store.flush(30)
    assert child.key
    assert last.key
    store.close()


def look(root: Path, cap: int, *, died: bool) -> None:
    """Open it again: all that is there is right, nothing else is there, and work goes on."""
    store = opened(root, max_bytes=cap)
    found = right_ones(store)
    assert found <= {1, 2, 3, 4, 5, 6}, found
    assert {1} <= found, found  # what was spared is never lost
    assert died or {1, 5, 6} <= found < {1, 2, 3, 4, 5, 6}, found
    assert found & {5} or not found & {6}, found
    entries = [handle.entry for _, handle in store.records()]
    wanted = {f"{name}.safetensors" for entry in entries if entry for name in entry.row.blobs}
    assert files(root) == wanted, files(root) ^ wanted
    assert len(found) == len(entries)
    assert taken(root) <= cap, taken(root)
    assert stored(store, 7).key
    store.close()
    store = opened(root, max_bytes=cap)
    assert right_ones(store) >= {7}
    store.close()


def forked(act: Callable[[], None]) -> bool:
    """Do something in another process. Whether it was killed."""
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True
    assert status == 0, status
    return False


def main(folder: Path, first: int, stride: int) -> None:
    assert UNIT < 2000 * 12  # the child needs several files
    forked(lambda: prepare(folder / "start"))
    cap = taken(folder / "start") + ROOM
    killed = 0
    for last in range(first, 10**6, stride):
        root = folder / "attempt"
        shutil.copytree(folder / "start", root)

        def attempt(steps: int = last, root: Path = root) -> None:
            Steps(steps).watch()
            work(root, cap)

        died = forked(attempt)
        try:
            forked(lambda root=root, died=died: look(root, cap, died=died))  # type: ignore[misc]
        except AssertionError:
            print(f"killed at step {last}", file=sys.stderr)
            raise
        shutil.rmtree(root)
        killed += died
        if not died:
            break
    print(killed)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
