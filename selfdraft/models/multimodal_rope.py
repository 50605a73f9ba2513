"""Rotary positions of three axes, time, height and width, as pictures need them. Knows positions and no pictures.

Interleaved multimodal rotary embedding (Qwen3-VL, arXiv:2511.21631; transformers' `Qwen3_5TextRotaryEmbedding`): the
frequencies take turns between the axes. Where the three positions are equal, as in text, it is the rotary embedding of
one position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

__all__ = ["MultimodalRope", "Rotation", "multimodal_rope"]

AXES = 3


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines [T, half] (fp32) of the angles that T tokens of one row are rotated by."""

    cosines: mx.array
    sines: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        """x [1, heads, T, head_dim], rotated in pairs (i, i + half); what is behind these stays as it is."""
        half = self.cosines.shape[-1]
        first, second, rest = mx.split(x, [half, 2 * half], axis=-1)
        a, b = first.astype(mx.float32), second.astype(mx.float32)
        turned = [a * self.cosines - b * self.sines, b * self.cosines + a * self.sines]
        return mx.concatenate([*(each.astype(x.dtype) for each in turned), rest], axis=-1)


@dataclass(frozen=True)
class MultimodalRope:
    """Which axis each frequency turns with.

    Attributes:
        base: of the frequencies base^(-2i / dims).
        axes: of each frequency: 0 time, 1 height, 2 width.
    """

    base: float
    axes: tuple[int, ...]

    def at(self, positions: mx.array) -> Rotation:
        """The rotation of tokens at positions [3, T]."""
        half = len(self.axes)
        frequencies = self.base ** (-mx.arange(half, dtype=mx.float32) / half)
        angles = positions.astype(mx.float32)[mx.array(self.axes)].T * frequencies
        return Rotation(mx.cos(angles), mx.sin(angles))


def multimodal_rope(dims: int, base: float, settings: Mapping[str, Any] | None) -> MultimodalRope | None:
    """What a text config asks for; None where it has no such positions, or others than are known here.

    Args:
        dims: rotated dimensions of a head.
        settings: its `rope_parameters`.
    """
    settings = settings or {}
    sections = settings.get("mrope_section")
    plain = settings.get("rope_type", settings.get("type", "default")) == "default"
    if not plain or not settings.get("mrope_interleaved") or not _fits(sections, dims // 2):
        return None
    assert isinstance(sections, list)
    axes = [0] * (dims // 2)
    for axis in range(1, AXES):
        for index in range(axis, AXES * sections[axis], AXES):
            axes[index] = axis
    return MultimodalRope(base, tuple(axes))


def _fits(sections: object, frequencies: int) -> bool:
    """Whether there are numbers of frequencies for three axes that lie between each other."""
    if not isinstance(sections, list) or len(sections) != AXES or not all(type(each) is int for each in sections):
        return False
    inside = all(size >= 0 and AXES * (size - 1) + axis < frequencies for axis, size in enumerate(sections) if axis)
    return inside and sum(sections) == frequencies
