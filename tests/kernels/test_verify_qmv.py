"""Guards the quantised product of a verify pass: its values, and that a row's bits do not depend on how many rows there
are.

The second is what bit parity of verify passes with one-token passes rests on. The text is the one that GPUs run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.kernels import verify_qmv as subject
from selfdraft.kernels import verify_qmv_plan as plan
from selfdraft.kernels.verify_qmv import (
    MOST_ROWS,
    fits,
    norms,
    verify_qmv,
    verify_qmv_norm_reference,
    verify_qmv_reference,
)
from tests.support.cuda_texts import record_texts
from tests.support.host_kernels import needs_compiler, run_on_host


@dataclass
class Case:
    """A quantised matrix and rows to multiply with it."""

    x: mx.array
    weight: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group_size: int

    def run(self, rows: slice = slice(None), *, gated: bool = False, residual: mx.array | None = None) -> mx.array:
        x = self.x[rows]
        form = "gated" if gated else "plain" if residual is None else "added"
        matrix = plan.Matrix(self.weight.shape[0], x.shape[1], self.bits, self.group_size, x.dtype, form)
        (y,) = run_on_host(
            plan.SIMD.kernel(matrix),
            [x[None], self.weight, self.scales, self.biases, *([] if residual is None else [residual])],
            plan.SIMD.launch(matrix, x.shape[0]),
        )
        return y[0]

    def exact(self) -> tuple[np.ndarray, np.ndarray]:
        """The product in fp64, and the sum of its terms' magnitudes: errors of rounding are in proportion to it."""
        per_word = 32 // self.bits
        words = np.array(self.weight)[:, :, None] >> (np.arange(per_word, dtype=np.uint32) * self.bits)
        q = (words & (2**self.bits - 1)).reshape(words.shape[0], -1).astype(np.float64)
        scales, biases = (
            np.repeat(np.array(a.astype(mx.float32), np.float64), self.group_size, 1)
            for a in (self.scales, self.biases)
        )
        x = np.array(self.x.astype(mx.float32), np.float64)
        return x @ (q * scales + biases).T, np.abs(x) @ (q * np.abs(scales) + np.abs(biases)).T


def case(rows: int, outputs: int, inputs: int, bits: int, group_size: int, dtype: mx.Dtype, seed: int = 0) -> Case:
    random = np.random.default_rng(seed)
    matrix = mx.array(random.normal(size=(outputs, inputs)).astype(np.float32)).astype(dtype)
    x = mx.array(random.normal(size=(rows, inputs)).astype(np.float32)).astype(dtype)
    return Case(x, *mx.quantize(matrix, group_size=group_size, bits=bits), bits, group_size)


def assert_rounded(found: mx.array, made: Case) -> None:
    """Right but for the rounding of the result to its dtype, and of some hundred sums in fp32."""
    step = {mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11, mx.float32: 0.0}[found.dtype]
    exact, magnitude = made.exact()
    error = np.abs(np.array(found.astype(mx.float32), np.float64) - exact)
    assert (error <= step * np.abs(exact) + 2e-6 * magnitude + 1e-38).all(), (error / magnitude).max()


def same(one: mx.array, other: mx.array) -> bool:
    return one.dtype == other.dtype and bool(mx.array_equal(one.view(mx.uint8), other.view(mx.uint8)).item())


# Tails of every kind: rows of the weights that do not fill a simdgroup or a threadgroup, K below, at and beyond whole
# turns of 32 lanes (512 or 1,024 weights), one group only.
SHAPES = [
    (3, 13, 1088, 4, 64, mx.bfloat16),
    (5, 9, 704, 8, 32, mx.float16),
    (2, 17, 5120, 4, 128, mx.float32),
    (8, 10, 576, 8, 64, mx.bfloat16),
    (1, 1, 192, 4, 64, mx.float16),
    (1, 8, 128, 8, 128, mx.float32),
    (9, 6, 32, 4, 32, mx.bfloat16),
]


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_product(shape: tuple[int, int, int, int, int, mx.Dtype]) -> None:
    made = case(*shape)
    found = made.run()
    assert found.shape == shape[:2]
    assert found.dtype == shape[-1]
    assert_rounded(found, made)


