"""Checkpoints that a package is made of, small enough to be built in a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.forge import head
from tests.support.checkpoints import add_text_side, save, tensors_of
from tests.support.nano import NANO_CONFIG, nano_model

__all__ = ["VOCABULARY", "few_texts", "nano_source"]

VOCABULARY = 8192  # of the tokenizer that goes with it


def nano_source(folder: Path, *, seed: int = 0, **fields: Any) -> Path:
    """A nano checkpoint in bf16 with a tokenizer and a template, in MLX's layout."""
    model = nano_model(seed, dtype=mx.bfloat16, vocab_size=VOCABULARY, **fields)
    kind = "qwen3_5_moe_text" if "num_experts" in fields else NANO_CONFIG["model_type"]
    config = {**NANO_CONFIG, **fields, "vocab_size": VOCABULARY, "model_type": kind}
    return add_text_side(save(folder, tensors_of(model), config))


def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure heads on little, so that it takes no time."""
    monkeypatch.setattr(head, "TOKENS", 12)
    monkeypatch.setattr(head, "CALIBRATION", head.CALIBRATION[:3])
    monkeypatch.setattr(head, "HELD_OUT", head.HELD_OUT[:3])
