"""A model of attention layers, mlx-lm's or alike, with MTP modules: what families have in common. Knows no family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..state import Captured, KeyValueShape, RowState, StateShape
from .draft_projection import Projecting
from .mtp_modules import ModuleArgs, MTPModules, RunLayer
from .row_cache import RowCache, run_layer

__all__ = ["RECURRENT_DEPTH", "Shape", "Transformer", "Trunk"]

# A single module chained: nothing in the checkpoint bounds the depth. Past 8 no published head pays.
RECURRENT_DEPTH = 8


@dataclass(frozen=True)
class Shape:
    """What the engine asks of a model's sizes.

    Attributes:
        vocab_size, context_length: see `Model`.
        heads: queries of a token, at most.
        inner: numbers that an MLP, or all experts of a token, hold of it at their widest.
        layers: what each layer of the trunk keeps of a position.
        modules: what each MTP module keeps; empty without a head.
        max_depth: with a head. One module may be chained; of several, each drafts one token.
        tied: whether the embedding is the output projection.
        expanded: numbers that attention makes of each position it sees, where it keeps fewer.
    """

    vocab_size: int
    context_length: int
    heads: int
    inner: int
    layers: tuple[KeyValueShape, ...]
    modules: tuple[KeyValueShape, ...] = ()
    max_depth: int = 0
    tied: bool = False
    expanded: int = 0


class Trunk(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, embedding: nn.Module, layers: Sequence[nn.Module], norm: nn.Module) -> None:
        super().__init__()
        self.embed_tokens = embedding
        self.layers = list(layers)
        self.norm = norm


class Transformer(Projecting, nn.Module):
    """Implements `selfdraft.models.Model`.

    Args:
        trunk: its layers are what `run` takes.
        head: how the MTP modules are wired, and the decoder layer of each; or a head that is none, which is asked to
            `draft` as they are; None without a head.
        run: runs a layer of the trunk.
        head_before_norm: whether the head takes the trunk's hidden before the final norm.
    """

    def __init__(
        self,
        shape: Shape,
        trunk: Trunk,
        head: tuple[ModuleArgs, Sequence[nn.Module]] | nn.Module | None,
        *,
        run: RunLayer = run_layer,
        head_before_norm: bool = False,
    ) -> None:
        super().__init__()
        self.model = trunk
        size: int = trunk.embed_tokens.weight.shape[1]
        if not shape.tied:
            self.lm_head = nn.Linear(size, shape.vocab_size, bias=False)
        if head is not None:
            self.mtp = MTPModules(*head) if isinstance(head, tuple) else head
        self.shape = shape
        self.vocab_size, self.context_length = shape.vocab_size, shape.context_length
        self.max_depth = shape.max_depth if head is not None else 0
        self._run, self.head_before_norm = run, head_before_norm

    def new_state(self) -> RowState:
        return RowState(self._state_shape())

    def row_bytes(self, tokens: int) -> int:
        return self._state_shape().row_bytes(tokens, self.max_depth)

    def working_bytes(self, tokens: int, length: int) -> int:
        size: int = self.model.norm.weight.dtype.size
        hidden: int = self.model.norm.weight.shape[0]
        # Residual, norm, output, an MLP's three; scores of all heads and a mask, as measured for Qwen3.5 (docs/log.md).
        scores = tokens * length * (5 * size * self.shape.heads // 4 + 4)
        return size * (tokens * (4 * hidden + 3 * self.shape.inner) + length * self.shape.expanded) + scores

    def _state_shape(self) -> StateShape:
        dtype: mx.Dtype = self.model.norm.weight.dtype
        modules = [replace(module, behind=place) for place, module in enumerate(self.shape.modules)]
        return StateShape(self.shape.layers, tuple(modules) if self.max_depth else (), dtype)

    def forward(self, tokens: mx.array, rows: Sequence[RowState], *, keep_steps: bool) -> tuple[mx.array, Captured]:
        x = self.model.embed_tokens(tokens)
        for index, layer in enumerate(self.model.layers):
            x = self._run(layer, x, [RowCache(row.attention[index], row.length) for row in rows])
        return x if self.head_before_norm else self.model.norm(x), Captured()

    def output_layer(self) -> Any:
        return self.model.embed_tokens if self.shape.tied else self.lm_head

    def draft_layers(self) -> Sequence[Any]:
        if self.max_depth and isinstance(self.mtp, MTPModules) and "output" in self.mtp.at(0):
            return [module.output for module in self.mtp.layers]
        return super().draft_layers()

    def logits(self, hidden: mx.array) -> mx.array:
        return super().logits(self.model.norm(hidden) if self.head_before_norm else hidden)

    def draft(
        self, tokens: mx.array, hidden: mx.array, rows: Sequence[RowState], offsets: Sequence[int], step: int = 0
    ) -> mx.array:
        out: mx.array = self.mtp.draft(self.model.embed_tokens(tokens), hidden, rows, offsets, step)
        return out

    def draft_logits(self, hidden: mx.array, step: int = 0, *, whole: bool = False) -> mx.array:
        return super().draft_logits(self.mtp.at(step).before_projection(hidden), step, whole=whole)
