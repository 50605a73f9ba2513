"""What a row asks of a bank of prefixes, and what it hands to it. Knows no bank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import mlx.core as mx

from ..state import RowState

__all__ = ["Boundary", "Cut", "Session"]


class Cut(NamedTuple):
    """Tokens up to `end` that were forwarded as one chunk of a prefill; or, if not `chunk`, one by one."""

    end: int
    chunk: bool


@dataclass(frozen=True)
class Boundary:
    """All that a row needs to go on behind its first `state.length` tokens.

    Attributes:
        state: trunk state of these tokens; if the row drafts, the head's history of every pair among them.
        hidden: the trunk's hidden of the last of them, [1, H]: the pair with the token that comes next needs it.
        cuts: how they were forwarded. Other cuts may give other low bits; these give the same.
    """

    state: RowState
    hidden: mx.array
    cuts: tuple[Cut, ...]

    @property
    def drafts(self) -> bool:
        """Whether the head's history is there."""
        return self.state.head_length == self.state.length - 1


class Session(Protocol):
    """A request's view of a bank. All calls come from the engine's thread, between forwards.

    Attributes:
        stops: lengths of the prompt, in increasing order and below its own, at which prefill is cut and a boundary
            handed over.
    """

    @property
    def stops(self) -> Sequence[int]:
        """See above."""

    def resume(self, length: int, *, drafts: bool) -> Boundary | None:
        """The longest prefix of the prompt that is known, if it is longer than `length` and shorter than the prompt.

        Args:
            drafts: whether it must come with the head's history.
        """

    def keep(self, tokens: Sequence[int], boundary: Boundary) -> None:
        """Take a boundary behind `tokens`. Its arrays are shared with the row, and neither side writes into them."""

    def release(self) -> None:
        """The row has ended: what it went on from need not stay for it."""
