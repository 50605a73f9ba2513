"""Keys and values of one row at one attention layer, and attention over a batch of such rows."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..kernels import few_query_attention as few_queries
from ..kernels.small_arrays import numbers

__all__ = ["DOUBLED", "GROWTH", "KeyValueShape", "KeyValues", "Room", "attend", "capacity"]

GROWTH = 256  # entries by which a buffer grows at first
_SHARE = 16  # then by this part of it or more: long ones are copied, and compiled for, less often
DOUBLED = 32768  # entries of the largest buffer that is a power of two because it should be


def capacity(tokens: int) -> int:
    """Entries of a buffer that holds so many."""
    step = GROWTH
    while step * _SHARE < tokens:
        step *= 2
    return -(-tokens // step) * step


@dataclass(frozen=True)
class Room:
    """How large buffers are made, whenever they are made or grow. What they hold does not hang on it.

    Attributes:
        least: entries for which there is room from the first on: up to these, nothing is copied.
        doubling: powers of two up to `DOUBLED`: few sizes, for each of which a graph is compiled, but up to twice what
            is needed. Else what `capacity` says.
        most: entries that no power of two need go beyond.
    """

    least: int = 0
    doubling: bool = False
    most: int = DOUBLED

    def entries(self, tokens: int) -> int:
        """Entries of a buffer that holds so many."""
        needed = capacity(max(tokens, self.least))
        if not self.doubling or needed > DOUBLED:
            return needed
        doubled = GROWTH
        while doubled < needed:
            doubled *= 2
        return max(min(doubled, capacity(self.most)), needed)


@dataclass(frozen=True)
class KeyValueShape:
    """What an attention layer keeps of each position.

    Attributes:
        heads: of keys and values.
        key_width, value_width: numbers a head; 0 for none.
        window: how many positions, its own included, a query sees; None for all before it.
        behind: how many entries fewer than pairs the head's history has of it; see `mtp_modules.py`.
    """

    heads: int
    key_width: int
    value_width: int
    window: int | None = None
    behind: int = 0

    def numbers(self, tokens: int) -> int:
        """How many numbers a row of so many tokens keeps."""
        entries = capacity(tokens)
        if self.window is not None:
            entries = min(entries, capacity(self.window + 2 * GROWTH))
        return entries * self.position

    @property
    def position(self) -> int:
        """How many numbers a position keeps."""
        return self.heads * (self.key_width + self.value_width)


class KeyValues:
    """A growing buffer of keys and values, each [1, heads, capacity, width].

    It holds no length: the caller says where it writes, so moving a length back is the whole of a rollback.
    A `fork` shares the arrays until one side writes.

    Args:
        window: how many positions a query sees, see `KeyValueShape`. What lies further back is dropped, but
            for `GROWTH` entries: a length may move back by as many.

    Attributes:
        keys, values: None until something is written.
        first: position of the buffers' entry 0.
        room: how large they are made from now on.
    """

    def __init__(self, window: int | None = None) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.window = window
        self.first = 0
        self.room = Room()
        self._shared = False  # with a fork, as far as is known

    def fork(self) -> KeyValues:
        """A copy that may be written to without changing this one."""
        self._shared = True
        return copy.copy(self)

    def writable(self, end: int, heads: int, width: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Keys and values, each [1, heads, capacity, width] with room for `end` positions, that nobody else has: for a
        kernel that writes into them."""
        kept = []
        for buffer in (self.keys, self.values):
            held = 0 if buffer is None else buffer.shape[2]
            if buffer is None or held < end:
                buffer = _grown(buffer, self.room.entries(end), mx.zeros((1, heads, 1, width), dtype=dtype))
            elif self._shared:
                buffer = buffer * 1  # other memory, the same bits
            kept.append(buffer)
        self.keys, self.values = kept
        self._shared = False
        return self.keys, self.values

    def write(self, offset: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store [1, heads, T, width] at position `offset`; whatever was there or after it is dropped.

        Returns:
            Keys and values of positions `begin(offset)` .. offset + T.
        """
        self._drop_unseen(offset)
        place = offset - self.first
        self.keys = _stored(self.keys, self.room, place, keys)
        self.values = _stored(self.values, self.room, place, values)
        self._shared = False
        return self.between(self.begin(offset), offset + keys.shape[2])

    def between(self, first: int, end: int) -> tuple[mx.array, mx.array]:
        """Keys and values of positions first .. end - 1, all of which are held."""
        assert self.keys is not None
        assert self.values is not None
        held = slice(first - self.first, end - self.first)
        return self.keys[:, :, held], self.values[:, :, held]

    def begin(self, offset: int) -> int:
        """The first position that a query at `offset` sees."""
        return 0 if self.window is None else max(offset - self.window + 1, 0)

    def _drop_unseen(self, offset: int) -> None:
        """Let go of entries that no query at `offset` or `GROWTH` before it sees, as many as are worth a copy."""
        unseen = self.begin(offset - GROWTH) - self.first
        if self.keys is None or self.values is None or unseen < GROWTH:
            return
        held = slice(unseen, offset - self.first)
        self.keys, self.values = mx.contiguous(self.keys[:, :, held]), mx.contiguous(self.values[:, :, held])
        self.first += unseen


def _stored(buffer: mx.array | None, room: Room, offset: int, new: mx.array) -> mx.array:
    end = offset + new.shape[2]
    if buffer is None or buffer.shape[2] < end:
        buffer = _grown(buffer, room.entries(end), new)
    return mx.slice_update(buffer, new, mx.array([offset]), (2,))


def _grown(buffer: mx.array | None, entries: int, like: mx.array) -> mx.array:
    """A buffer of so many entries that begins as this one, which is copied."""
    _, heads, _, width = like.shape
    held = 0 if buffer is None else buffer.shape[2]
    extra = mx.zeros((1, heads, entries - held, width), dtype=like.dtype)
    return extra if buffer is None else mx.concatenate([buffer, extra], axis=2)


def attend(
    rows: Sequence[KeyValues], offsets: Sequence[int], q: mx.array, k: mx.array, v: mx.array, scale: float
) -> mx.array:
    """Causal attention in which every row sees its own past only.

    Each row is attended over exactly its own length: nothing is padded, and a row's arithmetic does not depend on which
    rows are beside it.

    Args:
        rows: one buffer a row; new keys and values are written at `offsets`.
        q: [B, query heads, T, head_dim]; k, v: [B, kv heads, T, head_dim], all after rotary embedding.

    Returns:
        [B, query heads, T, head_dim].
    """
    places = list(zip(rows, offsets, strict=True))
    seen = [row.write(offset, k[i : i + 1], v[i : i + 1]) for i, (row, offset) in enumerate(places)]
    if few_queries.CHECK.passed and few_queries.fits(q, [keys for keys, _ in seen]):
        keys = [row.keys for row in rows if row.keys is not None]  # all of them: each was written
        values = [row.values for row in rows if row.values is not None]
        ends = numbers(tuple(offset + q.shape[2] for offset in offsets))
        return few_queries.few_query_attention(q, keys, values, ends, scale=scale)
    mask = "causal" if q.shape[2] > 1 else None
    outputs = [
        mx.fast.scaled_dot_product_attention(q[i : i + 1], *pair, scale=scale, mask=mask) for i, pair in enumerate(seen)
    ]
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=0)
