"""Guards the cycle that is started before the one ahead of it is read.

Rows that never draft run one token ahead of the host. Nothing but the clock may show it: same tokens, same scores, same
states, and a forward is wasted only where a row ends on a token nobody could foresee.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.engine import RULES, Engine, Request, Row
from selfdraft.engine.cycle import Choose, Cycle, Flight
from tests.support.nano import nano_model
from tests.support.rows import finish, prefill_all, request, solo
from tests.support.scripted import ScriptedHead

PROMPT = [3, 1, 4, 1, 5]
TOKENS = 20


@pytest.fixture(scope="module")
def inner() -> Any:
    return nano_model(sharpness=1.0)


class Waiting(Cycle):
    """Reads every cycle before it starts the next."""

    def _launch_ahead(self, flight: Flight, choose: Choose) -> None:
        return None


def both(inner: Any, asked: Request, stream: Any = None) -> tuple[Row, Row]:
    """The same request run ahead, and waited for."""
    rows = []
    for kind in (Cycle, Waiting):
        engine = Engine(inner, cycle=kind(inner, RULES["block"]))
        row = engine.add(asked)
        row.stream = stream or row.stream
        finish(engine)
        rows.append(row)
    return rows[0], rows[1]


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 1.0, "seed": 6, "top_p": 0.9, "top_k": 8, "min_p": 0.02},
        {"temperature": 0.0, "presence_penalty": 1.5},
        {"temperature": 0.0, "repetition_penalty": 1.6},
        {"temperature": 1.0, "seed": 7, "frequency_penalty": 0.9},
        {"temperature": 1.0, "seed": 8, "logprobs": 3},
    ],
)
def test_every_kind_of_sampling(inner: Any, given: dict[str, Any]) -> None:
    ahead, waited = both(inner, request(PROMPT, depth=0, max_tokens=TOKENS, **given))
    assert ahead.emitted == waited.emitted
    assert len(ahead.emitted) == TOKENS
    assert ahead.scores == waited.scores
    assert_same_state(ahead, waited)


def test_noise_without_a_seed_moves_on(inner: Any) -> None:
    """Noise drawn twice would be seen as the same text only if the counter were the same in both."""
    stream = solo(inner, request(PROMPT, depth=0, max_tokens=1, temperature=1.0)).stream
    ahead, waited = both(inner, request(PROMPT, depth=0, max_tokens=TOKENS, temperature=1.5), stream)
    assert ahead.emitted == waited.emitted
    assert ahead.draws == waited.draws == TOKENS


def test_end_tokens_are_withheld_up_to_the_same_token(inner: Any) -> None:
    free = solo(inner, request(PROMPT, depth=0, max_tokens=TOKENS, temperature=1.0, seed=3)).emitted
    for least in range(1, 8):
        stops = frozenset(free[:least])
        asked = request(
            PROMPT, stop_ids=stops, depth=0, max_tokens=TOKENS, min_tokens=least, temperature=1.0, seed=3, logprobs=0
        )
        ahead, waited = both(inner, asked)
        assert ahead.emitted == waited.emitted
        assert not stops & set(ahead.emitted[:least])


def test_a_forward_is_on_its_way_while_rows_run_and_none_is_left_over(inner: Any) -> None:
    model = ScriptedHead(inner)
    engine = Engine(model)
    row = engine.add(request(PROMPT, depth=0, max_tokens=TOKENS, temperature=0.0))
    prefill_all(engine)
    chunks = len(model.forwards)
    for cycle in range(1, TOKENS):
        engine.step()
        assert row.statistics.cycles == cycle
        assert len(model.forwards) == chunks + min(cycle + 1, TOKENS - 1)  # the last token needs none after it
    assert row.finish_reason == "length"
    assert engine.cycle.synchronisations == TOKENS - 1
    assert row.statistics.timings().trunk_forwards == len(model.forwards)


def test_an_end_wastes_one_forward_and_counts_it_nowhere(inner: Any) -> None:
    free = solo(inner, request(PROMPT, depth=0, max_tokens=TOKENS, temperature=0.0)).emitted
    at = next(i for i in range(2, TOKENS) if free[i] not in free[:i])
    model = ScriptedHead(inner)
    engine = Engine(model)
    row = engine.add(request(PROMPT, stop_ids=frozenset([free[at]]), depth=0, max_tokens=TOKENS, temperature=0.0))
    finish(engine)
    assert row.emitted == free[: at + 1]
    timings = row.statistics.timings()
    assert timings.trunk_forwards == len(model.forwards) - 1
    assert timings.trunk_replays == 0
    assert engine.cycle.rows_ahead == []  # nothing is held for a row that left


def test_rows_that_join_wait_for_the_cycle_on_its_way(inner: Any) -> None:
    model = ScriptedHead(inner)
    engine = Engine(model)
    asked = [request(PROMPT[i:], depth=0, max_tokens=TOKENS, temperature=1.0, seed=i) for i in range(3)]
    rows = []
    for one in asked:
        rows.append(engine.add(one))
        for _ in range(5):
            engine.step()
    finish(engine)
    assert [row.emitted for row in rows] == [solo(inner, one).emitted for one in asked]
    assert sum(width for width, _ in model.forwards) == sum(row.statistics.trunk_forwards for row in rows)


def test_a_row_that_drafts_ends_the_running_ahead(inner: Any) -> None:
    engine = Engine(inner)
    plain = engine.add(request(PROMPT, depth=0, max_tokens=TOKENS, temperature=0.0))
    prefill_all(engine)
    engine.step()
    assert engine.cycle.rows_ahead == [plain]
    drafting = engine.add(request(PROMPT, depth=2, max_tokens=TOKENS, temperature=0.0))
    engine._prefill_is_next = True
    prefill_all(engine)
    engine.step()  # the cycle on its way
    assert len(drafting.emitted) == 1
    assert engine.cycle.rows_ahead == []
    finish(engine)
    assert plain.emitted == drafting.emitted


def test_a_cancelled_row_takes_nothing_with_it(inner: Any) -> None:
    engine = Engine(inner)
    asked = [request(PROMPT[i:], depth=0, max_tokens=TOKENS, temperature=0.0) for i in range(2)]
    leaving, staying = (engine.add(one) for one in asked)
    prefill_all(engine)
    for _ in range(4):
        engine.step()
    engine.cancel(leaving)
    assert engine.cycle.rows_ahead == []
    finish(engine)
    whole = solo(inner, asked[0])
    assert leaving.emitted == whole.emitted[: len(leaving.emitted)]
    short = request(PROMPT, depth=0, max_tokens=len(leaving.emitted), temperature=0.0)
    assert_same_state(leaving, solo(inner, short))
    assert_same_state(staying, solo(inner, asked[1]))


def test_a_row_that_ends_elsewhere_stops_nothing(inner: Any) -> None:
    """Its first token is its last, and it ends while the cycle of the others is on its way."""
    model = ScriptedHead(inner)
    engine = Engine(model)
    running = engine.add(request(PROMPT, depth=0, max_tokens=TOKENS, temperature=0.0))
    prefill_all(engine)
    engine.step()
    short = engine.add(request(PROMPT[1:], depth=0, max_tokens=1, temperature=0.0))
    finish(engine)
    assert short.finish_reason == "length"
    forwards = sum(row.statistics.trunk_forwards for row in (running, short))
    assert len(model.forwards) == forwards  # none was started and dropped
    assert running.emitted == solo(inner, request(PROMPT, depth=0, max_tokens=TOKENS, temperature=0.0)).emitted


def test_a_token_that_a_stop_string_swallows_leaves_the_state_where_it_was(inner: Any) -> None:
    seen: list[int] = []

    def swallow(tokens: Sequence[int]) -> int | None:
        seen.extend(tokens)
        return 0 if len(seen) == 6 else None

    stopped = solo(inner, request(PROMPT, text_stop=swallow, depth=0, max_tokens=TOKENS, temperature=0.0))
    assert len(stopped.emitted) == 5
    assert_same_state(stopped, solo(inner, request(PROMPT, depth=0, max_tokens=5, temperature=0.0)))


def test_a_broken_row_keeps_its_state_and_the_others_go_on(inner: Any) -> None:
    model = ScriptedHead(inner)
    engine = Engine(model)
    broken, sound = (engine.add(request(PROMPT, depth=0, max_tokens=TOKENS, temperature=0.0)) for _ in range(2))
    model.poison(broken.state, len(PROMPT) + 6)
    finish(engine)
    assert broken.error is not None
    assert_same_state(broken, solo(inner, request(PROMPT, depth=0, max_tokens=6, temperature=0.0)))
    assert sound.emitted == solo(inner, request(PROMPT, depth=0, max_tokens=TOKENS, temperature=0.0)).emitted


def test_time_between_steps_is_not_hidden(inner: Any) -> None:
    """A caller that dawdles would otherwise be told a speed that the device never had."""
    engine = Engine(inner)
    row = engine.add(request(PROMPT, depth=0, max_tokens=6, temperature=0.0))
    while engine.rows:
        engine.step()
        time.sleep(0.02)
    assert row.statistics.decode_seconds > 4 * 0.02


def assert_same_state(row: Row, other: Row) -> None:
    assert row.state.length == other.state.length == len(row.request.prompt) + len(row.emitted) - 1
    for mine, theirs in zip(row.state.recurrent, other.state.recurrent, strict=True):
        assert mx.array_equal(mine.window, theirs.window)
        assert mx.array_equal(mine.memory, theirs.memory)


def test_a_model_whose_calls_cannot_be_taken_back_is_waited_for(inner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = {}
    for able in (True, False):
        monkeypatch.setattr(inner, "looks_ahead", able, raising=False)
        engine = Engine(inner)
        row = engine.add(request(PROMPT, depth=0, max_tokens=TOKENS))
        started = []
        while not row.done:
            engine.step()
            started += engine.cycle.rows_ahead
        ahead[able] = len(started)
    assert ahead[True] > 0
    assert ahead[False] == 0
