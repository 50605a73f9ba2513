"""Guards the rows' independence: they join, run, end and are cancelled in any order, and each decodes as if alone.

Hypothesis plays the callers. The head is right seven times in ten, so ends and stops fall inside accepted runs. Every
greedy or seeded row must equal its solo run at depth 0; the examples are derived, not random, so there are no false
alarms.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from selfdraft.engine import RULES, Engine, Request, Row
from selfdraft.params import SamplingParams
from tests.support.nano import SMALLER, nano_model
from tests.support.rows import finish, params, solo
from tests.support.scripted import ScriptedHead

V = 16
CHUNK = 4
PROMPTS = [tuple(random.Random(n).randrange(V) for _ in range(n)) for n in (1, 3, 4, 5, 9, 13)]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.6},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "seed": 2},
    {"temperature": 0.9, "presence_penalty": 0.8, "seed": 3},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5},
]


class PairStop:
    """A text callback: ends a row with the first pair of neighbouring tokens whose sum is a multiple of `divisor`."""

    def __init__(self, divisor: int) -> None:
        self._divisor = divisor
        self._before: int | None = None
        self.stopped = False

    def __call__(self, tokens: Sequence[int]) -> int | None:
        assert tokens
        assert not self.stopped, "called after its stop"
        for count, token in enumerate(tokens, 1):
            if self._before is not None and (self._before + token) % self._divisor == 0:
                self.stopped = True
                return count
            self._before = token
        return None


@dataclass(frozen=True)
class Asked:
    """A request as a value: what a row emits alone depends on this only."""

    prompt: tuple[int, ...]
    sampling: int
    max_tokens: int
    stop_ids: frozenset[int]
    min_tokens: int
    ignore_eos: bool
    divisor: int

    def request(self, depth: Any) -> Request:
        return Request(
            self.prompt,
            params(
                depth=depth,
                max_tokens=self.max_tokens,
                min_tokens=min(self.min_tokens, self.max_tokens),
                ignore_eos=self.ignore_eos,
                **SAMPLINGS[self.sampling],
            ),
            stop_ids=self.stop_ids,
            text_stop=PairStop(self.divisor) if self.divisor else None,
        )

    @property
    def repeatable(self) -> bool:
        sampling = SAMPLINGS[self.sampling]
        return sampling["temperature"] == 0 or "seed" in sampling


@cache
def model() -> Any:
    return nano_model(sharpness=3.0, **SMALLER)


@cache
def alone(asked: Asked) -> tuple[list[int], str | None]:
    row = solo(model(), asked.request(0), prefill_chunk=CHUNK)
    return row.emitted, row.finish_reason


asked_for = st.builds(
    Asked,
    prompt=st.sampled_from(PROMPTS),
    sampling=st.integers(0, len(SAMPLINGS) - 1),
    max_tokens=st.sampled_from([1, 2, 5, 11]),
    stop_ids=st.sampled_from([frozenset(), frozenset({3}), frozenset({1, 6, 12})]),
    min_tokens=st.sampled_from([0, 0, 2, 5]),
    ignore_eos=st.sampled_from([False, False, False, True]),
    divisor=st.sampled_from([0, 0, 7, 17]),
)
any_depth = st.sampled_from([0, 1, 2, 3, 5, 8, "auto"])


class Rows(RuleBasedStateMachine):
    @initialize(rule_name=st.sampled_from(sorted(RULES)))
    def open(self, rule_name: str) -> None:
        self.head = ScriptedHead(model())
        self.engine = Engine(self.head, rule=RULES[rule_name], prefill_chunk=CHUNK)
        self.rows: list[tuple[Row, Asked]] = []
        self.frozen: dict[int, list[int]] = {}  # what rows that are done had emitted

    @rule(asked=asked_for, depth=any_depth)
    def join(self, asked: Asked, depth: Any) -> None:
        row = self.engine.add(asked.request(depth))
        text = alone(asked)[0] if asked.repeatable else [5, 11, 2] * 8
        lucky = random.Random(len(self.rows))
        right = [lucky.random() < 0.7 for _ in range(40)]
        self.head.follow(row, text, lambda index: right[index])
        self.rows.append((row, asked))

    @precondition(lambda self: self.engine.rows)
    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            before = {id(row): len(row.emitted) for row, _ in self.rows}
            advanced = self.engine.step()
            grown = [row for row, _ in self.rows if len(row.emitted) > before[id(row)]]
            assert all(any(row is other for other in advanced) for row in grown)

    @precondition(lambda self: self.engine.rows)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.engine.rows))
        self.engine.cancel(row)
        assert row.finish_reason == "cancelled"

    @invariant()
    def rows_that_are_done_have_left_and_stay_as_they_were(self) -> None:
        running = {id(row) for row in self.engine.rows}
        for row, _ in self.rows:
            assert row.done != (id(row) in running)
            assert row.error is None
            assert len(row.emitted) <= (row.params.max_tokens or 0)
            if row.done:
                assert self.frozen.setdefault(id(row), list(row.emitted)) == row.emitted

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        finish(self.engine)
        self.rows_that_are_done_have_left_and_stay_as_they_were()
        assert self.engine.rows == []
        for row, asked in self.rows:
            check(row, asked)


def check(row: Row, asked: Asked) -> None:
    timings = row.statistics.timings()
    assert sum(timings.emitted.values()) == len(row.emitted)
    assert timings.emitted["draft"] == sum(timings.drafts_accepted)
    assert timings.trunk_replays == 0
    assert all(kept <= tried for kept, tried in zip(timings.drafts_accepted, timings.drafts_tried, strict=True))
    if row.emitted:
        assert row.state.length == len(asked.prompt) + len(row.emitted) - 1
        assert timings.trunk_forwards == timings.cycles + -(-(len(asked.prompt) - 1) // CHUNK) + 1
    check_end(row, asked)
    if not asked.repeatable:
        return
    text, reason = alone(asked)
    if row.finish_reason == "cancelled":
        assert row.emitted == text[: len(row.emitted)]
    else:
        assert (row.emitted, row.finish_reason) == (text, reason)


def check_end(row: Row, asked: Asked) -> None:
    """Ends come where they must and nowhere before, whatever was sampled."""
    ends = frozenset() if asked.ignore_eos else asked.stop_ids
    assert not any(token in ends for token in row.emitted[:-1])
    assert not any(token in ends for token in row.emitted[: asked.min_tokens])
    pair = PairStop(asked.divisor) if asked.divisor else None
    by_text = pair(row.emitted) if pair and row.emitted else None
    assert by_text in (None, len(row.emitted))
    ended = bool(row.emitted) and (row.emitted[-1] in ends or by_text is not None)
    if row.finish_reason != "cancelled":
        assert row.finish_reason == ("stop" if ended else "length")
        assert ended or len(row.emitted) == asked.max_tokens
    else:
        assert not ended
        assert len(row.emitted) < asked.max_tokens


def test_rows_decode_as_if_alone() -> None:
    run_state_machine_as_test(
        Rows, settings=settings(max_examples=40, stateful_step_count=20, deadline=None, derandomize=True)
    )


def test_solo_runs_end_in_every_way() -> None:
    """The comparison above is about something: solo runs end by limit, by end token and by text."""
    base = Asked(PROMPTS[4], 0, 11, frozenset(), 0, False, 0)
    text, reason = alone(base)
    assert (len(text), reason) == (11, "length")
    late = dataclasses.replace(base, stop_ids=frozenset([text[4]]), min_tokens=0)
    assert alone(late)[1] == "stop"
    assert isinstance(late.request(0).params, SamplingParams)
    assert any(alone(dataclasses.replace(base, divisor=divisor))[1] == "stop" for divisor in (7, 17))
