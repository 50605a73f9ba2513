"""MiMo-7B: layers of Qwen2's kind and one MTP module that takes the hidden FIRST.

The module stands apart, as `model.mtp_layers.0`: `token_layernorm`, `hidden_layernorm`, `input_proj`, a decoder layer,
`final_layernorm`; embedding and output projection are the trunk's. It is trained for one step (MiMo's report, arXiv
2505.07608, and vLLM's `mimo_mtp.py`), so nothing is chained.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import mlx.nn as nn
from mlx_lm.models.mimo import ModelArgs, TransformerBlock

from ..state import KeyValueShape
from .base import Architecture, register
from .config import check_kinds, layer_args, layers_built, positive_number, with_rope
from .mtp_modules import ModuleArgs
from .transformer import Shape, Transformer, Trunk

__all__ = ["build"]

_WHOLE_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
_OURS = {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj", "final_layernorm": "norm"}


def build(config: Mapping[str, Any], with_head: bool) -> Transformer:
    """A model of a text config."""
    args = _args(config)
    norm = partial(nn.RMSNorm, args.hidden_size, eps=args.rms_norm_eps)
    head_dim = args.hidden_size // args.num_attention_heads
    layer = KeyValueShape(args.num_key_value_heads, head_dim, head_dim)
    shape = Shape(
        vocab_size=args.vocab_size,
        context_length=args.max_position_embeddings,
        heads=args.num_attention_heads,
        inner=args.intermediate_size,
        layers=(layer,) * args.num_hidden_layers,
        modules=(layer,),
        max_depth=1,
        tied=args.tie_word_embeddings,
    )
    with layers_built():
        layers = [TransformerBlock(args) for _ in range(args.num_hidden_layers)]
    trunk = Trunk(nn.Embedding(args.vocab_size, args.hidden_size), layers, norm())
    if not with_head:
        return Transformer(shape, trunk, None)
    wiring = ModuleArgs(args.hidden_size, norm, embedding_first=False)
    return Transformer(shape, trunk, (wiring, [TransformerBlock(args)]))


def _args(config: Mapping[str, Any]) -> ModelArgs:
    args = layer_args(ModelArgs, with_rope(config), _WHOLE_NUMBERS)
    check_kinds(args)
    positive_number(config, "rms_norm_eps")
    return args


def _canonical(name: str, _: Mapping[str, Any]) -> str | None:
    """Our name of a checkpoint's tensor; "" for rotary tables."""
    if name.endswith("rotary_emb.inv_freq"):
        return ""
    found = re.fullmatch(r"model\.mtp_layers\.(\d+)\.(\w+)\.(.+)", name)
    if found is None:
        return name
    module, part, rest = found.groups()
    return f"mtp.layers.{module}.{_OURS[part]}.{rest}" if part in _OURS else f"mtp.layers.{module}.block.{part}.{rest}"


register(
    Architecture(
        model_types=("mimo",),
        build=build,
        canonical=_canonical,
        verified="trunk: transformers' Qwen2, of which it is one; head: its published formula on transformers' layers",
    )
)
