"""Guards attention of few queries: its values, that a query's bits depend on nothing but itself and the keys it sees,
and that what lies behind a row's length never shows.

The second is what bit parity of verify passes with one-token passes rests on. The text that GPUs run is run on the
host, with splits of 64 keys and more: emulated threads are slow. Rows have buffers of their own throughout.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.kernels import attention_inputs, portable
from selfdraft.kernels import few_query_attention as subject
from selfdraft.kernels.few_query_attention import (
    CHECK,
    few_query_attention,
    few_query_attention_reference,
    fits,
)
from tests.support.cuda_texts import record_texts
from tests.support.host_kernels import kernels_on_host, needs_compiler

# Of the largest result: a rounding to 16 bits is half of this. In fp32 it is scores that err: terms of one reach 40.
ROUNDING = {mx.float32: 2.0**-18, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}
SPLIT = 64
SIMD = replace(subject._SIMD, splits=subject._Splits(SPLIT, SPLIT, SPLIT))
MMA = replace(subject._MMA, splits=subject._Splits(SPLIT, 2 * SPLIT, 2 * SPLIT))


@pytest.fixture(autouse=True)
def without_matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_BODIES", {"host": (SIMD,)})


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_BODIES", {"host": (MMA, SIMD)})


@dataclass
class Case:
    """Queries, and a KV of all rows that is NaN behind the lengths."""

    q: mx.array
    keys: mx.array
    values: mx.array
    lengths: list[int]

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)

    def run(
        self,
        rows: slice = slice(None),
        *,
        token: int | None = None,
        capacities: Sequence[int] = (),
        gate: mx.array | None = None,
    ) -> mx.array:
        """The kernels' result for some of the rows; for one of the tokens; in buffers of other capacities, which are
        gone through again and again; with a gate."""
        q, lengths = self.q[rows], mx.array(self.lengths[rows], mx.int32)
        if token is not None:
            lengths = lengths - (q.shape[2] - 1 - token)
            q = q[:, :, token : token + 1]
        keys, values = (buffers(x[rows], capacities or x.shape[2:3]) for x in (self.keys, self.values))
        return on_host(q, keys, values, lengths, scale=self.scale, gate=gate)

    def reference(self) -> mx.array:
        keys, values = (buffers(x, x.shape[2:3]) for x in (self.keys, self.values))
        return few_query_attention_reference(self.q, keys, values, mx.array(self.lengths, mx.int32), scale=self.scale)

    def exact(self) -> np.ndarray:
        """In fp64, a query at a time."""
        q, keys, values = (np.array(x.astype(mx.float32), np.float64) for x in (self.q, self.keys, self.values))
        out = np.zeros(q.shape)
        rows, heads, tokens, _ = q.shape
        for row, head, token in np.ndindex(rows, heads, tokens):
            seen = self.lengths[row] - tokens + token + 1
            if seen <= 0:
                continue
            of_kv = row, head // (heads // keys.shape[1]), slice(seen)
            scores = keys[of_kv] @ q[row, head, token] * self.scale
            weights = np.exp(scores - scores.max())
            out[row, head, token] = weights @ values[of_kv] / weights.sum()
        return out


def case(
    lengths: list[int],
    size: int,
    *,
    tokens: int = 1,
    kv_heads: int = 1,
    group: int = 1,
    dtype: mx.Dtype = mx.float32,
    capacity: int = SPLIT + 30,
) -> Case:
    random = np.random.default_rng(size + tokens)
    rows = len(lengths)
    q = 3 * random.normal(size=(rows, kv_heads * group, tokens, size))
    kv = random.normal(size=(2, rows, kv_heads, capacity, size))
    for row, length in enumerate(lengths):
        kv[:, row, :, length:] = np.nan
    arrays = [mx.array(x.astype(np.float32)).astype(dtype) for x in (q, *kv)]
    return Case(arrays[0], arrays[1], arrays[2], lengths)


def buffers(x: mx.array, capacities: Sequence[int]) -> list[mx.array]:
    """One a row."""
    found = []
    for row, capacity in zip(range(x.shape[0]), itertools.cycle(capacities), strict=False):
        more = mx.full((1, x.shape[1], max(capacity - x.shape[2], 0), x.shape[3]), mx.nan, x.dtype)
        found.append(mx.concatenate([x[row : row + 1], more], axis=2)[:, :, :capacity])
    return found


def on_host(
    q: mx.array,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
    lengths: mx.array,
    *,
    scale: float,
    gate: mx.array | None = None,
) -> mx.array:
    with pytest.MonkeyPatch.context() as patch:
        kernels_on_host(patch)
        return few_query_attention(q, keys, values, lengths, scale=scale, gate=gate)


def worst(found: mx.array, exact: np.ndarray) -> float:
    """Largest difference over the largest value; NaN if anything is."""
    return float(np.abs(np.array(found.astype(mx.float32), np.float64) - exact).max() / np.abs(exact).max())


def same_bits(a: mx.array, b: mx.array) -> bool:
    return bool(mx.array_equal(a.view(mx.uint8), b.view(mx.uint8)))


BORDERS = [1, SPLIT - 1, SPLIT, SPLIT + 1, SPLIT + 30]

CASES = {
    "one query": case([0, *BORDERS], 64),
    "grouped, fp16": case(BORDERS, 64, tokens=4, kv_heads=2, group=3, dtype=mx.float16),
    "more queries than a threadgroup holds": case([SPLIT + 5], 64, tokens=11, group=3),
    "size 128, bf16": case([5, SPLIT + 2], 128, tokens=4, group=6, dtype=mx.bfloat16),
    "size 256, bf16": case([17, SPLIT + 1], 256, tokens=2, kv_heads=2, group=3, dtype=mx.bfloat16),
    "several splits": case([3 * SPLIT, 2 * SPLIT + 5], 64, capacity=3 * SPLIT + 100),
}


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_it_is_attention(name: str) -> None:
    given = CASES[name]
    found = given.run()
    assert found.dtype == given.q.dtype
    assert worst(found, given.exact()) <= ROUNDING[found.dtype]


@pytest.mark.parametrize("name", CASES)
def test_so_is_the_reference(name: str) -> None:
    given = CASES[name]
    found = given.reference()
    assert found.dtype == given.q.dtype
    assert worst(found, given.exact()) <= ROUNDING[found.dtype]


@needs_compiler
@pytest.mark.parametrize(
    "given",
    [
        case([2, SPLIT, SPLIT + 2], 64, tokens=4, group=3),
        case([SPLIT + 2], 128, tokens=4, group=6, dtype=mx.bfloat16),
        case([SPLIT + 5], 64, tokens=11, group=3),
    ],
    ids=["borders of a split", "more queries a thread", "two blocks of queries"],
)
def test_bits_do_not_depend_on_the_other_tokens(given: Case) -> None:
    together = given.run()
    tokens = given.q.shape[2]
    for token in range(tokens) if tokens <= 4 else (0, 5, 6, 10):
        assert same_bits(together[:, :, token : token + 1], given.run(token=token)), f"token {token}"


NINE = [SPLIT + 3, 9, SPLIT, 1, SPLIT + 30, 0, 2, SPLIT + 1, SPLIT - 1]


@needs_compiler
@pytest.mark.parametrize("most", [1, 4, 8, 9])
@pytest.mark.parametrize("bodies", [(SIMD,), (MMA, SIMD)], ids=["simd", "tensor cores"])
def test_bits_do_not_depend_on_the_other_rows(
    bodies: tuple[Any, ...], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on how many there are and what they are, nor on their buffers' capacities, nor on how many rows a launch
    takes: nine are one launch, two or three, or one each."""
    monkeypatch.setattr(subject, "_BODIES", {"host": bodies})
    given = case(NINE, 64, tokens=2, kv_heads=2, group=3, dtype=mx.bfloat16)
    gate = mx.random.normal((9, 2, 2 * 6 * 64), mx.bfloat16, key=mx.random.key(0))
    alone = [given.run(slice(row, row + 1), gate=gate[row : row + 1]) for row in range(9)]
    monkeypatch.setattr(portable, "most_rows", lambda: most)
    capacities = SPLIT + 30, 4 * SPLIT + 1, SPLIT + 31, 2 * SPLIT
    together = given.run(capacities=capacities, gate=gate)
    assert together.shape == (9, 2, 6 * 64)
    for row in range(9):
        assert same_bits(together[row : row + 1], alone[row]), f"row {row}"
    some = slice(2, 5)
    assert same_bits(given.run(some, capacities=capacities, gate=gate[some]), mx.concatenate(alone[some]))


