"""The bundled checkpoint for tests: built without its text side, and decoded by token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from selfdraft.device import choose_dtype
from selfdraft.engine import Engine, Request, Row
from selfdraft.models.base import Model
from selfdraft.models.checkpoint import classify
from selfdraft.models.loader import build_model
from selfdraft.params import SamplingParams
from selfdraft.source import REFERENCE, find_model
from selfdraft.state import RowState

__all__ = [
    "FIXTURES",
    "Prompt",
    "acceptance_fixture",
    "cosine",
    "decode",
    "go_on",
    "largest_difference",
    "parity_prompts",
    "prefilled",
    "prompts",
    "reference_model",
    "run_through",
]

FIXTURES = Path(__file__).parents[1] / "fixtures"


@dataclass(frozen=True)
class Prompt:
    """A prompt of prompts.jsonl as token ids."""

    id: str
    kind: str
    tokens: list[int]


@cache
def acceptance_fixture() -> dict[str, Any]:
    """What the torch reference measured (tests/reference/README.md)."""
    fixture: dict[str, Any] = json.loads((FIXTURES / "acceptance.json").read_text(encoding="utf-8"))
    return fixture


@cache
def prompts() -> tuple[Prompt, ...]:
    """The 90 held-out prompts, with the ids that transformers gave them."""
    return tuple(
        Prompt(prompt["id"], prompt["kind"], prompt["prompt_ids"]) for prompt in acceptance_fixture()["prompts"]
    )


def reference_model(*, dtype: mx.Dtype | None = None, bits: int | None = None) -> Any:
    """The reference checkpoint's trunk and head.

    Args:
        dtype: None takes what `load` would take: bf16, or fp32 activations for quantised weights on a CPU.
        bits: quantise every layer that can be, trunk, head and embedding, in memory.
    """
    dtype = dtype or choose_dtype("auto", quantised=bits is not None)
    model: Any = build_model(classify(find_model(REFERENCE)), with_head=True, dtype=dtype).model
    if bits:
        nn.quantize(model, group_size=64, bits=bits)
        mx.eval(model.parameters())
    return model


def parity_prompts() -> list[Prompt]:
    """50 of them: 36 chats, 7 prose and 7 code prompts, evenly mixed."""
    chats = sorted((p for p in prompts() if p.kind == "chat"), key=lambda p: (len(p.tokens), p.id))[:36]
    texts = [[p for p in prompts() if p.kind == kind][:7] for kind in ("prose", "code")]
    others = [p for pair in zip(*texts, strict=True) for p in pair]
    mixed = [(index / len(chats), p) for index, p in enumerate(chats)]
    mixed += [(index / len(others), p) for index, p in enumerate(others)]
    return [p for _, p in sorted(mixed, key=lambda pair: pair[0])]


def prefilled(model: Model, tokens: Sequence[int], *, depth: int = 1, prefill_chunk: int = 4096) -> Row:
    """A row of some depth that has forwarded all of its prompt but the last token."""
    engine = Engine(model, prefill_chunk=prefill_chunk)
    row = engine.add(Request(tokens, SamplingParams(depth=depth, max_tokens=2, temperature=0.0).resolved({})))
    while row.state.length < len(tokens) - 1:
        engine.step()
    return row


def go_on(row: Row, first: Row) -> None:
    """Let a row begin where a `prefilled` one of the same prompt is, which others may do, too."""
    row.state, row.tail = first.state.fork(), first.tail


def decode(
    model: Model, begun: Sequence[Row], params: SamplingParams, *, stop_ids: frozenset[int] = frozenset()
) -> list[Row]:
    """Go on from `prefilled` rows, side by side in one engine, to the end."""
    engine = Engine(model)
    resolved = params.resolved({})
    added = [engine.add(Request(row.request.prompt, resolved, stop_ids=stop_ids)) for row in begun]
    for row, first in zip(added, begun, strict=True):
        go_on(row, first)
    # A batch that is complete when its first cycle runs keeps every cycle at full width.
    while engine.rows:
        engine.step()
    for row in added:
        if row.error is not None:
            raise row.error
    return added


def run_through(
    model: Model, tokens: Sequence[int], state: RowState, pieces: Iterator[int] | None = None, *, keep_steps: bool
) -> mx.array:
    """Forward tokens through the trunk in pieces of the given sizes (the last one takes what is left).

    Returns:
        Hidden [T, H]; `state` is behind the last token.
    """
    hidden, done = [], 0
    while done < len(tokens):
        count = min(next(pieces, len(tokens)) if pieces else len(tokens), len(tokens) - done)
        out, captured = model.forward(mx.array([list(tokens[done : done + count])]), [state], keep_steps=keep_steps)
        captured.commit([state], [count])
        mx.eval(out, state.arrays())
        hidden.append(out[0])
        done += count
    return mx.concatenate(hidden)


def cosine(a: mx.array, b: mx.array) -> float:
    """Least cosine between corresponding rows of [..., N]."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    norms = mx.linalg.norm(a, axis=-1) * mx.linalg.norm(b, axis=-1)
    least: Any = ((a * b).sum(axis=-1) / norms).min().item()
    return float(least)


def largest_difference(a: mx.array, b: mx.array) -> float:
    """Largest absolute difference of two arrays."""
    largest: Any = mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item()
    return float(largest)
