"""Checkpoints with a vision tower: those of the reference fixtures, and the bundled one with a tower of random weights.

The bundled one has a head that was trained, so that some drafts are accepted and some are not, behind pictures too.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx

from selfdraft.images import Picture
from selfdraft.source import REFERENCE, find_model
from tests.reference.vision_checkpoints import (
    PREPROCESSOR,
    VisionCheckpoint,
    picture,
    tower_weights,
    vision_config,
)

__all__ = ["TEMPLATE", "asked", "pictured", "write_reference", "write_sighted"]

MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")

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
    """The bundled checkpoint with a tower, tokens for pictures behind its vocabulary, and a template that writes them.

    Args:
        settings: fields of preprocessor_config.json.
    """
    source = find_model(REFERENCE)
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.glob("*.json"):
        shutil.copy(path, folder / path.name)
    config = json.loads((source / "config.json").read_text())
    first = config["text_config"]["vocab_size"]
    config["text_config"]["vocab_size"] = first + 8
    config |= {"image_token_id": first + 1, "vision_config": vision_config(config["text_config"]["hidden_size"])}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps({**PREPROCESSOR, **settings}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    for number, mark in enumerate(MARKS):
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": first + number, "content": mark})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    tensors: dict[str, mx.array] = {}
    for path in source.glob("*.safetensors"):
        tensors |= mx.load(str(path))  # type: ignore[arg-type]
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    embedding = tensors[name]
    extra = 0.02 * mx.random.normal((8, embedding.shape[1]), key=mx.random.key(1))
    tensors[name] = mx.concatenate([embedding, extra.astype(embedding.dtype)])
    tower = tower_weights(config["vision_config"])
    tensors |= {name: mx.array(values).astype(embedding.dtype) for name, values in tower.items()}
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
