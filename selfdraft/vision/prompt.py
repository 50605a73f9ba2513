"""The pictures of one prompt, as the engine passes them on. Implements `engine.Inputs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..images import Picture
from ..models.spliced import Spliced
from .positions import Places
from .tower import Tower

__all__ = ["PictureInputs"]


class PictureInputs:
    """Pictures, their places in a prompt of `length` tokens, and their embeddings once they are wanted.

    Rows of one prompt share it: a picture is encoded once for all of them, and never if they all go on from behind it.
    """

    def __init__(self, tower: Tower, pictures: Sequence[Picture], places: Places, length: int) -> None:
        self._tower = tower
        self._pictures = list(pictures)
        self.places = places
        self._length = length
        self._grids = [tower.grid(picture) for picture in pictures]
        self._embeddings: dict[int, mx.array] = {}

    def __len__(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        """See `engine.Inputs`."""
        return sum(self._tower.embeddings_bytes(grid) for grid in self._grids)

    @property
    def working_bytes(self) -> int:
        """See `engine.Inputs`: pictures are encoded one at a time."""
        return max(self._tower.working_bytes(grid) for grid in self._grids)

    def outside(self, stop: int) -> bool:
        """Whether the first `stop` tokens hold no part of a picture without the rest."""
        return all(stop <= place.start or stop >= place.end for place in self.places.places)

    def prepare(self, start: int, end: int) -> bool:
        """See `engine.Inputs`: encodes a picture."""
        for index in self.places.within(start, end):
            if index not in self._embeddings:
                self._embeddings[index] = self._tower.encode(self._pictures[index], self._grids[index])
                return True
        return False

    def rope_delta(self, length: int) -> int:
        """See `engine.Inputs`."""
        return self.places.rope_delta(length)

    def trunk(self, start: int, end: int) -> dict[str, Any]:
        """See `engine.Inputs`."""
        if not self.places.within(start, end):
            return {}
        return {"spliced": Spliced(self._spliced(start, end), mx.array(self.places.positions(start, end)))}

    def head(self, start: int, end: int) -> dict[str, Any]:
        """See `engine.Inputs`: a pair has the embedding of its token, and the position of the one before."""
        if not self.places.within(start - 1, end):
            return {}
        return {"spliced": Spliced(self._spliced(start, end), mx.array(self.places.positions(start - 1, end - 1)))}

    def _spliced(self, start: int, end: int) -> list[tuple[int, mx.array]]:
        """Embeddings among tokens start .. end - 1, each with its place there."""
        found = []
        for index in self.places.within(start, end):
            place = self.places.places[index]
            first, last = max(place.start, start), min(place.end, end)
            found.append((first - start, self._embeddings[index][first - place.start : last - place.start]))
        return found
