"""How deep to draft. Choices look at the past only, so they cannot bias what is emitted."""

from __future__ import annotations

from collections import Counter, deque
from statistics import median
from typing import Protocol

__all__ = ["AdaptiveDepth", "CostModel", "DepthPolicy", "FixedDepth", "expected_tokens"]


def expected_tokens(acceptance: list[float], depth: int) -> float:
    """Expected tokens of a cycle: 1 + a_1 + a_1 a_2 + ... up to `depth`, with conditional acceptances a_i."""
    total, alive = 1.0, 1.0
    for rate in acceptance[:depth]:
        alive *= rate
        total += alive
    return total


class CostModel:
    """What a cycle costs by depth, in seconds, measured on this machine for a given number of rows.

    Costs of depths never run are interpolated: a verify pass is close to linear in its width.
    """

    _WINDOW = 9  # cycles a median is taken over: robust to a hiccup, quick to follow a growing context

    def __init__(self) -> None:
        self._seen: dict[int, dict[int, deque[float]]] = {}

    def observe(self, rows: int, depth: int, seconds: float) -> None:
        """Add a measured cycle."""
        by_depth = self._seen.setdefault(rows, {})
        by_depth.setdefault(depth, deque(maxlen=self._WINDOW)).append(seconds)

    def samples(self, rows: int, depth: int) -> int:
        """How many cycles of this depth are remembered."""
        return len(self._seen.get(rows, {}).get(depth, ()))

    def seconds(self, rows: int, depth: int) -> float | None:
        """Cost of a cycle, or None as long as fewer than two depths were measured."""
        known = sorted((d, median(times)) for d, times in self._seen.get(rows, {}).items())
        if len(known) < 2:
            return None
        below = max((point for point in known if point[0] <= depth), default=known[0])
        above = min((point for point in known if point[0] >= depth), default=known[-1])
        if below[0] == above[0]:
            if below[0] == depth:
                return below[1]
            below, above = (known[0], known[1]) if depth < known[0][0] else (known[-2], known[-1])
        slope = (above[1] - below[1]) / (above[0] - below[0])
        return max(below[1] + slope * (depth - below[0]), 1e-9)


class DepthPolicy(Protocol):
    """Chooses the depth of a row's next cycle."""

    def choose(self, rows: int) -> int:
        """Depth of the next cycle, given how many rows run."""

    def observe(self, tried: int, accepted: int) -> None:
        """Learn what the last cycle did with its drafts."""


class FixedDepth:
    """Always the same depth."""

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def choose(self, rows: int) -> int:
        return self._depth

    def observe(self, tried: int, accepted: int) -> None:
        """Nothing to learn."""


class AdaptiveDepth:
    """Maximises expected tokens over measured cost; starts at the deepest.

    Starting deep measures the acceptance of every position at once, where climbing from 1 needs many cycles. Depths
    whose cost is unknown are probed a few times; a switch needs a clear gain; while running shallow, a deeper cycle is
    tried now and then, so that a text that becomes easy again is noticed.
    """

    _PROBES = 3  # cycles that measure the cost of an anchor depth
    _GAIN = 1.03  # a switch must promise this much more
    _RECHECK = 48  # cycles between deeper tries
    _MEMORY = 0.92  # weight of the past in the acceptance averages

    def __init__(self, max_depth: int, costs: CostModel) -> None:
        self._max_depth = max_depth
        self._costs = costs
        self._acceptance = [0.85] * max_depth  # optimistic, so that the deepest comes first
        self._anchors = sorted({max_depth, max_depth // 2, 1, 0}, reverse=True)
        self._probed: Counter[tuple[int, int]] = Counter()
        self._depth = max_depth
        self._since_deeper = 0

    def choose(self, rows: int) -> int:
        for depth in self._anchors:
            # A deeper row beside this one sets what the cycle is measured as, so the tries are counted here too.
            if max(self._costs.samples(rows, depth), self._probed[rows, depth]) < self._PROBES:
                self._probed[rows, depth] += 1
                return depth
        best = max(range(self._max_depth + 1), key=lambda depth: self._rate(rows, depth))
        if self._rate(rows, best) > self._GAIN * self._rate(rows, self._depth):
            self._depth = best
        self._since_deeper += 1
        if self._depth < self._max_depth and self._since_deeper >= self._RECHECK:
            self._since_deeper = 0
            return self._depth + 1
        return self._depth

    def observe(self, tried: int, accepted: int) -> None:
        for position in range(tried):
            outcome = 1.0 if position < accepted else 0.0
            self._acceptance[position] += (1 - self._MEMORY) * (outcome - self._acceptance[position])

    def _rate(self, rows: int, depth: int) -> float:
        seconds = self._costs.seconds(rows, depth)
        return expected_tokens(self._acceptance, depth) / seconds if seconds else 0.0
