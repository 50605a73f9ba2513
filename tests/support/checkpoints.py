"""Checkpoint folders in every layout that is met in the wild, made from a model in memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from selfdraft.models.checkpoint import classify
from selfdraft.models.loader import LoadedModel, build_model
from selfdraft.source import REFERENCE, find_model
from tests.support.nano import NANO_CONFIG

__all__ = [
    "Tensors",
    "add_text_side",
    "is_zero_centred",
    "load_folder",
    "outputs",
    "renamed",
    "same_outputs",
    "save",
    "snap_norms",
    "tensors_of",
    "zero_centred",
]

Tensors = dict[str, mx.array]


def tensors_of(model: Any) -> Tensors:
    """Parameters by name: an MLX-layout checkpoint."""
    return dict(tree_flatten(model.parameters()))


def is_zero_centred(name: str) -> bool:
    """Whether Hugging Face stores this norm as w for an effective weight of 1 + w."""
    return ("norm.weight" in name and "linear_attn.norm" not in name) or "pre_fc_norm" in name


def snap_norms(model: Any) -> None:
    """Make 1 + w exact in any dtype, so that both ways to store a norm are the same function to the bit."""
    snapped = {name: mx.round(tensor * 64) / 64 for name, tensor in tensors_of(model).items() if is_zero_centred(name)}
    model.load_weights(list(snapped.items()), strict=False)


def zero_centred(tensors: Mapping[str, mx.array]) -> Tensors:
    """The tensors as Hugging Face stores them: norms as w, conv1d as [C, 1, k]."""
    stored = {}
    for name, tensor in tensors.items():
        if is_zero_centred(name):
            tensor = (tensor.astype(mx.float32) - 1).astype(tensor.dtype)
        stored[name] = tensor.swapaxes(1, 2) if name.endswith("conv1d.weight") else tensor
    return stored


def renamed(tensors: Mapping[str, mx.array], name: Callable[[str], str]) -> Tensors:
    """The same tensors under other names."""
    return {name(old): tensor for old, tensor in tensors.items()}


def save(
    folder: Path,
    tensors: Mapping[str, mx.array],
    config: Mapping[str, Any] = NANO_CONFIG,
    *,
    shards: int = 1,
    beside: Mapping[str, mx.array] | None = None,
) -> Path:
    """Write a checkpoint folder.

    Args:
        shards: with more than one, tensors are dealt out in turn and an index is written.
        beside: tensors of an mtp.safetensors that no index lists.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), dict(tensors))
    else:
        names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
        weight_map = {tensor: names[i % shards] for i, tensor in enumerate(tensors)}
        for file in names:
            part = {tensor: tensors[tensor] for tensor, where in weight_map.items() if where == file}
            mx.save_safetensors(str(folder / file), part)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if beside is not None:
        mx.save_safetensors(str(folder / "mtp.safetensors"), dict(beside))
    return folder


def add_text_side(folder: Path) -> Path:
    """Add the reference checkpoint's tokenizer and template, so that `selfdraft.load` takes the folder."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(find_model(REFERENCE) / name, folder / name)
    return folder


def load_folder(folder: Path, **options: Any) -> LoadedModel:
    """Classify and build; with the head if it is usable."""
    checkpoint = classify(folder)
    return build_model(checkpoint, with_head=not checkpoint.head.reason, **options)


def outputs(model: Any, *, with_head: bool = True) -> list[mx.array]:
    """Trunk logits over a few tokens, and the head's at two depths."""
    tokens, state = mx.array([[3, 1, 4, 1, 5, 9, 2]]), model.new_state()
    hidden, _ = model.forward(tokens, [state], keep_steps=True)
    found = [model.logits(hidden)]
    if with_head:
        drafted = model.draft(tokens[:, 1:], hidden[:, :-1], [state], [0])
        deeper = model.draft(mx.array([[6]]), drafted[:, -1:], [state], [tokens.shape[1] - 1])
        found += [model.logits(drafted), model.logits(deeper)]
    return found


def same_outputs(model: Any, other: Any, *, with_head: bool = True) -> bool:
    """Whether two models compute the same bits."""
    pairs = zip(outputs(model, with_head=with_head), outputs(other, with_head=with_head), strict=True)
    return all(mx.array_equal(a, b).item() for a, b in pairs)
