"""Quantised layers whose products of few rows go through `kernels.verify_qmv`, where that may be used."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from ..kernels import verify_qmv

__all__ = ["FewRowsEmbedding", "FewRowsLinear", "use_few_row_kernels"]


class FewRowsLinear(nn.QuantizedLinear):
    """A quantised linear layer; up to 64 rows at a time cost one read of the weights for every eight."""

    def __call__(self, x: mx.array) -> mx.array:
        y = _product(self, x)
        return y + self["bias"] if "bias" in self else y


class FewRowsEmbedding(nn.QuantizedEmbedding):
    """A quantised embedding that is the output projection, too."""

    def as_linear(self, x: mx.array) -> mx.array:
        return _product(self, x)


_SAME: dict[Any, Any] = {nn.QuantizedLinear: FewRowsLinear, nn.QuantizedEmbedding: FewRowsEmbedding}


def use_few_row_kernels(module: nn.Module) -> None:
    """Let the quantised layers of a model use the kernel, if it passes its check on this device."""
    if not verify_qmv.CHECK.passed:
        return

    def with_kernel(layer: Any) -> Any:
        kind = _SAME.get(type(layer))
        if kind is None or layer.mode != "affine":
            return layer
        twin = kind.__new__(kind)
        nn.Module.__init__(twin)
        dict.update(twin, layer)
        twin.__dict__.update(layer.__dict__)
        return twin

    module.update_modules(tree_map(with_kernel, module.leaf_modules(), is_leaf=nn.Module.is_module))


def _product(layer: Any, x: mx.array) -> mx.array:
    weight, scales, biases = layer["weight"], layer["scales"], layer["biases"]
    group_size, bits = layer.group_size, layer.bits
    if scales.dtype == x.dtype and verify_qmv.fits(x, weight, group_size, bits):
        return verify_qmv.verify_qmv(x, weight, scales, biases, group_size=group_size, bits=bits)
    return mx.quantized_matmul(x, weight, scales, biases, transpose=True, group_size=group_size, bits=bits)
