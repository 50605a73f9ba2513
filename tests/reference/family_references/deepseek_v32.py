"""DeepSeek-V3.2 and GLM-5: trunk and head by transformers, whose configurations of them do not mention the head."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tests.reference.family_references.glm4_moe import Chained
from tests.reference.family_references.glm4_moe_lite import LowRankNorms


class First(nn.Module):
    """A layer that also hands on what its indexer chose, without that."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **settings: Any) -> Tensor:
        return self.layer(*args, **settings)[0]


class Glm5(LowRankNorms):
    """GLM-5, which may share what an indexer chose between layers."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **settings)
        module = self.mtp.layers[0]
        module.mtp_block = First(module.mtp_block)


# The kind of a layer says no more than which mask it takes: a causal one.
REFERENCES = {
    "deepseek_v32": partial(
        Chained, num_mtp_layers=1, mtp_mlp_layer_types=["sparse"], mtp_layer_types=["full_attention"]
    ),
    "glm_moe_dsa": partial(Glm5, mtp_layer_types=["full_attention"]),
}
