"""Everything one row remembers, and how an empty one looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..kernels import gated_delta_tape as tapes
from ..kernels.gated_delta_tape import Tape
from ..kernels.small_arrays import numbers
from .kv import KeyValues

__all__ = ["RecurrentState", "RowState", "StateShape", "stacked"]


@dataclass(frozen=True)
class StateShape:
    """How much state a model needs for a row.

    Attributes:
        attention_layers, head_layers: how many KV buffers the trunk and the head use.
        recurrent_layers: how many recurrent states.
        window: shape of a conv window, (k - 1, channels).
        memory: shape of a recurrent memory, (value heads, value dim, key dim).
        dtype: of the conv window; the memory is fp32.
    """

    attention_layers: int
    head_layers: int
    recurrent_layers: int
    window: tuple[int, int]
    memory: tuple[int, int, int]
    dtype: mx.Dtype


@dataclass(frozen=True)
class RecurrentState:
    """One GatedDeltaNet layer of B rows.

    Attributes:
        inputs: conv inputs [B, k-1 + T', C]: the window before the tape's T' steps, then theirs.
        base: memory [B, Hv, Dv, Dk] (fp32), before the steps of the tape.
        tape: steps of the last forward, on a GPU: the next replays what was accepted of them; None if `base` is all.
        accepted: how many of them belong to the state, of each row.
        on_device: the same, int32 [B], where the host does not know it yet.
    """

    inputs: mx.array
    base: mx.array
    tape: Tape | None = None
    accepted: tuple[int, ...] = ()
    on_device: mx.array | None = None

    @property
    def rows(self) -> int:
        """B."""
        return self.base.shape[0]

    def row(self, row: int) -> RecurrentState:
        """The state of one row."""
        assert self.on_device is None, "what the host does not know yet is put back before anybody looks"
        if self.rows == 1:
            return self
        only = slice(row, row + 1)
        tape = self.tape.row(row) if self.tape else None
        return RecurrentState(self.inputs[only], self.base[only], tape, self.accepted[only])

    def arrays(self) -> tuple[mx.array, ...]:
        """`inputs`, `base` and, if there is a tape, its array."""
        return (self.inputs, self.base, self.tape.array) if self.tape else (self.inputs, self.base)

    @property
    def window(self) -> mx.array:
        """The conv window behind the accepted steps, [B, k-1, C]."""
        assert self.on_device is None
        if self.tape is None:
            return self.inputs
        taps = self.inputs.shape[1] - self.tape.steps
        windows = [self.inputs[row : row + 1, count : count + taps] for row, count in enumerate(self.accepted)]
        return windows[0] if len(windows) == 1 else mx.concatenate(windows)

    @property
    def memory(self) -> mx.array:
        """The memory with the accepted steps, [B, Hv, Dv, Dk]: bit for bit what the next forward begins with."""
        if self.tape is None:
            return self.base
        again = tapes.gated_delta_replay if tapes.CHECK.passed else tapes.replay
        return again(self.base, self.tape, self.counts)

    @property
    def counts(self) -> mx.array:
        """`accepted` on the device, int32 [B]; 0 where there is no tape."""
        if self.on_device is not None:
            return self.on_device
        return numbers(self.accepted or (0,) * self.rows)


class RowState:
    """State of one row.

    Attributes:
        length: committed tokens: those whose trunk state is held. All tokens but the last, between cycles.
        head_length: committed pairs (h_{i-1}, t_i) in the head's history; pair i sits at entry and position i-1.
        attention, head: KV buffers; entries past the lengths are leftovers that the next write replaces.
    """

    def __init__(self, shape: StateShape) -> None:
        self.length = 0
        self.head_length = 0
        self.attention = [KeyValues() for _ in range(shape.attention_layers)]
        self.head = [KeyValues() for _ in range(shape.head_layers)]
        empty = RecurrentState(
            mx.zeros((1, *shape.window), dtype=shape.dtype), mx.zeros((1, *shape.memory), dtype=mx.float32)
        )
        self._held, self._row = [empty] * shape.recurrent_layers, 0

    @property
    def recurrent(self) -> list[RecurrentState]:
        """States after `length` tokens, one a layer, of this row alone."""
        if self._held and self._held[0].rows > 1:
            self._held, self._row = [layer.row(self._row) for layer in self._held], 0
        return self._held

    @recurrent.setter
    def recurrent(self, layers: list[RecurrentState]) -> None:
        self._held, self._row = layers, 0

    @property
    def recurrence(self) -> tuple[list[RecurrentState], int]:
        """The same as the batch that they were computed in and this row's place there: what `stacked` puts together
        again without a copy. Never changed in place."""
        return self._held, self._row

    @recurrence.setter
    def recurrence(self, held: tuple[list[RecurrentState], int]) -> None:
        self._held, self._row = held

    def fork(self) -> RowState:
        """An independent copy; arrays are shared until either side writes."""
        twin = RowState.__new__(RowState)
        twin.length, twin.head_length = self.length, self.head_length
        twin.attention = [layer.fork() for layer in self.attention]
        twin.head = [layer.fork() for layer in self.head]
        twin.recurrence = list(self._held), self._row
        return twin

    def arrays(self) -> list[mx.array]:
        """Every array held, for evaluation; of a batch, those of the rows beside it, too."""
        buffers = [x for layer in (*self.attention, *self.head) for x in (layer.keys, layer.values) if x is not None]
        return buffers + [x for layer in self._held for x in layer.arrays()]


def stacked(rows: Sequence[RowState]) -> list[RecurrentState]:
    """The recurrent states of several rows as one batch, a layer each."""
    layers, _ = rows[0].recurrence
    if all(row.recurrence[0] is layers and row.recurrence[1] == place for place, row in enumerate(rows)) and (
        not layers or layers[0].rows == len(rows)
    ):
        return layers
    return [_batch(list(states)) for states in zip(*(row.recurrent for row in rows), strict=True)]


def _batch(states: Sequence[RecurrentState]) -> RecurrentState:
    if len(states) == 1:
        return states[0]
    held = [state.tape for state in states]
    if not any(held):
        inputs, base = ([getattr(state, name) for state in states] for name in ("inputs", "base"))
        return RecurrentState(mx.concatenate(inputs), mx.concatenate(base))
    # Tapes of other lengths: shorter ones are padded at the end, which nobody accepts.
    longest = max(state.inputs.shape[1] for state in states)
    inputs = [mx.pad(state.inputs, [(0, 0), (0, longest - state.inputs.shape[1]), (0, 0)]) for state in states]
    counts = tuple(count for state in states for count in state.accepted or (0,))
    return RecurrentState(
        mx.concatenate(inputs), mx.concatenate([state.base for state in states]), tapes.joined(held), counts
    )
