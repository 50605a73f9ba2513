"""What a checkpoint is, and what could be built of it here. Reads headers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..models.checkpoint import Checkpoint, classify
from .plan import plan
from .recipe import NAMED, Recipe
from .room import room

__all__ = ["probe"]


def probe(source: Path, place: Path | None = None) -> dict[str, Any]:
    """Everything `selfdraft forge probe` says, for JSON.

    Args:
        place: folder in which a package would lie; by default the current one.

    Raises:
        CheckpointError: the source cannot be used, and why.
    """
    checkpoint = classify(source)
    head = checkpoint.head
    found = {name: _recipe(checkpoint, Recipe.named(name), place or Path.cwd()) for name in NAMED}
    notes = list(checkpoint.notes)
    if checkpoint.quantised:
        notes.append("layers that are stored quantised stay as they are, whatever the recipe")
    return {
        "schema_version": 1,
        "folder": str(source),
        "model_type": checkpoint.model_type,
        "verified": checkpoint.architecture.verified,
        "layout": checkpoint.layout,
        "quantised": checkpoint.quantised,
        "dtype": str(checkpoint.stored_dtype).removeprefix("mlx.core."),
        "bytes": sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        "head": {"source": head.source, "tensors": head.tensors, "usable": not head.reason, "reason": head.reason},
        "norms": {"trunk": checkpoint.norms, "head": head.norms},
        "notes": notes,
        "recipes": found,
    }


def _recipe(checkpoint: Checkpoint, recipe: Recipe, place: Path) -> dict[str, Any]:
    """What a build by a recipe takes, and whether it can be had."""
    wanted = plan(checkpoint, recipe)
    needed = room(wanted, place)
    return {
        "bytes": wanted.nbytes,
        "disk_needed": needed.disk_needed,
        "fits_disk": needed.fits_disk,
        "memory_needed": needed.memory_needed,
        "fits_memory": needed.fits_memory,
    }
