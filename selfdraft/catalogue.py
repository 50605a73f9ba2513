"""Models with an MTP head that are worth a try, and what fits which memory. A list to look at: nothing depends on it.

Ids and sizes are those of the models' pages on the Hugging Face Hub, sizes rounded; `selfdraft pull --dry-run ID` says
them to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CATALOGUE", "MEMORIES", "CatalogueEntry"]

MEMORIES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
"""Sizes that machines are sold with, in GB."""


@dataclass(frozen=True)
class CatalogueEntry:
    """A model on the Hub.

    Attributes:
        id: what `selfdraft pull` takes.
        parameters: in billions, those of its image side among them.
        bits: of a weight as stored; 16 is bfloat16.
        bytes: of its files, about.
        model_type: of its text part, which says whether it can run here.
    """

    id: str
    parameters: float
    bits: int
    bytes: float
    model_type: str

    @property
    def quantised(self) -> bool:
        """Whether its weights are stored quantised."""
        return self.bits < 16


CATALOGUE = (
    CatalogueEntry("Qwen/Qwen3.5-0.8B", 0.9, 16, 1.8e9, "qwen3_5_text"),
    CatalogueEntry("Qwen/Qwen3.5-2B", 2.3, 16, 4.6e9, "qwen3_5_text"),
    CatalogueEntry("Qwen/Qwen3.5-4B", 4.7, 16, 9.3e9, "qwen3_5_text"),
    CatalogueEntry("Qwen/Qwen3.5-9B", 9.7, 16, 19.3e9, "qwen3_5_text"),
    CatalogueEntry("Qwen/Qwen3.5-27B", 27.8, 16, 55.6e9, "qwen3_5_text"),
    CatalogueEntry("Qwen/Qwen3.6-27B", 27.8, 16, 55.6e9, "qwen3_5_text"),
    CatalogueEntry("samwang0041/Qwen3.6-27B-MLX-4bit-MTP", 27.3, 4, 15.4e9, "qwen3_5_text"),
    CatalogueEntry("Qwen/Qwen3.5-35B-A3B", 36.0, 16, 71.9e9, "qwen3_5_moe_text"),
    CatalogueEntry("Qwen/Qwen3.6-35B-A3B", 36.0, 16, 71.9e9, "qwen3_5_moe_text"),
    CatalogueEntry("zai-org/GLM-4.5-Air", 110.0, 16, 221e9, "glm4_moe"),
)
