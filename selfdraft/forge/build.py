"""Writes a package: streams the source's tensors through the recipe into shards. Resumable; the package appears whole.

Everything is written into a folder beside the target. A shard is complete or not there; what is there is not made again
when the same source and recipe are built once more. One tensor is in memory at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError, SelfdraftError
from ..files import write_atomically
from ..memory import free_memory
from ..models.checkpoint import HEAD, Checkpoint, classify, weight_files
from ..models.loader import stored_as
from ..stamp import Stamp, write_stamp
from .head import HeadOutcome, make_head
from .plan import OTHER_FILE, Plan, Shard, plan
from .recipe import DENSE, Recipe
from .tensor_file import TensorWriter, bytes_of, entries, stored_bytes

__all__ = ["Built", "build"]

Progress = Callable[[str, int, int], None]

_ROOM = 2**30  # bytes of disk left over
_COPIES = 3  # of a tensor that are in memory while it is quantised
_SIDE_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*")


@dataclass(frozen=True)
class Built:
    """What was made.

    Attributes:
        folder: the package.
        nbytes: of its tensors. source_bytes: of the source's.
        head: what became of the head; None without one.
        notes: lines a user should read.
    """

    folder: Path
    nbytes: int
    source_bytes: int
    head: HeadOutcome | None
    notes: tuple[str, ...] = ()


def build(source: Path, target: Path, recipe: Recipe, *, progress: Progress = lambda what, done, total: None) -> Built:
    """Make a package.

    Args:
        progress: called with what is done, (bytes or steps) done, and in all.

    Raises:
        CheckpointError: the source cannot be used, with the tensor or file at fault.
        SelfdraftError: the target is there already; disk or memory do not suffice.
    """
    if target.exists():
        raise SelfdraftError(f"{target} is there already: remove it, or choose another --output")
    checkpoint = classify(source)
    wanted = plan(checkpoint, recipe)
    work = target.parent / f".{target.name}.building"
    with _at_work(work, checkpoint, recipe):
        _check_room(work, wanted)
        _write_side_files(checkpoint, recipe, wanted, work)
        _write_shards(checkpoint, recipe, wanted, work, progress)
        _write_other(wanted, work)
        head = make_head(work, wanted, recipe, progress) if wanted.head else None
        write_stamp(work, Stamp(recipe.describe(), checkpoint.folder.name, head.describe() if head else {}))
        classify(work)  # as every later tool will see it
        (work / "journal.json").unlink()
        work.rename(target)
    notes = [checkpoint.head.reason] if checkpoint.head.reason else []
    made = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    stored = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    return Built(target, made, stored, head, tuple(notes))


@contextmanager
def _at_work(work: Path, checkpoint: Checkpoint, recipe: Recipe) -> Iterator[None]:
    """The folder of a build that is under way.

    What an earlier build of the same left there is kept, of another dropped. One that is refused leaves nothing, one
    that is interrupted what it has.
    """
    sources = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in chain(*weight_files(checkpoint.folder))
    ]
    journal = json.dumps({"recipe": recipe.describe(), "source": sources}, sort_keys=True)
    there = work / "journal.json"
    if work.exists() and (not there.exists() or there.read_text(encoding="utf-8") != journal):
        shutil.rmtree(work)
    write_atomically(there, journal)
    try:
        yield
    except SelfdraftError:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _check_room(work: Path, wanted: Plan) -> None:
    """Disk and memory, before anything large is written."""
    there = sum(path.stat().st_size for path in work.glob("*.safetensors"))
    needed, free = wanted.nbytes - there + _ROOM, shutil.disk_usage(work).free
    if needed > free:
        raise SelfdraftError(
            f"the package needs {needed / 1e9:.1f} GB on the disk of {work.parent}, where {free / 1e9:.1f} GB are free"
        )
    needed, free = _COPIES * wanted.largest, free_memory()
    if needed > free:
        raise SelfdraftError(
            f"the largest tensor needs {needed / 1e9:.1f} GB of memory while it is quantised, and "
            f"{free / 1e9:.1f} GB are free: close other programs"
        )


def _write_shards(checkpoint: Checkpoint, recipe: Recipe, wanted: Plan, work: Path, progress: Progress) -> None:
    tensors = checkpoint.mapped_anew()
    done = 0
    for shard in wanted.shards:
        if not _complete(work / shard.name, shard):
            with TensorWriter(work / shard.name, _entries(shard), {"format": "mlx"}) as file:
                for part in shard.parts:
                    tensor = stored_as(
                        checkpoint, part.name, tensors.pop(part.name), _dtype(part, recipe), recipe.head_norms
                    )
                    for entry, made in zip(part.entries, _made(tensor, part, recipe), strict=True):
                        file.write(entry.name, [bytes_of(made)])
                    done += part.nbytes
                    del tensor, made
                    mx.clear_cache()
                    progress("weights", done, wanted.nbytes)
        else:
            for part in shard.parts:
                tensors.pop(part.name)
            done += shard.nbytes
            progress("weights", done, wanted.nbytes)


def _entries(shard: Shard) -> list[Any]:
    return [entry for part in shard.parts for entry in part.entries]


def _dtype(part: Any, recipe: Recipe) -> mx.Dtype:
    """What a part is computed in: codes of weights as they are stored, all others in what they become."""
    dtype: mx.Dtype = getattr(mx, recipe.dtype)
    return mx.float32 if part.bits != DENSE else dtype


def _made(tensor: mx.array, part: Any, recipe: Recipe) -> list[mx.array]:
    """The tensors of a part."""
    if mx.issubdtype(tensor.dtype, mx.floating) and not mx.isfinite(tensor).all().item():
        raise CheckpointError(
            f"{part.name} holds values that are not finite in {tensor.dtype}: fetch the checkpoint again"
            + (", or take --dtype bfloat16" if tensor.dtype == mx.float16 else "")
        )
    if (
        recipe.head_order == "hidden-first"
        and part.name.startswith(HEAD)
        and part.name.endswith(("fc.weight", "eh_proj.weight"))
    ):
        tensor = mx.concatenate(list(mx.split(tensor, 2, axis=-1))[::-1], axis=-1)
    if part.bits == DENSE:
        return [tensor]
    dtype = getattr(mx, recipe.dtype)
    codes, *others = mx.quantize(tensor.astype(dtype), group_size=recipe.group_size, bits=part.bits)
    return [codes, *(other.astype(dtype) for other in others)]


def _complete(path: Path, shard: Shard) -> bool:
    """Whether an earlier build wrote a shard: it has its name only when it is whole."""
    if not path.exists():
        return False
    found = [(entry.name, entry.dtype, entry.shape) for entry in entries(path)]
    return found == [(entry.name, entry.dtype, entry.shape) for entry in _entries(shard)]


def _write_other(wanted: Plan, work: Path) -> None:
    """Tensors of other modalities, bit for bit and under their own names."""
    if not wanted.other or (work / OTHER_FILE).exists():
        return
    with TensorWriter(work / OTHER_FILE, [entry for _, entry in wanted.other], {"format": "mlx"}) as file:
        for path, entry in wanted.other:
            file.write(entry.name, stored_bytes(path, entry))


def _write_side_files(checkpoint: Checkpoint, recipe: Recipe, wanted: Plan, work: Path) -> None:
    """Configuration, tokenizer, template, index."""
    for pattern in _SIDE_FILES:
        for path in checkpoint.folder.glob(pattern):
            if (
                path.is_file()
                and not path.name.endswith(".index.json")
                and path.name not in ("config.json", "selfdraft.json")
            ):
                shutil.copyfile(path, work / path.name)
    config = {
        name: value for name, value in checkpoint.config.items() if name not in ("quantization_config", "quantization")
    }
    if quantisation := _quantisation(checkpoint, recipe, wanted):
        config["quantization"] = quantisation
    (work / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    where = {entry.name: shard.name for shard in wanted.shards for entry in _entries(shard)}
    where |= {entry.name: OTHER_FILE for _, entry in wanted.other}
    index = {"metadata": {"total_size": wanted.nbytes}, "weight_map": dict(sorted(where.items()))}
    (work / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def _quantisation(checkpoint: Checkpoint, recipe: Recipe, wanted: Plan) -> dict[str, Any]:
    """As mlx-lm writes it, which may call a path by a name that begins with `language_model.`."""
    stored: dict[str, Any] = dict(checkpoint.config.get("quantization") or {})
    if not wanted.bits:
        return stored
    found = {"group_size": recipe.group_size, "bits": recipe.bits, "mode": "affine", **stored}
    for path, bits in wanted.bits.items():
        if bits != found["bits"] or recipe.group_size != found["group_size"]:
            settings = {"group_size": recipe.group_size, "bits": bits}
            found |= {path: settings, f"language_model.{path}": settings}
    return found
