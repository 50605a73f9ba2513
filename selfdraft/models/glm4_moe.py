"""GLM-4.5, 4.6 and 4.7: grouped attention, experts behind the first layers, one MTP module of DeepSeek-V3's kind.

The module stands behind the trunk's layers, as layer L: `enorm`, `hnorm`, `eh_proj`, a decoder layer with experts,
`shared_head.norm`; its copies of the embedding and of the output projection are the trunk's. Chained it hands on what
comes before that norm, as vLLM's `deepseek_mtp.py` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.glm4_moe import DecoderLayer, ModelArgs

from ..state import KeyValueShape
from .base import Architecture, register
from .block_part import block_part
from .config import check_routing, layer_args, positive_number, with_rope
from .deepseek_v3 import canonical
from .experts import stack_experts
from .mtp_modules import ModuleArgs
from .transformer import RECURRENT_DEPTH, Shape, Transformer, Trunk

__all__ = ["build"]

_WHOLE_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "n_routed_experts",
    "num_experts_per_tok",
)
_DEFAULTS = {"use_qk_norm": False, "tie_word_embeddings": False, "attention_bias": False, "partial_rotary_factor": 0.5}


def build(config: Mapping[str, Any], with_head: bool) -> Transformer:
    """A model of a text config."""
    given = {**_DEFAULTS, **with_rope(config)}
    for name in ("rope_theta", "rms_norm_eps", "routed_scaling_factor"):
        positive_number(given, name)
    positive_number(given, "partial_rotary_factor", most=1)
    args = layer_args(ModelArgs, given, _WHOLE_NUMBERS)
    check_routing(config, args.n_routed_experts, args.num_experts_per_tok)
    norm = partial(nn.RMSNorm, args.hidden_size, eps=args.rms_norm_eps)
    layer = KeyValueShape(args.num_key_value_heads, args.head_dim, args.head_dim)
    shape = Shape(
        vocab_size=args.vocab_size,
        context_length=args.max_position_embeddings,
        heads=args.num_attention_heads,
        inner=max(
            args.intermediate_size,
            (args.num_experts_per_tok + args.n_shared_experts) * args.moe_intermediate_size,
        ),
        layers=(layer,) * args.num_hidden_layers,
        modules=(layer,),
        max_depth=RECURRENT_DEPTH,
        tied=args.tie_word_embeddings,
    )
    layers = [DecoderLayer(args, index) for index in range(args.num_hidden_layers)]
    trunk = Trunk(nn.Embedding(args.vocab_size, args.hidden_size), layers, norm())
    if not with_head:
        return Transformer(shape, trunk, None)
    block = DecoderLayer(args, args.num_hidden_layers)
    return Transformer(shape, trunk, (ModuleArgs(args.hidden_size, norm), [block]))


def _assemble(tensors: dict[str, mx.array], _: Mapping[str, Any]) -> dict[str, mx.array]:
    return stack_experts(tensors)


_WIDTHS = ("intermediate_size", "moe_intermediate_size")
_SUMMED = r"(model\.layers\.\d+|mtp\.layers\.\d+\.block)\.(self_attn\.o_proj|mlp)"


register(
    Architecture(
        model_types=("glm4_moe",),
        build=build,
        canonical=canonical,
        assemble=_assemble,
        sharding=partial(block_part, divided=_WIDTHS, summed=_SUMMED),
        verified="trunk and head: transformers (MtpModel); deeper drafts: the same layers, chained",
    )
)
