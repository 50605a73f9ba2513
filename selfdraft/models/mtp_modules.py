"""MTP modules as DeepSeek-V3 introduced them (arXiv 2412.19437, section 2.2), one for all depths or one a depth.

A module projects [norm(embedding); norm(hidden)] to the hidden size, runs a decoder layer of its own, and has a norm
before the output projection. Module j's entry e is (what module j - 1 put out for entry e, t_{e+j+1}), with the trunk's
hidden for j = 0; it predicts t_{e+j+2}. So when true pairs, or a draft, come in at offset o, module j writes the same
tokens at o - j. A checkpoint with one module drafts deeper by chaining it: then it is its own predecessor, and its
entry moves on with each draft. Modules that stand side by side all take the trunk's hidden of entry e: what one hands
on to the next is then the hidden that it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..state import HeadOutputs, RowState
from .row_cache import RowCache, run_layer

__all__ = ["MTPModule", "MTPModules", "ModuleArgs", "module_name"]

RunLayer = Callable[[Any, mx.array, Sequence[RowCache]], mx.array]


@dataclass(frozen=True)
class ModuleArgs:
    """How a family wires its modules.

    Attributes:
        hidden_size: H.
        norm: makes a norm over H.
        embedding_first: whether the projection takes [embedding; hidden] or [hidden; embedding].
        final_norm: whether a module has a norm before the output projection.
        chain_normed: whether what goes on to the next step is behind that norm.
        side_by_side: whether each of several modules takes the trunk's hidden, not what the one before it put out.
        vocab_size: of an output projection of its own; None where the trunk's is shared.
        run_layer: runs the decoder layer.
    """

    hidden_size: int
    norm: Callable[[], nn.Module]
    embedding_first: bool = True
    final_norm: bool = True
    chain_normed: bool = False
    side_by_side: bool = False
    vocab_size: int | None = None
    run_layer: RunLayer = run_layer


class MTPModule(nn.Module):
    """One module: `enorm`, `hnorm`, `eh_proj`, the decoder layer `block`, `norm`, `output`."""

    def __init__(self, args: ModuleArgs, block: nn.Module) -> None:
        super().__init__()
        self._args = args
        self.enorm, self.hnorm = args.norm(), args.norm()
        self.eh_proj = nn.Linear(2 * args.hidden_size, args.hidden_size, bias=False)
        self.block = block
        if args.final_norm:
            self.norm = args.norm()
        if args.vocab_size is not None:
            self.output = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def __call__(self, embeddings: mx.array, hidden: mx.array, caches: Sequence[RowCache]) -> mx.array:
        """[B, W, H] each -> what goes on to the next step, [B, W, H]."""
        parts = [self.enorm(embeddings), self.hnorm(hidden)]
        x = self.eh_proj(mx.concatenate(parts if self._args.embedding_first else parts[::-1], axis=-1))
        x = self._args.run_layer(self.block, x, caches)
        return self._normed(x) if self._args.chain_normed else x

    def before_projection(self, x: mx.array) -> mx.array:
        """What goes on to the next step, as the output projection takes it."""
        return x if self._args.chain_normed else self._normed(x)

    def _normed(self, x: mx.array) -> mx.array:
        out: mx.array = self.norm(x) if self._args.final_norm else x
        return out


class MTPModules(nn.Module):
    """All modules of a head. Each has one buffer of keys and values a row: `RowState.head[j]`."""

    def __init__(self, args: ModuleArgs, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = [MTPModule(args, block) for block in blocks]
        self._side_by_side = args.side_by_side

    def at(self, step: int) -> MTPModule:
        """The module whose output a step of drafting gives."""
        module: MTPModule = self.layers[min(step, len(self.layers) - 1)]
        return module

    def draft(
        self, embeddings: mx.array, hidden: mx.array, rows: Sequence[RowState], offsets: Sequence[int], step: int
    ) -> mx.array:
        """See `Model.draft`; embeddings [B, W, H] of its tokens."""
        if len(self.layers) == 1:
            return self._run(0, embeddings, hidden, rows, offsets)
        places = [offset - step for offset in offsets]
        if step and self._side_by_side:  # what the step before put out is for its logits alone
            hidden = mx.concatenate(_given(step, step, _by_row(hidden), rows, offsets)[0])
        first = self._run(step, embeddings, hidden, rows, places)
        handed_on = [_by_row(hidden if self._side_by_side else first)]
        for module in range(step + 1, len(self.layers)):
            given, places = _given(module, step, handed_on[-1], rows, offsets)
            found = self._run_ragged(module, embeddings, given, rows, places)
            handed_on.append(given if self._side_by_side else found)
        for row, offset, outputs in zip(rows, offsets, zip(*handed_on, strict=True), strict=True):
            if step == 0:
                row.head_outputs = HeadOutputs(offset, outputs[:-1])
            else:
                assert row.head_outputs is not None
                row.head_outputs = replace(row.head_outputs, drafted=outputs)
        return first

    def _run_ragged(
        self,
        module: int,
        embeddings: mx.array,
        hidden: list[mx.array],
        rows: Sequence[RowState],
        places: Sequence[int],
    ) -> list[mx.array]:
        """A module's outputs [1, w, H] for hidden [1, w, H] of each row, and the last w tokens of it."""
        widths = {each.shape[1] for each in hidden}
        if len(widths) == 1 and 0 not in widths:
            return _by_row(self._run(module, embeddings[:, -widths.pop() :], mx.concatenate(hidden), rows, places))
        return [
            self._run(module, embeddings[i : i + 1, -each.shape[1] :], each, rows[i : i + 1], places[i : i + 1])
            if each.shape[1]
            else each
            for i, each in enumerate(hidden)
        ]

    def _run(
        self, module: int, embeddings: mx.array, hidden: mx.array, rows: Sequence[RowState], places: Sequence[int]
    ) -> mx.array:
        caches = [RowCache(row.head[module], place) for row, place in zip(rows, places, strict=True)]
        out: mx.array = self.layers[module](embeddings, hidden, caches)
        return out


