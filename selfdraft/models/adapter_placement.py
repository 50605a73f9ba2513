"""Where an adapter's updates go: into dense weights, or beside quantised ones. Knows names; evaluates nothing.

What a checkpoint stores dense is changed before its family puts parameters together, so that an adapter may name layers
as they are stored, whatever becomes of them; then as they are in memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from ..errors import CheckpointError
from .adapters import Adapter, Update, listed
from .checkpoint import Checkpoint

__all__ = ["Placed"]


class Placed:
    """A checkpoint's tensors with an adapter.

    Args:
        dtype: of dense weights that it changes; None for as they are stored.

    Attributes:
        tensors: our parameters, mapped and not read; dense ones are changed.
        beside: updates of quantised layers, by the layer's path.
        fused: how many dense weights were changed.

    Raises:
        CheckpointError: an update that is for no layer of the checkpoint, or for one of another shape, by name.
    """

    def __init__(self, checkpoint: Checkpoint, adapter: Adapter, dtype: mx.Dtype | None) -> None:
        self._left = dict(adapter.updates)
        self._folder, self._dtype = adapter.folder, dtype
        self.fused = 0
        tensors = checkpoint.mapped_anew(self._added)
        self._stack_experts(checkpoint)
        self.tensors = self._added(tensors)
        self.beside = self._kept_beside()
        if self._left:
            raise CheckpointError(
                f"adapter {self._folder}: {listed(sorted(self._left))} is in no layer of {checkpoint.folder.name} that "
                "an adapter can change; it is used whole or not at all: give the model that it was trained for"
            )

    def _added(self, tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Tensors with the updates of all dense layers among them."""
        changed = dict(tensors)
        for layer in list(self._left):
            weight = changed.get(f"{layer}.weight")
            if weight is not None and f"{layer}.scales" not in changed:
                update = self._left.pop(layer)
                self._check(layer, update, weight.shape)
                self.fused += 1
                changed[f"{layer}.weight"] = update.added_to(weight, self._dtype)
        return changed

    def _stack_experts(self, checkpoint: Checkpoint) -> None:
        """Updates of experts that are named one by one, as their family stacks weights."""
        single = {layer: self._left.pop(layer) for layer in list(self._left) if ".experts." in layer}
        if not single:
            return
        if whole := sorted(layer for layer, update in single.items() if update.magnitude is not None):
            raise CheckpointError(f"adapter {self._folder}: {listed(whole)}: DoRA of quantised experts is not taken")
        halves = {f"{layer}.a": update.a for layer, update in single.items()}
        halves |= {f"{layer}.b": update.scale * update.b for layer, update in single.items()}
        try:
            stacked = checkpoint.architecture.assemble(halves, checkpoint.text_config)
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"adapter {self._folder}: experts that cannot be stacked: {error}") from error
        layers = [name.removesuffix(".a") for name in stacked if name.endswith(".a")]
        self._left |= {layer: Update(stacked[f"{layer}.a"], stacked[f"{layer}.b"], 1.0) for layer in layers}

    def _kept_beside(self) -> dict[str, Update]:
        """What is left of quantised layers."""
        found = {layer: update for layer, update in self._left.items() if f"{layer}.scales" in self.tensors}
        for layer in found:
            del self._left[layer]
        return found

    def _check(self, layer: str, update: Update, shape: tuple[int, ...]) -> None:
        if update.shape != shape:
            raise CheckpointError(
                f"adapter {self._folder}: {layer} is for a weight of shape {list(update.shape)}, and the model's is "
                f"{list(shape)}: it was trained for a model of another size"
            )
