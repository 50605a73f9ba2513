"""Low-rank updates beside quantised layers, whose weights have no room for them. Knows layers; no files.

A decoded row must not depend on the rows beside it, so few rows are multiplied one by one: MLX picks the kernel of a
dense product by the number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from ..errors import CheckpointError
from .adapters import Update

__all__ = ["LowRankLinear", "LowRankSwitch", "put_beside", "side_by_side"]

_FEW = 64  # rows, as many as the kernels of `few_rows` take


class LowRankLinear(nn.Module):
    """factors * (base(x) + x a b), a bias behind that.

    Args:
        base: a quantised linear layer.
        a: [in, r]. b: [r, out], the scale in it. In the dtype that the layer computes in.
        factors: [out], of DoRA.
    """

    def __init__(self, base: Any, a: mx.array, b: mx.array, factors: mx.array | None = None) -> None:
        super().__init__()
        self.base, self.a, self.b = base, a, b
        if factors is not None:
            self.factors = factors
        if "bias" in base:
            self.bias = base.pop("bias")
        self.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.base(x) + _product(_product(x, self.a), self.b)
        if "factors" in self:
            out = self.factors * out
        return out + self.bias if "bias" in self else out


class LowRankSwitch(nn.Module):
    """The same for a stack of experts, as mlx-lm's switch layers are called.

    Args:
        base: a quantised switch layer.
        a: [E, in, r]. b: [E, r, out], the scale in it.
    """

    def __init__(self, base: Any, a: mx.array, b: mx.array) -> None:
        super().__init__()
        self.base, self.a, self.b = base, a, b
        self.freeze()

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        how: Any = {"rhs_indices": indices, "sorted_indices": sorted_indices}
        change = mx.gather_mm(mx.gather_mm(x, self.a, **how), self.b, **how)
        out: mx.array = self.base(x, indices, sorted_indices=sorted_indices) + change
        return out


def put_beside(module: nn.Module, updates: Mapping[str, Update], dtype: mx.Dtype) -> int:
    """Put updates beside the quantised layers of a module.

    Args:
        updates: by path of the layer.
        dtype: what the module computes in.

    Returns:
        Bytes that they hold.

    Raises:
        CheckpointError: a layer of another kind or size.
    """
    modules: dict[str, Any] = dict(module.named_modules())
    held = 0
    for path, update in updates.items():
        parent, _, name = path.rpartition(".")
        made = _layer(path, modules.get(path), update, dtype)
        setattr(modules[parent], name, made)
        held += sum(made[part].nbytes for part in ("a", "b", "factors") if part in made)
    return held


def side_by_side(whole: Any, layers: Sequence[Any]) -> LowRankLinear:
    """The update of layers that were put together as `whole`: each keeps to its own outputs.

    Args:
        layers: the separate ones, with an update or without.
    """
    adapted = [layer for layer in layers if isinstance(layer, LowRankLinear)]
    rank, dtype = sum(layer.a.shape[1] for layer in adapted), adapted[0].b.dtype
    rows, done = [], 0
    for layer in layers:
        if not isinstance(layer, LowRankLinear):
            rows.append(mx.zeros((rank, layer.weight.shape[0]), dtype=dtype))
            continue
        own = layer.a.shape[1]
        rows.append(mx.pad(layer.b, [(done, rank - done - own), (0, 0)]))
        done += own
    factors = None
    if any("factors" in layer for layer in adapted):
        factors = mx.concatenate([_factors(layer, dtype) for layer in layers])
    a = mx.concatenate([layer.a for layer in adapted], axis=1)
    return LowRankLinear(whole, a, mx.concatenate(rows, axis=1), factors)


def _factors(layer: Any, dtype: mx.Dtype) -> mx.array:
    if "factors" in layer:
        found: mx.array = layer.factors
        return found
    plain = layer.base if isinstance(layer, LowRankLinear) else layer
    return mx.ones(plain.weight.shape[0], dtype=dtype)


def _layer(path: str, base: Any, update: Update, dtype: mx.Dtype) -> LowRankLinear | LowRankSwitch:
    """The layer that takes a quantised one's place."""
    kinds: Any = (nn.QuantizedLinear, QuantizedSwitchLinear)
    if not isinstance(base, kinds) or path == "lm_head":
        raise CheckpointError(
            f"an adapter changes {path}, which is stored quantised and is none of the layers that take one so: load "
            "the dense checkpoint"
        )
    shape = (*base.weight.shape[:-1], base.weight.shape[-1] * 32 // base.bits)
    if update.shape != shape:
        raise CheckpointError(
            f"an adapter is for {path} of shape {list(update.shape)}, and the model's is {list(shape)}: it was trained "
            "for a model of another size"
        )
    a, b = update.a.swapaxes(-1, -2), (update.scale * update.b.astype(mx.float32)).swapaxes(-1, -2)
    halves = mx.contiguous(a.astype(dtype)), mx.contiguous(b.astype(dtype))
    if isinstance(base, QuantizedSwitchLinear):
        return LowRankSwitch(base, *halves)
    if update.magnitude is None:
        return LowRankLinear(base, *halves)
    return LowRankLinear(base, *halves, factors=update.factors(_dense(base) + update.change()).astype(dtype))


def _dense(layer: Any) -> mx.array:
    """What a quantised layer's weight stands for, fp32."""
    how: Any = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
    return mx.dequantize(layer["weight"], layer["scales"], layer.get("biases"), **how).astype(mx.float32)


def _product(x: mx.array, matrix: mx.array) -> mx.array:
    """x [..., in] times a matrix [in, out]; few rows one by one."""
    if x.size // x.shape[-1] > _FEW:
        return x @ matrix
    each = mx.broadcast_to(matrix, (*x.shape[:-1], *matrix.shape))
    return (x[..., None, :] @ each).squeeze(-2)