def _by_row(x: mx.array) -> list[mx.array]:
    """[B, W, H] as B times [1, W, H]."""
    return [x[i : i + 1] for i in range(x.shape[0])]


def _given(
    module: int, step: int, before: Sequence[mx.array], rows: Sequence[RowState], offsets: Sequence[int]
) -> tuple[list[mx.array], list[int]]:
    """What a module takes for a step's tokens, [1, w, H] of each row, and where its entries begin: one behind those of
    the module before it, which handed on `before`."""
    hidden, places = [], []
    for row, found, offset in zip(rows, before, offsets, strict=True):
        newest = _newest(row, module - 1, step, offset) if offset >= module else None
        earlier = found[:, :-1]
        hidden.append(earlier if newest is None else mx.concatenate([newest, earlier], axis=1))
        places.append(max(offset - module, 0))
    return hidden, places


def _newest(row: RowState, module: int, step: int, offset: int) -> mx.array | None:
    """What a module handed on last, [1, 1, H], before the tokens of a step came in at `offset`."""
    outputs = row.head_outputs
    if outputs is None:
        return None
    if step < 2:
        return outputs.newest(module, offset)
    return outputs.drafted[module - (step - 1)]


def module_name(name: str, layers: int) -> str:
    """Our name of a tensor where modules stand behind the trunk's `layers` layers, as DeepSeek-V3 stores them.

    Returns:
        "" for a module's own copy of the trunk's embedding or output projection, and for rotary tables.
    """
    if name.endswith("rotary_emb.inv_freq"):
        return ""
    parts = name.split(".")
    if parts[:2] != ["model", "layers"] or not parts[2].isdigit() or int(parts[2]) < layers:
        return name
    module, rest = f"mtp.layers.{int(parts[2]) - layers}", ".".join(parts[3:])
    if rest.startswith(("embed_tokens.", "shared_head.head.")):
        return ""
    if rest.startswith(("enorm.", "hnorm.", "eh_proj.")):
        return f"{module}.{rest}"
    inner = rest.removeprefix("shared_head.")
    return f"{module}.{inner}" if inner != rest else f"{module}.block.{rest}"
