"""Guards the tape of the gated delta rule: the kernel follows the formula, and its bits depend neither on how steps are
spread over calls, nor on how much is accepted, nor on other rows, nor on what the tape holds past the accepted steps.

The kernel's own text runs, on the host. Bit for bit means with one compiler and one instruction set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.kernels.gated_delta import gated_delta_steps
from selfdraft.kernels.gated_delta_tape import (
    CHECK,
    Tape,
    fits,
    gated_delta_replay,
    gated_delta_verify,
    gated_delta_verify_reference,
    joined,
    replay,
)
from selfdraft.kernels.portable import Kernel, Launch
from selfdraft.kernels.self_check import relative_error
from tests.support.cuda_texts import record_texts
from tests.support.host_kernels import kernels_on_host, needs_compiler, run_on_host

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_on_host(monkeypatch)


@dataclass(frozen=True)
class Sizes:
    dtype: mx.Dtype = mx.bfloat16
    key_heads: int = 1
    value_heads: int = 2
    key_dim: int = 128
    value_dim: int = 20  # one threadgroup of 16 rows, and a part of one
    batch: int = 3


@dataclass(frozen=True)
class Steps:
    """q, k, v, g, beta of some steps, as the layer makes them."""

    q: mx.array
    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array

    def at(self, starts: list[int], count: int) -> Steps:
        """`count` steps of every row, from its own start on."""
        rows = [[x[b : b + 1, s : s + count] for b, s in enumerate(starts)] for x in self.all()]
        return Steps(*(mx.concatenate(parts) for parts in rows))

    def row(self, b: int) -> Steps:
        return Steps(*(x[b : b + 1] for x in self.all()))

    def all(self) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
        return self.q, self.k, self.v, self.g, self.beta


def made(sizes: Sizes, tokens: int, seed: int = 0) -> tuple[Steps, mx.array]:
    """Steps and a state."""
    random = np.random.default_rng(seed)
    q, k = random.normal(size=(2, sizes.batch, tokens, sizes.key_heads, sizes.key_dim))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = random.normal(size=(sizes.batch, tokens, sizes.value_heads, sizes.value_dim))
    g = np.exp(random.uniform(-2, 0, size=v.shape[:3]))
    beta = random.uniform(size=v.shape[:3])
    state = random.normal(size=(sizes.batch, sizes.value_heads, sizes.value_dim, sizes.key_dim))
    q_, k_, v_, g_, beta_, state_ = (mx.array(x.astype(np.float32)) for x in (q, k, v, g, beta, state))
    q_, k_, v_, beta_ = (x.astype(sizes.dtype) for x in (q_, k_, v_, beta_))
    return Steps(q_, k_, v_, g_, beta_), state_


def tape_of(sizes: Sizes, tokens: int, seed: int = 1) -> Tape:
    steps, _ = made(sizes, tokens, seed)
    return Tape.of(steps.g, steps.k, steps.v)


def test_a_tape_is_one_array_of_its_parts() -> None:
    """Keys, deltas, decay of each step side by side, as the texts have them; every part comes back as it was given."""
    sizes = Sizes(key_heads=2, value_heads=4, key_dim=32, value_dim=3)
    steps, _ = made(sizes, 2)
    tape = Tape.of(steps.g, steps.k, steps.v)
    assert tape.array.shape == (3, 2, 2 * 32 + 4 * 3 + 4)
    assert tape.array.dtype == mx.float32
    assert (tape.steps, tape.key_heads, tape.memory) == (2, 2, (4, 3, 32))
    for part, given in ((tape.keys, steps.k), (tape.deltas, steps.v), (tape.decay, steps.g)):
        assert part.shape == given.shape
        assert mx.array_equal(part, given)
    assert mx.array_equal(tape.array[1, 1, 32:64], steps.k[1, 1, 1])
    assert mx.array_equal(tape.array[1, 1, 64:67], steps.v[1, 1, 0])
    assert mx.array_equal(tape.array[1, 1, -4:], steps.g[1, 1])
    assert tape.row(0).row(0).array.shape[0] == 1


def test_tapes_of_rows_are_joined_behind_each_other() -> None:
    """A shorter one, or none, has zeros in the place of the steps that it lacks."""
    sizes = Sizes(batch=1)
    long, short = tape_of(sizes, 3), tape_of(sizes, 2, seed=2)
    together = joined([None, long, short])
    assert (together.array.shape[:2], together.memory) == ((3, 3), long.memory)
    assert not together.array[0].any().item()
    assert same_bits(together.row(1).array, long.array)
    assert same_bits(together.row(2).array[:, :2], short.array)
    assert not together.array[2, 2].any().item()


def counts(*of_rows: int) -> mx.array:
    return mx.array(of_rows, dtype=mx.int32)


def same_bits(one: mx.array, other: mx.array) -> bool:
    return bool(mx.array_equal(one.view(mx.uint32), other.view(mx.uint32)).item())


CASES = [
    (Sizes(), 4, 4, (2, 0, 4)),
    (Sizes(dtype=mx.float32), 1, 1, (1, 0, 1)),
    (Sizes(dtype=mx.float16, key_heads=2, value_dim=16), 3, 8, (8, 5, 0)),
    (Sizes(key_dim=64, key_heads=2, value_heads=6, value_dim=5), 8, 3, (0, 3, 1)),
    (Sizes(dtype=mx.float32, key_dim=32, value_heads=1, value_dim=1), 2, 0, (0, 0, 0)),
    (Sizes(key_dim=256, value_heads=1, value_dim=33), 5, 2, (1, 2, 0)),
    (Sizes(key_heads=2, value_heads=2, value_dim=2), 2, 3, (3, 1, 0)),
    (Sizes(value_heads=4, value_dim=3), 3, 4, (4, 1, 2)),  # steps of the tape on 16 bytes, as of a model
    (Sizes(key_dim=256, value_heads=4, value_dim=2), 2, 3, (3, 0, 2)),
    (Sizes(dtype=mx.float16, key_dim=96, value_heads=1, value_dim=3, batch=1), 16, 16, (11,)),
]


@pytest.mark.parametrize(("sizes", "tokens", "tape_steps", "accepted"), CASES)
def test_kernel_follows_the_formula(sizes: Sizes, tokens: int, tape_steps: int, accepted: tuple[int, ...]) -> None:
    """Over dtypes, head ratios 1, 2, 3, sizes, and numbers of steps. What is left is rounding: 1e-5 is 80 ulp."""
    steps, state = made(sizes, tokens)
    tape = tape_of(sizes, tape_steps) if tape_steps else None
    assert fits(steps.q, steps.k, steps.v)
    y, state_now, new = gated_delta_verify(*steps.all(), state, tape, counts(*accepted))
    expected_y, expected_state, expected = gated_delta_verify_reference(*steps.all(), state, tape, counts(*accepted))
    assert relative_error(y, expected_y) < 1e-5
    assert relative_error(state_now, expected_state) < 1e-5
    assert relative_error(new.deltas, expected.deltas) < 1e-5
    assert (new.array.shape, new.array.dtype) == (expected.array.shape, mx.float32)
    assert same_bits(new.decay, steps.g)
    assert same_bits(new.keys, steps.k.astype(mx.float32))


@pytest.mark.parametrize("accepted", [(0, 1, 2), (3, 3, 0)])
def test_reference_follows_stepwise_decoding(accepted: tuple[int, ...]) -> None:
    """Against the states that `gated_delta_steps` keeps, which has another text."""
    steps, state = made(Sizes(), 5)
    _, states = gated_delta_steps(*steps.all(), state)
    first, second = steps.at([0, 0, 0], 3), steps.at(list(accepted), 2)
    _, before, tape = gated_delta_verify_reference(*first.all(), state, None, counts(0, 0, 0))
    assert same_bits(before, state)
    y, state_now, _ = gated_delta_verify_reference(*second.all(), state, tape, counts(*accepted))
    expected = mx.stack([([state, *states])[n][b] for b, n in enumerate(accepted)])
    assert relative_error(state_now, expected) < 1e-5
    expected_y, _ = gated_delta_steps(*second.all(), expected)
    assert relative_error(y, expected_y) < 1e-5


def decoded_one_by_one(steps: Steps, state: mx.array) -> tuple[list[mx.array], list[mx.array]]:
    """y of every step and the state before it, by calls of one step."""
    tape: Tape | None = None
    ys, states = [], []
    one = counts(*[1] * state.shape[0])
    for t in range(steps.q.shape[1]):
        y, state, tape = gated_delta_verify(*steps.at([t] * state.shape[0], 1).all(), state, tape, one)
        ys.append(y)
        states.append(state)
    return ys, states


def test_bits_do_not_depend_on_how_steps_are_spread_over_calls() -> None:
    """Cycles of 4 steps, and at times of 1, with random acceptance, against calls of one step: every y, every committed
    state, and the last state materialised. Rows are at different places, so nor do they depend on each other.

    A plain multiply and add in either place, or a count that is off by one, fails this."""
    sizes, total = Sizes(), 24
    steps, state = made(sizes, total)
    ys, states = decoded_one_by_one(steps, state)
    random = np.random.default_rng(0)
    done, tape, accepted = [0] * sizes.batch, None, [0] * sizes.batch
    seen_widths, seen_counts = set(), set()
    while max(done) + 8 <= total:
        width = int(random.choice((4, 4, 4, 1)))
        done = [d + a for d, a in zip(done, accepted, strict=True)]
        seen_widths.add(width)
        seen_counts.update(accepted)
        y, state, tape = gated_delta_verify(*steps.at(done, width).all(), state, tape, counts(*accepted))
        for b, d in enumerate(done):
            assert same_bits(state[b], states[d][b])
            for t in range(width):
                assert same_bits(y[b, t], ys[d + t][b, 0])
        accepted = [int(a) for a in random.integers(0, width + 1, size=sizes.batch)]
    assert (seen_widths, seen_counts) == ({1, 4}, {0, 1, 2, 3, 4})  # else choose another seed
    assert tape is not None
    final = gated_delta_replay(state, tape, counts(*accepted))
    for b, (d, a) in enumerate(zip(done, accepted, strict=True)):
        assert same_bits(final[b], states[d + a][b])


def test_a_row_alone_has_the_same_bits() -> None:
    sizes = Sizes()
    steps, state = made(sizes, 4)
    tape, accepted = tape_of(sizes, 4), counts(2, 0, 4)
    together = gated_delta_verify(*steps.all(), state, tape, accepted)
    for b in range(sizes.batch):
        cut = slice(b, b + 1)
        y, state_now, new = gated_delta_verify(*steps.row(b).all(), state[cut], tape.row(b), accepted[cut])
        assert same_bits(y[0], together[0][b])
        assert same_bits(state_now[0], together[1][b])
        assert same_bits(new.array[0], together[2].array[b])


def test_a_materialised_state_is_what_the_next_call_starts_from() -> None:
    """A snapshot must not differ from going on: the state that verify writes, and y from it with nothing to replay."""
    sizes = Sizes()
    steps, state = made(sizes, 4)
    tape, accepted = tape_of(sizes, 4), counts(2, 0, 4)
    held = gated_delta_replay(state, tape, accepted)
    y, state_now, new = gated_delta_verify(*steps.all(), state, tape, accepted)
    assert same_bits(held, state_now)
    assert same_bits(held[1], state[1])
    y_held, _, new_held = gated_delta_verify(*steps.all(), held, None, accepted)
    assert same_bits(y_held, y)
    assert same_bits(new_held.array, new.array)
    assert relative_error(replay(state, tape, accepted), held) < 1e-6


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_what_the_tape_holds_past_the_accepted_steps_never_shows(garbage: float) -> None:
    sizes = Sizes()
    steps, state = made(sizes, 4)
    tape, accepted = tape_of(sizes, 4), counts(2, 0, 4)
    past = mx.arange(4)[None, :, None] >= accepted[:, None, None]
    bad = replace(tape, array=mx.where(past, garbage, tape.array))
    clean, dirty = (gated_delta_verify(*steps.all(), state, x, accepted) for x in (tape, bad))
    assert same_bits(clean[0], dirty[0])
    assert same_bits(clean[1], dirty[1])
    assert same_bits(clean[2].array, dirty[2].array)
    assert same_bits(gated_delta_replay(state, bad, accepted), clean[1])
    assert same_bits(replay(state, bad, accepted), replay(state, tape, accepted))


def test_views_and_gates_of_either_dtype_are_taken() -> None:
    """Inputs and tape cut out of larger arrays; beta in fp32 or bf16; decay in bf16."""
    sizes = Sizes(key_dim=32, batch=2)
    steps, state = made(sizes, 3)
    whole = tape_of(sizes, 3)
    tape = replace(whole, array=whole.array[:, :2])
    cut = Steps(*(x[:, 1:] for x in steps.all()))
    for dtype in (mx.float32, mx.bfloat16):
        given = (cut.q, cut.k, cut.v, cut.g.astype(mx.bfloat16), cut.beta.astype(dtype))
        y, state_now, new = gated_delta_verify(*given, state, tape, counts(1, 2))
        expected, expected_state, _ = gated_delta_verify_reference(*given, state, tape, counts(1, 2))
        assert relative_error(y, expected) < 1e-5
        assert relative_error(state_now, expected_state) < 1e-5
        assert same_bits(new.decay, cut.g.astype(mx.bfloat16).astype(mx.float32))


def test_self_check_passes_and_sees_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault is one NaN among the new tape's deltas, which are compared last; or in its keys; or in its decay."""
    results: list[list[mx.array]] = []

    def recorded(kernel: Kernel, inputs: Sequence[mx.array], launch: Launch) -> list[mx.array]:
        results.append(run_on_host(kernel, inputs, launch))
        return results[-1]

    kernels_on_host(monkeypatch, recorded)
    assert CHECK.error() <= CHECK.most
    (y, state_now, tape), alone = results
    for place in (-3, 5, -1):
        bad = mx.where(mx.arange(tape.shape[2]) == place % tape.shape[2], mx.nan, tape)
        replies = [[y, state_now, bad], alone]
        kernels_on_host(monkeypatch, lambda *_, replies=replies: replies.pop(0))
        assert not CHECK.error() <= CHECK.most


