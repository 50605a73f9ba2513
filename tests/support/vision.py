"""Checkpoints with a vision tower: those of the reference fixtures, and the bundled one with a tower of random weights.

The bundled one has a head that was trained, so that some drafts are accepted and some are not, behind pictures too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from selfdraft.images import Picture
from selfdraft.source import REFERENCE, find_model
from selfdraft.vision import PictureInputs, PicturePrompts
from selfdraft.vision.patches import Grid
from tests.reference.vision_checkpoints import (
    PREPROCESSOR,
    VisionCheckpoint,
    picture,
    tower_weights,
    vision_config,
)

__all__ = [
    "PAD",
    "SIGHTED",
    "TEMPLATE",
    "Sketch",
    "asked",
    "pictured",
    "sketched",
    "write_reference",
    "write_sighted",
]

# As Qwen's own: a picture is its mark between two others.
TEMPLATE = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' or 'image' in part %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""".lstrip()


def write_reference(checkpoint: VisionCheckpoint, folder: Path) -> Path:
    """A checkpoint of the reference fixtures, as Hugging Face stores it."""
    weights = {name: mx.array(values) for name, values in checkpoint.weights().items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return folder


def write_sighted(folder: Path, **settings: Any) -> Path:
    """The bundled checkpoint with a tower of random weights, and a template that writes pictures.

    Args:
        settings: fields of preprocessor_config.json.
    """
    source = find_model(REFERENCE)
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.glob("*.json"):
        shutil.copy(path, folder / path.name)
    config = json.loads((source / "config.json").read_text())
    added = json.loads((source / "tokenizer.json").read_text())["added_tokens"]
    tokens = {token["content"]: token["id"] for token in added}
    vision = vision_config(config["text_config"]["hidden_size"])
    config |= {"image_token_id": tokens["<|image_pad|>"], "vision_config": vision}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps({**PREPROCESSOR, **settings}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tensors = mx.load(str(source / "model.safetensors"))
    assert isinstance(tensors, dict)
    tensors |= {name: mx.array(values).astype(mx.bfloat16) for name, values in tower_weights(vision).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    return folder


def pictured(width: int = 24, height: int = 32, seed: int = 0) -> Picture:
    """A picture of such a size."""
    return Picture.of(picture(width, height, seed))


def asked(*parts: str | Picture, role: str = "user") -> dict[str, Any]:
    """A message of texts and pictures."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return {"role": role, "content": content}


class Sketch:
    """A tower for engine tests: a picture of W x H pixels is as many tokens, whose embeddings are drawn from
    its digest.

    Attributes:
        encoded: pictures, in order.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.encoded: list[Picture] = []

    def grid(self, picture: Picture) -> Grid:
        width, height = picture.size
        return Grid(height, width, 1)

    def embeddings_bytes(self, grid: Grid) -> int:
        return 4 * self.width * grid.tokens

    def working_bytes(self, grid: Grid) -> int:
        return 10**7 * grid.patches

    def encode(self, picture: Picture, grid: Grid) -> mx.array:
        self.encoded.append(picture)
        key = mx.random.key(int(picture.digest[:8], 16))
        return 2 * mx.random.normal((grid.tokens, self.width), key=key)


# Fields of a nano model with heads of 16 that takes pictures.
SIGHTED: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    }
}

PAD = 15  # the id that stands for a picture's embeddings there


def sketched(tower: Sketch, *parts: Sequence[int] | Picture) -> tuple[list[int], PictureInputs]:
    """A prompt of ids and pictures, and what goes to the engine with it."""
    tokens: list[int] = []
    for part in parts:
        tokens += [PAD] * tower.grid(part).tokens if isinstance(part, Picture) else list(part)
    pictures = [part for part in parts if isinstance(part, Picture)]
    return tokens, PicturePrompts(tower, "", PAD, 16).inputs(tokens, pictures)  # type: ignore[arg-type]
