"""What a checkpoint is, and what could be built of it here. Reads headers alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from ..memory import free_memory
from ..models.checkpoint import classify
from .plan import plan
from .recipe import NAMED, Recipe

__all__ = ["probe"]


def probe(source: Path, target: Path | None = None) -> dict[str, Any]:
    """Everything `selfdraft forge probe` says, for JSON.

    Args:
        target: where a package would lie; by default beside the current folder.

    Raises:
        CheckpointError: the source cannot be used, and why.
    """
    checkpoint = classify(source)
    head = checkpoint.head
    disk = shutil.disk_usage(next(path for path in ((target or Path.cwd()) / "x").parents if path.exists())).free
    recipes = {}
    for name in NAMED:
        wanted = plan(checkpoint, Recipe.named(name))
        recipes[name] = {
            "bytes": wanted.nbytes,
            "fits_disk": wanted.nbytes < disk,
            "fits_memory": wanted.nbytes < free_memory(),
            "largest_tensor": wanted.largest,
        }
    return {
        "schema_version": 1,
        "folder": str(source),
        "model_type": checkpoint.model_type,
        "verified": checkpoint.architecture.verified,
        "layout": checkpoint.layout,
        "quantised": checkpoint.quantised,
        "bytes": sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        "head": {"source": head.source, "tensors": head.tensors, "usable": not head.reason, "reason": head.reason},
        "norms": {"trunk": checkpoint.norms, "head": head.norms},
        "notes": checkpoint.notes,
        "disk_free": disk,
        "memory_free": free_memory(),
        "recipes": recipes,
    }
