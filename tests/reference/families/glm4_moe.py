"""GLM-4.5: grouped attention with query and key norms, one dense layer, experts, one MTP module behind the layers."""

from __future__ import annotations

from typing import Any

from tests.reference.families.family import VOCABULARY, Family, Shapes, decoder_layer, mlp

CONFIG: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 1,
    "eos_token_id": VOCABULARY - 1,
    "dtype": "float32",
}


def attention(prefix: str, config: dict[str, Any]) -> Shapes:
    hidden, size = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes: Shapes = {
        f"{prefix}q_proj.weight": (queries, hidden),
        f"{prefix}k_proj.weight": (keys, hidden),
        f"{prefix}v_proj.weight": (keys, hidden),
        f"{prefix}o_proj.weight": (hidden, queries),
    }
    if config["attention_bias"]:
        shapes |= {f"{prefix}q_proj.bias": (queries,), f"{prefix}k_proj.bias": (keys,), f"{prefix}v_proj.bias": (keys,)}
    if config["use_qk_norm"]:
        shapes |= {f"{prefix}q_norm.weight": (size,), f"{prefix}k_norm.weight": (size,)}
    return shapes


def experts(prefix: str, config: dict[str, Any]) -> Shapes:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    shapes: Shapes = {
        f"{prefix}gate.weight": (config["n_routed_experts"], hidden),
        f"{prefix}gate.e_score_correction_bias": (config["n_routed_experts"],),
    }
    for expert in range(config["n_routed_experts"]):
        shapes |= mlp(f"{prefix}experts.{expert}.", hidden, inner)
    return shapes | mlp(f"{prefix}shared_experts.", hidden, inner * config["n_shared_experts"])


def module(prefix: str, config: dict[str, Any]) -> Shapes:
    """What an MTP module has beside its decoder layer."""
    hidden = config["hidden_size"]
    return {
        f"{prefix}enorm.weight": (hidden,),
        f"{prefix}hnorm.weight": (hidden,),
        f"{prefix}eh_proj.weight": (hidden, 2 * hidden),
        f"{prefix}shared_head.norm.weight": (hidden,),
    }


def shapes(config: dict[str, Any]) -> Shapes:
    hidden, vocabulary, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    found: Shapes = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    for layer in range(layers + config["num_nextn_predict_layers"]):
        prefix = f"model.layers.{layer}."
        found |= decoder_layer(prefix, hidden) | attention(f"{prefix}self_attn.", config)
        dense = layer < config["first_k_dense_replace"]
        found |= (
            mlp(f"{prefix}mlp.", hidden, config["intermediate_size"]) if dense else experts(f"{prefix}mlp.", config)
        )
        if layer >= layers:
            found |= module(prefix, config)
    return found


FAMILIES = [Family("glm4_moe", CONFIG, shapes(CONFIG))]
