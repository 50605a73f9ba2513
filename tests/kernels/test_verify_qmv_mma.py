"""Guards the text for tensor cores behind `verify_qmv`, on emulated ones: its values, and that neither the number of
rows nor the pace at which it goes through a matrix changes a bit of a row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.kernels import verify_qmv as subject
from selfdraft.kernels import verify_qmv_plan as plan
from selfdraft.kernels.self_check import relative_error
from tests.kernels.test_verify_qmv import Case, assert_forms, assert_rounded, case, other, same
from tests.support.host_kernels import needs_compiler, run_on_host

pytestmark = needs_compiler

EPS = 1e-6


def run(
    made: Case,
    rows: int | None = None,
    *,
    form: str = "plain",
    residual: mx.array | None = None,
    squares: mx.array | None = None,
    norm_weight: mx.array | None = None,
    changed: dict[str, int] | None = None,
) -> list[mx.array]:
    """`changed`: of the pace. The device has so few multiprocessors that threadgroups have many outputs."""
    x = made.x[:rows]
    kind = form, None if squares is None else EPS, norm_weight is not None
    matrix = plan.Matrix(made.weight.shape[0], x.shape[1], made.bits, made.group_size, x.dtype, *kind)
    assert plan.MMA.serves(matrix)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "_MULTIPROCESSORS", 1)
        paces = plan._paces
        patch.setattr(plan, "_paces", lambda *of: [replace(pace, **(changed or {})) for pace in paces(*of)])
        launch = plan.MMA.launch(matrix, x.shape[0])
    others = [
        each if each is norm_weight else each[None, :rows]
        for each in (residual, squares, norm_weight)
        if each is not None
    ]
    found = run_on_host(plan.MMA.kernel(matrix), [x[None], made.weight, made.scales, made.biases, *others], launch)
    return [each[0] for each in found]


def product(made: Case, rows: int | None = None, **how: Any) -> mx.array:
    (y,) = run(made, rows, **how)
    return y


# Outputs that fill no tile, one unit and many, every group, both widths, rows beyond a round and beyond a threadgroup.
SHAPES = [
    (1, 24, 512, 4, 64, mx.bfloat16),
    (3, 17, 1024, 4, 32, mx.float16),
    (5, 40, 768, 8, 64, mx.bfloat16),
    (9, 16, 256, 4, 128, mx.bfloat16),
    (12, 33, 384, 8, 32, mx.float16),
    (35, 16, 512, 4, 64, mx.float16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_product(shape: tuple[int, int, int, int, int, mx.Dtype]) -> None:
    made = case(*shape)
    assert_rounded(product(made), made)


@pytest.mark.parametrize("outputs", [36, 64])
def test_forms_equal_operations_on_the_product(outputs: int) -> None:
    made = case(3, outputs, 512, 4, 64, mx.bfloat16)
    added = product(made, form="added", residual=other(made))
    assert_forms(made, product(made), added, product(made, form="gated"))


@pytest.mark.parametrize(("bits", "group_size", "dtype"), [(4, 64, mx.bfloat16), (8, 32, mx.float16)])
def test_a_rows_bits_hang_on_nothing_else(bits: int, group_size: int, dtype: mx.Dtype) -> None:
    made = case(34, 41, 1536, bits, group_size, dtype, seed=3)
    alone = mx.concatenate([product(replace(made, x=made.x[row : row + 1])) for row in range(3)])
    for rows in (3, 12, 34):
        assert same(product(made, rows)[:3], alone), rows
    for changed in ({"tiles": 1}, {"stages": 3}, {"parts": 2}, {"teams": 3, "tiles": 1}, {"resident": 3}):
        assert same(product(made, 3, changed=changed), alone), changed


def squares_of(x: mx.array, pieces: int) -> mx.array:
    """[rows, pieces], fp32."""
    return mx.square(x.astype(mx.float32)).reshape(x.shape[0], pieces, -1).sum(axis=-1)


@pytest.mark.parametrize("form", ["plain", "gated", "added"])
def test_a_scaled_input_gives_the_product_of_its_norm(form: str) -> None:
    """Against the norm in fp32. Rows are of other sizes, so that one cannot stand in for another."""
    made = case(12, 40, 512, 4, 64, mx.bfloat16)
    v = made.x * mx.arange(1, 13)[:, None].astype(mx.bfloat16)
    residual = other(made) if form == "added" else None
    found = product(replace(made, x=v), form=form, residual=residual, squares=squares_of(v, 128))
    normed = v.astype(mx.float32) * mx.rsqrt(mx.square(v.astype(mx.float32)).mean(axis=-1, keepdims=True) + EPS)
    exact, _ = replace(made, x=normed).exact()
    whole = mx.array(exact.astype(np.float32)).astype(mx.bfloat16)
    if form == "gated":
        gate, up = mx.split(whole, 2, axis=-1)
        whole = gate * mx.sigmoid(gate) * up
    if residual is not None:
        whole = whole + residual
    assert relative_error(found, whole) <= 2.0**-7


@pytest.mark.parametrize("outputs", [40, 150, 24])
def test_a_sum_comes_out_scaled(outputs: int) -> None:
    made = case(10, outputs, 512, 4, 64, mx.bfloat16)
    weight = mx.random.normal((outputs,), key=mx.random.key(5)).astype(mx.bfloat16)
    y, scaled, squares = run(made, form="added", residual=other(made), norm_weight=weight)
    assert same(y, product(made, form="added", residual=other(made)))
    assert same(scaled, y * weight)
    expected = mx.square(y.astype(mx.float32)).sum(axis=-1)
    assert mx.allclose(squares.sum(axis=-1), expected, rtol=1e-5, atol=0).item()


def test_the_bits_of_a_norm_hang_on_nothing_else() -> None:
    """Neither on other rows nor on how outputs are dealt out."""
    made = case(34, 150, 512, 4, 64, mx.bfloat16, seed=4)
    weight = mx.random.normal((150,), key=mx.random.key(5)).astype(mx.bfloat16)
    how: Any = {"form": "added", "norm_weight": weight}
    residual, squares = other(made), squares_of(made.x, 128)

    def found(rows: slice, **changed: int) -> list[mx.array]:
        own = replace(made, x=made.x[rows])
        return run(own, residual=residual[rows], squares=squares[rows], changed=changed, **how)

    alone = [mx.concatenate(parts) for parts in zip(*(found(slice(row, row + 1)) for row in range(3)), strict=True)]
    for rows in (3, 12, 34):
        for one, together in zip(alone, found(slice(0, rows)), strict=True):
            assert same(together[:3], one), rows
    for changed in ({"tiles": 1}, {"teams": 3, "tiles": 1}, {"resident": 3}, {"tiles": 2, "teams": 1}):
        for one, together in zip(alone, found(slice(0, 3), **changed), strict=True):
            assert same(together, one), changed


def test_all_numbers_of_rows_have_a_pace_that_fits() -> None:
    for outputs, inputs in ((17408, 5120), (5120, 17408), (1024, 5120), (248320, 5120), (16, 256), (64, 128)):
        for bits, group_size in ((4, 64), (8, 64), (4, 32), (8, 128), (4, 128)):
            matrix = plan.Matrix(outputs, inputs, bits, group_size, mx.bfloat16)
            if not plan.MMA.serves(matrix):
                assert inputs % 256, (inputs, group_size)
                continue
            order = set()
            for rows in range(1, subject.MOST_ROWS + 1):
                launch = plan.MMA.launch(matrix, rows)
                assert launch.shared <= 227 * 1024
                assert launch.threads <= 512
                assert launch.template["PIECE"] in (2, 4, 8)
                order.add((launch.template["WARPS"], launch.template["UNIT"]))
            assert len(order) == 1  # what sums hang on


def test_zero_gives_zero_and_a_row_does_not_see_the_others() -> None:
    made = case(4, 16, 512, 4, 64, mx.bfloat16)
    x = mx.concatenate([mx.zeros_like(made.x[:1]), made.x[1:3], mx.full((1, 512), float("nan"), dtype=mx.bfloat16)])
    found = product(replace(made, x=x))
    assert same(found[1:3], product(made)[1:3])
    assert mx.isnan(found[3]).all().item()
    assert mx.abs(found[0]).max().item() == 0
