"""JSON of which there is one reading: a key that stands twice in an object is an error, not the last one's win."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

__all__ = ["parse", "safetensors_header"]

_MOST_HEADER = 100_000_000  # as the format's own readers have it


def parse(text: str | bytes) -> Any:
    """What a JSON text holds.

    Raises:
        ValueError: not JSON, too deep, or a key that stands twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file: tensors by name; and where their bytes begin.

    Raises:
        ValueError: it is no such file, or cut off in the header; see also `parse`.
    """
    with path.open("rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else _MOST_HEADER + 1
        if length > min(_MOST_HEADER, path.stat().st_size - 8):
            raise ValueError("no safetensors header, or cut off in it")
        header = parse(file.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"its header is {type(header).__name__}, not a JSON object")
    return header, 8 + length


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return found
