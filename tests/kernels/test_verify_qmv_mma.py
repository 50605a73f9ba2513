"""Guards the text for tensor cores behind `verify_qmv`, on emulated ones: its values, and that neither the number of
rows nor the pace at which it goes through a matrix changes a bit of a row."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from selfdraft.kernels import verify_qmv as subject
from tests.kernels.test_verify_qmv import Case, assert_forms, assert_rounded, case, other, same
from tests.support.host_kernels import needs_compiler, run_on_host

pytestmark = needs_compiler


def run(
    made: Case,
    rows: int | None = None,
    *,
    form: str = "plain",
    residual: mx.array | None = None,
    changed: dict[str, int] | None = None,
) -> mx.array:
    """`changed`: of the pace. The device has so few multiprocessors that threadgroups have many outputs."""
    x = made.x[:rows]
    matrix = subject._Matrix(made.weight.shape[0], x.shape[1], made.bits, made.group_size, x.dtype, form)
    assert subject._mma_serves(matrix)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject, "_MULTIPROCESSORS", 1)
        paces = subject._paces
        patch.setattr(subject, "_paces", lambda *of: [replace(pace, **(changed or {})) for pace in paces(*of)])
        launch = subject._mma_launch(matrix, x.shape[0])
    given = [x[None], made.weight, made.scales, made.biases, x if residual is None else residual]
    (y,) = run_on_host(subject._MMA.kernel, given, launch)
    return y[0]


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
    assert_rounded(run(made), made)


@pytest.mark.parametrize("outputs", [36, 64])
def test_forms_equal_operations_on_the_product(outputs: int) -> None:
    made = case(3, outputs, 512, 4, 64, mx.bfloat16)
    added = run(made, form="added", residual=other(made))
    assert_forms(made, run(made), added, run(made, form="gated"))


@pytest.mark.parametrize(("bits", "group_size", "dtype"), [(4, 64, mx.bfloat16), (8, 32, mx.float16)])
def test_a_rows_bits_hang_on_nothing_else(bits: int, group_size: int, dtype: mx.Dtype) -> None:
    made = case(34, 41, 1536, bits, group_size, dtype, seed=3)
    alone = mx.concatenate([run(replace(made, x=made.x[row : row + 1])) for row in range(3)])
    for rows in (3, 12, 34):
        assert same(run(made, rows)[:3], alone), rows
    for changed in ({"tiles": 1}, {"stages": 3}, {"parts": 2}, {"teams": 3, "tiles": 1}, {"resident": 3}):
        assert same(run(made, 3, changed=changed), alone), changed


def test_all_numbers_of_rows_have_a_pace_that_fits() -> None:
    for outputs, inputs in ((17408, 5120), (5120, 17408), (1024, 5120), (248320, 5120), (16, 256), (64, 128)):
        for bits, group_size in ((4, 64), (8, 64), (4, 32), (8, 128), (4, 128)):
            matrix = subject._Matrix(outputs, inputs, bits, group_size, mx.bfloat16)
            if not subject._mma_serves(matrix):
                assert inputs % 256, (inputs, group_size)
                continue
            order = set()
            for rows in range(1, subject.MOST_ROWS + 1):
                launch = subject._mma_launch(matrix, rows)
                assert launch.shared <= 227 * 1024
                assert launch.threads <= 512
                assert launch.template["PIECE"] in (2, 4, 8)
                order.add((launch.template["WARPS"], launch.template["UNIT"]))
            assert len(order) == 1  # what sums hang on


def test_zero_gives_zero_and_a_row_does_not_see_the_others() -> None:
    made = case(4, 16, 512, 4, 64, mx.bfloat16)
    x = mx.concatenate([mx.zeros_like(made.x[:1]), made.x[1:3], mx.full((1, 512), float("nan"), dtype=mx.bfloat16)])
    found = run(replace(made, x=x))
    assert same(found[1:3], run(made)[1:3])
    assert mx.isnan(found[3]).all().item()
    assert mx.abs(found[0]).max().item() == 0
