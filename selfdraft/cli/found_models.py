"""The models that are on this machine already, and whether they run here. Goes by the one classifier; loads nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from ..settings import Settings
from ..source import REFERENCE, find_model

__all__ = ["FoundModel", "find_models", "gigabytes"]

PLACES = (".", "~/models", "~/.lmstudio/models")

_ROOM = 512e6  # bytes beside the weights, for activations and a few conversations
_SHARE = 0.1  # and of the weights, likewise


@dataclass(frozen=True)
class FoundModel:
    """A model folder.

    Attributes:
        name: what `--model` takes.
        disk: bytes of its files.
        memory: bytes that it needs to run: weights in the dtype they will have, and head room.
        head: why it decodes plainly; empty where its MTP head can be used.
        problem: why it cannot run at all; empty where it can.
    """

    name: str
    disk: int
    memory: int = 0
    head: str = ""
    problem: str = ""


def find_models(settings: Settings, places: tuple[str, ...] = PLACES) -> list[FoundModel]:
    """The bundled model, those in folders where people keep them, and those in the Hugging Face cache.

    Args:
        settings: of the engine: the dtype decides how much memory weights take.
        places: folders that are, or hold, or whose folders hold, a model.
    """
    return [_described(name, folder, settings) for name, folder in _candidates(places)]


def gigabytes(count: float) -> str:
    """Bytes for people."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _candidates(places: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    yield REFERENCE, find_model(REFERENCE)
    seen = {find_model(REFERENCE).resolve()}
    for place in places:
        here = Path(place).expanduser()
        for pattern in ("config.json", "*/config.json", "*/*/config.json"):
            for folder in sorted(path.parent for path in here.glob(pattern)):
                if _has_weights(folder) and folder.resolve() not in seen:
                    seen.add(folder.resolve())
                    yield str(folder.resolve()), folder
    yield from _cached()


def _cached() -> Iterator[tuple[str, Path]]:
    """Of each repository in the Hugging Face cache its main revision, else the newest one."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except (CacheNotFound, OSError):
        return
    for repository in sorted(repositories, key=lambda each: each.repo_id):
        if repository.repo_type != "model" or not repository.revisions:
            continue
        best = max(repository.revisions, key=lambda each: ("main" in each.refs, each.last_modified))
        name = repository.repo_id if "main" in best.refs else f"{repository.repo_id}@{best.commit_hash}"
        if _has_weights(best.snapshot_path):
            yield name, best.snapshot_path


def _has_weights(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _described(name: str, folder: Path, settings: Settings) -> FoundModel:
    from ..models.checkpoint import classify

    disk = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    try:
        checkpoint = classify(folder)
    except CheckpointError as error:
        return FoundModel(name, disk, problem=str(error).removeprefix(f"{folder}: "))
    from ..device import choose_dtype

    weights = checkpoint.weight_bytes(choose_dtype(settings.dtype, quantised=checkpoint.quantised))
    return FoundModel(name, disk, int(weights * (1 + _SHARE) + _ROOM), checkpoint.head.reason)
