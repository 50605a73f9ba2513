"""Faults of products of few rows, and of the layers that use them."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

QMV = "tests/kernels/test_verify_qmv_mma.py"
COMPILER = "tests/kernels/test_cuda_compiler.py"

FAULTS = [
    Fault(
        "a copy to shared memory is not waited for",
        "kernels/source/verify_qmv_mma.h",
        "await_copies<STAGES - 1>();",
        "await_copies<STAGES>();",
        QMV,
    ),
    Fault(
        "a simdgroup does not wait for its team's part of x",
        "kernels/source/verify_qmv_mma.h",
        "      if (TEAMS > 1) team_wait<TEAMS>(share);  // for the others' part of x\n",
        "",
        QMV,
    ),
    Fault(
        "threadgroups begin as if all were full",
        "kernels/source/verify_qmv_mma.h",
        "first = group.x * most,",
        "first = group.x * kOwn,",
        QMV,
    ),
    Fault(
        "a group of weights is looked for where it was not put",
        "kernels/source/verify_qmv_mma.h",
        "(4 * place(g, u) + t)",
        "(4 * u + t)",
        QMV,
    ),
    Fault(
        "nibbles are taken for 15 and themselves",
        "kernels/source/verify_qmv_mma.h",
        "BITS == 4 ? -16.f : -272.f",
        "BITS == 4 ? -15.f : -272.f",
        QMV,
    ),
    Fault(
        "the order of sums hangs on the number of rows",
        "kernels/verify_qmv_plan.py",
        "    warps = min(warps, matrix.inputs // (unit * matrix.group_size))\n",
        "    warps = min(warps, matrix.inputs // (unit * matrix.group_size), 2 + rows)\n",
        QMV,
    ),
    Fault(
        "of two groups taken together, each has the other's scales",
        "kernels/source/verify_qmv_mma.h",
        "half_float<T>(pairs[tile + i][half][0], step)",
        "half_float<T>(pairs[tile + i][half][0], 1 - step)",
        QMV,
    ),
    Fault(
        "of a team's outputs, a tile is looked for where another's is",
        "kernels/source/verify_qmv_mma.h",
        "kLine + team * kRows + 16 * i + 8 * (j / 2) + g]",
        "kLine + team * kRows + 8 * i + 8 * (j / 2) + g]",
        QMV,
    ),
    Fault(
        "a threadgroup wants more registers than there are",
        "kernels/verify_qmv_plan.py",
        "bounded=size > 16 and shape == (3, 3)",
        "bounded=False",
        COMPILER,
    ),
    Fault(
        "what goes with a product is checked at the first call alone",
        "kernels/verify_qmv.py",
        "key = (*((each.shape, each.dtype) for each in inputs), how,",
        "key = (x.shape, x.dtype, *(each.shape for each in matrix), how,",
        "tests/kernels/test_verify_qmv.py",
    ),
    Fault(
        "a product divides by the root mean square of another row",
        "kernels/source/verify_qmv_mma.h",
        "sum * shrink[8 * m + column]",
        "sum * shrink[column]",
        QMV,
    ),
    Fault(
        "a root mean square misses squares",
        "kernels/source/verify_qmv_mma.h",
        "for (int i = lane; i < parts &&",
        "for (int i = lane; i < parts - 1 &&",
        QMV,
    ),
    Fault(
        "pieces of squares hang on how outputs are dealt out",
        "kernels/source/verify_qmv_mma.h",
        "((even > 8 ? even : 8) + ALIKE - 1) / ALIKE * ALIKE",
        "(even > 8 ? even : 8)",
        QMV,
    ),
    Fault(
        "the squares of a sum are those of the product",
        "kernels/source/verify_qmv_mma.h",
        "put_out[each] = float(found)",
        "put_out[each] = sum",
        QMV,
    ),
    Fault(
        "a norm is part of a product in fp16, whose range it leaves",
        "kernels/verify_qmv.py",
        "matrix.dtype == mx.bfloat16 and body_of(where, matrix).norms",
        "body_of(where, matrix).norms",
        "tests/kernels/test_verify_qmv.py",
    ),
    Fault(
        "a residual is left out",
        "kernels/source/verify_qmv_mma.h",
        "FORM == ADDED ? T(float(T(sum)) + float(residual[at]))",
        "FORM == ADDED ? T(sum)",
        QMV,
    ),
    Fault(
        "a gate takes the next row for what it gates",
        "kernels/source/verify_qmv_mma.h",
        "gated<T>(sum, total(row + 8, column))",
        "gated<T>(sum, total(row, column))",
        QMV,
    ),
    Fault(
        "projections of two quantisations are put together",
        "models/few_rows.py",
        "all(getattr(layer, name) == getattr(first, name) for name in form)",
        "True",
        "tests/models/test_few_rows.py",
    ),
    Fault(
        "a long prompt goes through MLX's quantised product on CUDA",
        "models/few_rows.py",
        'x.size // x.shape[-1] >= _DENSE and backend() == "cuda"',
        "False",
        "tests/models/test_few_rows.py",
    ),
]
