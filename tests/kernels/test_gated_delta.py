"""Guards the gated delta rule: chunked and stepwise forms equal mlx-lm's, and a step's bits do not depend on how many
steps there are.

The first keeps prefill and decoding one model; the second is what bit parity of verify passes rests on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.gated_delta import gated_delta_ops

from selfdraft.kernels.gated_delta import (
    CHUNK,
    gated_delta_chunked,
    gated_delta_prefill,
    gated_delta_steps,
    unit_lower_inverse,
)


@dataclass
class Inputs:
    q: mx.array
    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array
    state: mx.array

    def all(self) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array, mx.array]:
        return self.q, self.k, self.v, self.g, self.beta, self.state

    def part(self, start: int, stop: int, state: mx.array) -> Inputs:
        cut = slice(start, stop)
        return Inputs(self.q[:, cut], self.k[:, cut], self.v[:, cut], self.g[:, cut], self.beta[:, cut], state)


def inputs(
    tokens: int,
    *,
    batch: int = 1,
    key_heads: int = 1,
    ratio: int = 2,
    key_dim: int = 8,
    value_dim: int = 6,
    log_decay: tuple[float, float] = (-2.0, 0.0),
    seed: int = 0,
    dtype: mx.Dtype = mx.float32,
) -> Inputs:
    """Random inputs as the layer makes them: normalised keys, scaled queries, decays exp(uniform(*log_decay))."""
    random = np.random.default_rng(seed)
    heads = key_heads * ratio
    q, k = random.normal(size=(2, batch, tokens, key_heads, key_dim))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q / key_dim, k))
    q = q / key_dim**0.5
    v = random.normal(size=(batch, tokens, heads, value_dim))
    g = np.exp(random.uniform(*log_decay, size=(batch, tokens, heads)))
    beta = random.uniform(size=(batch, tokens, heads))
    state = random.normal(size=(batch, heads, value_dim, key_dim))
    q_, k_, v_, beta_ = (mx.array(x.astype(np.float32)).astype(dtype) for x in (q, k, v, beta))
    return Inputs(q_, k_, v_, mx.array(g.astype(np.float32)), beta_, mx.array(state.astype(np.float32)))


def recurrence(x: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """The three formulas of the module's docstring, in float64."""
    q, k, v, g, beta, s = (np.array(a.astype(mx.float32)).astype(np.float64) for a in x.all())
    batch, tokens, heads, _ = v.shape
    ratio = heads // q.shape[2]
    y = np.zeros(v.shape)
    for b in range(batch):
        for h in range(heads):
            for t in range(tokens):
                key = k[b, t, h // ratio]
                delta = beta[b, t, h] * (v[b, t, h] - g[b, t, h] * s[b, h] @ key)
                s[b, h] = g[b, t, h] * s[b, h] + np.outer(delta, key)
                y[b, t, h] = s[b, h] @ q[b, t, h // ratio]
    return y, s


def close(found: mx.array, expected: mx.array | np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=tolerance, atol=tolerance)


def largest(x: mx.array) -> float:
    return float(np.abs(np.array(x)).max())


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    tokens=st.one_of(st.integers(1, 20), st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 7])),
    batch=st.integers(1, 3),
    key_heads=st.integers(1, 2),
    ratio=st.integers(1, 3),
    key_dim=st.sampled_from([4, 16]),
    value_dim=st.sampled_from([3, 16]),
    floor=st.sampled_from([-0.01, -0.5, -5.0, -40.0]),
    seed=st.integers(0, 99),
)
def test_three_ways_agree(
    tokens: int, batch: int, key_heads: int, ratio: int, key_dim: int, value_dim: int, floor: float, seed: int
) -> None:
    x = inputs(
        tokens,
        batch=batch,
        key_heads=key_heads,
        ratio=ratio,
        key_dim=key_dim,
        value_dim=value_dim,
        log_decay=(floor, 0.0),
        seed=seed,
    )
    y, states = gated_delta_steps(*x.all())
    assert len(states) == tokens
    theirs, their_state = gated_delta_ops(*x.all())
    close(y, theirs, 1e-5)
    close(states[-1], their_state, 1e-5)
    chunked, state = gated_delta_chunked(*x.all())
    assert chunked.shape == y.shape == (batch, tokens, key_heads * ratio, value_dim)
    close(chunked, y, 2e-4)
    close(state, states[-1], 2e-4)


