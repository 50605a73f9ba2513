"""Guards how few texts are compiled: each costs seconds in every process on CUDA. Self-checks run those of a model, and
neither heads nor tokens are compiled in."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.kernels import attention_inputs, few_query_attention, gated_delta_mixer, verify_qmv
from selfdraft.kernels.gated_delta_tape import Tape
from selfdraft.kernels.portable import Call, Kernel, Launch

BF16 = mx.bfloat16
Texts = set[tuple[str, str]]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Texts:
    """Kernels with their templates and dtypes, as CUDA would compile them; results are zeros."""
    texts: Texts = set()

    def prepared(kernel: Kernel, launch: Launch, dtypes: Sequence[mx.Dtype]) -> Call:
        texts.add((kernel.name, f"{dict(launch.template)} {list(dtypes)}"))
        zeros = [mx.zeros(shape, dtype) for shape, dtype in zip(launch.shapes, launch.dtypes, strict=True)]
        return lambda inputs: zeros

    monkeypatch.setattr(Kernel, "prepared", prepared)
    for module in (attention_inputs, few_query_attention, gated_delta_mixer, verify_qmv):
        monkeypatch.setattr(module, "_CALLS", {})
        if hasattr(module, "backend"):
            monkeypatch.setattr(module, "backend", lambda: "cuda")
        if hasattr(module, "speed_over"):
            monkeypatch.setattr(module, "speed_over", lambda _, kernel: len(kernel()))
    return texts


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


def test_a_model_at_a_depth_compiles_few_texts(compiled: Texts) -> None:
    """Of the mixer one; of attention two for its numbers of queries, and one each for what is around; of products one
    for every form, number of simdgroups, and number of rows."""
    for tokens in (1, 4):
        for held in (0, 1, 4):
            run_model(tokens, held)
    names = [name for name, _ in compiled]
    assert {name: names.count(name) for name in names} == {
        "gated_delta_mixer": 1,
        "attention_inputs": 1,
        "few_query_partial_mma": 2,
        "few_query_merge": 1,
        "verify_qmv_mma": 8,
    }


@pytest.mark.parametrize("module", [attention_inputs, few_query_attention, gated_delta_mixer, verify_qmv])
def test_self_checks_compile_what_a_model_does(module: ModuleType, compiled: Texts) -> None:
    """But for 8 bits. What is measured for speed was compiled before."""
    for tokens in (1, 4):
        run_model(tokens, 4)
    of_model = set(compiled)
    compiled.clear()
    for each in (attention_inputs, few_query_attention, gated_delta_mixer, verify_qmv):
        each._CALLS.clear()
    check = module.CHECK
    check.error()
    of_check = set(compiled)
    assert of_check
    assert all("'BITS': 8" in text for _, text in of_check - of_model)
    assert len(of_check - of_model) <= 1
    if check.gain:
        check.gain()
        assert compiled == of_check
