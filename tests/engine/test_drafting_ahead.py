"""Guards rows that draft before the host has read what they emitted: text, scores, states and counts as with waiting.

Kernels are stood in for by their references, so that many cycles of every kind run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.engine import RULES, Engine, Request, Row, cycle
from selfdraft.engine.ahead import Unread
from selfdraft.engine.cycle import Choose, Cycle, Flight
from selfdraft.models.few_rows import use_few_row_kernels
from selfdraft.models.qwen3_5 import Qwen35
from tests.support.nano import FOR_KERNELS, nano_model
from tests.support.plain_kernels import plain_kernels
from tests.support.rows import finish, request

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
TOKENS = 30


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Qwen35:
    plain_kernels(monkeypatch)
    built = nano_model(5, bits=4, sharpness=1.0, **FOR_KERNELS)
    use_few_row_kernels(built)
    return built


class Counting(Cycle):
    """Counts the cycles that were started early."""

    early = 0

    def _launch_ahead(self, flight: Flight, choose: Choose) -> Flight | None:
        ahead = super()._launch_ahead(flight, choose)
        self.early += ahead is not None
        return ahead


class Waiting(Counting):
    """Reads every cycle before it starts the next."""

    def _launch_ahead(self, flight: Flight, choose: Choose) -> Flight | None:
        return None


def decode(model: Qwen35, kind: type[Counting], asked: Sequence[Request]) -> tuple[Counting, list[Row]]:
    cycle = kind(model, RULES["block"])
    engine = Engine(model, cycle=cycle)
    rows = [engine.add(one) for one in asked]
    for number, row in enumerate(rows):
        row.stream = (7, number)
    finish(engine)
    return cycle, rows


def assert_the_same(model: Qwen35, asked: Sequence[Request], least: int = 5) -> tuple[Counting, list[Row]]:
    cycle, ahead = decode(model, Counting, asked)
    _, waited = decode(model, Waiting, asked)
    assert cycle.early >= least
    assert cycle.rows_ahead == []
    for row, other in zip(ahead, waited, strict=True):
        assert row.emitted == other.emitted
        assert row.finish_reason == other.finish_reason
        assert row.scores == other.scores
        assert row.draws == other.draws
        assert row.statistics.cycles == other.statistics.cycles
        assert row.statistics.emitted == other.statistics.emitted
        mine, theirs = row.state, other.state
        assert (mine.length, mine.head_length) == (theirs.length, theirs.head_length)
        for one, two in zip(mine.recurrent, theirs.recurrent, strict=True):
            assert mx.array_equal(one.window, two.window)
            assert mx.array_equal(one.memory, two.memory)
        for one, two in zip([*mine.attention, *mine.head], [*theirs.attention, *theirs.head], strict=True):
            length = mine.length if one in mine.attention else mine.head_length
            assert mx.array_equal(one.keys[:, :, :length], two.keys[:, :, :length])
            assert mx.array_equal(one.values[:, :, :length], two.values[:, :, :length])
    return cycle, ahead


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 8, "min_p": 0.02},
        {"temperature": 1.0, "seed": 8, "logprobs": 3},
    ],
)
@pytest.mark.parametrize("depth", [1, 3])
def test_every_kind_of_sampling(model: Qwen35, given: dict[str, Any], depth: int) -> None:
    _, (row,) = assert_the_same(model, [request(PROMPT, depth=depth, max_tokens=TOKENS, **given)])
    assert len(row.emitted) == TOKENS


def test_an_early_cycle_is_queued_at_once(model: Qwen35, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time costs the host; a device that is busy with the cycle before needs it once."""
    queued = []

    def queue(*arrays: mx.array) -> None:
        if sys._getframe(1).f_code.co_filename == cycle.__file__:  # not small numbers, which are kept
            queued.append(arrays)
        mx.eval(*arrays)

    monkeypatch.setattr(mx, "async_eval", queue)

    class Queued(Counting):
        def launch(self, rows: Sequence[Row], depths: Sequence[int], unread: Unread | None = None) -> Flight:
            before = len(queued)
            flight = super().launch(rows, depths, unread)
            (early if unread else first).append(len(queued) - before)
            return flight

    first: list[int] = []
    early: list[int] = []
    decode(model, Queued, [request(PROMPT, depth=3, max_tokens=TOKENS, temperature=0.0)])
    assert set(early) == {0}
    assert max(first) == 3 + 2  # the head's pairs, each draft, the verify pass


def test_rows_of_several_kinds_and_lengths(model: Qwen35) -> None:
    asked = [
        request(PROMPT, depth=3, max_tokens=TOKENS, temperature=0.0),
        request(PROMPT[2:], depth=2, max_tokens=TOKENS - 9, temperature=1.0, seed=1),
        request(PROMPT[4:], depth=1, max_tokens=TOKENS + 9, temperature=0.9),
    ]
    assert_the_same(model, asked)


def test_an_end_within_what_was_not_read(model: Qwen35) -> None:
    _, (free,) = decode(model, Waiting, [request(PROMPT, depth=3, max_tokens=TOKENS, temperature=0.0)])
    for at in (8, 11, 13, 18):
        stop = frozenset([free.emitted[at]])
        pair = [
            request(PROMPT, stop_ids=stop, depth=3, max_tokens=TOKENS, temperature=0.0),
            request(PROMPT[1:], depth=3, max_tokens=TOKENS, temperature=1.0, seed=2),
        ]
        assert_the_same(model, pair)


def test_a_text_that_ends_inside_a_cycle(model: Qwen35) -> None:
    for many in (11, 13):
        seen: list[int] = []

        def stop(tokens: Sequence[int], many: int = many, seen: list[int] = seen) -> int | None:
            if not tokens:
                return None
            before = len(seen)
            seen.extend(tokens)
            return many - before if len(seen) >= many else None

        cycle, (row,) = decode(
            model, Counting, [request(PROMPT, text_stop=stop, depth=3, max_tokens=TOKENS, temperature=0.0)]
        )
        assert cycle.early > 0
        assert len(row.emitted) == many


def test_what_the_host_decides_is_waited_for(model: Qwen35) -> None:
    for given in ({"presence_penalty": 1.5}, {"repetition_penalty": 1.3}):
        asked = [request(PROMPT, depth=3, max_tokens=TOKENS, temperature=0.0, **given)]
        cycle, _ = assert_the_same(model, asked, least=0)
        assert cycle.early == 0
    asked = [
        request(
            PROMPT, depth=2, max_tokens=TOKENS, min_tokens=20, stop_ids=frozenset(range(8)), temperature=1.0, seed=1
        )
    ]
    _, (row,) = assert_the_same(model, asked, least=0)
    assert len(row.emitted) >= 20


def test_one_wait_a_cycle(model: Qwen35) -> None:
    cycle, (row,) = decode(model, Counting, [request(PROMPT, depth=3, max_tokens=TOKENS, temperature=0.0)])
    assert cycle.synchronisations == row.statistics.cycles
    assert row.statistics.timings().trunk_replays == 0
