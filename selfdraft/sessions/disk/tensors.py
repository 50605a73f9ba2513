"""Arrays as files of tensors (safetensors), each of a bounded size, and back. Knows bytes, no files and no records.

Bytes are taken from the arrays where they lie: nothing is computed, so this is for any thread, and nothing is copied,
so that no thread is kept from running for long.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .folder import Buffer

__all__ = ["Unit", "join", "split"]

_DTYPES = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.float32: "F32",
    mx.uint64: "U64",
    mx.int64: "I64",
}

_FROM_NAME = {name: dtype for dtype, name in _DTYPES.items()}

_HEADER = 128  # at most so many bytes of a header are about one tensor, beside its name and shape


class _Piece(NamedTuple):
    """An array, or some of its elements in a row."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    @property
    def size(self) -> int:
        """Bytes of a file that it takes, at most."""
        return len(self.data) + len(json.dumps([self.name, self.shape])) + _HEADER


class Unit(NamedTuple):
    """The bytes of one file."""

    content: list[Buffer]

    @property
    def size(self) -> int:
        """How many."""
        return sum(len(chunk) for chunk in self.content)


def split(arrays: Mapping[str, mx.array], most: int) -> tuple[list[Unit], dict[str, tuple[int, ...]]]:
    """Lay evaluated arrays out in files.

    Args:
        most: bytes of a file; an array that is larger is cut.

    Returns:
        The files, and the shapes of the arrays that were cut: `join` wants them.
    """
    units: list[Unit] = []
    cut: dict[str, tuple[int, ...]] = {}
    pieces: list[_Piece] = []
    room = most - _HEADER
    for name, array in sorted(arrays.items()):
        parts = list(_pieces(name, array, most - _HEADER))
        if len(parts) > 1:
            cut[name] = array.shape
        for piece in parts:
            if piece.size > room:
                units.append(_unit(pieces))
                pieces, room = [], most - _HEADER
            pieces.append(piece)
            room -= piece.size
    if pieces:
        units.append(_unit(pieces))
    return units, cut


def join(files: Iterable[bytes], cut: Mapping[str, tuple[int, ...]]) -> dict[str, mx.array]:
    """The arrays that `split` laid out.

    Raises:
        ValueError, KeyError, TypeError: it did not.
    """
    arrays: dict[str, mx.array] = {}
    for content in files:
        arrays |= _loaded(content)
    for name, shape in cut.items():
        parts: list[mx.array] = []
        while (part := arrays.pop(_part(name, len(parts)), None)) is not None:
            parts.append(part)
        arrays[name] = mx.concatenate(parts).reshape(shape)
    mx.eval(list(arrays.values()))
    return arrays


def _loaded(content: bytes) -> dict[str, mx.array]:
    """Arrays of a file. Not by `mx.load`: what it has read from memory now and then aborts the process at its end."""
    start = 8 + int.from_bytes(content[:8], "little")
    arrays = {}
    for name, about in json.loads(content[8:start]).items():
        begin, end = about["data_offsets"]
        raw = mx.array(np.frombuffer(content, dtype=np.uint8, count=end - begin, offset=start + begin))
        arrays[name] = raw.view(_FROM_NAME[about["dtype"]]).reshape(about["shape"])
    mx.eval(list(arrays.values()))
    return arrays


def _pieces(name: str, array: mx.array, most: int) -> Iterator[_Piece]:
    """An array, whole if it fits."""
    dtype = _DTYPES[array.dtype]
    buffer: Any = array
    if not memoryview(buffer).c_contiguous:
        buffer = memoryview(buffer).tobytes()
    data = np.frombuffer(buffer, dtype=np.uint8)
    whole = _Piece(name, dtype, array.shape, data)
    if whole.size <= most:
        yield whole
        return
    longest = len(_part(name, len(data))) + 32
    step = (most - _HEADER - longest) // array.itemsize * array.itemsize
    if step <= 0:
        raise ValueError(f"a file of {most} bytes has no room for a piece of {name}")
    for index, start in enumerate(range(0, len(data), step)):
        piece = data[start : start + step]
        yield _Piece(_part(name, index), dtype, (len(piece) // array.itemsize,), piece)


def _part(name: str, index: int) -> str:
    return f"{name}@{index}"


def _unit(pieces: list[_Piece]) -> Unit:
    header: dict[str, object] = {}
    start = 0
    for piece in pieces:
        end = start + len(piece.data)
        header[piece.name] = {"dtype": piece.dtype, "shape": piece.shape, "data_offsets": (start, end)}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return Unit([len(text).to_bytes(8, "little") + text, *(piece.data.data for piece in pieces)])
