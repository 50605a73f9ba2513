"""Arrays of a few numbers, on their way to the device and back. Knows how MLX keeps arrays on CUDA.

There, arrays of up to 8 bytes lie in memory of the host that the device reads directly. A larger one that the host
makes or reads is moved: an allocation, a fault or a copy, 100 to 300 us in all on one H200, which waits inside a cycle.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx

from .portable import backend

__all__ = ["constant", "fresh", "moved", "numbers", "pieces", "read", "readable"]

_PIECE = 2  # numbers of 4 bytes that are not moved
_MOST = 32  # beyond so many numbers one move is cheaper


def fresh(values: Sequence[int], dtype: mx.Dtype = mx.int32) -> mx.array:
    """A flat array of numbers of 4 bytes."""
    if backend() != "cuda" or not _PIECE < len(values) <= _MOST:
        return mx.array(list(values), dtype=dtype)
    return mx.concatenate([mx.array(list(values[at : at + _PIECE]), dtype) for at in range(0, len(values), _PIECE)])


@lru_cache(maxsize=4096)
def numbers(values: tuple[int, ...], dtype: mx.Dtype = mx.int32) -> mx.array:
    """The same, made once and `moved`: for numbers that come again."""
    array = moved(fresh(values, dtype))
    mx.async_eval(array)  # other threads may use it
    return array


def moved(array: mx.array) -> mx.array:
    """A flat array in memory of the device: from the host's, each threadgroup would fetch it over the bus anew."""
    return mx.pad(array, (0, 2 * _PIECE))[: array.size] if backend() == "cuda" else array


@lru_cache
def constant(value: float) -> mx.array:
    """[1] fp32, `moved`."""
    array = moved(mx.array([value], mx.float32))
    mx.eval(array)
    return array


def readable(array: mx.array) -> list[mx.array]:
    """A flat array of 4-byte numbers as parts that `read` gets without a move."""
    if pieces(array.size)[0] == 1:
        return [array]
    places = range(array.size)
    return [mx.take(array, numbers(tuple(places[at : at + _PIECE]))) for at in places[::_PIECE]]


def pieces(size: int) -> tuple[int, int]:
    """In how many parts a kernel is to put out so many numbers, to be `read` without a move, and of what size: the last
    ones may be too many, for each number of parts is a text of its own."""
    if backend() != "cuda" or not _PIECE < size <= _MOST:
        return 1, size
    few = 4
    return few if size <= few * _PIECE else _MOST // _PIECE, _PIECE


def read(parts: Sequence[mx.array]) -> list[int]:
    """The numbers of `readable`, once they are evaluated."""
    found: list[Any] = [part.tolist() for part in parts]
    return [value for part in found for value in part]
