"""Step-3.5 and the text of Step-3.7: sliding and full layers with a gate a head, experts, three MTP modules in a chain.

Modules stand behind the trunk's layers, as layers L to L + 2, which the lists of config.json count on: `enorm`,
`hnorm`, `eh_proj`, a dense decoder layer, and under `transformer.shared_head` a norm and an output projection of their
own. The first takes the trunk's hidden before its last norm, each other what the one before it put out before its own
(vLLM's `step3p5_mtp.py`, llama.cpp's `step35.cpp`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import mlx.nn as nn
from mlx_lm.models.step3p5 import ModelArgs, Step3p5DecoderLayer, ZeroCenteredRMSNorm

from ..errors import CheckpointError
from ..state import KeyValueShape
from .base import Architecture, register
from .config import check_kinds, each_layer, layer_args, layers_built, positive_number, whole_number
from .mtp_modules import ModuleArgs, module_name
from .transformer import Shape, Transformer, Trunk

__all__ = ["build"]

_WHOLE_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "share_expert_dim",
    "num_hidden_layers",
    "num_attention_heads",
    "num_attention_groups",
    "head_dim",
    "sliding_window",
    "max_position_embeddings",
    "moe_num_experts",
    "moe_top_k",
)
_KINDS = ("full_attention", "sliding_attention")
_MODULES = 3  # where config.json does not say
_OURS = {  # of the released names, behind the layer's number; MLX builds have ours
    "moe.gate": "mlp.gate.gate",
    "moe.router_bias": "mlp.gate.router_bias",
    "moe.gate_proj": "mlp.switch_mlp.gate_proj",
    "moe.up_proj": "mlp.switch_mlp.up_proj",
    "moe.down_proj": "mlp.switch_mlp.down_proj",
    "share_expert": "mlp.share_expert",
}
_THEIRS = re.compile(rf"(model\.layers\.\d+\.)({'|'.join(map(re.escape, _OURS))})(?=\.|$)")


def build(config: Mapping[str, Any], with_head: bool) -> Transformer:
    """A model of a text config."""
    modules = whole_number(config, "num_nextn_predict_layers", default=_MODULES) if with_head else 0
    args = _args(config, modules)
    norm = partial(ZeroCenteredRMSNorm, args.hidden_size, eps=args.rms_norm_eps)
    with layers_built():
        layers = [Step3p5DecoderLayer(args, index) for index in range(args.num_hidden_layers + modules)]
    kept = tuple(_kept(args, layer) for layer in layers)
    shape = Shape(
        vocab_size=args.vocab_size,
        context_length=args.max_position_embeddings,
        heads=max(layer.self_attn.num_heads for layer in layers),
        inner=max(args.intermediate_size, args.moe_top_k * args.moe_intermediate_size + args.share_expert_dim),
        layers=kept[: args.num_hidden_layers],
        modules=kept[args.num_hidden_layers :],
        max_depth=modules,
        tied=args.tie_word_embeddings,
    )
    trunk = Trunk(nn.Embedding(args.vocab_size, args.hidden_size), layers[: args.num_hidden_layers], norm())
    head = None
    if with_head:
        wiring = ModuleArgs(args.hidden_size, norm, vocab_size=args.vocab_size)
        head = wiring, layers[args.num_hidden_layers :]
    return Transformer(shape, trunk, head, head_before_norm=True)


def _args(config: Mapping[str, Any], modules: int) -> ModelArgs:
    """The arguments of mlx-lm's layers, with lists that reach as far as the modules."""
    experts = config.get("moe_layers_enum")
    listed = {"moe_layers_enum": ",".join(map(str, experts))} if isinstance(experts, list) else {}
    args = layer_args(ModelArgs, {**config, **listed}, _WHOLE_NUMBERS)
    check_kinds(args, but=("rope_theta",))  # one for all layers, or a list
    positive_number(config, "rms_norm_eps")
    if args.moe_top_k > args.moe_num_experts:
        raise CheckpointError(f"config.json: moe_top_k is more than the {args.moe_num_experts} experts")
    layers = args.num_hidden_layers + modules
    each_layer(config, "layer_types", layers, _KINDS)
    if isinstance(args.rope_theta, list):
        each_layer(config, "rope_theta", layers)
    else:
        positive_number(config, "rope_theta")
    if args.partial_rotary_factors:
        each_layer(config, "partial_rotary_factors", layers)
    if args.attention_other_setting:
        for name in ("num_attention_heads", "num_attention_groups"):
            whole_number(args.attention_other_setting, name)
    return args


def _kept(args: ModelArgs, layer: Step3p5DecoderLayer) -> KeyValueShape:
    window = args.sliding_window if layer.is_sliding else None
    return KeyValueShape(layer.self_attn.num_kv_heads, args.head_dim, args.head_dim, window)


def _canonical(name: str, config: Mapping[str, Any]) -> str | None:
    """Our name of a checkpoint's tensor; None for the parts of Step-3.7 that are not text."""
    if re.match(r"(model\.)?(vision_model|vit_large_projector)\.", name):
        return None
    name = re.sub(r"^(model\.language_model|language_model\.model)\.", "model.", name)
    name = name.removeprefix("language_model.").replace(".transformer.shared_head.", ".shared_head.")
    name = _THEIRS.sub(lambda found: found[1] + _OURS[found[2]], name)
    return module_name(name, whole_number(config, "num_hidden_layers"))


register(
    Architecture(
        model_types=("step3p5", "step3p7"),
        build=build,
        canonical=_canonical,
        zero_centred=lambda name: name.endswith("norm.weight"),
        verified="trunk: transformers; head: vLLM's wiring on transformers' layers",
    )
)
