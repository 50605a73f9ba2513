"""A nano Qwen3.5 model with random weights: milliseconds a forward, and every code path of a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from selfdraft.models.qwen3_5 import Experts, Qwen35, Qwen35Args
from selfdraft.models.qwen3_5_moe import sparse_mlp

__all__ = ["FOR_KERNELS", "NANO_CONFIG", "SMALLER", "SPARSE", "nano_model", "well_drafted_model", "write_checkpoint"]

NANO_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}


# Fields of an even smaller model, for tests that need many cycles.
SMALLER: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "hidden_size": 32,
    "intermediate_size": 32,
    "head_dim": 16,
    "linear_value_head_dim": 16,
}


# Fields of a model with experts.
SPARSE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


# Fields that our kernels take.
FOR_KERNELS: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
    "head_dim": 64,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}


def nano_model(
    seed: int = 0,
    *,
    with_head: bool = True,
    bits: int | None = None,
    dtype: mx.Dtype = mx.float32,
    sharpness: float = 6.0,
    **config: Any,
) -> Qwen35:
    """A random model whose next-token law depends clearly on its context.

    Args:
        bits: quantise every linear layer (group size 32).
        sharpness: scale of the output projection: how peaked the law is.
        config: fields that replace those of NANO_CONFIG; those of SPARSE make a model with experts.
    """
    fields = {**NANO_CONFIG, **config}
    experts = Experts(sparse_mlp(fields, norm_topk_prob=True)) if "num_experts" in fields else None
    model = Qwen35(Qwen35Args.from_config(fields, experts), with_head)
    key = mx.random.key(seed)

    def fill(path: str, tensor: mx.array) -> mx.array:
        nonlocal key
        key, used = mx.random.split(key)
        if path.endswith("A_log"):
            return mx.log(mx.random.uniform(0.05, 2.0, tensor.shape, key=used))
        noise = mx.random.normal(tensor.shape, key=used)
        if path.endswith("norm.weight") or "_norm_" in path:
            return (1 + 0.2 * noise).astype(dtype)
        scale = sharpness if "lm_head" in path else 1.0
        fan_in = tensor.shape[1] if tensor.ndim > 1 else 1
        return (noise * scale / fan_in**0.5).astype(dtype)

    model.update(tree_map_with_path(fill, model.parameters()))
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
    model.eval()
    mx.eval(model.parameters())
    return model


def well_drafted_model(seed: int = 0, *, sharpness: float = 2.0) -> Qwen35:
    """A model as small as can be, without attention, whose head agrees with its trunk well above chance.

    Both see the newest token first and their context second: the trunk's layer weighs half, and the head, which has
    none, sees its token's embedding with a little of the hidden before it.
    """
    layers = {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}
    model = nano_model(seed, sharpness=sharpness, **{**SMALLER, **layers})
    model.mtp.layers = []
    size = model.args.hidden_size

    def shape(path: str, tensor: mx.array) -> mx.array:
        if path.endswith("embed_tokens.weight"):
            return 4 * tensor
        if path.endswith(("out_proj.weight", "down_proj.weight")):
            return 0.5 * tensor
        if path == "mtp.fc.weight":
            return mx.concatenate([mx.eye(size), 0.2 * tensor[:, size:]], axis=1)
        return tensor

    model.update(tree_map_with_path(shape, model.parameters()))
    mx.eval(model.parameters())
    return model


def write_checkpoint(folder: Path, model: Qwen35, *, config: dict[str, Any] | None = None) -> Path:
    """Write a model as an MLX-layout checkpoint (norms stored as 1 + w)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**NANO_CONFIG, **(config or {})}))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    return folder
