"""Guards that calibrated codes are what MLX computes with, and serve unseen inputs better than rounding alone.

Where inputs are too few to tell, or dead, they must not be worse.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchLinear

from selfdraft.forge.gptq import calibrated
from selfdraft.forge.inputs import Inputs

OUT, IN = 48, 256


def seen_of(x: np.ndarray, out: int = OUT) -> Inputs:
    """What a layer knows that was fed x, [N, in]."""
    inputs = Inputs(nn.Linear(x.shape[1], out, bias=False))
    inputs.see(mx.array(x.astype(np.float32)))
    inputs.add_up()
    return inputs


def correlated(rows: int, seed: int = 0, inputs: int = IN) -> np.ndarray:
    """Inputs of which few directions hold most, as a layer's are; the directions are the same for every seed."""
    directions, _ = np.linalg.qr(np.random.default_rng(99).normal(size=(inputs, inputs)))
    strengths = np.arange(1, inputs + 1) ** -0.5
    return np.random.default_rng(seed).normal(size=(rows, inputs)) * strengths @ directions.T


def weight_of(seed: int = 1, out: int = OUT, inputs: int = IN) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=(out, inputs)).astype(np.float32) / inputs**0.5)


def error(weight: mx.array, stored: Any, x: np.ndarray, **form: int) -> float:
    """Of a layer's output, relative."""
    lost = np.array(weight) - np.array(mx.dequantize(*stored, **form).astype(mx.float32))
    return float(np.linalg.norm(lost @ x.T) / np.linalg.norm(np.array(weight) @ x.T))


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_serves_unseen_inputs_better_than_rounding(bits: int, group_size: int) -> None:
    form = {"bits": bits, "group_size": group_size}
    weight, unseen = weight_of(), correlated(2000, seed=2)
    made = calibrated(weight, seen_of(correlated(8000)), dtype=mx.float32, **form)
    plain = mx.quantize(weight, **form)
    assert [(part.shape, part.dtype) for part in made] == [(part.shape, part.dtype) for part in plain]
    assert error(weight, made, unseen, **form) < 0.85 * error(weight, plain, unseen, **form)


def test_computes_as_its_codes_say() -> None:
    """Quantised products of these arrays are those of the weights they stand for."""
    weight, x = weight_of(), mx.array(correlated(5).astype(np.float32))
    stored = calibrated(weight, seen_of(correlated(4000)), bits=4, group_size=64, dtype=mx.float32)
    product = mx.quantized_matmul(x, *stored, transpose=True, bits=4, group_size=64)
    dense = x @ mx.dequantize(*stored, bits=4, group_size=64).T
    assert mx.allclose(product, dense, atol=1e-4).item()
    assert mx.abs(product - x @ weight.T).max().item() < 0.2  # type: ignore[operator]


@pytest.mark.parametrize("rows", [1, 20, 100, 300])
def test_few_inputs_do_no_harm(rows: int) -> None:
    """The sum of fewer x than inputs is singular; damped by a fixed 1% alone, codes were up to 40% worse."""
    form = {"bits": 4, "group_size": 64}
    weight, unseen = weight_of(), correlated(2000, seed=2)
    made = calibrated(weight, seen_of(correlated(rows)), dtype=mx.float32, **form)
    assert error(weight, made, unseen, **form) < 1.04 * error(weight, mx.quantize(weight, **form), unseen, **form)


def test_dead_inputs_are_rounded_plainly() -> None:
    x = correlated(4000)
    x[:, 64:128] = 0
    form = {"bits": 4, "group_size": 64}
    weight = weight_of()
    made = mx.dequantize(*calibrated(weight, seen_of(x), dtype=mx.float32, **form), **form)
    plain = mx.dequantize(*mx.quantize(weight, **form), **form)
    assert mx.array_equal(made[:, 64:128], plain[:, 64:128]).item()
    assert not mx.array_equal(made[:, 128:], plain[:, 128:]).item()


def test_without_inputs_it_is_rounding() -> None:
    weight = weight_of()
    made = calibrated(weight, seen_of(np.zeros((0, IN))), bits=4, group_size=64, dtype=mx.bfloat16)
    plain = mx.quantize(weight.astype(mx.bfloat16), bits=4, group_size=64)
    assert all(mx.array_equal(a, b).item() for a, b in zip(made[1:], plain[1:], strict=True))
    assert error(weight, made, np.eye(IN), bits=4, group_size=64) <= 1.01 * error(
        weight, plain, np.eye(IN), bits=4, group_size=64
    )


def test_a_constant_group_is_kept() -> None:
    weight = mx.full((OUT, IN), 0.25)
    made = calibrated(weight, seen_of(correlated(1000)), bits=4, group_size=64, dtype=mx.float32)
    assert mx.allclose(mx.dequantize(*made, bits=4, group_size=64), weight, atol=1e-3).item()


@pytest.mark.parametrize("own", [True, False])
def test_experts(own: bool) -> None:
    """Those whose inputs are their own are calibrated on these, others on all."""
    experts, out = 3, (IN if own else OUT)
    layer = SwitchLinear(IN, out, experts, bias=False)
    layer.weight = mx.stack([weight_of(seed, out) for seed in range(experts)])
    inputs = Inputs(layer)
    x = correlated(6000)
    turned = np.concatenate([np.roll(x[i::experts], 50 * i, axis=1) for i in range(experts)])
    chosen = np.repeat(np.arange(experts), 2000)
    inputs.see(mx.array(turned.astype(np.float32))[:, None], mx.array(chosen))
    inputs.add_up()
    form = {"bits": 4, "group_size": 64}
    made = calibrated(layer.weight, inputs, dtype=mx.float32, **form)
    plain = mx.quantize(layer.weight, **form)
    assert [part.shape for part in made] == [part.shape for part in plain]
    unseen = correlated(2000, seed=2)
    for i in range(experts):
        mine = np.roll(unseen, 50 * i, axis=1)
        errors = [error(layer.weight[i], [part[i] for part in parts], mine, **form) for parts in (made, plain)]
        assert errors[0] < (0.86 if own else 0.98) * errors[1]
