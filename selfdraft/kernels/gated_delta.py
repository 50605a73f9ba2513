"""The gated delta rule, in plain MLX: stepwise for decoding, chunked for prefill.

Recurrence per head (Yang et al., Gated Delta Networks, arXiv 2412.06464), state S of shape [Dv, Dk], in fp32:

    S_t = g_t S_{t-1} + delta_t k_t^T      delta_t = beta_t (v_t - g_t S_{t-1} k_t)      y_t = S_t q_t

Shapes used throughout: q, k [B, T, Hk, Dk]; v [B, T, Hv, Dv]; decay g and beta [B, T, Hv]; S [B, Hv, Dv, Dk].
k must be L2-normalised and q already scaled (`normalize_qk` of mlx-lm).
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_kernel

from . import gated_delta_scan as scan

__all__ = ["gated_delta_chunked", "gated_delta_prefill", "gated_delta_steps", "unit_lower_inverse"]

CHUNK = 64  # tokens solved together; a power of two
_LEAST_DECAY = 1e-37  # about the smallest normal fp32


def gated_delta_steps(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, list[mx.array]]:
    """One step after the other, every state kept.

    The arithmetic of a step does not depend on how many steps there are, so a verify pass over K+1 tokens
    gives the bits that K+1 one-token passes give.

    Returns:
        y [B, T, Hv, Dv] in fp32, and the T states, each [B, Hv, Dv, Dk]: states[i] is the one after i+1 tokens.
    """
    q, k = _to_value_heads(q, v), _to_value_heads(k, v)
    q, k, v, g, beta = (x.astype(mx.float32) for x in (q, k, v, g, beta))
    along = (k * q).sum(axis=-1, keepdims=True)
    outputs, states = [], []
    for t in range(q.shape[1]):
        # y_t = g_t S_{t-1} q_t + delta_t (k_t . q_t), so that the state is read for both at once.
        of_key, of_query = _products(state, k[:, t], q[:, t])
        decay = g[:, t, :, None]
        delta = (v[:, t] - decay * of_key) * beta[:, t, :, None]
        outputs.append(decay * of_query + delta * along[:, t])
        state = _written(decay[..., None], state, delta[..., None], k[:, t, :, None, :])
        states.append(state)
    return mx.stack(outputs, axis=1), states


def _products(state: mx.array, k: mx.array, q: mx.array) -> tuple[mx.array, mx.array]:
    """S k and S q, [B, Hv, Dv]."""
    if mx.default_device() == mx.cpu:
        both = state @ mx.stack([k, q], axis=-1)
        return both[..., 0], both[..., 1]
    # A matrix product in fp32 may be one of TF32 on CUDA, and of another order for another number of rows.
    return (state * k[:, :, None]).sum(axis=-1), (state * q[:, :, None]).sum(axis=-1)


@mx.compile
def _written(decay: mx.array, state: mx.array, delta: mx.array, key: mx.array) -> mx.array:
    """In one pass, where it was three."""
    return decay * state + delta * key


def gated_delta_prefill(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Many tokens, only the last state: mlx-lm's kernel on Metal, ours on CUDA where it fits, else the chunked form.

    Returns:
        y [B, T, Hv, Dv], in fp32 or the dtype of q, and the state after the last token.
    """
    on_metal = mx.metal.is_available() and mx.default_device() == mx.gpu
    if on_metal and k.shape[-1] % 32 == 0:
        y, state = gated_delta_kernel(q, k, v, g, beta, state)
        return y, state
    if scan.fits(q, k, v) and scan.CHECK.passed:
        return scan.gated_delta_scan(q, k, v, g, beta, state)
    return gated_delta_chunked(q, k, v, g, beta, state)


