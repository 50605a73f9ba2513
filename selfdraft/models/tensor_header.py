"""The header of a safetensors file: which tensors it holds, and where their bytes lie. Reads no weights.

Format: eight bytes with the header's length, the header as JSON, the tensors' bytes, without gaps and each once
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .strict_json import parse

__all__ = ["Entry", "entries"]

_MOST_HEADER = 100_000_000  # as the format's own readers have it

# Bytes of an element. Of other formats, such as those of less than a byte, sizes are not checked.
_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
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


def entries(path: Path) -> list[Entry]:
    """What a file holds, in the order of its bytes.

    Raises:
        CheckpointError: it is no safetensors file, lies of itself, or is not as long as its header says.
    """
    size = path.stat().st_size
    try:
        header, end = _header(path, size)
        found = [_entry(name, fields, end) for name, fields in header.items() if name != "__metadata__"]
        found.sort(key=lambda entry: (entry.start, entry.nbytes))
        for entry in found:
            if entry.start != end:
                raise ValueError(f"{entry.name!r} does not begin where the tensor before it ends")
            end += entry.nbytes
        if end != size:
            raise ValueError(f"it has {size:,} bytes, and its header says {end:,}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error}); fetch it again") from error
    return found


def _header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    """Tensors by name, and where their bytes begin."""
    with path.open("rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else _MOST_HEADER + 1
        if length > min(_MOST_HEADER, size - 8):
            raise ValueError("it has no header, or is cut off in it")
        header = parse(file.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"its header is {type(header).__name__}, not a JSON object")
    return header, 8 + length


def _entry(name: str, fields: Mapping[str, Any], begin: int) -> Entry:
    start, end = fields["data_offsets"]
    dtype, shape = fields["dtype"], tuple(fields["shape"])
    if not all(type(number) is int and number >= 0 for number in (start, end, *shape)) or end < start:
        raise ValueError(f"{name!r} lies at {start}..{end} with shape {list(shape)}")
    if dtype in _BYTES and math.prod(shape) * _BYTES[dtype] != end - start:
        raise ValueError(f"{name!r}, {dtype} {list(shape)}, has {end - start:,} bytes")
    return Entry(name, dtype, shape, end - start, begin + start)
