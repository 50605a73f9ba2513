"""Which texts CUDA would compile: kernels are recorded, not run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.kernels import (
    attention_inputs,
    few_query_attention,
    gated_delta_mixer,
    gated_delta_scan,
    gated_delta_tape,
    rank_threshold,
    verify_qmv,
)
from selfdraft.kernels.gated_delta_tape import Tape
from selfdraft.kernels.portable import Call, Kernel, Launch

__all__ = ["MODULES", "Recorded", "record_texts", "run_model", "run_others"]

BF16 = mx.bfloat16
MODULES = (attention_inputs, few_query_attention, gated_delta_mixer, verify_qmv)
Recorded = list[tuple[Kernel, Launch, list[mx.Dtype]]]


def record_texts(patch: pytest.MonkeyPatch) -> Recorded:
    """What is prepared from now on, with the dtypes of its inputs; results are zeros, and nothing is timed."""
    found: Recorded = []

    def prepared(kernel: Kernel, launch: Launch, dtypes: Sequence[mx.Dtype]) -> Call:
        found.append((kernel, launch, list(dtypes)))
        zeros = [mx.zeros(shape, dtype) for shape, dtype in zip(launch.shapes, launch.dtypes, strict=True)]
        return lambda inputs: zeros

    patch.setattr(Kernel, "prepared", prepared)
    for module in (*MODULES, gated_delta_scan, gated_delta_tape, rank_threshold):
        patch.setattr(module, "_CALLS", {})
        if hasattr(module, "backend"):
            patch.setattr(module, "backend", lambda: "cuda")
        if hasattr(module, "speed_over"):
            patch.setattr(module, "speed_over", lambda _, kernel: len(kernel()))
    return found


def run_model(tokens: int, held: int) -> None:
    """The calls of layers of 27 B's shape with one row."""

    def zeros(*shape: int, dtype: mx.Dtype = BF16) -> mx.array:
        return mx.zeros(shape, dtype)

    heads: Any = {"key_heads": 16, "value_heads": 48, "key_dim": 128, "value_dim": 128}
    state = zeros(1, 48, 128, 128, dtype=mx.float32)
    fp32 = mx.float32
    tape = Tape(zeros(1, held, 48, dtype=fp32), zeros(1, held, 16, 128), zeros(1, held, 48, 128, dtype=fp32))
    weights = zeros(10240, 4, 1), zeros(48, dtype=mx.float32), zeros(48), zeros(128)
    past = state, tape if held else None, mx.array([0], mx.int32)
    given: list[Any] = [zeros(1, tokens, 16480), zeros(1, 3 + held, 10240), *weights, *past]
    gated_delta_mixer.gated_delta_mixer(*given, **heads, eps=1e-6)

    projected, keys, at = zeros(1, tokens, 14336), zeros(1, 4, 300, 256), mx.array([9], mx.int32)
    norms = zeros(256), zeros(256), zeros(32, dtype=mx.float32)
    sizes: Any = {"heads": 24, "kv_heads": 4, "size": 256}
    q = attention_inputs.attention_inputs(projected, *norms, keys, keys, at, **sizes, eps=1e-6)
    few_query_attention.few_query_attention(q, keys, keys, at, scale=1 / 16, gate=projected)

    for rows, inputs, form in ((5120, 6144, "added"), (34816, 5120, "gated"), (14336, 5120, ""), (5120, 10240, "")):
        quantised = zeros(rows, inputs // 8, dtype=mx.uint32), *[zeros(rows, inputs // 64)] * 2
        residual = zeros(1, tokens, rows) if form == "added" else None
        how: Any = {"group_size": 64, "bits": 4, "gated": form == "gated"}
        verify_qmv.verify_qmv(zeros(1, tokens, inputs), *quantised, residual=residual, **how)


def run_others() -> None:
    """What a cycle calls beside its layers, what they call where the mixer's kernel does not fit, and for a prompt."""
    rank_threshold.rank_threshold(mx.zeros((1, 4, 248_320)), mx.array([20], mx.int32), mx.array([0.9]))
    q, v = mx.zeros((1, 4, 16, 128), BF16), mx.zeros((1, 4, 48, 128), BF16)
    gates, state = mx.zeros((1, 4, 48)), mx.zeros((1, 48, 128, 128))
    gated_delta_scan.gated_delta_scan(q, q, v, gates, gates.astype(BF16), state)
    _, _, tape = gated_delta_tape.gated_delta_verify(q, q, v, gates, gates, state, None, mx.array([0], mx.int32))
    gated_delta_tape.gated_delta_replay(state, tape, mx.array([4], mx.int32))
