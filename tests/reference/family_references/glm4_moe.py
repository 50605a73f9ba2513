"""GLM-4.5: trunk and head by transformers. Deeper drafts chain what comes before the module's last norm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from tests.reference.family_references.reference import TransformersModules, chained


class Chained(TransformersModules):
    """One module, chained without its last norm."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self.norm = self.mtp.layers[0].post_norm
        self.mtp.layers[0].use_post_norm = False

    def output(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        return self.run(0, tokens, hidden)

    def logits(self, output: Tensor) -> Tensor:
        return self.model.lm_head(self.norm(output))

    def drafts(self, ids: Tensor, hidden: Tensor, depths: int) -> Tensor:
        return chained(self, ids, hidden, depths)


REFERENCES = {"glm4_moe": Chained}