@needs_compiler
def test_bits_do_not_depend_on_the_capacity() -> None:
    given = case([40, SPLIT + 7], 64, tokens=4, group=3)
    bits = given.run()
    for capacities in ([SPLIT + 7], [2 * SPLIT], [3 * SPLIT + 1], [40, 3 * SPLIT], [3 * SPLIT, SPLIT + 7]):
        assert same_bits(bits, given.run(capacities=capacities)), f"capacities {capacities}"


def test_launches_are_few_and_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows are in one, once, and in order."""
    sizes = {1: [1], 8: [8], 9: [4, 5], 17: [5, 6, 6], 24: [8, 8, 8]}
    for rows, expected in sizes.items():
        chunks = portable.row_chunks(rows)
        assert [row for chunk in chunks for row in range(rows)[chunk]] == list(range(rows))
        assert [len(range(rows)[chunk]) for chunk in chunks] == expected
    monkeypatch.setattr(portable, "backend", lambda: "metal")
    assert [len(range(8)[chunk]) for chunk in portable.row_chunks(8)] == [4, 4]


def test_calls_are_remembered_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capacities of eight rows come in more combinations than a server could keep."""
    monkeypatch.setattr(portable, "_REMEMBERED", 3)
    calls: dict[tuple[object, ...], int] = {}
    for number in range(8):
        assert portable.remember(calls, (number,), number) == number
        assert calls[number,] == number
        assert len(calls) <= 3


