"""DeepSeek-V3: trunk and head by transformers, wired as GLM-4.5's."""

from __future__ import annotations

from tests.reference.family_references.glm4_moe import Chained

REFERENCES = {"deepseek_v3": Chained, "deepseek_v3_direct": Chained}
