"""Which tensors a package has, and what each is made of, by a classified checkpoint and a recipe. Reads no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import CheckpointError
from ..models.checkpoint import HEAD, Checkpoint
from ..models.fit import stored_format
from ..models.folder import weight_files
from ..models.loader import always_fp32
from ..models.tensor_header import Entry, entries
from .recipe import DENSE, Recipe
from .tensor_file import entry_of

__all__ = ["HEAD_FILE", "OTHER_FILE", "Format", "Part", "Plan", "Shard", "plan"]

HEAD_FILE = "model-head.safetensors"
OTHER_FILE = "model-other.safetensors"  # vision towers and the like

_SHARD_BYTES = 2 * 10**9
_ROUTERS = ("mlp.gate", "mlp.gate.gate", "shared_expert_gate")  # a score that moves changes which experts run

Format = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """A parameter of the source and the tensors made of it: itself, or codes, scales and biases.

    Attributes:
        name: as our modules call it.
        bits: DENSE if it is only cast.
        entries: what is written.
    """

    name: str
    bits: int
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return sum(entry.nbytes for entry in self.entries)


@dataclass(frozen=True)
class Shard:
    """A file of a package."""

    name: str
    parts: tuple[Part, ...]

    @property
    def entries(self) -> list[Entry]:
        """Its tensors, in order."""
        return [entry for part in self.parts for entry in part.entries]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class Plan:
    """A package to be.

    Attributes:
        recipe: with the dtype settled.
        trunk: its files. head: of the head, dense; None without one.
        other: tensors of other modalities, and the source's file that each is in.
        formats: path of a layer of the trunk that will be quantised -> its group_size, bits and mode.
        largest: bytes of the largest parameter, as stored.
        probed: whether the head lies in a file of its own, so that it must prove to be the trunk's.
    """

    recipe: Recipe
    trunk: tuple[Shard, ...]
    head: Shard | None
    other: tuple[tuple[Path, Entry], ...]
    formats: Mapping[str, Format]
    largest: int
    probed: bool

    @property
    def loads_model(self) -> bool:
        """Whether a build needs the whole package in memory, to measure its head."""
        return self.head is not None and (self.probed or self.recipe.head != "dense")

    @property
    def shards(self) -> tuple[Shard, ...]:
        """All files with tensors of ours."""
        return (*self.trunk, self.head) if self.head else self.trunk

    @property
    def nbytes(self) -> int:
        """Bytes of the package's tensors."""
        return sum(shard.nbytes for shard in self.shards) + sum(entry.nbytes for _, entry in self.other)


def plan(checkpoint: Checkpoint, recipe: Recipe) -> Plan:
    """What `build` writes.

    Raises:
        CheckpointError: a rule of the recipe fits no layer; a tensor is stored twice.
    """
    recipe = recipe.settled(checkpoint.stored_dtype)
    stored, made = _formats(checkpoint, recipe)
    parts = [
        _part(name, tensor, made.get(name.removesuffix(".weight")), getattr(mx, recipe.dtype))
        for name, tensor in sorted(checkpoint.tensors.items())
        if not (name.startswith(HEAD) and (checkpoint.head.reason or checkpoint.companion))
    ]
    head = tuple(part for part in parts if part.name.startswith(HEAD))
    return Plan(
        recipe=recipe,
        trunk=_shards([part for part in parts if not part.name.startswith(HEAD)]),
        head=Shard(HEAD_FILE, head) if head else None,
        other=_other(checkpoint),
        formats={**stored, **made},
        largest=max(tensor.nbytes for tensor in checkpoint.tensors.values()),
        probed=checkpoint.head.source == "separate",
    )


def _formats(checkpoint: Checkpoint, recipe: Recipe) -> tuple[dict[str, Format], dict[str, Format]]:
    """Of the trunk's layers by path: of those that are stored quantised, and of those that will be."""
    module: nn.Module = checkpoint.architecture.build(checkpoint.text_config, False)
    layers = {path: layer for path, layer in module.named_modules() if hasattr(layer, "to_quantized")}
    found = {path: stored_format(path, layer, checkpoint.tensors) for path, layer in layers.items()}
    dense = [path for path, form in found.items() if form is None and not path.endswith(_ROUTERS)]
    for pattern, bits in recipe.rules:
        if not any(fnmatchcase(path, pattern) for path in dense):
            raise CheckpointError(f"{checkpoint.folder}: the rule {pattern}={bits} fits no layer; {_named(dense)}")
    made: dict[str, Format] = {
        path: {"group_size": recipe.group_size, "bits": recipe.bits_of(path), "mode": "affine"}
        for path in dense
        if recipe.bits_of(path) != DENSE and layers[path].weight.shape[-1] % recipe.group_size == 0
    }
    return {path: form for path, form in found.items() if form is not None}, made


def _named(dense: Sequence[str]) -> str:
    if not dense:
        return "all of them are stored quantised, and stay as they are"
    return f"layers that can be quantised are called {dense[0]!r}, {dense[-1]!r} and so on"


def _part(name: str, tensor: mx.array, form: Format | None, dtype: mx.Dtype) -> Part:
    if form is None:
        kept = tensor.dtype
        if always_fp32(name):
            kept = mx.float32
        elif mx.issubdtype(tensor.dtype, mx.floating):
            kept = dtype
        return Part(name, DENSE, (entry_of(name, kept, tensor.shape),))
    path, (*rows, inputs) = name.removesuffix("weight"), tensor.shape
    scales = (*rows, inputs // form["group_size"])
    return Part(
        name,
        form["bits"],
        (
            entry_of(name, mx.uint32, (*rows, inputs * form["bits"] // 32)),
            entry_of(f"{path}scales", dtype, scales),
            entry_of(f"{path}biases", dtype, scales),
        ),
    )


def _shards(parts: Sequence[Part]) -> tuple[Shard, ...]:
    """Parts dealt out in order to files of some size each."""
    groups: list[list[Part]] = [[]]
    for part in parts:
        if groups[-1] and sum(each.nbytes for each in groups[-1]) + part.nbytes > _SHARD_BYTES:
            groups.append([])
        groups[-1].append(part)
    names = [f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    return tuple(Shard(name, tuple(group)) for name, group in zip(names, groups, strict=True))


def _other(checkpoint: Checkpoint) -> tuple[tuple[Path, Entry], ...]:
    """Tensors that are no part of the text model."""
    found: dict[str, tuple[Path, Entry]] = {}
    settings: Mapping[str, Any] = checkpoint.text_config
    for path in weight_files(checkpoint.folder)[0]:
        for entry in entries(path):
            if checkpoint.architecture.canonical(entry.name, settings) is not None:
                continue
            if entry.name in found:
                raise CheckpointError(f"{path}: tensor {entry.name!r} is stored twice in this checkpoint")
            found[entry.name] = path, entry
    return tuple(found.values())
