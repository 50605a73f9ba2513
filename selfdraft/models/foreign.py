"""Weights as AWQ, GPTQ, compressed-tensors and FP8 store them, as MLX's layers do. No weight is evaluated here.

The first three are codes of a few bits with a scale and a zero point a group: w = (code - zero) scale. MLX has
w = code scale + bias, codes packed along the inputs, the first in the lowest bits. Where groups do not fit MLX's,
weights are expanded.
Layouts: AutoAWQ `gemm`, GPTQModel (formats gptq and gptq_v2), compressed-tensors `pack-quantized`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError
from . import fp8

__all__ = ["FORMATS", "in_mlx_layout", "note", "refusal"]

FORMATS = ("awq", "gptq", "compressed-tensors", "fp8")

_GROUPS = (32, 64, 128)  # of MLX's affine layers
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where column k of eight lies in AutoAWQ's words
_PACKED = "weight_packed"
_PARTS = ("qweight", "qzeros", "scales", "g_idx", _PACKED, "weight_scale", "weight_zero_point", "weight_shape")


def refusal(settings: Mapping[str, Any]) -> str:
    """Why a `quantization_config` is not read; "" if it is."""
    method = settings.get("quant_method")
    if method not in FORMATS:
        return f"weights quantised by {method!r}"
    if method == "awq" and (settings.get("version", "gemm") != "gemm" or settings.get("bits", 4) != 4):
        return f"AWQ weights of version {settings.get('version')!r} with {settings.get('bits')} bits"
    if method == "gptq" and settings.get("bits") not in (4, 8):
        return f"GPTQ weights with {settings.get('bits')!r} bits"
    blocks = settings.get("weight_block_size", [fp8.BLOCK, fp8.BLOCK])
    if method == "fp8" and blocks != [fp8.BLOCK, fp8.BLOCK]:
        return f"FP8 weights with weight_block_size {blocks!r}"
    if method == "compressed-tensors" and settings.get("format") != "pack-quantized":
        return f"compressed-tensors weights of format {settings.get('format')!r}"
    if method == "compressed-tensors" and _bits_of(settings) is None:
        return f"compressed-tensors weights with config_groups {settings.get('config_groups')!r}"
    return ""


def note(settings: Mapping[str, Any]) -> str:
    """What a user should know of such weights."""
    method = settings["quant_method"]
    if method == "fp8":
        return (
            f"weights quantised by {method!r} are read as bf16, which takes more memory: `selfdraft forge build` helps"
        )
    return (
        f"weights quantised by {method!r} are put into MLX's layout at every load: `selfdraft forge build` does it once"
    )


def in_mlx_layout(
    tensors: dict[str, mx.array], settings: Mapping[str, Any], fp8_rows: Callable[[str], int | None] = lambda name: None
) -> dict[str, mx.array]:
    """Tensors by name, those of a quantised layer as `weight`, `scales` and `biases`, or as a dense `weight`.

    Args:
        settings: the checkpoint's `quantization_config`, which `refusal` lets pass.
        fp8_rows: see `Architecture`.

    Raises:
        CheckpointError: a layer lacks a tensor, or has one of another shape or dtype, by name.
    """
    method = settings["quant_method"]
    if method == "fp8":
        try:
            return fp8.dequantised(tensors, fp8_rows)
        except ValueError as error:
            raise CheckpointError(f"{error}; fetch the checkpoint again") from error
    suffix = _PACKED if method == "compressed-tensors" else "qweight"
    layers = [name.removesuffix(suffix) for name in tensors if name.endswith(f".{suffix}")]
    unpack = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed}[method]
    found = dict(tensors)
    for layer in layers:
        parts = {part: found.pop(layer + part) for part in _PARTS if layer + part in found}
        try:
            made = unpack(parts, settings)
        except KeyError as error:
            raise CheckpointError(f"{layer}{suffix} lacks {error} beside it; fetch the checkpoint again") from error
        except (ArithmeticError, IndexError, TypeError, ValueError) as error:  # of MLX, for shapes and dtypes
            raise CheckpointError(
                f"{layer}{suffix} does not fit what is beside it ({error}); fetch the checkpoint again"
            ) from error
        found |= {layer + name: tensor for name, tensor in made.items()}
    return found


def _awq(parts: Mapping[str, mx.array], settings: Mapping[str, Any]) -> dict[str, mx.array]:
    """qweight [in, out / 8], qzeros [in / g, out / 8], scales [in / g, out]."""
    codes, zeros = (_nibbles(parts[name], 4)[..., _AWQ_ORDER].flatten(-2) for name in ("qweight", "qzeros"))
    return _affine(_packed(codes.T, 4), zeros.T, parts["scales"].T, 4)


def _gptq(parts: Mapping[str, mx.array], settings: Mapping[str, Any]) -> dict[str, mx.array]:
    """qweight [in / n, out], qzeros [in / g, out / n], scales [in / g, out], n codes a word; with `desc_act` an input's
    group is in g_idx [in]."""
    bits = int(settings["bits"])
    zeros = _nibbles(parts["qzeros"], bits).flatten(-2)
    if settings.get("checkpoint_format", "gptq") == "gptq":  # which stores the zero point less one
        zeros = zeros + 1
    words, scales = parts["qweight"].T.view(mx.uint32), parts["scales"]
    if not settings.get("desc_act"):
        return _affine(words, zeros.T, scales.T, bits)
    codes, groups = _nibbles(words, bits).flatten(-2), parts["g_idx"].astype(mx.uint32)
    if int(groups.max().item()) >= scales.shape[0]:  # type: ignore[arg-type]
        raise ValueError(f"g_idx names group {groups.max().item()} of {scales.shape[0]}")
    return {"weight": ((codes.astype(mx.float32) - zeros[groups].T) * scales[groups].T).astype(scales.dtype)}


def _compressed(parts: Mapping[str, mx.array], settings: Mapping[str, Any]) -> dict[str, mx.array]:
    """weight_packed [out, in / n], weight_scale [out, in / g], weight_zero_point [out / n, in / g] if it is asymmetric;
    codes and zero points are stored plus half of their range."""
    scales = parts["weight_scale"]
    words = parts["weight_packed"].view(mx.uint32)
    bits = _bits_of(settings)
    assert bits is not None, "such settings are refused"
    if "weight_zero_point" in parts:
        zeros = _nibbles(parts["weight_zero_point"].T, bits).flatten(-2).T
    else:
        zeros = mx.full(scales.shape, 1 << (bits - 1), dtype=mx.uint32)
    return _affine(words, zeros, scales, bits)


def _bits_of(settings: Mapping[str, Any]) -> int | None:
    """Of compressed-tensors' weights, 4 or 8; None if they are others, or not the same in all groups."""
    try:
        bits = {group["weights"]["num_bits"] for group in settings["config_groups"].values()}
    except (AttributeError, KeyError, TypeError):
        return None
    return int(bits.pop()) if bits in ({4}, {8}) else None


