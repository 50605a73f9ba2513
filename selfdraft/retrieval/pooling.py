"""From the hidden states of tokens to one vector a text. Knows formulas; no files and no models.

The ways and their names are those of sentence-transformers' Pooling module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

__all__ = ["POOLINGS", "normalised", "pool"]

_LEAST = 1e-9  # of a divisor
_LEAST_NORM = 1e-12


def pool(states: mx.array, mask: mx.array, ways: Sequence[str]) -> mx.array:
    """Pool.

    Args:
        states: [rows, length, width], floating.
        mask: [rows, length], 1 for a token and 0 for padding, which is on the right.
        ways: names of `POOLINGS`; of several the results stand side by side.

    Returns:
        fp32 [rows, width * len(ways)].
    """
    states, mask = states.astype(mx.float32), mask.astype(mx.float32)
    return mx.concatenate([POOLINGS[way](states, mask) for way in ways], axis=-1)


def normalised(vectors: mx.array) -> mx.array:
    """Vectors [rows, width] of length 1; a zero vector stays one."""
    return vectors / mx.maximum(mx.linalg.norm(vectors, axis=-1, keepdims=True), _LEAST_NORM)


def _cls(states: mx.array, mask: mx.array) -> mx.array:
    return states[:, 0]


def _sum(states: mx.array, mask: mx.array) -> mx.array:
    return (states * mask[..., None]).sum(axis=1)


def _count(mask: mx.array) -> mx.array:
    return mx.maximum(mask.sum(axis=1, keepdims=True), _LEAST)


def _mean(states: mx.array, mask: mx.array) -> mx.array:
    return _sum(states, mask) / _count(mask)


def _mean_sqrt_len(states: mx.array, mask: mx.array) -> mx.array:
    return _sum(states, mask) / mx.sqrt(_count(mask))


def _weighted_mean(states: mx.array, mask: mx.array) -> mx.array:
    weights = mask * mx.arange(1, mask.shape[1] + 1)
    return _sum(states, weights) / _count(weights)


def _max(states: mx.array, mask: mx.array) -> mx.array:
    return mx.where(mask[..., None] > 0, states, -mx.inf).max(axis=1)


def _last_token(states: mx.array, mask: mx.array) -> mx.array:
    last = mx.maximum(mask.sum(axis=1).astype(mx.int32) - 1, 0)
    return states[mx.arange(states.shape[0]), last]


POOLINGS: dict[str, Callable[[mx.array, mx.array], mx.array]] = {
    "cls": _cls,
    "mean": _mean,
    "max": _max,
    "mean_sqrt_len": _mean_sqrt_len,
    "weightedmean": _weighted_mean,
    "lasttoken": _last_token,
}
