"""Guards where rows end: nothing is emitted after an end token, a stop, a limit or a breakdown.

With a head that is always right, a whole window is accepted at once: what lies behind the stop was decoded, and must
not be seen, counted or committed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from selfdraft.engine import RULES, Engine, Request, Row
from selfdraft.errors import ContextOverflow, InvalidRequest, NonFiniteLogits
from selfdraft.params import SamplingParams
from tests.support.nano import nano_model
from tests.support.rows import finish, prefill_all, request, solo
from tests.support.scripted import ScriptedHead

PROMPT = [7, 3, 9]
TOKENS = 16
V = 16


@pytest.fixture(scope="module")
def inner() -> Any:
    return nano_model(sharpness=3.0)


@pytest.fixture(scope="module")
def text(inner: Any) -> list[int]:
    """Plain greedy decoding without an end."""
    return solo(inner, request(PROMPT, depth=0, max_tokens=TOKENS, temperature=0.0)).emitted


def end_inside(text: list[int], at: int) -> frozenset[int]:
    """The token at index `at` as the end token; it must not come up before."""
    assert text[at] not in text[:at]
    return frozenset([text[at]])


def fresh_index(text: list[int], least: int) -> int:
    """An index from `least` on whose token is new there."""
    return next(i for i in range(least, len(text)) if text[i] not in text[:i])


def decode(inner: Any, text: list[int], asked: Request) -> tuple[Row, ScriptedHead]:
    model = ScriptedHead(inner)
    engine = Engine(model)
    row = engine.add(asked)
    model.follow(row, text)
    finish(engine)
    return row, model


def check_counts(row: Row) -> None:
    timings = row.statistics.timings()
    assert sum(timings.emitted.values()) == len(row.emitted)
    assert timings.emitted["draft"] == sum(timings.drafts_accepted)
    assert timings.trunk_replays == 0
    assert row.state.length == len(row.request.prompt) + len(row.emitted) - 1


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 5])
def test_end_token_inside_an_accepted_run(inner: Any, text: list[int], depth: int) -> None:
    at = fresh_index(text, 2)
    stop = end_inside(text, at)
    row, _ = decode(inner, text, request(PROMPT, stop_ids=stop, depth=depth, max_tokens=TOKENS, temperature=0.0))
    assert row.emitted == text[: at + 1]
    assert row.finish_reason == "stop"
    check_counts(row)
    if depth == 5:  # index `at` was a draft of the first window, and the end of it
        timings = row.statistics.timings()
        assert at <= 5
        assert timings.cycles == 1
        assert timings.emitted == {"prefill": 1, "draft": at, "correction": 0, "bonus": 0, "plain": 0}
        assert (
            timings.drafts_tried == timings.drafts_accepted == [1] * at
        )  # what lay behind was never up for a decision


def test_end_token_as_bonus(inner: Any, text: list[int]) -> None:
    at = fresh_index(text, 2)
    asked = request(PROMPT, stop_ids=end_inside(text, at), depth=at - 1, max_tokens=TOKENS, temperature=0.0)
    row, _ = decode(inner, text, asked)
    assert row.emitted == text[: at + 1]
    assert row.statistics.timings().emitted["bonus"] == 1
    assert row.finish_reason == "stop"
    check_counts(row)


def test_end_token_as_the_very_first(inner: Any, text: list[int]) -> None:
    asked = request(PROMPT, stop_ids=frozenset([text[0]]), depth=3, max_tokens=TOKENS, temperature=0.0)
    row, model = decode(inner, text, asked)
    assert row.emitted == text[:1]
    assert row.finish_reason == "stop"
    assert row.statistics.timings().cycles == 0
    assert len(model.forwards) == row.statistics.prefill_chunks
    check_counts(row)


@pytest.mark.parametrize("depth", [0, 2, 5])
def test_end_token_as_the_last_allowed_token_is_a_stop(inner: Any, text: list[int], depth: int) -> None:
    at = fresh_index(text, 2)
    asked = request(PROMPT, stop_ids=end_inside(text, at), depth=depth, max_tokens=at + 1, temperature=0.0)
    row, _ = decode(inner, text, asked)
    assert row.emitted == text[: at + 1]
    assert row.finish_reason == "stop"


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("limit", [1, 2, 3, 6])
def test_max_tokens_is_never_passed(inner: Any, text: list[int], depth: int, limit: int) -> None:
    row, model = decode(inner, text, request(PROMPT, depth=depth, max_tokens=limit, temperature=0.0))
    assert row.emitted == text[:limit]
    assert row.finish_reason == "length"
    check_counts(row)
    # No forward is wider than what may still be emitted.
    left = limit - 1
    for _, width in model.forwards[row.statistics.prefill_chunks :]:
        assert width <= left
        left -= width


def test_ignore_eos_runs_through(inner: Any, text: list[int]) -> None:
    asked = request(
        PROMPT, stop_ids=frozenset(text), depth=3, max_tokens=TOKENS, temperature=0.0, ignore_eos=True, min_tokens=9
    )
    row, _ = decode(inner, text, asked)
    assert row.emitted == text  # min_tokens withholds nothing where nothing ends
    assert row.finish_reason == "length"


@pytest.mark.parametrize("depth", [0, 1, 3, 5])
@pytest.mark.parametrize("least", [1, 2, 4, 7])
def test_min_tokens_withholds_the_end_and_then_allows_it(inner: Any, depth: int, least: int) -> None:
    """The bias makes token 2 the choice as soon as it is allowed: it comes at index `least`, at any depth."""
    asked = request(
        PROMPT,
        stop_ids=frozenset([2]),
        depth=depth,
        max_tokens=TOKENS,
        temperature=0.0,
        min_tokens=least,
        logit_bias={2: 100.0},
    )
    row, _ = decode(inner, [2] * TOKENS, asked)
    assert len(row.emitted) == least + 1
    assert row.emitted[-1] == 2
    assert 2 not in row.emitted[:-1]
    assert row.finish_reason == "stop"
    plain, _ = decode(inner, [2] * TOKENS, Request(PROMPT, _at_depth_0(asked), stop_ids=asked.stop_ids))
    assert row.emitted == plain.emitted


def _at_depth_0(asked: Request) -> SamplingParams:
    return dataclasses.replace(asked.params, depth=0)


def text_stop(after: int) -> Callable[[Sequence[int]], int | None]:
    """Stops with the `after`-th token of the row; it must not be called again."""
    seen: list[int] = []

    def push(tokens: Sequence[int]) -> int | None:
        assert len(seen) < after, "called after its stop"
        begin = len(seen)
        seen.extend(tokens)
        return after - begin if len(seen) >= after else None

    return push


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("after", [1, 2, 4, 5])
def test_a_text_stop_inside_a_run(inner: Any, text: list[int], depth: int, after: int) -> None:
    asked = request(PROMPT, text_stop=text_stop(after), depth=depth, max_tokens=TOKENS, temperature=0.0)
    row, _ = decode(inner, text, asked)
    assert row.emitted == text[:after]
    assert row.finish_reason == "stop"
    check_counts(row)


@pytest.mark.parametrize("depth", [0, 3])
def test_a_text_stop_may_keep_nothing_of_what_it_is_shown(inner: Any, text: list[int], depth: int) -> None:
    seen: list[int] = []

    def push(tokens: Sequence[int]) -> int | None:
        seen.extend(tokens)
        return 0 if len(seen) > 1 else None

    asked = request(PROMPT, text_stop=push, depth=depth, max_tokens=TOKENS, temperature=0.0)
    row, _ = decode(inner, text, asked)
    assert row.emitted == text[:1]
    assert row.finish_reason == "stop"
    check_counts(row)

    never = request(PROMPT, text_stop=lambda tokens: 0, depth=depth, max_tokens=TOKENS, temperature=0.0, logprobs=0)
    row, _ = decode(inner, text, never)
    assert row.emitted == []
    assert row.scores == []
    assert sum(row.statistics.timings().emitted.values()) == 0


def test_an_end_token_is_shown_to_the_text_stop_but_nothing_behind_it(inner: Any, text: list[int]) -> None:
    at = fresh_index(text, 2)
    seen: list[int] = []
    asked = request(
        PROMPT,
        stop_ids=end_inside(text, at),
        text_stop=lambda tokens: seen.extend(tokens),
        depth=5,
        max_tokens=TOKENS,
        temperature=0.0,
    )
    decode(inner, text, asked)
    assert seen == text[: at + 1]


# Breakdowns


def check_broken(row: Row, emitted: list[int]) -> None:
    assert isinstance(row.error, NonFiniteLogits)
    assert "NaN or infinite" in str(row.error)
    assert row.finish_reason is None
    assert row.emitted == emitted


@pytest.mark.parametrize("depth", [0, 1, 3, 5])
@pytest.mark.parametrize("at", [0, 1, 3, 4, 9])
def test_nan_of_the_trunk_ends_that_row_only(inner: Any, text: list[int], depth: int, at: int) -> None:
    """The logits of the token at index `at` are NaN. What was emitted before stands; the row beside ends as ever."""
    model = ScriptedHead(inner)
    engine = Engine(model)
    asked = request(PROMPT, depth=depth, max_tokens=TOKENS, temperature=0.0)
    broken, sound = engine.add(asked), engine.add(request(PROMPT, depth=2, max_tokens=TOKENS, temperature=0.0))
    for row in (broken, sound):
        model.follow(row, text)
    model.poison(broken.state, len(PROMPT) + at)
    prefill_all(engine)
    finish(engine)
    assert sound.emitted == text
    assert sound.error is None
    assert isinstance(broken.error, NonFiniteLogits)
    # A cycle is emitted whole or not at all, so a run that ends in a breakdown is dropped.
    assert broken.emitted == text[: 1 + (at - 1) // (depth + 1) * (depth + 1) if at else 0]
    check_broken(broken, broken.emitted)
    with pytest.raises(NonFiniteLogits):
        list(engine.run(broken))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_behind_a_rejected_draft(inner: Any, text: list[int], temperature: float, rule: str) -> None:
    """A greedy row never depended on it and goes on; what a rejection rule keeps may depend on the whole window."""
    model = ScriptedHead(inner)
    engine = Engine(model, rule=RULES[rule])
    row = engine.add(request(PROMPT, depth=3, max_tokens=TOKENS, temperature=temperature))
    model.follow(row, text, lambda index: False)
    while not row.emitted:
        engine.step()
    model.poison(row.state, len(PROMPT) + 3)  # in the first window, behind the draft at index 1
    engine.step()
    if temperature == 0:
        assert row.error is None
        assert row.emitted == text[:2]
    else:
        check_broken(row, row.emitted[:1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_nan_of_the_head_ends_that_row_only(inner: Any, text: list[int], at: int, temperature: float) -> None:
    """Beside it rows at depth 0, whose padding repeats the broken row's hidden, and at depths 1 and 3."""
    model = ScriptedHead(inner)
    engine = Engine(model)
    broken = engine.add(request(PROMPT, depth=3, max_tokens=TOKENS, temperature=temperature))
    beside = [engine.add(request(PROMPT, depth=depth, max_tokens=TOKENS, temperature=0.0)) for depth in (0, 1, 3)]
    start = len(PROMPT)
    if temperature == 0:  # the drafts before are right, so that the broken position matters
        model.script(broken.state, lambda index: None if index == start + at else text[index - start])
    else:
        model.script(broken.state, lambda index: None if index == start + at else 0)
    for row in beside:
        model.follow(row, text)
    prefill_all(engine)
    finish(engine)
    for row in beside:
        assert row.error is None
        assert row.emitted == text
    check_broken(broken, broken.emitted)
    assert len(broken.emitted) <= at


