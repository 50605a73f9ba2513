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

from ..kernels import gated_delta_tape as tapes
from ..kernels.causal_conv import causal_conv
from ..kernels.gated_delta import gated_delta_prefill, gated_delta_steps
from ..state import CapturedLayer, KeyValues, RecurrentState, attend

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
        self.rope = initialize_rope(
            args.rope_dims,
            base=args.rope_theta,
            traditional=False,
            scaling_config=args.rope_scaling,
            max_position_embeddings=args.context_length,
        )

    def __call__(self, x: mx.array, rows: Sequence[KeyValues], offsets: Sequence[int]) -> mx.array:
        """x [B, T, H]; row i's tokens sit at positions offsets[i], offsets[i] + 1, ..."""
        args = self.args
        batch, tokens, _ = x.shape
        q, gate = mx.split(self.q_proj(x).reshape(batch, tokens, args.heads, -1), 2, axis=-1)
        k = self.k_proj(x).reshape(batch, tokens, args.kv_heads, -1)
        v = self.v_proj(x).reshape(batch, tokens, args.kv_heads, -1)
        starts: int | mx.array = offsets[0] if batch == 1 else mx.array(list(offsets))
        q = self.rope(self.q_norm(q).swapaxes(1, 2), offset=starts)
        k = self.rope(self.k_norm(k).swapaxes(1, 2), offset=starts)
        out = attend(rows, offsets, q, k, v.swapaxes(1, 2), args.head_dim**-0.5)
        out = out.swapaxes(1, 2).reshape(batch, tokens, -1)
        gated: mx.array = self.o_proj(out * mx.sigmoid(gate.reshape(batch, tokens, -1)))
        return gated


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
        self.out_proj = nn.Linear(value_width, args.hidden_size, bias=False)

    def __call__(self, x: mx.array, state: RecurrentState, keep_steps: bool) -> tuple[mx.array, CapturedLayer]:
        """x [B, T, H] after `state` (window [B, k-1, C], memory [B, Hv, Dv, Dk]).

        Returns:
            The output [B, T, H], and window and memories to commit from.
        """
        args = self.args
        batch, tokens, _ = x.shape
        window = mx.concatenate([state.window, self.in_proj_qkv(x)], axis=1)
        mixed = nn.silu(causal_conv(window, self.conv1d.weight))
        key_width = args.key_heads * args.key_dim
        q, k, v = mx.split(mixed, [key_width, 2 * key_width], axis=-1)
        q = q.reshape(batch, tokens, args.key_heads, args.key_dim)
        k = k.reshape(batch, tokens, args.key_heads, args.key_dim)
        v = v.reshape(batch, tokens, args.value_heads, args.value_dim)
        q, k = normalize_qk(q, k, inv_scale=args.key_dim**-0.5, eps=1e-6)
        beta = mx.sigmoid(self.in_proj_b(x))
        decay = compute_g(self.A_log, self.in_proj_a(x), self.dt_bias)

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
        z = self.in_proj_z(x).reshape(batch, tokens, args.value_heads, args.value_dim)
        return self.out_proj(self.norm(y.astype(x.dtype), z).reshape(batch, tokens, -1)), captured
