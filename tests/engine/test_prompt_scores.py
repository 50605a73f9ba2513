"""Scores of a prompt's own tokens: the law of a plain forward, whatever the chunks and the company, for who asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.engine import Engine, Request, Row, prefill
from selfdraft.errors import ContextOverflow, InvalidRequest, NonFiniteLogits
from selfdraft.models.qwen3_5 import Qwen35
from tests.support.nano import nano_model
from tests.support.rows import finish, params, request, solo

CHUNK = 8
PROMPT = [3, 14, 1, 5, 9, 2, 6, 13, 5, 8, 9, 7, 12, 3, 2, 3, 8, 4, 6, 11]


@pytest.fixture(scope="module")
def model() -> Any:
    return nano_model(sharpness=3.0)


@pytest.fixture(autouse=True, params=[3, 64])
def together(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A chunk is scored in several slices, and in one."""
    monkeypatch.setattr(prefill, "SCORED_TOGETHER", request.param)
    return int(request.param)


def scored(length: int = len(PROMPT), *, top: int = 2, only: bool = False, **given: Any) -> Request:
    asked = request(PROMPT[:length], **{"depth": 2, "max_tokens": 6, "temperature": 0.0, **given})
    return replace(asked, prompt_logprobs=top, only_prompt=only)


def law(model: Any, tokens: list[int]) -> np.ndarray[Any, Any]:
    """log p(. | tokens[: i + 1]) at every i, from one forward of all."""
    hidden, _ = model.forward(mx.array([tokens]), [model.new_state()], keep_steps=False)
    logits = model.logits(hidden)[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


@contextmanager
def logits_of(change: Any) -> Iterator[list[int]]:
    """Have every projection go through `change`; how many positions each had."""
    positions: list[int] = []
    real = Qwen35.logits

    def logits(self: Qwen35, hidden: mx.array) -> mx.array:
        positions.append(hidden.shape[1])
        return change(real(self, hidden))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen35, "logits", logits)
        yield positions


@pytest.mark.parametrize("length", range(1, 21))
def test_they_are_the_log_softmax_of_one_forward(model: Any, length: int) -> None:
    prompt, top = PROMPT[:length], 3
    expected = law(model, prompt)
    for only in (False, True):
        row = solo(model, scored(length, top=top, only=only), prefill_chunk=CHUNK)
        assert [score.token for score in row.prompt_scores] == prompt[1:]
        for position, score in enumerate(row.prompt_scores):
            assert score.logprob == pytest.approx(expected[position, score.token], abs=1e-4)
            likeliest = np.sort(expected[position])[::-1][:top]
            assert [value for _, value in score.top] == pytest.approx(likeliest, abs=1e-4)
            assert [expected[position, id] for id, _ in score.top] == pytest.approx(likeliest, abs=1e-4)


@pytest.mark.parametrize("given", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5, "frequency_penalty": 1.0}])
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("length", [1, 8, 9, 20])
def test_what_is_emitted_does_not_hang_on_them(model: Any, length: int, depth: int, given: dict[str, Any]) -> None:
    asked = scored(length, depth=depth, logprobs=1, **given)
    with_scores = solo(model, asked, prefill_chunk=CHUNK)
    without = solo(model, replace(asked, prompt_logprobs=None), prefill_chunk=CHUNK)
    assert with_scores.emitted == without.emitted
    assert with_scores.scores == without.scores
    assert with_scores.statistics.trunk_forwards == without.statistics.trunk_forwards
    assert without.prompt_scores == []


def test_raw_scores_know_no_penalties(model: Any) -> None:
    plain = solo(model, scored(), prefill_chunk=CHUNK)
    bent = solo(model, scored(temperature=1.0, repetition_penalty=3.0, logit_bias={3: 50.0}), prefill_chunk=CHUNK)
    assert bent.prompt_scores == plain.prompt_scores


def test_only_who_asks_pays_and_never_for_more_than_a_slice(model: Any, together: int) -> None:
    with logits_of(lambda logits: logits) as positions:
        solo(model, replace(scored(depth=0, max_tokens=1), prompt_logprobs=None), prefill_chunk=CHUNK)
        assert positions == [1]
        positions.clear()
        solo(model, scored(only=True), prefill_chunk=CHUNK)
        assert max(positions) <= together
        assert sum(positions) == len(PROMPT) - 1


