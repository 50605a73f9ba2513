"""GLM-4.7-Flash: DeepSeek-V3's layers and MTP module in a smaller size."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from mlx_lm.models.glm4_moe_lite import Glm4MoeLiteAttention, Glm4MoeLiteDecoderLayer, ModelArgs

from ..state import KeyValueShape
from .base import Architecture, register
from .deepseek_v3 import assemble, canonical, family_args, model_of
from .latent_attention import LatentAttention
from .transformer import Transformer

__all__ = ["build"]


class Attention(LatentAttention, Glm4MoeLiteAttention):  # type: ignore[misc]
    """The same for one token and for all of a verify pass."""


class DecoderLayer(Glm4MoeLiteDecoderLayer):  # type: ignore[misc]
    """mlx-lm's, with that attention."""

    def __init__(self, args: ModelArgs, index: int) -> None:
        super().__init__(args, index)
        self.self_attn = Attention(args)


def build(config: Mapping[str, Any], with_head: bool) -> Transformer:
    """A model of a text config."""
    args = family_args(ModelArgs, {"q_lora_rank": None, **config})
    layer = KeyValueShape(1, args.qk_rope_head_dim, args.kv_lora_rank)
    return model_of(config, args, partial(DecoderLayer, args), layer, with_head)


register(
    Architecture(
        model_types=("glm4_moe_lite",),
        build=build,
        canonical=canonical,
        assemble=assemble,
        verified="trunk and head: transformers (MtpModel); deeper drafts: the same layers, chained",
    )
)
