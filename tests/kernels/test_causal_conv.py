"""Guards the causal convolution: both of its paths equal mx.conv1d, and cutting a sequence changes nothing."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.kernels.causal_conv import causal_conv


def random(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32)).astype(dtype)


@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 33, 100])
@pytest.mark.parametrize("batch", [1, 3])
def test_equals_conv1d(taps: int, tokens: int, batch: int) -> None:
    """16 tokens is where the CPU changes from the single operation to multiply-adds."""
    x, weight = random(batch, taps - 1 + tokens, 12), random(12, taps, 1, seed=1)
    found = causal_conv(x, weight)
    assert found.shape == (batch, tokens, 12)
    np.testing.assert_allclose(np.array(found), np.array(mx.conv1d(x, weight, groups=12)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("tokens", [4, 40])
def test_keeps_the_dtype_and_sums_in_fp32(dtype: mx.Dtype, tokens: int) -> None:
    x, weight = random(1, 3 + tokens, 8, dtype=dtype), random(8, 4, 1, seed=1, dtype=dtype)
    found = causal_conv(x, weight)
    assert found.dtype == dtype
    exact = mx.conv1d(x.astype(mx.float32), weight.astype(mx.float32), groups=8)
    half_step = 2.0**-8 if dtype == mx.bfloat16 else 2.0**-11
    np.testing.assert_allclose(np.array(found.astype(mx.float32)), np.array(exact), rtol=1.01 * half_step, atol=1e-6)


def test_each_position_sees_its_window_only() -> None:
    """Oldest tap first; a change at one input moves the k outputs from there on."""
    weight = mx.broadcast_to(mx.array([1.0, 10, 100, 1000]).reshape(1, 4, 1), (2, 4, 1))
    for tokens in (5, 30):
        pulse = mx.zeros((1, 3 + tokens, 2))
        pulse[0, 3, 1] = 1.0
        found = causal_conv(pulse, weight)
        assert found[0, :4, 1].tolist() == [1000, 100, 10, 1]
        assert not found[0, 4:].any().item()
        assert not found[..., 0].any().item()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_position_does_not_depend_on_the_width(dtype: mx.Dtype) -> None:
    """Bit for bit within a verify pass, where any prefix may be committed."""
    x, weight = random(1, 3 + 9, 16, dtype=dtype), random(16, 4, 1, seed=1, dtype=dtype)
    whole = causal_conv(x, weight)
    for t in range(9):
        assert mx.array_equal(causal_conv(x[:, t : t + 4], weight), whole[:, t : t + 1])
