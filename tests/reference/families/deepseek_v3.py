"""DeepSeek-V3: latent attention with rotary scaling, grouped experts, one MTP module behind the layers."""

from __future__ import annotations

from typing import Any

from tests.reference.families.family import VOCABULARY, Family, Shapes, decoder_layer, mlp
from tests.reference.families.glm4_moe import experts, module

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "num_nextn_predict_layers": 1,
    "eos_token_id": VOCABULARY - 1,
    "dtype": "float32",
}


def attention(prefix: str, config: dict[str, Any]) -> Shapes:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    plain, rotated, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    queries: Shapes = {f"{prefix}q_proj.weight": (heads * (plain + rotated), hidden)}
    if low := config["q_lora_rank"]:
        queries = {
            f"{prefix}q_a_proj.weight": (low, hidden),
            f"{prefix}q_a_layernorm.weight": (low,),
            f"{prefix}q_b_proj.weight": (heads * (plain + rotated), low),
        }
    return queries | {
        f"{prefix}kv_a_proj_with_mqa.weight": (rank + rotated, hidden),
        f"{prefix}kv_a_layernorm.weight": (rank,),
        f"{prefix}kv_b_proj.weight": (heads * (plain + value), rank),
        f"{prefix}o_proj.weight": (hidden, heads * value),
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
            # Copies of the trunk's, as released; nobody may read them.
            found |= {f"{prefix}{name}.weight": (vocabulary, hidden) for name in ("embed_tokens", "shared_head.head")}
    return found


FAMILIES = [
    Family("deepseek_v3", CONFIG, shapes(CONFIG)),
    # Small ones project queries at once, as DeepSeek-V2-Lite did.
    Family("deepseek_v3_direct", direct := {**CONFIG, "q_lora_rank": None, "rope_scaling": None}, shapes(direct)),
]
