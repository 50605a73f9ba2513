"""MiMo-V2-Flash: layers that see a window, with attention sinks, between such that see all; experts; three MTP modules.

Modules stand apart, as `model.mtp.layers.0` to `2`: `enorm`, `hnorm`, `eh_proj`, a dense decoder layer that sees a
window, `final_layernorm`. Side by side they all take the trunk's hidden, as it is before the last norm: each has the
tokens one further on (SGLang's `mimo_v2_nextn.py` and `multi_layer_eagle_worker_v2.py`, by which it was released).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.mimo_v2_flash import DecoderLayer, ModelArgs

from ..errors import CheckpointError
from ..state import KeyValueShape
from .base import Architecture, register
from .config import check_kinds, check_routing, each_layer, layer_args, layers_built, positive_number, whole_number
from .experts import stack_experts
from .mtp_modules import ModuleArgs
from .transformer import Shape, Transformer, Trunk

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
    "v_head_dim",
    "swa_num_attention_heads",
    "swa_num_key_value_heads",
    "swa_head_dim",
    "swa_v_head_dim",
    "sliding_window_size",
    "max_position_embeddings",
    "n_routed_experts",
    "num_experts_per_tok",
)
_NUMBERS = ("rope_theta", "swa_rope_theta", "layernorm_epsilon")
_DEFAULTS = {
    "n_shared_experts": None,
    "routed_scaling_factor": None,
    "attention_value_scale": None,
    "n_group": 1,
    "topk_group": 1,
}
_MODULES = 3  # where config.json does not say
_OF_MODULE = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "norm"}


def build(config: Mapping[str, Any], with_head: bool) -> Transformer:
    """A model of a text config."""
    args = _args(config)
    modules = whole_number(config, "num_nextn_predict_layers", default=_MODULES) if with_head else 0
    norm = partial(nn.RMSNorm, args.hidden_size, eps=args.layernorm_epsilon)
    # "A window of 128" is 128 positions and the query's own: so SGLang and transformers read it.
    window = args.sliding_window_size + 1
    sliding = KeyValueShape(args.swa_num_key_value_heads, args.swa_head_dim, args.swa_v_head_dim, window)
    full = KeyValueShape(args.num_key_value_heads, args.head_dim, args.v_head_dim)
    kinds = list(zip(args.moe_layer_freq, args.hybrid_layer_pattern, strict=False))[: args.num_hidden_layers]
    shape = Shape(
        vocab_size=args.vocab_size,
        context_length=args.max_position_embeddings,
        heads=max(args.num_attention_heads, args.swa_num_attention_heads),
        inner=max(
            args.intermediate_size,
            (args.num_experts_per_tok + (args.n_shared_experts or 0)) * args.moe_intermediate_size,
        ),
        layers=tuple(sliding if slides else full for _, slides in kinds),
        modules=(sliding,) * modules,
        max_depth=modules,
    )
    with layers_built():
        layers = [DecoderLayer(args, bool(experts), bool(slides)) for experts, slides in kinds]
    trunk = Trunk(nn.Embedding(args.vocab_size, args.hidden_size), layers, norm())
    head = None
    if with_head:
        blocks = [DecoderLayer(args, is_moe=False, is_sliding_window=True) for _ in range(modules)]
        head = ModuleArgs(args.hidden_size, norm, side_by_side=True), blocks
    return Transformer(shape, trunk, head, head_before_norm=True)


def _args(config: Mapping[str, Any]) -> ModelArgs:
    args = layer_args(ModelArgs, {**_DEFAULTS, **config}, _WHOLE_NUMBERS)
    check_kinds(args)
    for name in _NUMBERS:
        positive_number(config, name)
    positive_number(config, "partial_rotary_factor", most=1)
    for name in ("moe_layer_freq", "hybrid_layer_pattern"):
        each_layer(config, name, args.num_hidden_layers, (0, 1))
    for name, only in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        if getattr(args, name) != only:
            raise CheckpointError(f"config.json: {name} {getattr(args, name)!r} is not supported, only {only!r}")
    check_routing(config, args.n_routed_experts, args.num_experts_per_tok)
    return args


def _canonical(name: str, _: Mapping[str, Any]) -> str | None:
    """Our name of a checkpoint's tensor; "" for rotary tables."""
    if name.endswith("rotary_emb.inv_freq"):
        return ""
    found = re.fullmatch(r"model\.mtp\.layers\.(\d+)\.(\w+)\.(.+)", name)
    if found is None:
        return name
    module, part, rest = found.groups()
    if part in _OF_MODULE:
        return f"mtp.layers.{module}.{_OF_MODULE[part]}.{rest}"
    part = "post_attention_layernorm" if part == "pre_mlp_layernorm" else part
    return f"mtp.layers.{module}.block.{part}.{rest}"


def _assemble(tensors: dict[str, mx.array], _: Mapping[str, Any]) -> dict[str, mx.array]:
    return stack_experts(tensors)


def _fp8_rows(name: str, config: Mapping[str, Any]) -> int | None:
    """Blocks of the keys of layers that see all begin anew with each head."""
    return whole_number(config, "head_dim") if name.endswith("k_proj.weight") else None


register(
    Architecture(
        model_types=("mimo_v2_flash",),
        build=build,
        canonical=_canonical,
        assemble=_assemble,
        fp8_rows=_fp8_rows,
        verified="trunk: transformers; head: SGLang's wiring on transformers' layers",
    )
)
