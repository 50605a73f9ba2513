"""Guards the fused mixer: it computes what the layer's single operations do, its bits depend neither on other rows nor
on how steps are spread over calls nor on what was rejected, and its states are those of `gated_delta_tape`.

The kernel's own text runs, on the host. Bit for bit means with one compiler and one instruction set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.kernels import gated_delta_mixer as mixers
from selfdraft.kernels.gated_delta_mixer import CHECK, fits, gated_delta_mixer, gated_delta_mixer_reference
from selfdraft.kernels.gated_delta_tape import Tape, gated_delta_replay, gated_delta_verify
from selfdraft.kernels.portable import Kernel, Launch
from selfdraft.kernels.self_check import relative_error
from tests.support.cuda_texts import record_texts
from tests.support.host_kernels import Run, kernels_on_host, needs_compiler, run_on_host

pytestmark = needs_compiler

Result = tuple[mx.array, mx.array, mx.array, Tape]
Past = tuple[mx.array, mx.array, Tape | None]  # window, state, tape


def on_host_through(patch: pytest.MonkeyPatch, run: Run | None = None) -> None:
    kernels_on_host(patch, run)
    patch.setattr(mixers, "_CALLS", {})


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    on_host_through(monkeypatch)


@dataclass(frozen=True)
class Layer:
    """Sizes and weights."""

    dtype: mx.Dtype = mx.bfloat16
    key_heads: int = 1
    value_heads: int = 2
    key_dim: int = 128
    value_dim: int = 32
    taps: int = 4
    weights_dtype: mx.Dtype | None = None  # of dt_bias and the norm; else those of the inputs
    seed: int = 0

    @property
    def heads(self) -> dict[str, int]:
        names = ("key_heads", "value_heads", "key_dim", "value_dim")
        return {name: getattr(self, name) for name in names}

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def weights(self) -> tuple[mx.array, ...]:
        """Of the convolution, A_log, dt_bias, of the norm."""
        random = np.random.default_rng(self.seed)
        other = self.weights_dtype or self.dtype
        return (
            array(random.normal(size=(self.channels, self.taps, 1)) / 2, self.dtype),
            array(random.normal(size=self.value_heads), mx.float32),
            array(random.normal(size=self.value_heads), other),
            array(1 + random.normal(size=self.value_dim) / 4, other),
        )

    def projected(self, batch: int, tokens: int) -> mx.array:
        width = self.channels + self.value_heads * (self.value_dim + 2)
        return array(np.random.default_rng(self.seed + 1).normal(size=(batch, tokens, width)), self.dtype)

    def past(self, batch: int, held: int) -> Past:
        """Window, state, tape."""
        random = np.random.default_rng(self.seed + 2)
        keys = random.normal(size=(batch, held, self.key_heads, self.key_dim)) / self.key_dim**0.5
        tape = Tape.of(
            array(np.exp(random.uniform(-2, 0, size=(batch, held, self.value_heads))), mx.float32),
            array(keys, self.dtype),
            array(random.normal(size=(batch, held, self.value_heads, self.value_dim)), mx.float32),
        )
        window = array(random.normal(size=(batch, self.taps - 1 + held, self.channels)), self.dtype)
        state = random.normal(size=(batch, self.value_heads, self.value_dim, self.key_dim))
        return window, array(state, mx.float32), tape if held else None

    def run(
        self,
        projected: mx.array,
        past: Past,
        accepted: Sequence[int],
        function: Any = gated_delta_mixer,
    ) -> Result:
        window, state, tape = past
        found: Result = function(
            projected, window, *self.weights(), state, tape, counts(accepted), **self.heads, eps=1e-6
        )
        return found


def array(x: np.ndarray, dtype: mx.Dtype) -> mx.array:
    return mx.array(x.astype(np.float32)).astype(dtype)


def counts(of_rows: Sequence[int]) -> mx.array:
    return mx.array(list(of_rows), dtype=mx.int32)


def named(result: Result) -> dict[str, mx.array]:
    out, window, state, tape = result
    parts = {"decay": tape.decay, "keys": tape.keys, "deltas": tape.deltas}
    return {"out": out, "window": window, "state": state, **parts}


def same_bits(one: mx.array, other: mx.array) -> bool:
    assert (one.shape, one.dtype) == (other.shape, other.dtype)
    return bool(mx.array_equal(one.reshape(-1).view(mx.uint8), other.reshape(-1).view(mx.uint8)).item())


def row_of(past: Past, b: int) -> Past:
    window, state, tape = past
    return window[b : b + 1], state[b : b + 1], tape.row(b) if tape else None


BF16, FP16, FP32 = mx.bfloat16, mx.float16, mx.float32
MIXED = Layer(weights_dtype=FP32)
CASES = [
    (Layer(dtype=FP32, value_heads=1, value_dim=128), 2, 4, (3,), 1e-5),
    (Layer(dtype=FP32, key_heads=2, value_heads=6, key_dim=64, value_dim=64, taps=2), 3, 2, (2, 0), 1e-5),
    (Layer(dtype=FP32, value_heads=1, key_dim=32, value_dim=96, taps=8), 1, 0, (0, 0), 1e-5),
    (Layer(dtype=FP32, value_heads=1, key_dim=96), 16, 16, (11, 16), 1e-5),
    (MIXED, 4, 4, (2, 0, 4), 0.03),
    (Layer(dtype=FP16, key_dim=64), 4, 3, (1, 3), 4e-3),
]


@pytest.mark.parametrize(("layer", "tokens", "held", "accepted", "most"), CASES)
def test_kernel_follows_the_single_operations(
    layer: Layer, tokens: int, held: int, accepted: tuple[int, ...], most: float
) -> None:
    """Over dtypes, head ratios 1, 2, 3, sizes, taps, numbers of steps. MLX rounds inside its sigmoid and softplus, the
    kernel does not; in fp32 that does not show."""
    batch = len(accepted)
    projected, past, conv_weight = layer.projected(batch, tokens), layer.past(batch, held), layer.weights()[0]
    assert fits(projected, conv_weight, past[2], **layer.heads)
    found = named(layer.run(projected, past, accepted))
    expected = named(layer.run(projected, past, accepted, gated_delta_mixer_reference))
    for name, x in expected.items():
        assert (found[name].shape, found[name].dtype) == (x.shape, x.dtype), name
        assert relative_error(found[name], x) < most, name
    assert same_bits(found["window"], expected["window"])


def exactly(x: mx.array) -> Any:
    return np.array(x.astype(FP32)).astype(np.float64)


def rounded(x: Any) -> Any:
    """To bf16 and back."""
    return exactly(array(np.asarray(x), BF16))


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def by_the_formulas(layer: Layer, projected: mx.array, past: Past) -> Any:
    """(out, decay, keys, deltas) of one row and one head with nothing to replay, in fp64, rounded where stated."""
    window, state, _ = past
    conv, a_log, bias, norm = (exactly(x) for x in layer.weights())
    line, fresh, memory = (exactly(x[0]) for x in (window, projected, state))
    width, memory = layer.key_dim, memory[0]
    line = np.concatenate([line, fresh[:, : layer.channels]])
    steps = []
    for t, x in enumerate(fresh):
        z, b, a = x[layer.channels : -2], x[-2], x[-1]
        mixed = rounded((line[t : t + layer.taps] * conv[:, :, 0].T).sum(axis=0))
        mixed = rounded(mixed * rounded(sigmoid(mixed)))
        q, k, v = mixed[:width], mixed[width : 2 * width], mixed[2 * width :]
        q, k = (rounded(each / np.sqrt((each**2).mean() + 1e-6 / width)) for each in (q, k))
        q, k = rounded(q * rounded(1 / width)), rounded(k * rounded(width**-0.5))
        g = np.exp(-np.exp(a_log) * rounded(np.log1p(np.exp(rounded(a + bias)))))
        delta = rounded(sigmoid(b)) * (v - g * memory @ k)
        memory = g * memory + np.outer(delta, k)
        y = rounded(memory @ q)
        y = rounded(rounded(y / np.sqrt((y**2).mean() + 1e-6)) * norm)
        steps.append((rounded(z * sigmoid(z) * y), g, k, delta))
    return [np.stack(parts) for parts in zip(*steps, strict=True)]


@pytest.mark.parametrize("scale", [1, 2**-10])
def test_kernel_rounds_where_the_layer_does(scale: float) -> None:
    """Against fp64, rounded to bf16 at the stated places. An fp32 sum may round to the other neighbour: 2 % of keys do,
    and what follows from those. A rounding left out or put elsewhere moves a quarter of them and more.
    Where all is small, the epsilons of the norms show."""
    layer = Layer(value_heads=1, value_dim=64, seed=5)
    window, state, _ = layer.past(1, 0)
    projected, past = layer.projected(1, 4) * scale, (window * scale, state * scale, None)
    found = named(layer.run(projected, past, [0]))
    out, decay, keys, deltas = by_the_formulas(layer, projected, past)
    assert np.allclose(np.array(found["decay"])[0], decay, rtol=1e-5)
    found_keys = exactly(found["keys"])[0, :, 0]
    assert (found_keys == keys).mean() > 0.98
    assert np.allclose(found_keys, keys, rtol=2**-7)
    assert np.abs(np.array(found["deltas"])[0, :, 0] - deltas).max() < 1e-3 * np.abs(deltas).max()
    found_out = exactly(found["out"])[0]
    assert (found_out == out).mean() > 0.9
    assert np.abs(found_out - out).max() < 2**-6 * np.abs(out).max()


def one_by_one(layer: Layer, projected: mx.array, past: Past) -> list[dict[str, Any]]:
    """Results of calls of one step, all accepted."""
    results, accepted = [], 0
    for t in range(projected.shape[1]):
        result = layer.run(projected[:, t : t + 1], past, [accepted] * projected.shape[0])
        past, accepted = result[1:], 1
        results.append(named(result))
    return results


def test_bits_do_not_depend_on_how_steps_are_spread_over_calls() -> None:
    """Cycles of 4, 3 and 1 steps with random acceptance, against calls of one step. Rows are at different places, so
    they do not depend on each other either. What is rejected is NaN in the next call's window and tape."""
    layer, batch, total = Layer(dtype=FP32, key_dim=64), 2, 14
    projected, past = layer.projected(batch, total), layer.past(batch, 0)
    alone = one_by_one(layer, projected, past)
    random = np.random.default_rng(1)
    done, accepted = [0] * batch, [0] * batch
    seen: set[tuple[int, int]] = set()
    while max(done) + 4 <= total:
        width = int(random.choice((4, 3, 1)))
        steps = mx.concatenate([projected[b : b + 1, d : d + width] for b, d in enumerate(done)])
        result = layer.run(steps, past, accepted)
        found = named(result)
        for b, d in enumerate(done):
            assert same_bits(found["state"][b], alone[d]["state"][b])
            assert same_bits(found["window"][b, : layer.taps], alone[d]["window"][b])
            for t in range(width):
                for name in ("out", "decay", "keys", "deltas"):
                    assert same_bits(found[name][b, t], alone[d + t][name][b, 0]), name
        accepted = [int(a) for a in random.integers(0, width + 1, size=batch)]
        seen.update((width, a) for a in accepted)
        past = spoiled(result, accepted, layer.taps)
        state, tape = past[1:]
        held = gated_delta_replay(state, tape, counts(accepted))
        done = [d + a for d, a in zip(done, accepted, strict=True)]
        for b, d in enumerate(done):
            assert same_bits(held[b], alone[d]["state"][b])
    assert {w for w, _ in seen} == {1, 3, 4}
    assert {a for _, a in seen} >= {0, 1, 2, 3}


