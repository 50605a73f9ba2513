"""Guards that drafting changes nothing but speed: the same tokens with MTP as without, on the reference checkpoint.

Greedy, at every depth, in bf16 and quantised; and seeded sampling, whose text must not depend on depth. Rows of a
prompt share its prefill, which leaves the same bits with and without drafts. Fair on MLX's reference BLAS, where a row
of a wide forward has the bits of a one-token forward (tests/conftest.py chooses it).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.device import active_blas
from selfdraft.engine import Row
from selfdraft.params import SamplingParams
from selfdraft.state import RowState
from tests.support.reference import Prompt, decode, parity_prompts, prefilled, reference_model

pytestmark = pytest.mark.skipif(active_blas() != "reference", reason="bit parity is claimed for reference BLAS only")

WHOLE = parity_prompts()
# Cut: with and without drafts go on from one and the same prefill, which has a test of its own.
PROMPTS = [replace(prompt, tokens=prompt.tokens[:48]) for prompt in WHOLE]
TOKENS = 40  # tools/parity_grid.py has whole prompts and 128 tokens
DEPTHS = (1, 2, 3, 4, 5)


def emitted(rows: list[Row]) -> list[list[int]]:
    return [row.emitted for row in rows]


def begin(model: Any, some: list[Prompt]) -> list[Row]:
    """Forward prompts, once for all depths they are continued at."""
    return [prefilled(model, prompt.tokens) for prompt in some]


def greedy(model: Any, begun: list[Row], depth: int, tokens: int) -> list[Row]:
    """Continue prompts side by side, end tokens ignored."""
    params = SamplingParams(depth=depth, max_tokens=tokens, temperature=0.0, ignore_eos=True)
    rows = decode(model, begun, params, stop_ids=frozenset({8172, 8174}))
    assert [len(row.emitted) for row in rows] == [tokens] * len(begun)
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
    begun = begin(reference_bf16, PROMPTS[depth - 1 :: 5])
    drafted = greedy(reference_bf16, begun, depth, TOKENS)
    assert_some_rejected_and_some_accepted(drafted)
    assert emitted(drafted) == emitted(greedy(reference_bf16, begun, 0, TOKENS))


def trunk_state(state: RowState) -> list[mx.array]:
    """All that the trunk remembers of the committed tokens."""
    buffers = [array for layer in state.attention for array in (layer.keys, layer.values)]
    kept = [array[:, :, : state.length] for array in buffers if array is not None]
    return kept + [array for layer in state.recurrent for array in (layer.window, layer.memory)]


@pytest.mark.parametrize(
    ("kind", "tokens", "prefill_chunk", "chunks"), [("chat", 17, 4096, 1), ("prose", 186, 4096, 1), ("code", 98, 24, 5)]
)
def test_prefill_is_the_same_with_drafts_as_without(
    reference_bf16: Any, kind: str, tokens: int, prefill_chunk: int, chunks: int
) -> None:
    """In one chunk, and in five, the last of one token."""
    prompt = next(prompt.tokens for prompt in WHOLE if prompt.kind == kind and len(prompt.tokens) >= tokens)[:tokens]
    plain, drafting = (prefilled(reference_bf16, prompt, depth=d, prefill_chunk=prefill_chunk) for d in (0, 4))
    assert plain.state.length == drafting.state.length == tokens - 1
    assert plain.state.head_length == 0 < drafting.state.head_length
    assert plain.statistics.prefill_chunks == drafting.statistics.prefill_chunks == chunks
    both = zip(trunk_state(plain.state), trunk_state(drafting.state), strict=True)
    assert all(mx.array_equal(a, b) for a, b in both)


@pytest.mark.parametrize("bits", [4, 8])
def test_greedy_mtp_is_greedy_ar_when_quantised(bits: int) -> None:
    """Trunk, head and embedding quantised."""
    model = reference_model(bits=bits)
    some = [next(prompt for prompt in PROMPTS if prompt.kind == kind) for kind in ("chat", "prose")]
    begun = begin(model, some)
    drafted = greedy(model, begun, 3, TOKENS)
    assert_some_rejected_and_some_accepted(drafted)
    assert emitted(drafted) == emitted(greedy(model, begun, 0, TOKENS))


def test_seeded_text_does_not_depend_on_depth(reference_bf16: Any) -> None:
    begun = begin(reference_bf16, [next(p for p in PROMPTS if p.kind == kind) for kind in ("chat", "prose", "code")])
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
        rows = decode(reference_bf16, begun, params)
        if depth:
            assert_some_rejected_and_some_accepted(rows)
        found[depth] = emitted(rows)
    assert all(texts == found[0] for texts in found.values())
    assert found[0] != emitted(greedy(reference_bf16, begun, 0, 20))
