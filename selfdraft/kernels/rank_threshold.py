"""The least logit that top-k and then top-p keep: plain MLX, and a kernel. Knows nothing of sampling beyond.

No full sort: each slice of the vocabulary lists what can be among the k largest, found by halving an interval of
values, and a second launch does the same with what they listed, sorts at most 128 numbers and sums them. Counting what
reaches a pivot is from Alabi et al., 2012, "Fast k-selection algorithms for graphics processing units", top-p from
Holtzman et al., arXiv:1904.09751. A row's result depends on its own numbers alone: not on the other rows, and not on
where in the vocabulary they stand.
"""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from .portable import Call, Kernel, Launch
from .self_check import SelfCheck, speed_over

__all__ = ["CHECK", "MOST", "fits", "rank_threshold", "rank_threshold_reference"]

MOST = 128  # the largest top-k of the kernel, and how many numbers a slice lists

_THREADS = 512
_PER_THREAD = 16  # of a slice: 31 slices of a vocabulary of 248,320, so 4 rows are one wave on a large GPU
_MOST_SLICES = 64
_CHECKED = 248_320  # the vocabulary of the check

_KERNEL = Kernel("rank_threshold", ("values", "top_k", "top_p"), ("found",))

_CALLS: dict[tuple[int, ...], tuple[Call, Call]] = {}


def rank_threshold(z: mx.array, top_k: mx.array, top_p: mx.array) -> mx.array:
    """The least logit of each position that is kept. Needs a GPU.

    Top-k keeps what reaches the k-th largest, ties included. Top-p then keeps a token if less than `top_p` of the mass
    of those, all ties counted, lies before it in descending order.

    Args:
        z: [B, P, V] fp32, see `fits`; may hold -inf. NaN counts as infinite, of its sign.
        top_k: [B] int32, 1 to MOST; others count as the nearest.
        top_p: [B] fp32; 1 or more keeps all.

    Returns:
        [B, P, 1] fp32: a value of z, or -inf.

    Raises:
        ValueError: the kernel does not take these shapes or dtypes.
        RuntimeError: there is no GPU.
    """
    calls = _CALLS.get(z.shape)
    if calls is None:
        calls = _CALLS[z.shape] = _prepared(z)
    rows = (z.shape[0],)
    if z.dtype != mx.float32 or (top_k.shape, top_k.dtype, top_p.shape, top_p.dtype) != (
        rows,
        mx.int32,
        rows,
        mx.float32,
    ):
        given = ", ".join(f"{x.dtype} {x.shape}" for x in (z, top_k, top_p))
        raise ValueError(f"rank_threshold takes fp32 [B, P, V], int32 [B], fp32 [B], not {given}")
    listed = calls[0](inputs=[z, top_k, top_p])
    return calls[1](inputs=[*listed, top_k, top_p])[0]


def rank_threshold_reference(z: mx.array, top_k: mx.array, top_p: mx.array | None, *, most: int) -> mx.array:
    """The same by plain MLX operations, on any device. Sums are of another order.

    Args:
        z: as of `rank_threshold`.
        top_k: [B] int32, 1 to V.
        top_p: as of `rank_threshold`; None is off for all rows.
        most: what no top_k exceeds.
    """
    best = mx.sort(mx.topk(z, most, axis=-1) if most < z.shape[-1] else z, axis=-1)[..., ::-1]
    last = mx.broadcast_to(top_k[:, None, None] - 1, (*best.shape[:2], 1))
    kth = mx.take_along_axis(best, last, axis=-1)
    if top_p is None:
        return kth
    peak, share = best[..., :1], top_p[:, None, None]
    mass = mx.where(z >= kth, mx.exp(z - peak), 0).sum(axis=-1, keepdims=True)
    part = mx.exp(best - peak) / mass
    kept = (mx.cumsum(part, axis=-1) - part < share) | (share >= 1)
    crossing = mx.maximum(kept.sum(axis=-1, keepdims=True) - 1, 0)
    return mx.maximum(kth, mx.take_along_axis(best, crossing, axis=-1))


def fits(vocab_size: int) -> bool:
    """Whether the kernel takes rows of this length."""
    return 1 <= vocab_size <= _MOST_SLICES * _THREADS * _PER_THREAD


def _prepared(z: mx.array) -> tuple[Call, Call]:
    if z.ndim != 3 or not fits(z.shape[-1]):
        raise ValueError(f"rank_threshold does not take logits of shape {z.shape}")
    each, join = _launches(z)
    dtypes = [mx.float32, mx.int32, mx.float32]
    return _KERNEL.prepared(each, dtypes), _KERNEL.prepared(join, dtypes)


def _launches(z: mx.array) -> tuple[Launch, Launch]:
    rows, positions, vocab_size = z.shape
    slices = -(-vocab_size // (_THREADS * _PER_THREAD))

    def launch(join: int, across: int, per_thread: int, width: int) -> Launch:
        return Launch(
            template={"JOIN": join, "SLICES": slices, "THREADS": _THREADS, "PER": per_thread, "MOST": MOST},
            threadgroups=(across, rows * positions, 1),
            threads=_THREADS,
            shapes=[(rows, positions, width)],
            dtypes=[mx.float32],
        )

    return launch(0, slices, _PER_THREAD, slices * (MOST + 2)), launch(1, 1, -(-slices * MOST // _THREADS), 1)


def _check_error(size: int = _CHECKED) -> float:
    """Share of the thresholds that are not the reference's, or not the same for a position alone."""
    top_k = mx.array([20, MOST], mx.int32)
    random = 3 * mx.random.normal((2, 3, size), key=mx.random.key(0))
    place = mx.arange(size)
    # Position 1: ten at the top, and of their mass four times as many equal ones that no list holds.
    tied = mx.where(place < 10, 5, mx.where(place % 9 == 0, 5 + math.log(360 / size), mx.minimum(random, -3)))
    few = mx.where(place % (size // 24) == 7, random, -mx.inf)
    z = mx.stack([random[:, 0], tied[:, 1], few[:, 2]], axis=1)
    wrong = []
    for shares in ([0.95, 0.3], [0.25, 1.0]):
        top_p = mx.array(shares, mx.float32)
        found = rank_threshold(z, top_k, top_p)
        alone = rank_threshold(z[1:, :1], top_k[1:], top_p[1:])
        wrong += [found != rank_threshold_reference(z, top_k, top_p, most=MOST), found[1:, :1] != alone]
    return float(np.concatenate([np.array(each).reshape(-1) for each in wrong]).mean())


def _gain() -> float:
    """Of four positions, with the filters that most checkpoints recommend."""
    given = [3 * mx.random.normal((1, 4, _CHECKED), key=mx.random.key(seed)) for seed in range(4)]
    top_k, top_p = mx.array([20], mx.int32), mx.array([0.95], mx.float32)
    mx.eval(given, top_k, top_p)
    return speed_over(
        lambda: [rank_threshold_reference(z, top_k, top_p, most=20) for z in given],
        lambda: [rank_threshold(z, top_k, top_p) for z in given],
    )


# Thresholds are numbers of z: equal ones, but where a sum of mass is within rounding of top_p, which none of these is.
CHECK = SelfCheck("rank_threshold", _check_error, most=0.0, gain=_gain)