def test_partial_results_of_long_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long row makes those of all rows of a launch as large as its own."""
    made = record_texts(monkeypatch)
    monkeypatch.setattr(subject, "_BODIES", {"cuda": (subject._MMA,)})

    def held(*capacities: int) -> list[int]:
        made.clear()
        q = mx.zeros((len(capacities), 24, 4, 256), mx.bfloat16)
        keys = [mx.zeros((1, 4, capacity, 256), mx.bfloat16) for capacity in capacities]
        few_query_attention(q, keys, keys, mx.full((len(keys),), 4, mx.int32), scale=1.0)
        return [4 * math.prod(launch.shapes[2]) for kernel, launch, _ in made if "partial" in kernel.name]

    assert len(held(*[1024] * 8)) == 1
    for long in ([65_536] * 8, [65_536, *[300] * 7]):
        found = held(*long)
        assert len(found) == 3
        assert max(found) <= 64 * 2**20


def test_lengths_are_one_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fewer or of another kind a kernel would read what is not there. Checked also after a good call."""
    record_texts(monkeypatch)
    monkeypatch.setattr(subject, "_BODIES", {"cuda": (subject._MMA,)})
    q, keys = mx.zeros((2, 4, 1, 64), mx.bfloat16), [mx.zeros((1, 2, 256, 64), mx.bfloat16)] * 2
    few_query_attention(q, keys, keys, mx.array([3, 4], mx.int32), scale=1.0)
    for bad in (mx.array([3], mx.int32), mx.array([3, 4], mx.uint32)):
        with pytest.raises(ValueError, match="lengths"):
            few_query_attention(q, keys, keys, bad, scale=1.0)


