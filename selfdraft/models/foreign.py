"""Weights as AWQ, GPTQ, compressed-tensors and FP8 store them, as MLX's layers do.

The first three are codes of a few bits with a scale and a zero point a group: w = (code - zero) scale. MLX has
w = code scale + bias, codes packed along the inputs, the first in the lowest bits. Groups larger than MLX's become
several alike; where inputs of a group do not stand side by side, or groups are smaller, weights are expanded.
Bits come from shapes, whatever config.json says of them. Nothing is evaluated but shapes and groups that are stored as
tensors. Layouts: AutoAWQ `gemm`, GPTQModel (formats gptq and gptq_v2), compressed-tensors `pack-quantized`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from . import fp8

__all__ = ["in_mlx_layout", "note", "refusal"]

_BITS = (4, 8)
_GROUPS = (128, 64, 32)  # of MLX's affine layers
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where column k of eight lies in AutoAWQ's words
_ONES = {4: 0x11111111, 8: 0x01010101}  # a one in each code of a word
_PARTS = (
    *("qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
)

Parts = Mapping[str, mx.array]


def refusal(settings: Mapping[str, Any]) -> str:
    """Why a `quantization_config` is not read; "" if it is."""
    method = settings.get("quant_method")
    if method == "awq":
        version, bits = settings.get("version", "gemm"), settings.get("bits", 4)
        read = str(version).lower() == "gemm" and bits == 4
        return "" if read else f"AWQ weights of version {version!r} with {bits!r} bits"
    if method == "gptq":
        form, bits = _gptq_format(settings), settings.get("bits")
        read = form in ("gptq", "gptq_v2") and bits in _BITS
        return "" if read else f"GPTQ weights of format {form!r} with {bits!r} bits"
    if method == "compressed-tensors":
        return _refusal_of_compressed(settings)
    if method == "fp8":
        blocks = settings.get("weight_block_size", [fp8.BLOCK, fp8.BLOCK])
        return "" if blocks == [fp8.BLOCK, fp8.BLOCK] else f"FP8 weights with weight_block_size {blocks!r}"
    return f"weights quantised by {method!r}"


def _refusal_of_compressed(settings: Mapping[str, Any]) -> str:
    if settings.get("format") != "pack-quantized":
        return f"compressed-tensors weights of format {settings.get('format')!r}"
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else [groups]:
        weights = group.get("weights") if isinstance(group, dict) else group
        read = isinstance(weights, dict) and weights.get("type", "int") == "int" and weights.get("num_bits") in _BITS
        if not read:
            return f"compressed-tensors weights of {weights!r}"
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
        ValueError: a layer lacks a tensor, or has one of another shape or dtype.
    """
    method = settings["quant_method"]
    if method == "fp8":
        return fp8.dequantised(tensors, fp8_rows)
    codes = "weight_packed" if method == "compressed-tensors" else "qweight"
    unpack = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed}[method]
    found = dict(tensors)
    for layer in [name.removesuffix(codes) for name in tensors if name.endswith(f".{codes}")]:
        parts = {part: found.pop(layer + part) for part in _PARTS if layer + part in found}
        try:
            made = unpack(parts, settings)
        except KeyError as error:
            raise ValueError(f"{layer}{codes} lacks {error} beside it") from error
        except ValueError as error:
            raise ValueError(f"{layer}{codes}: {error}") from error
        found |= {layer + name: tensor for name, tensor in made.items()}
    return found


def _awq(parts: Parts, settings: Mapping[str, Any]) -> dict[str, mx.array]:
    """qweight [in, out / 8], qzeros [in / g, out / 8], scales [in / g, out]."""
    codes, zeros = (
        mx.unflatten(_codes(parts[name], 4), -1, (-1, 8))[..., _AWQ_ORDER].flatten(-2) for name in ("qweight", "qzeros")
    )
    return _layer(_words(codes.T, 4), zeros.T, parts["scales"].T, 4)


def _gptq_format(settings: Mapping[str, Any]) -> Any:
    return "marlin" if settings.get("is_marlin_format") else settings.get("checkpoint_format", "gptq")


