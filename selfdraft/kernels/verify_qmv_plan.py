"""How a product of few rows with a quantised matrix goes through it: which text, cut up how, for how many rows.

Knows sizes and back ends, and no arrays. What a row's sums hang on is decided by the matrix alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import mlx.core as mx

from .portable import Backend, Kernel, Launch, most_shared

__all__ = ["BODIES", "MMA", "SIMD", "Body", "Matrix", "body_of"]

_TILE = 8  # rows that one read of the weights serves
_SIMDGROUPS = 2  # of a threadgroup
_FORMS = {"plain": 0, "added": 1, "gated": 2}  # as in source/verify_qmv_end.h
_MULTIPROCESSORS = 132  # of an H100 or H200; where there are others, the device's threadgroups share work less evenly


@dataclass(frozen=True)
class Matrix:
    """A quantised matrix [rows, inputs], the dtype of its scales, and what is made of the product (see `_FORMS`).

    Attributes:
        eps: of x, if that is `Scaled`. norms: whether the result comes out as `Scaled`, too.
    """

    rows: int
    inputs: int
    bits: int
    group_size: int
    dtype: mx.Dtype
    form: str = "plain"
    eps: float | None = None
    norms: bool = False

    @property
    def outputs(self) -> int:
        """Columns of the result."""
        return self.rows // 2 if self.form == "gated" else self.rows

    @property
    def piece(self) -> int:
        """Outputs whose squares are summed together, for all numbers of rows: 8 to 16, so that every pace can deal out
        whole ones, and of these what lets threadgroups have what they had without."""
        if not self.norms:
            return 1
        even = -(-self.rows // (_MULTIPROCESSORS * -(-self.rows // (_MULTIPROCESSORS * 48))))
        return min(range(16, 7, -1), key=lambda size: -(-even // size) * size)


@dataclass(frozen=True)
class Body:
    """A text for some matrices. `serves` is not told the number of rows: bodies differ in the order of their sums."""

    name: str
    parts: tuple[str, ...]
    serves: Callable[[Matrix], bool]
    launch: Callable[[Matrix, int], Launch]
    norms: bool = False

    def kernel(self, matrix: Matrix) -> Kernel:
        """With the arrays that it needs."""
        inputs = {
            "residual": matrix.form == "added",
            "squares": matrix.eps is not None,
            "norm_weight": matrix.norms,
        }
        outputs = {"scaled": matrix.norms, "squares_now": matrix.norms}
        return Kernel(
            self.name,
            ("x", "weight", "scales", "biases", *(name for name, has in inputs.items() if has)),
            ("y", *(name for name, has in outputs.items() if has)),
            (*self.parts, "verify_qmv_end"),
            absent=tuple(name for name, has in {**inputs, **outputs}.items() if not has),
        )


def _simd_launch(matrix: Matrix, rows: int) -> Launch:
    tile = _whole(rows)
    # Rows of weights to a simdgroup: they share what is read of x. More cost registers, and so what can be in flight.
    together = 4 if tile <= 4 else 2
    tiles, own = -(-rows // tile), together // 2 if matrix.form == "gated" else together
    return Launch(
        template={
            "T": matrix.dtype,
            "FORM": _FORMS[matrix.form],
            "BITS": matrix.bits,
            "GROUP": matrix.group_size,
            "TILE": tile,
            "R": together,
            "SIMDS": _SIMDGROUPS,
        },
        threadgroups=(tiles * -(-matrix.outputs // (own * _SIMDGROUPS)), 1, 1),
        threads=32 * _SIMDGROUPS,
        shapes=[(1, rows, matrix.outputs)],
        dtypes=[matrix.dtype],
    )


@dataclass(frozen=True)
class _Pace:
    """How the text for tensor cores goes through a matrix; it changes no sum. See source/verify_qmv_mma.h."""

    rows: int
    tiles: int
    teams: int
    parts: int  # of a unit: pieces
    stages: int
    resident: int  # threadgroups that a multiprocessor runs at once
    bounded: bool = False  # see Launch

    def shared(self, matrix: Matrix, warps: int, unit: int) -> int:
        """Bytes of shared memory."""
        piece = unit // self.parts
        words = matrix.group_size * matrix.bits // 32
        outputs = 16 * self.tiles * self.teams
        weights = self.stages * outputs * (piece * words + piece)
        x = self.stages * self.rows * (piece * matrix.group_size // 2 + 4)
        sums = warps * 8 * (outputs + 4) + matrix.norms * 8 * outputs
        inverse_roots = self.rows if matrix.eps is not None else 0
        return 4 * (max(warps * (weights + x), sums) + inverse_roots)

    def own(self, matrix: Matrix) -> int:
        """Outputs of a threadgroup: as many as of every other, at most as many as there is room for, whole pieces."""
        room = 16 * self.tiles * self.teams // (2 if matrix.form == "gated" else 1) // matrix.piece * matrix.piece
        places = _MULTIPROCESSORS * self.resident
        turns = -(-matrix.outputs // (places * room))
        even = max(-(-matrix.outputs // (places * turns)), 8)
        return -(-even // matrix.piece) * matrix.piece


def _unit(matrix: Matrix) -> int:
    """Groups that a simdgroup takes at a time: 256 inputs, or 128; 0 if the matrix is cut otherwise."""
    return next((n // matrix.group_size for n in (256, 128) if matrix.inputs % n == 0 and n > matrix.group_size), 0)


def _mma_serves(matrix: Matrix) -> bool:
    return matrix.dtype != mx.float32 and _unit(matrix) > 0


def _mma_launch(matrix: Matrix, rows: int) -> Launch:
    unit = _unit(matrix)
    # The fewer rows, the more simdgroups share the inputs of one: all of them must keep the device busy.
    warps = 4 if matrix.rows >= 8192 else 8 if matrix.rows >= 2048 else 16
    warps = min(warps, matrix.inputs // (unit * matrix.group_size))
    while _paces(_TILE, unit, warps, matrix.bits)[-1].shared(matrix, warps, unit) > most_shared():
        warps //= 2
    pieces = -(-matrix.outputs // matrix.piece)
    pace = next(
        pace for pace in _paces(rows, unit, warps, matrix.bits) if pace.shared(matrix, warps, unit) <= most_shared()
    )
    return Launch(
        template={
            "T": matrix.dtype,
            "FORM": _FORMS[matrix.form],
            "BITS": matrix.bits,
            "GROUP": matrix.group_size,
            "WARPS": warps,
            "TEAMS": pace.teams,
            "UNIT": unit,
            "PIECE": unit // pace.parts,
            "TILES": pace.tiles,
            "STAGES": pace.stages,
            "ROWS": pace.rows,
            "PLACES": _MULTIPROCESSORS * pace.resident,
            "SCALED": int(matrix.eps is not None),
            "EPS": matrix.eps or 0.0,
            "NORMS": int(matrix.norms),
            "ALIKE": matrix.piece,
        },
        threadgroups=(-(-matrix.outputs // pace.own(matrix)), -(-rows // pace.rows), 1),
        threads=32 * warps * pace.teams,
        shapes=[(1, rows, matrix.outputs), *([(1, rows, matrix.outputs), (1, rows, pieces)] if matrix.norms else [])],
        dtypes=[matrix.dtype, *([matrix.dtype, mx.float32] if matrix.norms else [])],
        shared=pace.shared(matrix, warps, unit),
        bounded=pace.bounded,
    )


def _paces(rows: int, unit: int, warps: int, bits: int) -> list[_Pace]:
    """What to try for so many rows, in order; the last needs least memory.

    Hangs on nothing that is not compiled in anyhow. With up to four warps a multiprocessor is filled by three
    threadgroups, or by one whose teams have one copy of x; with more by one threadgroup. Registers set the size of
    teams: 384 threads may have 168 each, which is enough for 16 rows of x at once, and with 4 bits for 32 if the
    compiler is told; 256 threads may have all there are.
    """
    halves = 2 if unit >= 4 else 1
    size = _whole(rows, 32)
    full = rows <= 16 or bits == 4
    shape = (1, 1) if warps > 8 else (3, 1) if warps > 4 else (3, 3) if full else (5, 2)
    wanted = [_Pace(1, 3, 1, 1, 2, 3)] if rows == 1 and warps <= 4 else []
    if rows <= 8:
        wanted.append(_Pace(size, *shape, 1, 2, 1))
    wanted.append(_Pace(size, *shape, halves, 2, 1, bounded=size > 16 and shape == (3, 3)))
    smaller = [(each, tiles) for each in (16, 8) for tiles in (shape, (2, 1), (1, 1))]
    return [*wanted, *(_Pace(min(each, size), *tiles, halves, 2, 1) for each, tiles in smaller)]


def _whole(rows: int, most: int = _TILE) -> int:
    """A power of two, for every number of rows of its own would be compiled anew; what is too much is not stored."""
    return next(size for size in (1, 2, 4, 8, 16, 32) if size >= min(rows, most))


# Without matrix units; serves every matrix that fits.
SIMD = Body("verify_qmv_simd", (), lambda matrix: True, _simd_launch)
MMA = Body("verify_qmv_mma", ("mma",), _mma_serves, _mma_launch, norms=True)

# In order of preference; the last of each serves every matrix.
BODIES: Mapping[Backend, tuple[Body, ...]] = {"metal": (SIMD,), "cuda": (MMA, SIMD), "host": (SIMD,)}


def body_of(where: Backend, matrix: Matrix) -> Body:
    """The first of a back end that serves the matrix."""
    return next(body for body in BODIES[where] if body.serves(matrix))
