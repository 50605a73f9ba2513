"""The output projection of drafts alone, onto fewer tokens than the model knows. Knows rows of a weight, no rules.

A draft is a guess that the trunk checks, so its law q may leave tokens out: with q renormalised over those that stay,
and 0 for the others, every rejection rule is exact, and what is left out is emitted by corrections and bonuses alone
(FR-Spec, arXiv 2502.14856, drafts so). What it costs is acceptance; what it saves is most of a large matrix a draft.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

if TYPE_CHECKING:
    from .loader import LoadedModel

__all__ = ["DraftProjection", "Projecting", "draft_fewer", "draft_tokens"]

LEAST = 256  # ids, so that something is left of S where end tokens are withheld


def draft_fewer(loaded: LoadedModel, size: int, always: Collection[int]) -> LoadedModel:
    """Let a model draft from fewer tokens; what that holds in memory is counted with the weights.

    Args:
        size: how many of the first ids, at least 256; 0 for all tokens.
        always: see `draft_tokens`.
    """
    model = loaded.model
    if not size or not model.max_depth or max(size, LEAST) >= model.vocab_size:
        return loaded
    held = model.draft_only(draft_tokens(max(size, LEAST), model.vocab_size, always))
    return replace(loaded, nbytes=loaded.nbytes + held)


def draft_tokens(size: int, vocab_size: int, always: Collection[int]) -> list[int]:
    """The tokens to draft, in order: the first `size` ids, and `always`.

    A BPE gives ids in the order in which they were learned, the most frequent first. Of the 151,643 of one Qwen
    vocabulary, the first 65,536 are 98% of English text and code, but 71% of Chinese and 75% of Russian.

    Args:
        always: end tokens and markers of the template, which stand at the end of a vocabulary and are frequent all the
            same. Ids that the model lacks are left out.
    """
    return sorted({*range(min(size, vocab_size)), *(token for token in always if 0 <= token < vocab_size)})


class Projecting:
    """The projections of a `Model`."""

    _few_drafts: _Projections | None = None

    @abstractmethod
    def output_layer(self) -> Any:
        """The output projection: a linear layer, or a tied embedding."""

    def draft_layers(self) -> Sequence[Any]:
        """The output projection of each step's drafts; the last is also that of all steps after it."""
        return [self.output_layer()]

    def logits(self, hidden: mx.array) -> mx.array:
        """See `Model.logits`."""
        return _projected(self.output_layer(), hidden)

    def draft_only(self, tokens: Sequence[int] | None) -> int:
        """See `Model.draft_only`."""
        layers = [] if tokens is None else [DraftProjection(layer, tokens) for layer in self.draft_layers()]
        self._few_drafts = _Projections(layers) if layers else None
        return sum(layer.nbytes for layer in layers)

    def draft_logits(self, hidden: mx.array, step: int = 0, *, whole: bool = False) -> mx.array:
        """See `Model.draft_logits`."""
        layers = self.draft_layers() if whole or self._few_drafts is None else self._few_drafts.layers
        return _projected(layers[min(step, len(layers) - 1)], hidden)


@dataclass(frozen=True)
class _Projections:
    """One a step. (MLX takes a module's list for parameters.)"""

    layers: Sequence[DraftProjection]


def _projected(layer: Any, hidden: mx.array) -> mx.array:
    out: mx.array = layer.as_linear(hidden) if hasattr(layer, "as_linear") else layer(hidden)
    return out


class DraftProjection:
    """Logits of some tokens; -inf for all others.

    The tokens' rows are copied out of the layer, so a logit has the bits that the layer gives it wherever a column of
    its product does not depend on the others. Where q is masked further, as by a grammar, nothing of S may be left: the
    caller then drafts from the layer itself.

    Args:
        layer: the output projection [V, H]: a linear layer or a tied embedding, quantised or not.
        tokens: S, in order.

    Attributes:
        nbytes: of the copy.
    """

    def __init__(self, layer: nn.Module, tokens: Sequence[int]) -> None:
        self._ids = mx.array(list(tokens), dtype=mx.uint32)
        rows: Any = type(layer).__new__(type(layer))
        nn.Module.__init__(rows)
        # Whatever its format, each array of such a layer has a row for every token.
        dict.update(rows, {name: mx.contiguous(array[self._ids]) for name, array in layer.items()})
        rows.__dict__.update(layer.__dict__)
        self._project = rows.as_linear if hasattr(rows, "as_linear") else rows
        self._vocab_size: int = layer["weight"].shape[0]
        self.nbytes: int = sum(array.nbytes for array in rows.values())
        mx.eval(self._ids, *rows.values())

    def __call__(self, hidden: mx.array) -> mx.array:
        """[B, T, H] -> [B, T, V]."""
        found = self._project(hidden)
        blank = mx.full((*hidden.shape[:-1], self._vocab_size), -mx.inf, dtype=found.dtype)
        return mx.put_along_axis(blank, mx.broadcast_to(self._ids, found.shape), found, axis=-1)