def _gptq(parts: Parts, settings: Mapping[str, Any]) -> dict[str, mx.array]:
    """qweight [in / n, out], qzeros [in / g, out / n], scales [in / g, out], n codes a word; with `desc_act` an input's
    group is in g_idx [in]."""
    zeros, scales = parts["qzeros"], parts["scales"]
    bits = 32 * zeros.shape[-1] // max(scales.shape[-1], 1)
    if bits not in _BITS:
        raise ValueError(f"zero points {list(zeros.shape)} and scales {list(scales.shape)} are of {bits} bits")
    if _gptq_format(settings) == "gptq":  # whose words were stored less a one in each code, which may borrow
        zeros = _as_words(zeros) + mx.array(_ONES[bits], dtype=mx.uint32)
    groups = parts["g_idx"] if settings.get("desc_act") and scales.shape[0] > 1 else None
    return _layer(_as_words(parts["qweight"].T), _codes(zeros, bits).T, scales.T, bits, groups)


def _compressed(parts: Parts, settings: Mapping[str, Any]) -> dict[str, mx.array]:
    """weight_packed [out, in / n], weight_scale [out, in / g], weight_shape (out, in), weight_zero_point [out / n,
    in / g] if it is asymmetric, weight_g_idx [in] with `actorder`; codes and zero points are stored plus half of their
    range."""
    words, scales = parts["weight_packed"], parts["weight_scale"]
    shape: list[int] = parts["weight_shape"].reshape(-1).tolist()  # type: ignore[assignment]
    bits = 32 * words.shape[-1] // max(shape[-1], 1)
    if bits not in _BITS or shape != [words.shape[0], 32 * words.shape[-1] // bits]:
        raise ValueError(f"codes {list(words.shape)} are no weights {shape} of 4 or 8 bits")
    if "weight_zero_point" in parts:
        zeros = _codes(parts["weight_zero_point"].T, bits).T[: shape[0]]
    else:
        zeros = mx.full(scales.shape, 1 << (bits - 1), dtype=mx.uint8)
    return _layer(_as_words(words), zeros, scales, bits, parts.get("weight_g_idx"))


def _layer(
    words: mx.array, zeros: mx.array, scales: mx.array, bits: int, groups: mx.array | None = None
) -> dict[str, mx.array]:
    """A layer of codes [out, in / n], zero points and scales [out, in / g]; `groups` [in] where inputs are mixed."""
    outputs, inputs = words.shape[0], words.shape[-1] * 32 // bits
    count = max(scales.shape[-1], 1)
    if zeros.shape != scales.shape or scales.shape[0] != outputs or inputs % count:
        raise ValueError(
            f"codes of {[outputs, inputs]}, zero points {list(zeros.shape)} and scales {list(scales.shape)} do not "
            "belong together"
        )
    if not mx.issubdtype(scales.dtype, mx.floating):
        raise ValueError(f"scales are stored as {scales.dtype}")
    size = next((size for size in _GROUPS if inputs // count % size == 0), None)
    if groups is None and size is not None:
        alike = inputs // count // size
        biases = -zeros.astype(scales.dtype) * scales
        return {"weight": words, "scales": mx.repeat(scales, alike, -1), "biases": mx.repeat(biases, alike, -1)}
    groups = mx.arange(inputs) // (inputs // count) if groups is None else _checked(groups, inputs, count)
    apart = _codes(words, bits).astype(scales.dtype) - zeros.astype(scales.dtype)[:, groups]  # exact in any dtype
    return {"weight": apart * scales[:, groups]}


def _checked(groups: mx.array, inputs: int, count: int) -> mx.array:
    """Group of each input, all of them groups that there are."""
    if groups.shape != (inputs,) or groups.min().item() < 0 or groups.max().item() >= count:  # type: ignore[operator]
        raise ValueError(f"its g_idx names other groups than 0 to {count - 1}, or is not of {inputs} inputs")
    return groups


def _as_words(words: mx.array) -> mx.array:
    """Words of 32 bits, which most formats store as signed."""
    if words.dtype not in (mx.int32, mx.uint32):
        raise ValueError(f"codes are stored as {words.dtype}, not in words of 32 bits")
    return mx.contiguous(words).view(mx.uint32)


def _codes(words: mx.array, bits: int) -> mx.array:
    """Words [..., W] -> codes [..., 32 W / bits], uint8, the lowest bits first."""
    found = _as_words(words).view(mx.uint8)
    return found if bits == 8 else mx.stack([found & 15, found >> 4], axis=-1).flatten(-2)


def _words(codes: mx.array, bits: int) -> mx.array:
    """The reverse."""
    if bits == 4:
        codes = codes[..., ::2] | (codes[..., 1::2] << 4)
    return mx.contiguous(codes).view(mx.uint32)
