"""Products of few rows with a quantised matrix, and what layers make of them; a row's bits hang on no other row.

Knows MLX's affine layout and the bodies that serve it, not where the matrices come from. A verify pass over K+1 tokens
then gives the bits of K+1 passes over one token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from .portable import Backend, Call, backend
from .self_check import SelfCheck, relative_error, speed_over
from .verify_qmv_plan import Matrix, body_of

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
_BITS = (4, 8)
_GROUPS = (32, 64, 128)
_DTYPES = (mx.bfloat16, mx.float16, mx.float32)
_CALLS: dict[tuple[object, ...], Call] = {}


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
    key = (*((each.shape, each.dtype) for each in inputs), how, eps, residual is None, norm_weight is None)
    call = _CALLS.get(key)
    if call is None:
        weight = matrix[0]
        rows, outputs = x.shape[:2], weight.shape[0]
        for name, array, shape, dtype in (
            ("a residual", residual, (*rows, outputs), x.dtype),
            ("norm_weight", norm_weight, (outputs,), x.dtype),
            ("squares", squares, (*rows, squares.shape[-1]) if squares is not None else (), mx.float32),
        ):
            if array is None:
                continue
            if (array.shape, array.dtype) != (shape, dtype) or (how[2] == "gated" and name == "a residual"):
                product = f"{how[2]} product of {x.dtype} {x.shape}, {weight.shape}"
                raise ValueError(f"{name} {array.dtype} {array.shape} goes with no {product}")
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
    matrix = Matrix(weight.shape[0], x.shape[2], bits, group_size, x.dtype, form, eps, norms_it)
    if (eps is not None or norms_it) and not _takes_norms(found, matrix):
        raise ValueError(f"no text for {found} and {x.dtype} takes norms into products of {weight.shape}: ask `norms`")
    body = body_of(found, matrix)
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
    matrix = Matrix(weight.shape[0], x.shape[2], bits, group_size, x.dtype)
    return where is not None and _takes_norms(where, matrix)


def _takes_norms(where: Backend, matrix: Matrix) -> bool:
    """Not in fp16: what a norm would divide may be beyond its range when it is multiplied first."""
    return matrix.dtype == mx.bfloat16 and body_of(where, matrix).norms


def _error() -> float:
    """Against the reference: 4 bits in every form that models in bf16 take here, one row and three; 8 bits plain, three
    rows. More rows are other texts, which tests compile and run on the host.

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