def test_nor_on_there_being_many() -> None:
    """Ten steps are convolved in three chunks, by the text that has room for them; then a tape of ten is replayed, and
    the window in its place is read behind the rest."""
    layer, total, kept = Layer(dtype=FP32, key_dim=64), 10, 7
    projected, past = layer.projected(1, total), layer.past(1, 0)
    alone = one_by_one(layer, projected, past)
    result = layer.run(projected, past, [0])
    for t in range(total):
        for name in ("out", "decay", "keys", "deltas"):
            assert same_bits(named(result)[name][0, t], alone[t][name][0, 0]), name
    after = named(layer.run(projected[:, kept : kept + 1], spoiled(result, [kept], layer.taps), [kept]))
    for name, x in alone[kept].items():
        assert same_bits(after[name], x), name


def spoiled(result: Result, accepted: Sequence[int], taps: int) -> tuple[mx.array, mx.array, Tape]:
    """What the next call is given, with NaN in the place of what was rejected."""
    _, window, state, tape = result

    def behind(x: mx.array, kept: int) -> mx.array:
        past = mx.arange(x.shape[1])[None] >= counts(accepted)[:, None] + kept
        return mx.where(past.reshape(*past.shape, *[1] * (x.ndim - 2)), mx.array(mx.nan, dtype=x.dtype), x)

    return behind(window, taps - 1), state, replace(tape, array=behind(tape.array, 0))


