"""Rounding that minds what a layer is fed: GPTQ (Frantar et al., arXiv 2210.17323), onto MLX's affine groups.

Columns are rounded one after the other; what one loses is made up for by those that follow, as far as the inputs that
were seen tell how columns go together: with G the sum of x x^T, the error of w x is least. Scales and biases are MLX's
own, of a group as it is when its turn comes.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

__all__ = ["calibrated"]

_DAMPING = 0.01  # of the mean of G's diagonal, added to it: G of few inputs has no inverse


def calibrated(
    weight: mx.array, gram: np.ndarray, *, bits: int, group_size: int, dtype: mx.Dtype
) -> tuple[mx.array, mx.array, mx.array]:
    """Codes, scales and biases of a layer, as `mx.quantize` gives them.

    Args:
        weight: [out, in], or [experts, out, in] that are fed alike.
        gram: sum of x x^T over the inputs seen, [in, in], float64.
        bits: 4 or 8.
        dtype: of scales and biases.
    """
    if weight.ndim == 3:
        each = [calibrated(expert, gram, bits=bits, group_size=group_size, dtype=dtype) for expert in weight]
        stacked = [mx.stack(list(arrays)) for arrays in zip(*each, strict=True)]
        return stacked[0], stacked[1], stacked[2]
    w = np.array(weight.astype(mx.float32))
    spread = _spread(gram)
    found = np.empty(w.shape, dtype=np.uint32)
    scales: list[mx.array] = []
    biases: list[mx.array] = []
    for begin in range(0, w.shape[1], group_size):
        group = slice(begin, begin + group_size)
        _, scale, bias = mx.quantize(mx.array(w[:, group]).astype(dtype), group_size=group_size, bits=bits)
        scales.append(scale.astype(dtype))
        biases.append(bias.astype(dtype))
        losses = _round_group(w[:, group], found[:, group], spread[group, group], scales[-1], biases[-1], bits)
        w[:, begin + group_size :] -= losses @ spread[group, begin + group_size :]
    return _packed(found, bits), mx.concatenate(scales, axis=1), mx.concatenate(biases, axis=1)


def _spread(gram: np.ndarray) -> np.ndarray:
    """The upper Cholesky factor of G's inverse, whose rows are divided by their diagonal, float32."""
    gram = gram.astype(np.float64, copy=True)
    diagonal = np.diag_indices_from(gram)
    mean = gram[diagonal].mean()
    gram[diagonal] += _DAMPING * mean if mean > 0 else 1.0
    upper = np.linalg.cholesky(np.linalg.inv(gram)).T
    return (upper / upper[diagonal][:, None]).astype(np.float32)


def _round_group(
    w: np.ndarray, codes: np.ndarray, spread: np.ndarray, scale: mx.array, bias: mx.array, bits: int
) -> np.ndarray:
    """Round the columns of a group; w and codes are changed in place. Returns what each column lost, [out, group]."""
    s, b = (np.array(part.astype(mx.float32))[:, 0] for part in (scale, bias))
    safe = np.where(s == 0, 1, s)
    losses = np.empty_like(w)
    for column in range(w.shape[1]):
        code = np.clip(np.rint((w[:, column] - b) / safe), 0, 2**bits - 1)
        codes[:, column] = code
        losses[:, column] = w[:, column] - (code * s + b)
        w[:, column + 1 :] -= losses[:, column, None] * spread[column, column + 1 :]
    return losses


def _packed(codes: np.ndarray, bits: int) -> mx.array:
    """[out, in] -> words [out, in bits / 32], the first code in the lowest bits."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    words = codes.reshape(codes.shape[0], -1, 32 // bits) << shifts
    return mx.array(np.bitwise_or.reduce(words, axis=-1).astype(np.uint32))