def test_nan_in_a_draft_that_nobody_asked_for(inner: Any, text: list[int]) -> None:
    """A row of depth 1 beside one of depth 4 drafts on as padding: its own NaN there means nothing."""
    model = ScriptedHead(inner)
    engine = Engine(model)
    shallow = engine.add(request(PROMPT, depth=1, max_tokens=TOKENS, temperature=0.0))
    deep = engine.add(request(PROMPT, depth=4, max_tokens=TOKENS, temperature=0.0))
    start = len(PROMPT)
    prefill_all(engine)
    # Its draft is the token at index 1; the head breaks down one further, where only padding goes.
    model.script(shallow.state, lambda index: None if index == start + 2 else text[index - start])
    model.follow(deep, text)
    engine.step()
    assert shallow.error is None
    assert shallow.emitted == text[:3]


# Requests that cannot be served


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        (request([], depth=0), "prompt", ["empty"]),
        (request([1, 99, 2], depth=0), "prompt", ["99", "16", "tokenizer of another model"]),
        (request([1, -1], depth=0), "prompt", ["-1", "16"]),
        (request([1], depth=9), "depth", ["9", "0..8"]),
        (request([1], depth=0, logit_bias={16: 1.0}), "logit_bias", ["16"]),
    ],
)
def test_bad_requests_are_refused_by_value(inner: Any, asked: Request, param: str, words: list[str]) -> None:
    engine = Engine(inner)
    with pytest.raises(InvalidRequest) as caught:
        engine.add(asked)
    assert caught.value.param == param
    for word in words:
        assert word in str(caught.value)
    assert engine.rows == []


