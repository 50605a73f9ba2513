"""What a cycle costs: measured by number of rows and depth, and told by a line through all of it where nothing was."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

import numpy as np
import numpy.typing as npt

__all__ = ["ENOUGH", "CostModel"]

ENOUGH = 3  # cycles whose median is believed: the first of a shape may compile, and one may hiccup

_Point = tuple[int, int]  # rows, depth


class CostModel:
    """Seconds of a cycle by rows and depth, on this machine.

    At a number of rows where several depths were measured, those between are interpolated: a verify pass is close to
    linear in its width. What one number of rows teaches, others use: past what was measured there, costs are told by
    `a + b rows + c rows (depth + 1) + d depth` (fixed, per row, per token verified, per step of the head), fitted to
    all medians, if its standard error there is small. It knows its error only where there are more points than
    unknowns, so the first numbers of rows are measured in full.
    """

    _WINDOW = 9  # cycles a median is taken over: robust to a hiccup, quick to follow a growing context

    def __init__(self) -> None:
        self._seen: dict[int, dict[int, deque[float]]] = {}
        self._known: dict[int, list[tuple[int, float]]] = {}  # medians, until the next cycle of so many rows
        self._fit: _Fit | None = None
        self._age = 0  # cycles since it was fitted

    def start(self, seconds: Mapping[int, float]) -> None:
        """Take costs of one row, by depth, that were measured before; a few cycles of this process outweigh them."""
        for depth, each in seconds.items():
            for _ in range(ENOUGH):
                self.observe(1, depth, each)

    def observe(self, rows: int, depth: int, seconds: float) -> None:
        """Add a measured cycle."""
        times = self._seen.setdefault(rows, {}).setdefault(depth, deque(maxlen=self._WINDOW))
        times.append(seconds)
        self._known.pop(rows, None)
        self._age += 1
        if len(times) == ENOUGH or self._age >= self._WINDOW:  # a new point, or old ones have moved
            self._fit = None

    def samples(self, rows: int, depth: int) -> int:
        """How many cycles of this depth are remembered."""
        return len(self._seen.get(rows, {}).get(depth, ()))

    def knows(self, rows: int, depth: int) -> bool:
        """Whether a cost needs no measurement: it was measured, or can be told."""
        return self.samples(rows, depth) >= ENOUGH or self._told(rows, depth) is not None

    def seconds(self, rows: int, depth: int) -> float | None:
        """Cost of a cycle, or None as long as too little is known."""
        known = self._medians(rows)
        if self.samples(rows, depth) >= ENOUGH:
            return dict(known)[depth]
        if not (known and known[0][0] <= depth <= known[-1][0]):
            told = self._told(rows, depth)
            if told is not None:
                return told * self._correction(rows, depth, known)
        return _on_lines(known, depth) if len(known) > 1 else None

    def _medians(self, rows: int) -> list[tuple[int, float]]:
        """Depths and their costs; those measured once or twice only while there is nothing better."""
        if rows in self._known:
            return self._known[rows]
        times = sorted(self._seen.get(rows, {}).items())
        believed = [(depth, median(each)) for depth, each in times if len(each) >= ENOUGH]
        self._known[rows] = believed if len(believed) > 1 else [(depth, median(each)) for depth, each in times]
        return self._known[rows]

    def _told(self, rows: int, depth: int) -> float | None:
        if self._fit is None:
            points = {
                (r, d): median(times)
                for r, by_depth in self._seen.items()
                for d, times in by_depth.items()
                if len(times) >= ENOUGH
            }
            self._fit, self._age = _Fit(points), 0
        return self._fit.seconds(rows, depth)

    def _correction(self, rows: int, depth: int, known: list[tuple[int, float]]) -> float:
        """How far the nearest measured depth of these rows lies off the fit: the others will lie so, too."""
        nearest, seconds = min(known, key=lambda point: abs(point[0] - depth), default=(depth, None))
        told = self._told(rows, nearest)
        return seconds / told if seconds and told and self.samples(rows, nearest) >= ENOUGH else 1.0


class _Fit:
    """Least squares of relative errors, over a weak prior that keeps what the points leave open uncertain."""

    _POINTS = 6  # two more than unknowns: fewer cannot tell their own error
    _NOISE = 0.03  # relative error of a median, at least
    _SURE = 0.1  # a relative standard error below this is as good as a measurement
    _REACH = 2  # past so many times the most rows measured, a device may work in another way: no line reaches there

    def __init__(self, points: Mapping[_Point, float]) -> None:
        self._known = len(points) >= self._POINTS
        if not self._known:
            return
        self._most = self._REACH * max(rows for rows, _ in points)
        costs = np.array(list(points.values()))
        scaled = np.array([_features(*point) for point in points]) / costs[:, None]
        prior = np.eye(4) / costs.min() ** 2  # no unknown is likely to exceed the cheapest cycle
        noise = self._NOISE**2
        for _ in range(2):  # the second time with the error that the points have about the first fit
            self._spread = np.linalg.inv(scaled.T @ scaled / noise + prior)
            self._mean = self._spread @ scaled.sum(axis=0) / noise
            errors = scaled @ self._mean - 1
            noise = max(noise, float(errors @ errors) / (len(points) - 4))

    def seconds(self, rows: int, depth: int) -> float | None:
        """The cost, or None where it is uncertain."""
        if not self._known or rows > self._most:
            return None
        at = _features(rows, depth)
        value, error = float(at @ self._mean), float(at @ self._spread @ at) ** 0.5
        return value if value > 0 and error < self._SURE * value else None


def _features(rows: int, depth: int) -> npt.NDArray[np.float64]:
    return np.array([1.0, rows, rows * (depth + 1), depth])


def _on_lines(known: list[tuple[int, float]], depth: int) -> float:
    """Cost at a depth on the lines between known ones, and on the outer lines continued."""
    below = max((point for point in known if point[0] <= depth), default=known[0])
    above = min((point for point in known if point[0] >= depth), default=known[-1])
    if below[0] == above[0]:
        if below[0] == depth:
            return below[1]
        below, above = (known[0], known[1]) if depth < known[0][0] else (known[-2], known[-1])
    slope = (above[1] - below[1]) / (above[0] - below[0])
    return max(below[1] + slope * (depth - below[0]), 1e-9)
