"""Boundaries of a few bytes, whose arrays follow from their first token, and what a folder takes, measured anew."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from selfdraft.engine import Cut
from selfdraft.sessions.disk.folder import Damaged
from selfdraft.sessions.disk.store import DiskStore, Record, Stored

IDENTITY = "ab" * 32
UNIT = 16384

Arrays = Mapping[str, mx.array]


def opened(root: Path, **given: Any) -> DiskStore:
    """A store with small files, all that it found reconciled."""
    store = DiskStore(
        root,
        given.pop("identity", IDENTITY),
        **{"max_bytes": 2**30, "writes_per_hour": 2**40, "unit": UNIT, **given},
    )
    assert store.flush(30)
    return store


def span(seed: int, size: int = 300) -> Arrays:
    """Arrays of any bits; one of them is cut if `size` is large."""
    bits = np.random.default_rng(seed).integers(0, 2**16, size=(2, 3, size), dtype=np.uint16)
    arrays = {
        "attention.0.keys": mx.array(bits[0]).view(mx.bfloat16),
        "attention.0.values": mx.array(bits[1]).view(mx.float16),
        "empty": mx.zeros((0, 4)),
    }
    mx.eval(arrays)
    return arrays


def moment(seed: int) -> Arrays:
    arrays = {"hidden": mx.array(np.random.default_rng(seed).random((1, 8), dtype=np.float32)), "count": mx.array(seed)}
    mx.eval(arrays)
    return arrays


def offered(
    store: DiskStore, seed: int, parent: Stored | None = None, *, size: int = 300, scope: str = "me", **given: Any
) -> Stored:
    """Offer the boundary of a token."""
    return store.offer(
        **{
            "parent": parent,
            "scope": scope,
            "ids": [seed, size],
            "cuts": (Cut(2, True),),
            "drafts": True,
            "reply": False,
            "span": span(seed, size),
            "moment": moment(seed),
            **given,
        }
    )


def stored(store: DiskStore, seed: int, parent: Stored | None = None, **given: Any) -> Stored:
    """Have it written."""
    made = offered(store, seed, parent, **given)
    assert store.flush(30)
    return made


def bits(arrays: Arrays) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """All there is to compare."""
    return {name: (str(x.dtype), x.shape, memoryview(x).tobytes()) for name, x in arrays.items()}  # type: ignore[arg-type]


def is_right(store: DiskStore, record: Record, handle: Stored) -> bool:
    """Whether a record reads as it was offered; False for a miss."""
    seed, size = record.ids[:2]
    try:
        found = store.read_span(handle), store.read_moment(handle)
    except Damaged:
        assert handle.key is None
        return False
    assert bits(found[0]) == bits(span(seed, size))
    assert bits(found[1]) == bits(moment(seed))
    return True


def right_ones(store: DiskStore) -> set[int]:
    """Seeds of the records that are there and read as they were offered. One that reads otherwise fails."""
    return {int(record.ids[0]) for record, handle in store.records() if is_right(store, record, handle)}


def files(root: Path) -> set[str]:
    """Names of the blobs that are there, and whatever lies among them."""
    return {path.name for path in (root / "v1" / "blobs").rglob("*") if path.is_file()}


def taken(root: Path) -> int:
    """Bytes that a folder takes, all in all."""
    total = 0
    for folder, _, names in os.walk(root):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            try:
                info = os.lstat(path)
            except FileNotFoundError:
                continue
            total += max(info.st_size, info.st_blocks * 512)
    return total


def change(path: Path, edit: Callable[[bytearray], None]) -> None:
    """Edit a file's bytes."""
    content = bytearray(path.read_bytes())
    edit(content)
    path.write_bytes(content)
