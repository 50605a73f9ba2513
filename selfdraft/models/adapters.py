"""A LoRA adapter as it lies in a folder: read, checked by itself, its layers under our names. Knows no model's weights.

LoRA (arXiv 2106.09685): W + scale b a. DoRA (arXiv 2402.09353): m (W + scale b a) / |W + scale b a|, row by row.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from ..errors import CheckpointError
from .adapter_formats import AdapterConfig, Part, read_config
from .base import Architecture
from .checkpoint import HEAD, Checkpoint
from .folder import read_json
from .tensor_header import entries

__all__ = ["CONFIG", "Adapter", "Update", "listed", "read_adapter"]

CONFIG = "adapter_config.json"

_SHOWN = 4
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".npz")
_BUILDS = re.compile(r"([-_.](mlx|bf16|fp16|fp8|mxfp4|nvfp4|awq|gptq|q?\d+([-_]?bits?)?))+$")


@dataclass(frozen=True)
class Update:
    """What an adapter adds to one weight, [out, in] or of stacked experts [E, out, in].

    Attributes:
        a: [r, in] or [E, r, in]. b: [out, r] or [E, out, r]. As stored.
        scale: of their product.
        magnitude: of the rows, [out], of DoRA; else None.
    """

    a: mx.array
    b: mx.array
    scale: float
    magnitude: mx.array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight it is for."""
        return (*self.b.shape[:-1], self.a.shape[-1])

    def change(self) -> mx.array:
        """scale b a, fp32, in the shape of the weight."""
        return self.scale * (self.b.astype(mx.float32) @ self.a.astype(mx.float32))

    def added_to(self, weight: mx.array, dtype: mx.Dtype | None = None) -> mx.array:
        """The weight with it, computed in fp32.

        Args:
            dtype: of the result; None for the weight's.
        """
        whole = weight.astype(mx.float32) + self.change()
        if self.magnitude is not None:
            whole = self.factors(whole)[:, None] * whole
        return whole.astype(dtype or weight.dtype)

    def factors(self, whole: mx.array) -> mx.array:
        """What DoRA multiplies the rows of W + scale b a [out, in] by: fp32 [out]."""
        assert self.magnitude is not None
        return self.magnitude.astype(mx.float32) / mx.linalg.norm(whole, axis=-1)


@dataclass(frozen=True)
class Adapter:
    """An adapter that was read.

    Attributes:
        folder: where it lies.
        form: "mlx-lm" or "PEFT".
        method: "LoRA" or "DoRA".
        base: the model it says that it was made for; "" if it does not.
        updates: by our name of the layer, such as model.layers.0.mlp.up_proj.
        digest: SHA-256 of its two files.
    """

    folder: Path
    form: Literal["mlx-lm", "PEFT"]
    method: Literal["LoRA", "DoRA"]
    base: str
    updates: Mapping[str, Update] = field(repr=False)
    digest: str

    @property
    def name(self) -> str:
        """Its folder's, for people."""
        return self.folder.resolve().name

    @property
    def ranks(self) -> list[int]:
        """Those that its updates have, in order."""
        return sorted({update.a.shape[-2] for update in self.updates.values()})

    @property
    def nbytes(self) -> int:
        """Of its tensors as stored."""
        return sum(update.a.nbytes + update.b.nbytes for update in self.updates.values())

    def describe(self) -> dict[str, Any]:
        """What a user may want to know of it."""
        return {
            "name": self.name,
            "format": self.form,
            "method": self.method,
            "ranks": self.ranks,
            "layers": len(self.updates),
            "base": self.base,
            "digest": self.digest,
        }

    def notes(self, model: str) -> list[str]:
        """Lines a user should read, of an adapter used with a model of this name."""
        rank, layers = ", ".join(map(str, self.ranks)), f"{len(self.updates)} layer{'s'[: len(self.updates) > 1]}"
        lines = [
            f"adapter {self.name} ({self.method} of rank {rank}, {layers}): the head was trained without it and drafts "
            "less well; `selfdraft bench --adapter-path` measures how much"
        ]
        if self.base and not _same_model(self.base, model):
            lines.append(f"adapter {self.name} says it was made for {self.base}; here it is used with {model}")
        return lines


def read_adapter(folder: Path, checkpoint: Checkpoint) -> Adapter:
    """Read an adapter for a checkpoint's family; whether it fits the weights shows when it is placed.

    Raises:
        CheckpointError: no such folder, no adapter in it, a pickle, a configuration or tensors that cannot be used;
            layers that are no part of the text model's trunk, by name.
    """
    folder = folder.expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"adapter {folder}: no such folder; give the one that holds {CONFIG}")
    if not (folder / CONFIG).exists():
        raise CheckpointError(f"adapter {folder}: no {CONFIG} there; give the folder in which an adapter was saved")
    try:
        config = read_config(read_json(folder / CONFIG))
    except ValueError as error:
        raise CheckpointError(f"adapter {folder / CONFIG}: {error}") from error
    path = folder / config.file
    halves = _halves(path, config, _tensors(path))
    found = {layer: _update(folder, config, layer, parts) for layer, parts in halves.items()}
    digest = hashlib.sha256((folder / CONFIG).read_bytes() + path.read_bytes()).hexdigest()
    return Adapter(
        folder=folder,
        form=config.form,
        method="DoRA" if config.dora else "LoRA",
        base=config.base,
        updates=_named(folder, found, checkpoint.architecture, checkpoint.text_config),
        digest=digest,
    )


