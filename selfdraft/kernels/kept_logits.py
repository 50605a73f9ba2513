"""What temperature, top-k, top-p and min-p leave of logits: plain MLX, and a kernel. Knows nothing of sampling beyond.

No full sort: each slice of the vocabulary lists what can be among the k largest, found by halving an interval of
values; in a second launch every slice does the same with what all have listed, sorts at most 128 numbers, sums them and
writes what it keeps. Counting what reaches a pivot is from Alabi et al., 2012, "Fast k-selection algorithms for
graphics processing units", top-p from Holtzman et al., arXiv:1904.09751, min-p from Nguyen et al., arXiv:2407.01082. A
row's result depends on its own numbers alone: not on the other rows, and not on where in the vocabulary they stand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

from .portable import Call, Kernel, Launch
from .self_check import SelfCheck, speed_over
from .small_arrays import moved

__all__ = ["CHECK", "MOST", "Rules", "fits", "flaws_reference", "kept_logits", "kept_logits_reference"]

MOST = 128  # the largest top-k of the kernel, and how many numbers a slice lists

_THREADS = 512
_PER_THREAD = 16  # of a slice: 31 slices of a vocabulary of 248,320, so 4 rows are one wave on a large GPU
_MOST_SLICES = 64
_CHECKED = 248_320  # the vocabulary of the check

_LIST = Kernel("kept_logits", ("values", "rules"), ("found",), absent=("logits", "flaws"))
_WRITE = Kernel("kept_logits", ("values", "rules", "logits"), ("found", "flaws"))

_CALLS: dict[tuple[object, ...], tuple[Call, Call]] = {}


@dataclass(frozen=True)
class Rules:
    """What is kept of a batch of rows, one number of each kind a row.

    Attributes:
        temperature: what logits are divided by.
        top_k: how many of the most likely tokens, ties of the last included; 0 for all.
        top_p: the share of the mass of those that must be kept, from the most likely down; 1 for all.
        min_p: the least probability, relative to the largest; 0 for all.
    """

    temperature: tuple[float, ...]
    top_k: tuple[int, ...]
    top_p: tuple[float, ...]
    min_p: tuple[float, ...]

    @cached_property
    def array(self) -> mx.array:
        """As the kernel takes them, fp32 [4 B]: temperature, top_k, top_p and the logarithm of min_p of each row."""
        logs = [math.log(p) if p else -math.inf for p in self.min_p]
        rows = zip(self.temperature, self.top_k, self.top_p, logs, strict=True)
        return moved(mx.array([float(value) for row in rows for value in row], mx.float32))

    @cached_property
    def served(self) -> list[bool]:
        """Rows that the kernel takes."""
        return [k <= MOST and (k > 0 or p >= 1) for k, p in zip(self.top_k, self.top_p, strict=True)]


def kept_logits(logits: mx.array, rules: Rules) -> tuple[mx.array, mx.array]:
    """Logits over temperature, -inf where they are not kept. Needs a GPU.

    Top-k keeps what reaches the k-th largest, ties included. Top-p then keeps a token if less than `top_p` of the mass
    of those, all ties counted, lies before it in descending order.

    Args:
        logits: [B, P, V] fp32, bf16 or fp16, see `fits`; may hold -inf.
        rules: of B rows; of those that are not `served` the result means nothing.

    Returns:
        The logits that are kept, fp32 [B, P, V], and the flaws of those given, int32 [B, P]: 0 where all are finite, 1
        where some are -inf, 2 where some are NaN or inf; there the position means nothing.

    Raises:
        ValueError: the kernel does not take these shapes or dtypes.
        RuntimeError: there is no GPU.
    """
    calls = _CALLS.get((logits.shape, logits.dtype, len(rules.top_k)))
    if calls is None:
        calls = _CALLS[logits.shape, logits.dtype, len(rules.top_k)] = _prepared(logits, rules)
    listed = calls[0](inputs=[logits, rules.array])
    kept, flaws = calls[1](inputs=[*listed, rules.array, logits])
    return kept, flaws


def kept_logits_reference(logits: mx.array, rules: Rules) -> tuple[mx.array, mx.array]:
    """The same by plain MLX operations, on any device and for all rows. Sums are of another order."""
    temperature, _, top_p, log_min_p = mx.split(rules.array.reshape(-1, 4, 1, 1), 4, axis=1)
    z = logits.astype(mx.float32)
    if any(t != 1 for t in rules.temperature):
        z = z / temperature[:, 0]
    least = _least_by_rank(z, rules, top_p[:, 0])
    if any(rules.min_p):
        floor = z.max(axis=-1, keepdims=True) + log_min_p[:, 0]
        least = floor if least is None else mx.maximum(least, floor)
    return z if least is None else mx.where(z >= least, z, -mx.inf), flaws_reference(logits)


def flaws_reference(logits: mx.array) -> mx.array:
    """Those that `kept_logits` returns, [B, P] of [B, P, V]. A number that is not finite makes the sum so."""
    total = logits.astype(mx.float32).sum(axis=-1)
    return mx.where(total < mx.inf, (total == -mx.inf).astype(mx.int32), 2)


def fits(vocab_size: int) -> bool:
    """Whether the kernel takes rows of this length."""
    return 1 <= vocab_size <= _MOST_SLICES * _THREADS * _PER_THREAD


def _least_by_rank(z: mx.array, rules: Rules, top_p: mx.array) -> mx.array | None:
    """The least logit that top-k, then top-p, keep: [B, P, 1] of z [B, P, V]; None where no row has either."""
    off = [k == 0 and p >= 1 for k, p in zip(rules.top_k, rules.top_p, strict=True)]
    if all(off):
        return None
    ks = [1 if rests else k or z.shape[-1] for k, rests in zip(rules.top_k, off, strict=True)]  # 1 costs others least
    best = mx.sort(mx.topk(z, max(ks), axis=-1) if max(ks) < z.shape[-1] else z, axis=-1)[..., ::-1]
    last = mx.broadcast_to(mx.array(ks)[:, None, None] - 1, (*best.shape[:2], 1))
    least = mx.take_along_axis(best, last, axis=-1)
    if any(p < 1 for p in rules.top_p):
        peak = best[..., :1]
        mass = mx.where(z >= least, mx.exp(z - peak), 0).sum(axis=-1, keepdims=True)
        part = mx.exp(best - peak) / mass
        kept = (mx.cumsum(part, axis=-1) - part < top_p) | (top_p >= 1)
        crossing = mx.maximum(kept.sum(axis=-1, keepdims=True) - 1, 0)
        least = mx.maximum(least, mx.take_along_axis(best, crossing, axis=-1))
    return mx.where(mx.array(off)[:, None, None], -mx.inf, least) if any(off) else least


def _prepared(logits: mx.array, rules: Rules) -> tuple[Call, Call]:
    rows = len(rules.top_k)
    if (
        logits.ndim != 3
        or 0 in logits.shape
        or logits.shape[0] != rows
        or not fits(logits.shape[-1])
        or logits.dtype not in (mx.float32, mx.bfloat16, mx.float16)
    ):
        raise ValueError(
            f"kept_logits takes fp32, bf16 or fp16 [B, P, V] and rules of B rows, "
            f"not {logits.dtype} {logits.shape} and rules of {rows}"
        )
    each, join = _launches(logits)
    given = [logits.dtype, mx.float32]
    return _LIST.prepared(each, given), _WRITE.prepared(join, [mx.float32, mx.float32, logits.dtype])


def _launches(logits: mx.array) -> tuple[Launch, Launch]:
    rows, positions, vocab_size = logits.shape
    slices = -(-vocab_size // (_THREADS * _PER_THREAD))
    base = {"SLICES": slices, "THREADS": _THREADS, "WIDE": _PER_THREAD, "MOST": MOST}
    groups, f = (slices, rows * positions, 1), mx.float32
    listed = (rows, positions, slices * (MOST + 3))
    join = {"JOIN": 1, "PER": -(-slices * MOST // _THREADS), **base}
    return (
        Launch({"JOIN": 0, "PER": _PER_THREAD, **base}, groups, _THREADS, [listed], [f]),
        Launch(join, groups, _THREADS, [logits.shape, (rows, positions)], [f, mx.int32]),
    )


def _rules(*rows: tuple[float, int, float, float]) -> Rules:
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return Rules(temperature, top_k, top_p, min_p)


def _check_error(size: int = _CHECKED) -> float:
    """Share of the numbers that are not the reference's, or not the same for a position alone."""
    random = 3 * mx.random.normal((2, 3, size), key=mx.random.key(0))
    place = mx.arange(size)
    # Position 1: ten at the top, and of their mass four times as many equal ones that no list holds.
    tied = mx.where(place < 10, 5, mx.where(place % 9 == 0, 5 + math.log(360 / size), mx.minimum(random, -3)))
    few = mx.where(place % (size // 24) == 7, random, -mx.inf)
    z = mx.stack([random[:, 0], tied[:, 1], few[:, 2]], axis=1)
    wrong = []
    for own in ([(1.0, 20, 0.95, 0.0), (1.0, MOST, 0.3, 0.0)], [(0.6, 20, 0.25, 0.3), (1.3, MOST, 1.0, 0.02)]):
        rules, rule = _rules(*own), _rules(own[1])
        for logits in (z, random.astype(mx.bfloat16)):
            found = kept_logits(logits, rules)
            pairs = zip(found, kept_logits_reference(logits, rules), kept_logits(logits[1:, :1], rule), strict=True)
            wrong += [each for one, other, alone in pairs for each in (one != other, one[1:, :1] != alone)]
    return float(np.concatenate([np.array(each).reshape(-1) for each in wrong]).mean())


def _gain() -> float:
    """Of four positions, with the filters that most checkpoints recommend."""
    shape, rules = (1, 4, _CHECKED), _rules((0.6, 20, 0.95, 0.0))
    given = [(3 * mx.random.normal(shape, key=mx.random.key(seed))).astype(mx.bfloat16) for seed in range(4)]
    mx.eval(given, rules.array)
    return speed_over(
        lambda: [x for logits in given for x in kept_logits_reference(logits, rules)],
        lambda: [x for logits in given for x in kept_logits(logits, rules)],
    )


# What is kept is equal; how much is hangs on rounding where a sum of mass is next to top_p, which none of these is.
CHECK = SelfCheck("kept_logits", _check_error, most=0.0, gain=_gain)
