"""mlx-lm's decoder layers over rows of ours: each row's keys and values as the cache that such a layer asks for.

A layer's attention runs row by row, each over exactly its own length, so that what a row computes does not hang on its
neighbours; everything else of a layer sees all rows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..state import KeyValues

__all__ = ["RowCache", "attend_by_row", "run_layer"]

Mask = mx.array | str | None


class RowCache:
    """What mlx-lm's attention layers use of a cache: an offset, and a way to put in and take out.

    Args:
        held: the row's buffers of a layer, written at `offset`.
    """

    def __init__(self, held: KeyValues, offset: int) -> None:
        self.offset = offset
        self._held = held

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store [1, heads, T, width]; all that T queries from `offset` on see, [1, heads, S, width]."""
        return self._held.write(self.offset, keys, values)

    def mask(self, tokens: int) -> Mask:
        """For so many queries, in a form that `mx.fast.scaled_dot_product_attention` takes: None, "causal", or bool
        [T, S]."""
        window = self._held.window
        if window is None:
            return "causal" if tokens > 1 else None
        if tokens == 1:
            return None
        queries = mx.arange(self.offset, self.offset + tokens)[:, None]
        keys = mx.arange(self._held.begin(self.offset), self.offset + tokens)[None]
        return (keys <= queries) & (keys > queries - window)


def attend_by_row(
    attention: Callable[[mx.array, Mask, Any], mx.array], x: mx.array, caches: Sequence[RowCache]
) -> mx.array:
    """attention(x, mask, cache) of each row of x [B, T, H]."""
    tokens = x.shape[1]
    if len(caches) == 1:
        return attention(x, caches[0].mask(tokens), caches[0])
    rows = [attention(x[i : i + 1], cache.mask(tokens), cache) for i, cache in enumerate(caches)]
    return mx.concatenate(rows, axis=0)


def run_layer(layer: Any, x: mx.array, caches: Sequence[RowCache]) -> mx.array:
    """A pre-norm layer as most of mlx-lm's are: x [B, T, H] + `self_attn`, then + `mlp`, each behind its norm."""
    x = x + attend_by_row(layer.self_attn, layer.input_layernorm(x), caches)
    out: mx.array = x + layer.mlp(layer.post_attention_layernorm(x))
    return out
