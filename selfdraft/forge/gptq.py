"""Rounding that minds what a layer is fed: GPTQ (Frantar et al., arXiv 2210.17323), onto MLX's affine groups.

Inputs of a layer are rounded one after the other; what one loses is made up for by those that follow, as far as what
was seen tells how they go together: with G the sum of x x^T, the error of w x is least. Scales and biases are MLX's
own, of a group as it is when its turn comes.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .inputs import Inputs

__all__ = ["calibrated"]

# Of the mean of G's diagonal, added to it, and as much again as there are too few x to tell G. Without the second, on
# held-out x, fewer than some 5 x an input are worse than plain rounding (docs/forge.md).
_DAMPING = 0.01
_DOUBT = 0.5  # times inputs / x seen


def calibrated(
    weight: mx.array, seen: Inputs, *, bits: int, group_size: int, dtype: mx.Dtype
) -> tuple[mx.array, mx.array, mx.array]:
    """Codes, scales and biases of a layer, as `mx.quantize` gives them.

    Args:
        weight: [out, in], or of experts [experts, out, in].
        seen: what it was fed. Where that is nothing, it is rounded plainly.
        bits: 4 or 8.
        dtype: of scales and biases.
    """
    gram, count = np.array(seen.gram), seen.count
    if weight.ndim == 2:
        return _calibrated(weight, _spread(gram, int(count)), bits, group_size, dtype)
    shared = None if gram.ndim == 3 else _spread(gram, int(count))
    each = [
        _calibrated(expert, _spread(gram[i], count[i]) if shared is None else shared, bits, group_size, dtype)
        for i, expert in enumerate(weight)
    ]
    codes, scales, biases = (mx.stack(list(arrays)) for arrays in zip(*each, strict=True))
    return codes, scales, biases


def _spread(gram: np.ndarray, count: int) -> np.ndarray:
    """The upper Cholesky factor of G's inverse, whose rows are divided by their diagonal, float32 [in, in]."""
    inputs = gram.shape[0]
    mean = float(np.trace(gram, dtype=np.float64)) / inputs
    if not mean > 0:
        return np.eye(inputs, dtype=np.float32)
    damped = gram / mean + (_DAMPING + _DOUBT * inputs / count) * np.eye(inputs)
    upper = np.linalg.cholesky(np.linalg.inv(damped.astype(np.float64))).T
    return (upper / np.diagonal(upper)[:, None]).astype(np.float32)


def _calibrated(
    weight: mx.array, spread: np.ndarray, bits: int, group_size: int, dtype: mx.Dtype
) -> tuple[mx.array, mx.array, mx.array]:
    w = np.array(weight.astype(mx.float32).T, order="C")  # [in, out]: a row is rounded at once
    codes = np.empty(w.shape, dtype=np.uint32)
    scales: list[mx.array] = []
    biases: list[mx.array] = []
    for begin in range(0, w.shape[0], group_size):
        end = begin + group_size
        group = slice(begin, end)
        _, scale, bias = mx.quantize(mx.array(w[group].T).astype(dtype), group_size=group_size, bits=bits)
        scales.append(scale.astype(dtype))
        biases.append(bias.astype(dtype))
        lost = _round_group(w[group], codes[group], spread[group, group], scales[-1], biases[-1], bits)
        w[end:] -= spread[group, end:].T @ lost
    return _packed(codes, bits), mx.concatenate(scales, axis=1), mx.concatenate(biases, axis=1)


def _round_group(
    w: np.ndarray, codes: np.ndarray, spread: np.ndarray, scale: mx.array, bias: mx.array, bits: int
) -> np.ndarray:
    """Round a group, [group, out]; w and codes are changed in place. Returns what each input lost, [group, out]."""
    s, b = (np.array(part.astype(mx.float32))[:, 0] for part in (scale, bias))
    safe = np.where(s == 0, 1, s)
    lost = np.empty_like(w)
    for i in range(w.shape[0]):
        codes[i] = np.clip(np.rint((w[i] - b) / safe), 0, 2**bits - 1)
        lost[i] = w[i] - (codes[i] * s + b)
        w[i + 1 :] -= spread[i, i + 1 :, None] * lost[i]
    return lost


def _packed(codes: np.ndarray, bits: int) -> mx.array:
    """[in, out] -> words [out, in bits / 32], the first code in the lowest bits."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    words = np.ascontiguousarray(codes.T).reshape(codes.shape[1], -1, 32 // bits) << shifts
    return mx.array(np.bitwise_or.reduce(words, axis=-1))