@pytest.mark.parametrize(("layer", "tokens", "held"), [(MIXED, 4, 4), (Layer(key_dim=64), 2, 16)])
def test_rejected_steps_and_other_rows_never_show(layer: Layer, tokens: int, held: int) -> None:
    """Of a short and a long window, which are read differently: NaN behind what was accepted; a row alone."""
    accepted = (2, 0, held)
    projected, past = layer.projected(3, tokens), layer.past(3, held)
    together = named(layer.run(projected, past, accepted))
    window, state, tape = past
    assert tape is not None
    dirty = spoiled((projected, window, state, tape), accepted, layer.taps)
    for name, x in named(layer.run(projected, dirty, accepted)).items():
        assert same_bits(x, together[name]), name
    for b, kept in enumerate(accepted):
        for name, x in named(layer.run(projected[b : b + 1], row_of(dirty, b), [kept])).items():
            assert same_bits(x[0], together[name][b]), name


@pytest.mark.parametrize("layer", [Layer(), Layer(dtype=FP32, key_dim=64)])
def test_states_are_those_of_the_kernel_without_conv_and_norm(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both add in one order. q, v and beta are such that all of what makes them is exact: silu of what is large is the
    value itself, and a half comes of zero. Keys and decay are what the mixer says that they are."""
    steps, held, accepted = 3, 3, (1, 3)
    (window, state, tape), weights = layer.past(2, held), layer.weights()[1:]
    key_width, value_width = layer.key_heads * layer.key_dim, layer.value_heads * layer.value_dim
    k = layer.projected(2, steps)[..., key_width : 2 * key_width]
    q = mx.full(k.shape, 32)
    v = mx.random.randint(24, 65, (2, steps, value_width), key=mx.random.key(0))
    z, b, a = (mx.full((2, steps, n), 0) for n in (value_width, layer.value_heads, layer.value_heads))
    projected = mx.concatenate([x.astype(layer.dtype) for x in (q, k, v, z, b, a)], axis=-1)
    only_newest = mx.zeros((layer.channels, layer.taps, 1), dtype=layer.dtype)
    only_newest[:, -1] = 1
    monkeypatch.setattr(Layer, "weights", lambda _: (only_newest, *weights))
    *_, state_now, found = layer.run(projected, (window, state, tape), accepted)

    q, k = mx.full(found.keys.shape, 1 / layer.key_dim).astype(layer.dtype), found.keys.astype(layer.dtype)
    values = v.reshape(2, steps, layer.value_heads, layer.value_dim).astype(layer.dtype)
    beta = mx.full(found.decay.shape, 0.5)
    _, expected_state, expected = gated_delta_verify(q, k, values, found.decay, beta, state, tape, counts(accepted))
    assert same_bits(state_now, expected_state)
    assert same_bits(found.array, expected.array)


def test_self_check_passes_and_sees_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN among the tape's deltas, which are compared last; and a first step whose bits depend on how many follow."""
    results: list[list[mx.array]] = []

    def recorded(kernel: Kernel, inputs: Sequence[mx.array], launch: Launch) -> list[mx.array]:
        results.append(run_on_host(kernel, inputs, launch))
        return results[-1]

    on_host_through(monkeypatch, recorded)
    assert CHECK.error() <= CHECK.most
    whole, alone = results
    *others, tape = whole

    def found_faulty(*replies: list[mx.array]) -> bool:
        rest = list(replies)
        on_host_through(monkeypatch, lambda *_: rest.pop(0))
        return not CHECK.error() <= CHECK.most

    assert not found_faulty(whole, alone)
    bad = mx.where(tape == tape[:, 1:].max(), mx.nan, tape)  # of all numbers a delta is the largest
    assert found_faulty([*others, bad], alone)
    assert found_faulty(whole, [alone[0] * 1.01, *alone[1:]])


def test_wrong_arrays_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would read past them. Also once a call was good."""
    record_texts(monkeypatch)
    layer = Layer()
    projected, (window, state, tape), weights = layer.projected(2, 2), layer.past(2, 3), layer.weights()
    conv_weight, a_log, dt_bias, norm_weight = weights
    assert tape is not None

    def refused(match: str, **changed: Any) -> None:
        arrays = {
            "projected": projected, "window": window, "conv_weight": conv_weight, "a_log": a_log, "dt_bias": dt_bias,
            "norm_weight": norm_weight, "state": state, "tape": tape, "accepted": counts([1, 2]), **layer.heads,
        }  # fmt: skip
        with pytest.raises(ValueError, match=match):
            gated_delta_mixer(**{**arrays, **changed}, eps=1e-6)

    gated_delta_mixer(projected, window, *weights, state, tape, counts([1, 2]), **layer.heads, eps=1e-6)
    refused("window is", window=window[:, 1:])
    refused("window is", window=window.astype(FP32))
    refused("conv_weight is", conv_weight=mx.concatenate([conv_weight] * 2, axis=2))
    refused("a_log is", a_log=a_log[:1])
    refused("dt_bias is", dt_bias=counts([1, 2]))
    refused("norm_weight is", norm_weight=norm_weight[:8])
    refused("state is", state=state.astype(BF16))
    refused("accepted is", accepted=counts([1]))
    refused("tape is", tape=replace(tape, array=tape.array[..., 1:]))
    refused("tape is", tape=replace(tape, array=tape.array[:1]))
    refused("tape is", tape=replace(tape, array=tape.array.astype(BF16)))
    refused("the kernel does not take", projected=projected[..., 1:])
    refused("the kernel does not take", tape=layer.past(2, 17)[2])


def test_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes the text is not made for, and threadgroup memory: Metal has 32 KB of it."""

    def fitting(layer: Layer, tokens: int = 2, held: int = 0) -> bool:
        return fits(layer.projected(1, tokens), layer.weights()[0], layer.past(1, held)[2], **layer.heads)

    wide = Layer(value_dim=128)
    assert fitting(wide, 16, 16)
    assert not fitting(wide, 17)
    assert not fitting(wide, 0)
    assert not fitting(Layer(key_dim=48))
    assert not fitting(Layer(key_dim=160))
    assert not fitting(Layer(value_dim=16))
    assert not fitting(Layer(key_heads=2, value_heads=3))
    assert not fitting(Layer(taps=9))
    monkeypatch.setattr(mixers, "backend", lambda: "metal")
    assert not fitting(wide, 16, 16)
    assert fitting(wide, 9, 16)
