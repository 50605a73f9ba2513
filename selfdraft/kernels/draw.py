"""Tokens drawn from laws: the largest of logits plus noise, which is made where it is needed. Knows no row's address.

The noise is MLX's own, bit for bit: text seeded with the kernel is the text seeded without. The largest of perturbed
logits is a draw from softmax: Gumbel, 1954; Maddison et al., arXiv:1411.0030. Each slice of the vocabulary finds its
best, and a second launch the best of these.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .portable import Call, Kernel, Launch
from .self_check import SelfCheck, speed_over

__all__ = ["CHECK", "draw", "draw_reference", "fits", "gumbel_reference"]

_THREADS = 512
_PAIRS = 4  # of ids for each thread: 61 slices of a vocabulary of 248,320, so 4 positions are one wave on a large GPU
_EXACT = 1 << 24  # ids travel as floats
_LEAST_GUMBEL = -4.0  # below the noise of any uniform but 0
_CHECKED = 248_320  # the vocabulary of the check

_KERNEL = Kernel("draw", ("z", "keys", "noisy"), ("out",), parts=("threefry", "best"))

_CALLS: dict[tuple[object, ...], tuple[Call, Call]] = {}


def draw(z: mx.array, keys: mx.array, noisy: mx.array) -> mx.array:
    """Draw from softmax(z), or take its most likely token; the lowest id of equal ones. Needs a GPU.

    Small arrays may be longer than needed: on CUDA those of 8 bytes or less lie in the host's memory, where every
    threadgroup would fetch them over the bus.

    Args:
        z: [B, P, V] fp32, see `fits`; -inf is not allowed, and so are NaN and what is below the finite numbers' range.
        keys: uint32 [B or more, P or more, 2], a Threefry key for each position, as of `mx.random.gumbel`.
        noisy: int32 [B or more]; a row with 0 has no noise.

    Returns:
        uint32 [B, P]; 0 where nothing is allowed.

    Raises:
        ValueError: the kernel does not take these shapes or dtypes.
        RuntimeError: there is no GPU.
    """
    given = z.shape, keys.shape, noisy.shape, z.dtype, keys.dtype, noisy.dtype
    calls = _CALLS.get(given)
    if calls is None:
        calls = _CALLS[given] = _prepared(z, keys, noisy)
    found = calls[0](inputs=[z, keys, noisy])
    return calls[1](inputs=[*found, keys, noisy])[0]


def draw_reference(z: mx.array, keys: mx.array, noisy: mx.array) -> mx.array:
    """The same by plain MLX operations, on any device."""
    rows, positions, vocab_size = z.shape
    noise = gumbel_reference(keys[:rows, :positions].reshape(-1, 2), vocab_size).reshape(z.shape)
    return mx.argmax(z + mx.where(noisy[:rows, None, None] != 0, noise, 0), axis=-1)


def gumbel_reference(keys: mx.array, vocab_size: int) -> mx.array:
    """Standard Gumbel noise fp32 [N, vocab_size] of keys [N, 2]; a uniform of 0 gives the least, not -inf."""
    return mx.maximum(mx.vmap(lambda key: mx.random.gumbel((vocab_size,), key=key))(keys), _LEAST_GUMBEL)


def fits(vocab_size: int) -> bool:
    """Whether the kernel takes rows of this length."""
    return 1 <= vocab_size < _EXACT


def _prepared(z: mx.array, keys: mx.array, noisy: mx.array) -> tuple[Call, Call]:
    if (
        (z.dtype, keys.dtype, noisy.dtype) != (mx.float32, mx.uint32, mx.int32)
        or (z.ndim, keys.ndim, noisy.ndim, keys.shape[-1]) != (3, 3, 1, 2)
        or keys.shape[1] < z.shape[1]
        or min(keys.shape[0], noisy.shape[0]) < z.shape[0]
        or 0 in z.shape
        or not fits(z.shape[2])
    ):
        given = ", ".join(f"{x.dtype} {x.shape}" for x in (z, keys, noisy))
        raise ValueError(f"draw takes fp32 [B, P, V], uint32 [B, P, 2] and int32 [B] (these two or more), not {given}")
    rows, positions, vocab_size = z.shape
    slices = -(-vocab_size // (2 * _PAIRS * _THREADS))

    def call(join: int, across: int, threads: int, shape: tuple[int, ...], dtype: mx.Dtype) -> Call:
        template = {"JOIN": join, "THREADS": threads, "PER": _PAIRS}
        launch = Launch(template, (across, positions, rows), threads, [shape], [dtype])
        return _KERNEL.prepared(launch, [mx.float32, mx.uint32, mx.int32])

    each = call(0, slices, _THREADS, (rows, positions, slices, 2), mx.float32)
    return each, call(1, 1, 32, (rows, positions), mx.uint32)


def _keys(rows: int, positions: int) -> mx.array:
    return mx.random.split(mx.random.key(7), rows * positions).reshape(rows, positions, 2)


def _check_error(size: int = _CHECKED) -> float:
    """Share of the tokens that are not the reference's, or not the same for a position alone."""
    noisy, keys = mx.array([1, 1, 0, 1], mx.int32), _keys(4, 3)
    wrong = []
    for width in (size, size // 2 + 1):  # one of them may be odd
        random = 3 * mx.random.normal((3, 3, width), key=mx.random.key(width))
        few = mx.where(mx.arange(width) % (width // 24) == 7, random[:, 1], -mx.inf)
        z = mx.stack([random[:, 0], few, mx.round(random[:, 2])], axis=1)
        found = draw(z, keys, noisy)
        alone = [draw(z[row : row + 1, 1:2], keys[row : row + 2, 1:2], noisy[row : row + 2]) for row in (0, 2)]
        wrong += [found != draw_reference(z, keys, noisy), found[::2, 1:2] != mx.concatenate(alone)]
    return float(np.concatenate([np.array(each).reshape(-1) for each in wrong]).mean())


def _gain() -> float:
    """Of drafts drawn one by one."""
    given = [3 * mx.random.normal((1, 1, _CHECKED), key=mx.random.key(seed)) for seed in range(4)]
    keys, noisy = _keys(2, 1), mx.array([1] * 4, mx.int32)
    mx.eval(given, keys, noisy)
    return speed_over(
        lambda: [draw_reference(z, keys, noisy) for z in given],
        lambda: [draw(z, keys, noisy) for z in given],
    )


# Noise is equal to the last bit on one device, so tokens are.
CHECK = SelfCheck("draw", _check_error, most=0.0, gain=_gain)
