"""Products of few rows with a quantised matrix, and what layers make of them; a row's bits hang on no other row.

Knows MLX's affine layout and the bodies that serve it, not where the matrices come from. A verify pass over K+1 tokens
then gives the bits of K+1 passes over one token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from .portable import Backend, Call, Kernel, Launch, backend, most_shared
from .self_check import SelfCheck, relative_error, speed_over

__all__ = [
    "CHECK",
    "MOST_ROWS",
    "Scaled",
    "fits",
    "norms",
    "verify_qmv",
    "verify_qmv_norm",
    "verify_qmv_norm_reference",
    "verify_qmv_reference",
]

MOST_ROWS = 64
_TILE = 8  # rows that one read of the weights serves
_SIMDGROUPS = 2  # of a threadgroup
_BITS = (4, 8)
_GROUPS = (32, 64, 128)
_DTYPES = (mx.bfloat16, mx.float16, mx.float32)
_CALLS: dict[tuple[object, ...], Call] = {}
_FORMS = {"plain": 0, "added": 1, "gated": 2}  # as in source/verify_qmv_end.h
_MULTIPROCESSORS = 132  # of an H100 or H200; where there are others, the device's threadgroups share work less evenly


@dataclass(frozen=True)
class Scaled:
    """rms_norm(v) that is still to be divided: by its root mean square, which a product does with what comes out of it.

    So the product before finds the squares, the one behind divides by them, and no kernel in between waits for both.

    Attributes:
        x: v times the norm's weight, [B, T, K].
        squares: sums of v v over pieces of K, fp32 [B, T, pieces].
        eps: of the norm, added to the mean of the squares.
    """

    x: mx.array
    squares: mx.array
    eps: float


@dataclass(frozen=True)
class _Matrix:
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
class _Body:
    """A text for some matrices. `serves` is not told the number of rows: bodies differ in the order of their sums."""

    name: str
    parts: tuple[str, ...]
    serves: Callable[[_Matrix], bool]
    launch: Callable[[_Matrix, int], Launch]
    norms: bool = False

    def kernel(self, matrix: _Matrix) -> Kernel:
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


def verify_qmv(
    x: mx.array | Scaled,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    group_size: int,
    bits: int,
    residual: mx.array | None = None,
    gated: bool = False,
) -> mx.array:
    """x @ dequantised(weight).T on the GPU, summed in fp32; the weights are read once for every eight rows.

    Args:
        x: [B, T, K], up to 64 rows in all, bf16, fp16 or fp32. It must begin at a multiple of 16 bytes, as the results
            of operations do; a slice of something wider may not. `Scaled` only where `norms` says so.
        weight: uint32 [N, K bits / 32], of `mx.quantize`.
        scales, biases: [N, K / group_size], of x's dtype.
        group_size: 32, 64 or 128. bits: 4 or 8.
        residual: [B, T, N] of x's dtype, to which the product is added.
        gated: the upper half of the weight's rows is a gate, the lower half what it gates: silu(gate) times it comes
            out. Not with `residual`.

    Returns:
        [B, T, N] in x's dtype, N / 2 if `gated`. Rounded as if product, silu and sum were operations of their own.

    Raises:
        ValueError: the arguments do not go together, or `fits` is False.
        RuntimeError: there is no GPU.
    """
    how = group_size, bits, "gated" if gated else "plain" if residual is None else "added"
    return _found(x, (weight, scales, biases), how, residual, None)[0]


def verify_qmv_norm(
    x: mx.array | Scaled,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    group_size: int,
    bits: int,
    residual: mx.array,
    norm_weight: mx.array,
    eps: float,
) -> tuple[mx.array, Scaled]:
    """residual + product, and the rms_norm of that for a product that follows, where `norms` says so.

    Args:
        norm_weight: [N] of x's dtype. eps: of the norm. Others as of `verify_qmv`.
    """
    how = group_size, bits, "added"
    y, scaled, squares = _found(x, (weight, scales, biases), how, residual, norm_weight)
    return y, Scaled(scaled, squares, eps)


def _found(
    given: mx.array | Scaled,
    matrix: tuple[mx.array, mx.array, mx.array],
    how: tuple[int, int, str],
    residual: mx.array | None,
    norm_weight: mx.array | None,
) -> list[mx.array]:
    """`how`: group size, bits, form."""
    x, squares, eps = (given, None, None) if isinstance(given, mx.array) else (given.x, given.squares, given.eps)
    inputs = [x, *matrix, *(each for each in (residual, squares, norm_weight) if each is not None)]
    weight, scales, biases = matrix
    key = (x.shape, weight.shape, x.dtype, how, scales.shape, biases.shape, scales.dtype, eps, norm_weight is None)
    call = _CALLS.get(key)
    if call is None:
        rows, outputs = x.shape[:2], weight.shape[0]
        for name, array, shape in (
            ("a residual", residual, (*rows, outputs)),
            ("norm_weight", norm_weight, (outputs,)),
            ("squares", squares, (*rows, squares.shape[-1]) if squares is not None else ()),
        ):
            if array is not None and (array.shape != shape or (how[2] == "gated" and name == "a residual")):
                raise ValueError(f"{name} of {array.shape} goes with no {how[2]} product of {x.shape}, {weight.shape}")
        call = _CALLS[key] = _prepared(inputs, how, eps, norm_weight is not None)
    return call(inputs=inputs)


def _prepared(inputs: Sequence[mx.array], how: tuple[int, int, str], eps: float | None, norms_it: bool) -> Call:
    x, weight, scales, biases = inputs[:4]
    group_size, bits, form = how
    if not fits(x, weight, group_size, bits):
        raise ValueError(
            f"verify_qmv does not take x {x.dtype} {x.shape} with weight {weight.dtype} {weight.shape}, "
            f"bits={bits}, group_size={group_size}: use mx.quantized_matmul"
        )
    expected = (weight.shape[0], x.shape[2] // group_size)
    for name, array in (("scales", scales), ("biases", biases)):
        if array.shape != expected or array.dtype != x.dtype:
            raise ValueError(f"{name} must be {x.dtype} {expected}, not {array.dtype} {array.shape}")
    found = backend()
    if found is None:
        raise RuntimeError("verify_qmv needs a GPU")
    matrix = _Matrix(weight.shape[0], x.shape[2], bits, group_size, x.dtype, form, eps, norms_it)
    if (eps is not None or norms_it) and not _takes_norms(found, matrix):
        raise ValueError(f"no text for {found} and {x.dtype} takes norms into products of {weight.shape}: ask `norms`")
    body = _body(found, matrix)
    launch, rows = body.launch(matrix, x.shape[0] * x.shape[1]), x.shape[:2]
    launch = replace(launch, shapes=[(*rows, shape[-1]) for shape in launch.shapes])
    return body.kernel(matrix).prepared(launch, [each.dtype for each in inputs])


def verify_qmv_reference(
    x: mx.array | Scaled,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    group_size: int,
    bits: int,
    residual: mx.array | None = None,
    gated: bool = False,
) -> mx.array:
    """The same in plain MLX: dequantised in fp32, multiplied in fp32, cast. Its bits may depend on M."""
    scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    matrix = mx.dequantize(weight, scales, biases, group_size=group_size, bits=bits)
    given = x if isinstance(x, mx.array) else x.x
    product = given.astype(mx.float32) @ matrix.T
    if isinstance(x, Scaled):
        product = product * mx.rsqrt(x.squares.sum(axis=-1, keepdims=True) / given.shape[-1] + x.eps)
    product = product.astype(given.dtype)
    if gated:
        gate, up = mx.split(product, 2, axis=-1)
        return gate * mx.sigmoid(gate) * up
    return product if residual is None else product + residual


def verify_qmv_norm_reference(
    x: mx.array | Scaled,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    group_size: int,
    bits: int,
    residual: mx.array,
    norm_weight: mx.array,
    eps: float,
) -> tuple[mx.array, Scaled]:
    """The same in plain MLX; the squares in one piece."""
    y = verify_qmv_reference(x, weight, scales, biases, group_size=group_size, bits=bits, residual=residual)
    squares = mx.square(y.astype(mx.float32)).sum(axis=-1, keepdims=True)
    return y, Scaled(y * norm_weight, squares, eps)


def fits(x: mx.array, weight: mx.array, group_size: int, bits: int) -> bool:
    """Whether `verify_qmv` takes x [B, T, K] and weight [N, K bits / 32]. Looks at shapes and dtypes only."""
    return (
        bits in _BITS
        and group_size in _GROUPS
        and (x.ndim, weight.ndim) == (3, 2)
        and x.dtype in _DTYPES
        and weight.dtype == mx.uint32
        and 1 <= x.shape[0] * x.shape[1] <= MOST_ROWS
        and weight.shape[0] >= 1
        and x.shape[2] == weight.shape[1] * 32 // bits
        and x.shape[2] >= group_size
        and x.shape[2] % group_size == 0
    )


def norms(x: mx.array, weight: mx.array, group_size: int, bits: int) -> bool:
    """Whether, for an x and a weight that fit, `verify_qmv` takes `Scaled` and `verify_qmv_norm` may be called."""
    where = backend()
    matrix = _Matrix(weight.shape[0], x.shape[2], bits, group_size, x.dtype)
    return where is not None and _takes_norms(where, matrix)


def _takes_norms(where: Backend, matrix: _Matrix) -> bool:
    """Not in fp16: what a norm would divide may be beyond its range when it is multiplied first."""
    return matrix.dtype == mx.bfloat16 and _body(where, matrix).norms


def _body(where: Backend, matrix: _Matrix) -> _Body:
    """The first of a back end that serves the matrix."""
    return next(body for body in _BODIES[where] if body.serves(matrix))


def _simd_launch(matrix: _Matrix, rows: int) -> Launch:
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

    def shared(self, matrix: _Matrix, warps: int, unit: int) -> int:
        """Bytes of shared memory."""
        piece = unit // self.parts
        words = matrix.group_size * matrix.bits // 32
        outputs = 16 * self.tiles * self.teams
        weights = self.stages * outputs * (piece * words + piece)
        x = self.stages * self.rows * (piece * matrix.group_size // 2 + 4)
        sums = warps * 8 * (outputs + 4) + matrix.norms * 8 * outputs
        inverse_roots = self.rows if matrix.eps is not None else 0
        return 4 * (max(warps * (weights + x), sums) + inverse_roots)

    def own(self, matrix: _Matrix) -> int:
        """Outputs of a threadgroup: as many as of every other, at most as many as there is room for, whole pieces."""
        room = 16 * self.tiles * self.teams // (2 if matrix.form == "gated" else 1) // matrix.piece * matrix.piece
        places = _MULTIPROCESSORS * self.resident
        turns = -(-matrix.outputs // (places * room))
        even = max(-(-matrix.outputs // (places * turns)), 8)
        return -(-even // matrix.piece) * matrix.piece


def _unit(matrix: _Matrix) -> int:
    """Groups that a simdgroup takes at a time: 256 inputs, or 128; 0 if the matrix is cut otherwise."""
    return next((n // matrix.group_size for n in (256, 128) if matrix.inputs % n == 0 and n > matrix.group_size), 0)


def _mma_serves(matrix: _Matrix) -> bool:
    return matrix.dtype != mx.float32 and _unit(matrix) > 0


def _mma_launch(matrix: _Matrix, rows: int) -> Launch:
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
_SIMD = _Body("verify_qmv_simd", (), lambda matrix: True, _simd_launch)
_MMA = _Body("verify_qmv_mma", ("mma",), _mma_serves, _mma_launch, norms=True)

# In order of preference; the last of each serves every matrix.
_BODIES: Mapping[Backend, tuple[_Body, ...]] = {"metal": (_SIMD,), "cuda": (_MMA, _SIMD), "host": (_SIMD,)}


def _error() -> float:
    """Against the reference: 4 bits in every form, one row and three; 8 bits plain, three rows.

    Infinite if a row's bits hang on other rows. On CUDA these are the texts of a model's depth 3, which has to compile
    them anyhow: rows of weights decide how many simdgroups share a sum, and that is compiled in. Outputs fill no tile.
    """
    forms = {"plain": (2051, 5120, 4), "added": (2051, 5120, 4), "of 8 bits": (2051, 2304, 8)}
    errors = _norm_errors()
    if not errors:
        forms["gated"] = 8198, 1280, 4
    for form, (rows, inputs, bits) in forms.items():
        quantised = _random_matrix(rows, inputs, bits)
        x = mx.random.normal((1, 3, inputs), mx.bfloat16, key=mx.random.key(1))
        residual = mx.random.normal((1, 3, rows), mx.bfloat16, key=mx.random.key(2)) if form == "added" else None
        how: Any = {"group_size": 64, "bits": bits, "gated": form == "gated"}
        found = verify_qmv(x, *quantised, residual=residual, **how)
        errors.append(relative_error(found, verify_qmv_reference(x, *quantised, residual=residual, **how)))
        if bits == 4:
            last = None if residual is None else residual[:, -1:] + 0
            alone = verify_qmv(x[:, -1:] + 0, *quantised, residual=last, **how)
            if not mx.array_equal(alone, found[:, -1:]).item():
                return math.inf
    return math.nan if any(map(math.isnan, errors)) else max(errors)  # `max` can lose a NaN


def _norm_errors() -> list[float]:
    """Of a sum that comes out scaled, and of what the next product makes of it; as `_error`."""
    first, then = _random_matrix(5120, 2048, 4, seed=1), _random_matrix(8198, 5120, 4, seed=2)
    x, residual, weight = (
        mx.random.normal(shape, mx.bfloat16, key=mx.random.key(seed))
        for seed, shape in enumerate(((1, 3, 2048), (1, 3, 5120), (5120,)), start=3)
    )
    how: Any = {"group_size": 64, "bits": 4}
    if not norms(x, first[0], **how):
        return []

    def last(scaled: Scaled) -> Scaled:
        return Scaled(scaled.x[:, -1:] + 0, scaled.squares[:, -1:] + 0, scaled.eps)

    norm: Any = {**how, "norm_weight": weight, "eps": 1e-6}
    y, scaled = verify_qmv_norm(x, *first, residual=residual, **norm)
    y_, scaled_ = verify_qmv_norm_reference(x, *first, residual=residual, **norm)
    alone, one = verify_qmv_norm(x[:, -1:] + 0, *first, residual=residual[:, -1:] + 0, **norm)
    pairs = [(y, y_), (scaled.x, scaled_.x), (scaled.squares.sum(axis=-1, keepdims=True), scaled_.squares)]
    same = [(alone, y[:, -1:]), (one.x, last(scaled).x), (one.squares, last(scaled).squares)]
    for gated in (True, False):
        found = verify_qmv(scaled, *then, gated=gated, **how)
        pairs.append((found, verify_qmv_reference(scaled, *then, gated=gated, **how)))
        same.append((verify_qmv(last(scaled), *then, gated=gated, **how), found[:, -1:]))
    equal = all(mx.array_equal(*pair).item() for pair in same)
    return [relative_error(*pair) for pair in pairs] if equal else [math.inf]


def _random_matrix(rows: int, inputs: int, bits: int, seed: int = 0) -> tuple[mx.array, mx.array, mx.array]:
    """As of `mx.quantize` in bf16 with groups of 64; numbers between -0.5 and 0.5."""
    for_weight, for_scales = mx.random.split(mx.random.key(seed))
    weight = mx.random.randint(0, 2**32 - 1, (rows, inputs * bits // 32), mx.uint32, key=for_weight)
    scales = mx.random.uniform(0.5, 1, (rows, inputs // 64), key=for_scales).astype(mx.bfloat16) / 2**bits
    return weight, scales, -scales * 2 ** (bits - 1)


def _gain() -> float:
    """Of one row and of four, together, on matrices so large that the host's time hides; texts as for `_error`."""
    rows, inputs = 8000, 16384
    quantised = [_random_matrix(rows, inputs, 4, seed) for seed in range(4)]
    x = mx.random.normal((1, 4, inputs)).astype(mx.bfloat16)
    mx.eval(x, quantised)
    given = [(rows, *each) for rows in (x, x[:, :1]) for each in quantised]

    def stock() -> list[mx.array]:
        return [mx.quantized_matmul(*each, transpose=True, group_size=64, bits=4) for each in given]

    return speed_over(stock, lambda: [verify_qmv(*each, group_size=64, bits=4) for each in given])


# Sums in fp32 differ by far less than a step of bf16, but may lie on two sides of a border: then results differ by one
# step, at most 2^-7 of the value. 32 of 5,120 terms of a sum left out show as some 0.06.
CHECK = SelfCheck("verify_qmv", _error, most=2.0**-7, gain=_gain)
