"""Keys of noise and uniforms for a few positions, in one launch in place of some twenty. Knows no row's address.

Both are MLX's own, bit for bit.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .portable import Call, Kernel, Launch
from .self_check import SelfCheck

__all__ = ["CHECK", "noise_keys", "noise_keys_reference"]

_UNIFORM = 0x5BD1E995  # separates uniforms from the noise at the same counter; below 2^31

_KERNEL = Kernel("noise_keys", ("streams", "counters", "shift"), ("keys", "uniforms"), parts=("threefry",))

_CALLS: dict[tuple[object, ...], Call] = {}


def noise_keys(streams: mx.array, counters: mx.array, shift: mx.array, depth: int) -> tuple[mx.array, mx.array]:
    """Threefry keys at depth + 1 counters from counters + shift on, modulo 2^32, and a uniform a draft. Needs a GPU.

    Args:
        streams: uint32 [2 B], two words a row: one of its keys, and one that the counter is added to.
        counters: uint32 [B].
        shift: int32 [B or more].

    Returns:
        Keys, uint32 [B, depth + 1, 2], and fp32 [B, depth] (1 for depth 0) in [0, 1), independent of the noise.

    Raises:
        ValueError: the kernel does not take these shapes or dtypes.
        RuntimeError: there is no GPU.
    """
    key = streams.shape, counters.shape, shift.shape, streams.dtype, counters.dtype, shift.dtype, depth
    call = _CALLS.get(key)
    if call is None:
        call = _CALLS[key] = _prepared(streams, counters, shift, depth)
    keys, uniforms = call(inputs=[streams, counters, shift])
    return keys, uniforms


def noise_keys_reference(
    streams: mx.array, counters: mx.array, shift: mx.array, depth: int
) -> tuple[mx.array, mx.array]:
    """The same by plain MLX operations, on any device."""
    high, low = streams[::2], streams[1::2] + counters + shift[: counters.size].astype(mx.uint32)
    places = low[:, None] + mx.arange(depth + 1, dtype=mx.uint32)
    keys = mx.stack([mx.broadcast_to(high[:, None], places.shape), places], axis=-1)
    own = mx.stack([high ^ mx.array(_UNIFORM, mx.uint32), low], axis=-1)
    return keys, mx.vmap(lambda key: mx.random.uniform(shape=(max(depth, 1),), key=key))(own)


def _prepared(streams: mx.array, counters: mx.array, shift: mx.array, depth: int) -> Call:
    u, rows = mx.uint32, counters.size
    if (
        (streams.dtype, counters.dtype, shift.dtype) != (u, u, mx.int32)
        or (streams.ndim, counters.ndim, shift.ndim) != (1, 1, 1)
        or streams.size != 2 * rows
        or not 0 < rows <= shift.size
        or depth < 0
    ):
        given = ", ".join(f"{x.dtype} {x.shape}" for x in (streams, counters, shift))
        raise ValueError(f"noise_keys takes uint32 [2 B] and [B], int32 [B or more], not {given} (depth {depth})")
    shapes = [(rows, depth + 1, 2), (rows, max(depth, 1))]
    launch = Launch({"UNIFORM": _UNIFORM}, (depth + 1, 1, rows), 32, shapes, [u, mx.float32])
    return _KERNEL.prepared(launch, [u, u, mx.int32])


def _check_error() -> float:
    """Share of the keys and uniforms that are not the reference's."""
    streams = mx.random.split(mx.random.key(7), 4).flatten()
    counters, shift = mx.array([0, 5, 2**32 - 2, 9], mx.uint32), mx.array([0, 3, 4, 1, 8], mx.int32)
    wrong = []
    for depth in (0, 1, 3, 4):
        given = streams, counters, shift, depth
        wrong += [one != other for one, other in zip(noise_keys(*given), noise_keys_reference(*given), strict=True)]
    return float(np.concatenate([np.array(each).reshape(-1) for each in wrong]).mean())


# They are equal to the last bit.
CHECK = SelfCheck("noise_keys", _check_error, most=0.0)
