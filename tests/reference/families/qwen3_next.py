"""Qwen3-Next: GatedDeltaNet with fused projections, gated attention, experts one by one and a shared one; a head."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.reference.families.family import VOCABULARY, Family, Shapes, decoder_layer, mlp

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "eos_token_id": VOCABULARY - 1,
    "dtype": "float32",
}

# Layers 0 and 2 have dense MLPs by the step, layer 1 by the list.
DENSE_LAYERS: dict[str, Any] = {
    **CONFIG,
    "full_attention_interval": 2,
    "linear_num_value_heads": 6,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [1],
    "norm_topk_prob": False,
    "tie_word_embeddings": True,
}


def gated_attention(prefix: str, config: dict[str, Any]) -> Shapes:
    """`q_proj` holds query and gate of each head."""
    hidden, size = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    return {
        f"{prefix}q_proj.weight": (2 * queries, hidden),
        f"{prefix}k_proj.weight": (keys, hidden),
        f"{prefix}v_proj.weight": (keys, hidden),
        f"{prefix}o_proj.weight": (hidden, queries),
        f"{prefix}q_norm.weight": (size,),
        f"{prefix}k_norm.weight": (size,),
    }


def delta_net(prefix: str, config: dict[str, Any], *, fused: bool) -> Shapes:
    """Fused as in Qwen3-Next, or with a matrix for each kind as in Qwen3.5."""
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    rows = {"qkvz": 2 * keys + 2 * values, "ba": 2 * heads}
    if not fused:
        rows = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
    return {
        **{f"{prefix}in_proj_{kind}.weight": (width, hidden) for kind, width in rows.items()},
        f"{prefix}conv1d.weight": (2 * keys + values, 1, config["linear_conv_kernel_dim"]),
        f"{prefix}dt_bias": (heads,),
        f"{prefix}A_log": (heads,),
        f"{prefix}norm.weight": (config["linear_value_head_dim"],),
        f"{prefix}out_proj.weight": (hidden, values),
    }


def experts(prefix: str, config: dict[str, Any], *, numbered: bool) -> Shapes:
    """One by one, or gate and up of all together and down of all together."""
    hidden, inner, count = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    found: Shapes = {
        f"{prefix}gate.weight": (count, hidden),
        f"{prefix}shared_expert_gate.weight": (1, hidden),
        **mlp(f"{prefix}shared_expert.", hidden, config["shared_expert_intermediate_size"]),
    }
    if not numbered:
        found[f"{prefix}experts.gate_up_proj"] = (count, 2 * inner, hidden)
        found[f"{prefix}experts.down_proj"] = (count, hidden, inner)
        return found
    for expert in range(count):
        found |= mlp(f"{prefix}experts.{expert}.", hidden, inner)
    return found


def head(config: dict[str, Any]) -> Shapes:
    """What the head has beside the MLP of its layer."""
    hidden = config["hidden_size"]
    norms = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    return {
        "mtp.fc.weight": (hidden, 2 * hidden),
        **{f"{norm}.weight": (hidden,) for norm in norms},
        **decoder_layer("mtp.layers.0.", hidden),
        **gated_attention("mtp.layers.0.self_attn.", config),
    }


def shapes(config: dict[str, Any]) -> Shapes:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    found: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        full = (layer + 1) % config["full_attention_interval"] == 0
        sparse = (layer + 1) % config["decoder_sparse_step"] == 0 and layer not in config["mlp_only_layers"]
        found |= decoder_layer(prefix, hidden)
        found |= (
            gated_attention(f"{prefix}self_attn.", config)
            if full
            else delta_net(f"{prefix}linear_attn.", config, fused=True)
        )
        found |= (
            experts(f"{prefix}mlp.", config, numbered=True)
            if sparse
            else mlp(f"{prefix}mlp.", hidden, config["intermediate_size"])
        )
    return found | head(config) | experts("mtp.layers.0.mlp.", config, numbered=True)


def decay_rates(shape: tuple[int, ...], random: np.random.RandomState) -> np.ndarray:
    """A_log: one head forgets within a few tokens, another remembers long."""
    return np.linspace(0.0, np.log(16.0), shape[0]) + random.uniform(-0.3, 0.3, shape)


def time_steps(shape: tuple[int, ...], random: np.random.RandomState) -> np.ndarray:
    """dt_bias: the inverse of softplus of steps from 0.001 to 0.1."""
    steps = np.exp(np.linspace(np.log(0.001), np.log(0.1), shape[0]) + random.uniform(-0.3, 0.3, shape))
    return steps + np.log(-np.expm1(-steps))


SPECIAL = {"A_log": decay_rates, "dt_bias": time_steps}
ONES = ("linear_attn.norm.weight",)  # all other norms are stored as w, with an effective 1 + w

FAMILIES = [
    Family("qwen3_next", CONFIG, shapes(CONFIG), ones=ONES, special=SPECIAL),
    Family("qwen3_next_dense_layers", DENSE_LAYERS, shapes(DENSE_LAYERS), ones=ONES, special=SPECIAL),
]
