"""Qwen3-Next: the layers of `qwen3_5.py` with experts, whose GatedDeltaNet projections are stored as two matrices.

`in_proj_qkvz` and `in_proj_ba` hold, for one key head after the other, its rows of queries, keys, values and gates, or
of betas and decays (`fix_query_key_value_ordering` of transformers' `modeling_qwen3_next.py`). They are sorted into
Qwen3.5's four matrices when a checkpoint is read. The head is Qwen3.5's, as vLLM's `qwen3_next_mtp.py` wires it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError
from .base import Architecture, register
from .block_part import qwen3_5_part
from .config import whole_number
from .experts import stack_experts
from .qwen3_5 import Experts, Qwen35, Qwen35Args, assemble, canonical, zero_centred
from .qwen3_5_moe import sparse_mlp

__all__: list[str] = []


def _build(config: Mapping[str, Any], with_head: bool) -> Qwen35:
    make = sparse_mlp(config, norm_topk_prob=bool(config.get("norm_topk_prob", True)))
    return Qwen35(Qwen35Args.from_config(config, Experts(make, _dense_layers(config))), with_head)


def _dense_layers(config: Mapping[str, Any]) -> frozenset[int]:
    """Layers of the trunk without experts."""
    step = whole_number(config, "decoder_sparse_step", default=1)
    listed = config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise CheckpointError(f"config.json: mlp_only_layers must be a list of whole numbers, not {listed!r}")
    layers = range(whole_number(config, "num_hidden_layers"))
    return frozenset(layer for layer in layers if layer in listed or (layer + 1) % step)


def _assemble(tensors: dict[str, mx.array], config: Mapping[str, Any]) -> dict[str, mx.array]:
    key_heads, value_heads = (whole_number(config, f"linear_num_{kind}_heads") for kind in ("key", "value"))
    if value_heads % key_heads:
        raise CheckpointError(
            f"config.json: linear_num_value_heads must be a multiple of linear_num_key_heads ({key_heads}), "
            f"not {value_heads}"
        )
    each = value_heads // key_heads
    key, value = (whole_number(config, f"linear_{kind}_head_dim") for kind in ("key", "value"))
    found: dict[str, mx.array] = {}
    for name, tensor in tensors.items():
        if ".in_proj_qkvz." in name:
            q, k, v, z = _by_kind(name, tensor, key_heads, [key, key, each * value, each * value])
            found[name.replace("qkvz", "qkv")] = mx.concatenate([q, k, v])
            found[name.replace("qkvz", "z")] = z
        elif ".in_proj_ba." in name:
            found[name.replace("_ba.", "_b.")], found[name.replace("_ba.", "_a.")] = _by_kind(
                name, tensor, key_heads, [each, each]
            )
        else:
            found[name] = tensor
    return assemble(stack_experts(found), config)


def _by_kind(name: str, tensor: mx.array, heads: int, rows: Sequence[int]) -> list[mx.array]:
    """What is stored head by head, `rows` of each kind, as a matrix for each kind. Quantisation packs along a row, so
    that packed weights and scales are sorted as well as plain ones."""
    if tensor.shape[0] != heads * sum(rows):
        raise ValueError(f"{name} has {tensor.shape[0]} rows, not {heads * sum(rows)}")
    rest = tensor.shape[1:]
    parts = mx.split(tensor.reshape(heads, sum(rows), *rest), list(accumulate(rows))[:-1], axis=1)
    return [part.reshape(-1, *rest) for part in parts]


register(
    Architecture(
        model_types=("qwen3_next",),
        build=_build,
        canonical=canonical,
        verified="trunk: transformers; head: its published formula on transformers' layers; random weights",
        assemble=_assemble,
        zero_centred=zero_centred,
        sharding=qwen3_5_part,
    )
)
