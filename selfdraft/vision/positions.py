"""Rotary positions of a prompt with pictures. Knows sizes in tokens, no pixels.

As transformers' `Qwen3_5Model.get_rope_index`: text counts on by one a token in all of time, height and width. A
picture's tokens share one time; height and width count its rows and columns from there. What follows it goes on behind
the longer of its sides, so that positions fall behind the numbers of tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Place", "Places"]


@dataclass(frozen=True)
class Place:
    """Where a picture stands: `rows` x `columns` tokens from `start` on."""

    start: int
    rows: int
    columns: int

    @property
    def end(self) -> int:
        """The token behind it."""
        return self.start + self.rows * self.columns

    @property
    def saved(self) -> int:
        """How many positions fewer it takes than tokens."""
        return self.rows * self.columns - max(self.rows, self.columns)


class Places:
    """Where the pictures of a prompt stand, in order."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = tuple(places)
        self._ends = [place.end for place in places]
        self._deltas = [0]
        for place in places:
            self._deltas.append(self._deltas[-1] - place.saved)

    def rope_delta(self, length: int) -> int:
        """What is added to a text token's number for its position, where `length` tokens are before it."""
        return self._deltas[bisect_right(self._ends, length)]

    def within(self, start: int, end: int) -> list[int]:
        """Which pictures have tokens among start .. end - 1."""
        return [index for index, place in enumerate(self.places) if place.start < end and place.end > start]

    def positions(self, start: int, end: int) -> NDArray[np.int32]:
        """Of tokens start .. end - 1: int32 [3, T], time, height and width."""
        numbers = np.arange(start, end)
        deltas = np.array(self._deltas)[np.searchsorted(self._ends, numbers, side="right")]
        positions = np.tile(numbers + deltas, (3, 1)).astype(np.int32)
        for index in self.within(start, end):
            place = self.places[index]
            inside = slice(max(place.start, start) - start, min(place.end, end) - start)
            token, first = numbers[inside] - place.start, place.start + self._deltas[index]
            positions[:, inside] = first
            positions[1, inside] += (token // place.columns).astype(np.int32)
            positions[2, inside] += (token % place.columns).astype(np.int32)
        return positions
