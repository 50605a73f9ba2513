"""Qwen3.5 MoE as released: inside a multimodal config, experts of the trunk together, those of the head one by one."""

from __future__ import annotations

from typing import Any

from tests.reference.families.family import VOCABULARY, Family, Shapes, decoder_layer
from tests.reference.families.qwen3_next import ONES, SPECIAL, delta_net, experts, gated_attention, head

TEXT_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "attn_output_gate": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "eos_token_id": VOCABULARY - 1,
    "dtype": "float32",
}
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "tie_word_embeddings": False,
    "text_config": TEXT_CONFIG,
}


def shapes(config: dict[str, Any]) -> Shapes:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    found: Shapes = {
        "model.language_model.embed_tokens.weight": (vocabulary, hidden),
        "model.language_model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    for layer, kind in enumerate(config["layer_types"]):
        prefix = f"model.language_model.layers.{layer}."
        found |= decoder_layer(prefix, hidden) | experts(f"{prefix}mlp.", config, numbered=False)
        found |= (
            gated_attention(f"{prefix}self_attn.", config)
            if kind == "full_attention"
            else delta_net(f"{prefix}linear_attn.", config, fused=False)
        )
    return found | head(config) | experts("mtp.layers.0.mlp.", config, numbered=True)


FAMILIES = [Family("qwen3_5_moe", CONFIG, shapes(TEXT_CONFIG), ones=ONES, special=SPECIAL)]
