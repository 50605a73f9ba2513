"""Guards that the bundled checkpoint computes what it was trained to compute.

The golden values were made by plain PyTorch in float32 on the bf16 weights, and checked against transformers. They
must come out whichever way a prompt is cut: in one forward, in chunks, token by token, or in verify passes of which
only a part is kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import chain, cycle, repeat
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.models.base import Model
from selfdraft.state import RowState
from tests.support.reference import FIXTURES, cosine, largest_difference, run_through

PROMPTS: dict[str, Any] = {
    prompt["name"]: prompt for prompt in json.loads((FIXTURES / "golden" / "golden.json").read_text())["prompts"]
}
KEPT = 4  # golden trunk values are those of the last four positions
STORED = 8  # of the golden logits every eighth is stored: the hiddens are whole, and the tree is to stay small

Trunk = Callable[[Model, Sequence[int], RowState], mx.array]


@pytest.fixture(scope="module")
def golden() -> dict[str, mx.array]:
    return mx.load(str(FIXTURES / "golden" / "golden.safetensors"))  # type: ignore[return-value]


def one_chunk(model: Model, tokens: Sequence[int], state: RowState) -> mx.array:
    return run_through(model, tokens, state, keep_steps=False)


def chunks(model: Model, tokens: Sequence[int], state: RowState) -> mx.array:
    return run_through(model, tokens, state, chain([1, 9, 2, 3], repeat(7)), keep_steps=False)


def token_by_token(model: Model, tokens: Sequence[int], state: RowState) -> mx.array:
    return run_through(model, tokens, state, repeat(1), keep_steps=True)


def verify_passes(model: Model, tokens: Sequence[int], state: RowState) -> mx.array:
    """Passes over six tokens of which 1..6 are kept; the others are wrong on purpose."""
    hidden, done = [], 0
    for kept in cycle([3, 1, 6, 2, 5, 4]):
        right = list(tokens[done : done + kept])
        wrong = [(token + 1) % 8000 for token in range(6 - len(right))]
        out, captured = model.forward(mx.array([right + wrong]), [state], keep_steps=True)
        captured.commit([state], [len(right)])
        hidden.append(out[0, : len(right)])
        done += len(right)
        if done == len(tokens):
            return mx.concatenate(hidden)
    raise AssertionError("unreachable")


WAYS: dict[str, Trunk] = {f.__name__: f for f in (one_chunk, chunks, token_by_token, verify_passes)}
# The long prompts cost seconds a pass, so they go through in one chunk only.
CASES = [("chat", way) for way in WAYS] + [("prose", "one_chunk"), ("code", "one_chunk")]


def head_hidden(model: Model, prompt: Any, hidden: mx.array, state: RowState, pieces: int) -> mx.array:
    """The head's output [3, H] at depths 1-3, the golden drafts fed back, its history committed in `pieces`."""
    tokens, history = mx.array([prompt["ids"][1:]]), hidden[None, :-1]
    entries, done, out = tokens.shape[1], 0, hidden[None]
    for size in [*[entries // pieces] * (pieces - 1), entries]:
        end = min(done + size, entries)
        out = model.draft(tokens[:, done:end], history[:, done:end], [state], [done])
        done = end
    outputs = [out[:, -1:]]
    for depth, draft in enumerate(prompt["drafts"][:2]):
        outputs.append(model.draft(mx.array([[draft]]), outputs[-1], [state], [entries + depth]))
    return mx.concatenate(outputs, axis=1)[0]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_float32_reproduces_the_golden_values(
    reference_fp32: Any, golden: dict[str, mx.array], name: str, way: str
) -> None:
    for key, computed in values(reference_fp32, name, way).items():
        computed, expected = stored(key, computed), golden[f"{name}.{key}"]
        assert computed.shape == expected.shape
        assert cosine(computed, expected) > 0.9999, key
        assert largest_difference(computed, expected) < 1e-3, key


@pytest.mark.parametrize(("name", "way"), CASES)
def test_bfloat16_stays_close_and_chooses_the_same_tokens(
    reference_bf16: Any, golden: dict[str, mx.array], name: str, way: str
) -> None:
    computed = values(reference_bf16, name, way)
    for key, value in computed.items():
        assert cosine(stored(key, value), golden[f"{name}.{key}"]) > 0.999, key
    assert mx.argmax(computed["trunk_logits"], axis=-1).tolist() == PROMPTS[name]["trunk_argmax"]
    assert mx.argmax(computed["mtp_logits"], axis=-1).tolist() == PROMPTS[name]["drafts"]


def stored(key: str, value: mx.array) -> mx.array:
    """What the file has of a quantity."""
    return value[..., ::STORED] if key.endswith("logits") else value


def values(model: Any, name: str, way: str) -> dict[str, mx.array]:
    """All golden quantities of a prompt, its trunk run in one of the WAYS."""
    prompt, state = PROMPTS[name], model.new_state()
    hidden = WAYS[way](model, prompt["ids"], state)
    assert state.length == len(prompt["ids"])
    drafted = head_hidden(model, prompt, hidden, state, pieces=1 if way == "one_chunk" else 4)
    return {
        "trunk_hidden": hidden[-KEPT:],
        "trunk_logits": model.logits(hidden[-KEPT:][None])[0],
        "mtp_hidden": drafted,
        "mtp_logits": model.logits(drafted[None])[0],
    }