def _affine(words: mx.array, zeros: mx.array, scales: mx.array, bits: int) -> dict[str, mx.array]:
    """A layer of codes [out, in / n], zero points and scales [out, in / g]."""
    inputs = words.shape[-1] * 32 // bits
    biases = (-zeros.astype(mx.float32) * scales.astype(mx.float32)).astype(scales.dtype)
    if inputs // scales.shape[-1] in _GROUPS:
        return {"weight": words, "scales": scales, "biases": biases}
    codes = _nibbles(words, bits).flatten(-2).reshape(*scales.shape, -1).astype(mx.float32)
    dense = codes * scales[..., None].astype(mx.float32) + biases[..., None].astype(mx.float32)
    return {"weight": dense.flatten(-2).astype(scales.dtype)}


def _nibbles(words: mx.array, bits: int) -> mx.array:
    """[..., W] words of 32 bits -> codes [..., W, 32 / bits], the lowest bits first."""
    shifts = mx.arange(0, 32, bits, dtype=mx.uint32)
    return (words.view(mx.uint32)[..., None] >> shifts) & ((1 << bits) - 1)


def _packed(codes: mx.array, bits: int) -> mx.array:
    """The reverse, of [..., in]."""
    shifts = mx.arange(0, 32, bits, dtype=mx.uint32)
    return (codes.reshape(*codes.shape[:-1], -1, 32 // bits) << shifts).sum(axis=-1).astype(mx.uint32)
