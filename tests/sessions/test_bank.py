"""What the bank keeps, whose it is, and what leaves first."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.engine import Engine, Request
from selfdraft.sessions import PromptSession, SessionBank
from selfdraft.sessions.tree import Node, walk
from tests.support.nano import SMALLER, nano_model
from tests.support.rows import finish, params

MODEL = nano_model(**SMALLER)
PLENTY = 10**9


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def bank_of(limit: int = PLENTY, **options: Any) -> SessionBank:
    return SessionBank(MODEL.new_state, limit, **options)


def run(
    bank: SessionBank,
    prompt: Sequence[int],
    stops: Sequence[int] = (),
    *,
    scope: str = "a",
    depth: Any = 2,
    reply: int = 0,
) -> int:
    """Answer a prompt; `reply` tokens, kept, or one that is not. Returns how many tokens were restored."""
    engine = Engine(MODEL)
    session = PromptSession(bank, scope, prompt, stops)
    row = engine.add(Request(prompt, params(temperature=0.0, max_tokens=max(reply, 1), depth=depth), session=session))
    finish(engine)
    if reply:
        engine.settle(row)
    return row.statistics.restored_tokens


def ends(bank: SessionBank, scope: str = "a") -> list[int]:
    return sorted(node.end for node in walk(bank.root(scope)) if node.moment is not None)


def prompt(first: int, length: int = 20) -> list[int]:
    return [(first * 7 + n * n + n // 3) % 16 for n in range(length)]


def test_the_longest_boundary_below_the_prompts_end_is_taken() -> None:
    bank, tokens = bank_of(), prompt(1)
    run(bank, tokens, [5, 12, 19])
    assert ends(bank) == [5, 12, 19]
    assert run(bank, tokens) == 19
    assert run(bank, tokens[:19]) == 12  # its last token is always forwarded
    assert run(bank, [*tokens[:18], (tokens[18] + 1) % 16, 3]) == 12
    assert run(bank, [*tokens[:11], (tokens[11] + 1) % 16, 3]) == 5
    assert run(bank, [(tokens[0] + 1) % 16, *tokens[1:]]) == 0
    assert (bank.figures.hits, bank.figures.misses) == (4, 2)
    assert bank.figures.restored_tokens == 19 + 12 + 12 + 5


def test_scopes_do_not_see_each_other() -> None:
    bank, tokens = bank_of(), prompt(1)
    run(bank, tokens, [10], scope="a")
    assert run(bank, tokens, scope="b") == 0
    assert run(bank, tokens, scope="a") == 10


def test_a_row_that_drafts_needs_the_heads_history() -> None:
    bank, tokens = bank_of(), prompt(2)
    run(bank, tokens, [10], depth=0)
    assert run(bank, tokens, depth=0) == 10
    assert run(bank, tokens, [10], depth=2) == 0  # and leaves a boundary that has it
    assert run(bank, tokens, depth=2) == 10
    assert [node.drafts for node in walk(bank.root("a"))] == [False, True]


def test_the_same_tokens_are_kept_once() -> None:
    bank, tokens = bank_of(), prompt(3)
    for _ in range(3):
        run(bank, tokens, [10], reply=4)
    assert ends(bank) == [10, 24]
    assert bank.figures.kept == 2


def test_two_rows_at_once_keep_a_shared_prefix_once_and_lose_nothing() -> None:
    bank, engine, shared = bank_of(), Engine(MODEL), prompt(4)
    rows = []
    for other in (1, 2):
        tokens = [*shared, other, other, other]
        session = PromptSession(bank, "a", tokens, [20, 22])
        rows.append(engine.add(Request(tokens, params(temperature=0.0, max_tokens=3), session=session)))
    finish(engine)
    assert ends(bank) == [20, 22, 22]
    # The second went on from what the first had left, though it was asked before that was there.
    assert [row.statistics.restored_tokens for row in rows] == [0, 20]


def test_the_memory_of_a_boundary_is_its_own() -> None:
    """No view that keeps a row's buffers, or a whole batch's states, alive."""
    bank = bank_of()
    run(bank, prompt(5), [10])
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    for first in range(6, 16):
        run(bank, prompt(first), [10])
    gc.collect()
    each = bank.figures.bytes / 11
    grown = (mx.get_active_memory() - before) / 10
    assert each <= grown <= each + 4096  # buffers are rounded up


def test_what_saves_least_for_its_bytes_leaves_first() -> None:
    bank = bank_of()
    run(bank, prompt(1, 12), [10])
    run(bank, prompt(2, 42), [40])
    bank.shrink(bank.figures.bytes - 1)
    assert ends(bank) == [40]


def test_use_keeps_a_boundary_and_age_lets_it_go() -> None:
    bank = bank_of()
    for first in range(4):
        run(bank, prompt(first), [18])
    run(bank, prompt(0))
    room = bank.figures.bytes
    bank.limit = room
    for first in range(4, 24):
        run(bank, prompt(first, 20), [18])
        assert run(bank, prompt(0), ()) == 18  # in use all the time
        assert bank.figures.bytes <= room
    assert run(bank, prompt(1)) == 0


def test_spans_stay_as_long_as_a_boundary_behind_them() -> None:
    bank, tokens = bank_of(), prompt(6, 40)
    run(bank, tokens, [10, 20, 38])
    nodes = {node.end: node for node in walk(bank.root("a"))}
    nodes[10].priority = nodes[20].priority = -1
    bank.shrink(bank.figures.bytes - 1)
    bank.shrink(bank.figures.bytes - 1)
    assert ends(bank) == [38]
    assert run(bank, tokens) == 38
    bank.shrink(0)
    assert (ends(bank), bank.figures.bytes, bank.root("a").children) == ([], 0, [])


def test_a_session_touches_nothing_of_the_bank_before_its_row_runs() -> None:
    """It is made on another thread than the engine's."""
    bank = bank_of()
    PromptSession(bank, "a", prompt(1), [10])
    assert bank._roots == {}


