"""Layers that hand out what rollback needs: attention over rows, and GatedDeltaNet.

Parameter names are those of the checkpoints. RoPE, MLP, norms and quantisation are mlx's and mlx-lm's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import compute_g, normalize_qk
from mlx_lm.models.qwen3_next import Qwen3NextRMSNormGated
from mlx_lm.models.rope_utils import initialize_rope

from ..kernels import attention_inputs as inputs
from ..kernels import few_query_attention as few_queries
from ..kernels import gated_delta_mixer as mixers
from ..kernels import gated_delta_tape as tapes
from ..kernels.causal_conv import causal_conv
from ..kernels.gated_delta import gated_delta_prefill, gated_delta_steps
from ..kernels.gated_delta_tape import Tape
from ..state import CapturedLayer, KeyValues, RecurrentState, attend
from .few_rows import Entrance, Normed, added, added_and_normed, joined
from .multimodal_rope import Rotation

__all__ = ["AttentionArgs", "DeltaArgs", "GatedAttention", "GatedDeltaNet"]


@dataclass(frozen=True)
class AttentionArgs:
    """Sizes of a gated full-attention layer."""

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    bias: bool
    norm_eps: float
    rope_dims: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    context_length: int


class GatedAttention(nn.Module):
    """Full attention whose output is gated: o_proj(attention * sigmoid(gate)).

    `q_proj` yields query and gate of every head, side by side.
    """

    def __init__(self, args: AttentionArgs) -> None:
        super().__init__()
        self.args = args
        width = args.heads * args.head_dim
        self.q_proj = nn.Linear(args.hidden_size, 2 * width, bias=args.bias)
        self.k_proj = nn.Linear(args.hidden_size, args.kv_heads * args.head_dim, bias=args.bias)
        self.v_proj = nn.Linear(args.hidden_size, args.kv_heads * args.head_dim, bias=args.bias)
        self.o_proj = nn.Linear(width, args.hidden_size, bias=args.bias)
        self.q_norm = nn.RMSNorm(args.head_dim, eps=args.norm_eps)
        self.k_norm = nn.RMSNorm(args.head_dim, eps=args.norm_eps)
        self._sizes = {"heads": args.heads, "kv_heads": args.kv_heads, "size": args.head_dim}
        self.rope = initialize_rope(
            args.rope_dims,
            base=args.rope_theta,
            traditional=False,
            scaling_config=args.rope_scaling,
            max_position_embeddings=args.context_length,
        )

    def join(self) -> None:
        """Put the projections of x together, if they can be."""
        whole = joined([self.q_proj, self.k_proj, self.v_proj])
        rope = self.rope
        if whole is None or type(rope) is not nn.RoPE or rope.traditional:
            return
        self.qkv_proj = whole
        for name in ("q_proj", "k_proj", "v_proj"):
            del self[name]
        pairs = mx.arange(0, rope.dims, 2, dtype=mx.float32)
        self._frequencies = rope.scale * rope.base ** (-pairs / rope.dims)
        mx.eval(self._frequencies)

    def few_fits(self, rows: int, tokens: int, dtype: mx.Dtype) -> bool:
        """Whether `few` may be called."""
        width = 2 * (self.args.heads + self.args.kv_heads) * self.args.head_dim
        projected = mx.zeros((rows, tokens, width), dtype=dtype)
        checked = "qkv_proj" in self and inputs.CHECK.passed and few_queries.CHECK.passed
        return checked and inputs.fits(projected, **self._sizes)

    def few(
        self,
        x: Normed,
        buffers: Sequence[tuple[mx.array, mx.array]],
        starts: mx.array,
        rope_deltas: mx.array,
        ends: mx.array,
        residual: mx.array,
        following: Entrance,
    ) -> tuple[mx.array, Normed | None]:
        """The same for few tokens, in kernels that write new keys and values straight into the rows' buffers.

        Args:
            buffers: keys and values of each row, nobody else's. starts, rope_deltas, ends: int32 [B], on the device.
            following: of what the output's norm is for.
        """
        args, projected = self.args, self.qkv_proj(x)
        keys, values = [pair[0] for pair in buffers], [pair[1] for pair in buffers]
        q = inputs.attention_inputs(
            projected,
            self.q_norm.weight,
            self.k_norm.weight,
            self._frequencies,
            keys,
            values,
            starts,
            rope_deltas,
            **self._sizes,
            eps=args.norm_eps,
        )
        out = few_queries.few_query_attention(q, keys, values, ends, scale=args.head_dim**-0.5, gate=projected)
        return added_and_normed(self.o_proj, out, residual, following)

    def __call__(
        self,
        x: mx.array,
        rows: Sequence[KeyValues],
        offsets: Sequence[int],
        positions: Sequence[int] | Rotation,
        residual: mx.array,
    ) -> mx.array:
        """residual + attention of x, both [B, T, H].

        Args:
            offsets: entry of each row's first token in its buffers.
            positions: its rotary position, from which the others count on; or how all are rotated.
        """
        args = self.args
        batch, tokens, _ = x.shape
        if "qkv_proj" in self:
            width = 2 * args.heads * args.head_dim
            q, k, v = mx.split(self.qkv_proj(x), [width, width + args.kv_heads * args.head_dim], axis=-1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, gate = mx.split(q.reshape(batch, tokens, args.heads, -1), 2, axis=-1)
        k = k.reshape(batch, tokens, args.kv_heads, -1)
        v = v.reshape(batch, tokens, args.kv_heads, -1)
        q = self._rotated(self.q_norm(q).swapaxes(1, 2), positions)
        k = self._rotated(self.k_norm(k).swapaxes(1, 2), positions)
        out = attend(rows, offsets, q, k, v.swapaxes(1, 2), args.head_dim**-0.5)
        out = out.swapaxes(1, 2).reshape(batch, tokens, -1)
        return added(self.o_proj, out * mx.sigmoid(gate.reshape(batch, tokens, -1)), residual)

    def _rotated(self, x: mx.array, positions: Sequence[int] | Rotation) -> mx.array:
        """x [B, heads, T, head_dim] behind rotary embedding."""
        if isinstance(positions, Rotation):
            return positions(x)
        starts: int | mx.array = positions[0] if len(positions) == 1 else mx.array(list(positions))
        rotated: mx.array = self.rope(x, offset=starts)
        return rotated


@dataclass(frozen=True)
class DeltaArgs:
    """Sizes of a GatedDeltaNet layer."""

    hidden_size: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    norm_eps: float

    @property
    def channels(self) -> int:
        """Width of the convolution: queries, keys and values side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class GatedDeltaNet(nn.Module):
    """Linear attention by the gated delta rule (arXiv 2412.06464), as wired in Qwen3-Next and Qwen3.5."""

    def __init__(self, args: DeltaArgs) -> None:
        super().__init__()
        self.args = args
        value_width = args.value_heads * args.value_dim
        self.in_proj_qkv = nn.Linear(args.hidden_size, args.channels, bias=False)
        self.in_proj_z = nn.Linear(args.hidden_size, value_width, bias=False)
        self.in_proj_b = nn.Linear(args.hidden_size, args.value_heads, bias=False)
        self.in_proj_a = nn.Linear(args.hidden_size, args.value_heads, bias=False)
        self.conv1d = nn.Conv1d(args.channels, args.channels, args.taps, groups=args.channels, bias=False)
        self.A_log = mx.zeros(args.value_heads)
        self.dt_bias = mx.ones(args.value_heads)
        self.norm = Qwen3NextRMSNormGated(args.value_dim, eps=args.norm_eps)
        self._sizes = {
            "key_heads": args.key_heads,
            "value_heads": args.value_heads,
            "key_dim": args.key_dim,
            "value_dim": args.value_dim,
        }
        self.out_proj = nn.Linear(value_width, args.hidden_size, bias=False)

    def join(self) -> None:
        """Put the projections of x together, if they can be."""
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        if (whole := joined([self[name] for name in names])) is not None:
            self.in_proj = whole
            for name in names:
                del self[name]

    def few_fits(self, rows: int, tokens: int, tape: Tape | None, dtype: mx.Dtype) -> bool:
        """Whether `few` may be called."""
        width = self.args.channels + self.args.value_heads * (self.args.value_dim + 2)
        projected = mx.zeros((rows, tokens, width), dtype=dtype)
        checked = "in_proj" in self and mixers.CHECK.passed
        return checked and mixers.fits(projected, self.conv1d.weight, tape, **self._sizes)

    def few(
        self, x: Normed, state: RecurrentState, counts: mx.array, residual: mx.array, following: Entrance
    ) -> tuple[mx.array, Normed | None, CapturedLayer]:
        """The same for few tokens, and its norm for what follows, in a kernel that first commits what `counts` (int32
        [B]) accepts of the tape."""
        out, window, memory, tape = mixers.gated_delta_mixer(
            self.in_proj(x),
            state.inputs,
            self.conv1d.weight,
            self.A_log,
            self.dt_bias,
            self.norm.weight,
            state.base,
            state.tape,
            counts,
            **self._sizes,
            eps=self.args.norm_eps,
        )
        captured = CapturedLayer(window, [memory], first=1, tape=tape)
        return *added_and_normed(self.out_proj, out, residual, following), captured

    def __call__(
        self, x: mx.array, state: RecurrentState, keep_steps: bool, residual: mx.array
    ) -> tuple[mx.array, CapturedLayer]:
        """x [B, T, H] after `state` (window [B, k-1, C], memory [B, Hv, Dv, Dk]).

        Returns:
            residual + the output [B, T, H], and window and memories to commit from.
        """
        args = self.args
        batch, tokens, _ = x.shape
        if "in_proj" in self:
            ends = [args.channels, args.channels + args.value_heads * args.value_dim]
            qkv, z, b, a = mx.split(self.in_proj(x), [*ends, ends[-1] + args.value_heads], axis=-1)
        else:
            qkv, z, b, a = self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)
        window = mx.concatenate([state.window, qkv], axis=1)
        mixed = nn.silu(causal_conv(window, self.conv1d.weight))
        key_width = args.key_heads * args.key_dim
        q, k, v = mx.split(mixed, [key_width, 2 * key_width], axis=-1)
        q = q.reshape(batch, tokens, args.key_heads, args.key_dim)
        k = k.reshape(batch, tokens, args.key_heads, args.key_dim)
        v = v.reshape(batch, tokens, args.value_heads, args.value_dim)
        q, k = normalize_qk(q, k, inv_scale=args.key_dim**-0.5, eps=1e-6)
        beta = mx.sigmoid(b)
        decay = compute_g(self.A_log, a, self.dt_bias)

        if keep_steps and tapes.CHECK.passed and tapes.fits(q, k, v):
            now = state.base, state.tape, state.counts
            y, memory, tape = tapes.gated_delta_verify(q, k, v, decay, beta, *now)
            captured = CapturedLayer(window, [memory], first=1, tape=tape)
        elif keep_steps:
            y, memories = gated_delta_steps(q, k, v, decay, beta, state.memory)
            captured = CapturedLayer(window, memories, first=1)
        else:
            y, memory = gated_delta_prefill(q, k, v, decay, beta, state.memory)
            captured = CapturedLayer(window, [memory], first=tokens)
        z = z.reshape(batch, tokens, args.value_heads, args.value_dim)
        return added(self.out_proj, self.norm(y.astype(x.dtype), z).reshape(batch, tokens, -1), residual), captured