def gated_delta_chunked(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """The same recurrence as matrix products over chunks (WY form, arXiv 2406.06484, with decay).

    With G_t the product of the decays of a chunk up to t, the deltas of a chunk solve
    (I + A) Delta = beta (V - G S_0 K), A_ti = beta_t (G_t / G_i) (k_i . k_t) for i < t.

    Returns:
        y [B, T, Hv, Dv] in fp32 and the state after the last token.
    """
    tokens = q.shape[1]
    q, k = _to_value_heads(q, v), _to_value_heads(k, v)
    q, k, v = (_chunks(x.astype(mx.float32), tokens) for x in (q, k, v))  # [B, H, N, C, D]
    g = mx.maximum(g.astype(mx.float32), _LEAST_DECAY)  # the logarithm of an underflowed decay would make NaN below
    log_g = _chunks(mx.log(g)[..., None], tokens)[..., 0]  # padding: log 1
    beta = _chunks(beta.astype(mx.float32)[..., None], tokens)  # padding: 0, so nothing is written

    total = mx.cumsum(log_g, axis=-1)
    lower = mx.tri(CHUNK, dtype=mx.bool_)
    ratio = mx.exp(mx.where(lower, total[..., :, None] - total[..., None, :], -mx.inf))  # G_t / G_i, i <= t
    decay = mx.exp(total)[..., None]

    keys_t = k.swapaxes(-1, -2)
    strict = mx.tri(CHUNK, k=-1)
    solve = unit_lower_inverse(beta * (k @ keys_t) * ratio * strict)
    write = solve @ (beta * v)
    erase = solve @ (beta * decay * k)
    attend = (q @ keys_t) * ratio
    read = decay * q
    keep = mx.exp(total[..., -1:] - total)[..., None] * k  # (G_C / G_i) k_i
    last = mx.exp(total[..., -1])[..., None, None]

    outputs = []
    for n in range(q.shape[2]):
        deltas = write[:, :, n] - erase[:, :, n] @ state.swapaxes(-1, -2)
        outputs.append(read[:, :, n] @ state.swapaxes(-1, -2) + attend[:, :, n] @ deltas)
        state = last[:, :, n] * state + deltas.swapaxes(-1, -2) @ keep[:, :, n]
    y = mx.concatenate(outputs, axis=2)[:, :, :tokens]
    return y.swapaxes(1, 2), state


def unit_lower_inverse(a: mx.array) -> mx.array:
    """Inverse of I + a for strictly lower triangular `a` [..., C, C], C a power of two.

    Diagonal blocks are inverted by doubling: inv([[X, 0], [B, Y]]) = [[X', 0], [-Y' B X', Y']]. As stable as
    substitution, in log2(C) batched products.
    """
    size = a.shape[-1]
    blocks = mx.ones((*a.shape[:-2], size, 1, 1), dtype=a.dtype)
    width = 1
    while width < size:
        count = size // width
        tiles = a.reshape(*a.shape[:-2], count, width, count, width)[..., 1::2, :, ::2, :]
        below = mx.moveaxis(mx.diagonal(tiles, axis1=-4, axis2=-2), -1, -3)
        upper, lower = blocks[..., ::2, :, :], blocks[..., 1::2, :, :]
        corner = -(lower @ below @ upper)
        top = mx.concatenate([upper, mx.zeros_like(upper)], axis=-1)
        blocks = mx.concatenate([top, mx.concatenate([corner, lower], axis=-1)], axis=-2)
        width *= 2
    return blocks.squeeze(-3)


def _to_value_heads(x: mx.array, v: mx.array) -> mx.array:
    """Repeat key heads so that there is one per value head."""
    repeat = v.shape[2] // x.shape[2]
    return mx.repeat(x, repeat, axis=2) if repeat > 1 else x


def _chunks(x: mx.array, tokens: int) -> mx.array:
    """[B, T, H, D] -> [B, H, N, C, D], zero-padded at the end."""
    padded = mx.pad(x, [(0, 0), (0, -tokens % CHUNK), (0, 0), (0, 0)])
    batch, length, heads, width = padded.shape
    return padded.swapaxes(1, 2).reshape(batch, heads, length // CHUNK, CHUNK, width)
