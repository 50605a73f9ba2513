"""What a rank keeps of decoder blocks that have the usual names: heads, the inner width of MLPs and experts, tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .sharding import Cut, Part, even, head_shares, refuse_uneven

__all__ = ["block_part", "qwen3_5_part"]

_DELTA_HEADS = ("linear_num_key_heads", "linear_num_value_heads")

_ROWS = re.compile(r".*\.(in_proj_z|in_proj_b|in_proj_a|q_proj|gate_proj|up_proj)\.(weight|scales|biases)")
_KEY_VALUE = re.compile(r".*\.self_attn\.(k_proj|v_proj)\.(weight|scales|biases|bias)")
_COLUMNS = re.compile(r".*\.(o_proj|out_proj|down_proj)\.(weight|scales|biases)")
_CHANNELS = re.compile(r".*\.linear_attn\.(in_proj_qkv|conv1d)\.(weight|scales|biases)")
_FIRST = re.compile(r"(model\.embed_tokens|lm_head)\.(weight|scales|biases)|.*\.(A_log|dt_bias)|.*\.q_proj\.bias")


def qwen3_5_part(config: Mapping[str, Any], rank: int, size: int) -> Part:
    """Implements `sharding.Sharding` for Qwen3.5 and its kin. The head's layer is cut as those of the trunk; its `fc`,
    norms and what chooses experts are on every rank."""
    mlp = "mlp" if config.get("num_experts") else r"mlp\.down_proj"
    widths = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    summed = rf"(model|mtp)\.layers\.\d+\.(self_attn\.o_proj|linear_attn\.out_proj|{mlp})"
    return block_part(config, rank, size, divided=(*_DELTA_HEADS, *widths), summed=summed)


def block_part(config: Mapping[str, Any], rank: int, size: int, *, divided: Sequence[str], summed: str) -> Part:
    """A part of a model with grouped attention.

    Args:
        divided: fields of the config, beside heads of attention and the vocabulary, of which a rank has a share; those
            that are not there are left out.
        summed: see `Part`.

    Raises:
        CheckpointError: one of them cannot be divided so.
    """
    kv_heads = config["num_key_value_heads"]
    shares = ["vocab_size", "num_attention_heads", *(name for name in divided if config.get(name))]
    refuse_uneven(config, size, *shares)
    if kv_heads % size and size % kv_heads:
        refuse_uneven(config, size, "num_key_value_heads")
    part = {name: config[name] // size for name in shares}
    part["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    part["num_key_value_heads"] = max(kv_heads // size, 1)
    return Part({**config, **part}, lambda name: _cut(name, config, rank, size), re.compile(summed))


def _cut(name: str, config: Mapping[str, Any], rank: int, size: int) -> Cut | None:
    if _FIRST.fullmatch(name):
        return even(0, rank, size)
    if _CHANNELS.fullmatch(name):
        return _channels(config, rank, size)
    if _KEY_VALUE.fullmatch(name):
        heads = config["num_key_value_heads"]
        return Cut(0, heads, (head_shares(heads, rank, size),))
    if _ROWS.fullmatch(name):
        return even(-2, rank, size)  # of experts, the first axis is theirs
    return even(-1, rank, size) if _COLUMNS.fullmatch(name) else None


def _channels(config: Mapping[str, Any], rank: int, size: int) -> Cut:
    """Queries, keys and values of the gated delta rule lie one behind the other: of each, the rank's heads."""
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    ranges, start = [], 0
    for width in (keys, keys, values):
        ranges.append((start + rank * width // size, start + (rank + 1) * width // size))
        start += width
    return Cut(0, 2 * keys + values, tuple(ranges))