def test_against_the_formulas() -> None:
    x = inputs(70, batch=2, key_heads=2, ratio=2)
    y, state = recurrence(x)
    for found, last in (
        (gated_delta_steps(*x.all())[0], gated_delta_steps(*x.all())[1][-1]),
        gated_delta_chunked(*x.all()),
        gated_delta_prefill(*x.all()),
    ):
        close(found, y, 1e-5)
        close(last, state, 1e-5)


@pytest.mark.parametrize("strength", [-30.0, -80.0, -200.0])
def test_strong_decay(strength: float) -> None:
    """Products of decays over a chunk underflow, and at -200 so does a single one: g is 0, its logarithm -inf.

    The chunked form once gave NaN there, through -inf - (-inf).
    """
    x = inputs(2 * CHUNK + 5, batch=2, log_decay=(-0.05, 0.0), seed=3)
    strong = np.array(x.g)
    strong[:, ::3] = np.exp(np.float32(strength))
    strong[1, 40:60] = np.exp(np.float32(strength))
    x.g = mx.array(strong)
    assert (strong.min() == 0) == (strength == -200)
    y, states = gated_delta_steps(*x.all())
    chunked, state = gated_delta_chunked(*x.all())
    close(chunked, y, 2e-3 * largest(y))
    close(state, states[-1], 2e-3 * largest(states[-1]))


def test_no_decay_and_full_strength() -> None:
    """The stiffest system a chunk can be: nothing is forgotten, and every write is complete."""
    x = inputs(2 * CHUNK, log_decay=(0.0, 0.0), key_dim=4, seed=4)
    x.beta = mx.ones_like(x.beta)
    y, states = gated_delta_steps(*x.all())
    chunked, state = gated_delta_chunked(*x.all())
    close(chunked, y, 1e-4)
    close(state, states[-1], 1e-4)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_steps_bits_do_not_depend_on_how_many_there_are(dtype: mx.Dtype) -> None:
    x = inputs(6, batch=2, key_heads=2, dtype=dtype)
    y, states = gated_delta_steps(*x.all())
    state = x.state
    for t in range(6):
        one, after = gated_delta_steps(*x.part(t, t + 1, state).all())
        state = after[0]
        assert mx.array_equal(one[:, 0], y[:, t])
        assert mx.array_equal(state, states[t])
    assert y.dtype == state.dtype == mx.float32


def test_a_rows_bits_do_not_depend_on_the_batch() -> None:
    x = inputs(4, batch=3)
    y, states = gated_delta_steps(*x.all())
    for b in range(3):
        one = Inputs(*(a[b : b + 1] for a in x.all()))
        alone, alone_states = gated_delta_steps(*one.all())
        assert mx.array_equal(alone, y[b : b + 1])
        assert mx.array_equal(alone_states[-1], states[-1][b : b + 1])


def test_chunked_goes_on_from_a_state() -> None:
    x = inputs(150, seed=5)
    whole, last = gated_delta_chunked(*x.all())
    first, state = gated_delta_chunked(*x.part(0, 83, x.state).all())
    second, state = gated_delta_chunked(*x.part(83, 150, state).all())
    close(mx.concatenate([first, second], axis=1), whole, 1e-5)
    close(state, last, 1e-5)


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_unit_lower_inverse(size: int) -> None:
    random = np.random.default_rng(size)
    strict = np.tril(random.normal(size=(3, 2, size, size)), -1).astype(np.float32) / max(size, 1) ** 0.5
    found = np.array(unit_lower_inverse(mx.array(strict))).astype(np.float64)
    identity = np.eye(size)
    np.testing.assert_allclose(found @ (identity + strict), np.broadcast_to(identity, found.shape), atol=2e-4)
    assert np.array_equal(found, np.tril(found))


def test_there_is_no_matrix_product_away_from_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In fp32 it may be one of TF32 on CUDA, and differ with the number of rows. The numbers are the same ones."""
    case = inputs(3)
    expected, states = gated_delta_steps(*case.all())
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    found, others = gated_delta_steps(*case.all())
    mx.export_to_dot(str(tmp_path / "graph"), found, others[-1])
    assert "Matmul" not in (tmp_path / "graph").read_text()
    assert mx.allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert mx.allclose(others[-1], states[-1], rtol=1e-4, atol=1e-5)