def test_wrong_arrays_are_refused_behind_a_good_call(monkeypatch: pytest.MonkeyPatch) -> None:
    record_texts(monkeypatch)
    sizes = Sizes()
    steps, state = made(sizes, 2)
    tape, accepted = tape_of(sizes, 2), counts(0, 1, 2)
    gated_delta_verify(*steps.all(), state, tape, accepted)
    with pytest.raises(ValueError, match="accepted is"):
        gated_delta_verify(*steps.all(), state, tape, accepted[:2])
    with pytest.raises(ValueError, match="tape is"):
        gated_delta_verify(*steps.all(), state, replace(tape, array=tape.array.astype(mx.bfloat16)), accepted)


def test_wrong_arrays_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would read past them, or divide by zero."""

    def never(*_: object) -> list[mx.array]:
        raise AssertionError("it was called")

    kernels_on_host(monkeypatch, never)
    sizes = Sizes()
    steps, state = made(sizes, 2)
    tape, accepted = tape_of(sizes, 2), counts(0, 1, 2)
    q, k, v, g, beta = steps.all()
    with pytest.raises(ValueError, match="accepted is"):
        gated_delta_verify(q, k, v, g, beta, state, tape, accepted.astype(mx.int64))
    with pytest.raises(ValueError, match="accepted is"):
        gated_delta_replay(state, tape, accepted[:2])
    with pytest.raises(ValueError, match="state is"):
        gated_delta_verify(q, k, v, g, beta, state[:, :1], tape, accepted)
    for wrong in (tape.array[..., 1:], tape.array[:2], tape.array.astype(mx.bfloat16)):
        with pytest.raises(ValueError, match="tape is"):
            gated_delta_verify(q, k, v, g, beta, state, replace(tape, array=wrong), accepted)
    for wrong in (mx.pad(tape.array, [(0, 0), (0, 0), (0, 1)]), tape.array.astype(mx.bfloat16)):
        with pytest.raises(ValueError, match="tape is"):
            gated_delta_replay(state, replace(tape, array=wrong), accepted)
    with pytest.raises(ValueError, match="with 0 keys"):
        gated_delta_replay(state, replace(tape, array=tape.array[..., 128:]), accepted)
    with pytest.raises(ValueError, match="with 3 keys of 128 for 2 heads"):
        gated_delta_replay(state, tape_of(Sizes(key_heads=3), 2), accepted)
    with pytest.raises(ValueError, match="beta is"):
        gated_delta_verify(q, k, v, g, beta[:, :1], state, tape, accepted)
    with pytest.raises(ValueError, match="a tape of 17 steps"):
        gated_delta_verify(q, k, v, g, beta, state, tape_of(sizes, 17), accepted)
    with pytest.raises(ValueError, match="the kernel does not take"):
        gated_delta_verify(q.astype(mx.float32), k, v, g, beta, state, tape, accepted)
    wide, _ = made(Sizes(key_dim=48), 2)
    assert not fits(wide.q, wide.k, wide.v)
    long, _ = made(sizes, 17)
    assert not fits(long.q, long.k, long.v)
    thirds, _ = made(Sizes(key_heads=2, value_heads=3), 2)
    assert not fits(thirds.q, thirds.k, thirds.v)
