"""Guards that a thread other than the main one may decode: the process used to abort at exit, now and then."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.engine import Engine
from tests.support.nano import nano_model
from tests.support.rows import finish, request

SCRIPT = """
import threading
from selfdraft.engine import Engine
from tests.support.nano import nano_model
from tests.support.rows import finish, request
engine = Engine(nano_model())
def decode():
    engine.add(request([1, 2, 3], depth=2, max_tokens=8, temperature=0.0))
    finish(engine)
threads = [threading.Thread(target=decode) for _ in range(3)]
for thread in threads:
    thread.start()
    thread.join()
"""


def test_streams_are_given_back_at_the_end_of_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[int] = []
    clear = mx.clear_streams

    def record() -> None:
        given_back.append(threading.get_ident())
        clear()

    monkeypatch.setattr(mx, "clear_streams", record)
    engine: Any = Engine(nano_model())
    used: list[int] = []

    def decode() -> None:
        used.append(threading.get_ident())
        for _ in range(2):
            engine.add(request([1, 2, 3], depth=2, max_tokens=8, temperature=0.0))
            finish(engine)
        assert given_back == []

    thread = threading.Thread(target=decode)
    thread.start()
    thread.join()
    assert given_back == used
    engine.add(request([1, 2, 3], depth=2, max_tokens=8, temperature=0.0))  # the model serves other threads still
    finish(engine)
    assert given_back == used  # the main thread keeps its own


@pytest.mark.parametrize("attempt", range(2))
def test_a_process_whose_threads_decoded_ends_well(attempt: int) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
