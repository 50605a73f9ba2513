"""The models that are on this machine already, and whether they run here. Goes by the one classifier; loads nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..errors import CheckpointError
from ..hub.cache import cache_folder, cached_models
from ..hub.pins import find_pin
from ..source import REFERENCE, find_model
from .terminal import say

if TYPE_CHECKING:
    from ..settings import Settings
    from .places import Place

__all__ = ["FoundModel", "Kind", "described", "find_models", "gigabytes", "memory_for"]

Kind = Literal["bundled", "folder", "disk", "pulled", "cached"]

_ROOM = 512e6  # bytes beside the weights, for activations and a few conversations
_SHARE = 0.1  # and of the weights, likewise


@dataclass(frozen=True)
class FoundModel:
    """A model folder.

    Attributes:
        name: what `--model` takes.
        folder: where it lies.
        kind: how it came to be known; "pulled" is pinned, "cached" is in the Hugging Face cache beside those.
        disk: bytes of its files.
        memory: bytes that it needs to run: weights in the dtype they will have, and head room.
        head: why it decodes plainly; empty where its MTP head can be used.
        problem: why it cannot run at all; empty where it can.
        commit: what its name stands for; empty outside the cache.
    """

    name: str
    folder: Path
    kind: Kind
    disk: int
    memory: int = 0
    head: str = ""
    problem: str = ""
    commit: str = ""


def find_models(settings: Settings, places: Sequence[Place] | None = None) -> list[FoundModel]:
    """The bundled model, those in folders where people keep them, on other disks, and in the Hugging Face cache.

    A place that does not answer is said on standard error.

    Args:
        settings: of the engine: the dtype decides how much memory weights take.
        places: where to look beside the cache; by default everywhere that `all_places` knows.
    """
    from ..settings import checked
    from .places import ModelSettings, all_places, look

    if places is None:
        places = all_places(checked(ModelSettings, {}))
    found = [described(REFERENCE, find_model(REFERENCE), settings, "bundled")]
    cache = cache_folder().resolve()
    seen = {find_model(REFERENCE).resolve()}
    for place, folder in look(places, _say_silent):
        real = folder.resolve()
        if real not in seen and not real.is_relative_to(cache):
            seen.add(real)
            found.append(described(str(real), folder, settings, place.kind))
    return [*found, *_cached(settings)]


def described(name: str, folder: Path, settings: Settings, kind: Kind, commit: str = "") -> FoundModel:
    """What there is to say of a model without reading its weights."""
    from ..models.checkpoint import classify

    disk = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    try:
        checkpoint = classify(folder)
    except CheckpointError as error:
        problem = str(error).removeprefix(f"{folder}: ")
        return FoundModel(name, folder, kind, disk, problem=problem, commit=commit)
    from ..device import choose_dtype

    weights = checkpoint.weight_bytes(
        choose_dtype(settings.dtype, quantised=checkpoint.quantised, dense_experts=checkpoint.dense_experts),
        tower=True,
    )
    return FoundModel(name, folder, kind, disk, memory_for(weights), checkpoint.head.reason, commit=commit)


def memory_for(weights: float) -> int:
    """Bytes that a model needs to run, from those of its weights."""
    return int(weights * (1 + _SHARE) + _ROOM)


def gigabytes(count: float) -> str:
    """Bytes for people."""
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


def _say_silent(place: Path) -> None:
    say(f"{place} did not answer in time, or holds too much: it was not looked through to the end")


def _cached(settings: Settings) -> Iterator[FoundModel]:
    """Of each repository in the Hugging Face cache the pinned commit, else its main revision, else the newest."""
    for repository in cached_models():
        pin = find_pin(repository.repo_id)
        commits = {each.commit_hash: each for each in repository.revisions}
        pulled = commits.get(pin.commit) if pin is not None else None
        best = pulled or max(commits.values(), key=lambda each: ("main" in each.refs, each.last_modified))
        folder, commit, name = best.snapshot_path, best.commit_hash, repository.repo_id
        if pulled is None and ("main" not in best.refs or pin is not None):
            name = f"{name}@{commit}"
        if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
            yield described(name, folder, settings, "pulled" if pulled else "cached", commit)
