"""Safetensors files that lie of themselves. Knows the format, no reader of it."""

from __future__ import annotations

import json
import struct
from typing import Any

__all__ = ["LIES"]


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(**fields: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **fields}}


LIES = {
    "nothing": b"",
    "no length": b"1234",
    "a length beyond the file": raw(tensor(), bytes(8), length=10**6),
    "a length beyond reason": raw(tensor(), bytes(8), length=2**63),
    "no JSON": raw(b"not json"),
    "no object": raw([1, 2]),
    "a tensor that is no object": raw({"a": [1]}),
    "a name twice": raw(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{}}', bytes(8)),
    "no offsets": raw({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "offsets reversed": raw(tensor(data_offsets=[8, 0]), bytes(8)),
    "negative offsets": raw(tensor(data_offsets=[-8, 0]), bytes(8)),
    "one offset": raw(tensor(data_offsets=[0]), bytes(8)),
    "offsets as text": raw(tensor(data_offsets=["0", "8"]), bytes(8)),
    "a shape that is a number": raw(tensor(shape=2), bytes(8)),
    "data cut off": raw(tensor(), bytes(7)),
    "bytes between tensors": raw(
        {**tensor(), "b": {"dtype": "F32", "shape": [1], "data_offsets": [12, 16]}}, bytes(16)
    ),
    "tensors over each other": raw({**tensor(), "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)),
    "an overlap and a gap of one size": raw(
        {
            **tensor(),
            "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
            "c": {"dtype": "F32", "shape": [1], "data_offsets": [12, 16]},
        },
        bytes(16),
    ),
    "a shape of other bytes": raw(tensor(shape=[3]), bytes(8)),
    "a negative shape": raw(tensor(shape=[-2]), bytes(8)),
    "bytes behind the last tensor": raw(tensor(), bytes(12)),
    "the second tensor first": raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)),
}