@needs_compiler
@pytest.mark.parametrize("shape", [(3, 14, 1088, 4, 64, mx.bfloat16), (5, 10, 192, 8, 32, mx.float32)], ids=str)
def test_forms_equal_operations_on_the_product(shape: tuple[int, int, int, int, int, mx.Dtype]) -> None:
    made = case(*shape)
    assert_forms(made, made.run(), made.run(residual=other(made)), made.run(gated=True))


def other(made: Case) -> mx.array:
    shape = (made.x.shape[0], made.weight.shape[0])
    return mx.random.normal(shape, key=mx.random.key(9)).astype(made.x.dtype)


def assert_forms(made: Case, plain: mx.array, added: mx.array, gated: mx.array) -> None:
    """The sum to the bit; the gate but for what two exponentials differ by: a step of each of three roundings."""
    assert same(added, plain + other(made))
    gate, up = mx.split(plain, 2, axis=-1)
    expected = (gate * mx.sigmoid(gate) * up).astype(mx.float32)
    step = {mx.bfloat16: 2.0**-7, mx.float32: 2.0**-21}[plain.dtype]
    assert gated.shape == gate.shape
    assert (mx.abs(gated.astype(mx.float32) - expected) <= 3 * step * mx.abs(expected) + 1e-30).all().item()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference_equals_the_product(shape: tuple[int, int, int, int, int, mx.Dtype]) -> None:
    made = case(*shape)
    given = (made.x, made.weight, made.scales, made.biases)
    found = verify_qmv_reference(*given, group_size=made.group_size, bits=made.bits)
    assert found.dtype == shape[-1]
    assert_rounded(found, made)


@needs_compiler
@pytest.mark.parametrize(
    ("bits", "dtype", "counts"), [(4, mx.bfloat16, (2, 3, 5, 8, 9, 16)), (8, mx.float32, (4, 17))], ids=["4", "8"]
)
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(bits: int, dtype: mx.Dtype, counts: tuple[int, ...]) -> None:
    """In bf16 most faults in the order of sums are rounded away; so rows are many, and 8 bits are looked at in fp32."""
    made = case(max(counts), 40, 1344, bits, 64, dtype)
    alone = [made.run(slice(m, m + 1)) for m in range(max(counts))]
    for count in counts:
        together = made.run(slice(0, count))
        assert same(together, mx.concatenate(alone[:count])), count


@needs_compiler
def test_a_row_does_not_see_the_others() -> None:
    """NaN in one row of a tile, and in a row of the next, stays there."""
    made = case(9, 40, 1344, 4, 64, mx.bfloat16)
    clean = made.run()
    ill = mx.where(mx.array([m in (3, 8) for m in range(9)])[:, None], mx.array(float("nan"), mx.bfloat16), made.x)
    found = Case(ill, made.weight, made.scales, made.biases, 4, 64).run()
    rest = mx.array([0, 1, 2, 4, 5, 6, 7])
    assert same(found[rest], clean[rest])
    assert mx.isnan(found[mx.array([3, 8])]).all().item()


@needs_compiler
def test_extreme_scales_and_every_value() -> None:
    """Every 8-bit value, scales from the least subnormal to the largest fp16: a product that needs fp32 to be held, and
    values of x that choose one weight."""
    rows, inputs, outputs = 8, 256, 8
    q = mx.array(np.stack([np.roll(np.arange(256, dtype=np.uint8), 31 * n) for n in range(outputs)])).view(mx.uint32)
    sizes = np.array([6e-8, 1e-4, 1, 65504], np.float16)
    scales = mx.array(np.stack([np.roll(np.repeat(sizes, 2), n) for n in range(outputs)]))
    x = np.zeros((rows, inputs), np.float32)
    for m in range(rows):
        x[m, 37 * m % 256] = 2.0**-10
    made = Case(mx.array(x).astype(mx.float16), q, scales, -scales, 8, 32)
    found = made.run()
    exact, _ = made.exact()
    assert np.isfinite(exact.astype(np.float16)).all()
    np.testing.assert_array_equal(np.array(found), exact.astype(np.float16))
    # The largest terms overflow fp16, and cancel.
    both = np.zeros((rows, inputs), np.float32)
    both[:, 0], both[:, 255] = 1, -1
    alike = Case(mx.array(both).astype(mx.float16), q, mx.full(scales.shape, 65504, mx.float16), -scales * 0, 8, 32)
    exact, _ = alike.exact()
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(np.array(alike.run()), exact.astype(np.float16))


