"""Selfdraft: exact speculative decoding with a model's own multi-token-prediction head.

    from selfdraft import load, SamplingParams

    llm = load("reference")
    print(llm.generate("Hello! Who are you?", SamplingParams(max_tokens=64)).text)

Nothing heavy is imported here: `load` imports MLX when it is called, because the BLAS it runs on can only
be chosen before that (see `selfdraft.device`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import (
    CheckpointError,
    ContextOverflow,
    DownloadFailed,
    FanError,
    InvalidRequest,
    ModelNotFound,
    NonFiniteLogits,
    OutOfMemoryBudget,
    SelfdraftError,
)
from .params import SamplingParams
from .results import Generation, Piece, Timings, TokenLogprob, Usage

if TYPE_CHECKING:
    from .llm import LLM
    from .loading import load

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CheckpointError",
    "ContextOverflow",
    "DownloadFailed",
    "FanError",
    "Generation",
    "InvalidRequest",
    "ModelNotFound",
    "NonFiniteLogits",
    "OutOfMemoryBudget",
    "Piece",
    "SamplingParams",
    "SelfdraftError",
    "Timings",
    "TokenLogprob",
    "Usage",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:
    if name in ("load", "LLM"):
        module = ".loading" if name == "load" else ".llm"
        if name == "LLM":  # its module imports MLX, before which the BLAS is chosen
            from .device import choose_blas
            from .settings import load_settings

            choose_blas(load_settings().blas)
        return getattr(importlib.import_module(module, __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
