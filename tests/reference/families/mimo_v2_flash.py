"""MiMo-V2-Flash, as XiaomiMiMo/MiMo-V2-Flash names its tensors: windows with sinks, experts, three MTP modules."""

from __future__ import annotations

from typing import Any

from tests.reference.families.family import VOCABULARY, Family, Shapes, decoder_layer, mlp

WINDOW = 7

CONFIG: dict[str, Any] = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "v_head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 12,
    "swa_v_head_dim": 8,
    "hidden_act": "silu",
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "moe_layer_freq": [0, 1, 1, 1],
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "attention_chunk_size": WINDOW,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "attention_bias": False,
    "attention_value_scale": 0.707,
    "partial_rotary_factor": 0.334,
    "rope_theta": 5000000,
    "swa_rope_theta": 10000,
    "layernorm_epsilon": 1e-5,
    "n_routed_experts": 4,
    "n_shared_experts": None,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": None,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "eos_token_id": VOCABULARY - 1,
    "dtype": "float32",
}


def attention(prefix: str, config: dict[str, Any], *, slides: bool) -> Shapes:
    hidden, size, width = config["hidden_size"], config["head_dim"], config["v_head_dim"]
    heads, keys = config["num_attention_heads"], config["swa_num_key_value_heads" if slides else "num_key_value_heads"]
    shapes: Shapes = {
        f"{prefix}q_proj.weight": (heads * size, hidden),
        f"{prefix}k_proj.weight": (keys * size, hidden),
        f"{prefix}v_proj.weight": (keys * width, hidden),
        f"{prefix}o_proj.weight": (hidden, heads * width),
    }
    return shapes | ({f"{prefix}attention_sink_bias": (heads,)} if slides else {})


def experts(prefix: str, config: dict[str, Any]) -> Shapes:
    hidden, count = config["hidden_size"], config["n_routed_experts"]
    shapes: Shapes = {
        f"{prefix}gate.weight": (count, hidden),
        f"{prefix}gate.e_score_correction_bias": (count,),
    }
    for expert in range(count):
        shapes |= mlp(f"{prefix}experts.{expert}.", hidden, config["moe_intermediate_size"])
    return shapes


def module(prefix: str, config: dict[str, Any]) -> Shapes:
    hidden = config["hidden_size"]
    return {
        f"{prefix}enorm.weight": (hidden,),
        f"{prefix}hnorm.weight": (hidden,),
        f"{prefix}eh_proj.weight": (hidden, 2 * hidden),
        f"{prefix}input_layernorm.weight": (hidden,),
        f"{prefix}pre_mlp_layernorm.weight": (hidden,),
        f"{prefix}final_layernorm.weight": (hidden,),
        **attention(f"{prefix}self_attn.", config, slides=True),
        **mlp(f"{prefix}mlp.", hidden, config["intermediate_size"]),
    }


def shapes(config: dict[str, Any], modules: int) -> Shapes:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    found: Shapes = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        found |= decoder_layer(prefix, hidden)
        found |= attention(f"{prefix}self_attn.", config, slides=config["hybrid_layer_pattern"][layer] == 1)
        found |= (
            experts(f"{prefix}mlp.", config)
            if config["moe_layer_freq"][layer]
            else mlp(f"{prefix}mlp.", hidden, config["intermediate_size"])
        )
    for index in range(modules):
        found |= module(f"model.mtp.layers.{index}.", config)
    return found


FAMILIES = [
    Family(
        "mimo_v2_flash",
        CONFIG,
        shapes(CONFIG, modules=3),
        max_depth=3,
        window=WINDOW + 1,
        special={"attention_sink_bias": lambda shape, random: random.standard_normal(shape)},
    )
]
