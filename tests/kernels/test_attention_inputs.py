"""Guards what goes into attention from a fused projection: its values against plain MLX and against fp64, that keys and
values are written where they belong and nowhere else, and that a token's bits do not depend on the others, nor on rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.kernels import attention_inputs as subject
from selfdraft.kernels import portable
from selfdraft.kernels.attention_inputs import CHECK, attention_inputs, attention_inputs_reference, fits
from tests.support.host_kernels import kernels_on_host, needs_compiler

ROUNDING = {mx.float32: 2.0**-20, mx.float16: 2.0**-9, mx.bfloat16: 2.0**-6}
EPS = 1e-6
Found = tuple[mx.array, mx.array, mx.array]


@dataclass
class Case:
    """A projection, and a KV of all rows that holds other numbers."""

    projected: mx.array
    norms: list[mx.array]
    frequencies: mx.array
    keys: mx.array
    values: mx.array
    starts: list[int]
    rope_deltas: list[int]
    heads: int
    capacities: Sequence[int] = ()  # of each row's buffers, where they are not all that there is

    @property
    def size(self) -> int:
        return self.keys.shape[3]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def given(self) -> list[Any]:
        ends = self.capacities or [self.keys.shape[2]] * self.keys.shape[0]
        keys, values = (
            [mx.array(x[row : row + 1, :, :end]) for row, end in enumerate(ends)] for x in (self.keys, self.values)
        )
        places = [mx.array(each, mx.int32) for each in (self.starts, self.rope_deltas)]
        return [self.projected, *self.norms, self.frequencies, keys, values, *places]

    def of_rows(self, rows: slice) -> Case:
        return replace(
            self,
            projected=self.projected[rows],
            keys=self.keys[rows],
            values=self.values[rows],
            starts=self.starts[rows],
            rope_deltas=self.rope_deltas[rows],
            capacities=self.capacities[rows],
        )

    def run(self) -> Found:
        """With keys and values of all rows in one array each, where their capacities are one."""
        q, keys, values = self.run_rows()
        return q, mx.concatenate(keys), mx.concatenate(values)

    def run_rows(self) -> tuple[mx.array, list[mx.array], list[mx.array]]:
        given = self.given
        q = on_host(*given, heads=self.heads, kv_heads=self.kv_heads, size=self.size, eps=EPS)
        return q, given[4], given[5]

    def reference(self) -> Found:
        q, keys, values = attention_inputs_reference(
            *self.given, heads=self.heads, kv_heads=self.kv_heads, size=self.size, eps=EPS
        )
        return q, mx.concatenate(keys), mx.concatenate(values)

    def exact(self) -> list[np.ndarray]:
        """In fp64, a head at a time, not rounded."""
        projected, q_norm, k_norm, frequencies, keys, values = (
            np.array(x.astype(mx.float32), np.float64) for x in (*self.given[:4], self.keys, self.values)
        )
        rows, tokens, _ = projected.shape
        q, size, half = np.zeros((rows, self.heads, tokens, self.size)), self.size, len(frequencies)

        def turned(x: np.ndarray, weight: np.ndarray, position: int) -> np.ndarray:
            x = x / np.sqrt(np.mean(x * x) + EPS) * weight
            pairs = (x[:half] + 1j * x[half : 2 * half]) * np.exp(1j * position * frequencies)
            return np.concatenate([pairs.real, pairs.imag, x[2 * half :]])

        for row, token in np.ndindex(rows, tokens):
            position, parts = self.starts[row] + token, projected[row, token].reshape(-1, size)
            place = position + self.rope_deltas[row]
            for head in range(self.heads):
                q[row, head, token] = turned(parts[2 * head], q_norm, place)
            for head in range(self.kv_heads if position < keys.shape[2] else 0):
                keys[row, head, position] = turned(parts[2 * self.heads + head], k_norm, place)
                values[row, head, position] = parts[2 * self.heads + self.kv_heads + head]
        return [q, keys, values]


def case(
    starts: list[int],
    size: int,
    *,
    tokens: int = 1,
    heads: int = 3,
    kv_heads: int = 1,
    half: int = 32,
    dtype: mx.Dtype = mx.bfloat16,
    rope_deltas: Sequence[int] = (),
) -> Case:
    random = np.random.default_rng(size + tokens)
    rows = len(starts)

    def normal(*shape: int) -> mx.array:
        return mx.array(random.normal(size=shape).astype(np.float32)).astype(dtype)

    projected = normal(rows, tokens, 2 * (heads + kv_heads) * size) * mx.array(3, dtype)
    norms = [normal(size), normal(size)]
    frequencies = mx.array((1e4 ** (-np.arange(half) / half)).astype(np.float32))
    keys, values = normal(2, rows, kv_heads, 50, size)
    return Case(projected, norms, frequencies, keys, values, starts, list(rope_deltas) or [0] * rows, heads)


def on_host(*given: Any, heads: int, kv_heads: int, size: int, eps: float) -> mx.array:
    with pytest.MonkeyPatch.context() as patch:
        kernels_on_host(patch)
        return attention_inputs(*given, heads=heads, kv_heads=kv_heads, size=size, eps=eps)


def assert_close(found: Found, exact: list[np.ndarray]) -> None:
    for mine, theirs in zip(found, exact, strict=True):
        worst = np.abs(np.array(mine.astype(mx.float32), np.float64) - theirs).max() / np.abs(theirs).max()
        assert worst <= ROUNDING[mine.dtype]


def same_bits(a: mx.array, b: mx.array) -> bool:
    return bool(mx.array_equal(a.view(mx.uint8), b.view(mx.uint8)))


# Half of a head rotated, a quarter, all of it; pairs in one lane and in two; positions to the end and behind it, and
# rotary ones that are others, behind pictures.
CASES = {
    "fp32": case([0, 7], 64, tokens=2, half=8, dtype=mx.float32, rope_deltas=[0, -5]),
    "bf16": case([50, 48, 30], 256, tokens=4, heads=6, kv_heads=2, rope_deltas=[-20, 0, -7]),
    "fp16, all rotated": case([5], 128, tokens=3, half=64, dtype=mx.float16),
}


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_equals_arithmetic_in_fp64(name: str) -> None:
    assert_close(CASES[name].run(), CASES[name].exact())


@pytest.mark.parametrize("name", CASES)
def test_so_does_the_reference(name: str) -> None:
    assert_close(CASES[name].reference(), CASES[name].exact())


@needs_compiler
def test_what_is_rounded() -> None:
    """The norm as MLX rounds it, and the rotation's result; not sines, which MLX rounds as well on a CPU, if not on a
    GPU. One rounding more or less differs in every tenth number or so."""
    given = CASES["bf16"]
    unturned = replace(given, frequencies=0 * given.frequencies).reference()[0]
    normalised = np.array(unturned.astype(mx.float32), np.float64)
    first = np.array(given.starts) + np.array(given.rope_deltas)
    half, positions = given.frequencies.size, first[:, None, None, None] + np.arange(4)[:, None]
    angles = (positions * np.array(given.frequencies)).astype(np.float32).astype(np.float64)
    pairs = (normalised[..., :half] + 1j * normalised[..., half : 2 * half]) * np.exp(1j * angles)
    expected = np.concatenate([pairs.real, pairs.imag, normalised[..., 2 * half :]], axis=-1)
    differs = np.array(given.run()[0] != mx.array(expected.astype(np.float32)).astype(mx.bfloat16))
    assert differs[..., 2 * half :].mean() < 0.002
    assert differs.mean() < 0.002


@needs_compiler
def test_only_the_tokens_places_are_written() -> None:
    """And places behind the capacity not at all; in emulation, to write there ends the process or breaks a guard."""
    given = CASES["bf16"]
    _, keys, values = given.run()
    for row, start in enumerate(given.starts):
        for now, before in ((keys, given.keys), (values, given.values)):
            changed = np.array(mx.any(now[row] != before[row], axis=(0, 2)))
            assert np.flatnonzero(changed).tolist() == list(range(start, min(start + 4, 50)))


@needs_compiler
def test_bits_do_not_depend_on_the_other_tokens() -> None:
    given = CASES["bf16"]
    q, keys, values = given.run()
    for token in range(4):
        alone = replace(
            given, projected=given.projected[:, token : token + 1] + 0, starts=[start + token for start in given.starts]
        )
        one, one_keys, one_values = alone.run()
        assert same_bits(q[:, :, token : token + 1] + 0, one)
        for row, start in enumerate(alone.starts):
            if start < 50:
                assert same_bits(keys[row, :, start] + 0, one_keys[row, :, start] + 0)
                assert same_bits(values[row, :, start] + 0, one_values[row, :, start] + 0)


@needs_compiler
@pytest.mark.parametrize("most", [1, 4, 8, 9])
def test_rows_have_buffers_of_their_own(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of unlike capacities; and their bits depend on no other row, nor on how many a launch takes: nine are one launch,
    two or three, or one each."""
    starts = [0, 7, 48, 46, 30, 2, 11, 49, 5]
    given = replace(case(starts, 64, tokens=2, half=8), capacities=[50, 9, 49, 50, 33, 4, 50, 50, 6])
    alone = [given.of_rows(slice(row, row + 1)).run_rows() for row in range(9)]
    monkeypatch.setattr(portable, "most_rows", lambda: most)
    q, keys, values = given.run_rows()
    for row, (own_q, own_keys, own_values) in enumerate(alone):
        assert same_bits(q[row : row + 1] + 0, own_q), f"row {row}"
        assert same_bits(keys[row], own_keys[0]), f"row {row}"
        assert same_bits(values[row], own_values[0]), f"row {row}"
        changed = np.array(mx.any(keys[row] != given.keys[row : row + 1, :, : given.capacities[row]], axis=(0, 1, 3)))
        places = range(starts[row], min(starts[row] + 2, given.capacities[row]))
        assert np.flatnonzero(changed).tolist() == list(places)
    some = given.of_rows(slice(2, 5)).run_rows()
    assert same_bits(some[0], q[2:5] + 0)


