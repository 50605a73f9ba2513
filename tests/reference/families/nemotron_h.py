"""Nemotron-H: a list of layers, as Nemotron 3.5 Lightning has it, and a pattern with latent experts, as 3 Super."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.reference.families.family import VOCABULARY, Family, Shapes

LISTED: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 5,
    "layers_block_type": ["mamba", "moe", "attention", "mamba", "moe"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_bias": False,
    "max_position_embeddings": 512,
    "layer_norm_epsilon": 1e-5,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "n_groups": 2,
    "chunk_size": 128,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_limit": [0.0, {"__float__": "Infinity"}],
    # transformers clamps by this, and not by the limit above; both clamp nothing here.
    "time_step_min": 0.0,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "mtp_layers_block_type": ["attention", "moe"],
    "pad_token_id": 0,
    "eos_token_id": 2,
    "dtype": "float32",
}
PATTERN: dict[str, Any] = {
    **{name: value for name, value in LISTED.items() if not name.endswith("layers_block_type")},
    "num_hidden_layers": 7,
    "hybrid_override_pattern": "MEM*-ME",
    "mtp_hybrid_override_pattern": "*E",
    "moe_latent_size": 16,
}


def mlp(prefix: str, hidden: int, inner: int) -> Shapes:
    return {f"{prefix}up_proj.weight": (inner, hidden), f"{prefix}down_proj.weight": (hidden, inner)}


def mamba(prefix: str, config: dict[str, Any]) -> Shapes:
    hidden, heads = config["hidden_size"], config["mamba_num_heads"]
    inner = heads * config["mamba_head_dim"]
    channels = inner + 2 * config["n_groups"] * config["ssm_state_size"]
    return {
        f"{prefix}in_proj.weight": (inner + channels + heads, hidden),
        f"{prefix}conv1d.weight": (channels, 1, config["conv_kernel"]),
        f"{prefix}conv1d.bias": (channels,),
        f"{prefix}A_log": (heads,),
        f"{prefix}D": (heads,),
        f"{prefix}dt_bias": (heads,),
        f"{prefix}norm.weight": (inner,),
        f"{prefix}out_proj.weight": (hidden, inner),
    }


def attention(prefix: str, config: dict[str, Any]) -> Shapes:
    hidden, size = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    return {
        f"{prefix}q_proj.weight": (queries, hidden),
        f"{prefix}k_proj.weight": (keys, hidden),
        f"{prefix}v_proj.weight": (keys, hidden),
        f"{prefix}o_proj.weight": (hidden, queries),
    }


def experts(prefix: str, config: dict[str, Any]) -> Shapes:
    hidden, latent = config["hidden_size"], config.get("moe_latent_size")
    shapes: Shapes = {
        f"{prefix}gate.weight": (config["n_routed_experts"], hidden),
        f"{prefix}gate.e_score_correction_bias": (config["n_routed_experts"],),
    }
    for expert in range(config["n_routed_experts"]):
        shapes |= mlp(f"{prefix}experts.{expert}.", latent or hidden, config["moe_intermediate_size"])
    if latent:
        shapes |= {
            f"{prefix}fc1_latent_proj.weight": (latent, hidden),
            f"{prefix}fc2_latent_proj.weight": (hidden, latent),
        }
    return shapes | mlp(f"{prefix}shared_experts.", hidden, config["moe_shared_expert_intermediate_size"])


def layers(prefix: str, config: dict[str, Any], kinds: list[str]) -> Shapes:
    found: Shapes = {}
    for layer, kind in enumerate(kinds):
        mixer = f"{prefix}{layer}.mixer."
        found[f"{prefix}{layer}.norm.weight"] = (config["hidden_size"],)
        if kind in ("mamba", "M"):
            found |= mamba(mixer, config)
        elif kind in ("attention", "*"):
            found |= attention(mixer, config)
        elif kind in ("moe", "E"):
            found |= experts(mixer, config)
        else:
            found |= mlp(mixer, config["hidden_size"], config["intermediate_size"])
    return found


def shapes(config: dict[str, Any]) -> Shapes:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    kinds = list(config.get("hybrid_override_pattern") or config["layers_block_type"])
    drafting = list(config.get("mtp_hybrid_override_pattern") or config["mtp_layers_block_type"])
    return {
        "backbone.embeddings.weight": (vocabulary, hidden),
        "backbone.norm_f.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
        **layers("backbone.layers.", config, kinds),
        "mtp.layers.0.enorm.weight": (hidden,),
        "mtp.layers.0.hnorm.weight": (hidden,),
        "mtp.layers.0.eh_proj.weight": (hidden, 2 * hidden),
        **layers("mtp.layers.", config, drafting),
        f"mtp.layers.{len(drafting) - 1}.final_layernorm.weight": (hidden,),
    }


def family(name: str, config: dict[str, Any], seed: int = 0) -> Family:
    return Family(
        name,
        config,
        shapes(config),
        depths=1,
        max_depth=1,
        ones=("norm.weight", "norm_f.weight", ".D"),
        special={
            "A_log": lambda shape, random: np.log(random.uniform(0.5, 8, shape)),
            "dt_bias": lambda shape, random: random.uniform(-4, 0, shape),
        },
        seed=seed,
    )


FAMILIES = [family("nemotron_h", LISTED), family("nemotron_h_latent", PATTERN)]
