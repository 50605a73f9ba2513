"""Nemotron-H: Mamba 2, attention, MLP and experts by a pattern, and an MTP head of such layers for one step.

A layer is one mixer behind one norm. Attention has no positions. The head's layers are stored as `mtp.layers`: `enorm`,
`hnorm` and `eh_proj` over [embedding; hidden] at the first, `final_layernorm` at the last. Time steps are clamped as
`time_step_limit` says, as in vLLM; transformers clamps them at `time_step_min`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.nemotron_h import ModelArgs, NemotronHBlock, NemotronHMamba2Mixer
from mlx_lm.models.ssm import ssm_attn, ssm_update

from ..errors import CheckpointError
from ..kernels.causal_conv import causal_conv
from ..state import Captured, CapturedLayer, KeyValues, KeyValueShape, RecurrentState, RowState, StateShape, stacked
from .base import Architecture, register
from .config import check_routing, layer_args, positive_number, whole_number
from .draft_projection import Projecting
from .experts import stack_experts
from .row_cache import RowCache, attend_by_row
from .transformer import Shape, Transformer, Trunk

__all__ = ["NemotronH", "build"]

_WHOLE_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "mamba_num_heads",
    "mamba_head_dim",
    "ssm_state_size",
    "conv_kernel",
    "n_groups",
)
_EXPERT_NUMBERS = (
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "n_group",
    "topk_group",
)
# What the family's configuration class fills in.
_DEFAULTS = {
    "intermediate_size": 21504,
    "attention_bias": False,
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "use_conv_bias": True,
    "layer_norm_epsilon": 1e-5,
    "head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
_KINDS = {
    "full_attention": "*",
    "attention": "*",
    "linear_attention": "M",
    "mamba": "M",
    "moe": "E",
    "mlp": "-",
}


class Mixer(NemotronHMamba2Mixer):  # type: ignore[misc]
    """mlx-lm's Mamba 2 mixer (arXiv 2405.21060) over a state of ours."""

    def __call__(self, x: mx.array, state: RecurrentState, keep_steps: bool) -> tuple[mx.array, CapturedLayer]:
        """x [B, T, H] behind `state`: the output [B, T, H], and what was captured.

        With `keep_steps` each token is mlx-lm's update of one token, so that its arithmetic does not hang on T.
        """
        batch, tokens, _ = x.shape
        inner, width = self.intermediate_size, self.n_groups * self.ssm_state_size
        gate, inputs, dt = mx.split(self.in_proj(x), [inner, inner + self.conv_dim], axis=-1)
        window = mx.concatenate([state.window, inputs], axis=1)
        mixed = causal_conv(window, self.conv1d.weight)
        mixed = nn.silu(mixed + self.conv1d.bias if "bias" in self.conv1d else mixed)
        values, keys, queries = mx.split(mixed, [inner, inner + width], axis=-1)
        values = values.reshape(batch, tokens, self.num_heads, self.head_dim)
        keys = keys.reshape(batch, tokens, self.n_groups, -1)
        queries = queries.reshape(batch, tokens, self.n_groups, -1)

        memories, outputs = [], []
        scan, length = (ssm_update, 1) if keep_steps else (ssm_attn, tokens)
        memory = state.memory
        for begin in range(0, tokens, length):
            now = slice(begin, begin + length)
            y, memory = scan(
                values[:, now],
                self.A_log,
                keys[:, now],
                queries[:, now],
                self.D.astype(x.dtype),
                dt[:, now],
                self.dt_bias,
                memory,
                self.time_step_limit,
            )
            outputs.append(y)
            memories.append(memory)
        y = mx.concatenate(outputs, axis=1).reshape(batch, tokens, inner)
        return self.out_proj(self.norm(y, gate)), CapturedLayer(window, memories, first=length)


