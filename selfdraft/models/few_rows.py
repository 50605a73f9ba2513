"""Quantised layers for forwards of few rows, which `kernels.verify_qmv` serves where it may be used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.activations import swiglu

from ..kernels import verify_qmv
from ..kernels.portable import backend

__all__ = ["FewRowsEmbedding", "FewRowsLinear", "GatedMLP", "added", "joined", "use_few_row_kernels"]

# Rows from which a matrix is unpacked for a dense product on CUDA. On one H200, 5120 x 17408 and 4,096 rows: 1.3 ms,
# where MLX's quantised product takes 5.2.
_DENSE = 512


class FewRowsLinear(nn.QuantizedLinear):
    """A quantised linear layer, by `verify_qmv` for up to 64 rows."""

    def __call__(self, x: mx.array) -> mx.array:
        y = _product(self, x)
        return y + self["bias"] if "bias" in self else y


class FewRowsEmbedding(nn.QuantizedEmbedding):
    """A quantised embedding that is the output projection, too."""

    def as_linear(self, x: mx.array) -> mx.array:
        return _product(self, x)


class GatedMLP(nn.Module):
    """down(silu(gate x) up x), gate and up as one layer."""

    def __init__(self, gate_up: FewRowsLinear, down: Any) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up, down

    def __call__(self, x: mx.array, residual: mx.array) -> mx.array:
        """residual + mlp(x), both [B, T, H]."""
        layer = self.gate_up_proj
        inner = _few_rows(layer, x, gated=True) if _fits(layer, x) else swiglu(*mx.split(layer(x), 2, axis=-1))
        return added(self.down_proj, inner, residual)


def added(layer: Any, x: mx.array, residual: mx.array) -> mx.array:
    """residual + layer(x), in one pass where a kernel does it."""
    if isinstance(layer, FewRowsLinear) and "bias" not in layer and _fits(layer, x):
        return _few_rows(layer, x, residual=residual)
    out: mx.array = residual + layer(x)
    return out


def joined(layers: Sequence[Any]) -> FewRowsLinear | None:
    """One layer whose output is those of `layers` side by side; None if they cannot be put together."""
    first = layers[0]
    form = ("group_size", "bits", "mode")
    if not all(
        type(layer) is FewRowsLinear
        and "bias" not in layer
        and all(getattr(layer, name) == getattr(first, name) for name in form)
        and layer["scales"].dtype == first["scales"].dtype
        for layer in layers
    ):
        return None
    whole = FewRowsLinear.__new__(FewRowsLinear)
    nn.Module.__init__(whole)
    whole.__dict__.update({name: value for name, value in first.__dict__.items() if name in form})
    for name in ("weight", "scales", "biases"):
        whole[name] = mx.concatenate([layer[name] for layer in layers])
    whole.freeze()
    return whole


_SAME: dict[Any, Any] = {nn.QuantizedLinear: FewRowsLinear, nn.QuantizedEmbedding: FewRowsEmbedding}


def use_few_row_kernels(module: nn.Module) -> None:
    """Let the quantised layers of a model use the kernel, if it passes its check on this device.

    Modules with a method `join` are called with it afterwards: there they put projections of one input together.
    """
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
    for _, part in module.named_modules():
        if hasattr(part, "join"):
            part.join()


def _fits(layer: Any, x: mx.array) -> bool:
    return layer["scales"].dtype == x.dtype and verify_qmv.fits(x, layer["weight"], layer.group_size, layer.bits)


def _few_rows(layer: Any, x: mx.array, **form: Any) -> mx.array:
    arrays = layer["weight"], layer["scales"], layer["biases"]
    return verify_qmv.verify_qmv(x, *arrays, group_size=layer.group_size, bits=layer.bits, **form)


def _product(layer: Any, x: mx.array) -> mx.array:
    if _fits(layer, x):
        return _few_rows(layer, x)
    arrays = layer["weight"], layer["scales"], layer["biases"]
    how: Any = {"group_size": layer.group_size, "bits": layer.bits}
    if x.size // x.shape[-1] >= _DENSE and backend() == "cuda":
        out: mx.array = x @ mx.dequantize(*arrays, **how).T
        return out
    return mx.quantized_matmul(x, *arrays, transpose=True, **how)
