"""GLM-4.7-Flash: trunk and head by transformers.

Its configuration there does not mention the head, and it leaves the epsilon of the two low-rank norms at 1e-6, where
vLLM (`deepseek_v2.py`), with which the model is served, and mlx-lm take `rms_norm_eps`: so does this.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.reference.family_references.glm4_moe import Chained


class LowRankNorms(Chained):
    """With the epsilon of the other norms in the low-rank ones."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, num_mtp_layers=1, mtp_mlp_layer_types=["sparse"], **settings)
        for model in (self.model, self.mtp):
            for name, module in model.named_modules():
                if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
                    module.variance_epsilon = self.model.config.rms_norm_eps


REFERENCES = {"glm4_moe_lite": LowRankNorms}
