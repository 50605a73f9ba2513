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
from .low_rank import LowRankLinear, side_by_side

__all__ = [
    "Entrance",
    "FewRowsEmbedding",
    "FewRowsLinear",
    "GatedMLP",
    "Normed",
    "added",
    "added_and_normed",
    "joined",
    "use_few_row_kernels",
]

# The norm of something: as it is, or for products that divide by the root mean square themselves.
Normed = mx.array | verify_qmv.Scaled
# What a block begins with: its norm, and the layer that takes the norm's output.
Entrance = tuple[nn.RMSNorm, Any]

# Rows from which a matrix is unpacked for a dense product on CUDA. On one H200, 5120 x 17408 and 4,096 rows: 1.3 ms,
# where MLX's quantised product takes 5.2.
_DENSE = 512


class FewRowsLinear(nn.QuantizedLinear):
    """A quantised linear layer, by `verify_qmv` for up to 64 rows."""

    def __call__(self, x: Normed) -> mx.array:
        y = _few_rows(self, x) if isinstance(x, verify_qmv.Scaled) else _product(self, x)
        return y + self["bias"] if "bias" in self else y


class FewRowsEmbedding(nn.QuantizedEmbedding):
    """A quantised embedding that is the output projection, too."""

    def as_linear(self, x: mx.array) -> mx.array:
        return _product(self, x)


class GatedMLP(nn.Module):
    """down(silu(gate x) up x), gate and up as one layer."""

    def __init__(self, gate_up: FewRowsLinear | LowRankLinear, down: Any) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up, down

    def __call__(self, x: mx.array, residual: mx.array) -> mx.array:
        """residual + mlp(x), both [B, T, H]."""
        return added(self.down_proj, self._inner(x), residual)

    def few(self, x: Normed, residual: mx.array, following: Entrance | None) -> tuple[mx.array, Normed | None]:
        """The same and its norm, as `added_and_normed`."""
        return added_and_normed(self.down_proj, self._inner(x), residual, following)

    def _inner(self, x: Normed) -> mx.array:
        layer = self.gate_up_proj
        if isinstance(x, verify_qmv.Scaled) or (isinstance(layer, FewRowsLinear) and _fits(layer, x)):
            return _few_rows(layer, x, gated=True)
        out: mx.array = swiglu(*mx.split(layer(x), 2, axis=-1))
        return out


def added(layer: Any, x: mx.array, residual: mx.array) -> mx.array:
    """residual + layer(x), in one pass where a kernel does it."""
    if isinstance(layer, FewRowsLinear) and "bias" not in layer and _fits(layer, x) and residual.dtype == x.dtype:
        return _few_rows(layer, x, residual=residual)
    out: mx.array = residual + layer(x)
    return out


def added_and_normed(
    layer: Any, x: mx.array, residual: mx.array, following: Entrance | None
) -> tuple[mx.array, Normed | None]:
    """residual + layer(x), and the norm of that for what follows, if anything does."""
    if following is None:
        return added(layer, x, residual), None
    norm, then = following
    if _norms(layer, x) and _norms(then, residual) and norm.weight.dtype == x.dtype:
        to: Any = {"residual": residual, "norm_weight": norm.weight, "eps": norm.eps}
        return verify_qmv.verify_qmv_norm(x, **_matrix(layer), **to)
    out = added(layer, x, residual)
    return out, norm(out)


def joined(layers: Sequence[Any]) -> Any:
    """One layer whose output is those of `layers` side by side, a `FewRowsLinear` or, with low-rank updates, a
    `LowRankLinear`; None if they cannot be put together."""
    bases = [layer.base if isinstance(layer, LowRankLinear) else layer for layer in layers]
    whole = _joined(bases)
    return whole if whole is None or bases == list(layers) else side_by_side(whole, layers)


def _joined(layers: Sequence[Any]) -> FewRowsLinear | None:
    """The same of layers without low-rank updates."""
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


def _norms(layer: Any, x: mx.array) -> bool:
    """Whether a product of x with this layer may take a norm's division, and find squares."""
    return (
        isinstance(layer, FewRowsLinear)
        and "bias" not in layer
        and _fits(layer, x)
        and verify_qmv.norms(x, layer["weight"], layer.group_size, layer.bits)
    )


def _few_rows(layer: Any, x: Normed, **form: Any) -> mx.array:
    return verify_qmv.verify_qmv(x, **_matrix(layer), **form)


def _matrix(layer: Any) -> dict[str, Any]:
    """What a product takes of a layer."""
    arrays = {name: layer[name] for name in ("weight", "scales", "biases")}
    return {**arrays, "group_size": layer.group_size, "bits": layer.bits}


def _product(layer: Any, x: mx.array) -> mx.array:
    if _fits(layer, x):
        return _few_rows(layer, x)
    arrays = layer["weight"], layer["scales"], layer["biases"]
    how: Any = {"group_size": layer.group_size, "bits": layer.bits}
    if x.size // x.shape[-1] >= _DENSE and backend() == "cuda":
        out: mx.array = x @ mx.dequantize(*arrays, **how).T
        return out
    return mx.quantized_matmul(x, *arrays, transpose=True, **how)
