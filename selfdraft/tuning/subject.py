"""What is benchmarked: a model with an engine and prompts, loaded or synthetic. Times nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..device import active_blas, choose_dtype
from ..engine import Engine
from ..kernels.self_check import used_kernels
from ..llm import LLM
from ..models.base import Model
from ..settings import Settings
from .measure import PROMPTS
from .synthetic import PUBLISHED_ACCEPTANCE, SyntheticModel, synthetic

__all__ = ["Subject", "loaded", "planted"]

_PROMPT_TOKENS = 24  # of a synthetic model's prompts: about what a short question has


@dataclass(frozen=True)
class Subject:
    """A model to measure.

    Attributes:
        name: for people and file names.
        label: what must stand wherever a figure of it is shown; "" for a real model.
        prompts: as token ids.
        described: device, dtype, kernels and so on, for the report.
        source: what it was made from; peers load the same.
    """

    name: str
    label: str
    engine: Engine
    prompts: Sequence[Sequence[int]]
    described: dict[str, Any]
    source: LLM | SyntheticModel

    @property
    def model(self) -> Model:
        return self.engine.model

    def text(self, tokens: int) -> list[int]:
        """So many tokens: a planted walk, or the prompts again and again."""
        if isinstance(self.source, SyntheticModel):
            return self.source.planted.greedy(0, tokens)
        ids = [token for prompt in self.prompts for token in prompt]
        return (ids * math.ceil(tokens / len(ids)))[:tokens]


def loaded(llm: LLM) -> Subject:
    """A loaded model, on prompts of a chat."""
    prompts = [llm.tokens(text, raw=llm.template is None) for text in PROMPTS]
    return Subject(llm.name, "", llm.engine, prompts, llm.describe(), llm)


def planted(shape: str, settings: Settings, acceptance: Sequence[float] = PUBLISHED_ACCEPTANCE) -> Subject:
    """A synthetic model of a known shape, on walks of its process.

    Raises:
        InvalidRequest: see `synthetic`.
    """
    built = synthetic(shape, acceptance, dtype=choose_dtype(settings.dtype, quantised=True) or mx.bfloat16)
    begins = [number * built.planted.tokens // len(PROMPTS) for number in range(len(PROMPTS))]
    described = {
        "device": "cpu" if mx.default_device() == mx.cpu else "gpu",
        "blas": active_blas(),
        "dtype": str(built.dtype).removeprefix("mlx.core."),
        "quantisation": built.quantisation,
        "weights_bytes": built.nbytes,
        "kernels": used_kernels(),
        "adapter": None,
        "max_depth": built.model.max_depth,
        "context_length": built.model.context_length,
        "planted_acceptance": list(acceptance),
    }
    prompts = [built.planted.greedy(token, _PROMPT_TOKENS) for token in begins]
    engine = Engine(built.model, prefill_chunk=settings.prefill_chunk, mode=settings.engine_mode)
    return Subject(f"synthetic-{shape}", built.label, engine, prompts, described, built)
