"""MiMo-7B, as XiaomiMiMo/MiMo-7B-RL names its tensors: attention with biases, one MTP module apart from the layers."""

from __future__ import annotations

from typing import Any

from tests.reference.families.family import VOCABULARY, Family, Shapes, decoder_layer, mlp

CONFIG: dict[str, Any] = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 640000,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 3,
    "use_mrope": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 1,
    "eos_token_id": VOCABULARY - 1,
    "dtype": "float32",
}


def layer(prefix: str, config: dict[str, Any]) -> Shapes:
    hidden, keys = config["hidden_size"], config["num_key_value_heads"] * config["head_dim"]
    return {
        **decoder_layer(prefix, hidden),
        f"{prefix}self_attn.q_proj.weight": (hidden, hidden),
        f"{prefix}self_attn.k_proj.weight": (keys, hidden),
        f"{prefix}self_attn.v_proj.weight": (keys, hidden),
        f"{prefix}self_attn.o_proj.weight": (hidden, hidden),
        f"{prefix}self_attn.q_proj.bias": (hidden,),
        f"{prefix}self_attn.k_proj.bias": (keys,),
        f"{prefix}self_attn.v_proj.bias": (keys,),
        **mlp(f"{prefix}mlp.", hidden, config["intermediate_size"]),
    }


def shapes(config: dict[str, Any]) -> Shapes:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    module = "model.mtp_layers.0."
    found: Shapes = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
        f"{module}token_layernorm.weight": (hidden,),
        f"{module}hidden_layernorm.weight": (hidden,),
        f"{module}input_proj.weight": (hidden, 2 * hidden),
        f"{module}final_layernorm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        found |= layer(f"model.layers.{index}.", config)
    return found | layer(module, config)


FAMILIES = [Family("mimo", CONFIG, shapes(CONFIG), depths=1, max_depth=1)]
