"""Tiny random checkpoints with a vision tower, dense and of experts, as Hugging Face stores them. Knows numpy alone.

Made anew from their seeds wherever they are needed, as are the pictures that they are shown.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.reference.families import FAMILIES
from tests.reference.random_checkpoints import VARIANTS, VOCABULARY, full_config, make_weights

IMAGE = VOCABULARY - 2  # the token that stands in the place of each embedding
SIZES = [(26, 17), (21, 50)]  # width and height of the two pictures, in pixels
TEXTS = [7, 5, 19]  # tokens of text before, between and behind them
PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 512, "longest_edge": 1100},  # one picture is scaled by each
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.4, 0.45],
    "image_std": [0.5, 0.3, 0.25],
}


@dataclass(frozen=True)
class VisionCheckpoint:
    """A checkpoint: config.json, and its weights in float32 by their names."""

    name: str
    config: dict[str, Any]
    weights: Callable[[], dict[str, np.ndarray]]


def vision_config(out_hidden_size: int, **settings: Any) -> dict[str, Any]:
    """The configuration of a tower of two layers."""
    return {
        "model_type": "qwen3_5",
        "depth": 2,
        "hidden_size": 32,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 48,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": PREPROCESSOR["patch_size"],
        "spatial_merge_size": PREPROCESSOR["merge_size"],
        "temporal_patch_size": PREPROCESSOR["temporal_patch_size"],
        "out_hidden_size": out_hidden_size,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [],
        **settings,
    }


def tower_shapes(config: dict[str, Any], prefix: str = "model.visual.") -> dict[str, tuple[int, ...]]:
    """Names and shapes of a tower's tensors."""
    hidden, inner, out = config["hidden_size"], config["intermediate_size"], config["out_hidden_size"]
    merged = hidden * config["spatial_merge_size"] ** 2
    layers = {
        "norm1": (hidden,),
        "norm2": (hidden,),
        "attn.qkv": (3 * hidden, hidden),
        "attn.proj": (hidden, hidden),
        "mlp.linear_fc1": (inner, hidden),
        "mlp.linear_fc2": (hidden, inner),
    }
    patch = (config["in_channels"], config["temporal_patch_size"], config["patch_size"], config["patch_size"])
    weights: dict[str, tuple[int, ...]] = {"patch_embed.proj": (hidden, *patch)}
    for layer in range(config["depth"]):
        weights |= {f"blocks.{layer}.{name}": shape for name, shape in layers.items()}
    weights |= {"merger.norm": (hidden,), "merger.linear_fc1": (merged, merged), "merger.linear_fc2": (out, merged)}
    shapes = {f"{prefix}{name}.weight": shape for name, shape in weights.items()}
    shapes |= {f"{prefix}{name}.bias": shape[:1] for name, shape in weights.items()}
    return shapes | {f"{prefix}pos_embed.weight": (config["num_position_embeddings"], hidden)}


def tower_weights(config: dict[str, Any], prefix: str = "model.visual.") -> dict[str, np.ndarray]:
    """Values that make every part of a tower matter, float32."""
    return {name: _values(name, shape) for name, shape in tower_shapes(config, prefix).items()}


def _values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    random = np.random.RandomState(zlib.crc32(name.encode()))
    noise = random.standard_normal(shape).astype(np.float32)
    if len(shape) == 1:
        return noise * np.float32(0.2) + np.float32("norm" in name and name.endswith("weight"))
    fan_in = shape[1] if name.endswith("pos_embed.weight") else int(np.prod(shape[1:]))
    return noise * np.float32(1.3 / fan_in**0.5)


def _dense() -> VisionCheckpoint:
    plain = replace(next(each for each in VARIANTS if each.name == "multimodal"), with_vision=False, seed=235)
    config = full_config(plain)
    text = {**config["text_config"], "dtype": "float32"}
    return _with_tower(
        "dense", {**config, "text_config": text, "dtype": "float32"}, "Qwen3_5", lambda: make_weights(plain)
    )


def _experts() -> VisionCheckpoint:
    family = FAMILIES["qwen3_5_moe"]
    return _with_tower("experts", family.config, "Qwen3_5Moe", family.weights)


def _with_tower(
    name: str, config: dict[str, Any], kind: str, weights: Callable[[], dict[str, np.ndarray]]
) -> VisionCheckpoint:
    vision = vision_config(config["text_config"]["hidden_size"], model_type=config["model_type"])
    whole = {
        **config,
        "architectures": [f"{kind}ForConditionalGeneration"],
        "image_token_id": IMAGE,
        "video_token_id": VOCABULARY - 3,
        "vision_start_token_id": VOCABULARY - 4,
        "vision_end_token_id": VOCABULARY - 5,
        "vision_config": vision,
    }
    return VisionCheckpoint(name, whole, lambda: weights() | tower_weights(vision))


CHECKPOINTS = [_dense(), _experts()]


def picture(width: int, height: int, seed: int = 0) -> np.ndarray:
    """A picture with edges, slopes and noise, uint8 [height, width, 3]."""
    random = np.random.RandomState(seed + 1000 * width + height)
    y, x = np.mgrid[:height, :width].astype(np.float64)
    waves = [np.sin(x / (3 + channel)) + np.cos(y / (5 - channel)) for channel in range(3)]
    values = 128 + 40 * np.stack(waves, axis=-1) + 60 * ((x + 2 * y) % 17 > 8)[..., None]
    return np.clip(values + random.normal(0, 10, values.shape), 0, 255).astype(np.uint8)


def prompt(tokens: list[int], seed: int = 3) -> np.ndarray:
    """Text of random ids around as many image tokens as the pictures have."""
    random = np.random.RandomState(seed)
    parts = [random.randint(0, VOCABULARY - 8, TEXTS[0])]
    for count, text in zip(tokens, TEXTS[1:], strict=True):
        parts += [np.full(count, IMAGE), random.randint(0, VOCABULARY - 8, text)]
    return np.concatenate(parts)