def listed(names: list[str]) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _tensors(path: Path) -> dict[str, mx.array]:
    if not path.is_file():
        pickles = sorted(each.name for each in path.parent.iterdir() if each.suffix in _PICKLES)
        if pickles:
            raise CheckpointError(
                f"adapter {path.parent}: {pickles[0]} is no safetensors file and is not read, as such files can run "
                f"code: save the adapter as {path.name}"
            )
        raise CheckpointError(f"adapter {path.parent}: no {path.name} there; an adapter of this format has one")
    entries(path)  # a file that lies of itself is refused
    try:
        stored = mx.load(str(path))
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"adapter {path}: not a readable safetensors file ({error}); fetch it again") from error
    assert isinstance(stored, dict)
    if broken := sorted(name for name, tensor in stored.items() if not mx.isfinite(tensor).all().item()):
        raise CheckpointError(f"adapter {path}: {listed(broken)} holds values that are not finite; train it again")
    return stored


def _halves(path: Path, config: AdapterConfig, tensors: Mapping[str, mx.array]) -> dict[str, dict[Part, mx.array]]:
    """Tensors by stored layer and part."""
    if not tensors:
        raise CheckpointError(f"adapter {path}: it holds no tensors; train it again")
    found: dict[str, dict[Part, mx.array]] = {}
    strange = []
    for name, tensor in tensors.items():
        split = config.split(name)
        if split is None or split[1] in found.get(split[0], {}):
            strange.append(name)
        else:
            found.setdefault(split[0], {})[split[1]] = tensor
    if strange:
        raise CheckpointError(
            f"adapter {path}: {listed(sorted(strange))} is no part of a LoRA layer, and nothing is left out: whole "
            "modules, biases and embeddings are not taken"
        )
    return found


def _update(folder: Path, config: AdapterConfig, layer: str, parts: Mapping[Part, mx.array]) -> Update:
    """One layer's, checked by itself."""
    wanted: set[Part] = {"a", "b", "m"} if config.dora else {"a", "b"}
    if parts.keys() != wanted:
        odd = "lacks " + ", ".join(sorted(wanted - parts.keys())) if wanted - parts.keys() else "has a magnitude too"
        raise CheckpointError(f"adapter {folder}: {layer} {odd}, for {'DoRA' if config.dora else 'LoRA'}")
    a, b = parts["a"], parts["b"]
    if a.ndim != b.ndim or a.ndim not in (2, 3) or (a.ndim == 3 and config.dora):
        raise CheckpointError(f"adapter {folder}: {layer} has matrices of shapes {list(a.shape)} and {list(b.shape)}")
    if config.transposed and a.ndim == 2:
        a, b = a.T, b.T
    try:
        rank = config.rank(layer)
        scale = config.scale(layer, rank)
    except ValueError as error:
        raise CheckpointError(f"adapter {folder / CONFIG}: {error}") from error
    if not a.shape[-2] == b.shape[-1] == rank:
        raise CheckpointError(
            f"adapter {folder}: {layer} has rank {a.shape[-2]} and {b.shape[-1]}, where {CONFIG} says {rank}: the two "
            "files are of different adapters"
        )
    magnitude = parts.get("m")
    if magnitude is not None and magnitude.shape != (b.shape[0],):
        raise CheckpointError(
            f"adapter {folder}: the magnitude of {layer} has shape {list(magnitude.shape)}, not {[b.shape[0]]}"
        )
    return Update(a, b, scale, magnitude)


def _named(
    folder: Path, found: Mapping[str, Update], family: Architecture, text_config: Mapping[str, Any]
) -> dict[str, Update]:
    """Updates under our names."""
    named: dict[str, Update] = {}
    strange = []
    embedding = family.required[0].removesuffix(".weight")
    for layer, update in found.items():
        ours = (family.canonical(f"{layer}.weight", text_config) or "").removesuffix(".weight")
        if not ours or ours in named or ours == embedding or ours.startswith(HEAD):
            strange.append(layer)
        else:
            named[ours] = update
    if strange:
        raise CheckpointError(
            f"adapter {folder}: {listed(sorted(strange))} is no linear layer of the text model's trunk; an adapter is "
            "used whole or not at all: train it for the trunk's layers alone"
        )
    return named


def _same_model(base: str, model: str) -> bool:
    """Whether two names may be of one model: without owners, folders and what says how it is stored."""
    one, other = (
        _BUILDS.sub("", Path(name).name.lower()) for name in (base.partition("@")[0], model.partition("@")[0])
    )
    return one == other
