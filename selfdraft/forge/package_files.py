"""The small files of a package: configuration, index, tokenizer, template."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..models.checkpoint import Checkpoint
from ..stamp import STAMP
from .plan import OTHER_FILE, Format, Plan

__all__ = ["INDEX", "write_config", "write_index", "write_side_files"]

INDEX = "model.safetensors.index.json"

_SIDE_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*")
_MADE = ("config.json", STAMP)
_QUANTISATIONS = ("quantization", "quantization_config", "compression_config")
_OF_THOSE = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
_DTYPES = ("dtype", "torch_dtype")


def write_side_files(checkpoint: Checkpoint, work: Path) -> None:
    """Copy what stands beside the weights, but for what describes them."""
    for path in {path for pattern in _SIDE_FILES for path in checkpoint.folder.glob(pattern)}:
        if path.is_file() and not path.name.endswith(".index.json") and path.name not in (*_MADE, *_OF_THOSE):
            shutil.copyfile(path, work / path.name)
    if checkpoint.companion:  # a head that is a checkpoint of its own stays as it is
        target = work / checkpoint.architecture.companion.strip("-")
        shutil.copytree(checkpoint.companion, target, dirs_exist_ok=True)


def write_config(checkpoint: Checkpoint, wanted: Plan, work: Path) -> None:
    """The source's configuration with the package's quantisation and dtype, as mlx-lm writes it."""
    config = _described(checkpoint.config, wanted)
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = _described(config["text_config"], wanted)
    if wanted.formats:
        config["quantization"] = _quantisation(wanted.formats)
    (work / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_index(wanted: Plan, work: Path) -> None:
    """Which file holds each tensor."""
    where = {entry.name: shard.name for shard in wanted.shards for entry in shard.entries}
    where |= {entry.name: OTHER_FILE for _, entry in wanted.other}
    index = {"metadata": {"total_size": wanted.nbytes}, "weight_map": dict(sorted(where.items()))}
    (work / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _described(config: Mapping[str, Any], wanted: Plan) -> dict[str, Any]:
    kept = {name: value for name, value in config.items() if name not in _QUANTISATIONS}
    return kept | {name: wanted.recipe.dtype for name in _DTYPES if name in kept}


def _quantisation(formats: Mapping[str, Format]) -> dict[str, Any]:
    """The format of most layers, and each that differs by its path, which mlx-lm may begin with `language_model.`."""
    counted = Counter(tuple(sorted(form.items())) for form in formats.values())
    usual = dict(counted.most_common(1)[0][0])
    found: dict[str, Any] = dict(usual)
    for path, form in sorted(formats.items()):
        if form != usual:
            found |= {path: dict(form), f"language_model.{path}": dict(form)}
    return found
