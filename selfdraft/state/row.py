"""Everything one row remembers, and how an empty one looks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..kernels import gated_delta_tape as tapes
from ..kernels.gated_delta_tape import Tape
from ..kernels.small_arrays import numbers
from .kv import KeyValues, KeyValueShape

__all__ = ["HeadOutputs", "RecurrentState", "RowState", "StateShape", "stacked"]


@dataclass(frozen=True)
class StateShape:
    """How much state a model needs for a row.

    Attributes:
        attention, head: what each KV buffer of the trunk and of the head holds.
        dtype: of keys, values and conv windows; the memory is fp32.
        recurrent_layers: how many recurrent states.
        window: shape of a conv window, (k - 1, channels).
        memory: shape of a recurrent memory, (value heads, value dim, key dim).
    """

    attention: tuple[KeyValueShape, ...]
    head: tuple[KeyValueShape, ...]
    dtype: mx.Dtype
    recurrent_layers: int = 0
    window: tuple[int, int] = (0, 0)
    memory: tuple[int, int, int] = (0, 0, 0)

    @property
    def moment_bytes(self) -> int:
        """Bytes of what is of a row's last token alone, and does not grow with the others."""
        windows = sum(layer.window * layer.position for layer in (*self.attention, *self.head) if layer.window)
        return self.dtype.size * windows + self.recurrent_layers * self._recurrent_bytes

    def row_bytes(self, tokens: int, max_depth: int) -> int:
        """Bytes that a row of so many tokens holds, with every step of a deepest cycle kept."""
        held = self.dtype.size * sum(layer.numbers(tokens) for layer in (*self.attention, *self.head))
        return held + self.recurrent_layers * self._recurrent_bytes * (max_depth + 2)

    @property
    def _recurrent_bytes(self) -> int:
        return 4 * math.prod(self.memory) + self.dtype.size * math.prod(self.window)


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


@dataclass(frozen=True)
class HeadOutputs:
    """What each MTP module but the last handed on in one pass over true pairs: the next one's input in the pass after.

    Attributes:
        offset: entry at which the first module wrote; module j writes j entries before it, but none before 0.
        outputs: of module 0, 1, ..., [1, n, H] each.
        drafted: of the modules that the newest draft behind them went through, [1, 1, H] each, if any did.
    """

    offset: int
    outputs: tuple[mx.array, ...]
    drafted: tuple[mx.array, ...] = ()

    def newest(self, module: int, length: int) -> mx.array | None:
        """Output [1, 1, H] of a module for its newest true entry, if it has one, in a history of `length` pairs."""
        column = length - 1 - module - max(self.offset - module, 0)
        return self.outputs[module][:, column : column + 1] if column >= 0 else None

    def only_newest(self, length: int) -> HeadOutputs:
        """All that a pass behind `length` pairs needs."""
        columns = [self.newest(module, length) for module in range(len(self.outputs))]
        empty = self.outputs[0][:, :0]
        return HeadOutputs(length - 1, tuple(empty if column is None else column for column in columns))


class RowState:
    """State of one row.

    Attributes:
        shape: what it is made of.
        length: committed tokens: those whose trunk state is held. All tokens but the last, between cycles.
        rope_delta: what is added to an entry's number for the rotary position of tokens that come next: not 0 behind
            pictures alone.
        head_length: committed pairs (h_{i-1}, t_i) in the head's history; pair i sits at entry and position i-1.
        attention, head: KV buffers; entries past the lengths are leftovers that the next write replaces.
        head_outputs: of MTP modules that feed each other, if the head has several.
        number: under which other ranks hold their parts of the row; 0 where there are none. A fork has it, too.
    """

    number = 0

    def __init__(self, shape: StateShape) -> None:
        self.shape = shape
        self.length = 0
        self.rope_delta = 0
        self.head_length = 0
        self.attention = [KeyValues(layer.window) for layer in shape.attention]
        self.head = [KeyValues(layer.window) for layer in shape.head]
        self.head_outputs: HeadOutputs | None = None
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
        twin.shape, twin.length, twin.head_length = self.shape, self.length, self.head_length
        twin.rope_delta = self.rope_delta
        twin.attention = [layer.fork() for layer in self.attention]
        twin.head = [layer.fork() for layer in self.head]
        twin.head_outputs, twin.number = self.head_outputs, self.number
        twin.recurrence = list(self._held), self._row
        return twin

    def arrays(self) -> list[mx.array]:
        """Every array held, for evaluation; of a batch, those of the rows beside it, too."""
        buffers = [x for layer in (*self.attention, *self.head) for x in (layer.keys, layer.values) if x is not None]
        outputs = self.head_outputs.outputs if self.head_outputs else ()
        return [*buffers, *outputs, *(x for layer in self._held for x in layer.arrays())]


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
