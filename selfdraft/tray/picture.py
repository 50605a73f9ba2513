"""The icon, drawn: a colour and a sign for each state, which differ in shape as well. Knows Pillow alone."""

from __future__ import annotations

import math
from collections.abc import Callable

from PIL import Image, ImageDraw

from .reading import State

__all__ = ["picture"]

_FINE = 4  # drawn so many times larger, then scaled down: smooth edges
_WHITE = (255, 255, 255)
_COLOURS = {
    "stopped": (107, 114, 128),
    "starting": (202, 138, 4),
    "serving": (21, 128, 61),
    "decoding": (37, 99, 235),
    "stopping": (202, 138, 4),
    "crashed": (200, 30, 30),
}


def picture(state: State, width: int = 64, height: int | None = None) -> Image.Image:
    """The icon of a state.

    Args:
        width, height: in pixels; 16 is the least that can be read. The sign stands in the middle.

    Returns:
        RGB. It fills all: some trays have no transparency.
    """
    height = width if height is None else height
    size = min(width, height)
    side = size * _FINE
    sign = Image.new("RGB", (side, side), _COLOURS[state])
    _SIGNS[state](ImageDraw.Draw(sign), side)
    image = Image.new("RGB", (width, height), _COLOURS[state])
    image.paste(sign.resize((size, size), Image.Resampling.LANCZOS), ((width - size) // 2, (height - size) // 2))
    return image


def _square(draw: ImageDraw.ImageDraw, side: int) -> None:
    draw.rectangle(_box(side, 0.3, 0.3, 0.7, 0.7), fill=_WHITE)


def _dots(draw: ImageDraw.ImageDraw, side: int) -> None:
    for centre in (0.22, 0.5, 0.78):
        draw.ellipse(_box(side, centre - 0.1, 0.4, centre + 0.1, 0.6), fill=_WHITE)


def _ring(draw: ImageDraw.ImageDraw, side: int) -> None:
    draw.ellipse(_box(side, 0.18, 0.18, 0.82, 0.82), outline=_WHITE, width=math.ceil(side * 0.15))


def _arrows(draw: ImageDraw.ImageDraw, side: int) -> None:
    for left in (0.16, 0.5):
        draw.polygon([_at(side, left, 0.2), _at(side, left + 0.36, 0.5), _at(side, left, 0.8)], fill=_WHITE)


def _exclamation(draw: ImageDraw.ImageDraw, side: int) -> None:
    draw.rectangle(_box(side, 0.41, 0.14, 0.59, 0.58), fill=_WHITE)
    draw.rectangle(_box(side, 0.41, 0.7, 0.59, 0.87), fill=_WHITE)


_SIGNS: dict[State, Callable[[ImageDraw.ImageDraw, int], None]] = {
    "stopped": _square,
    "starting": _dots,
    "serving": _ring,
    "decoding": _arrows,
    "stopping": _dots,
    "crashed": _exclamation,
}


def _at(side: int, x: float, y: float) -> tuple[float, float]:
    return side * x, side * y


def _box(side: int, left: float, top: float, right: float, bottom: float) -> tuple[float, float, float, float]:
    return side * left, side * top, side * right, side * bottom
