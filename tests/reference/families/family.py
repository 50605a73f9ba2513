"""What describes a tiny random checkpoint, and how its weights are made."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Family", "decoder_layer", "mlp"]

VOCABULARY = 97
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Family:
    """A checkpoint: its configuration, and what its tensors are called.

    Attributes:
        name: of its fixture.
        config: config.json.
        shapes: every tensor of the released layout and its shape.
        depths: how many drafts its fixture has.
        max_depth: deepest draft that its head allows.
        drafts_fewer: whether its head can be kept to fewer tokens.
        window: smallest sliding window of its attention, None for none.
        ones: name endings of norms that are stored as w around 1; others of one dimension are around 0.
        special: name endings -> how such a tensor is made of its shape and a generator.
        seed: part of every tensor's.
        assistant: the head, where it is a checkpoint of its own, in a folder of this name below the trunk's.
    """

    name: str
    config: dict[str, Any]
    shapes: Shapes
    depths: int = 3
    max_depth: int = 8
    window: int | None = None
    drafts_fewer: bool = True
    ones: tuple[str, ...] = ("norm.weight",)
    special: Mapping[str, Callable[[tuple[int, ...], np.random.RandomState], np.ndarray]] = field(default_factory=dict)
    seed: int = 0
    assistant: Family | None = None

    def weights(self) -> dict[str, np.ndarray]:
        """Every tensor, float32 but for whole numbers, the same wherever it is made."""
        return {name: self._tensor(name, shape) for name, shape in self.shapes.items()}

    def _tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        random = np.random.RandomState(zlib.crc32(f"{self.seed} {name}".encode()))
        made = next((make for ending, make in self.special.items() if name.endswith(ending)), None)
        if made is not None:
            values = made(shape, random)
            return values if values.dtype.kind == "i" else values.astype(np.float32)
        noise = random.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            return noise * 0.1 + (1 if name.endswith(self.ones) else 0)
        scale = 4.0 if name.startswith("lm_head") else 1.0  # laws that are peaked, so that drafts hang on no rounding
        return noise * np.float32(scale / shape[-1] ** 0.5)

    def prompt(self, length: int, seed: int = 1) -> np.ndarray:
        """Random token ids."""
        return np.random.RandomState(self.seed + seed).randint(0, self.text["vocab_size"], length)

    @property
    def text(self) -> dict[str, Any]:
        """The text part of the configuration."""
        part: dict[str, Any] = self.config.get("text_config", self.config)
        return part

    def config_with(self, name: str, value: Any) -> dict[str, Any]:
        """config.json with another value in its text part."""
        if "text_config" in self.config:
            return {**self.config, "text_config": {**self.text, name: value}}
        return {**self.config, name: value}


def mlp(prefix: str, hidden: int, inner: int) -> Shapes:
    """A gated MLP."""
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }


def decoder_layer(prefix: str, hidden: int) -> Shapes:
    """The two norms of a pre-norm layer."""
    return {f"{prefix}input_layernorm.weight": (hidden,), f"{prefix}post_attention_layernorm.weight": (hidden,)}
