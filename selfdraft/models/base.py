"""What the engine asks of a model, and the registry of architectures."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from ..state import Captured, RowState
from .sharding import Sharding

__all__ = [
    "COMPANION",
    "Architecture",
    "Model",
    "architecture",
    "is_companion",
    "looks_ahead",
    "model_types",
    "register",
    "runs_ahead",
]


class Model(Protocol):
    """A trunk with, perhaps, its MTP head.

    Attributes:
        vocab_size: width of the logits.
        context_length: most tokens of a row.
        max_depth: deepest draft the head allows; 0 without a head.
    """

    vocab_size: int
    context_length: int
    max_depth: int

    def new_state(self) -> RowState:
        """State of a row that has seen nothing."""

    def row_bytes(self, tokens: int) -> int:
        """Bytes of state that a row of `tokens` tokens holds, with every step of a deepest cycle kept."""

    def working_bytes(self, tokens: int, length: int) -> int:
        """Bytes beside the state that a forward of `tokens` tokens of one row takes, attending `length` entries: an
        estimate from above, of the layer that takes most."""

    def forward(self, tokens: mx.array, rows: Sequence[RowState], *, keep_steps: bool) -> tuple[mx.array, Captured]:
        """Run the trunk on tokens [B, T], one row of state each, written behind row.length.

        Lengths and recurrent states move only when the returned `Captured` is committed. A model that `runs_ahead`
        takes two arguments more, here and in `draft`: `shift`, int32 [B], which is added to the lengths or offsets on
        the device, and `most`, the largest it can be. One that `takes_pictures` takes `spliced` in both, of one row:
        see `Spliced`.

        Args:
            keep_steps: keep what is needed to commit any prefix (verify), or only all T tokens (prefill).

        Returns:
            Hidden [B, T, H] as `logits` and the head take it: after the final norm, if the family has no other use.
            What was captured.
        """

    def logits(self, hidden: mx.array) -> mx.array:
        """Output projection: [B, T, H] -> [B, T, V] in the model's dtype. Trunk and head share it."""

    def draft_only(self, tokens: Sequence[int] | None) -> int:
        """From now on draft no other tokens than these, in order; None lifts that.

        Returns:
            Bytes held for it.
        """

    def draft_logits(self, hidden: mx.array, step: int = 0, *, whole: bool = False) -> mx.array:
        """Output projection of what `draft` returned for the same step, [B, T, H] -> [B, T, V].

        Args:
            whole: of all tokens; else -inf for those that are not drafted (see `draft_only`).
        """

    def draft(
        self, tokens: mx.array, hidden: mx.array, rows: Sequence[RowState], offsets: Sequence[int], step: int = 0
    ) -> mx.array:
        """Run the head on pairs (hidden, token), written to its history at `offsets`.

        Args:
            tokens: t_i, [B, W].
            hidden: h_{i-1}, [B, W, H]: the trunk's (see `forward`), or what the step before returned.
            offsets: entry of each row's first pair; its rotary position is that plus the row's `rope_delta`.
            step: 0 for true pairs; else how many drafts the token is of, of which it is the newest: W is 1.

        Returns:
            The head's output [B, W, H], or of a width of its own: the next step's `hidden`, and `draft_logits` of it is
            the law of t_{i+1}.
        """


def runs_ahead(model: Model, rows: Sequence[RowState], tokens: int) -> bool:
    """Whether a model takes lengths that are known on the device alone, for forwards of this size."""
    able: Callable[[Sequence[RowState], int], bool] | None = getattr(model, "runs_ahead", None)
    return able is not None and able(rows, tokens)


def looks_ahead(model: Model) -> bool:
    """Whether a forward may be started that is dropped if it turns out not to be wanted."""
    able: bool = getattr(model, "looks_ahead", True)
    return able


@dataclass(frozen=True)
class Architecture:
    """How to build one family of checkpoints.

    Attributes:
        model_types: `model_type` values, of the text part, that it serves.
        build: text config, whether to build the head -> a module that implements `Model`.
        canonical: checkpoint tensor name, text config -> our parameter name, or None for a tensor that is no part of
            the text model (a vision tower), or "" for one that is there a second time. Parameters of the head start
            with "mtp.".
        tower: checkpoint tensor name -> the vision tower's parameter name in mlx-vlm, or None for what is none.
        verified: what trunk and head were compared with, for people; "" where nothing independent could be had.
        assemble: tensors by canonical name, text config -> parameters in MLX layout, such as experts that are stacked.
            Nothing is evaluated in it.
        remarks: tensors by canonical name, text config -> lines a user should read, such as what a conversion left out.
        zero_centred: parameter name -> True for the norms that Hugging Face stores as w, with an effective 1 + w; None
            where the family has none.
        required: parameters no such checkpoint can lack; the first is the embedding.
        fp8_rows: parameter name, text config -> after how many rows blocks of an FP8 weight may begin anew, or None.
        companion: where the head is a checkpoint of its own: what its name has behind the trunk's, as "-assistant".
            Its configuration is then the field `COMPANION` of the text config.
        companion_types: `model_type` values of such a checkpoint.
        sharding: how several ranks share it; None where they cannot.
    """

    model_types: tuple[str, ...]
    build: Callable[[Mapping[str, Any], bool], nn.Module]
    canonical: Callable[[str, Mapping[str, Any]], str | None]
    verified: str
    tower: Callable[[str], str | None] = lambda name: None
    assemble: Callable[[dict[str, mx.array], Mapping[str, Any]], dict[str, mx.array]] = lambda tensors, _: tensors
    remarks: Callable[[Mapping[str, mx.array], Mapping[str, Any]], list[str]] = lambda *_: []
    zero_centred: Callable[[str], bool] | None = None
    required: tuple[str, ...] = ("model.embed_tokens.weight",)
    fp8_rows: Callable[[str, Mapping[str, Any]], int | None] = lambda name, config: None
    companion: str = ""
    companion_types: tuple[str, ...] = ()
    sharding: Sharding | None = None


# Field of a text config: the configuration of the checkpoint that holds the head.
COMPANION = "companion_config"

_REGISTRY: dict[str, Architecture] = {}


def register(architecture: Architecture) -> None:
    """Make an architecture known under its model types."""
    for name in architecture.model_types:
        _REGISTRY[name] = architecture


def architecture(model_type: str) -> Architecture | None:
    """The architecture that serves a `model_type`, or None."""
    _import_all()
    return _REGISTRY.get(model_type)


def is_companion(model_type: str) -> bool:
    """Whether a checkpoint of this `model_type` is the head of another, and no model."""
    _import_all()
    return any(model_type in family.companion_types for family in _REGISTRY.values())


def model_types() -> Iterable[str]:
    """All `model_type` values served."""
    _import_all()
    return sorted(_REGISTRY)


def _import_all() -> None:
    """Import every module of this package once: each registers what it implements."""
    package = importlib.import_module(__package__ or "")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
