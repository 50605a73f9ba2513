"""Plain SVG: panels of bars and of lines, nothing else. Knows no benchmark; needs no library."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Bar", "Bars", "Lines", "picture"]

WIDTH, HEIGHT = 560, 340  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 64, 48  # margins inside a panel
COLOURS = ("#1f6fb4", "#d9741a", "#2f8f4e", "#7a4fa3", "#8a8a8a")

_STYLE = (
    "text{font-family:system-ui,'DejaVu Sans',sans-serif;font-size:12px;fill:#222}"
    ".title{font-size:15px;font-weight:600}.head{font-size:19px;font-weight:600}.warn{fill:#b00020;font-weight:600}"
    ".faint{fill:#666}.grid{stroke:#ddd}.axis{stroke:#666}"
)


@dataclass(frozen=True)
class Bar:
    """A value with its quartiles; of one colour are bars of one `kind`."""

    name: str
    value: float
    low: float
    high: float
    kind: int = 0


@dataclass(frozen=True)
class Bars:
    """A panel of bars."""

    title: str
    unit: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Lines:
    """A panel of lines over the same steps, which stand at equal distances. None is a value that was not measured."""

    title: str
    unit: str
    steps: Sequence[str]
    step_unit: str
    lines: Sequence[tuple[str, Sequence[float | None]]]


def picture(heading: str, notes: Sequence[str], warning: str, panels: Sequence[Bars | Lines]) -> str:
    """An SVG of panels, two side by side, under a heading, lines of notes and a warning, if there is one."""
    lines = [*((warning, "warn") for _ in range(1) if warning), *((note, "faint") for note in notes)]
    top = 44 + 18 * len(lines)
    height = top + HEIGHT * math.ceil(len(panels) / 2)
    width = WIDTH * min(2, len(panels))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        _text(20, 32, heading, "head"),
        *(_text(20, 54 + 18 * number, line, kind) for number, (line, kind) in enumerate(lines)),
    ]
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate({WIDTH * (number % 2)} {top + HEIGHT * (number // 2)})">')
        parts += _bars(panel) if isinstance(panel, Bars) else _lines(panel)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bars(panel: Bars) -> list[str]:
    scale = _Scale(max((bar.high for bar in panel.bars), default=1.0))
    parts = _frame(panel.title, panel.unit, scale)
    slot = (WIDTH - LEFT - RIGHT) / max(len(panel.bars), 1)
    for number, bar in enumerate(panel.bars):
        middle = LEFT + slot * (number + 0.5)
        top, thick = scale.y(bar.value), min(0.64 * slot, 56)
        parts += [
            f'<rect x="{middle - thick / 2:.1f}" y="{top:.1f}" width="{thick:.1f}" '
            f'height="{scale.y(0) - top:.1f}" fill="{COLOURS[bar.kind % len(COLOURS)]}"/>',
            f'<path d="M{middle:.1f} {scale.y(bar.low):.1f}V{scale.y(bar.high):.1f}" stroke="#222" stroke-width="2"/>',
            _text(middle, scale.y(max(bar.high, bar.value)) - 6, _short(bar.value), anchor="middle"),
        ]
        words = textwrap.wrap(bar.name, max(6, int(slot / 6.7)))[:3]
        parts += [
            _text(middle, HEIGHT - BOTTOM + 16 + 14 * line, word, anchor="middle") for line, word in enumerate(words)
        ]
    return parts


def _lines(panel: Lines) -> list[str]:
    values = [value for _, line in panel.lines for value in line if value is not None]
    scale = _Scale(max(values, default=1.0))
    parts = _frame(panel.title, panel.unit, scale)
    gap = (WIDTH - LEFT - RIGHT - 60) / max(len(panel.steps) - 1, 1)
    xs = [LEFT + 30 + gap * number for number in range(len(panel.steps))]
    parts += [_text(x, HEIGHT - BOTTOM + 16, step, anchor="middle") for x, step in zip(xs, panel.steps, strict=True)]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, panel.step_unit, "faint", "middle"))
    begin = LEFT
    for number, (name, line) in enumerate(panel.lines):
        colour = COLOURS[number % len(COLOURS)]
        points = [(x, scale.y(value), value) for x, value in zip(xs, line, strict=True) if value is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y, _ in points]
        parts.append(f'<rect x="{begin}" y="42" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(begin + 17, 52, name))
        begin += 40 + round(6.7 * len(name))
    for number, x in enumerate(xs):  # the highest value stands above its point, the lowest below: they do not meet
        here = sorted(value for _, line in panel.lines if (value := line[number]) is not None)
        parts += [_text(x, scale.y(here[-1]) - 9, _short(here[-1]), anchor="middle")] if here else []
        parts += [_text(x, scale.y(here[0]) + 18, _short(here[0]), anchor="middle")] if len(here) > 1 else []
    return parts


class _Scale:
    """The vertical axis: from 0 to a round number above the largest value."""

    def __init__(self, largest: float) -> None:
        rough = max(largest, 1e-9) * 1.12 / 4
        power = 10.0 ** math.floor(math.log10(rough))
        self.step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
        self.steps = math.ceil(max(largest, 1e-9) * 1.08 / self.step)

    def y(self, value: float) -> float:
        bottom = HEIGHT - BOTTOM
        return bottom - value / (self.step * self.steps) * (bottom - TOP)


def _frame(title: str, unit: str, scale: _Scale) -> list[str]:
    parts = [_text(LEFT, 24, title, "title"), _text(WIDTH - RIGHT, 24, unit, "faint", "end")]
    for number in range(scale.steps + 1):
        y = scale.y(number * scale.step)
        kind = "grid" if number else "axis"
        parts.append(f'<path class="{kind}" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{number * scale.step:,.6g}", "faint", "end"))
    return parts


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    attributes = f' class="{kind}"' * bool(kind) + f' text-anchor="{anchor}"' * (anchor != "start")
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(text)}</text>'


def _short(value: float) -> str:
    """Three digits."""
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:,.{min(digits, 2)}f}"
