"""Guards states that kernels write into: a buffer is nobody else's, and a batch's recurrent states are each row's own.

Writes go to memory past MLX, as on a GPU, so that whoever shares it sees them. Histories are random but the same in
every run: forks, rollbacks, growth, sessions, rows that fail, join and leave.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.engine import Boundary, Cut
from selfdraft.kernels.gated_delta_tape import gated_delta_verify_reference
from selfdraft.models.few_rows import use_few_row_kernels
from selfdraft.sessions.payload import cut_moment, cut_span, expanded, join, quantised
from selfdraft.state import GROWTH, Captured, CapturedLayer, KeyValues, KeyValueShape, RowState, StateShape, stacked
from tests.support.nano import nano_model
from tests.support.real_memory import RealMemory, overwrite

HEADS, WIDTH = 2, 4
DTYPES = [mx.float32, mx.bfloat16, mx.float16]


def entries(values: Sequence[int], dtype: mx.Dtype = mx.float32) -> mx.array:
    column = mx.array(list(values)).reshape(1, 1, -1, 1).astype(dtype)
    return mx.broadcast_to(column, (1, HEADS, len(values), WIDTH)) * 1


def held(buffer: mx.array | None, length: int) -> list[int]:
    assert buffer is not None
    found: Any = buffer[0, 1, :length, 2].astype(mx.int32).tolist()
    return list(found)


def write_in_place(kv: KeyValues, offset: int, values: Sequence[int], dtype: mx.Dtype = mx.float32) -> None:
    """As a kernel does: keys are the values, values their negatives."""
    keys, negatives = kv.writable(offset + len(values), HEADS, WIDTH, dtype)
    assert keys is not negatives
    assert keys.shape == negatives.shape
    overwrite(keys, offset, entries(values, dtype))
    overwrite(negatives, offset, -entries(values, dtype))


@dataclass
class Copy:
    """A buffer, and what it should hold."""

    kv: KeyValues = field(default_factory=KeyValues)
    expected: list[int] = field(default_factory=list)

    def check(self) -> None:
        if self.expected:
            assert held(self.kv.keys, len(self.expected)) == self.expected
            assert held(self.kv.values, len(self.expected)) == [-value for value in self.expected]


@pytest.mark.parametrize("seed", range(8))
def test_random_histories_of_forks_writes_and_rollbacks(seed: int) -> None:
    rng, dtype = random.Random(seed), DTYPES[seed % 3]
    copies, fresh = [Copy()], iter(range(1, 10**6))
    for _ in range(120):
        copy = rng.choice(copies)
        kind = rng.choice(["in place", "in place", "store", "fork", "roll back", "drop", "evaluate"])
        count = rng.choice([1, 1, 4, 9, GROWTH - len(copy.expected) % GROWTH])
        values = [next(fresh) % 199 for _ in range(count)]  # each is exact in every dtype
        if kind == "in place":
            write_in_place(copy.kv, len(copy.expected), values, dtype)
            copy.expected = copy.expected + values
        elif kind == "store":
            new = entries(values, dtype)
            copy.kv.write(len(copy.expected), new, -new)
            copy.expected = copy.expected + values
        elif kind == "fork" and len(copies) < 6:
            copies.append(Copy(copy.kv.fork(), list(copy.expected)))
        elif kind == "roll back":
            copy.expected = copy.expected[: len(copy.expected) - rng.randrange(4) or len(copy.expected)]
        elif kind == "drop" and len(copies) > 1:
            copies = [other for other in copies if other is not copy]
        elif copy.expected:
            mx.eval(copy.kv.keys, copy.kv.values)
        for each in copies:
            each.check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_buffer_grows_when_it_is_full_and_not_before(dtype: mx.Dtype) -> None:
    kv = KeyValues()
    write_in_place(kv, 0, [7] * (GROWTH - 1), dtype)
    first = kv.keys
    write_in_place(kv, GROWTH - 1, [8], dtype)
    assert kv.keys is first
    write_in_place(kv, GROWTH, [9], dtype)
    assert kv.keys is not None
    assert kv.keys.shape == (1, HEADS, 2 * GROWTH, WIDTH)
    assert kv.keys.dtype == dtype
    assert held(kv.keys, GROWTH + 1) == [7] * (GROWTH - 1) + [8, 9]


def test_a_buffer_is_copied_once_a_fork() -> None:
    kv = KeyValues()
    write_in_place(kv, 0, [1, 2, 3])
    twin = kv.fork()
    kept = twin.keys
    for turn in range(3):
        write_in_place(kv, 1 + turn, [50 + turn])
        mine = kv.keys
        assert mine is not kept
        write_in_place(kv, 1 + turn, [60 + turn])
        assert kv.keys is mine
    assert held(twin.keys, 3) == [1, 2, 3]
    assert twin.keys is kept


LAYER = KeyValueShape(2, 4, 4)
SHAPE = StateShape((LAYER, LAYER), (LAYER,), mx.float32, recurrent_layers=1, window=(3, 4), memory=(1, 4, 4))


def boundary_of(state: RowState, length: int) -> Boundary:
    return Boundary(state, mx.zeros((1, 4)), (Cut(length, chunk=True),))


def filled(length: int) -> RowState:
    state = RowState(SHAPE)
    for layer in state.attention:
        write_in_place(layer, 0, [1 + at % 99 for at in range(length)])
    write_in_place(state.head[0], 0, [1 + at % 99 for at in range(length - 1)])
    state.length, state.head_length = length, length - 1
    return state


@pytest.mark.parametrize("length", [2, GROWTH, GROWTH + 1])
@pytest.mark.parametrize("spans", [1, 2])
def test_rows_that_go_on_from_one_session_do_not_see_each_other(length: int, spans: int) -> None:
    """A single span comes back as it lies in the bank."""
    boundary = boundary_of(filled(length), length)
    borders = [0, length] if spans == 1 else [0, length // 2, length]
    parts = []
    for start, end in pairwise(borders):
        boundary.state.length, boundary.state.head_length = end, end - 1
        parts.append(cut_span(boundary, start, head=True))
    moment = cut_moment(boundary, head=True)
    before = [{name: np.array(array) for name, array in part.items()} for part in parts]
    rows = [join(RowState(SHAPE), parts, moment, boundary.cuts, head=True).state for _ in range(2)]
    for number, row in enumerate(rows, start=200):
        for layer in row.attention:
            write_in_place(layer, row.length, [number, number])
        write_in_place(row.head[0], row.head_length, [number, number])
    for number, row in enumerate(rows, start=200):
        expected = [1 + at % 99 for at in range(length)]
        for layer in row.attention:
            assert held(layer.keys, length + 2) == [*expected, number, number]
        assert held(row.head[0].keys, length + 1) == [*expected[:-1], number, number]
    for part, was in zip(parts, before, strict=True):
        assert all(np.array_equal(np.array(part[name]), was[name]) for name in was)


def test_a_session_in_fewer_bits_comes_back_in_the_dtype_that_kernels_write() -> None:
    shape = StateShape((KeyValueShape(2, 64, 64),), (), mx.bfloat16)
    state, size = RowState(shape), 64
    state.attention[0].write(0, mx.ones((1, 2, 5, size), mx.bfloat16), mx.ones((1, 2, 5, size), mx.bfloat16))
    state.length = 5
    span = expanded(quantised(cut_span(boundary_of(state, 5), 0, head=False), 8))
    again = join(RowState(shape), [span], {"hidden": mx.zeros((1, 4))}, (Cut(5, chunk=True),), head=False).state
    keys, values = again.attention[0].writable(6, 2, size, mx.bfloat16)
    assert keys.dtype == values.dtype == mx.bfloat16
    assert keys.shape[2] >= 6


def test_what_a_head_writes_comes_with_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody takes the head's output while a prompt is forwarded, or when a row leaves its history to a session."""
    memory = RealMemory(monkeypatch)
    sizes: dict[str, Any] = {"head_dim": 64, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
    model = nano_model(5, bits=4, **sizes)
    use_few_row_kernels(model)
    rows = [model.new_state(), model.new_state()]
    for at in range(3):
        model.draft(mx.array([[1, 2], [3, 4]]), mx.ones((2, 2, 64)), rows, [at, at])
    assert memory.calls == 3  # of both rows
    mx.eval(rows[0].arrays())
    mx.eval(rows[1].fork().arrays())
    assert memory.left_out() == 0


KEY_HEADS, VALUE_HEADS, SIZE, TAPS = 1, 2, 4, 4
CHANNELS = 2 * KEY_HEADS * SIZE + VALUE_HEADS * SIZE
RECURRENT = StateShape((), (), mx.float32, 2, (TAPS - 1, CHANNELS), (VALUE_HEADS, SIZE, SIZE))


def inputs_of(token: int) -> tuple[mx.array, ...]:
    """What a token brings: conv inputs, q, k, v, decay, beta."""
    keys = mx.random.split(mx.random.key(token), 6)
    k = mx.random.normal((KEY_HEADS, SIZE), key=keys[2])
    return (
        mx.random.normal((CHANNELS,), key=keys[0]),
        mx.random.normal((KEY_HEADS, SIZE), key=keys[1]),
        k / mx.linalg.norm(k),
        mx.random.normal((VALUE_HEADS, SIZE), key=keys[3]),
        mx.random.uniform(0.3, 1, (VALUE_HEADS,), key=keys[4]),
        mx.random.uniform(0, 1, (VALUE_HEADS,), key=keys[5]),
    )


def forward(rows: Sequence[RowState], tokens: Sequence[Sequence[int]]) -> Captured:
    """As layers do on a GPU, each with a tape."""
    brought = [[inputs_of(token) for token in own] for own in tokens]
    parts = [mx.stack([mx.stack([token[part] for token in own]) for own in brought]) for part in range(6)]
    layers = []
    for state in stacked(rows):
        window = mx.concatenate([state.window, parts[0]], axis=1)
        q, k, v, decay, beta = parts[1:]
        before = state.base, state.tape, state.counts
        _, memory, tape = gated_delta_verify_reference(q, k, v, decay, beta, *before)
        layers.append(CapturedLayer(window, [memory], first=1, tape=tape))
    return Captured(layers)


@pytest.mark.parametrize("seed", range(6))
def test_random_histories_of_a_batch(seed: int) -> None:
    """Rows of different tapes join and leave, fail (nothing is kept), are forked, and go through a session."""
    rng, fresh = random.Random(seed), iter(range(10**6))
    rows: list[tuple[RowState, list[int]]] = []
    for _ in range(40):
        kind = rng.choice(["run", "run", "run", "join", "leave", "fork", "session", "shuffle"])
        if kind == "join" or not rows:
            rows.append((RowState(RECURRENT), []))
        elif kind == "leave" and len(rows) > 2:
            rows.pop(rng.randrange(len(rows)))
        elif kind == "fork" and len(rows) < 5:
            state, kept = rng.choice(rows)
            rows.append((state.fork(), list(kept)))
        elif kind == "session":
            place = rng.randrange(len(rows))
            state, kept = rows[place]
            moment = cut_moment(boundary_of(state, len(kept)), head=True)
            again = join(RowState(RECURRENT), [], moment, (Cut(len(kept), chunk=True),), head=False).state
            rows[place] = again, kept
        elif kind == "shuffle":
            rng.shuffle(rows)
        else:
            running = rows[: rng.randint(1, len(rows))]
            steps = rng.choice([1, 2, 5])
            tokens = [[next(fresh) for _ in range(steps)] for _ in running]
            counts = [rng.choice([0, *range(1, steps + 1)]) for _ in running]
            states = [state for state, _ in running]
            forward(states, tokens).commit(states, counts)
            for (_, kept), own, count in zip(running, tokens, counts, strict=True):
                kept += own[:count]
    for state, kept in rows:
        alone = RowState(RECURRENT)
        for token in kept:
            forward([alone], [[token]]).commit([alone], [1])
        assert state.length == len(kept)
        for mine, other in zip(state.recurrent, alone.recurrent, strict=True):
            assert mx.array_equal(mine.window, other.window)
            assert mx.array_equal(mine.memory, other.memory)


def test_rows_that_ran_together_may_run_in_another_order() -> None:
    rows = [RowState(RECURRENT) for _ in range(3)]
    forward(rows, [[1, 2], [3, 4], [5, 6]]).commit(rows, [2, 1, 2])
    assert stacked(rows) is rows[0].recurrence[0], "as they ran, nothing is copied"
    turned = [rows[2], rows[0], rows[1]]
    forward(turned, [[7], [8], [9]]).commit(turned, [1, 1, 1])
    for state, kept in zip(rows, ([1, 2, 8], [3, 9], [5, 6, 7]), strict=True):
        alone = RowState(RECURRENT)
        forward([alone], [kept]).commit([alone], [len(kept)])
        for mine, other in zip(state.recurrent, alone.recurrent, strict=True):
            assert mx.array_equal(mine.window, other.window)
            assert mx.array_equal(mine.memory, other.memory)
