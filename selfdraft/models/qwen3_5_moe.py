"""Qwen3.5 / 3.6 MoE: the layers of `qwen3_5.py` with experts and a shared one in place of every MLP, the head's too.

Released trunks store the experts of a layer together (`experts.gate_up_proj`, `experts.down_proj`), as do the heads of
3.6; heads of 3.5 store them one by one, and MLX builds have them stacked (`switch_mlp`). Each is taken in each place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_next import Qwen3NextSparseMoeBlock

from ..errors import CheckpointError
from .base import Architecture, register
from .block_part import qwen3_5_part
from .config import whole_number
from .experts import stack_experts
from .qwen3_5 import Experts, Qwen35, Qwen35Args, assemble, canonical, tower, zero_centred

__all__ = ["sparse_mlp"]


@dataclass(frozen=True)
class _ExpertArgs:
    """What mlx-lm's block asks for, under its names."""

    hidden_size: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool


def sparse_mlp(config: Mapping[str, Any], *, norm_topk_prob: bool) -> Callable[[], nn.Module]:
    """How an MLP of experts is made, from a text config.

    Args:
        norm_topk_prob: whether the weights of the chosen experts are made to sum to 1.

    Raises:
        CheckpointError: a field is missing or has no supported value, by name.
    """
    experts, chosen = whole_number(config, "num_experts"), whole_number(config, "num_experts_per_tok")
    if chosen > experts:
        raise CheckpointError(f"config.json: num_experts_per_tok must be at most num_experts ({experts}), not {chosen}")
    args = _ExpertArgs(
        hidden_size=whole_number(config, "hidden_size"),
        moe_intermediate_size=whole_number(config, "moe_intermediate_size"),
        shared_expert_intermediate_size=whole_number(config, "shared_expert_intermediate_size"),
        num_experts=experts,
        num_experts_per_tok=chosen,
        norm_topk_prob=norm_topk_prob,
    )

    def make() -> nn.Module:
        block: nn.Module = Qwen3NextSparseMoeBlock(args)
        return block

    return make


def _build(config: Mapping[str, Any], with_head: bool) -> Qwen35:
    # Always normalised: these configs have no norm_topk_prob.
    experts = Experts(sparse_mlp(config, norm_topk_prob=True))
    return Qwen35(Qwen35Args.from_config(config, experts), with_head)


def _assemble(tensors: dict[str, mx.array], config: Mapping[str, Any]) -> dict[str, mx.array]:
    return assemble(stack_experts(tensors), config)


register(
    Architecture(
        model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
        build=_build,
        canonical=canonical,
        verified="trunk: transformers; head: its published formula on transformers' layers; random weights",
        tower=tower,
        assemble=_assemble,
        zero_centred=zero_centred,
        sharding=qwen3_5_part,
    )
)
