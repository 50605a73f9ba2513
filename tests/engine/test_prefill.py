"""Guards what a long prefill owes its user: progress inside a chunk, and a way out of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from selfdraft.engine import Engine, Row
from tests.support.nano import nano_model
from tests.support.rows import finish, request, solo

PROMPT = [i % 11 for i in range(40)]
CHUNK = 32


@pytest.fixture(scope="module")
def model() -> Any:
    return nano_model(sharpness=3.0)


@pytest.mark.parametrize("depth", [0, 2])
def test_progress_is_told_inside_a_chunk(model: Any, depth: int) -> None:
    seen: list[tuple[int, int]] = []
    asked = request(PROMPT, depth=depth, max_tokens=3, temperature=0.0)
    told = replace(asked, on_prefill=lambda *figures: seen.append(figures))
    row = solo(model, told, prefill_chunk=CHUNK)
    assert row.emitted == solo(model, asked, prefill_chunk=CHUNK).emitted
    done = [tokens for tokens, _ in seen]
    assert {total for _, total in seen} == {len(PROMPT)}
    assert done == sorted(set(done))
    assert {CHUNK, len(PROMPT) - 1, len(PROMPT)} <= set(done)
    assert len([tokens for tokens in done if tokens < CHUNK]) >= 2
    assert done[-1] == len(PROMPT)


@pytest.mark.parametrize("at", [1, CHUNK, CHUNK + 1, len(PROMPT)])
def test_a_row_cancelled_inside_a_chunk_is_let_go_at_once(model: Any, at: int) -> None:
    engine = Engine(model, prefill_chunk=CHUNK)
    seen: list[int] = []
    rows: list[Row] = []

    def cancel(tokens: int, total: int) -> None:
        seen.append(tokens)
        if tokens >= at:
            engine.cancel(rows[0])

    asked = request(PROMPT, depth=2, max_tokens=6, temperature=0.0)
    rows.append(engine.add(replace(asked, on_prefill=cancel)))
    beside = engine.add(asked)
    finish(engine)
    assert rows[0].finish_reason == "cancelled"
    assert rows[0].emitted == []
    assert len([tokens for tokens in seen if tokens >= at]) == 1  # nothing was forwarded after it
    assert beside.emitted == solo(model, asked, prefill_chunk=CHUNK).emitted


def test_a_short_prompt_does_not_wait_for_a_long_one(model: Any) -> None:
    engine = Engine(model, prefill_chunk=4)
    long, short = (request(prompt, depth=2, max_tokens=2, temperature=0.0) for prompt in (PROMPT, PROMPT[:6]))
    first, second = engine.add(long), engine.add(short)
    steps = 0
    while not second.emitted:
        engine.step()
        steps += 1
    assert first.emitted == []
    assert steps <= 6  # three chunks of its own, and at most as many of the other
    finish(engine)
    for row, asked in ((first, long), (second, short)):
        assert row.emitted == solo(model, asked, prefill_chunk=4).emitted


def test_an_interrupt_inside_a_chunk_ends_that_row_alone(model: Any) -> None:
    engine = Engine(model, prefill_chunk=CHUNK)

    def interrupt(tokens: int, total: int) -> None:
        raise KeyboardInterrupt

    asked = request(PROMPT, depth=2, max_tokens=6, temperature=0.0)
    broken = engine.add(replace(asked, on_prefill=interrupt))
    beside = engine.add(asked)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert broken.error is not None
    finish(engine)
    assert beside.emitted == solo(model, asked, prefill_chunk=CHUNK).emitted