@needs_compiler
def test_the_self_check_passes_here_and_tells_a_position_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "attention_inputs", on_host)
    assert subject._error() <= CHECK.most

    def off(*given: Any, heads: int, kv_heads: int, size: int, eps: float) -> mx.array:
        return on_host(*given[:-2], given[-2] + 1, given[-1], heads=heads, kv_heads=kv_heads, size=size, eps=eps)

    monkeypatch.setattr(subject, "attention_inputs", off)
    assert subject._error() > 8 * CHECK.most

    def of_two(*given: Any, **sizes: Any) -> mx.array:
        return on_host(*given, **sizes) * (1 + 2.0**-7 * (given[0].shape[0] > 1))

    monkeypatch.setattr(subject, "attention_inputs", of_two)
    assert subject._error() == float("inf")


@pytest.mark.parametrize(
    ("shape", "dtype", "taken"),
    [
        ((1, 4, 2 * 28 * 256), mx.bfloat16, True),
        ((1, 17, 2 * 28 * 256), mx.bfloat16, False),
        ((1, 4, 2 * 28 * 256 + 256), mx.bfloat16, False),
        ((1, 4, 2 * 28 * 256), mx.int32, False),
        ((4, 2 * 28 * 256), mx.bfloat16, False),
    ],
)
def test_what_it_takes(shape: tuple[int, ...], dtype: mx.Dtype, taken: bool) -> None:
    assert fits(mx.zeros(shape, dtype), heads=24, kv_heads=4, size=256) is taken


