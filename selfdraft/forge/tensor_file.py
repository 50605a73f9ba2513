"""Safetensors files, read and written a tensor at a time, so that none is in memory as a whole.

Format: eight bytes with the header's length, the header as JSON, the tensors' bytes
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError
from ..models.strict_json import parse

__all__ = ["Entry", "TensorWriter", "bytes_of", "entries", "stored_bytes"]

_MOST_HEADER = 100_000_000  # as the format's own readers have it
_PIECE = 2**24
_NAMES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.uint8: "U8",
    mx.int64: "I64",
    mx.bool_: "BOOL",
}


@dataclass(frozen=True)
class Entry:
    """A tensor of a file.

    Attributes:
        dtype: as the format names it.
        start, nbytes: where its bytes lie in the file; of one that is not written yet, start means nothing.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    start: int = 0

    @staticmethod
    def like(name: str, dtype: mx.Dtype, shape: Sequence[int]) -> Entry:
        """Of an array that is to be written."""
        return Entry(name, _NAMES[dtype], tuple(shape), int(np.prod(shape, dtype=np.int64)) * dtype.size)


def entries(path: Path) -> list[Entry]:
    """What a file holds, in the order of its bytes.

    Raises:
        CheckpointError: it is no safetensors file, or shorter than its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = struct.unpack("<Q", head)[0] if len(head := file.read(8)) == 8 else _MOST_HEADER + 1
        if length > min(_MOST_HEADER, size - 8):
            raise CheckpointError(f"{path}: not a safetensors file, or cut off; fetch it again")
        try:
            header: dict[str, Any] = parse(file.read(length))
            found = [_entry(name, fields, 8 + length) for name, fields in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: its header cannot be read ({error}); fetch it again") from error
    found.sort(key=lambda entry: entry.start)
    if found and found[-1].start + found[-1].nbytes > size:
        raise CheckpointError(f"{path}: cut off inside {found[-1].name!r}; fetch it again")
    return found


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


def bytes_of(tensor: mx.array) -> bytes:
    """An array's bytes, in order."""
    if tensor.dtype == mx.bfloat16:  # which numpy lacks
        tensor = tensor.view(mx.uint16)
    return np.ascontiguousarray(np.array(tensor)).tobytes()


class TensorWriter:
    """Writes a file whose tensors are known by name, dtype and shape beforehand, one after the other.

    The file appears under its name when it is complete and on disk; a part of one is never left there.
    """

    def __init__(self, path: Path, tensors: Sequence[Entry], metadata: Mapping[str, str]) -> None:
        self._path, self._part = path, path.with_name(f"{path.name}.part")
        self._left = list(tensors)
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        end = 0
        for entry in tensors:
            header[entry.name] = {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "data_offsets": [end, end + entry.nbytes],
            }
            end += entry.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file = self._part.open("wb")
        self._file.write(struct.pack("<Q", len(text)) + text)

    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        """The bytes of the next tensor."""
        entry = self._left.pop(0)
        written = sum(self._file.write(piece) for piece in pieces)
        if (name, written) != (entry.name, entry.nbytes):
            raise AssertionError(f"{entry.name} has {entry.nbytes} bytes, not {written} of {name}")

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        if kind is None:
            assert not self._left, f"{self._left[0].name} was not written"
            os.replace(self._part, self._path)
        else:
            self._part.unlink(missing_ok=True)


def _entry(name: str, fields: Mapping[str, Any], begin: int) -> Entry:
    start, end = fields["data_offsets"]
    if not 0 <= start <= end:
        raise ValueError(f"{name!r} lies at {start}..{end}")
    return Entry(name, fields["dtype"], tuple(fields["shape"]), end - start, begin + start)
