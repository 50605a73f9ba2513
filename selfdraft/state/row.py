"""Everything one row remembers, and how an empty one looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..kernels import gated_delta_tape as tapes
from ..kernels.gated_delta_tape import Tape
from ..kernels.portable import number
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
        window: conv window [B, k-1, C].
        base: memory [B, Hv, Dv, Dk] (fp32), before the steps of the tape.
        tape: steps of the last forward, on a GPU: the next replays what was accepted of them; None if `base` is all.
        accepted: how many of them belong to the state, of each row.
    """

    window: mx.array
    base: mx.array
    tape: Tape | None = None
    accepted: tuple[int, ...] = ()

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
        counts = self.accepted or (0,) * self.base.shape[0]
        return number(counts[0]) if len(counts) == 1 else mx.array(counts, dtype=mx.int32)


class RowState:
    """State of one row.

    Attributes:
        length: committed tokens: those whose trunk state is held. All tokens but the last, between cycles.
        head_length: committed pairs (h_{i-1}, t_i) in the head's history; pair i sits at entry and position i-1.
        attention, head: KV buffers; entries past the lengths are leftovers that the next write replaces.
        recurrent: states after `length` tokens.
    """

    def __init__(self, shape: StateShape) -> None:
        self.length = 0
        self.head_length = 0
        self.attention = [KeyValues() for _ in range(shape.attention_layers)]
        self.head = [KeyValues() for _ in range(shape.head_layers)]
        empty = RecurrentState(
            mx.zeros((1, *shape.window), dtype=shape.dtype), mx.zeros((1, *shape.memory), dtype=mx.float32)
        )
        self.recurrent = [empty] * shape.recurrent_layers

    def fork(self) -> RowState:
        """An independent copy; arrays are shared until either side writes."""
        twin = RowState.__new__(RowState)
        twin.length, twin.head_length = self.length, self.head_length
        twin.attention = [layer.fork() for layer in self.attention]
        twin.head = [layer.fork() for layer in self.head]
        twin.recurrent = list(self.recurrent)
        return twin

    def arrays(self) -> list[mx.array]:
        """Every array held, for evaluation and accounting."""
        buffers = [x for layer in (*self.attention, *self.head) for x in (layer.keys, layer.values) if x is not None]
        return buffers + [x for layer in self.recurrent for x in (layer.window, layer.base, *_arrays(layer.tape))]


def stacked(rows: Sequence[RowState], layer: int) -> RecurrentState:
    """The recurrent states of several rows at one layer as one batch."""
    states = [row.recurrent[layer] for row in rows]
    if len(states) == 1:
        return states[0]
    held = [state.tape for state in states]
    counts = [state.accepted or (0,) * state.base.shape[0] for state in states]
    return RecurrentState(
        mx.concatenate([state.window for state in states]),
        mx.concatenate([state.base for state in states]),
        tapes.joined(held) if any(held) else None,
        tuple(count for each in counts for count in each) if any(held) else (),
    )


def _arrays(tape: Tape | None) -> list[mx.array]:
    return [tape.decay, tape.keys, tape.deltas] if tape else []
