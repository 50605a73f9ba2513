"""Guards that drafting changes nothing but speed: the same tokens with MTP as without, on the reference checkpoint.

Greedy, at every depth, in bf16 and quantised; and seeded sampling, whose text must not depend on depth. Fair on MLX's
reference BLAS, where a row of a wide forward has the bits of a one-token forward (tests/conftest.py chooses it).
"""

from __future__ import annotations

from typing import Any

import pytest

from selfdraft.device import active_blas
from selfdraft.engine import Row
from selfdraft.params import SamplingParams
from tests.support.reference import Prompt, decode, parity_prompts, prompts, reference_model

pytestmark = pytest.mark.skipif(active_blas() != "reference", reason="bit parity is claimed for reference BLAS only")

PROMPTS = parity_prompts()
TOKENS = 64
DEPTHS = (1, 2, 3, 4, 5)


def emitted(rows: list[Row]) -> list[list[int]]:
    return [row.emitted for row in rows]


def greedy(model: Any, some: list[Prompt], depth: int, tokens: int, **options: Any) -> list[Row]:
    """Continue prompts side by side, end tokens ignored."""
    params = SamplingParams(depth=depth, max_tokens=tokens, temperature=0.0, ignore_eos=True)
    rows = decode(model, [prompt.tokens for prompt in some], params, stop_ids=frozenset({8172, 8174}), **options)
    assert [len(row.emitted) for row in rows] == [tokens] * len(some)
    for row in rows:
        timings = row.statistics.timings()
        assert timings.trunk_replays == 0
        assert len(timings.drafts_tried) == depth
    return rows


def assert_some_rejected_and_some_accepted(rows: list[Row]) -> None:
    """Or the comparison would prove little."""
    for kind in ("draft", "correction"):
        assert sum(row.statistics.emitted[kind] for row in rows) >= len(rows)


def test_there_are_fifty_prompts_of_all_kinds() -> None:
    assert len({prompt.id for prompt in PROMPTS}) == 50
    for depth in DEPTHS:
        assert {prompt.kind for prompt in PROMPTS[depth - 1 :: 5]} == {"chat", "prose", "code"}


@pytest.mark.parametrize("depth", DEPTHS)
def test_greedy_mtp_is_greedy_ar(reference_bf16: Any, depth: int) -> None:
    """Depths rotate: prompt i has depth i mod 5 + 1."""
    some = PROMPTS[depth - 1 :: 5]
    drafted = greedy(reference_bf16, some, depth, TOKENS)
    assert_some_rejected_and_some_accepted(drafted)
    assert emitted(drafted) == emitted(greedy(reference_bf16, some, 0, TOKENS))


def test_prompt_longer_than_a_prefill_chunk(reference_bf16: Any) -> None:
    """A whole prompt in five chunks, the last of one token; AR cuts it the same way."""
    (whole,) = [prompt for prompt in prompts() if prompt.kind == "code"][:1]
    prompt = Prompt(whole.id, whole.kind, whole.tokens[:98])
    drafted = greedy(reference_bf16, [prompt], 4, 24, prefill_chunk=24)
    assert drafted[0].statistics.prefill_chunks == 6
    assert emitted(drafted) == emitted(greedy(reference_bf16, [prompt], 0, 24, prefill_chunk=24))


@pytest.mark.parametrize("bits", [4, 8])
def test_greedy_mtp_is_greedy_ar_when_quantised(bits: int) -> None:
    """Trunk, head and embedding quantised."""
    model = reference_model(bits=bits)
    some = [next(prompt for prompt in PROMPTS if prompt.kind == kind) for kind in ("chat", "prose")]
    drafted = greedy(model, some, 3, TOKENS)
    assert_some_rejected_and_some_accepted(drafted)
    assert emitted(drafted) == emitted(greedy(model, some, 0, TOKENS))


def test_seeded_text_does_not_depend_on_depth(reference_bf16: Any) -> None:
    some = [next(p for p in PROMPTS if p.kind == kind) for kind in ("chat", "prose", "code")]
    found = {}
    for depth in (0, 1, 3, 5, "auto"):
        params = SamplingParams(
            depth=depth,  # type: ignore[arg-type]
            max_tokens=20,
            temperature=0.6,
            top_p=0.95,
            top_k=20,
            seed=2024,
            ignore_eos=True,
        )
        rows = decode(reference_bf16, [prompt.tokens for prompt in some], params)
        if depth:
            assert_some_rejected_and_some_accepted(rows)
        found[depth] = emitted(rows)
    assert all(texts == found[0] for texts in found.values())
    assert found[0] != emitted(greedy(reference_bf16, some, 0, 20))
