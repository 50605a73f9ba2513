"""Writes a package: streams the source's tensors through the recipe into shards, one tensor in memory at a time.

A shard is complete or not there; what is there is not made again when the same source and recipe are built once more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..device import choose_dtype
from ..errors import CheckpointError
from ..models.checkpoint import Checkpoint, classify
from ..models.folder import weight_files
from ..models.loader import build_model, stored_as
from ..models.probe import PROBE_TEXT, why_foreign
from ..models.tensor_header import entries
from ..stamp import Stamp, write_stamp
from ..text import Tokenizer
from .head import HeadOutcome, make_head
from .package_files import write_config, write_index, write_side_files
from .plan import OTHER_FILE, Part, Plan, Shard, plan
from .recipe import DENSE, Recipe
from .room import room
from .tensor_file import TensorWriter, bytes_of, stored_bytes
from .workplace import refuse_target, workplace

__all__ = ["Built", "build"]

Progress = Callable[[str, int, int], None]

_LAYOUT = 1  # raised when the same source and recipe come to other bytes
_HALVES = re.compile(r"mtp\..*\b(fc|eh_proj)\.(weight|scales|biases)")  # whose inputs are embedding and hidden


@dataclass(frozen=True)
class Built:
    """What was made.

    Attributes:
        folder: the package.
        nbytes: of its files of tensors. source_bytes: of the source's tensors.
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
        SelfdraftError: the target is there already, or cannot be written; disk or memory do not suffice.
    """
    refuse_target(target)
    checkpoint = classify(source)
    wanted = plan(checkpoint, recipe)
    with workplace(target, _journal(checkpoint, wanted.recipe)) as work:
        there = sum(path.stat().st_size for path in work.glob("*.safetensors"))
        room(wanted, work, written=there).check()
        write_side_files(checkpoint, work)
        write_config(checkpoint, wanted, work)
        write_index(wanted, work)
        _Weights(checkpoint, wanted, work, progress).write()
        _check_package(checkpoint, wanted, work)
        head = make_head(work, wanted, wanted.recipe, progress) if wanted.head else None
        described = head.describe() if head else {}
        write_stamp(work, Stamp(wanted.recipe.describe(), checkpoint.folder.resolve().name, described))
    made = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    stored = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    return Built(target, made, stored, head, tuple(_notes(checkpoint, wanted)))


def _journal(checkpoint: Checkpoint, recipe: Recipe) -> str:
    """What a package is made of, by which a build knows its own beginning again."""
    folder = checkpoint.folder.resolve()
    files = [folder / "config.json", *chain(*weight_files(folder))]
    sources = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    made_by = {"layout": _LAYOUT, "recipe": recipe.describe(), "folder": str(folder), "files": sources}
    return json.dumps(made_by, sort_keys=True)


def _notes(checkpoint: Checkpoint, wanted: Plan) -> list[str]:
    notes = [f"without a head: {checkpoint.head.reason}"] if checkpoint.head.reason else []
    if wanted.other:
        notes.append(f"{len(wanted.other)} tensors of other modalities are kept bit for bit")
    return notes


class _Weights:
    """Writes the files of a package that hold tensors."""

    def __init__(self, checkpoint: Checkpoint, wanted: Plan, work: Path, progress: Progress) -> None:
        self._checkpoint = checkpoint
        self._wanted = wanted
        self._work = work
        self._progress = progress
        self._done = 0
        self._dtype: mx.Dtype = getattr(mx, wanted.recipe.dtype)

    def write(self) -> None:
        """All that are not there yet."""
        tensors = self._checkpoint.mapped_anew()
        for shard in self._wanted.shards:
            taken = {part.name: tensors.pop(part.name) for part in shard.parts}
            if _complete(self._work / shard.name, shard):
                self._tell(shard.nbytes)
            else:
                self._write(shard, taken)
        self._write_other()

    def _write(self, shard: Shard, tensors: dict[str, mx.array]) -> None:
        """A file, of tensors that are let go of one by one."""
        with TensorWriter(self._work / shard.name, shard.entries, {"format": "mlx"}) as file:
            for part in shard.parts:
                for entry, made in zip(part.entries, self._made(part, tensors.pop(part.name)), strict=True):
                    file.write(entry.name, [bytes_of(made)])
                mx.clear_cache()
                self._tell(part.nbytes)

    def _made(self, part: Part, tensor: mx.array) -> tuple[mx.array, ...]:
        """The tensors of a part, evaluated."""
        recipe = self._wanted.recipe
        tensor = stored_as(self._checkpoint, part.name, tensor, self._dtype, recipe.head_norms)
        if recipe.head_order == "hidden-first" and _HALVES.fullmatch(part.name):
            tensor = mx.concatenate(list(mx.split(tensor, 2, axis=-1))[::-1], axis=-1)
        try:
            _check_finite(part.name, tensor)
            if part.bits == DENSE:
                return (tensor,)
            made = mx.quantize(tensor, group_size=recipe.group_size, bits=part.bits)
            mx.eval(made)
        except RuntimeError as error:
            raise OSError(f"{part.name}: {error}") from error
        return tuple(made)

    def _write_other(self) -> None:
        """Tensors of other modalities, bit for bit and under their own names."""
        other = [entry for _, entry in self._wanted.other]
        if other and not (self._work / OTHER_FILE).exists():
            with TensorWriter(self._work / OTHER_FILE, other, {"format": "mlx"}) as file:
                for path, entry in self._wanted.other:
                    file.write(entry.name, stored_bytes(path, entry))
        if other:
            self._tell(sum(entry.nbytes for entry in other))

    def _tell(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress("weights", self._done, self._wanted.nbytes)


def _check_finite(name: str, tensor: mx.array) -> None:
    if not mx.issubdtype(tensor.dtype, mx.floating) or mx.isfinite(tensor).all().item():
        return
    if tensor.dtype == mx.float16:
        raise CheckpointError(f"{name} holds values that float16 cannot, or none at all: take --dtype bfloat16")
    raise CheckpointError(f"{name} holds values that are not finite: fetch the checkpoint again")


def _complete(path: Path, shard: Shard) -> bool:
    """Whether an earlier build wrote a shard: it has its name only when it is whole."""
    if not path.exists():
        return False
    found: list[Any] = [(entry.name, entry.dtype, entry.shape) for entry in entries(path)]
    return found == [(entry.name, entry.dtype, entry.shape) for entry in shard.entries]


def _check_package(checkpoint: Checkpoint, wanted: Plan, work: Path) -> None:
    """Refuse what every later tool would take for something else, and a head of another trunk."""
    made = classify(work)
    for name, norms in (("trunk", made.norms), ("head", made.head.norms if wanted.head else "plain")):
        if norms not in ("one-plus", "plain"):
            raise CheckpointError(
                f"{checkpoint.folder}: the {name}'s norms, stored as 1 + w, would be read as {norms!r}: their values "
                "are unlike a trained model's, or --head-norms says what they are not"
            )
    if checkpoint.head.source == "separate" and wanted.head:
        model = build_model(made, with_head=True, dtype=choose_dtype("auto", quantised=made.quantised)).model
        if reason := why_foreign(model, Tokenizer.from_folder(work).encode(PROBE_TEXT, special=False)):
            raise CheckpointError(f"{checkpoint.folder}: {reason}; take that file away to build without a head")
