"""What a cycle that is started before the one ahead of it is read takes over, on the device. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..state import RecurrentState, RowState
from .row import Row

__all__ = ["Place", "Unread", "may_draft_ahead"]


@dataclass(frozen=True)
class Unread:
    """The outcome of a cycle that the host has not read.

    Attributes:
        last: the newest token of every row, [B, 1].
        accepted: drafts of each row that stay, int32 [B]; None where no row drafts.
        counts: tokens that each row emitted, int32 [B]; None where all emitted one, for no row drafts.
        most: the largest that can be; also how many counters of noise each row used up.
        hidden, tokens: the pairs that the head has not seen, [B, most, H] and [B, most]; those behind `counts` mean
            nothing. None where no row drafts.
    """

    last: mx.array
    accepted: mx.array | None = None
    counts: mx.array | None = None
    most: int = 1
    hidden: mx.array | None = None
    tokens: mx.array | None = None


@dataclass(frozen=True)
class Place:
    """Where a row's state stood, to be put back there."""

    state: RowState
    recurrence: tuple[list[RecurrentState], int]
    length: int

    @staticmethod
    def of(state: RowState) -> Place:
        return Place(state, state.recurrence, state.length)

    def put_back(self) -> None:
        self.state.recurrence, self.state.length = self.recurrence, self.length


def may_draft_ahead(rows: Sequence[Row], depths: Sequence[int], following: Sequence[int]) -> bool:
    """Whether rows that draft, and draft again, may do so before the host knows what they emit in between.

    They may not where that decides what comes next on the host: penalties, tokens that are still withheld, an end that
    is near, pairs that wait for the head.

    Args:
        depths, following: of the cycle that is not read, and of the one behind it.
    """
    return all(
        depth > 0
        and after > 0
        and row.history is None
        and row.pending is None
        and (not row.stop_ids or len(row.emitted) >= row.params.min_tokens)
        and row.remaining >= depth + after + 2
        for row, depth, after in zip(rows, depths, following, strict=True)
    )