@pytest.mark.parametrize("wrong", ["projected", "norms", "frequencies", "keys", "values"])
def test_arguments_that_do_not_go_together(wrong: str) -> None:
    given = replace(CASES["fp32"])
    old = getattr(given, wrong)
    setattr(given, wrong, [x.astype(mx.int8) for x in old] if wrong == "norms" else old.astype(mx.float16))
    with pytest.raises(ValueError, match="does not take 3 and 1 heads of 64"):
        given.run()
    with pytest.raises(ValueError, match="does not take"):
        replace(CASES["fp32"], starts=[0]).run()
    with pytest.raises(ValueError, match="does not take"):
        replace(CASES["fp32"], rope_deltas=[0]).run()


@pytest.mark.parametrize("places", [(4,), (5,), (4, 5)], ids=["keys", "values", "both"])
def test_every_row_s_buffers_are_looked_at(places: tuple[int, ...]) -> None:
    """Capacities alone may differ between rows, and between the keys and the values of one they may not."""
    first, other = CASES["fp32"].keys[:1], CASES["fp32"].keys[1:]
    wrong = [first], [first, other[..., :32]], [first, other.astype(mx.float16)], [first, mx.concatenate([other] * 2)]
    for arrays in wrong if len(places) == 2 else (*wrong, [first, other[:, :, :49]]):
        given = CASES["fp32"].given
        for place in places:
            given[place] = arrays
        with pytest.raises(ValueError, match="does not take"):
            on_host(*given, heads=3, kv_heads=1, size=64, eps=EPS)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "backend", lambda: None)
    given = CASES["fp32"]
    with pytest.raises(RuntimeError, match="needs a GPU"):
        attention_inputs(*given.given, heads=3, kv_heads=1, size=64, eps=EPS)
