"""Gemma 4 and its assistant: as E2B (per-layer inputs, shared keys, centroids), and as 26B-A4B (experts, k = v)."""

from __future__ import annotations

from typing import Any

from tests.reference.families.family import VOCABULARY, Family, Shapes, mlp

WINDOW = 8
ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
}
TEXT: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": VOCABULARY - 1,  # a multiple of the number of centroids
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": ROPE,
    "sliding_window": WINDOW,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "dtype": "float32",
}
SMALL: dict[str, Any] = {
    **TEXT,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": TEXT["vocab_size"],
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 10.0,
}
EXPERTS: dict[str, Any] = {
    **TEXT,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    "final_logit_softcapping": 30.0,
}


def norms(prefix: str, hidden: int) -> Shapes:
    names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    shapes: Shapes = {f"{prefix}{name}_layernorm.weight": (hidden,) for name in names}
    return {**shapes, f"{prefix}layer_scalar": (1,)}


def attention(prefix: str, config: dict[str, Any], kind: str, *, keys: bool) -> Shapes:
    hidden, full = config["hidden_size"], kind == "full_attention"
    size = config["global_head_dim" if full else "head_dim"]
    equal = full and config.get("attention_k_eq_v", False)
    queries = config["num_attention_heads"] * size
    kept = config["num_global_key_value_heads" if equal else "num_key_value_heads"] * size
    shapes: Shapes = {
        f"{prefix}q_proj.weight": (queries, hidden),
        f"{prefix}o_proj.weight": (hidden, queries),
        f"{prefix}q_norm.weight": (size,),
    }
    if keys:
        shapes |= {f"{prefix}k_proj.weight": (kept, hidden), f"{prefix}k_norm.weight": (size,)}
        shapes |= {} if equal else {f"{prefix}v_proj.weight": (kept, hidden)}
    return shapes


def layer(prefix: str, config: dict[str, Any], index: int) -> Shapes:
    """A layer of the trunk; those that share another's keys have projections of their own in the file all the same."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shared = config.get("num_kv_shared_layers", 0)
    double = config.get("use_double_wide_mlp", False) and index >= config["num_hidden_layers"] - shared
    found = norms(prefix, hidden) | mlp(f"{prefix}mlp.", hidden, inner * (2 if double else 1))
    found |= attention(f"{prefix}self_attn.", config, config["layer_types"][index], keys=True)
    if width := config["hidden_size_per_layer_input"]:
        found |= {
            f"{prefix}per_layer_input_gate.weight": (width, hidden),
            f"{prefix}per_layer_projection.weight": (hidden, width),
            f"{prefix}post_per_layer_input_norm.weight": (hidden,),
        }
    if config.get("enable_moe_block"):
        experts, size = config["num_experts"], config["moe_intermediate_size"]
        found |= {
            f"{prefix}{name}.weight": (hidden,)
            for name in (
                "post_feedforward_layernorm_1",
                "post_feedforward_layernorm_2",
                "pre_feedforward_layernorm_2",
            )
        }
        found |= {
            f"{prefix}router.proj.weight": (experts, hidden),
            f"{prefix}router.scale": (hidden,),
            f"{prefix}router.per_expert_scale": (experts,),
            f"{prefix}experts.gate_up_proj": (experts, 2 * size, hidden),
            f"{prefix}experts.down_proj": (experts, hidden, size),
        }
    return found


def trunk(prefix: str, config: dict[str, Any]) -> Shapes:
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    found: Shapes = {f"{prefix}embed_tokens.weight": (config["vocab_size"], hidden), f"{prefix}norm.weight": (hidden,)}
    if width := config["hidden_size_per_layer_input"]:
        found |= {
            f"{prefix}embed_tokens_per_layer.weight": (config["vocab_size_per_layer_input"], layers * width),
            f"{prefix}per_layer_model_projection.weight": (layers * width, hidden),
            f"{prefix}per_layer_projection_norm.weight": (width,),
        }
    for index in range(layers):
        found |= layer(f"{prefix}layers.{index}.", config, index)
    return found


def assistant(target: dict[str, Any], *, centroids: int) -> Family:
    hidden, target_hidden, vocabulary = 16, target["hidden_size"], target["vocab_size"]
    text: dict[str, Any] = {
        **{name: value for name, value in target.items() if name in TEXT or name.endswith("key_value_heads")},
        "attention_k_eq_v": target.get("attention_k_eq_v", False),
        "hidden_size": hidden,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
    }
    config = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": target_hidden,
        "use_ordered_embeddings": bool(centroids),
        "num_centroids": centroids or 2048,
        "centroid_intermediate_top_k": 3,
        "tie_word_embeddings": True,
        "text_config": text,
        "dtype": "float32",
    }
    shapes: Shapes = {
        "pre_projection.weight": (hidden, 2 * target_hidden),
        "post_projection.weight": (target_hidden, hidden),
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    if centroids:
        shapes |= {
            "masked_embedding.centroids.weight": (centroids, hidden),
            "masked_embedding.token_ordering": (vocabulary,),
        }
    for index, kind in enumerate(text["layer_types"]):
        prefix = f"model.layers.{index}."
        shapes |= norms(prefix, hidden) | mlp(f"{prefix}mlp.", hidden, text["intermediate_size"])
        shapes |= attention(f"{prefix}self_attn.", text, kind, keys=False)
    return Family("assistant", config, shapes, special=SPECIAL)


SPECIAL = {
    "embed_tokens.weight": lambda shape, random: random.standard_normal(shape) * 0.4,
    "layer_scalar": lambda shape, random: random.uniform(0.6, 1.0, shape),
    "router.scale": lambda shape, random: 1 + random.standard_normal(shape) * 0.2,
    "per_expert_scale": lambda shape, random: 1 + random.standard_normal(shape) * 0.2,
    "token_ordering": lambda shape, random: random.permutation(shape[0]),
    "norm_1.weight": lambda shape, random: 1 + random.standard_normal(shape) * 0.1,
    "norm_2.weight": lambda shape, random: 1 + random.standard_normal(shape) * 0.1,
}

FAMILIES = [
    Family(
        "gemma4",
        {
            "architectures": ["Gemma4ForConditionalGeneration"],
            "model_type": "gemma4",
            "text_config": SMALL,
            "vocab_size": SMALL["vocab_size"],
            "tie_word_embeddings": True,
        },
        trunk("model.language_model.", SMALL),
        window=WINDOW,
        drafts_fewer=False,
        special=SPECIAL,
        assistant=assistant(SMALL, centroids=12),
    ),
    Family(
        "gemma4_experts",
        {"architectures": ["Gemma4ForCausalLM"], **EXPERTS},
        trunk("model.", EXPERTS),
        window=WINDOW,
        drafts_fewer=False,
        special=SPECIAL,
        seed=2,
        assistant=assistant(EXPERTS, centroids=0),
    ),
]