def test_beside_rows_that_decode(model: Any) -> None:
    beside = request(PROMPT[:5], depth=2, max_tokens=40, temperature=1.0, seed=1)
    engine = Engine(model, prefill_chunk=CHUNK)
    running = engine.add(beside)
    while len(running.emitted) < 4:
        engine.step()
    rows = [engine.add(scored(length, top=length % 4, only=length > 15)) for length in (9, 17, 20)]
    finish(engine)
    assert running.emitted == solo(model, beside, prefill_chunk=CHUNK).emitted
    for row in rows:
        alone = solo(model, row.request, prefill_chunk=CHUNK)
        assert row.prompt_scores == alone.prompt_scores
        assert row.emitted == alone.emitted
        assert {len(score.top) for score in row.prompt_scores} == {row.request.prompt_logprobs}


@pytest.mark.parametrize("depth", [0, 2])
def test_scoring_alone_emits_nothing(model: Any, depth: int) -> None:
    seen: list[int] = []
    asked = replace(scored(only=True, depth=depth), on_prefill=lambda done, total: seen.append(done))
    row = solo(model, asked, prefill_chunk=CHUNK)
    assert (row.emitted, row.finish_reason, seen[-1]) == ([], "length", len(PROMPT))
    assert row.statistics.cycles == 0
    assert row.statistics.trunk_forwards == row.statistics.prefill_chunks == 3
    assert row.state.head_length == 0


def test_a_prompt_that_fills_the_context_can_be_scored() -> None:
    model = nano_model(max_position_embeddings=len(PROMPT))
    row = solo(model, scored(only=True), prefill_chunk=CHUNK)
    assert len(row.prompt_scores) == len(PROMPT) - 1
    with pytest.raises(ContextOverflow, match="shorten it by 1"):
        solo(model, scored())
    with pytest.raises(ContextOverflow, match="shorten it by 1"):
        solo(model, replace(scored(only=True), prompt=[*PROMPT, 1]))


@pytest.mark.parametrize("at", [CHUNK // 2, CHUNK, CHUNK + 6, len(PROMPT)])
@pytest.mark.parametrize("only", [True, False])
def test_a_row_cancelled_in_between_is_let_go_at_once(model: Any, at: int, only: bool) -> None:
    engine = Engine(model, prefill_chunk=CHUNK)
    seen: list[int] = []
    rows: list[Row] = []

    def cancel(tokens: int, total: int) -> None:
        seen.append(tokens)
        if tokens >= at:
            engine.cancel(rows[0])

    rows.append(engine.add(replace(scored(only=only), on_prefill=cancel)))
    beside = engine.add(scored(depth=0))
    finish(engine)
    assert rows[0].finish_reason == "cancelled"
    assert rows[0].emitted == []
    assert len([tokens for tokens in seen if tokens >= at]) == 1  # nothing was forwarded, or scored, after it
    alone = solo(model, beside.request, prefill_chunk=CHUNK)
    assert (beside.emitted, beside.prompt_scores) == (alone.emitted, alone.prompt_scores)
    assert rows[0].prompt_scores == alone.prompt_scores[: len(rows[0].prompt_scores)]


@pytest.mark.parametrize("only", [True, False])
def test_logits_that_are_no_numbers_end_the_row_with_an_error(model: Any, only: bool) -> None:
    with logits_of(lambda logits: mx.where(logits == logits.max(), mx.nan, logits) if logits.shape[1] > 1 else logits):
        engine = Engine(model, prefill_chunk=CHUNK)
        broken, sound = engine.add(scored(only=only)), engine.add(scored(1, depth=0))
        assert engine.step() == [broken]
        finish(engine)
    assert isinstance(broken.error, NonFiniteLogits)
    assert "on the prompt; try another dtype" in str(broken.error)
    assert (broken.emitted, broken.prompt_scores) == ([], [])
    assert sound.finish_reason == "length"


def test_slices_are_steps_of_the_progress(model: Any, together: int) -> None:
    """So is a cancelled row let go between two of them."""

    def told(asked: Request) -> list[int]:
        seen: list[int] = []
        solo(model, replace(asked, on_prefill=lambda done, total: seen.append(done)))
        return seen

    plain = replace(scored(only=True), prompt_logprobs=None)
    assert len(told(scored(only=True))) == len(told(plain)) + -(-19 // together)


@pytest.mark.parametrize("top", [-1, 21])
def test_a_number_out_of_range_is_refused(model: Any, top: int) -> None:
    with pytest.raises(InvalidRequest, match=f"from 0 to 20, not {top}") as caught:
        Engine(model).check(Request(PROMPT, params(), prompt_logprobs=top))
    assert caught.value.param == "prompt_logprobs"
