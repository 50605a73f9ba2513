"""A family's tiny checkpoint, changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.reference.families import Family

__all__ = ["changed", "stored"]


def stored(folder: Path) -> dict[str, mx.array]:
    """The tensors of a checkpoint of one file."""
    found = mx.load(str(folder / "model.safetensors"))
    assert isinstance(found, dict)
    return found


def changed(folder: Path, family: Family, weights: dict[str, mx.array] | None = None, **config: Any) -> Path:
    """A family's checkpoint with other tensors or fields; a field that is None is left out."""
    made = {name: mx.array(values) for name, values in family.weights().items()} if weights is None else weights
    mx.save_safetensors(str(folder / "model.safetensors"), made, {"format": "pt"})
    kept = {name: value for name, value in {**family.config, **config}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder
