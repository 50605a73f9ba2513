"""What a row may emit, as a mask over tokens: the interface a grammar offers. Knows no grammar, no text and no model.

The mask applies to p at every position, so what is emitted follows the law of plain decoding under the same mask. q
needs none to be exact: a draft that is not allowed has p = 0 and is rejected. At the first position the mask is known
before drafting, so q gets it too, which lifts acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..errors import InvalidRequest

__all__ = ["Allowed", "Constraint", "allowed_tokens", "dead_end"]


class Constraint(Protocol):
    """The sentences that one row may emit, as far as they go.

    End tokens are allowed where the sentence is complete, and nowhere else; where it cannot go on, nothing else is.
    """

    def allowed(self, drafts: Sequence[int]) -> npt.NDArray[np.bool_]:
        """What may stand behind the emitted tokens and each prefix of `drafts`; changes nothing.

        Returns:
            [len(drafts) + 1, n]: position i is preceded by drafts[:i]. Ids of n and above are not allowed. Positions
            behind an end, or behind a draft that is not allowed, are never reached and may hold anything. Another that
            allows nothing is a dead end: the row ends there with an error.
        """
        ...

    def emit(self, tokens: Sequence[int]) -> None:
        """Move on by tokens that were emitted."""
        ...


@dataclass(frozen=True)
class Allowed:
    """What the constraints of a batch allow.

    Attributes:
        tokens: [B, P, V]; all of them in rows without a constraint, and at dead ends, where no law could be formed.
        open: [B, P], false at dead ends.
    """

    tokens: mx.array
    open: npt.NDArray[np.bool_]

    def before_dead_end(self, row: int, tokens: list[int]) -> list[int]:
        """The tokens that a row emits in front of its first dead end, of those it was to emit."""
        dead = np.flatnonzero(~self.open[row, : len(tokens)])
        return tokens[: dead[0]] if dead.size else tokens


def allowed_tokens(
    constraints: Sequence[Constraint | None], drafts: Sequence[Sequence[int]], positions: int, vocab_size: int
) -> Allowed:
    """Ask the constraints of a batch.

    Args:
        drafts: those of each row, at most positions - 1; what lies behind a row's own means nothing.
        positions, vocab_size: P and V.
    """
    tokens = np.ones((len(constraints), positions, vocab_size), dtype=np.bool_)
    for row, (constraint, drafted) in enumerate(zip(constraints, drafts, strict=True)):
        if constraint is not None:
            mask = constraint.allowed(drafted)[:, :vocab_size]
            tokens[row, : len(mask), : mask.shape[1]] = mask
            tokens[row, : len(mask), mask.shape[1] :] = False
    is_open = np.asarray(tokens.any(axis=-1))
    tokens[~is_open] = True
    return Allowed(mx.array(tokens), is_open)


def dead_end(emitted: int) -> InvalidRequest:
    """The error of a row whose constraint allows nothing after `emitted` tokens: whoever wrote it can mend it."""
    return InvalidRequest(
        f"the grammar allows no token after {emitted} tokens: it has a dead end there, or it exceeds the limits of "
        "grammars; simplify it"
    )
