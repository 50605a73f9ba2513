"""FP8 weights with a scale a block, as DeepSeek-V3 is released (arXiv 2412.19437, section 3.3), read as bf16.

Weights are e4m3; the scale of each block of 128 x 128, `weight_scale_inv` [ceil(M / 128), ceil(N / 128)], is what a
weight is multiplied by. Nothing is evaluated here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx

__all__ = ["BLOCK", "SCALES", "dequantised"]

BLOCK = 128

SCALES = "_scale_inv"


def dequantised(
    tensors: Mapping[str, mx.array], anew: Callable[[str], int | None] = lambda name: None
) -> dict[str, mx.array]:
    """Tensors by name, those with scales as bf16 and without them; the others as they are.

    Args:
        anew: name of a weight -> after how many rows its blocks begin anew, if the number of scales says so.

    Raises:
        ValueError: another format of FP8 than the one above, by name.
    """
    if alone := sorted(name for name in tensors if name.endswith(SCALES) and _weight_of(name) not in tensors):
        raise ValueError(f"{alone[0]} has no {_weight_of(alone[0])}")
    return {
        name: _by_parts(name, tensor, tensors[name + SCALES], anew(name)) if name + SCALES in tensors else tensor
        for name, tensor in tensors.items()
        if not name.endswith(SCALES)
    }


def _weight_of(scales: str) -> str:
    return scales.removesuffix(SCALES)


def _by_parts(name: str, weight: mx.array, scales: mx.array, rows: int | None) -> mx.array:
    """A weight whose blocks may begin anew after so many rows."""
    if rows is not None and weight.shape[0] % rows == 0:
        parts = weight.shape[0] // rows
        if scales.shape[0] == parts * -(-rows // BLOCK) != -(-weight.shape[0] // BLOCK):
            pairs = zip(mx.split(weight, parts), mx.split(scales, parts), strict=True)
            return mx.concatenate([_dequantised(name, *pair) for pair in pairs])
    return _dequantised(name, weight, scales)


def _dequantised(name: str, weight: mx.array, scales: mx.array) -> mx.array:
    """Weight uint8 [..., M, N] and its scales, fp32 [..., blocks of M, blocks of N], as bf16 [..., M, N]."""
    *first, rows, columns = weight.shape
    blocks = -(-rows // BLOCK), -(-columns // BLOCK)
    if weight.dtype != mx.uint8 or not mx.issubdtype(scales.dtype, mx.floating) or scales.shape != (*first, *blocks):
        raise ValueError(
            f"{name} is {weight.dtype} {list(weight.shape)} with scales {scales.dtype} {list(scales.shape)}; FP8 in "
            f"blocks of {BLOCK} has floating scales {[*first, *blocks]}"
        )
    missing = [(0, 0)] * len(first) + [(0, blocks[0] * BLOCK - rows), (0, blocks[1] * BLOCK - columns)]
    whole = mx.pad(mx.from_fp8(weight, dtype=mx.bfloat16), missing)
    whole = whole.reshape(*first, blocks[0], BLOCK, blocks[1], BLOCK) * scales[..., :, None, :, None]
    whole = whole.reshape(*first, blocks[0] * BLOCK, blocks[1] * BLOCK)
    return whole[..., :rows, :columns].astype(mx.bfloat16)
