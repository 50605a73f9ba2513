"""Which files a model folder has, by name, index and place. Reads JSON; knows nothing of tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .strict_json import parse

__all__ = ["companion_of", "indexed", "read_json", "read_list", "refuse_incomplete", "weight_files"]

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint.

    Raises:
        CheckpointError: no such file, or no JSON object in it.
    """
    body = _parsed(path)
    if not isinstance(body, dict):
        raise CheckpointError(f"{path}: holds {type(body).__name__}, not a JSON object")
    return body


def read_list(path: Path) -> list[Any]:
    """A JSON list from a file of a checkpoint; raises as `read_json` does."""
    body = _parsed(path)
    if not isinstance(body, list):
        raise CheckpointError(f"{path}: holds {type(body).__name__}, not a JSON list")
    return body


def _parsed(path: Path) -> Any:
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: is no file; fetch the checkpoint again")  # reading a pipe would wait for ever
    try:
        return parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent}: no {path.name} there; a model folder has one") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}); fetch the checkpoint again") from error


def weight_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Files of the checkpoint proper, and head files lying beside it."""
    beside = sorted(folder.glob("mtp*.safetensors"))
    named = indexed(folder)
    listed = sorted(folder.glob("model*.safetensors")) if named is None else [folder / name for name in named]
    for path in (*listed, *beside):
        if (path.exists() or path.is_symlink()) and not path.is_file():
            raise CheckpointError(f"{path}: is no file, or a link to none; fetch the checkpoint again")
    there = [path.name for path in folder.iterdir() if path.exists()]
    refuse_incomplete(folder, [path.name for path in listed], there)
    return listed, [path for path in beside if path not in listed]


def indexed(folder: Path) -> list[str] | None:
    """The files that the index names; None without one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return None
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map does not map tensors to files; fetch the checkpoint again")
    files = sorted(set(weight_map.values()))
    for name in files:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index}: weight_map names {name!r}, which is no safetensors file of this folder")
    return files


def refuse_incomplete(folder: Path, listed: Sequence[str], there: Collection[str]) -> None:
    missing = [name for name in listed if name not in there]
    if missing:
        raise CheckpointError(f"{folder}: {missing[0]} is named in the index but missing; fetch the checkpoint again")
    if not listed:
        raise CheckpointError(f"{folder}: no model*.safetensors there; {_instead(there)}")


def _instead(there: Collection[str]) -> str:
    """What a folder holds in the place of weights that are read."""
    if pickles := sorted(name for name in there if name.endswith(_PICKLES)):
        return f"{pickles[0]} is a pickle, which can run code when it is read: fetch a checkpoint in safetensors"
    return "other weight formats are not read: fetch a checkpoint in safetensors"


def companion_of(folder: Path, ending: str) -> Path | None:
    """The checkpoint that holds the head: below the folder, beside it, or beside it in the cache of the Hub."""
    if not ending:
        return None
    places = [folder / ending.strip("-"), folder.with_name(folder.name + ending)]
    if folder.parent.name == "snapshots":
        repository = folder.parent.parent
        other = repository.with_name(repository.name + ending)
        newest = other / "refs" / "main"
        if newest.is_file():
            places.append(other / "snapshots" / newest.read_text(encoding="utf-8").strip())
    return next((place for place in places if (place / "config.json").is_file()), None)
