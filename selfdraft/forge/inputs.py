"""What the layers of a head are fed while it drafts: sums of x x^T, gathered as a model decodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import SwitchLinear

__all__ = ["Inputs", "recorded"]

_AT_ONCE = 2048  # inputs that are added up in one product


class Inputs:
    """All that a layer was fed.

    Experts share one sum where x is wider than what they make of it, as in their gate and up projections: any of them
    might have been fed it. Where x is narrower it is an expert's own, and each has a sum: these are no larger than the
    weights, in fp32.

    Attributes:
        gram: sum of x x^T, float32 [in, in], or [experts, in, in].
        count: how many x that are, [] or [experts].
    """

    def __init__(self, layer: nn.Module) -> None:
        *experts, outputs, inputs = layer.weight.shape
        self._own = bool(experts) and inputs <= outputs
        before = tuple(experts) if self._own else ()
        self.gram = mx.zeros((*before, inputs, inputs))
        self.count = np.zeros(before, dtype=np.int64)
        self._waiting: list[tuple[mx.array, mx.array | None]] = []
        self._rows = 0

    def see(self, x: mx.array, indices: mx.array | None = None) -> None:
        """Take inputs [..., in]; of experts [..., 1, in], with the expert of each."""
        if self._own and indices is not None:
            x, indices = mx.broadcast_to(x, (*indices.shape, *x.shape[-2:])), indices.reshape(-1)
        rows = x.reshape(-1, x.shape[-1])
        self._waiting.append((rows, indices if self._own else None))
        self._rows += rows.shape[0]
        if self._rows >= _AT_ONCE:
            self.add_up()

    def add_up(self) -> None:
        """Add what is waiting."""
        if not self._waiting:
            return
        rows = mx.concatenate([rows for rows, _ in self._waiting]).astype(mx.float32)
        if self._own:
            experts = np.concatenate([np.array(indices) for _, indices in self._waiting])
            for expert in np.unique(experts):
                mine = rows[mx.array(np.flatnonzero(experts == expert))]
                self.gram[int(expert)] += mine.T @ mine
                self.count[expert] += mine.shape[0]
        else:
            self.gram += rows.T @ rows
            self.count += rows.shape[0]
        mx.eval(self.gram)
        self._waiting, self._rows = [], 0


@contextmanager
def recorded(head: nn.Module, wanted: Callable[[str], bool]) -> Iterator[dict[str, Inputs]]:
    """Within it, dense layers of a head add up what they are fed.

    Args:
        wanted: path of a layer within the head -> whether it is recorded.

    Yields:
        Path of a layer -> what it was fed, complete once this is left.
    """
    kinds = (nn.Linear, SwitchLinear)
    plain = {path: layer for path, layer in head.named_modules() if type(layer) in kinds and wanted(path)}
    found = {path: Inputs(layer) for path, layer in plain.items()}
    head.update_modules(tree_unflatten([(path, _Recorded(layer, found[path])) for path, layer in plain.items()]))
    try:
        yield found
    finally:
        head.update_modules(tree_unflatten(list(plain.items())))
    for inputs in found.values():
        inputs.add_up()


class _Recorded(nn.Module):
    """A layer that shows what it is fed."""

    def __init__(self, layer: nn.Module, inputs: Inputs) -> None:
        nn.Module.__init__(self)
        self.layer = layer
        self._inputs = inputs

    def __call__(self, x: mx.array, *indices: mx.array, **named: Any) -> mx.array:
        self._inputs.see(x, *indices)
        out: mx.array = self.layer(x, *indices, **named)
        return out
