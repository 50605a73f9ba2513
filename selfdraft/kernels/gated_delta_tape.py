"""The gated delta rule with a tape in place of states: what was accepted is replayed by the next call. Knows no layer.

A call of `gated_delta_verify` runs T steps after the accepted prefix of the last call's steps, whose innovations
delta_t = beta_t (v_t - g_t S_{t-1} k_t) its tape holds. The state is read once and written once, at the start of the T
steps, however many are accepted later. Shapes as in `gated_delta`: q, k [B, T, Hk, Dk]; v [B, T, Hv, Dv]; decay g and
beta [B, T, Hv]; S [B, Hv, Dv, Dk] in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from .portable import Call, Kernel, Launch
from .self_check import SelfCheck, relative_error

__all__ = [
    "CHECK",
    "KERNEL",
    "MOST_STEPS",
    "Tape",
    "fits",
    "gated_delta_replay",
    "gated_delta_verify",
    "gated_delta_verify_reference",
    "joined",
    "replay",
    "tape_width",
]

MOST_STEPS = 16  # of a call, and of a tape: they are held in registers

_KEY_DIMS = range(32, 257, 32)
_DTYPES = (mx.float32, mx.bfloat16, mx.float16)
_CALLS: dict[tuple[object, ...], Call] = {}
_ROWS, _SIMDGROUPS = 4, 4  # rows of S a simdgroup, simdgroups a threadgroup

KERNEL = Kernel(
    "gated_delta_tape",
    ("q", "k", "v", "decay", "beta", "state", "tape", "accepted"),
    ("y", "state_now", "tape_now"),
)


@dataclass(frozen=True)
class Tape:
    """T' steps that may or may not be kept: S_t = decay_t S_{t-1} + delta_t key_t^T.

    One array, for each costs the host time in every layer. Keys come first: where a step's numbers are a multiple of 4,
    as with most numbers of heads, keys of all steps begin on 16 bytes.

    Attributes:
        array: [B, T', Hk Dk + Hv Dv + Hv] in fp32: keys, which are exact there, deltas, and decay of each step.
        memory: (Hv, Dv, Dk) of the state that the steps belong to.
    """

    array: mx.array
    memory: tuple[int, ...]

    @classmethod
    def of(cls, decay: mx.array, keys: mx.array, deltas: mx.array) -> Tape:
        """From decay [B, T', Hv], keys [B, T', Hk, Dk] and deltas [B, T', Hv, Dv] of any dtypes."""
        parts = [x.astype(mx.float32).flatten(2) for x in (keys, deltas, decay)]
        return cls(mx.concatenate(parts, axis=-1), (*deltas.shape[2:], keys.shape[3]))

    @property
    def steps(self) -> int:
        """T'."""
        return self.array.shape[1]

    @property
    def key_heads(self) -> int:
        """Hk."""
        return self._key_width // self.memory[2]

    @property
    def keys(self) -> mx.array:
        """[B, T', Hk, Dk], as they were given, in fp32."""
        keys = self.array[..., : self._key_width]
        return keys.reshape(*keys.shape[:2], self.key_heads, self.memory[2])

    @property
    def deltas(self) -> mx.array:
        """[B, T', Hv, Dv] in fp32."""
        deltas = self.array[..., self._key_width : -self.memory[0]]
        return deltas.reshape(*deltas.shape[:2], *self.memory[:2])

    @property
    def decay(self) -> mx.array:
        """[B, T', Hv] in fp32."""
        return self.array[..., -self.memory[0] :]

    @property
    def _key_width(self) -> int:
        value_heads, value_dim, _ = self.memory
        return self.array.shape[2] - value_heads * (value_dim + 1)

    def row(self, row: int) -> Tape:
        """The tape of one row."""
        return self if self.array.shape[0] == 1 else replace(self, array=self.array[row : row + 1])


def tape_width(*, key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> int:
    """Numbers of one step of a tape."""
    return key_heads * key_dim + value_heads * (value_dim + 1)


def joined(tapes: Sequence[Tape | None]) -> Tape:
    """Tapes of one row each as one, padded to the longest; where there is none, with zeros. One at least is there."""
    steps = max(tape.steps for tape in tapes if tape)
    some = next(tape for tape in tapes if tape)
    arrays = [tape.array if tape else mx.zeros_like(some.array[:, :1]) for tape in tapes]
    return replace(some, array=mx.concatenate([mx.pad(x, [(0, 0), (0, steps - x.shape[1]), (0, 0)]) for x in arrays]))


def fits(q: mx.array, k: mx.array, v: mx.array) -> bool:
    """Whether the kernel takes such inputs; looks at shapes and dtypes alone."""
    _, tokens, key_heads, key_dim = k.shape
    return (
        q.shape == k.shape
        and v.shape[:2] == k.shape[:2]
        and 1 <= tokens <= MOST_STEPS
        and key_dim in _KEY_DIMS
        and v.shape[2] % key_heads == 0
        and q.dtype == k.dtype == v.dtype
        and q.dtype in _DTYPES
    )


def gated_delta_verify(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    tape: Tape | None,
    accepted: mx.array,
) -> tuple[mx.array, mx.array, Tape]:
    """Replay what was accepted of `tape` on `state`, then run T new steps.

    The bits of a row's outputs depend neither on B nor on how its steps are spread over calls.

    Args:
        q, k, v: of one dtype: fp32, bf16 or fp16. k is L2-normalised and q scaled. g, beta: of any dtype. Where Dk is a
            multiple of 128, q, k, state and tape must begin on 16 bytes; odd views of larger arrays may not.
        state: the state before the tape's steps, in fp32.
        tape: of the last call; None when there is nothing to replay.
        accepted: [B] int32, how many of the tape's steps to replay per row, 0..T'; stays on the device. What the tape
            holds past it is never used.

    Returns:
        y [B, T, Hv, Dv] in fp32; the state [B, Hv, Dv, Dk] in fp32 before the T new steps; the tape of those.

    Raises:
        ValueError: an array is not as described (see `fits`).
        RuntimeError: there is no GPU.
    """
    old = tape.array if tape else state  # which is not looked at
    inputs = [q, k, v, g.astype(mx.float32), beta, state, old, accepted]
    key = (*((x.shape, x.dtype) for x in inputs), tape is None)
    call = _CALLS.get(key)
    if call is None:
        call = _CALLS[key] = _prepared(inputs, tape)
    y, state_now, tape_now = call(inputs=inputs)
    return y, state_now, Tape(tape_now, state.shape[1:])


def _prepared(inputs: Sequence[mx.array], tape: Tape | None) -> Call:
    q, k, v, g, beta, state, *_, accepted = inputs
    if not fits(q, k, v):
        given = ", ".join(f"{name} {x.dtype} {x.shape}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"the kernel does not take {given}: ask `fits`, or use gated_delta_verify_reference")
    for name, x in (("g", g), ("beta", beta)):
        if x.shape != v.shape[:3]:
            raise ValueError(f"{name} is {x.shape}; {v.shape[:3]} is needed")
    batch, steps, key_heads, key_dim = k.shape
    _check(state, tape, accepted, (batch, *v.shape[2:], key_dim), key_heads)
    launch = _launch(state, key_heads, (k.dtype, beta.dtype), steps=steps, tape_steps=tape.steps if tape else 0)
    return KERNEL.prepared(launch, [x.dtype for x in inputs])


def gated_delta_replay(state: mx.array, tape: Tape, accepted: mx.array) -> mx.array:
    """The state after the accepted steps of `tape`, by the kernel: bit for bit the one the next verify starts from.

    Args:
        state, tape, accepted: as of `gated_delta_verify`.

    Raises:
        ValueError: an array is not as described.
        RuntimeError: there is no GPU.
    """
    _check(state, tape, accepted, (tape.array.shape[0], *tape.memory), tape.key_heads)
    launch = _launch(state, tape.key_heads, (mx.float32, mx.float32), steps=0, tape_steps=tape.steps)
    inputs = [*[tape.array] * 5, state, tape.array, accepted]  # q to beta are not looked at
    _, state_now, _ = KERNEL.prepared(launch, [x.dtype for x in inputs])(inputs=inputs)
    return state_now


def replay(state: mx.array, tape: Tape, accepted: mx.array) -> mx.array:
    """The same in plain MLX, on any device: equal up to rounding, for the kernel fuses multiply and add."""
    decay, deltas = tape.decay, tape.deltas
    keys = _to_value_heads(tape.keys, deltas)
    for t in range(tape.steps):
        stepped = decay[:, t, :, None, None] * state + deltas[:, t, :, :, None] * keys[:, t, :, None, :]
        state = mx.where((accepted > t)[:, None, None, None], stepped, state)
    return state


def gated_delta_verify_reference(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    tape: Tape | None,
    accepted: mx.array,
) -> tuple[mx.array, mx.array, Tape]:
    """`gated_delta_verify` in plain MLX: any device, any sizes, any dtypes."""
    state_now = state = replay(state, tape, accepted) if tape else state
    g = g.astype(mx.float32)
    queries, keys = _to_value_heads(q, v), _to_value_heads(k, v)
    values, rate = v.astype(mx.float32), beta.astype(mx.float32)
    outputs, deltas = [], []
    for t in range(v.shape[1]):
        key = keys[:, t, :, None, :]
        decayed = g[:, t, :, None, None] * state
        delta = rate[:, t, :, None] * (values[:, t] - (decayed * key).sum(axis=-1))
        state = decayed + delta[..., None] * key
        outputs.append((state * queries[:, t, :, None, :]).sum(axis=-1))
        deltas.append(delta)
    return mx.stack(outputs, axis=1), state_now, Tape.of(g, k, mx.stack(deltas, axis=1))


def _to_value_heads(x: mx.array, v: mx.array) -> mx.array:
    """One key head per value head, in fp32."""
    return mx.repeat(x.astype(mx.float32), v.shape[2] // x.shape[2], axis=2)


def _check(state: mx.array, tape: Tape | None, accepted: mx.array, shape: tuple[int, ...], key_heads: int) -> None:
    """That the kernel will not read past an array; `shape` is that of the state."""
    batch, value_heads, value_dim, key_dim = shape
    expected = [("state", state, shape, mx.float32), ("accepted", accepted, (batch,), mx.int32)]
    if tape:
        steps = tape.steps
        if not 1 <= steps <= MOST_STEPS or key_dim not in _KEY_DIMS or key_heads < 1 or value_heads % key_heads:
            given = f"a tape of {steps} steps with {key_heads} keys of {key_dim} for {value_heads} heads"
            raise ValueError(f"{given}: up to {MOST_STEPS} steps, a key for one or several heads, 32, 64, .. 256 wide")
        width = tape_width(key_heads=key_heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim)
        expected.append(("tape", tape.array, (batch, steps, width), mx.float32))
    for name, x, needed, dtype in expected:
        if x.shape != needed or x.dtype != dtype:
            raise ValueError(f"{name} is {x.dtype} {x.shape}; {dtype} {needed} is needed")


def _launch(
    state: mx.array,
    key_heads: int,
    dtypes: tuple[mx.Dtype, mx.Dtype],
    *,
    steps: int,
    tape_steps: int,
) -> Launch:
    """A threadgroup for every 16 rows of a head's state.

    Args:
        dtypes: of q, k, v; of beta. All that vary are in the template, for MLX on CUDA keeps a compiled kernel by name
            and template alone.
    """
    batch, value_heads, value_dim, key_dim = state.shape
    template: dict[str, int | mx.Dtype] = {
        "T": dtypes[0],
        "BETA": dtypes[1],
        "STEPS": steps,
        "TAPE": next(size for size in (0, 4, MOST_STEPS) if size >= tape_steps),  # else each would be compiled anew
        "HK": key_heads,
        "HV": value_heads,
        "DK": key_dim,
        "DV": value_dim,
        "ROWS": _ROWS,
        "SIMDGROUPS": _SIMDGROUPS,
    }
    rows = _ROWS * _SIMDGROUPS
    width = tape_width(key_heads=key_heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim)
    new = [(batch, steps, value_heads, value_dim), (batch, steps, width)] if steps else [(1,), (1,)]
    return Launch(
        template=template,
        threadgroups=(-(-value_dim // rows), value_heads, batch),
        threads=32 * _SIMDGROUPS,
        shapes=[new[0], state.shape, new[1]],
        dtypes=[mx.float32] * 3,
    )


def _error() -> float:
    """Of y, state and tape together; infinite if the first step's bits depend on the number of steps.

    Steps of the tape lie on 16 bytes, as those of models do: other ones are read in another way.
    """
    batch, steps, key_heads, value_heads, width = 2, 3, 1, 4, 128
    keys = mx.random.split(mx.random.key(0), 9)
    q, k, old_keys = (
        (x / mx.linalg.norm(x, axis=-1, keepdims=True)).astype(mx.float16)
        for x in (mx.random.normal((batch, steps, key_heads, width), key=key) for key in keys[:3])
    )
    v = mx.random.normal((batch, steps, value_heads, width), key=keys[3]).astype(mx.float16)
    g, beta, old_decay = (mx.random.uniform(0.3, 1, (batch, steps, value_heads), key=key) for key in keys[4:7])
    state = mx.random.normal((batch, value_heads, width, width), key=keys[7])
    tape = Tape.of(old_decay, old_keys, mx.random.normal((batch, steps, value_heads, width), key=keys[8]))
    accepted = mx.array([1, steps], dtype=mx.int32)

    y, state_now, new = gated_delta_verify(q, k, v, g, beta, state, tape, accepted)
    alone = gated_delta_verify(q[:, :1], k[:, :1], v[:, :1], g[:, :1], beta[:, :1], state, tape, accepted)
    if not mx.array_equal(alone[0], y[:, :1]).item():
        return float("inf")
    y_, state_, new_ = gated_delta_verify_reference(q, k, v, g, beta, state, tape, accepted)
    pairs = [(y, y_), (state_now, state_), *((getattr(new, x), getattr(new_, x)) for x in ("keys", "decay", "deltas"))]
    return sum(relative_error(found, expected) for found, expected in pairs)  # a sum, for `max` can lose a NaN


CHECK = SelfCheck("gated_delta_tape", _error, most=1e-5)
