"""Random numbers by address: every draw has a key made of who asks and where.

A row has a 64-bit stream key. Gumbel noise at a counter is a function of (stream, counter, token id), so a seeded row,
whose stream is made of (seed, choice) and whose counter is the emitted index, sees the same noise at a position
whatever was drafted before. Rejection sampling must never see a number twice, so an unseeded row's counters only go up.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

import mlx.core as mx

from ..kernels.draw import gumbel_reference
from ..kernels.small_arrays import fresh, numbers

__all__ = ["Stream", "gumbel", "keys", "stream", "uniform"]

Stream = tuple[int, int]

_UNIFORM = 0x5BD1E995  # separates uniforms from Gumbel noise at the same counter


def stream(seed: int | None, choice: int) -> Stream:
    """The stream of a request: of (seed, choice), or a fresh one without a seed."""
    name = f"{seed}/{choice}".encode()
    digest = os.urandom(8) if seed is None else hashlib.blake2b(name, digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def keys(
    streams: Sequence[Stream], counters: Sequence[int], count: int, shift: mx.array | None = None, purpose: int = 0
) -> mx.array:
    """Threefry keys [B, count, 2]: row b's at counters[b] + shift[b], and so on; `shift` is [B]."""
    high = numbers(tuple(first ^ purpose for first, _ in streams), mx.uint32)[:, None]
    start = [second + counter & 0xFFFFFFFF for (_, second), counter in zip(streams, counters, strict=True)]
    low = fresh(start, mx.uint32)[:, None] + numbers(tuple(range(count)), mx.uint32)  # modulo 2^32
    if shift is not None:
        low = low + shift.astype(mx.uint32)[:, None]
    return mx.stack([mx.broadcast_to(high, low.shape), low], axis=-1)


def gumbel(given: mx.array, vocab_size: int) -> mx.array:
    """Standard Gumbel noise [B, count, vocab_size] of keys [B, count, 2]."""
    return gumbel_reference(given.reshape(-1, 2), vocab_size).reshape(*given.shape[:2], vocab_size)


def uniform(streams: Sequence[Stream], counters: Sequence[int], count: int, shift: mx.array | None = None) -> mx.array:
    """Uniforms in [0, 1), [B, count], independent of the Gumbel noise."""
    given = keys(streams, counters, 1, shift, _UNIFORM)[:, 0]
    return mx.vmap(lambda key: mx.random.uniform(shape=(count,), key=key))(given)
