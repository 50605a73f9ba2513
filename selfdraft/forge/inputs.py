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

__all__ = ["Grams", "recorded"]

Grams = dict[str, np.ndarray]

_KINDS = (nn.Linear, SwitchLinear)


@contextmanager
def recorded(head: nn.Module, wanted: Callable[[str], bool]) -> Iterator[Grams]:
    """Within it, dense layers of a head add up what they are fed.

    Args:
        wanted: path of a layer within the head -> whether it is recorded.

    Yields:
        Path of a layer -> sum of x x^T, [in, in], float64.
    """
    grams: Grams = {}
    plain = {path: layer for path, layer in head.named_modules() if type(layer) in _KINDS and wanted(path)}
    head.update_modules(tree_unflatten([(path, Recorded(layer, grams, path)) for path, layer in plain.items()]))
    try:
        yield grams
    finally:
        head.update_modules(tree_unflatten(list(plain.items())))


class Recorded(nn.Module):
    """A layer that adds x x^T to the sum under its path."""

    def __init__(self, layer: nn.Module, grams: Grams, path: str) -> None:
        nn.Module.__init__(self)
        self.layer = layer
        self._grams, self._path = grams, path

    def __call__(self, x: mx.array, *others: Any, **named: Any) -> mx.array:
        rows = x.reshape(-1, x.shape[-1]).astype(mx.float32)
        found = np.array(rows.T @ rows).astype(np.float64)
        self._grams[self._path] = self._grams[self._path] + found if self._path in self._grams else found
        out: mx.array = self.layer(x, *others, **named)
        return out
