"""ERNIE-4.5-21B-A3B: a dense layer, then experts with a correction bias; tied embeddings; one dense MTP module."""

from __future__ import annotations

from typing import Any

from tests.reference.families.family import VOCABULARY, Family, Shapes, decoder_layer, mlp

CONFIG: dict[str, Any] = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_num_experts": 6,
    "moe_num_shared_experts": 2,
    "moe_k": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 2,
    "moe_layer_interval": 1,
    "moe_use_aux_free": True,
    "moe_capacity": [64, 64, 64],
    "moe_gate": "topk",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "use_bias": False,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def attention(prefix: str, config: dict[str, Any]) -> Shapes:
    hidden = config["hidden_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    return {
        f"{prefix}q_proj.weight": (hidden, hidden),
        f"{prefix}k_proj.weight": (keys, hidden),
        f"{prefix}v_proj.weight": (keys, hidden),
        f"{prefix}o_proj.weight": (hidden, hidden),
    }


def experts(prefix: str, config: dict[str, Any]) -> Shapes:
    hidden, inner, count = config["hidden_size"], config["moe_intermediate_size"], config["moe_num_experts"]
    shapes: Shapes = {
        f"{prefix}gate.weight": (count, hidden),
        f"{prefix}moe_statics.e_score_correction_bias": (1, count),
    }
    for expert in range(count):
        shapes |= mlp(f"{prefix}experts.{expert}.", hidden, inner)
    return shapes | mlp(f"{prefix}shared_experts.", hidden, inner * config["moe_num_shared_experts"])


def shapes(config: dict[str, Any]) -> Shapes:
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    found: Shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "model.mtp_emb_norm.0.weight": (hidden,),
        "model.mtp_hidden_norm.0.weight": (hidden,),
        "model.mtp_linear_proj.0.weight": (hidden, 2 * hidden),
    }
    for prefix in [*(f"model.layers.{layer}." for layer in range(layers)), "model.mtp_block.0."]:
        found |= decoder_layer(prefix, hidden) | attention(f"{prefix}self_attn.", config)
        dense = prefix in ("model.layers.0.", "model.mtp_block.0.")
        inner = f"{prefix}mlp."
        found |= mlp(inner, hidden, config["intermediate_size"]) if dense else experts(inner, config)
    return found


FAMILIES = [
    Family(
        "ernie4_5_moe",
        CONFIG,
        shapes(CONFIG),
        depths=1,
        max_depth=1,
        ones=("norm.weight", "norm.0.weight"),
        special={
            # Biases of real ones are large and nearly equal: they move a choice and no weight.
            "e_score_correction_bias": lambda shape, random: 30 + random.standard_normal(shape) * 0.2,
            "embed_tokens.weight": lambda shape, random: random.standard_normal(shape) * 0.7,
            "model.norm.weight": lambda shape, random: 1 + random.standard_normal(shape) * 0.5,
        },
    )
]
