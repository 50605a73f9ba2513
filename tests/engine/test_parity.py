"""Guards claim 2 of the design where MLX is row-exact (CPU, reference BLAS): depth and batch do not change the text.

Greedy and seeded rows at depths 0 to 5 and "auto" emit, token for token, what each of them emits alone at depth 0, in
fp32, bf16, 8-bit and 4-bit, with prompts around the borders of the prefill chunks, with filters and with penalties.
Acceptance is exercised twice: with the nano model's own head (mostly wrong), and with a head that is right at random,
so that every number of drafts gets committed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.engine import Engine, Request, Row
from tests.support.nano import nano_model
from tests.support.rows import finish, fork_rows, params, solo
from tests.support.scripted import ScriptedHead

TOKENS = 16
CHUNK = 8
DEPTHS: list[Any] = [0, 1, 2, 3, 4, 5, "auto"]

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 6, "min_p": 0.05, "seed": -4},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    {"temperature": 1.1, "repetition_penalty": 1.2, "frequency_penalty": -0.5, "logit_bias": {3: 1.5}, "seed": 2**63},
]

# The body of a prompt is all but its last token: none, one, one short of a chunk, one chunk, one more, two chunks ...
LENGTHS = [1, 2, CHUNK, CHUNK + 1, CHUNK + 2, 2 * CHUNK + 1, 2 * CHUNK + 2, 3 * CHUNK + 6]
PROMPTS = [[random.Random(n).randrange(16) for _ in range(n)] for n in LENGTHS]

KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"dtype": mx.bfloat16},
    "8-bit": {"bits": 8},
    "4-bit, bf16 scales": {"bits": 4, "dtype": mx.bfloat16},
}


@dataclass
class Reference:
    """What rows emit alone at depth 0."""

    model: Any
    asked: list[tuple[list[int], dict[str, Any]]]
    texts: list[list[int]]


def request(prompt: Sequence[int], setting: dict[str, Any], depth: Any) -> Request:
    return Request(prompt, params(depth=depth, max_tokens=TOKENS, **setting))


@pytest.fixture(scope="module", params=KINDS)
def reference(request: pytest.FixtureRequest) -> Reference:
    """Prompt i with settings i and i + 2."""
    model = nano_model(sharpness=3.0, **KINDS[request.param])
    asked = [(PROMPTS[i], SETTINGS[(i + shift) % 5]) for shift in (0, 2) for i in range(len(PROMPTS))]
    rows = [solo(model, _request(prompt, setting, 0), prefill_chunk=CHUNK) for prompt, setting in asked]
    return Reference(model, asked, [row.emitted for row in rows])


_request = request


def right_at_random(seed: int) -> Any:
    """Seven times in ten, as a function of the index."""
    return lambda index: random.Random(1000 * seed + index).random() < 0.7


def test_every_depth_in_one_batch_with_a_head_that_is_often_right(reference: Reference) -> None:
    model = ScriptedHead(reference.model)
    engine = Engine(model, prefill_chunk=CHUNK)
    rows: list[tuple[Row, list[int]]] = []
    for i, ((prompt, setting), text) in enumerate(zip(reference.asked, reference.texts, strict=True)):
        for row in fork_rows(engine, prompt, text[0], [_request(prompt, setting, depth).params for depth in DEPTHS]):
            model.follow(row, text, right_at_random(i))
            rows.append((row, text))
    finish(engine)
    for row, text in rows:
        assert row.emitted == text, row.params
    kept = [sum(sum(row.statistics.accepted[i : i + 1]) for row, _ in rows) for i in range(5)]
    assert min(kept) > 0  # every length of acceptance happened
    assert sum(row.statistics.emitted["correction"] for row, _ in rows) > 0
    assert sum(row.statistics.emitted["bonus"] for row, _ in rows) > 0


def test_every_depth_in_one_batch_with_the_models_own_head(reference: Reference) -> None:
    engine = Engine(reference.model, prefill_chunk=CHUNK)
    some = list(zip(reference.asked, reference.texts, strict=True))[::3]
    rows = [
        (row, text)
        for (prompt, setting), text in some
        for row in fork_rows(engine, prompt, text[0], [_request(prompt, setting, depth).params for depth in DEPTHS])
    ]
    finish(engine)
    for row, text in rows:
        assert row.emitted == text, row.params


@pytest.mark.parametrize("depth", DEPTHS[1:])
def test_alone_at_every_depth(reference: Reference, depth: Any) -> None:
    at = DEPTHS.index(depth)
    index = at + len(PROMPTS) * (at % 2)
    prompt, setting = reference.asked[index]
    row = solo(reference.model, _request(prompt, setting, depth), prefill_chunk=CHUNK)
    assert row.emitted == reference.texts[index], setting
    assert row.statistics.timings().trunk_replays == 0


def test_the_model_depends_on_its_context() -> None:
    """The fixture's texts differ by prompt and vary within: equality between them would mean nothing otherwise."""
    model = nano_model(sharpness=3.0)
    texts = {tuple(solo(model, _request(prompt, SETTINGS[0], 0)).emitted) for prompt in PROMPTS}
    assert len(texts) == len(PROMPTS)
    assert all(len(set(text)) > 3 for text in texts)


def test_scores_are_the_trunks_at_every_depth() -> None:
    """Drafted, corrected and bonus tokens have the scores of plain decoding, whatever a row beside asks for."""
    model = nano_model(sharpness=3.0)
    given = {"max_tokens": TOKENS, "temperature": 0.8, "seed": 5, "top_k": 5, "frequency_penalty": 0.4}
    alone = solo(model, Request(PROMPTS[3], params(depth=0, logprobs=2, **given))).scores
    engine = Engine(model)
    rows = [engine.add(Request(PROMPTS[3], params(depth=depth, logprobs=2, **given))) for depth in (1, 3, 5)]
    engine.add(Request(PROMPTS[4], params(depth=2, logprobs=4, **given)))
    engine.add(Request(PROMPTS[4], params(depth=2, **given)))
    finish(engine)
    assert len(alone) == TOKENS
    for row in rows:
        assert row.scores == alone
    for score in alone:
        assert len(score.top) == 2
        assert score.top[0][1] >= score.top[1][1]
        assert score.logprob <= score.top[0][1]