class Block(NemotronHBlock):  # type: ignore[misc]
    """A layer: `kind` is "M", "*", "E" or "-"."""

    def __init__(self, args: ModelArgs, kind: str) -> None:
        super().__init__(args, kind)
        self.kind = kind
        if kind == "M":
            self.mixer: Any = Mixer(args)

    def attend(self, x: mx.array, buffers: Sequence[KeyValues], offsets: Sequence[int]) -> mx.array:
        """x [B, T, H] and attention of it, whose keys and values go to `offsets` of each row's buffer."""
        caches = [RowCache(buffer, offset) for buffer, offset in zip(buffers, offsets, strict=True)]
        return x + attend_by_row(self.mixer, self.norm(x), caches)

    def recur(self, x: mx.array, state: RecurrentState, keep_steps: bool) -> tuple[mx.array, CapturedLayer]:
        """x and Mamba 2 of it."""
        out, captured = self.mixer(self.norm(x), state, keep_steps)
        return x + out, captured

    def feed(self, x: mx.array) -> mx.array:
        """x and an MLP or experts of it."""
        out: mx.array = x + self.mixer(self.norm(x))
        return out


class Head(nn.Module):
    """The MTP head; what it hands out is behind its last norm."""

    def __init__(self, args: ModelArgs, kinds: str) -> None:
        super().__init__()
        self.layers = [Block(args, kind) for kind in kinds]
        first, last = self.layers[0], self.layers[-1]
        first.enorm, first.hnorm, last.final_layernorm = (
            nn.RMSNorm(args.hidden_size, eps=args.layer_norm_epsilon) for _ in range(3)
        )
        first.eh_proj = nn.Linear(2 * args.hidden_size, args.hidden_size, bias=False)

    def draft(
        self, embeddings: mx.array, hidden: mx.array, rows: Sequence[RowState], offsets: Sequence[int], step: int
    ) -> mx.array:
        """See `Model.draft`; embeddings [B, W, H] of its tokens."""
        first = self.layers[0]
        x = first.eh_proj(mx.concatenate([first.enorm(embeddings), first.hnorm(hidden)], axis=-1))
        buffers = zip(*(row.head for row in rows), strict=True)
        for layer in self.layers:
            x = layer.attend(x, next(buffers), offsets) if layer.kind == "*" else layer.feed(x)
        out: mx.array = self.layers[-1].final_layernorm(x)
        return out


class NemotronH(Transformer):
    """Implements `selfdraft.models.Model`."""

    def __init__(self, shape: Shape, args: ModelArgs, kinds: str, head: Head | None) -> None:
        layers = [Block(args, kind) for kind in kinds]
        norm = nn.RMSNorm(args.hidden_size, eps=args.layer_norm_epsilon)
        super().__init__(shape, Trunk(nn.Embedding(args.vocab_size, args.hidden_size), layers, norm), head)

    def _state_shape(self) -> StateShape:
        mixers = [layer.mixer for layer in self.model.layers if layer.kind == "M"]
        if not mixers:
            return super()._state_shape()
        first = mixers[0]
        return replace(
            super()._state_shape(),
            recurrent_layers=len(mixers),
            window=(first.conv_kernel_size - 1, first.conv_dim),
            memory=(first.num_heads, first.head_dim, first.ssm_state_size),
        )

    def forward(self, tokens: mx.array, rows: Sequence[RowState], *, keep_steps: bool) -> tuple[mx.array, Captured]:
        captured, states, offsets = Captured(), iter(stacked(rows)), [row.length for row in rows]
        buffers = zip(*(row.attention for row in rows), strict=True)
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            if layer.kind == "M":
                x, kept = layer.recur(x, next(states), keep_steps)
                captured.layers.append(kept)
            elif layer.kind == "*":
                x = layer.attend(x, next(buffers), offsets)
            else:
                x = layer.feed(x)
        return self.model.norm(x), captured

    def draft_logits(self, hidden: mx.array, step: int = 0, *, whole: bool = False) -> mx.array:
        return Projecting.draft_logits(self, hidden, step, whole=whole)


