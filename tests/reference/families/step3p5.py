"""Step-3.5, as stepfun-ai/Step-3.5-Flash names its tensors: windows, gates a head, stacked experts, three modules."""

from __future__ import annotations

from typing import Any

from tests.reference.families.family import VOCABULARY, Family, Shapes, decoder_layer, mlp

WINDOW = 8
FULL, SLIDING = "full_attention", "sliding_attention"

CONFIG: dict[str, Any] = {
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "share_expert_dim": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_attention_groups": 2,
    "head_dim": 16,
    "attention_other_setting": {
        "attention_type": SLIDING,
        "num_attention_heads": 6,
        "num_attention_groups": 2,
        "head_dim": 16,
        "true_head_dim": 16,
    },
    "layer_types": [FULL, SLIDING, SLIDING, FULL, SLIDING, SLIDING, SLIDING],
    "rope_theta": [5000000.0, 10000.0, 10000.0, 5000000.0, 10000.0, 10000.0, 10000.0],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "yarn_only_types": [FULL],
    "sliding_window": WINDOW,
    "use_head_wise_attn_gate": True,
    "use_qk_norm": True,
    "zero_centered": True,
    "moe_layers_enum": "1,2,3",
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_router_scaling_factor": 3.0,
    "moe_router_activation": "sigmoid",
    "use_moe_router_bias": True,
    "norm_expert_weight": True,
    "swiglu_limits": [0.0, 0.0, 0.0, 0.7, 0.0, 0.0, 0.0],
    "swiglu_limits_shared": [0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.6],
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 3,
    "eos_token_id": VOCABULARY - 1,
    "dtype": "float32",
}


def attention(prefix: str, config: dict[str, Any], kind: str) -> Shapes:
    hidden, size = config["hidden_size"], config["head_dim"]
    setting = config["attention_other_setting"] if kind == SLIDING else config
    heads, keys = setting["num_attention_heads"], setting["num_attention_groups"] * size
    return {
        f"{prefix}q_proj.weight": (heads * size, hidden),
        f"{prefix}k_proj.weight": (keys, hidden),
        f"{prefix}v_proj.weight": (keys, hidden),
        f"{prefix}o_proj.weight": (hidden, heads * size),
        f"{prefix}g_proj.weight": (heads, hidden),
        f"{prefix}q_norm.weight": (size,),
        f"{prefix}k_norm.weight": (size,),
    }


def experts(prefix: str, config: dict[str, Any]) -> Shapes:
    hidden, inner, count = config["hidden_size"], config["moe_intermediate_size"], config["moe_num_experts"]
    return {
        f"{prefix}moe.gate.weight": (count, hidden),
        f"{prefix}moe.router_bias": (count,),
        f"{prefix}moe.gate_proj.weight": (count, inner, hidden),
        f"{prefix}moe.up_proj.weight": (count, inner, hidden),
        f"{prefix}moe.down_proj.weight": (count, hidden, inner),
        **mlp(f"{prefix}share_expert.", hidden, config["share_expert_dim"]),
    }


def module(prefix: str, config: dict[str, Any]) -> Shapes:
    """What an MTP module has beside its decoder layer."""
    hidden = config["hidden_size"]
    return {
        f"{prefix}enorm.weight": (hidden,),
        f"{prefix}hnorm.weight": (hidden,),
        f"{prefix}eh_proj.weight": (hidden, 2 * hidden),
        f"{prefix}transformer.shared_head.norm.weight": (hidden,),
        f"{prefix}transformer.shared_head.output.weight": (config["vocab_size"], hidden),
    }


def shapes(config: dict[str, Any]) -> Shapes:
    hidden, vocabulary, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    sparse = {int(layer) for layer in config["moe_layers_enum"].split(",")}
    found: Shapes = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    for layer in range(layers + config["num_nextn_predict_layers"]):
        prefix = f"model.layers.{layer}."
        found |= decoder_layer(prefix, hidden)
        found |= attention(f"{prefix}self_attn.", config, config["layer_types"][layer])
        dense = mlp(f"{prefix}mlp.", hidden, config["intermediate_size"])
        found |= experts(prefix, config) if layer in sparse else dense
        if layer >= layers:
            found |= module(prefix, config)
    return found


FAMILIES = [Family("step3p5", CONFIG, shapes(CONFIG), max_depth=3, window=WINDOW, ones=())]
