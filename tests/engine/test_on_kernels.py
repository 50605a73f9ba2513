"""Guards the engine on its kernels, whose texts run on the host here: the same text at every depth and beside other
rows, and the law of plain MLX. `test_kernels_stateful.py` has longer histories, on stand-ins.

What a GPU would run is run, but for the compiler; a few cycles only, for emulation is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from selfdraft.engine import Engine, Request
from selfdraft.kernels import (
    acceptance,
    attention_inputs,
    draw,
    few_query_attention,
    gated_delta_mixer,
    gated_delta_tape,
    kept_logits,
    noise_keys,
    report,
    small_arrays,
    verify_qmv,
    verify_qmv_plan,
)
from selfdraft.kernels.portable import Kernel, Launch
from selfdraft.kernels.self_check import relative_error
from selfdraft.models.few_rows import FewRowsLinear, use_few_row_kernels
from selfdraft.models.qwen3_5 import Qwen35
from tests.support.host_kernels import kernels_on_host, needs_compiler, run_on_host
from tests.support.nano import FOR_KERNELS, SMALLER, SPARSE, nano_model
from tests.support.rows import finish, params

pytestmark = needs_compiler

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
CHECKS = tuple(
    module.CHECK for module in (attention_inputs, few_query_attention, gated_delta_mixer, gated_delta_tape, verify_qmv)
)
SAMPLING = tuple(module.CHECK for module in (kept_logits, noise_keys, draw, acceptance, report))


class Count:
    """How often each kernel ran."""

    def __init__(self) -> None:
        self.runs: dict[str, int] = {}

    def __call__(self, kernel: Kernel, inputs: Sequence[mx.array], launch: Launch) -> list[mx.array]:
        self.runs[kernel.name] = self.runs.get(kernel.name, 0) + 1
        return run_on_host(kernel, inputs, launch)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Count:
    count = Count()
    kernels_on_host(monkeypatch, count)
    monkeypatch.setattr(verify_qmv, "backend", lambda: "host")
    for check in CHECKS:
        monkeypatch.setattr(check, "_passed", True)
        monkeypatch.setattr(type(check), "passed", property(lambda self: bool(self._passed)))
    return count


@pytest.fixture(params=["dense", "experts"])
def mlps(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Fields of a model with dense MLPs, or with experts."""
    return {"dense": {}, "experts": SPARSE}[request.param]


def model_of(bits: int | None, mlps: dict[str, Any]) -> Qwen35:
    return nano_model(5, bits=bits, **FOR_KERNELS, **mlps)


@pytest.fixture
def tensor_cores(kernels: Count, monkeypatch: pytest.MonkeyPatch, mlps: dict[str, Any]) -> Qwen35:
    """A model whose products run on emulated ones, and divide by the root mean squares of its norms themselves."""
    monkeypatch.setattr(verify_qmv_plan, "BODIES", {"host": (verify_qmv_plan.MMA, verify_qmv_plan.SIMD)})
    wide = {"hidden_size": 128, "intermediate_size": 128, "linear_value_head_dim": 64}
    model = nano_model(5, bits=4, dtype=mx.bfloat16, **{**FOR_KERNELS, **wide, **mlps})
    use_few_row_kernels(model)
    return model


def decode(model: Qwen35, depths: Sequence[int], tokens: int = 6) -> list[list[int]]:
    engine = Engine(model)
    rows = [
        engine.add(Request(PROMPT[: 8 - i], params(temperature=0.0, max_tokens=tokens, depth=depth)))
        for i, depth in enumerate(depths)
    ]
    finish(engine)
    return [row.emitted for row in rows]


def test_text_is_the_same_at_every_depth_and_beside_others(kernels: Count, mlps: dict[str, Any]) -> None:
    model = model_of(4, mlps)
    use_few_row_kernels(model)
    assert isinstance(model.model.layers[0].linear_attn.in_proj, FewRowsLinear)
    ((plain),) = decode(model, [0])
    assert set(kernels.runs) == {
        "attention_inputs",
        "few_query_partial",
        "few_query_merge",
        "gated_delta_mixer",
        "verify_qmv_simd",
    }
    assert decode(model, [3]) == [plain]
    assert decode(model, [3, 0])[0] == plain