@needs_compiler
def test_zero_gives_zero() -> None:
    """Also where scales and biases are as large as they may be."""
    made = case(3, 13, 1088, 4, 64, mx.bfloat16)
    large = mx.full(made.scales.shape, 3e38, mx.bfloat16)
    found = Case(mx.zeros_like(made.x), made.weight, large * 1e-3, -large, 4, 64).run()
    assert (found == 0).all().item()


@pytest.mark.parametrize("where", ["metal", "cuda", "host"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize("form", ["plain", "gated"])
def test_one_body_for_all_numbers_of_rows(where: str, bits: int, group_size: int, dtype: mx.Dtype, form: str) -> None:
    """Two bodies differ in the order of their sums. Every matrix that fits has one."""
    matrix = plan.Matrix(40, 1280, bits, group_size, dtype, form)
    body = plan.body_of(where, matrix)  # type: ignore[arg-type]
    for rows in range(1, MOST_ROWS + 1):
        launch = body.launch(matrix, rows)
        assert list(launch.shapes) == [(1, rows, 20 if form == "gated" else 40)]
        assert list(launch.dtypes) == [dtype]
        assert launch.threads % 32 == 0


def test_what_fits() -> None:
    made = case(4, 8, 256, 4, 64, mx.bfloat16)
    x, weight = made.x[None], made.weight
    assert fits(x, weight, 64, 4)
    assert fits(mx.zeros((4, MOST_ROWS // 4, 256), mx.float16), weight, 64, 4)
    assert not fits(mx.zeros((1, MOST_ROWS + 1, 256), mx.float16), weight, 64, 4)
    assert not fits(mx.zeros((1, 0, 256), mx.float16), weight, 64, 4)
    assert not fits(x, weight, 64, 8)  # K would be 128
    assert not fits(x, weight, 64, 3)
    assert not fits(x, weight, 16, 4)
    assert not fits(x[:, :, :96], weight[:, :12], 64, 4)  # a group is cut
    assert not fits(x[0], weight, 64, 4)
    assert not fits(x.astype(mx.int32), weight, 64, 4)
    assert not fits(x, weight.astype(mx.int32), 64, 4)


def test_says_what_it_does_not_take() -> None:
    made = case(4, 8, 256, 4, 64, mx.bfloat16)
    with pytest.raises(ValueError, match="bits=3"):
        verify_qmv(made.x[None], made.weight, made.scales, made.biases, group_size=64, bits=3)
    with pytest.raises(ValueError, match="scales must be"):
        verify_qmv(made.x[None], made.weight, made.scales.astype(mx.float32), made.biases, group_size=64, bits=4)
    given = (made.x[None], made.weight, made.scales, made.biases)
    with pytest.raises(ValueError, match="residual"):
        verify_qmv(*given, group_size=64, bits=4, residual=made.x[None])
    with pytest.raises(ValueError, match="biases must be"):
        verify_qmv(made.x[None], made.weight, made.scales, made.biases[:, :2], group_size=64, bits=4)
    if subject.backend() is None:
        with pytest.raises(RuntimeError, match="GPU"):
            verify_qmv(made.x[None], made.weight, made.scales, made.biases, group_size=64, bits=4)
        assert not subject.CHECK.passed


def test_the_self_check_takes_the_reference_and_finds_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reference in the kernel's place, row by row; then with a lane's share left out of the sums, with rows
    that know how many they are, and with one form or width that is wrong, or NaN."""

    def right(x: mx.array, *quantised: mx.array, residual: mx.array | None = None, **how: Any) -> mx.array:
        rows = [verify_qmv_reference(row[None, None], *quantised, **how) for row in x[0]]
        product = mx.concatenate(rows, axis=1)
        return product if residual is None else product + residual

    def short(x: mx.array, *quantised: mx.array, **how: Any) -> mx.array:
        piece = 128 // how["bits"]
        return right(mx.where(mx.arange(x.shape[2]) < piece, 0, x), *quantised, **how)

    def counting(x: mx.array, *quantised: mx.array, **how: Any) -> mx.array:
        return right(x, *quantised, **how) * (1 + 2.0**-6 * (x.shape[1] > 1))

    def ungated(x: mx.array, *quantised: mx.array, **how: Any) -> mx.array:
        product = right(x, *quantised, **how | {"gated": False})
        return mx.split(product, 2, axis=-1)[1] if how.get("gated") else product

    def unadded(x: mx.array, *quantised: mx.array, **how: Any) -> mx.array:
        return right(x, *quantised, **how | {"residual": None})

    def wrong_at_8_bits(x: mx.array, *quantised: mx.array, **how: Any) -> mx.array:
        return right(x, *quantised, **how) * (1 + 2.0**-5 * bool(how["bits"] == 8))

    def ill(x: mx.array, *quantised: mx.array, **how: Any) -> mx.array:
        product = right(x, *quantised, **how)
        return mx.full(product.shape, float("nan"), dtype=product.dtype) if how["gated"] else product

    check = subject.CHECK
    monkeypatch.setattr(subject, "verify_qmv", right)
    assert check.error() <= check.most / 2
    for wrong in (short, counting, ungated, unadded, wrong_at_8_bits, ill):
        monkeypatch.setattr(subject, "verify_qmv", wrong)
        assert not check.error() <= 2 * check.most


@pytest.mark.parametrize(
    ("where", "dtype", "takes"),
    [
        ("cuda", mx.bfloat16, True),
        ("cuda", mx.float16, False),
        ("metal", mx.bfloat16, False),
        (None, mx.bfloat16, False),
    ],
)
def test_where_norms_may_be_parts_of_products(
    where: str | None, dtype: mx.Dtype, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in fp16: a number times the norm's weight may be out of its range before it is divided."""
    monkeypatch.setattr(subject, "backend", lambda: where)
    made = case(1, 40, 1280, 4, 64, dtype)
    assert norms(made.x[None], made.weight, 64, 4) is takes
    if where and not takes:
        scaled = subject.Scaled(made.x[None], mx.ones((1, 1, 1)), 1e-6)
        with pytest.raises(ValueError, match="takes norms into products"):
            verify_qmv(scaled, made.weight, made.scales, made.biases, group_size=64, bits=4)


def test_the_references_of_a_norm_are_rms_norm() -> None:
    """What a product behind one gets from it: fp32, so nothing is rounded on the way."""
    made = case(3, 64, 64, 8, 32, mx.float32)
    weight = mx.random.normal((64,), key=mx.random.key(1))
    matrix: Any = {"weight": made.weight, "scales": made.scales, "biases": made.biases, "group_size": 32, "bits": 8}
    residual = other(made)[None]
    y, scaled = verify_qmv_norm_reference(made.x[None], **matrix, residual=residual, norm_weight=weight, eps=1e-3)
    assert mx.array_equal(y, verify_qmv_reference(made.x[None], **matrix, residual=residual))
    expected = verify_qmv_reference(mx.fast.rms_norm(y, weight, 1e-3), **matrix, gated=True)
    assert mx.allclose(verify_qmv_reference(scaled, **matrix, gated=True), expected, rtol=1e-4, atol=1e-4)


def test_what_goes_with_a_product_is_checked_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also once a call of these sizes was good: a kernel would read past the end, or take numbers for others."""
    record_texts(monkeypatch)
    made = case(2, 40, 1280, 4, 64, mx.bfloat16)
    matrix: Any = {"weight": made.weight, "scales": made.scales, "biases": made.biases, "group_size": 64, "bits": 4}
    x, residual, squares = made.x[None], other(made)[None], mx.ones((1, 2, 3))
    good: Any = {"residual": residual, "norm_weight": residual[0, 0], "eps": 1e-6}
    verify_qmv(x, **matrix, residual=residual)
    subject.verify_qmv_norm(subject.Scaled(x, squares, 1e-6), **matrix, **good)
    for bad in (residual[:, :1], residual.astype(mx.float32)):
        with pytest.raises(ValueError, match="a residual"):
            verify_qmv(x, **matrix, residual=bad)
    for bad in (residual[0, 0, :8], residual[0, 0].astype(mx.float32)):
        with pytest.raises(ValueError, match="norm_weight"):
            subject.verify_qmv_norm(x, **matrix, **{**good, "norm_weight": bad})
    for bad in (squares[:, :1], squares.astype(mx.bfloat16)):
        with pytest.raises(ValueError, match="squares"):
            verify_qmv(subject.Scaled(x, bad, 1e-6), **matrix)
