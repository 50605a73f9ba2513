"""The parity matrix: how far rows of a wide product, or of a wide forward, are from the same rows computed one by one.

Claim 2 of docs/architecture.md, measured: where every figure is 0, greedy text is the same at every depth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..device import choose_dtype
from ..models.checkpoint import Checkpoint, classify
from ..models.few_rows import use_few_row_kernels
from ..models.loader import build_model
from ..source import REFERENCE, find_model
from ..state import RowState

__all__ = ["FORMATS", "Parity", "parity_matrix"]

FORMATS = ("float32", "bfloat16", "float16", "8-bit", "4-bit")
GROUP = 64

# Inputs and outputs of products. Libraries choose kernels by shape: OpenBLAS is exact at the last of them alone.
_MATRICES = ((384, 1024), (512, 384), (1024, 384), (1024, 2048))
_PROMPT = 24  # tokens before the forwards that are compared


@dataclass(frozen=True)
class Parity:
    """Of one format of weights: the largest difference of any row, by width (1, 2, ...).

    Attributes:
        product: of matrices of some shapes, values of order 1.
        forward: of the bundled model's logits.
    """

    format: str
    product: list[float]
    forward: list[float]

    @property
    def exact(self) -> bool:
        """Whether no row differs at any width."""
        return not any((*self.product, *self.forward))


def parity_matrix(widths: int) -> Iterator[Parity]:
    """Measure each format, for 1 to `widths` rows, with the kernels that models use here.

    Raises:
        ArithmeticError: the device computes something else than numbers.
    """
    checkpoint = classify(find_model(REFERENCE))
    for format in FORMATS:
        yield Parity(format, _products(format, widths), _forwards(checkpoint, format, widths))


def _products(format: str, widths: int) -> list[float]:
    largest = [0.0] * widths
    for inputs, outputs in _MATRICES:
        key = mx.random.key(inputs * outputs)
        layer = nn.Linear(inputs, outputs, bias=False)
        layer.weight = mx.random.normal((outputs, inputs), key=key) * inputs**-0.5
        model = _formatted(nn.Sequential(layer), format)
        x = mx.random.normal((1, widths, inputs), key=mx.random.split(key)[0]).astype(_dtype(format))
        single = mx.concatenate([model(x[:, row : row + 1]) for row in range(widths)], axis=1)
        mx.eval(x, single)
        found = [_largest(model(x[:, :width]), single[:, :width]) for width in range(1, widths + 1)]
        largest = list(map(max, largest, found))
    return largest


def _forwards(checkpoint: Checkpoint, format: str, widths: int) -> list[float]:
    model: Any = build_model(checkpoint, with_head=False, dtype=_dtype(format)).model
    model = _formatted(model, format)
    tokens = mx.random.randint(0, model.vocab_size, (1, _PROMPT + widths), key=mx.random.key(1))
    state = model.new_state()
    _step(model, state, tokens[:, :_PROMPT])
    alone = state.fork()
    single = mx.concatenate(
        [_step(model, alone, tokens[:, at : at + 1]) for at in range(_PROMPT, _PROMPT + widths)], axis=1
    )

    def wide(width: int) -> mx.array:
        return _step(model, state.fork(), tokens[:, _PROMPT : _PROMPT + width])

    return [_largest(wide(width), single[:, :width]) for width in range(1, widths + 1)]


def _step(model: Any, state: RowState, tokens: mx.array) -> mx.array:
    """Forward tokens of a row as a verify pass does, and keep them all. Returns logits [1, T, V]."""
    hidden, captured = model.forward(tokens, [state], keep_steps=True)
    captured.commit([state], [tokens.shape[1]])
    logits: mx.array = model.logits(hidden)
    mx.eval(logits, state.arrays())
    return logits


def _dtype(format: str) -> mx.Dtype:
    """Of activations: of quantised weights that which models get on this device."""
    if format.endswith("-bit"):
        return choose_dtype("auto", quantised=True) or mx.bfloat16
    dtype: mx.Dtype = getattr(mx, format)
    return dtype


def _formatted(module: Any, format: str) -> Any:
    """A module with its weights in a format, and the layers that models use here."""
    module.set_dtype(_dtype(format))
    if format.endswith("-bit"):
        nn.quantize(module, group_size=GROUP, bits=int(format.removesuffix("-bit")))
    use_few_row_kernels(module)
    mx.eval(module.parameters())
    return module


def _largest(wide: mx.array, single: mx.array) -> float:
    difference: Any = mx.abs(wide.astype(mx.float32) - single.astype(mx.float32)).max().item()
    if not math.isfinite(difference):
        raise ArithmeticError("rows of a product or a forward are no finite numbers")
    return float(difference)