@pytest.mark.parametrize("kernel", [subject._SIMD.kernel, attention_inputs._KERNEL], ids=lambda kernel: kernel.name)
def test_metal_has_buffers_for_the_most_rows(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """31, of which MLX takes one for every array and one for every shape that the text names."""
    monkeypatch.setattr(portable, "backend", lambda: "metal")
    of_rows = kernel.for_rows(portable.most_rows())
    _, body = of_rows.text("metal", {"T": mx.bfloat16, "D": 256, "SIZE": 256})
    shapes = [name for name in of_rows.inputs if re.search(rf"\b{name}_shape\b", body)]
    assert len(of_rows.inputs) == len(kernel.inputs) + 2 * 3
    assert {"keys_0", "keys_3"} <= set(shapes)
    assert len(of_rows.inputs) + len(shapes) + len(of_rows.outputs) <= 31


@needs_compiler
def test_large_scores_do_not_overflow() -> None:
    """A softmax that does not subtract the most, or subtracts that of another tile, gives infinities or NaN here."""
    given = case([SPLIT + 20, 1], 64)
    given.q[0] *= 300
    given.q[1] = -300 * given.keys[1, :, :1]  # a query that sees one key, and dislikes it
    assert worst(given.run(), given.exact()) <= 2.0**-12  # scores of 1e3 keep 14 bits behind the point


# Splits of 64, 64 and 128 keys, which are two tiles; more queries than a fragment has, and than a threadgroup holds.
# Size 256 is left to the self-check below.
FINE = {
    "one query": case([0, *BORDERS, 2 * SPLIT, 4 * SPLIT + 1], 64, dtype=mx.bfloat16, capacity=5 * SPLIT),
    "size 128, fp16": case([5, 4 * SPLIT - 3], 128, tokens=4, group=6, dtype=mx.float16, capacity=4 * SPLIT + 9),
    "two blocks of queries": case([SPLIT + 5], 64, tokens=11, group=3, dtype=mx.bfloat16),
}


@needs_compiler
@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("name", FINE)
def test_so_it_is_on_tensor_cores(name: str) -> None:
    given = FINE[name]
    found = given.run()
    assert found.dtype == given.q.dtype
    assert worst(found, given.exact()) <= ROUNDING[found.dtype]


@needs_compiler
@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("name", ["size 128, fp16", "two blocks of queries"])
def test_bits_hang_on_nothing_else_on_tensor_cores(name: str) -> None:
    """Neither on other tokens, whose number decides on rounds, blocks and the ring, nor on rows or capacity."""
    given = FINE[name]
    bits, tokens = given.run(), given.q.shape[2]
    for token in (0, tokens - 2, tokens - 1):
        assert same_bits(bits[:, :, token : token + 1], given.run(token=token)), f"token {token}"
    last = len(given.lengths) - 1
    assert same_bits(bits[last:], given.run(slice(last, None), capacities=[6 * SPLIT + 3]))


@needs_compiler
@pytest.mark.usefixtures("tensor_cores")
def test_large_scores_do_not_overflow_on_tensor_cores() -> None:
    given = case([SPLIT + 20, 1], 64, dtype=mx.bfloat16)
    given.q[0] *= 100
    given.q[1] = -300 * given.keys[1, :, :1]
    assert worst(given.run(), given.exact()) <= ROUNDING[mx.bfloat16]


@needs_compiler
def test_a_gate_is_the_only_difference() -> None:
    """To attention that is rounded first; what lies behind the gates in their array does not show."""
    dtype = mx.float16
    given = CASES["grouped, fp16"]
    rows, heads, tokens, size = given.q.shape
    gate = mx.array(np.random.default_rng(0).normal(size=(rows, tokens, 2 * heads * size + 5)).astype(np.float32))
    gate[1, 0, size : 2 * size] = -200.0
    gate[:, :, 2 * heads * size :] = mx.nan
    found = given.run(gate=gate.astype(dtype))
    assert (found.shape, found.dtype) == ((rows, tokens, heads * size), dtype)
    opening = np.array(gate.astype(dtype).astype(mx.float32), np.float64)[:, :, : 2 * heads * size]
    opening = opening.reshape(rows, tokens, heads, 2, size)[:, :, :, 1]
    plain = np.array(given.run().swapaxes(1, 2).astype(mx.float32), np.float64)
    expected = (plain / (1 + np.exp(-opening))).reshape(found.shape)
    assert worst(found, expected) <= ROUNDING[dtype] / 2
    rounded = mx.array(expected.astype(np.float32)).astype(dtype)
    assert np.mean(np.array(found != rounded)) < 0.01  # rounded once more, or once less, is every tenth or so
    assert np.abs(np.array(found.astype(mx.float32))[1, 0, :size]).max() == 0
    lengths, whole = mx.array(given.lengths, mx.int32), given.keys.shape[2:3]
    kv = buffers(given.keys, whole), buffers(given.values, whole)
    reference = few_query_attention_reference(given.q, *kv, lengths, scale=given.scale, gate=gate.astype(dtype))
    assert worst(reference, expected) <= ROUNDING[dtype]


@needs_compiler
@pytest.mark.usefixtures("tensor_cores")
def test_the_self_check_passes_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both texts, in the very cases of the check that are short."""
    monkeypatch.setattr(subject, "few_query_attention", on_host)
    assert subject._case_error(6, 4, 256, 256, seed=1) <= CHECK.most
    assert subject._case_error(3, 2, 256, 256, seed=2) <= CHECK.most


def test_the_self_check_tells_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key too few; a split too few behind the border; a query that sees what follows it; a row that another joins."""

    def one_less(q: mx.array, keys: Any, values: Any, lengths: mx.array, **more: Any) -> mx.array:
        return few_query_attention_reference(q, keys, values, lengths - 1, **more)

    monkeypatch.setattr(subject, "few_query_attention", one_less)
    assert subject._case_error(6, 4, 128, 256, seed=1) > 2 * CHECK.most
    assert subject._case_error(3, 2, 256, 256, seed=2) > 2 * CHECK.most

    def without(q: mx.array, keys: Any, values: Any, lengths: mx.array, **more: Any) -> mx.array:
        less = ([x[:, :, 64:] for x in each] for each in (keys, values))
        short = few_query_attention_reference(q, *less, lengths - 64, **more)
        whole = few_query_attention_reference(q, keys, values, lengths, **more)
        return mx.where(lengths.reshape(-1, *[1] * (whole.ndim - 1)) > 64, short, whole)

    monkeypatch.setattr(subject, "few_query_attention", without)
    assert subject._case_error(6, 4, 256, 1024, seed=3) > 2 * CHECK.most

    def other_bits(q: mx.array, *rest: Any, **more: Any) -> mx.array:
        return few_query_attention_reference(q, *rest, **more) * (1 + 2.0**-7 * (q.shape[2] > 1))

    def bits_of_two_rows(q: mx.array, *rest: Any, **more: Any) -> mx.array:
        return few_query_attention_reference(q, *rest, **more) * (1 + 2.0**-7 * (q.shape[0] > 1))

    def ill(q: mx.array, *rest: Any, **more: Any) -> mx.array:
        found = few_query_attention_reference(q, *rest, **more)
        return found * mx.nan if q.shape[1:3] == (6, 2) else found

    monkeypatch.setattr(subject, "few_query_attention", ill)  # in the case of three queries to a key, which is not last
    assert not CHECK.error() <= CHECK.most

    for differing in (other_bits, bits_of_two_rows):
        monkeypatch.setattr(subject, "few_query_attention", differing)
        assert subject._case_error(3, 2, 256, 256, seed=2) == float("inf")


def test_what_is_left_to_join_is_little() -> None:
    """At 27 B's shape, 4 tokens and 64k keys; and 1,000 keys are spread over 64 threadgroups."""
    q, keys = shaped(1, 24, 4, 256), shaped(1, 4, 65536, 256)
    body = subject._MMA
    launch = body.launch(body, q, [keys])
    left = int(np.prod(launch.shapes[2])) * 4
    assert left < 0.08 * 2 * keys.nbytes
    short = body.launch(body, q, [shaped(1, 4, 1000, 256)]).threadgroups
    assert int(np.prod(short)) >= 64
    for group, tokens, size in itertools.product((1, 4, 6, 8), (1, 2, 3, 4, 8, 16), (64, 128, 256)):
        launch = body.launch(body, shaped(1, 4 * group, tokens, size), [shaped(1, 4, 300, size)])
        ring = launch.template["RING"]
        assert isinstance(ring, int)
        assert ring >= 3
        assert launch.shared <= 113 * 1024


def test_a_smaller_gpu_has_fewer_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 99 KB, as chips of 8.6, 8.9 and 12.0 have."""
    monkeypatch.setattr(subject, "most_shared", lambda: 99 * 1024)
    body = subject._MMA
    for group, tokens, size in itertools.product((1, 4, 6, 8), (1, 4, 16), (64, 128, 256)):
        launch = body.launch(body, shaped(1, 4 * group, tokens, size), [shaped(1, 4, 300, size)])
        assert launch.shared <= 99 * 1024
        assert int(str(launch.template["RING"])) >= 2


def shaped(*shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return mx.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("q", "keys", "taken"),
    [
        (shaped(2, 6, 4, 128), shaped(2, 2, 9, 128), True),
        (shaped(1, 8, 16, 64), shaped(1, 1, 9, 64), True),
        (shaped(1, 9, 16, 64), shaped(1, 1, 9, 64), False),
        (shaped(2, 6, 17, 128), shaped(2, 6, 9, 128), False),
        (shaped(2, 6, 4, 96), shaped(2, 2, 9, 96), False),
        (shaped(2, 6, 4, 128), shaped(2, 4, 9, 128), False),
        (shaped(2, 6, 4, 128), shaped(1, 2, 9, 128), False),
        (shaped(2, 6, 4, 128), shaped(3, 2, 9, 128), False),
        (shaped(1, 6, 4, 128), shaped(1, 2, 128), False),
        (shaped(2, 6, 4, 128), shaped(2, 2, 9, 64), False),
        (shaped(2, 6, 4, 128), shaped(2, 2, 9, 128, dtype=mx.float16), False),
        (shaped(2, 6, 4, 128, dtype=mx.int8), shaped(2, 2, 9, 128, dtype=mx.int8), False),
    ],
)
def test_what_it_takes(q: mx.array, keys: mx.array, taken: bool) -> None:
    rows = [keys[row : row + 1] for row in range(keys.shape[0])]
    assert fits(q, rows) is taken
    if not taken:
        with pytest.raises(ValueError, match="does not take"):
            few_query_attention(q, rows, rows, mx.zeros(2, mx.int32), scale=1.0)


@pytest.mark.parametrize("wrong", [shaped(1, 3, 9, 128), shaped(2, 2, 9, 128), shaped(1, 2, 9, 128, dtype=mx.float16)])
def test_every_row_s_arrays_are_looked_at(wrong: mx.array) -> None:
    """Capacities alone may differ between rows, and between the keys and the values of one they may not."""
    q, good, at = shaped(2, 6, 4, 128), shaped(1, 2, 9, 128), mx.zeros(2, mx.int32)
    assert fits(q, [good, shaped(1, 2, 99, 128)])
    assert not fits(q, [good, wrong])
    for keys, values in (([good, wrong],) * 2, ([good] * 2, [good, wrong]), ([good] * 2, [good, shaped(1, 2, 8, 128)])):
        with pytest.raises(ValueError, match="does not take"):
            few_query_attention(q, keys, values, at, scale=1.0)
    with pytest.raises(ValueError, match="does not take"):
        few_query_attention(q, [good] * 2, [good], at, scale=1.0)


@pytest.mark.parametrize(
    "gate",
    [
        shaped(1, 4, 6 * 2 * 128),
        shaped(2, 3, 6 * 2 * 128),
        shaped(2, 4, 6 * 2 * 128 - 1),
        shaped(2, 4, 6 * 2 * 128, dtype=mx.float32),
        shaped(2, 4, 6 * 2 * 128, 1),
    ],
    ids=["rows", "tokens", "width", "dtype", "dimensions"],
)
def test_a_gate_that_it_does_not_take(gate: mx.array) -> None:
    keys = [shaped(1, 2, 9, 128)] * 2
    with pytest.raises(ValueError, match="and gate"):
        few_query_attention(shaped(2, 6, 4, 128), keys, keys, mx.zeros(2, mx.int32), scale=1.0, gate=gate)
