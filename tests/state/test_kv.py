"""Guards the KV buffers: they grow without losing anything, hold no length, and forks never see each other's writes."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.state import (
    DOUBLED,
    GROWTH,
    HeadOutputs,
    KeyValues,
    KeyValueShape,
    RecurrentState,
    Room,
    RowState,
    StateShape,
    attend,
    capacity,
    stacked,
)

HEADS, WIDTH = 2, 4


def entries(start: int, count: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Entries whose value is their position."""
    column = mx.arange(start, start + count).reshape(1, 1, count, 1).astype(dtype)
    return mx.broadcast_to(column, (1, HEADS, count, WIDTH))


def positions(x: mx.array | None) -> list[float]:
    assert x is not None
    found: list[float] = x[0, 1, :, 2].tolist()  # type: ignore[assignment]
    return found


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_growth_keeps_what_was_written(dtype: mx.Dtype) -> None:
    kv, offset = KeyValues(), 0
    for count in (1, GROWTH - 2, 1, 1, 5, 3 * GROWTH, 1):
        keys, values = kv.write(offset, entries(offset, count, dtype), -entries(offset, count, dtype))
        offset += count
        assert keys.shape == values.shape == (1, HEADS, offset, WIDTH)
        expected = mx.arange(offset).astype(dtype).tolist()
        assert positions(keys) == expected
        assert positions(-values) == expected
        assert keys.dtype == values.dtype == dtype
        assert kv.keys is not None
        assert kv.keys.shape[2] % GROWTH == 0
    assert kv.keys is not None
    assert kv.keys.shape[2] == -(-offset // GROWTH) * GROWTH


def test_moving_the_length_back_is_the_whole_of_a_rollback() -> None:
    kv = KeyValues()
    kv.write(0, entries(0, 10), entries(0, 10))
    keys, values = kv.write(4, entries(100, 2), entries(200, 2))
    assert positions(keys) == [0, 1, 2, 3, 100, 101]
    assert positions(values) == [0, 1, 2, 3, 200, 201]


@pytest.mark.parametrize("evaluated", [False, True])
def test_forks_do_not_see_each_others_writes(evaluated: bool) -> None:
    """Donation of buffers must not turn a write into one on shared memory."""
    kv = KeyValues()
    kv.write(0, entries(0, 6), entries(0, 6))
    if evaluated:
        mx.eval(kv.keys, kv.values)
    twin = kv.fork()
    for turn in range(3):
        ours, _ = kv.write(3 + turn, entries(50 + turn, 1), entries(50 + turn, 1))
        theirs, _ = twin.write(4 + turn, entries(70 + turn, 1), entries(70 + turn, 1))
        if evaluated:
            mx.eval(ours, theirs)
    assert positions(kv.keys)[:7] == [0, 1, 2, 50, 51, 52, 0]
    assert positions(twin.keys)[:8] == [0, 1, 2, 3, 70, 71, 72, 0]


def test_a_view_taken_before_a_write_stays_as_it_was() -> None:
    kv = KeyValues()
    before, _ = kv.write(0, entries(0, 3), entries(0, 3))
    kv.write(1, entries(9, 1), entries(9, 1))
    mx.eval(kv.keys)
    assert positions(before) == [0, 1, 2]


def test_attention_sees_exactly_the_rows_own_past() -> None:
    """Against numpy, with leftovers of a rejected window in the buffers and rows of different lengths."""
    random = np.random.default_rng(0)
    tokens, scale = 3, 0.4
    past = [5, 0, 2]
    kv_heads, heads = HEADS, 2 * HEADS
    rows, held = [], []
    for length in past:
        row = KeyValues()
        keys, values = random.normal(size=(2, 1, kv_heads, length + 4, WIDTH)).astype(np.float32)
        row.write(0, mx.array(keys), mx.array(values))  # the last four are leftovers
        rows.append(row)
        held.append((keys[0, :, :length], values[0, :, :length]))
    q = random.normal(size=(3, heads, tokens, WIDTH)).astype(np.float32)
    k, v = random.normal(size=(2, 3, kv_heads, tokens, WIDTH)).astype(np.float32)
    out = np.array(attend(rows, past, mx.array(q), mx.array(k), mx.array(v), scale))
    for b, (old_k, old_v) in enumerate(held):
        keys, values = np.concatenate([old_k, k[b]], axis=1), np.concatenate([old_v, v[b]], axis=1)
        for head in range(heads):
            for t in range(tokens):
                seen = past[b] + t + 1
                scores = keys[head // 2, :seen] @ q[b, head, t] * scale
                weights = np.exp(scores - scores.max())
                expected = weights @ values[head // 2, :seen] / weights.sum()
                np.testing.assert_allclose(out[b, head, t], expected, rtol=1e-4, atol=1e-5)


def test_a_rows_attention_does_not_depend_on_its_neighbours() -> None:
    random = np.random.default_rng(1)
    q, k, v = (mx.array(random.normal(size=(3, HEADS, 2, WIDTH)).astype(np.float32)) for _ in range(3))
    past = [0, 300, 7]

    def filled(length: int) -> KeyValues:
        row = KeyValues()
        if length:
            row.write(0, entries(0, length) / 300, entries(0, length) / 300)
        return row

    together = attend([filled(n) for n in past], past, q, k, v, 0.5)
    for b, length in enumerate(past):
        one = slice(b, b + 1)
        assert mx.array_equal(together[one], attend([filled(length)], [length], q[one], k[one], v[one], 0.5))


@pytest.mark.parametrize("tokens", [1, GROWTH, GROWTH + 1, 5_000, 70_000, 262_144])
def test_capacities_are_few_and_not_much_too_large(tokens: int) -> None:
    assert tokens <= capacity(tokens) <= max(tokens * 9 // 8, tokens + GROWTH)
    assert capacity(capacity(tokens)) == capacity(tokens)
    assert len({capacity(n) for n in range(1, tokens + 1, max(tokens // 5000, 1))}) <= 16 + 8 * max(
        0, tokens.bit_length() - 12
    )


def test_room_in_powers_of_two() -> None:
    """Few sizes, none twice what is needed; those behind the largest grow in smaller steps, and none beyond a limit."""
    room = Room(doubling=True)
    made = {
        tokens: room.entries(tokens)
        for tokens in [*range(1, DOUBLED, 97), *(2**i + j for i in range(8, 16) for j in (0, 1))]
    }
    assert set(made.values()) == {GROWTH * 2**i for i in range(8)} | {capacity(DOUBLED + 1)}
    assert all(tokens <= size < max(2 * tokens, GROWTH + 1) for tokens, size in made.items())
    assert room.entries(100_000) == capacity(100_000)
    limited = Room(doubling=True, most=5000)
    assert [limited.entries(tokens) for tokens in (2000, 4097, 5000)] == [2048, capacity(5000), capacity(5000)]
    assert limited.entries(6000) == capacity(6000)  # what is written has a place, whatever was said


@pytest.mark.parametrize("in_place", [False, True])
def test_room_that_was_asked_for_is_made_at_once(in_place: bool) -> None:
    """And a fork grows as the buffer that it is of."""
    kv = KeyValues()
    kv.room = Room(least=1000)

    def store(buffer: KeyValues, offset: int, count: int) -> int:
        if in_place:
            return buffer.writable(offset + count, HEADS, WIDTH, mx.float32)[0].shape[2]
        buffer.write(offset, entries(offset, count), entries(offset, count))
        assert buffer.keys is not None
        return int(buffer.keys.shape[2])

    assert store(kv, 0, 3) == store(kv, 3, 990) == capacity(1000)
    twin = kv.fork()
    kv.room = Room(doubling=True)
    assert store(kv, 993, 40) == 2048
    twin.room = Room(least=3000)
    assert store(twin, 993, 40) == capacity(3000)
    restored = KeyValues()
    restored.keys, restored.values = entries(0, 5), entries(0, 5)  # as a session gives it, without room
    restored.room = Room(least=1000)
    assert store(restored, 5, 1) == capacity(1000)
    assert positions(restored.keys)[:5] == [0, 1, 2, 3, 4]


LAYER = KeyValueShape(HEADS, WIDTH, WIDTH)
SHAPE = StateShape((LAYER, LAYER), (LAYER,), mx.bfloat16, recurrent_layers=3, window=(3, 8), memory=(2, 4, 5))


def test_an_empty_row() -> None:
    state = RowState(SHAPE)
    assert (state.length, state.head_length) == (0, 0)
    assert (len(state.attention), len(state.head), len(state.recurrent)) == (2, 1, 3)
    for layer in state.recurrent:
        assert layer.window.shape == (1, 3, 8)
        assert layer.window.dtype == mx.bfloat16
        assert layer.memory.shape == (1, 2, 4, 5)
        assert layer.memory.dtype == mx.float32
        assert not layer.memory.any().item()
    assert len(state.arrays()) == 6  # nothing is held for attention yet


def test_a_forked_row_is_independent() -> None:
    state = RowState(SHAPE)
    state.attention[0].write(0, entries(0, 4), entries(0, 4))
    state.head[0].write(0, entries(0, 4), entries(0, 4))
    state.length, state.head_length = 4, 3
    twin = state.fork()
    assert (twin.length, twin.head_length) == (4, 3)
    assert len(twin.arrays()) == len(state.arrays()) == 10

    twin.attention[0].write(2, entries(60, 1), entries(60, 1))
    twin.head[0].write(0, entries(80, 1), entries(80, 1))
    twin.recurrent[1] = RecurrentState(mx.ones((1, 3, 8)), mx.ones((1, 2, 4, 5)))
    twin.length = 9
    assert state.length == 4
    assert positions(state.attention[0].keys)[:4] == [0, 1, 2, 3]
    assert positions(state.head[0].values)[:4] == [0, 1, 2, 3]
    assert not state.recurrent[1].memory.any().item()
    state.attention[1].write(0, entries(5, 1), entries(5, 1))
    assert twin.attention[1].keys is None


def test_states_of_several_rows_are_stacked_in_order() -> None:
    rows = [RowState(SHAPE) for _ in range(3)]
    for i, row in enumerate(rows):
        row.recurrent[2] = RecurrentState(mx.full((1, 3, 8), i), mx.full((1, 2, 4, 5), 10 * i))
    batch = stacked(rows)[2]
    assert batch.window[:, 0, 0].tolist() == [0, 1, 2]
    assert batch.memory[:, 0, 0, 0].tolist() == [0, 10, 20]
    assert stacked(rows[1:2])[2] is rows[1].recurrent[2]


WINDOW = 8


@pytest.mark.parametrize("steps", [1, 3, GROWTH])
def test_a_window_keeps_what_is_seen_and_drops_the_rest(steps: int) -> None:
    """However tokens come in, a query sees its window and no more, and what is held does not grow with the row."""
    kv, offset = KeyValues(WINDOW), 0
    while offset < 6 * GROWTH:
        keys, values = kv.write(offset, entries(offset, steps), entries(offset, steps))
        seen = list(range(max(offset - WINDOW + 1, 0), offset + steps))
        assert positions(keys) == positions(values) == seen
        offset += steps
    assert kv.keys is not None
    assert kv.keys.shape[2] <= capacity(WINDOW + 2 * GROWTH + steps)
    assert kv.first > 0


def test_a_window_can_be_rolled_back() -> None:
    """Lengths move back by as much as a cycle drafts: what lies before is still there."""
    kv, dropped = KeyValues(WINDOW), 5 * GROWTH
    for offset in range(dropped):
        kv.write(offset, entries(offset, 1), entries(offset, 1))
    for back in (1, WINDOW, GROWTH):
        start = dropped - back
        keys, _ = kv.write(start, entries(start, 1), entries(start, 1))
        assert positions(keys) == list(range(start - WINDOW + 1, start + 1))


def test_a_fork_of_a_window_is_independent() -> None:
    kv = KeyValues(WINDOW)
    for offset in range(3 * GROWTH):
        kv.write(offset, entries(offset, 1), entries(offset, 1))
    twin, end = kv.fork(), 3 * GROWTH
    for offset in range(end, end + 2 * GROWTH):
        twin.write(offset, entries(offset, 1), entries(offset, 1))
    keys, _ = kv.write(end, entries(end, 1), entries(end, 1))
    assert positions(keys) == list(range(end - WINDOW + 1, end + 1))


def test_bytes_of_a_row_count_a_window_once() -> None:
    wide, narrow = KeyValueShape(2, 3, 5), KeyValueShape(2, 3, 5, window=WINDOW)
    assert wide.numbers(10 * GROWTH) == capacity(10 * GROWTH) * 16
    assert narrow.numbers(100 * GROWTH) == narrow.numbers(10 * GROWTH) == capacity(WINDOW + 2 * GROWTH) * 16
    shape = StateShape((wide, narrow), (narrow,), mx.bfloat16)
    assert shape.row_bytes(10 * GROWTH, 3) == 2 * (wide.numbers(10 * GROWTH) + 2 * narrow.numbers(10 * GROWTH))
    assert shape.moment_bytes == 2 * 2 * WINDOW * 16


def test_outputs_of_modules_that_feed_each_other() -> None:
    """Module j's newest true entry is j behind the newest pair, if there are so many pairs."""
    whole = mx.arange(6).reshape(1, 6, 1)
    outputs = HeadOutputs(0, (whole, whole[:, :5]))  # of pairs 0..5, and of entries 0..4 behind them
    assert [_only(outputs.newest(module, 6)) for module in (0, 1)] == [5, 4]
    assert [_only(outputs.newest(module, 4)) for module in (0, 1)] == [3, 2]
    assert outputs.newest(1, 1) is None
    kept = outputs.only_newest(6)
    assert [_only(kept.newest(module, 6)) for module in (0, 1)] == [5, 4]
    later = HeadOutputs(6, (whole + 6, whole + 5))
    assert [_only(later.newest(module, 9)) for module in (0, 1)] == [8, 7]
    assert _only(outputs.only_newest(1).newest(0, 1)) == 0
    assert outputs.only_newest(1).newest(1, 1) is None


def _only(output: mx.array | None) -> int:
    assert output is not None
    value: int = output.item()  # type: ignore[assignment]
    return value
