"""How deep to draft. Choices look at the past only, so they cannot bias what is emitted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .costs import ENOUGH, CostModel

__all__ = ["AdaptiveDepth", "CostModel", "DepthPolicy", "DepthStart", "FixedDepth", "expected_tokens"]


_HOPED = 0.85  # acceptance before anything is known: optimistic, so that the deepest comes first


def expected_tokens(acceptance: list[float], depth: int) -> float:
    """Expected tokens of a cycle: 1 + a_1 + a_1 a_2 + ... up to `depth`, with conditional acceptances a_i."""
    total, alive = 1.0, 1.0
    for rate in acceptance[:depth]:
        alive *= rate
        total += alive
    return total


@dataclass(frozen=True)
class DepthStart:
    """What was measured before, with one row, for `AdaptiveDepth` to begin with.

    Attributes:
        depth: that was fastest; 0 if none beat plain decoding.
        seconds: of a cycle, by depth.
        acceptance: of positions 1, 2, ..., each given that those before were accepted.
    """

    depth: int
    seconds: Mapping[int, float]
    acceptance: Sequence[float]


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
    """Maximises expected tokens over cost; starts at the deepest, or where it paid when this machine was measured.

    Starting deep measures the acceptance of every position at once, where climbing from 1 needs many cycles. Depths
    whose cost is neither measured nor told by the costs of others are probed a few times; a switch needs a clear gain;
    while running shallow, a deeper cycle is tried now and then, so that a text that becomes easy again is noticed.

    Args:
        costs: shared by all rows; what `start` says of them must be in there already.
    """

    _GAIN = 1.03  # a switch must promise this much more
    _RECHECK = 48  # cycles between deeper tries
    _MEMORY = 0.92  # weight of the past in the acceptance averages

    def __init__(self, max_depth: int, costs: CostModel, start: DepthStart | None = None) -> None:
        self._max_depth = max_depth
        self._costs = costs
        measured = list(start.acceptance[:max_depth]) if start else []
        deeper = min([_HOPED, *measured[-1:]])  # a head seldom does better deeper down
        self._acceptance = measured + [deeper] * (max_depth - len(measured))
        self._depth = min(start.depth, max_depth) if start else max_depth
        deepest = min(max(start.seconds), max_depth) if start else max_depth
        self._anchors = sorted({deepest, deepest // 2, min(1, deepest), 0}, reverse=True)
        self._probed: Counter[tuple[int, int]] = Counter()
        self._since_deeper = 0

    def choose(self, rows: int) -> int:
        for depth in self._anchors:
            # A deeper row beside this one sets what the cycle is measured as, so the tries are counted here too.
            if self._probed[rows, depth] < ENOUGH and not self._costs.knows(rows, depth):
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