def build(config: Mapping[str, Any], with_head: bool) -> NemotronH:
    """A model of a text config."""
    given = {**_DEFAULTS, **config, "time_step_limit": _limit(config)}
    kinds = _kinds(given, "hybrid_override_pattern", "layers_block_type", "M*E-")
    if (layers := whole_number(config, "num_hidden_layers", default=len(kinds))) != len(kinds):
        raise CheckpointError(f"config.json: num_hidden_layers is {layers}, but the pattern has {len(kinds)} layers")
    drafting = _kinds(given, "mtp_hybrid_override_pattern", "mtp_layers_block_type", "*E-") if with_head else ""
    experts = _EXPERT_NUMBERS if "E" in kinds + drafting else ()
    if given.get("moe_latent_size") is not None:
        experts = (*experts, "moe_latent_size")
    args = layer_args(ModelArgs, {**given, "hybrid_override_pattern": list(kinds)}, (*_WHOLE_NUMBERS, *experts))
    if experts:
        check_routing(given, args.n_routed_experts, args.num_experts_per_tok)
        positive_number(given, "routed_scaling_factor")
    layer = KeyValueShape(args.num_key_value_heads, args.head_dim, args.head_dim)
    shape = Shape(
        vocab_size=args.vocab_size,
        context_length=args.max_position_embeddings,
        heads=args.num_attention_heads,
        # A mixer's projections and scan, in fp32, or what experts and MLPs make.
        inner=max(
            args.intermediate_size,
            4 * args.mamba_num_heads * args.mamba_head_dim,
            (args.num_experts_per_tok or 0) * (args.moe_intermediate_size or 0)
            + (args.moe_shared_expert_intermediate_size or 0),
        ),
        layers=(layer,) * kinds.count("*"),
        modules=(layer,) * drafting.count("*"),
        max_depth=1,
        tied=bool(given.get("tie_word_embeddings", False)),
    )
    return NemotronH(shape, args, kinds, Head(args, drafting) if with_head else None)


def _kinds(config: Mapping[str, Any], pattern: str, listed: str, known: str) -> str:
    """The layers' kinds, of a pattern, or of a list of names as newer configurations have it."""
    value: Any = config.get(pattern) or config.get(listed) or ("*E" if pattern.startswith("mtp") else None)
    try:
        kinds = "".join(part if part in known else _KINDS[part] for part in value)
    except (KeyError, TypeError):
        kinds = "?"
    if not kinds or not set(kinds) <= set(known):
        name = pattern if config.get(pattern) else listed
        raise CheckpointError(f"config.json: {name} must name a kind for each layer, not {value!r}")
    return kinds


def _limit(config: Mapping[str, Any]) -> tuple[float, float]:
    """The least and largest time step; infinity may be written as an object, as transformers does."""
    value = config.get("time_step_limit") or (0.0, math.inf)
    try:
        low, high = (float(each["__float__"] if isinstance(each, dict) else each) for each in value)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: time_step_limit must be two numbers, not {value!r}") from error
    return low, high


def _canonical(name: str, _: Mapping[str, Any]) -> str | None:
    name = re.sub(r"^model\.(?=mtp\.)", "", name)
    name = re.sub(r"^backbone\.", "model.", name)
    return name.replace("model.embeddings.", "model.embed_tokens.").replace("model.norm_f.", "model.norm.")


def _assemble(tensors: dict[str, mx.array], _: Mapping[str, Any]) -> dict[str, mx.array]:
    """conv1d.weight: Hugging Face [C, 1, k] -> MLX [C, k, 1]; experts under mlx-lm's names."""
    found = {}
    for name, tensor in stack_experts(tensors).items():
        name = name.replace(".switch_mlp.up_proj.", ".switch_mlp.fc1.")
        name = name.replace(".switch_mlp.down_proj.", ".switch_mlp.fc2.")
        turned = name.endswith("conv1d.weight") and tensor.shape[-1] != 1
        found[name] = tensor.swapaxes(1, 2) if turned else tensor
    return found


register(
    Architecture(
        model_types=("nemotron_h",),
        build=build,
        canonical=_canonical,
        assemble=_assemble,
        verified="trunk: transformers; head: vLLM's formula on transformers' layers",
    )
)
