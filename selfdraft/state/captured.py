"""What a trunk forward leaves behind so that any prefix of it can be committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from ..kernels.gated_delta_tape import Tape
from .row import RecurrentState, RowState

__all__ = ["Captured", "CapturedLayer"]


@dataclass(frozen=True)
class CapturedLayer:
    """One recurrent layer during a forward of T tokens.

    Attributes:
        window: conv inputs [B, k-1 + T, C]: the window before, then the new inputs.
        memories: memories [B, Hv, Dv, Dk] after `first`, `first` + 1, ... T tokens; with a tape, the one before them.
        first: 1 when every step was kept (verify), T when only the last was (prefill).
        tape: the T steps, in place of memories after them.
    """

    window: mx.array
    memories: list[mx.array]
    first: int
    tape: Tape | None = None

    def after(self, tokens: int, row: int) -> RecurrentState:
        """The state of `row` after the first `tokens` tokens of the forward, where there is no tape."""
        if tokens < self.first:
            raise IndexError(f"state after {tokens} tokens was not kept, only from {self.first} on")
        taps = self.window.shape[1] - (self.first + len(self.memories) - 1)
        window = self.window[row : row + 1, tokens : tokens + taps]
        return RecurrentState(window, self.memories[tokens - self.first][row : row + 1])

    def taped(self, accepted: tuple[int, ...], on_device: mx.array | None = None) -> RecurrentState:
        """The states of all rows after the first `accepted` tokens of each, where there is a tape."""
        return RecurrentState(self.window, self.memories[0], self.tape, accepted, on_device)


@dataclass
class Captured:
    """All recurrent layers of one forward, in order."""

    layers: list[CapturedLayer] = field(default_factory=list)

    def commit_on_device(self, rows: Sequence[RowState], counts: mx.array) -> None:
        """Move the recurrent states of all rows behind the first `counts` (int32 [B]) tokens, which the host does not
        know yet: lengths stay. All layers have a tape.
        """
        together = [layer.taped((), counts) for layer in self.layers]
        for index, row in enumerate(rows):
            row.recurrence = together, index

    def commit(self, rows: Sequence[RowState], tokens: Sequence[int]) -> None:
        """Keep the first tokens[i] tokens of the forward for row i: lengths move, nothing is computed again."""
        together = [layer.taped(tuple(tokens)) for layer in self.layers] if all(x.tape for x in self.layers) else None
        for index, (row, count) in enumerate(zip(rows, tokens, strict=True)):
            if count == 0:  # a row that failed keeps what it had
                continue
            if together is None:
                row.recurrent = [layer.after(count, index) for layer in self.layers]
            else:
                row.recurrence = together, index
            row.length += count
