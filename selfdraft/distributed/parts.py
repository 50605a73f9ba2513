"""A rank's part of a model, the same way on every rank. Knows no messages."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from ..memory import release_buffers
from ..models.checkpoint import Checkpoint
from ..models.loader import LoadedModel, build_model
from .group import Group

__all__ = ["built_part", "why_no_head"]


def built_part(
    checkpoint: Checkpoint, dtype: mx.Dtype | None, group: Group, progress: Callable[[int, int], None] | None = None
) -> LoadedModel:
    """Read this rank's part of the weights.

    Raises:
        CheckpointError: the ranks cannot share this model.
    """
    with_head = not why_no_head(checkpoint)
    loaded = build_model(checkpoint, with_head=with_head, dtype=dtype, progress=progress, ranks=group)
    release_buffers()  # whole tensors were in them
    return loaded


def why_no_head(checkpoint: Checkpoint) -> str:
    """Why a model runs without its head in a group; "" if it has it."""
    if not checkpoint.head.reason and checkpoint.head.source == "separate":
        return "a head in a file of its own is not used by several ranks: whether it fits is not checked there"
    return checkpoint.head.reason