def test_text_is_the_same_where_norms_are_parts_of_products(tensor_cores: Qwen35, kernels: Count) -> None:
    ((plain),) = decode(tensor_cores, [0])
    assert "verify_qmv_mma" in kernels.runs
    assert decode(tensor_cores, [3]) == [plain]
    assert decode(tensor_cores, [3, 0])[0] == plain


def test_sampled_text_is_that_of_plain_mlx(kernels: Count, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows of all kinds side by side, reports in pieces and whole."""
    model = nano_model(5, sharpness=1.0, **SMALLER)
    asked = [
        {"temperature": 0.6, "top_p": 0.95, "top_k": 5, "depth": 3},
        {"temperature": 0.9, "min_p": 0.05, "depth": 2, "presence_penalty": 0.5},
        {"temperature": 1.0, "top_p": 0.8, "depth": 1, "seed": 4},
        {"temperature": 0.0, "depth": 3},
    ]
    cases = [asked[:1], asked]
    plain = [sampled(model, case) for case in cases]
    for check in SAMPLING:
        monkeypatch.setattr(check, "_passed", True)
    assert [sampled(model, case) for case in cases] == plain
    assert set(kernels.runs) >= {"kept_logits", "noise_keys", "draw", "acceptance_join", "report"}
    monkeypatch.setattr(small_arrays, "backend", lambda: "cuda")
    assert [sampled(model, case) for case in cases] == plain


def sampled(model: Qwen35, asked: Sequence[dict[str, Any]]) -> list[list[int]]:
    engine = Engine(model)
    rows = [engine.add(Request(PROMPT, params(max_tokens=9, **given))) for given in asked]
    for number, row in enumerate(rows):
        if row.params.seed is None:
            row.stream = (7, number)
    finish(engine)
    return [row.emitted for row in rows]


@pytest.mark.parametrize("mlps", ["dense"], indirect=True)
def test_norms_that_are_parts_of_products_leave_the_law_as_it_is(
    tensor_cores: Qwen35, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for roundings to bf16, some tens in a row. Experts have no such norms: their router takes a norm's output."""
    norms: list[nn.RMSNorm] = []

    def counted(norm: nn.RMSNorm, x: mx.array) -> mx.array:
        norms.append(norm)
        return mx.fast.rms_norm(x, norm.weight, norm.eps)

    monkeypatch.setattr(nn.RMSNorm, "__call__", counted)
    inside = logits(tensor_cores, None)
    few = len(norms)
    monkeypatch.setattr(verify_qmv, "norms", lambda *_: False)
    outside = logits(tensor_cores, None)
    assert len(norms) - few > few
    assert relative_error(inside, outside) < 2.0**-5


def test_the_law_is_that_of_plain_mlx(kernels: Count, monkeypatch: pytest.MonkeyPatch, mlps: dict[str, Any]) -> None:
    model = model_of(8, mlps)
    expected = logits(model_of(8, mlps), monkeypatch)
    use_few_row_kernels(model)
    found = logits(model, None)
    assert mx.abs(found - expected).max().item() < 2e-4 * mx.abs(expected).max().item()
    assert kernels.runs["gated_delta_mixer"] == 2


def logits(model: Qwen35, plain: pytest.MonkeyPatch | None) -> mx.array:
    """Of two verify passes, of the first of which two tokens were kept."""
    state = model.new_state()
    with pytest.MonkeyPatch.context() as patch:
        if plain:
            for check in CHECKS:
                patch.setattr(check, "_passed", False)
        hidden, captured = model.forward(mx.array([PROMPT[:3]]), [state], keep_steps=True)
        captured.commit([state], [2])
        again, _ = model.forward(mx.array([PROMPT[3:6]]), [state], keep_steps=True)
        both = model.logits(mx.concatenate([hidden, again], axis=1))
        mx.eval(both)
    return both
