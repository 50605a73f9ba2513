"""Safetensors files (see `models.tensor_header`), written a tensor at a time: none is in memory as a whole."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import mlx.core as mx

from ..errors import CheckpointError
from ..models.tensor_header import Entry

__all__ = ["TensorWriter", "bytes_of", "entry_of", "stored_bytes"]

_PIECE = 2**24
_NAMES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint64: "U64",
    mx.uint32: "U32",
    mx.uint16: "U16",
    mx.uint8: "U8",
    mx.int64: "I64",
    mx.int32: "I32",
    mx.int16: "I16",
    mx.int8: "I8",
    mx.bool_: "BOOL",
}


def entry_of(name: str, dtype: mx.Dtype, shape: Sequence[int]) -> Entry:
    """Of an array that is to be written."""
    return Entry(name, _NAMES[dtype], tuple(shape), math.prod(shape) * dtype.size)


def stored_bytes(path: Path, entry: Entry) -> Iterator[bytes]:
    """A tensor's bytes as they lie in a file, in pieces."""
    with path.open("rb") as file:
        file.seek(entry.start)
        left = entry.nbytes
        while left:
            piece = file.read(min(left, _PIECE))
            if not piece:
                raise CheckpointError(f"{path}: cut off inside {entry.name!r}; fetch it again")
            left -= len(piece)
            yield piece


def bytes_of(tensor: mx.array) -> memoryview:
    """An array's bytes, in order."""
    flat: Any = mx.contiguous(tensor).reshape(-1).view(mx.uint8)
    return memoryview(flat)


class TensorWriter:
    """Writes a file whose tensors are known by name, dtype and shape beforehand, one after the other.

    The file appears under its name when it is complete and on disk; a part of one is left by a crash alone.
    """

    def __init__(self, path: Path, tensors: Sequence[Entry], metadata: Mapping[str, str]) -> None:
        self._path, self._part = path, path.with_name(f"{path.name}.part")
        self._tensors = tuple(tensors)
        self._metadata = dict(metadata)
        self._done = 0
        self._file: BinaryIO

    def __enter__(self) -> TensorWriter:
        self._file = self._part.open("wb")
        try:
            self._file.write(self._header())
        except BaseException:
            self._drop()
            raise
        return self

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """The bytes of the next tensor."""
        entry = self._tensors[self._done]
        written = sum(self._file.write(piece) for piece in pieces)
        assert (name, written) == (entry.name, entry.nbytes), f"{written} bytes of {name} written as {entry}"
        self._done += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                assert self._done == len(self._tensors), f"{self._tensors[self._done].name} was not written"
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                os.replace(self._part, self._path)
        finally:
            self._drop()

    def _header(self) -> bytes:
        header: dict[str, Any] = {"__metadata__": self._metadata}
        end = 0
        for entry in self._tensors:
            start, end = end, end + entry.nbytes
            header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    def _drop(self) -> None:
        """Let go of what is not complete; nothing if it has its name."""
        try:
            self._file.close()
        finally:
            self._part.unlink(missing_ok=True)
