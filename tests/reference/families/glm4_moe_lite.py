"""GLM-4.7-Flash: DeepSeek-V3's layers with experts in one group, and no rotary scaling."""

from __future__ import annotations

from typing import Any

from tests.reference.families import deepseek_v3
from tests.reference.families.family import Family

CONFIG: dict[str, Any] = {
    **deepseek_v3.CONFIG,
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "partial_rotary_factor": 1.0,
}

FAMILIES = [Family("glm4_moe_lite", CONFIG, deepseek_v3.shapes(CONFIG))]
