"""DeepSeek-V3, R1 and V3.1 (arXiv 2412.19437): latent attention, experts behind the first layers, one MTP module.

The module stands behind the trunk's layers, as layer L: `enorm`, `hnorm`, `eh_proj`, a decoder layer with experts,
`shared_head.norm`; its copies of the embedding and of the output projection are the trunk's. Chained it hands on what
comes before that norm, as vLLM's `deepseek_mtp.py` does. Released weights are FP8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.deepseek_v3 import DeepseekV3Attention, DeepseekV3DecoderLayer, ModelArgs

from ..errors import CheckpointError
from ..state import KeyValueShape
from .base import Architecture, register
from .config import check_routing, layer_args, positive_number, whole_number, with_rope
from .experts import stack_experts
from .latent_attention import LatentAttention, split_latent_projections
from .mtp_modules import ModuleArgs, module_name
from .transformer import RECURRENT_DEPTH, Shape, Transformer, Trunk

__all__ = ["assemble", "build", "canonical", "family_args", "model_of"]

_WHOLE_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "max_position_embeddings",
    "n_routed_experts",
    "num_experts_per_tok",
)
# What mlx-lm's layers take for granted.
_ONLY = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "hidden_act": "silu", "rope_interleave": True}


class Attention(LatentAttention, DeepseekV3Attention):  # type: ignore[misc]
    """The same for one token and for all of a verify pass."""


class DecoderLayer(DeepseekV3DecoderLayer):  # type: ignore[misc]
    """mlx-lm's, with that attention."""

    def __init__(self, args: ModelArgs, index: int) -> None:
        super().__init__(args, index)
        self.self_attn = Attention(args)


def build(config: Mapping[str, Any], with_head: bool) -> Transformer:
    """A model of a text config."""
    args = family_args(ModelArgs, {"q_lora_rank": None, **config})
    layer = KeyValueShape(1, args.qk_rope_head_dim, args.kv_lora_rank)
    return model_of(config, args, partial(DecoderLayer, args), layer, with_head)


def family_args(kind: type[Any], config: Mapping[str, Any], whole_numbers: tuple[str, ...] = ()) -> Any:
    """The arguments of mlx-lm's layers of a family of this kind.

    Args:
        whole_numbers: fields that this family needs beside those that all do.

    Raises:
        CheckpointError: a field is missing or has no supported value, by name.
    """
    for name, only in _ONLY.items():
        if config.get(name, only) != only:
            raise CheckpointError(f"config.json: {name} {config[name]!r} is not supported, only {only!r}")
    if config.get("q_lora_rank") is not None:
        whole_number(config, "q_lora_rank")
    settings = with_rope(config)
    for name in ("rope_theta", "rms_norm_eps", "routed_scaling_factor"):
        positive_number(settings, name)
    args = layer_args(kind, settings, (*_WHOLE_NUMBERS, *whole_numbers))
    check_routing(config, args.n_routed_experts, args.num_experts_per_tok)
    return args


def model_of(
    config: Mapping[str, Any],
    args: Any,
    layer_of: Callable[[int], nn.Module],
    kept: KeyValueShape,
    with_head: bool,
) -> Transformer:
    """A model whose MTP module stands behind its trunk's layers.

    Args:
        args: mlx-lm's. layer_of: index -> decoder layer.
        kept: what each layer keeps of a position.
    """
    norm = partial(nn.RMSNorm, args.hidden_size, eps=args.rms_norm_eps)
    shape = Shape(
        vocab_size=args.vocab_size,
        context_length=args.max_position_embeddings,
        heads=args.num_attention_heads,
        inner=max(
            args.intermediate_size,
            (args.num_experts_per_tok + (args.n_shared_experts or 0)) * args.moe_intermediate_size,
        ),
        expanded=args.num_attention_heads * (args.qk_nope_head_dim + args.v_head_dim),
        layers=(kept,) * args.num_hidden_layers,
        modules=(kept,),
        max_depth=RECURRENT_DEPTH,
        tied=bool(config.get("tie_word_embeddings", False)),
    )
    layers = [layer_of(index) for index in range(args.num_hidden_layers)]
    trunk = Trunk(nn.Embedding(args.vocab_size, args.hidden_size), layers, norm())
    if not with_head:
        return Transformer(shape, trunk, None)
    return Transformer(shape, trunk, (ModuleArgs(args.hidden_size, norm), [layer_of(args.num_hidden_layers)]))


def canonical(name: str, config: Mapping[str, Any]) -> str | None:
    """See `Architecture.canonical`."""
    return module_name(name, whole_number(config, "num_hidden_layers"))


def assemble(tensors: dict[str, mx.array], config: Mapping[str, Any]) -> dict[str, mx.array]:
    """See `Architecture.assemble`."""
    return split_latent_projections(stack_experts(tensors), config)


register(
    Architecture(
        model_types=("deepseek_v3",),
        build=build,
        canonical=canonical,
        assemble=assemble,
        verified="trunk and head: transformers (MtpModel); deeper drafts: the same layers, chained",
    )
)
