"""Whether the tensors of a checkpoint fit the module that its configuration describes. Reads no weights."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import infer_quant_config

__all__ = ["describe_misfits", "misfits", "quantise_as_stored", "stored_format"]

# What MLX's affine layers can have.
_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (32, 64, 128)

_SHOWN = 5


def stored_format(path: str, layer: nn.Module, tensors: Mapping[str, mx.array]) -> dict[str, object] | None:
    """How a layer's weight is stored quantised: group_size, bits and mode; None if it is dense.

    Raises:
        ValueError: by a format that MLX does not have.
    """
    names = f"{path}.weight", f"{path}.scales"
    if not hasattr(layer, "to_quantized") or not all(name in tensors for name in names):
        return None
    weight, scales = (tensors[name] for name in names)
    if weight.ndim < 2 or weight.ndim != scales.ndim or 0 in scales.shape:
        raise ValueError(f"{path}.scales has shape {list(scales.shape)} beside a weight of {list(weight.shape)}")
    found: dict[str, object] = infer_quant_config(path, layer, tensors)
    if found["mode"] == "affine" and (found["bits"] not in _BITS or found["group_size"] not in _GROUPS):
        raise ValueError(
            f"{path} has {found['bits']} bits in groups of {found['group_size']} by its shapes, which MLX does not have"
        )
    return found


def quantise_as_stored(module: nn.Module, tensors: Mapping[str, mx.array]) -> None:
    """Replace the layers whose weights are stored quantised, each by one of the format it is stored in.

    Raises:
        ValueError: see `stored_format`.
    """
    nn.quantize(module, class_predicate=lambda path, layer: stored_format(path, layer, tensors) or False)


def misfits(expected: Mapping[str, mx.array], tensors: Mapping[str, mx.array]) -> list[str]:
    """What keeps tensors from being a module's parameters, each by name."""
    common = sorted(expected.keys() & tensors.keys())
    return [
        *(f"missing {name}" for name in sorted(expected.keys() - tensors.keys())),
        *(f"surplus {name}" for name in sorted(tensors.keys() - expected.keys())),
        *(
            f"{name} has shape {list(tensors[name].shape)}, not {list(expected[name].shape)}"
            for name in common
            if tensors[name].shape != expected[name].shape
        ),
        *(
            f"{name} is stored as {tensors[name].dtype}, not {_kind(expected[name].dtype)}"
            for name in common
            if _kind(tensors[name].dtype) != _kind(expected[name].dtype)
        ),
    ]


def describe_misfits(module: nn.Module, tensors: Mapping[str, mx.array]) -> str:
    """Why tensors are not a module's parameters, in one line; "" if they are. Layers become as they are stored."""
    try:
        quantise_as_stored(module, tensors)
    except ValueError as error:
        return str(error)
    problems = misfits(dict(tree_flatten(module.parameters())), tensors)
    return "; ".join(problems[:_SHOWN]) + (f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else "")


def _kind(dtype: mx.Dtype) -> str:
    return "floating" if mx.issubdtype(dtype, mx.floating) else str(dtype)
