"""What all ranks must have alike, so that their parts are parts of one model. Reads headers and samples of files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from .. import __version__
from ..models.checkpoint import Checkpoint
from ..models.folder import weight_files

__all__ = ["difference", "facts"]

_SAMPLES = 64  # of a file of weights
_SAMPLE = 4096  # bytes


def facts(checkpoint: Checkpoint, dtype: mx.Dtype | None) -> dict[str, str]:
    """By names for people."""
    return {
        "selfdraft": __version__,
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
        "dtype": str(dtype or checkpoint.stored_dtype).removeprefix("mlx.core."),
        "model": fingerprint(checkpoint.folder),
    }


def fingerprint(folder: Path) -> str:
    """Of a checkpoint: its JSON files, and of its weights the sizes and 64 samples of each file. Seconds, not minutes,
    for hundreds of gigabytes; tells another model, quantisation or training, not a flipped bit."""
    digest = hashlib.sha256()
    listed, separate = weight_files(folder)
    for path in sorted(folder.glob("*.json")):
        digest.update(path.name.encode() + path.read_bytes())
    for path in sorted([*listed, *separate]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(size * sample // _SAMPLES)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:16]


def difference(mine: Mapping[str, str], theirs: Mapping[str, str], name: str) -> str:
    """What of another rank differs from rank 0, with the remedy; "" if nothing does.

    Args:
        name: of that rank.
    """
    for fact, value in mine.items():
        other = theirs.get(fact)
        if other != value:
            remedy = "copy the model folder" if fact == "model" else f"give both the same {fact}"
            return f"{name} has {fact} {other}, and rank 0 has {value}: {remedy}, then start again"
    return ""