def test_a_model_without_a_head_drafts_nothing() -> None:
    headless = nano_model(with_head=False)
    with pytest.raises(InvalidRequest, match="depth 1 is not possible here"):
        Engine(headless).add(request([1], depth=1))
    row = solo(headless, request([1, 2], depth="auto", max_tokens=5, temperature=0.0))
    assert row.statistics.timings().emitted["plain"] == 4
    assert row.state.head_length == 0


def test_a_prompt_beyond_the_context_is_refused_and_max_tokens_is_cut_to_it() -> None:
    model = nano_model(max_position_embeddings=20)
    engine = Engine(model)
    for length in (20, 23):
        with pytest.raises(ContextOverflow) as caught:
            engine.add(request([1] * length, depth=0))
        assert str(length) in str(caught.value)
        assert f"shorten it by {length - 19}" in str(caught.value)
    row = engine.add(request([1] * 15, depth=4, max_tokens=50, temperature=0.0))
    finish(engine)
    assert row.params.max_tokens == len(row.emitted) == 5
    assert row.finish_reason == "length"
    assert row.state.length + 1 == 20


def test_a_cancelled_row_keeps_what_it_has(inner: Any, text: list[int]) -> None:
    engine = Engine(inner)
    running = engine.add(request(PROMPT, depth=0, max_tokens=TOKENS, temperature=0.0))
    other = engine.add(request(PROMPT, depth=2, max_tokens=TOKENS, temperature=0.0))
    waiting = engine.add(request(PROMPT, depth=1, max_tokens=TOKENS, temperature=0.0))
    while len(running.emitted) < 3:
        engine.step()
    engine.cancel(running)
    engine.cancel(waiting)
    assert running.finish_reason == waiting.finish_reason == "cancelled"
    kept = list(running.emitted)
    finish(engine)
    assert running.emitted == kept == text[: len(kept)]
    assert other.emitted == text
    assert other.finish_reason == "length"
    engine.cancel(other)  # too late to change anything
    assert other.finish_reason == "length"


def test_parameters_of_a_row_that_left_are_not_used_again(inner: Any) -> None:
    """A new row may get the memory of one that left, and with it its id.

    A chain kept by id decoded such rows with their predecessor's parameters, about one request in a hundred. Chance is
    left out here: one row object gets other parameters and other end tokens.
    """
    engine = Engine(inner)
    row = engine.add(request(PROMPT, stop_ids=frozenset([1]), depth=0, temperature=0.0, min_tokens=3))
    first = engine.cycle.batch([row], [0]).chain
    assert engine.cycle.batch([row], [0]).chain is first  # it is kept while nothing changes
    seen = [first]
    for changes in ({"min_tokens": 0}, {"temperature": 0.7}, {"logit_bias": {3: 1.0}}, {"top_k": 4}):
        row.params = dataclasses.replace(row.params, **changes)
        seen.append(engine.cycle.batch([row], [0]).chain)
    row.request = dataclasses.replace(row.request, stop_ids=frozenset([2]))
    seen.append(engine.cycle.batch([row], [0]).chain)
    assert len({id(chain) for chain in seen}) == 6
    assert engine.cycle.batch([row, row], [0, 0]).chain.greedy == [False, False]