def test_what_rows_need_is_not_taken_back_while_they_run() -> None:
    bank = bank_of()
    run(bank, prompt(1), [10])
    bank.allow(0)
    run(bank, prompt(2), [10], reply=3)
    assert (ends(bank), bank.figures.bytes) == ([], 0)
    bank.allow(PLENTY)
    run(bank, prompt(3), [10])
    assert ends(bank) == [10]


def test_an_answer_that_nobody_reads_holds_nothing() -> None:
    bank, tokens, engine = bank_of(), prompt(7), Engine(MODEL)
    run(bank, tokens, [10])
    session = PromptSession(bank, "a", tokens, [15])
    engine.add(Request(tokens, params(temperature=0.0, max_tokens=3), session=session))
    finish(engine)  # it is over, not settled, and its session is still there
    bank.shrink(0)
    assert ends(bank) == []


def test_tokens_a_row_forwarded_itself_are_not_counted_as_restored() -> None:
    bank, engine, tokens = bank_of(), Engine(MODEL, prefill_chunk=8), prompt(4, 30)
    row = engine.add(
        Request(tokens, params(temperature=0.0, max_tokens=2), session=PromptSession(bank, "a", tokens, []))
    )
    engine.step()
    run(bank, tokens, [20])
    finish(engine)
    assert row.statistics.restored_tokens == 20 - 8


def test_what_a_running_row_goes_on_from_stays() -> None:
    bank, tokens = bank_of(), prompt(7)
    run(bank, tokens, [10])
    engine = Engine(MODEL)
    session = PromptSession(bank, "a", tokens, [15])
    row = engine.add(Request(tokens, params(temperature=0.0, max_tokens=30), session=session))
    engine.step()
    bank.shrink(0)
    assert ends(bank) == [15]  # its newest
    finish(engine)
    engine.settle(row)
    del row, session
    gc.collect()
    bank.shrink(0)
    assert ends(bank) == []


def test_a_row_whose_boundary_was_cleared_leaves_all_it_has() -> None:
    bank, tokens, engine = bank_of(), prompt(8), Engine(MODEL)
    run(bank, tokens, [10])
    session = PromptSession(bank, "a", tokens, [10])
    row = engine.add(Request(tokens, params(temperature=0.0, max_tokens=4), session=session))
    finish(engine)
    bank.clear()
    engine.settle(row)
    assert ends(bank) == [24]
    assert run(bank, [*tokens, *row.emitted, 1]) == 24
    assert bank.figures.bytes == sum(node.nbytes for node in walk(bank.root("a")))


def test_what_nobody_used_for_long_leaves() -> None:
    clock = Clock()
    bank = bank_of(idle=100, clock=clock)
    run(bank, prompt(1), [10])
    clock.now = 60
    run(bank, prompt(2), [10])
    clock.now = 125
    bank.shrink(PLENTY)
    assert len(ends(bank)) == 1
    assert run(bank, prompt(2)) == 10


def test_a_boundary_larger_than_the_limit_is_not_kept() -> None:
    bank = bank_of(100)
    run(bank, prompt(1), [10], reply=3)
    assert (ends(bank), bank.figures.bytes) == ([], 0)


def test_a_long_conversation_is_a_long_path() -> None:
    """Walks and paths do not recurse."""
    node = root = Node(None, bank_of().root("a").ids, (), drafts=True)
    for _ in range(3000):
        node = Node(node, prompt_ids([1]), (), drafts=True)
    assert len(list(walk(root))) == len(node.path) == 3000
    assert node.attached


def prompt_ids(tokens: Sequence[int]) -> Any:
    import numpy as np

    return np.array(tokens, dtype=np.int32)


@pytest.mark.parametrize("end", ["error", "nothing emitted"])
def test_rows_that_broke_leave_no_end(end: str) -> None:
    bank, tokens, engine = bank_of(), prompt(9), Engine(MODEL)
    row = engine.add(
        Request(tokens, params(temperature=0.0, max_tokens=9), session=PromptSession(bank, "a", tokens, [10]))
    )
    engine.step()
    if end == "error":
        engine.step()
        row.error = ValueError("broken")
    engine.cancel(row)
    engine.settle(row)
    assert ends(bank) == [10]
