"""Checkpoints to build packages of, and what lies in folders afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from selfdraft.forge.tensor_file import stored_bytes
from selfdraft.models.tensor_header import entries
from tests.reference.families.family import Family
from tests.reference.random_checkpoints import Variant, full_config, make_weights
from tests.reference.random_checkpoints import stored_as as dtype_of
from tests.support.checkpoints import save

__all__ = ["DENSE_HEAD", "listing", "random_checkpoint", "stored_bits", "write_family"]

DENSE_HEAD: dict[str, Any] = {"head": "dense"}  # of which nothing is measured


def listing(folder: Path) -> set[str]:
    """Names of all that lies in a folder, hidden or not."""
    return {path.name for path in folder.iterdir()}


def stored_bits(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of every tensor in a folder's files."""
    return {
        entry.name: (entry.dtype, entry.shape, b"".join(stored_bytes(path, entry)))
        for path in folder.glob("*.safetensors")
        for entry in entries(path)
    }


def random_checkpoint(variant: Variant, folder: Path, *, shards: int = 1) -> Path:
    """A tiny Qwen3.5 checkpoint as Hugging Face stores it."""
    weights = {
        name: mx.array(values).astype(getattr(mx, dtype_of(variant, name)))
        for name, values in make_weights(variant).items()
    }
    return save(folder, weights, full_config(variant), shards=shards)


def write_family(family: Family, folder: Path) -> Path:
    """A tiny checkpoint of another family as Hugging Face stores it."""
    folder.mkdir()
    if family.assistant:
        write_family(family.assistant, folder / "assistant")
    weights = {name: mx.array(values) for name, values in family.weights().items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(family.config))
    return folder
