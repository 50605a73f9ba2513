"""The gated delta rule over many tokens as one kernel: for a prompt. Knows shapes and dtypes, and no layer or cache.

Letters as in `gated_delta`: q, k [B, T, Hk, Dk]; v [B, T, Hv, Dv]; decay g and beta [B, T, Hv]; S [B, Hv, Dv, Dk]
(arXiv 2412.06464). The state stays in registers over all tokens, which go one after the other: y and S have the bits of
`gated_delta_tape` and of `gated_delta_mixer`, so a prompt leaves what decoding its tokens would have left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from .portable import Call, Kernel, Launch
from .self_check import SelfCheck, relative_error, speed_over

__all__ = ["CHECK", "KERNEL", "fits", "gated_delta_scan", "gated_delta_scan_reference"]

_KEY_DIMS = range(32, 257, 32)
_DTYPES = (mx.float32, mx.bfloat16, mx.float16)
_CALLS: dict[tuple[object, ...], Call] = {}
_SHAPES = ((4, 1), (8, 1), (12, 1), (8, 2), (8, 3))  # simdgroups of a threadgroup, and rows of S a squad
_PROCESSORS = 132  # of an NVIDIA H200, each of which holds one threadgroup of the larger shapes
_SHARED = 48 * 1024  # bytes

KERNEL = Kernel("gated_delta_scan", ("q", "k", "v", "decay", "beta", "state"), ("y", "state_now"))


def fits(q: mx.array, k: mx.array, v: mx.array) -> bool:
    """Whether the kernel takes such inputs; looks at shapes and dtypes alone."""
    _, tokens, key_heads, key_dim = k.shape
    _, _, value_heads, value_dim = v.shape
    return (
        q.shape == k.shape
        and v.shape[:2] == k.shape[:2]
        and tokens > 0
        and key_dim in _KEY_DIMS
        and value_dim % 4 == 0
        and value_heads % key_heads == 0
        and q.dtype == k.dtype == v.dtype
        and q.dtype in _DTYPES
    )


def gated_delta_scan(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """All T tokens by the kernel. Needs a GPU.

    The bits of a row depend neither on B nor on how its tokens are spread over calls.

    Args:
        q, k, v: of one dtype: fp32, bf16 or fp16. k is L2-normalised and q scaled. They must begin on 16 bytes; odd
            views of larger arrays may not.
        g: of any dtype. beta: of a floating one. state: in fp32.

    Returns:
        y [B, T, Hv, Dv] in the dtype of q, and the state [B, Hv, Dv, Dk] after the last token in fp32.

    Raises:
        ValueError: an array is not as described (see `fits`).
        RuntimeError: there is no GPU.
    """
    inputs = [q, k, v, g.astype(mx.float32), beta, state]
    key = tuple((x.shape, x.dtype) for x in inputs)
    call = _CALLS.get(key)
    if call is None:
        call = _CALLS[key] = _prepared(inputs)
    y, state_now = call(inputs=inputs)
    return y, state_now


def gated_delta_scan_reference(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """The same in plain MLX, one token after the other, with y in fp32: any device, any sizes, any dtypes."""
    queries, keys = (mx.repeat(x.astype(mx.float32), v.shape[2] // x.shape[2], axis=2)[..., None, :] for x in (q, k))
    values, rates = v.astype(mx.float32), beta.astype(mx.float32)[..., None]
    decays = g.astype(mx.float32)[..., None, None]
    outputs = []
    for t in range(v.shape[1]):
        state = decays[:, t] * state
        delta = rates[:, t] * (values[:, t] - (state * keys[:, t]).sum(axis=-1))
        state = state + delta[..., None] * keys[:, t]
        outputs.append((state * queries[:, t]).sum(axis=-1))
    return mx.stack(outputs, axis=1), state


def _prepared(inputs: Sequence[mx.array]) -> Call:
    q, k, v, g, beta, state = inputs
    if not fits(q, k, v):
        given = ", ".join(f"{name} {x.dtype} {x.shape}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"the kernel does not take {given}: ask `fits`, or use gated_delta_chunked")
    batch, _, value_heads, value_dim = v.shape
    of_state = batch, value_heads, value_dim, k.shape[3]
    for name, x, shape in (("g", g, v.shape[:3]), ("beta", beta, v.shape[:3]), ("state", state, of_state)):
        dtypes = _DTYPES if name == "beta" else (mx.float32,)
        if x.shape != shape or x.dtype not in dtypes:
            raise ValueError(f"{name} is {x.dtype} {x.shape}; {shape} of {' or '.join(map(str, dtypes))} is needed")
    return KERNEL.prepared(_launch(q, v, beta, state), [x.dtype for x in inputs])


def _launch(q: mx.array, v: mx.array, beta: mx.array, state: mx.array) -> Launch:
    """A threadgroup for some rows of S of one key head's value heads: the fewest that make no more of them than a large
    GPU has processors. Neither tokens, B nor heads are compiled in."""
    batch, _, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    lanes = 8 if key_dim <= 128 else 16  # 16 columns a lane at most

    def across(simdgroups: int, rows: int) -> int:
        return -(-(value_heads // key_heads * value_dim) // (32 // lanes * simdgroups * rows))

    fitting = (shape for shape in _SHAPES if key_heads * across(*shape) <= _PROCESSORS)
    simdgroups, rows = next(fitting, _SHAPES[-1])
    template: dict[str, int | mx.Dtype] = {
        "T": q.dtype,
        "BETA": beta.dtype,
        "DK": key_dim,
        "DV": value_dim,
        "LANES": lanes,
        "ROWS": rows,
        "SIMDGROUPS": simdgroups,
        "PIECE": _piece(key_dim, value_dim, 32 // lanes * simdgroups * rows),
    }
    return Launch(
        template=template,
        threadgroups=(across(simdgroups, rows), key_heads, batch),
        threads=32 * simdgroups,
        shapes=[v.shape, state.shape],
        dtypes=[q.dtype, mx.float32],
    )


def _piece(key_dim: int, value_dim: int, channels: int) -> int:
    """Tokens that come to shared memory together: as many as fit twice in what a text may declare."""
    heads = 1 if value_dim % channels == 0 else (channels + value_dim - 2) // value_dim + 1

    def size(tokens: int) -> int:
        return 4 * (tokens * 2 * (key_dim + 16) + (channels + 2 * heads) * (tokens + 4))

    return next(tokens for tokens in (16, 8, 4) if 2 * size(tokens) <= _SHARED)


def _made(batch: int, tokens: int, key_heads: int, value_heads: int) -> list[mx.array]:
    """Arguments as a layer makes them, in bf16, heads of 128; with decays and rates of 0, strong decay, rates of 1."""
    keys = mx.random.split(mx.random.key(0), 6)
    shape = batch, tokens, key_heads, 128
    q, k = (mx.random.normal(shape, key=key) for key in keys[:2])
    q, k = (x / mx.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = mx.random.normal((batch, tokens, value_heads, 128), key=keys[2])
    g, beta = (mx.random.uniform(0, 1, (batch, tokens, value_heads), key=key) for key in keys[3:5])
    g = mx.where(g < 0.02, 0, mx.where(g < 0.04, 1e-30, mx.exp(-0.1 * g)))
    beta = mx.where(beta < 0.1, 0, mx.where(beta > 0.9, 1, beta))
    state = mx.random.normal((batch, value_heads, 128, 128), key=keys[5])
    return [*(x.astype(mx.bfloat16) for x in (q, k, v)), g, beta.astype(mx.bfloat16), state]


def _error() -> float:
    """Of y, and a hundredfold of the state, which is not rounded to bf16; infinite if halves give other bits."""
    q, k, v, g, beta, state = _made(2, 203, 16, 48)
    y, last = gated_delta_scan(q, k, v, g, beta, state)
    halves, half, middle = [], state, q.shape[1] // 2
    for part in (slice(0, middle), slice(middle, None)):
        found, half = gated_delta_scan(q[:, part], k[:, part], v[:, part], g[:, part], beta[:, part], half)
        halves.append(found)
    if not (mx.array_equal(mx.concatenate(halves, axis=1), y).item() and mx.array_equal(half, last).item()):
        return float("inf")
    expected, expected_last = gated_delta_scan_reference(q, k, v, g, beta, state)
    return relative_error(y, expected) + 100 * relative_error(last, expected_last)


def _gain() -> float:
    """Over the chunked form, for 512 tokens of a large model."""
    from .gated_delta import gated_delta_chunked  # which asks this module before

    arrays = _made(1, 512, 16, 48)
    mx.eval(arrays)
    forms: list[Callable[..., tuple[mx.array, mx.array]]] = [gated_delta_chunked, gated_delta_scan]
    stock, kernel = (partial(_as_list, form, arrays) for form in forms)
    return speed_over(stock, kernel)


def _as_list(form: Callable[..., tuple[mx.array, mx.array]], arrays: Sequence[mx.array]) -> list[mx.array]:
    return list(form(*arrays))


CHECK = SelfCheck("gated_delta_scan", _error, most=1e-2, gain=_gain)  # y is rounded to bf16: 4e-3
