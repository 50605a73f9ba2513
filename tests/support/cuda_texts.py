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
    kept_logits,
    noise_keys,
    report,
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
    for module in (*MODULES, gated_delta_scan, gated_delta_tape, kept_logits, noise_keys, report):
        patch.setattr(module, "_CALLS", {})
        if hasattr(module, "backend"):
            patch.setattr(module, "backend", lambda: "cuda")
        if hasattr(module, "speed_over"):
            patch.setattr(module, "speed_over", lambda _, kernel: len(kernel()))
    return found


def run_model(tokens: int, held: int, rows: int = 1) -> None:
    """The calls of layers of 27 B's shape with one row; those of attention with as many as are asked for."""

    def zeros(*shape: int, dtype: mx.Dtype = BF16) -> mx.array:
        return mx.zeros(shape, dtype)

    heads: Any = {"key_heads": 16, "value_heads": 48, "key_dim": 128, "value_dim": 128}
    state = zeros(1, 48, 128, 128, dtype=mx.float32)
    tape = Tape.of(zeros(1, held, 48), zeros(1, held, 16, 128), zeros(1, held, 48, 128))
    weights = zeros(10240, 4, 1), zeros(48, dtype=mx.float32), zeros(48), zeros(128)
    past = state, tape if held else None, mx.array([0], mx.int32)
    given: list[Any] = [zeros(1, tokens, 16480), zeros(1, 3 + held, 10240), *weights, *past]
    gated_delta_mixer.gated_delta_mixer(*given, **heads, eps=1e-6)

    projected, at = zeros(rows, tokens, 14336), mx.array([9] * rows, mx.int32)
    keys = [zeros(1, 4, 300 + row, 256) for row in range(rows)]
    norms = zeros(256), zeros(256), zeros(32, dtype=mx.float32)
    sizes: Any = {"heads": 24, "kv_heads": 4, "size": 256}
    q = attention_inputs.attention_inputs(projected, *norms, keys, keys, at, at, **sizes, eps=1e-6)
    few_query_attention.few_query_attention(q, keys, keys, at, scale=1 / 16, gate=projected)

    def matrix(rows: int, inputs: int) -> dict[str, Any]:
        scales = zeros(rows, inputs // 64)
        quantised = {"weight": zeros(rows, inputs // 8, dtype=mx.uint32), "scales": scales, "biases": scales}
        return {**quantised, "group_size": 64, "bits": 4}

    x, attended = zeros(1, tokens, 5120), zeros(1, tokens, 6144)
    norm = {"norm_weight": zeros(5120), "eps": 1e-6}
    _, scaled = verify_qmv.verify_qmv_norm(attended, **matrix(5120, 6144), residual=x, **norm)
    verify_qmv.verify_qmv(scaled, **matrix(34816, 5120), gated=True)
    verify_qmv.verify_qmv(scaled, **matrix(14336, 5120))
    verify_qmv.verify_qmv(attended, **matrix(5120, 6144), residual=x)
    verify_qmv.verify_qmv(x, **matrix(14336, 5120))
    verify_qmv.verify_qmv(zeros(1, tokens, 10240), **matrix(5120, 10240))


def run_others() -> None:
    """What a cycle calls beside its layers, what they call where the mixer's kernel does not fit, and for a prompt."""
    kept_logits.kept_logits(mx.zeros((1, 4, 248_320), BF16), kept_logits.Rules((0.6,), (20,), (0.95,), (0.0,)))
    noise_keys.noise_keys(mx.array([1, 2], mx.uint32), mx.array([3], mx.uint32), mx.array([0], mx.int32), 3)
    emitted, one = mx.zeros((1, 3), mx.uint32), mx.array([0], mx.int32)
    report.report(one, emitted[:, 0], emitted, one, one, mx.zeros((1, 4), mx.int32), mx.zeros((1, 3), mx.int32))
    q, v = mx.zeros((1, 4, 16, 128), BF16), mx.zeros((1, 4, 48, 128), BF16)
    gates, state = mx.zeros((1, 4, 48)), mx.zeros((1, 48, 128, 128))
    gated_delta_scan.gated_delta_scan(q, q, v, gates, gates.astype(BF16), state)
    _, _, tape = gated_delta_tape.gated_delta_verify(q, q, v, gates, gates, state, None, mx.array([0], mx.int32))
    gated_delta_tape.gated_delta_replay(state, tape, mx.array([4], mx.int32))
