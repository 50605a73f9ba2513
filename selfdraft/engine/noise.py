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

from ..kernels import noise_keys
from ..kernels.draw import gumbel_reference
from ..kernels.small_arrays import fresh, numbers

__all__ = ["Stream", "addresses", "gumbel", "stream"]

Stream = tuple[int, int]


def stream(seed: int | None, choice: int) -> Stream:
    """The stream of a request: of (seed, choice), or a fresh one without a seed."""
    name = f"{seed}/{choice}".encode()
    digest = os.urandom(8) if seed is None else hashlib.blake2b(name, digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def addresses(
    streams: Sequence[Stream], counters: Sequence[int], depth: int, shift: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Where a cycle's noise comes from.

    Args:
        shift: int32 [B], added to the counters.

    Returns:
        Threefry keys [B, depth + 1, 2], of row b at counters[b] + shift[b], and so on, and uniforms in [0, 1), one a
        draft [B, depth], independent of the Gumbel noise.
    """
    words = numbers(tuple(word for stream in streams for word in stream), mx.uint32)
    starts = fresh([counter & 0xFFFFFFFF for counter in counters], mx.uint32)
    make = noise_keys.noise_keys if noise_keys.CHECK.passed else noise_keys.noise_keys_reference
    return make(words, starts, numbers((0,) * len(streams)) if shift is None else shift, depth)


def gumbel(given: mx.array, vocab_size: int) -> mx.array:
    """Standard Gumbel noise [B, count, vocab_size] of keys [B, count, 2]."""
    return gumbel_reference(given.reshape(-1, 2), vocab_size).reshape(*given.shape[:2], vocab_size)
