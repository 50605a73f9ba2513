"""Tensor parallelism (arXiv 1909.08053): one rank's part of a model. Knows names and axes of weights; no processes.

A block takes the whole hidden on every rank. Its first matrices are cut by rows, so that a rank has some of the heads
or of the inner width; its last one by columns, so that what ranks put out has to be summed. Embedding and output
projection are cut by tokens. A part is built as a smaller model of the same family, whose state is a part of the state.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from ..errors import CheckpointError

__all__ = ["Cut", "Part", "Ranks", "Sharding", "even", "head_shares", "install", "part_of", "refuse_uneven"]


class Ranks(Protocol):
    """The processes that hold a model together. Every one calls the same in the same order.

    Attributes:
        rank: of this process, from 0.
        size: how many there are.
    """

    rank: int
    size: int

    def sum(self, x: mx.array) -> mx.array:
        """The sum of what ranks have, in the shape and dtype of x."""

    def gather(self, x: mx.array) -> mx.array:
        """What ranks have, in their order, along the last axis."""


@dataclass(frozen=True)
class Cut:
    """What a rank keeps of a tensor.

    Attributes:
        axis: along which.
        units: equal pieces that the axis is divided into.
        ranges: of units, each from the first to before the last.
    """

    axis: int
    units: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Part:
    """The part of a model that one rank builds.

    Attributes:
        config: the text config of a model of that size.
        cut: parameter name -> what is kept of the whole; None for all of it.
        summed: modules whose output is summed over the ranks, as a regular expression of their whole path.
    """

    config: Mapping[str, Any]
    cut: Callable[[str], Cut | None]
    summed: re.Pattern[str]


# Text config, rank, number of ranks -> that rank's part. Raises CheckpointError where it cannot be divided so.
Sharding = Callable[[Mapping[str, Any], int, int], Part]


def even(axis: int, rank: int, size: int) -> Cut:
    """One of `size` equal pieces."""
    return Cut(axis, size, ((rank, rank + 1),))


def head_shares(heads: int, rank: int, size: int) -> tuple[int, int]:
    """Which key/value heads a rank has: its share, or one that it shares with others where there are more ranks."""
    return (rank * heads // size, max((rank + 1) * heads // size, rank * heads // size + 1))


def refuse_uneven(config: Mapping[str, Any], size: int, *names: str) -> None:
    """Raises CheckpointError if a number in the config is not divided by the number of ranks."""
    for name in names:
        if config[name] % size:
            raise CheckpointError(
                f"{size} ranks cannot share this model: its {name} is {config[name]}, which {size} does not divide; "
                "take fewer ranks"
            )


def part_of(name: str, tensor: mx.array, cut: Cut | None) -> mx.array:
    """What a rank keeps of a tensor, as memory of its own; nothing is evaluated.

    Raises:
        CheckpointError: the tensor, or its quantisation groups, cannot be divided so.
    """
    if cut is None:
        return tensor
    length = tensor.shape[cut.axis]
    if length % cut.units:
        raise CheckpointError(
            f"{name} {list(tensor.shape)} cannot be divided into {cut.units} parts along axis {cut.axis}: "
            "quantisation groups stay whole; take fewer ranks"
        )
    unit = length // cut.units
    kept = [_slice(tensor, cut.axis, first * unit, last * unit) for first, last in cut.ranges]
    return mx.contiguous(kept[0] if len(kept) == 1 else mx.concatenate(kept, axis=cut.axis))


def _slice(tensor: mx.array, axis: int, first: int, last: int) -> mx.array:
    places: list[slice] = [slice(None)] * tensor.ndim
    places[axis] = slice(first, last)
    return tensor[tuple(places)]


class _Summed(nn.Module):
    """A layer of which every rank has some columns. A bias belongs to rank 0 alone, or it would be added by each."""

    def __init__(self, layer: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.part = layer
        self._ranks = ranks
        if ranks.rank and "bias" in layer:
            layer["bias"] = mx.zeros_like(layer["bias"])

    def __call__(self, x: mx.array) -> mx.array:
        return self._ranks.sum(self.part(x))


class _Gathered(nn.Module):
    """An output projection of which every rank has the rows of some tokens."""

    def __init__(self, layer: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.part = layer
        self._ranks = ranks

    def __call__(self, x: mx.array) -> mx.array:
        return self._ranks.gather(self.part(x))


class _SharedEmbedding(nn.Module):
    """An embedding of which every rank has the rows of some tokens."""

    def __init__(self, layer: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.part = layer
        self._ranks = ranks

    def __call__(self, tokens: mx.array) -> mx.array:
        rows = self.part["weight"].shape[0]
        place = tokens.astype(mx.int32) - self._ranks.rank * rows
        found = self.part(mx.clip(place, 0, rows - 1))
        mine = mx.logical_and(place >= 0, place < rows)[..., None]
        return self._ranks.sum(mx.where(mine, found, mx.zeros((), dtype=found.dtype)))

    def as_linear(self, x: mx.array) -> mx.array:
        """The output projection of tied embeddings: [.., H] -> [.., V]."""
        return self._ranks.gather(self.part.as_linear(x))


def install(model: Any, part: Part, ranks: Ranks) -> None:
    """Have a loaded part work with those of the other ranks.

    Args:
        model: implements `Model`, has `model.embed_tokens` and, if not tied, `lm_head`.
    """
    for path, module in list(model.named_modules()):
        if part.summed.fullmatch(path):
            owner, _, name = path.rpartition(".")
            _at(model, owner)[name] = _Summed(module, ranks)
    model.model.embed_tokens = _SharedEmbedding(model.model.embed_tokens, ranks)
    if "lm_head" in model:
        model.lm_head = _Gathered(model.lm_head, ranks)
    model.vocab_size *= ranks.size


def _at(module: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        module = module[int(name)] if isinstance(module, list) else module[name]
    return module
