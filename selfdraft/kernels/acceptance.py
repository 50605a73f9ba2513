"""Rejection sampling of drafts on the device: how many stay, and the token that follows. Knows no row's address.

In place of some 100 passes over vocabularies: softmax of all laws in slices; what the block rule sums of them; the
decision, which every slice makes for itself, with the best token of what is left; and a join. Rules: token-wise
(Leviathan et al., arXiv:2211.17192) and block (Sun et al., arXiv:2403.10444, algorithm 2). A row's result depends on
its own numbers alone: sums have an order that hangs on V.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from .draw import fits as fits_slices
from .draw import gumbel_reference
from .portable import Kernel, Launch
from .self_check import SelfCheck, speed_over

__all__ = ["CHECK", "MOST", "accept_rejection", "accept_rejection_reference", "fits"]

MOST = 16  # drafts of a row

_THREADS = 512
_PAIRS = 4  # of ids for each thread, see `draw`
_CHECKED = 248_320  # the vocabulary of the check

_SUMS = Kernel("acceptance_sums", ("z_p", "z_q", "depths"), ("sums",), parts=("best",))
_EXCESS = Kernel(
    "acceptance_excess", ("z_p", "z_q", "drafts", "depths", "sums"), ("excess",), parts=("best", "acceptance")
)
_CHOICE = Kernel(
    "acceptance_choice",
    ("z_p", "z_q", "drafts", "depths", "uniforms", "keys", "sums", "excess"),
    ("found",),
    parts=("threefry", "best", "acceptance"),
)
_JOIN = Kernel("acceptance_join", ("found",), ("accepted", "following"), parts=("best",))

_Accept = Callable[[Sequence[mx.array]], list[mx.array]]

_CALLS: dict[tuple[object, ...], _Accept] = {}


def accept_rejection(
    z_p: mx.array,
    z_q: mx.array,
    drafts: mx.array,
    depths: mx.array,
    uniforms: mx.array,
    keys: mx.array,
    *,
    block: bool,
) -> tuple[mx.array, mx.array]:
    """Accept or reject drafts, then draw the token that follows. Needs a GPU.

    Small arrays may be longer than needed, see `draw`. What lies behind a row's depth is not read.

    Args:
        z_p: [B, K+1, V] fp32 filtered logits of the model, -inf outside the support; K from 1, see `fits`.
        z_q: [B, K, V], those that drafts were drawn from.
        drafts: uint32 [B or more, K or more].
        depths: int32 [B or more], 0 to K.
        uniforms: fp32 [B or more, K or more] in [0, 1), one a draft.
        keys: uint32 [B or more, 2], Threefry keys of the noise of the token that follows.
        block: the block rule; else token by token.

    Returns:
        Drafts that stay, int32 [B], and the next token, uint32 [B].

    Raises:
        ValueError: the kernels do not take these shapes or dtypes.
        RuntimeError: there is no GPU.
    """
    given = (z_p, z_q, drafts, depths, uniforms, keys)
    key = (block, *[x.shape for x in given], *[x.dtype for x in given])
    accept = _CALLS.get(key)
    if accept is None:
        if not _fitting(*given):
            raise ValueError(
                "accept_rejection takes fp32 [B, K+1, V] and [B, K, V], uint32 [B, K], int32 [B], fp32 [B, K] and "
                f"uint32 [B, 2] (the last four or more), not {', '.join(f'{x.dtype} {x.shape}' for x in given)}"
            )
        accept = _CALLS[key] = _prepared(z_p, block)
    accepted, following = accept(given)
    return accepted, following


def accept_rejection_reference(
    z_p: mx.array,
    z_q: mx.array,
    drafts: mx.array,
    depths: mx.array,
    uniforms: mx.array,
    keys: mx.array,
    *,
    block: bool,
) -> tuple[mx.array, mx.array]:
    """The same by plain MLX operations, on any device. Sums are of another order."""
    stay, weights = _reference_law(z_p, z_q, drafts, depths, uniforms, block)[:2]
    noise = gumbel_reference(keys[: z_p.shape[0]], z_p.shape[2])
    return stay, mx.argmax(mx.log(weights) + noise, axis=-1)


def fits(depth: int, vocab_size: int) -> bool:
    """Whether the kernels take so many drafts, and rows of this length."""
    return 1 <= depth <= MOST and fits_slices(vocab_size)


def _fitting(
    z_p: mx.array, z_q: mx.array, drafts: mx.array, depths: mx.array, uniforms: mx.array, keys: mx.array
) -> bool:
    if z_p.ndim != 3 or z_p.shape[0] == 0 or not fits(z_p.shape[1] - 1, z_p.shape[2]):
        return False
    rows, positions, vocab_size = z_p.shape
    f, u = mx.float32, mx.uint32
    dtypes = (z_p.dtype, z_q.dtype, drafts.dtype, depths.dtype, uniforms.dtype, keys.dtype)
    return (
        dtypes == (f, f, u, mx.int32, f, u)
        and z_q.shape == (rows, positions - 1, vocab_size)
        and (drafts.ndim, depths.ndim, uniforms.ndim, keys.ndim) == (2, 1, 2, 2)
        and min(drafts.shape[0], depths.shape[0], uniforms.shape[0], keys.shape[0]) >= rows
        and min(drafts.shape[1], uniforms.shape[1]) >= positions - 1
        and keys.shape[1] == 2
    )


def _prepared(z_p: mx.array, block: bool) -> _Accept:
    rows, positions, vocab_size = z_p.shape
    most, slices = positions - 1, -(-vocab_size // (2 * _PAIRS * _THREADS))
    f, i, u = mx.float32, mx.int32, mx.uint32
    base: dict[str, int | mx.Dtype] = {"THREADS": _THREADS, "PER": _PAIRS}

    def launch(across: tuple[int, int], shape: tuple[int, ...], **constants: int) -> Launch:
        return Launch({**constants, **base}, (*across, rows), _THREADS, [shape], [f])

    sums = _SUMS.prepared(launch((slices, 2 * most + 1), (rows, 2 * most + 1, 2, slices)), [f, f, i])
    left = None
    if block and most > 1:
        left = _EXCESS.prepared(launch((slices, most - 1), (rows, most - 1, slices), MOST=MOST), [f, f, u, i, f])
    across = launch((slices, 1), (rows, 5, slices), BLOCK=int(block), MOST=MOST)
    choice = _CHOICE.prepared(across, [f, f, u, i, f, u, f, f])
    join = _JOIN.prepared(Launch({}, (1, 1, rows), 32, [(rows,), (rows,)], [i, u]), [f])

    def accept(given: Sequence[mx.array]) -> list[mx.array]:
        z_p, z_q, drafts, depths = given[:4]
        summed = sums(inputs=[z_p, z_q, depths])[0]
        excess = left(inputs=[z_p, z_q, drafts, depths, summed])[0] if left else summed  # which is not read then
        return join(inputs=choice(inputs=[*given, summed, excess]))

    return accept


def _reference_law(
    z_p: mx.array, z_q: mx.array, drafts: mx.array, depths: mx.array, uniforms: mx.array, block: bool
) -> tuple[mx.array, mx.array, mx.array]:
    """How many stay [B], the law of what follows [B, V], not normalised, and passing probabilities [B, K]."""
    p, q = mx.softmax(z_p, axis=-1), mx.softmax(z_q, axis=-1)
    rows, most = q.shape[:2]
    depth, ids, places = depths[:rows, None], drafts[:rows, :most, None], mx.arange(1, most + 1)
    ratios = mx.take_along_axis(p[:, :-1], ids, axis=-1)[..., 0] / mx.take_along_axis(q, ids, axis=-1)[..., 0]
    scales = [mx.ones((rows,))]
    for place in range(most):
        scales.append(mx.minimum(scales[-1] * ratios[:, place], 1) if block else scales[0])
    scale, behind = mx.stack(scales, axis=1), mx.concatenate([q[:, 1:], mx.zeros_like(q[:, :1])], axis=1)
    passing = mx.minimum(ratios, 1)
    if block:
        c = scale[:, 1:]
        excess = mx.maximum(c[..., None] * p[:, 1:] - behind, 0).sum(axis=-1)
        missing = excess + 1 - c
        early = mx.where(missing > 0, excess / mx.where(missing > 0, missing, 1), 1)
        passing = mx.where(places < depth, early, c)
    passes = (uniforms[:rows, :most] < passing) & (places <= depth)
    stay = (passes * places).max(axis=1) if block else mx.cumprod(passes.astype(mx.int32), axis=1).sum(axis=1)
    stay = stay.astype(mx.int32)
    row, ends = mx.arange(rows), stay[:, None] < depth
    p_next, q_next = p[row, stay], mx.where(ends, q[row, mx.minimum(stay, most - 1)], 0)
    left = mx.maximum(scale[row, stay][:, None] * p_next - q_next, 0)
    return stay, mx.where(left.sum(axis=-1, keepdims=True) > 0, left, p_next), passing


_CLEAR = 1e-3  # how far a compared case is from where rounding decides


def _cases(size: int, rows: int, most: int, seed: int) -> list[mx.array]:
    """Arguments: every second row as after top-k, every third with p = q, all depths; small arrays are too long."""
    keys = mx.random.split(mx.random.key(seed), 5)
    z_p = 2 * mx.random.normal((rows, most + 1, size), key=keys[0])
    z_q = z_p[:, :-1] + mx.random.normal((rows, most, size), key=keys[1])
    few = mx.arange(size) % max(size // 20, 1) == 0
    z_p, z_q = (mx.where((mx.arange(rows) % 2 == 0)[:, None, None] & ~few, -mx.inf, z) for z in (z_p, z_q))
    z_q = mx.where((mx.arange(rows) % 3 == 0)[:, None, None], z_p[:, :-1], z_q)
    drafts = mx.argmax(z_q + mx.random.gumbel(z_q.shape, key=keys[2]), axis=-1)
    # Up to above 1, so that drafts of equal laws are rejected too.
    uniforms = mx.random.uniform(0, 1.2, (rows, most), key=keys[3])
    depths = most - mx.arange(rows + 3) // 6 % (most + 1)
    return [z_p, z_q, drafts, depths, uniforms, mx.random.split(keys[4], rows + 1)]


def _differing(given: Sequence[mx.array], block: bool) -> tuple[int, int]:
    """Cases that differ from the reference, and how many are compared: those that rounding does not decide."""
    accepted, following = accept_rejection(*given, block=block)
    z_p, z_q, drafts, depths, uniforms, _ = given
    stay, weights, passing = _reference_law(z_p, z_q, drafts, depths, uniforms, block)
    best = mx.topk(mx.log(weights) + gumbel_reference(given[5][: len(stay)], z_p.shape[2]), 2, axis=-1)
    clear = (mx.abs(uniforms - passing) > _CLEAR).all(axis=1) & (mx.abs(best[:, 0] - best[:, 1]) > _CLEAR)
    _, expected = accept_rejection_reference(*given, block=block)
    wrong = clear & ((accepted != stay) | (following != expected))
    return int(np.array(wrong).sum()), int(np.array(clear).sum())


def _check_error(size: int = _CHECKED, small: int = 300) -> float:
    """Share of the decisions that are not the reference's, or not the same for a row alone; 1 if few are compared."""
    wrong = compared = cases = 0
    for width, rows, most in ((small, 96, 4), (small, 24, 1), (size, 4, 3)):
        given = _cases(width, rows, most, width + most)
        for block in (True, False):
            cases += rows
            differ, clear = _differing(given, block)
            wrong, compared = wrong + differ, compared + clear
            together = mx.stack([x.astype(mx.int32) for x in accept_rejection(*given, block=block)])
            one = [x[1:2] for x in given[:2]] + [x[1:3] for x in given[2:]]
            alone = mx.stack([x.astype(mx.int32) for x in accept_rejection(*one, block=block)])
            wrong += int(np.array(alone != together[:, 1:2]).any())
    return wrong / compared if compared > 0.9 * cases else 1.0


def _gain() -> float:
    """Of one row of three drafts by the block rule."""
    cases = [_cases(_CHECKED, 1, 3, seed) for seed in range(4)]
    mx.eval(cases)
    return speed_over(
        lambda: [x for given in cases for x in accept_rejection_reference(*given, block=True)],
        lambda: [x for given in cases for x in accept_rejection(*given, block=True)],
    )


# Decisions that rounding does not make are equal.
CHECK = SelfCheck("acceptance", _check_error, most=0.0, gain=_gain)
