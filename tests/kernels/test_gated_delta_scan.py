"""Guards the gated delta rule over a whole prompt: the kernel follows the formula, and its bits are those of decoding
token by token, whatever the number of tokens, the calls they are spread over, and the other rows.

The kernel's own text runs, on the host. Bit for bit means with one compiler and one instruction set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.kernels import gated_delta, gated_delta_scan
from selfdraft.kernels.gated_delta_scan import KERNEL, fits, gated_delta_scan_reference
from selfdraft.kernels.gated_delta_tape import MOST_STEPS, Tape, gated_delta_replay, gated_delta_verify
from selfdraft.kernels.portable import Kernel, Launch
from selfdraft.kernels.self_check import relative_error
from tests.support.host_kernels import kernels_on_host, needs_compiler, run_on_host

pytestmark = needs_compiler

Arrays = list[mx.array]


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_on_host(monkeypatch)


@dataclass(frozen=True)
class Sizes:
    dtype: mx.Dtype = mx.bfloat16
    key_heads: int = 1
    value_heads: int = 2
    key_dim: int = 32
    value_dim: int = 12
    batch: int = 1


def made(sizes: Sizes, tokens: int, seed: int = 0) -> Arrays:
    """q, k, v, g, beta, state, as the layer makes them; a tenth of the decays is 0, a fifth of the rates 0 or 1."""
    random = np.random.default_rng(seed)
    q, k = random.normal(size=(2, sizes.batch, tokens, sizes.key_heads, sizes.key_dim))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = random.normal(size=(sizes.batch, tokens, sizes.value_heads, sizes.value_dim))
    chosen, g = random.uniform(size=(2, *v.shape[:3]))
    g = np.where(chosen < 0.1, 0, np.where(chosen < 0.2, 1e-30, np.exp(-2 * g)))
    beta = np.clip(random.uniform(-0.1, 1.1, size=v.shape[:3]), 0, 1)
    state = random.normal(size=(sizes.batch, sizes.value_heads, sizes.value_dim, sizes.key_dim))
    q_, k_, v_, g_, beta_, state_ = (mx.array(x.astype(np.float32)) for x in (q, k, v, g, beta, state))
    return [*(x.astype(sizes.dtype) for x in (q_, k_, v_)), g_, beta_.astype(sizes.dtype), state_]


def scanned(arrays: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
    q, k, v, g, beta, state = arrays
    return gated_delta_scan.gated_delta_scan(q, k, v, g, beta, state)


def part(arrays: Arrays, tokens: slice, state: mx.array) -> Arrays:
    return [*(x[:, tokens] for x in arrays[:5]), state]


def recurrence(arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """The formulas of `gated_delta`, in float64."""
    q, k, v, g, beta, s = (np.array(x.astype(mx.float32)).astype(np.float64) for x in arrays)
    q, k = (np.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    y = np.zeros(v.shape)
    for t in range(v.shape[1]):
        s = g[:, t, :, None, None] * s
        delta = beta[:, t, :, None] * (v[:, t] - np.einsum("bhvk,bhk->bhv", s, k[:, t]))
        s = s + delta[..., None] * k[:, t, :, None, :]
        y[:, t] = np.einsum("bhvk,bhk->bhv", s, q[:, t])
    return y, s


def error(found: mx.array, expected: np.ndarray) -> float:
    return float(np.abs(np.array(found.astype(mx.float32)) - expected).max() / np.abs(expected).max())


def same_bits(one: mx.array, other: mx.array) -> bool:
    assert one.dtype == other.dtype
    return one.shape == other.shape and bool(mx.array_equal(one.view(mx.uint8), other.view(mx.uint8)).item())


CASES = [
    (Sizes(), 1),
    (Sizes(value_heads=3, batch=3), 7),
    (Sizes(dtype=mx.float32, key_heads=2, value_heads=2, value_dim=4), 64),
    (Sizes(), 130),
    (Sizes(dtype=mx.float32, key_dim=128, value_dim=20, batch=3), 7),
    (Sizes(dtype=mx.float16, key_dim=128, value_heads=3, value_dim=24), 37),
    (Sizes(key_dim=64, key_heads=2, value_heads=8, value_dim=4), 18),
    (Sizes(dtype=mx.float16, key_dim=96, value_heads=1, value_dim=8), 5),
    (Sizes(dtype=mx.float32, key_dim=256, value_heads=1, value_dim=20), 19),
    (Sizes(key_dim=160, value_heads=1, value_dim=4), 9),
]


@pytest.mark.parametrize(("sizes", "tokens"), CASES)
def test_kernel_follows_the_formula(sizes: Sizes, tokens: int) -> None:
    """Over dtypes, head ratios, sizes, whole and broken pieces. y is rounded to the dtype; fp32 leaves 80 ulp."""
    arrays = made(sizes, tokens)
    assert fits(*arrays[:3])
    y, state = scanned(arrays)
    expected, last = recurrence(arrays)
    assert y.dtype == sizes.dtype
    assert error(y, expected) < {mx.float32: 1e-5, mx.float16: 6e-4, mx.bfloat16: 5e-3}[sizes.dtype]
    assert error(state, last) < 1e-5


def test_reference_follows_the_formula() -> None:
    arrays = made(Sizes(key_heads=2, value_heads=6, batch=2), 20)
    expected, last = recurrence(arrays)
    y, state = gated_delta_scan_reference(*arrays)
    assert error(y, expected) < 1e-5
    assert error(state, last) < 1e-5


@pytest.mark.parametrize(("lanes", "rows", "simdgroups"), [(8, 2, 4), (8, 4, 1), (16, 3, 8), (32, 1, 12)])
def test_bits_do_not_depend_on_how_a_state_is_spread(
    lanes: int, rows: int, simdgroups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch follows the sizes of a model, and may come to follow a chip: that is not to change a text."""
    arrays = made(Sizes(key_dim=128, value_heads=3, value_dim=20), 6)
    y, state = scanned(arrays)

    def launched(*of: mx.array) -> Launch:
        launch = launch_of(*of)
        across = -(-60 // (32 // lanes * simdgroups * rows))
        template = {**launch.template, "LANES": lanes, "ROWS": rows, "SIMDGROUPS": simdgroups}
        return Launch(template, (across, 1, 1), 32 * simdgroups, launch.shapes, launch.dtypes)

    launch_of = gated_delta_scan._launch
    monkeypatch.setattr(gated_delta_scan, "_launch", launched)
    gated_delta_scan._CALLS.clear()
    other_y, other_state = scanned(arrays)
    assert same_bits(y, other_y)
    assert same_bits(state, other_state)


@pytest.mark.parametrize("key_dim", [32, 128, 256])
def test_many_small_heads_have_room(key_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the largest threadgroups, and in what shared memory one may have, which the emulation watches."""
    monkeypatch.setattr(gated_delta_scan, "_PROCESSORS", 0)
    arrays = made(Sizes(key_dim=key_dim, value_heads=25, value_dim=4), 5)
    y, state = scanned(arrays)
    expected, last = recurrence(arrays)
    assert error(y, expected) < 5e-3
    assert error(state, last) < 1e-5


@pytest.mark.parametrize("sizes", [Sizes(key_dim=128, value_heads=3), Sizes(dtype=mx.float16, key_dim=64, value_dim=4)])
def test_bits_are_those_of_decoding(sizes: Sizes) -> None:
    """Against the kernel that verifies, in calls of one token and of many: another text, with other sums of lanes."""
    arrays = made(sizes, 21)
    y, state = scanned(arrays)
    before, tape, outputs = arrays[5], None, []
    for start, stop in ((0, 1), (1, 2), (2, 5), (5, 5 + MOST_STEPS)):
        q, k, v, g, beta, _ = part(arrays, slice(start, stop), before)
        kept = mx.array([tape.steps if isinstance(tape, Tape) else 0], dtype=mx.int32)
        out, before, tape = gated_delta_verify(q, k, v, g, beta, before, tape, kept)
        outputs.append(out.astype(sizes.dtype))
    assert tape is not None
    assert same_bits(mx.concatenate(outputs, axis=1), y)
    assert same_bits(gated_delta_replay(before, tape, mx.array([tape.steps], dtype=mx.int32)), state)


@pytest.mark.parametrize("cut", [1, 16, 31, 63])
def test_two_halves_are_the_whole(cut: int) -> None:
    arrays = made(Sizes(value_heads=3), 64)
    y, state = scanned(arrays)
    first, between = scanned(part(arrays, slice(0, cut), arrays[5]))
    second, last = scanned(part(arrays, slice(cut, None), between))
    assert same_bits(mx.concatenate([first, second], axis=1), y)
    assert same_bits(last, state)


@pytest.mark.parametrize("tokens", [1, 7, 18])
def test_rows_do_not_depend_on_their_neighbours(tokens: int) -> None:
    """Nor on what stands behind their end, which here is NaN: pieces of 16 tokens reach beyond it."""
    arrays = made(Sizes(key_heads=2, value_heads=4, batch=3), tokens)
    for row in range(3):
        y, state = scanned([x[row : row + 1] for x in arrays])
        others = (mx.arange(3) != row).reshape(3, 1, 1, 1)
        alone = [mx.where(others if x.ndim == 4 else others[..., 0], mx.nan, x).astype(x.dtype) for x in arrays]
        beside_y, beside_state = scanned(alone)
        assert same_bits(y, beside_y[row : row + 1])
        assert same_bits(state, beside_state[row : row + 1])


def test_a_decay_of_zero_forgets() -> None:
    """What was before, and however large, leaves no trace behind such a token."""
    arrays = made(Sizes(value_heads=3), 20)
    arrays[3] = mx.where(mx.arange(20)[:, None] == 9, 0.0, arrays[3])
    y, state = scanned(arrays)
    other = made(Sizes(value_heads=3), 20, seed=1)
    mixed = [mx.concatenate([theirs[:, :9], x[:, 9:]], axis=1) for x, theirs in zip(arrays, other, strict=True)][:5]
    other_y, other_state = scanned([*mixed, 1000 * other[5]])
    assert not same_bits(y[:, :9], other_y[:, :9])
    assert mx.array_equal(y[:, 9:], other_y[:, 9:])  # zeros may differ in sign
    assert mx.array_equal(state, other_state)


def test_a_state_of_zeros_and_rates_of_zero_give_zeros() -> None:
    arrays = made(Sizes(), 11)
    arrays[4], arrays[5] = mx.zeros_like(arrays[4]), mx.zeros_like(arrays[5])
    y, state = scanned(arrays)
    assert not y.any()
    assert not state.any()


def launch_for(batch: int, tokens: int, key_heads: int, value_heads: int) -> Launch:
    q, v = mx.zeros((batch, tokens, key_heads, 128)), mx.zeros((batch, tokens, value_heads, 128))
    return gated_delta_scan._launch(q, v, v[..., 0], mx.zeros((batch, value_heads, 128, 128)))


def test_tokens_rows_and_heads_are_not_compiled_in() -> None:
    launches = [launch_for(*sizes) for sizes in ((1, 1, 16, 48), (3, 9, 16, 48), (1, 4096, 12, 36))]
    assert len({str(launch.template) for launch in launches}) == 1


@pytest.mark.parametrize(
    ("key_heads", "value_heads", "simdgroups", "rows"),
    [(16, 16, 4, 1), (16, 32, 8, 1), (16, 48, 12, 1), (16, 64, 8, 2), (64, 128, 8, 3), (2, 6, 4, 1), (1, 1, 4, 1)],
)
def test_a_large_gpu_is_filled_once(key_heads: int, value_heads: int, simdgroups: int, rows: int) -> None:
    """Each of its processors has about as many rows, and all rows of S are taken."""
    launch = launch_for(1, 1, key_heads, value_heads)
    assert (launch.template["SIMDGROUPS"], launch.template["ROWS"]) == (simdgroups, rows)
    assert launch.threads == 32 * simdgroups
    x, y, _ = launch.threadgroups
    assert x * simdgroups * 4 * rows >= value_heads // key_heads * 128
    assert y == key_heads


def test_prompts_go_by_it_where_it_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = made(Sizes(), 9)
    y, state = gated_delta.gated_delta_prefill(*arrays)
    assert y.dtype == mx.float32  # the chunked form's
    monkeypatch.setattr(type(gated_delta_scan.CHECK), "passed", property(lambda self: True))
    found, last = gated_delta.gated_delta_prefill(*arrays)
    assert same_bits(found, scanned(arrays)[0])
    assert relative_error(found, y) < 5e-3
    assert relative_error(last, state) < 1e-4
    odd = [mx.zeros((1, 9, 1, 20)), mx.zeros((1, 9, 1, 20)), arrays[2], *arrays[3:5], mx.zeros((1, 2, 12, 20))]
    y, _ = gated_delta.gated_delta_prefill(*odd)
    assert not y.any()


def test_self_check_passes_and_sees_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gated_delta_scan._made

    def small(batch: int, tokens: int, key_heads: int, value_heads: int) -> Arrays:
        return whole(1, 40, 1, 1)

    monkeypatch.setattr(gated_delta_scan, "_made", small)
    assert gated_delta_scan._error() < gated_delta_scan.CHECK.most

    def off(kernel: Kernel, inputs: Sequence[mx.array], launch: Launch) -> Arrays:
        y, state = run_on_host(kernel, inputs, launch)
        return [y, state * 1.001]

    kernels_on_host(monkeypatch, off)
    assert not gated_delta_scan._error() <= gated_delta_scan.CHECK.most


def broken(index: int, change: object) -> Arrays:
    arrays = made(Sizes(), 3)
    arrays[index] = change(arrays[index])  # type: ignore[operator]
    return arrays


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda q: q[:, :2], "ask `fits`"),
        (1, lambda k: k.astype(mx.float32), "ask `fits`"),
        (2, lambda v: v[..., :10], "ask `fits`"),
        (3, lambda g: g[:, :2], "g is"),
        (4, lambda beta: beta[..., :1], "beta is"),
        (4, lambda beta: beta.astype(mx.int32), "beta is"),
        (5, lambda state: state[..., :16], "state is"),
        (5, lambda state: state.astype(mx.float16), "float16"),
    ],
)
def test_what_does_not_fit_is_refused(index: int, change: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scanned(broken(index, change))


def test_kernel_updates_nothing() -> None:
    """A state that is given may be a stored prefix's."""
    assert not KERNEL.updates
