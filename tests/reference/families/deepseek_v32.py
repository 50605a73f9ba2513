"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3's layers with an indexer each, which chooses fewer positions than there are."""

from __future__ import annotations

from typing import Any

from tests.reference.families import deepseek_v3
from tests.reference.families.family import Family, Shapes

CONFIG: dict[str, Any] = {
    **deepseek_v3.CONFIG,
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_head_dim": 16,
    "index_n_heads": 8,
    "index_topk": 12,
}

GLM: dict[str, Any] = {
    **CONFIG,
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
    "indexer_rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
}
del GLM["rope_theta"], GLM["rope_scaling"]


def indexer(prefix: str, config: dict[str, Any]) -> Shapes:
    heads, width = config["index_n_heads"], config["index_head_dim"]
    return {
        f"{prefix}wq_b.weight": (heads * width, config["q_lora_rank"]),
        f"{prefix}wk.weight": (width, config["hidden_size"]),
        f"{prefix}k_norm.weight": (width,),
        f"{prefix}k_norm.bias": (width,),
        f"{prefix}weights_proj.weight": (heads, config["hidden_size"]),
    }


def shapes(config: dict[str, Any]) -> Shapes:
    found = deepseek_v3.shapes(config)
    for layer in range(config["num_hidden_layers"] + config["num_nextn_predict_layers"]):
        found |= indexer(f"model.layers.{layer}.self_attn.indexer.", config)
    return found


FAMILIES = [
    Family("deepseek_v32", CONFIG, shapes(CONFIG), seed=1),  # no two equal scores to choose between, as 0 often is
    Family("glm_moe_dsa", GLM, shapes(GLM)),
]
