"""Embeddings that stand in the place of tokens', and where these tokens are. Knows no pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

__all__ = ["Spliced"]


@dataclass(frozen=True)
class Spliced:
    """What a forward over T tokens of one row takes beside their ids.

    Attributes:
        features: (first place, [n, H]) of each run of tokens whose embeddings are others; may be empty.
        positions: rotary positions int32 [3, T]: time, height, width. For the head, those of the tokens one before.
    """

    features: Sequence[tuple[int, mx.array]]
    positions: mx.array

    def into(self, embeddings: mx.array) -> mx.array:
        """Embeddings [1, T, H] with these in their places."""
        for first, features in self.features:
            put = features[None].astype(embeddings.dtype)
            embeddings = mx.slice_update(embeddings, put, mx.array([first]), (1,))
        return embeddings
