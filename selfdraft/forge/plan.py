"""Which tensors a package has, and what each is made of, by a classified checkpoint and a recipe. Reads no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import CheckpointError
from ..models.checkpoint import HEAD, Checkpoint, weight_files
from ..models.loader import always_fp32
from .recipe import DENSE, Recipe
from .tensor_file import Entry, entries

__all__ = ["HEAD_FILE", "OTHER_FILE", "Part", "Plan", "Shard", "plan"]

HEAD_FILE = "model-head.safetensors"
OTHER_FILE = "model-other.safetensors"  # vision towers and the like

_SHARD_BYTES = 2 * 10**9
_ROUTERS = ("mlp.gate", "mlp.gate.gate", "shared_expert_gate")  # a score that moves changes which experts run


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
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class Plan:
    """A package to be.

    Attributes:
        trunk: its files. head: of the head, dense; None without one.
        other: tensors of other modalities, and the source's file that each is in.
        bits: path of a layer that is quantised -> bits.
        largest: bytes of the largest tensor that is in memory at once, as stored.
    """

    trunk: tuple[Shard, ...]
    head: Shard | None
    other: tuple[tuple[Path, Entry], ...]
    bits: Mapping[str, int] = field(default_factory=dict)
    largest: int = 0

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
        CheckpointError: a rule of the recipe fits no layer.
    """
    quantised = _layers(checkpoint, recipe)
    dtype = getattr(mx, recipe.dtype)
    parts = [
        _part(name, tensor, quantised.get(name.removesuffix(".weight"), DENSE), recipe.group_size, dtype)
        for name, tensor in sorted(checkpoint.tensors.items())
        if not (name.startswith(HEAD) and checkpoint.head.reason)
    ]
    head = tuple(part for part in parts if part.name.startswith(HEAD))
    return Plan(
        trunk=_shards([part for part in parts if not part.name.startswith(HEAD)]),
        head=Shard(HEAD_FILE, head) if head else None,
        other=tuple(_other(checkpoint)),
        bits=quantised,
        largest=max(tensor.nbytes for tensor in checkpoint.tensors.values()),
    )


def _layers(checkpoint: Checkpoint, recipe: Recipe) -> dict[str, int]:
    """Bits of each layer of the trunk that is to be quantised, by path."""
    module: nn.Module = checkpoint.architecture.build(checkpoint.text_config, False)
    able = [path for path, layer in module.named_modules() if hasattr(layer, "to_quantized")]
    for pattern, bits in recipe.rules:
        if not any(fnmatchcase(path, pattern) for path in able):
            raise CheckpointError(
                f"{checkpoint.folder}: the rule {pattern}={bits} fits no layer; layers are called {able[0]!r} and so on"
            )
    found = {}
    for path in able:
        weight = checkpoint.tensors[f"{path}.weight"]
        bits = recipe.bits_of(path)
        stored = f"{path}.scales" in checkpoint.tensors
        fits = weight.shape[-1] % recipe.group_size == 0 and not path.endswith(_ROUTERS)
        if bits != DENSE and fits and not stored:
            found[path] = bits
    return found


def _part(name: str, tensor: mx.array, bits: int, group_size: int, dtype: mx.Dtype) -> Part:
    if bits == DENSE:
        kept = tensor.dtype
        if always_fp32(name):
            kept = mx.float32
        elif mx.issubdtype(tensor.dtype, mx.floating):
            kept = dtype
        return Part(name, bits, (Entry.like(name, kept, tensor.shape),))
    path, (*rows, inputs) = name.removesuffix("weight"), tensor.shape
    scales = (*rows, inputs // group_size)
    return Part(
        name,
        bits,
        (
            Entry.like(name, mx.uint32, (*rows, inputs * bits // 32)),
            Entry.like(f"{path}scales", dtype, scales),
            Entry.like(f"{path}biases", dtype, scales),
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


def _other(checkpoint: Checkpoint) -> list[tuple[Path, Entry]]:
    """Tensors that are no part of the text model."""
    found: list[tuple[Path, Entry]] = []
    settings: Mapping[str, Any] = checkpoint.text_config
    for path in weight_files(checkpoint.folder)[0]:
        found += [
            (path, each) for each in entries(path) if checkpoint.architecture.canonical(each.name, settings) is None
        ]
    return found
