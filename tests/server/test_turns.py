"""Guards the device's queue: whoever gives it up stands behind those who wait."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

from selfdraft.server.turns import Turns


def test_two_that_want_it_all_the_time_take_turns() -> None:
    turns, order, ready = Turns(), [], threading.Barrier(2)
    inside = 0

    def work(name: str) -> None:
        nonlocal inside
        ready.wait(10)
        for _ in range(50):
            with turns:
                inside += 1
                assert inside == 1
                time.sleep(0.001)  # long enough for the other one to ask
                order.append(name)
                inside -= 1

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    middle = order[10:-10]
    alternations = sum(a != b for a, b in pairwise(middle))
    assert alternations > 0.9 * len(middle)  # a plain lock: almost none


def test_an_error_gives_it_up() -> None:
    turns = Turns()
    for _ in range(2):
        try:
            with turns:
                raise ValueError
        except ValueError:
            pass
    with turns:
        pass
