"""A GatedDeltaNet layer between its two projections as one kernel. Knows shapes and dtypes, and no layer or cache.

It convolves, makes the gates, replays what was accepted of the last call's tape, runs T new steps and normalises; the
conv window moves on by what was accepted as well. Letters: B rows, T new steps, T' steps of the tape, Hk and Hv heads
of Dk and Dv, C = 2 Hk Dk + Hv Dv convolved channels. The rule is that of `gated_delta_tape` (arXiv 2412.06464).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import precise_swiglu
from mlx_lm.models.gated_delta import compute_g, normalize_qk

from .causal_conv import causal_conv
from .gated_delta_tape import MOST_STEPS, Tape, gated_delta_verify_reference, tape_width
from .portable import Call, Kernel, Launch, backend
from .self_check import SelfCheck, relative_error
from .small_arrays import constant

__all__ = ["CHECK", "KERNEL", "fits", "gated_delta_mixer", "gated_delta_mixer_reference"]

_DIMS = range(32, 129, 32)
_TAPS = range(2, 9)
_DTYPES = (mx.float32, mx.bfloat16, mx.float16)
_CALLS: dict[tuple[object, ...], Call] = {}

KERNEL = Kernel(
    "gated_delta_mixer",
    (
        *("projected", "window", "conv_weight", "a_log", "dt_bias", "norm_weight"),
        *("state", "tape", "accepted", "eps"),
    ),
    ("out", "window_now", "state_now", "tape_now"),
)


@dataclass(frozen=True)
class _Sizes:
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def columns(self) -> int:
        return self.channels + self.value_heads * (self.value_dim + 2)


def fits(
    projected: mx.array,
    conv_weight: mx.array,
    tape: Tape | None,
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
) -> bool:
    """Whether the kernel takes such inputs here; looks at shapes and dtypes alone."""
    sizes = _Sizes(key_heads, value_heads, key_dim, value_dim)
    steps, held = projected.shape[1], tape.steps if tape else 0
    return (
        1 <= steps <= MOST_STEPS
        and held <= MOST_STEPS
        and key_dim in _DIMS
        and value_dim in _DIMS
        and value_heads % key_heads == 0
        and projected.shape[2] == sizes.columns
        and conv_weight.shape[0] == sizes.channels
        and conv_weight.shape[1] in _TAPS
        and projected.dtype == conv_weight.dtype
        and projected.dtype in _DTYPES
        and _shared_bytes(sizes, steps, held) <= (32 if backend() == "metal" else 48) * 1024
    )


def gated_delta_mixer(
    projected: mx.array,
    window: mx.array,
    conv_weight: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    norm_weight: mx.array,
    state: mx.array,
    tape: Tape | None,
    accepted: mx.array,
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    eps: float,
) -> tuple[mx.array, mx.array, mx.array, Tape]:
    """Commit what was accepted of the last call, then run T new steps.

    The bits of a row's outputs depend neither on B nor on T nor on how its steps are spread over calls.
    `gated_delta_replay` gives the very state that the next call starts from.

    Args:
        projected: [B, T, C + Hv Dv + 2 Hv] in fp32, bf16 or fp16: q, k, v (to be convolved), z, b, a.
        window: [B, taps - 1 + T', C] of the same dtype: conv inputs before the new ones. Row b's own are the taps - 1
            from accepted[b] on; what is behind them is never used.
        conv_weight: [C, taps, 1] of the same dtype, 2 to 8 taps.
        a_log, dt_bias: [Hv]. norm_weight: [Dv]. Of any of these dtypes.
        state: [B, Hv, Dv, Dk] in fp32, before the tape's steps. It must begin on 16 bytes; odd views may not.
        tape: of the last call; None when there is nothing to replay.
        accepted: [B] int32, how many of the tape's steps to keep per row, 0..T'; stays on the device. 0 without a tape.
        eps: of the norm.

    Returns:
        What the output projection takes, [B, T, Hv Dv]; the row's own window followed by the T new inputs
        [B, taps - 1 + T, C]; the state before the new steps; the tape of those.

    Raises:
        ValueError: an array is not as described (see `fits`).
        RuntimeError: there is no GPU.
    """
    numbers = (key_heads, value_heads, key_dim, value_dim)
    old = tape.array if tape else state  # which is not looked at
    inputs = [projected, window, conv_weight, a_log, dt_bias, norm_weight, state, old, accepted, constant(eps)]
    key = (*((x.shape, x.dtype) for x in inputs), numbers, tape is None)
    call = _CALLS.get(key)
    if call is None:
        sizes = _Sizes(key_heads, value_heads, key_dim, value_dim)
        _check(inputs, tape, sizes)
        launch = _launch(inputs, tape.steps if tape else 0, sizes)
        call = _CALLS[key] = KERNEL.prepared(launch, [x.dtype for x in inputs])
    out, window_now, state_now, tape_now = call(inputs=inputs)
    return out, window_now, state_now, Tape(tape_now, (value_heads, value_dim, key_dim))


def gated_delta_mixer_reference(
    projected: mx.array,
    window: mx.array,
    conv_weight: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    norm_weight: mx.array,
    state: mx.array,
    tape: Tape | None,
    accepted: mx.array,
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    eps: float,
) -> tuple[mx.array, mx.array, mx.array, Tape]:
    """`gated_delta_mixer` in plain MLX: any device, any sizes."""
    batch, steps, _ = projected.shape
    channels, taps, _ = conv_weight.shape
    value_width = value_heads * value_dim
    borders = [channels, channels + value_width, channels + value_width + value_heads]
    fresh, z, b, a = mx.split(projected, borders, axis=-1)
    own = (accepted[:, None] if tape else mx.zeros((batch, 1), dtype=mx.int32)) + mx.arange(taps - 1)
    window_now = mx.concatenate([mx.take_along_axis(window, own[..., None], axis=1), fresh], axis=1)
    mixed = nn.silu(causal_conv(window_now, conv_weight))
    q, k, v = mx.split(mixed, [key_heads * key_dim, 2 * key_heads * key_dim], axis=-1)
    q, k = (x.reshape(batch, steps, key_heads, key_dim) for x in (q, k))
    v, z = (x.reshape(batch, steps, value_heads, value_dim) for x in (v, z))
    q, k = normalize_qk(q, k, inv_scale=key_dim**-0.5, eps=1e-6)
    decay = compute_g(a_log, a, dt_bias)
    y, state_now, new = gated_delta_verify_reference(q, k, v, decay, mx.sigmoid(b), state, tape, accepted)
    y = y.astype(projected.dtype)
    out = precise_swiglu(y, z, mx.fast.rms_norm(y, norm_weight, eps))
    return out.reshape(batch, steps, value_width), window_now, state_now, new


def _check(inputs: Sequence[mx.array], tape: Tape | None, sizes: _Sizes) -> None:
    """That the kernel takes them, and will not read past an array."""
    projected, window, conv_weight, a_log, dt_bias, norm_weight, state, *_, accepted, _ = inputs
    heads = vars(sizes)
    if not fits(projected, conv_weight, tape, **heads):
        given = f"{projected.dtype} {projected.shape}, taps {conv_weight.dtype} {conv_weight.shape}"
        steps = tape.steps if tape else 0
        raise ValueError(f"the kernel does not take {given}, {heads} and a tape of {steps}: ask `fits`")
    batch, held, own = projected.shape[0], tape.steps if tape else 0, (projected.dtype,)
    expected: list[tuple[str, mx.array, tuple[int, ...], Sequence[mx.Dtype]]] = [
        ("window", window, (batch, conv_weight.shape[1] - 1 + held, sizes.channels), own),
        ("conv_weight", conv_weight, (sizes.channels, conv_weight.shape[1], 1), own),
        ("a_log", a_log, (sizes.value_heads,), _DTYPES),
        ("dt_bias", dt_bias, (sizes.value_heads,), _DTYPES),
        ("norm_weight", norm_weight, (sizes.value_dim,), _DTYPES),
        ("state", state, (batch, sizes.value_heads, sizes.value_dim, sizes.key_dim), (mx.float32,)),
        ("accepted", accepted, (batch,), (mx.int32,)),
    ]
    if tape:
        expected.append(("tape", tape.array, (batch, held, tape_width(**heads)), (mx.float32,)))
    for name, x, shape, dtypes in expected:
        if x.shape != shape or x.dtype not in dtypes:
            raise ValueError(f"{name} is {x.dtype} {x.shape}; {shape} of {' or '.join(map(str, dtypes))} is needed")


def _room(steps: int, held: int) -> tuple[int, int]:
    """Steps, and steps of the tape, that there is room for; each pair is compiled anew, and takes registers."""
    if backend() == "metal":  # which has less memory of a threadgroup, and compiles quickly
        return steps, next(size for size in (4, MOST_STEPS) if size >= held)
    most = 8 if max(steps, held) <= 8 else MOST_STEPS
    return most, most


def _shared_bytes(sizes: _Sizes, steps: int, held: int) -> int:
    """Of a threadgroup: q, k, v; the tape, and y in its place; sums of squares, gates, decays."""
    (steps, tape), key_dim, value_dim = _room(steps, held), sizes.key_dim, sizes.value_dim
    later = max(tape * (key_dim + value_dim), steps * value_dim)
    return 4 * (steps * (2 * key_dim + value_dim) + later + steps * (key_dim // 16 + 2) + tape)


def _launch(inputs: Sequence[mx.array], held: int, sizes: _Sizes) -> Launch:
    """A threadgroup for every value head of a row, a simdgroup for every 8 rows of its state."""
    projected, _, conv_weight, _, dt_bias, norm_weight, state, *_ = inputs
    batch, steps, _ = projected.shape
    dtype, taps = projected.dtype, conv_weight.shape[1]
    most_steps, most_tape = _room(steps, held)

    def with_ours(other: mx.Dtype) -> mx.Dtype:
        return dtype if other == dtype else mx.float32

    template: dict[str, int | mx.Dtype] = {
        "T": dtype,
        "GATE": with_ours(dt_bias.dtype),
        "NORM": with_ours(norm_weight.dtype),
        "MOST_STEPS": most_steps,
        "MOST_TAPE": most_tape,
        "DK": sizes.key_dim,
        "DV": sizes.value_dim,
        "TAPS": taps,
    }
    return Launch(
        template=template,
        threadgroups=(sizes.value_heads, batch, 1),
        threads=4 * sizes.value_dim,
        shapes=[
            (batch, steps, sizes.value_heads * sizes.value_dim),
            (batch, taps - 1 + steps, sizes.channels),
            state.shape,
            (batch, steps, tape_width(**vars(sizes))),
        ],
        dtypes=[dtype, dtype, mx.float32, mx.float32],
    )


def _error() -> float:
    """Of all outputs together; infinite if the first step's bits depend on the number of steps."""
    batch, steps, taps = 2, 3, 4
    sizes = _Sizes(key_heads=1, value_heads=2, key_dim=128, value_dim=128)
    keys = iter(mx.random.split(mx.random.key(0), 12))

    def normal(*shape: int, dtype: mx.Dtype = mx.bfloat16, scale: float = 1) -> mx.array:
        return (scale * mx.random.normal(shape, key=next(keys))).astype(dtype)

    tape = Tape.of(
        mx.random.uniform(0.3, 1, (batch, steps, 2), key=next(keys)),
        normal(batch, steps, 1, 128, scale=128**-0.5),
        normal(batch, steps, 2, 128, dtype=mx.float32),
    )
    projected, window = normal(batch, steps, sizes.columns), normal(batch, taps - 1 + steps, sizes.channels)
    weights = normal(sizes.channels, taps, 1), normal(2, dtype=mx.float32), normal(2), normal(128)
    last = window, *weights, normal(batch, 2, 128, 128, dtype=mx.float32), tape, mx.array([1, steps], dtype=mx.int32)

    found = gated_delta_mixer(projected, *last, **vars(sizes), eps=1e-6)
    alone = gated_delta_mixer(projected[:, :1], *last, **vars(sizes), eps=1e-6)
    whole = [*_arrays(found)]
    for one, x in zip(_arrays(alone), whole, strict=True):
        first = x if x.shape == one.shape else x[:, : one.shape[1]]
        if not mx.array_equal(one, first).item():
            return float("inf")
    expected = gated_delta_mixer_reference(projected, *last, **vars(sizes), eps=1e-6)
    pairs = zip(whole, _arrays(expected), strict=True)
    return sum(relative_error(x, x_) for x, x_ in pairs)  # a sum, for `max` can lose a NaN


def _arrays(result: tuple[mx.array, mx.array, mx.array, Tape]) -> list[mx.array]:
    out, window, state, tape = result
    return [out, window, state, tape.decay, tape.keys, tape.deltas]


CHECK = SelfCheck("gated_delta_mixer", _error, most=4e-2)  # in bf16: roundings of q, k, v may fall otherwise
