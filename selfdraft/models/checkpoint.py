"""What a model folder holds. The one classifier: load, inspect and every later tool go by it.

Weights are mapped, not read: names, shapes and dtypes come from the safetensors headers, and only norm weights
(a few kilobytes) are evaluated, to tell how they are stored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..errors import CheckpointError
from . import foreign
from .base import COMPANION, Architecture, architecture, is_companion, model_types
from .fit import describe_misfits, misfits, quantise_as_stored
from .folder import companion_of, indexed, read_json, refuse_incomplete, weight_files
from .tensor_header import entries

__all__ = [
    "Checkpoint",
    "Companion",
    "HeadReport",
    "accept",
    "classify",
    "norm_convention",
]

NormConvention = Literal["zero-centred", "one-plus", "plain"]
Change = Callable[[dict[str, mx.array]], dict[str, mx.array]]
HEAD = "mtp."
# What layers raise that are built of a config that lies.
_UNBUILDABLE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_MOST_LAYERS = 4096  # layers are built to learn their shapes: a number out of all reason would never end
_EXPERTS = re.compile(r"\.switch_mlp\.\w+\.weight$")


class Companion(CheckpointError):
    """A head that is a checkpoint of its own, in the place of a model."""


@dataclass(frozen=True)
class HeadReport:
    """The MTP head of a checkpoint.

    Attributes:
        source: "embedded" in the shards, "separate" (an mtp*.safetensors the index does not list, or a checkpoint of
            its own), or "none".
        tensors: how many tensors it has.
        norms: how its norm weights are stored, "plain" where the family has one way; None without a head.
        reason: why it is not used, for people; empty when it is usable.
    """

    source: Literal["embedded", "separate", "none"]
    tensors: int
    norms: NormConvention | None
    reason: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """A classified folder.

    Attributes:
        folder: where it lies.
        config, text_config: config.json and its text part (the same when flat).
        generation_config: generation_config.json, or empty.
        architecture: how to build it.
        tensors: our parameter name -> lazily mapped array, as stored.
        layout: "huggingface" or "mlx": by the convolution's axes, or where there is none by what the files say.
        norms: how the trunk's norm weights are stored, "plain" where the family has one way.
        head: what there is of a head.
        notes: lines a user should read.
    """

    folder: Path
    config: Mapping[str, Any]
    text_config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    architecture: Architecture
    tensors: dict[str, mx.array]
    layout: Literal["huggingface", "mlx"]
    norms: NormConvention
    head: HeadReport
    notes: list[str] = field(default_factory=list)

    @property
    def model_type(self) -> str:
        """`model_type` of the text part."""
        return str(self.text_config["model_type"])

    def mapped_anew(self, change: Change = dict) -> dict[str, mx.array]:
        """`tensors` that nobody else holds: what is read of them is held once, by whoever has them.

        Args:
            change: makes other tensors of what is stored, in MLX's layout but not put together yet.

        Raises:
            CheckpointError: the files changed and cannot be read any more.
        """
        stored = _stored(self.folder, self.architecture, self.text_config, [])[0]
        return _assembled(self.folder, self.architecture, stored, self.text_config, change)[0]

    def tower(self) -> dict[str, mx.array]:
        """Tensors of the vision tower by their names in mlx-vlm, mapped and not read; empty if there is none."""
        found: dict[str, mx.array] = {}
        for path in weight_files(self.folder)[0]:
            stored = mx.load(str(path))
            assert isinstance(stored, dict)
            found |= {ours: x for name, x in stored.items() if (ours := self.architecture.tower(name)) is not None}
        return found

    @property
    def companion(self) -> Path | None:
        """The checkpoint that the head is, where that is one of its own."""
        return companion_of(self.folder, self.architecture.companion)

    @property
    def quantised(self) -> bool:
        """Whether any weight is stored quantised."""
        return any(name.endswith(".scales") for name in self.tensors)

    @property
    def dense_experts(self) -> bool:
        """Whether it has experts that are not stored quantised."""
        layers = [name.removesuffix("weight") for name in self.tensors if _EXPERTS.search(name)]
        return any(f"{layer}scales" not in self.tensors for layer in layers)

    def weight_bytes(self, dtype: mx.Dtype | None, *, tower: bool = False) -> int:
        """Bytes of the weights in memory, its head's too if that is usable.

        Args:
            dtype: of floating tensors; None is as stored.
            tower: whether the vision tower counts.
        """
        used = [x for name, x in self.tensors.items() if not (self.head.reason and name.startswith(HEAD))]
        used += self.tower().values() if tower else ()
        return sum(
            tensor.size * dtype.size if dtype and mx.issubdtype(tensor.dtype, mx.floating) else tensor.nbytes
            for tensor in used
        )

    @property
    def stored_dtype(self) -> mx.Dtype:
        """Of dense weights; of quantised ones, of their scales, which is what they compute in."""
        embedding = self.architecture.required[0]
        return self.tensors.get(embedding.removesuffix("weight") + "scales", self.tensors[embedding]).dtype


def classify(folder: Path) -> Checkpoint:
    """Look at a model folder without reading its weights.

    Raises:
        CheckpointError: not a model folder, an unsupported family or quantisation, a broken or missing file.
    """
    config, text_config, family, notes = _configured(folder)
    module = _module(folder, family, text_config)
    generation = folder / "generation_config.json"

    stored, head_source = _stored(folder, family, text_config, notes)
    layout = _layout(folder, stored)
    tensors, broken = _assembled(folder, family, stored, text_config)
    notes += family.remarks(stored, text_config)
    absent = [name for name in family.required if name not in tensors]
    if absent:
        raise CheckpointError(f"{folder}: no tensor {absent[0]!r} in the weights; the download may be incomplete")
    trunk = {name: tensor for name, tensor in tensors.items() if not name.startswith(HEAD)}
    if problems := describe_misfits(module, trunk):
        raise CheckpointError(f"{folder}: the weights do not fit config.json: {problems}; fetch the checkpoint again")
    try:
        norms = _norms(tensors, family, layout, head=False)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    return Checkpoint(
        folder=folder,
        config=config,
        text_config=text_config,
        generation_config=read_json(generation) if generation.exists() else {},
        architecture=family,
        tensors=tensors,
        layout=layout,
        norms=norms,
        head=_head(tensors, family, layout, head_source, text_config, broken),
        notes=notes,
    )


def accept(folder: Path, files: Collection[str]) -> None:
    """Refuse a model by its small files alone, before its weights are fetched.

    Args:
        folder: holds its JSON files.
        files: names of all that it will hold.

    Raises:
        CheckpointError: as `classify` would, so far as can be told.
    """
    _, text_config, family, _ = _configured(folder)
    _module(folder, family, text_config)
    listed = indexed(folder)
    if listed is None:
        listed = [name for name in files if name.startswith("model") and name.endswith(".safetensors")]
    refuse_incomplete(folder, listed, files)


def _configured(folder: Path) -> tuple[dict[str, Any], dict[str, Any], Architecture, list[str]]:
    """The configuration, its text part, the family that this names, and what a user should know."""
    config = read_json(folder / "config.json")
    text_config = {**config, **_object(config["text_config"], folder)} if "text_config" in config else config
    if is_companion(str(config.get("model_type"))):
        raise Companion(
            f"{folder}: this is the head of another model ({config['model_type']}), which drafts with it once it lies "
            "beside that: load the model itself"
        )
    family = _family(text_config, folder)
    notes = _foreign_quantisation(text_config, folder)
    companion = companion_of(folder, family.companion)
    if companion:
        text_config = {**text_config, COMPANION: read_json(companion / "config.json")}
    layers = text_config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        raise CheckpointError(f"{folder}: config.json: num_hidden_layers is {layers}, more than any model has")
    return config, text_config, family, notes


def _module(folder: Path, family: Architecture, text_config: Mapping[str, Any]) -> nn.Module:
    """The trunk that a configuration describes; nothing is evaluated."""
    try:
        return _built(family, text_config, False)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def _built(family: Architecture, text_config: Mapping[str, Any], with_head: bool) -> nn.Module:
    """Raises ValueError, with what is wrong in config.json."""
    try:
        return family.build(text_config, with_head)
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    except _UNBUILDABLE as error:
        said = str(error).partition("\n")[0]  # of MLX, which lists signatures below it
        raise ValueError(f"config.json describes no model ({said}); fetch the checkpoint again") from error


def _stored(
    folder: Path, family: Architecture, text_config: Mapping[str, Any], notes: list[str]
) -> tuple[dict[str, mx.array], Literal["embedded", "separate", "none"]]:
    """Our names of what the folder holds, mapped and not read, and where its head is."""
    listed, separate = weight_files(folder)
    companion = companion_of(folder, family.companion)
    if companion:
        separate += weight_files(companion)[0]
    tensors = _canonical(listed, family, text_config, notes)
    source: Literal["embedded", "separate", "none"] = (
        "embedded" if any(name.startswith(HEAD) for name in tensors) else "none"
    )
    if source == "none" and separate:
        found = _canonical(separate, family, text_config, notes)
        tensors |= {name if name.startswith(HEAD) else HEAD + name: tensor for name, tensor in found.items()}
        source = "separate"
    if text_config.get("tie_word_embeddings") and "lm_head.weight" in tensors:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("lm_head.")}
        notes.append("lm_head.weight is stored although the embeddings are tied: the embedding is used")
    return tensors, source


def norm_convention(weights: Iterable[mx.array], otherwise: NormConvention) -> NormConvention:
    """How a whole set of norm weights is stored: as w (zero-centred, effective 1 + w) or as 1 + w.

    Decided by all values together, since a single norm may have drifted anywhere: stored as 1 + w hardly any
    value is negative, stored as w about half of them are. (Reference checkpoint, stored as 1 + w: trunk median 0.59,
    head 0.94, none negative; as w: 78% and 64% negative.)

    Args:
        weights: every norm weight of a trunk, or of a head.
        otherwise: the answer where the values do not say.
    """
    values = np.concatenate([np.array(weight.astype(mx.float32)).reshape(-1) for weight in weights])
    negative, median = float(np.mean(values < 0)), float(np.median(values))
    if negative > 0.02 or median < 0.1:
        return "zero-centred"
    if median > 0.75:
        return "one-plus"
    return otherwise


def _object(value: Any, folder: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{folder}: text_config in config.json is {type(value).__name__}, not a JSON object")
    return value


def _family(text_config: Mapping[str, Any], folder: Path) -> Architecture:
    name = text_config.get("model_type")
    family = architecture(str(name))
    if family is None:
        raise CheckpointError(f"{folder}: model_type {name!r} is not supported; supported: {', '.join(model_types())}")
    return family


def _foreign_quantisation(config: Mapping[str, Any], folder: Path) -> list[str]:
    """What a user should know of weights that are quantised otherwise than by MLX."""
    settings = _foreign(config)
    if settings is None:
        return []
    if reason := foreign.refusal(settings):
        raise CheckpointError(f"{folder}: {reason} are not supported; take the bf16 checkpoint or an MLX build")
    return [foreign.note(settings)]


def _foreign(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The settings of a quantisation that is not MLX's, if there is one."""
    settings = config.get("quantization_config") or config.get("compression_config") or {}
    if not isinstance(settings, dict):
        raise CheckpointError(f"config.json: quantization_config is {settings!r}, not a JSON object")
    return None if "quantization" in config or "quant_method" not in settings else settings


def _assembled(
    folder: Path,
    family: Architecture,
    stored: dict[str, mx.array],
    text_config: Mapping[str, Any],
    change: Change = dict,
) -> tuple[dict[str, mx.array], str]:
    """Our parameters, mapped and not read; without the head's, and why, where only these cannot be put together."""
    if settings := _foreign(text_config):
        try:
            stored = foreign.in_mlx_layout(stored, settings, lambda name: family.fp8_rows(name, text_config))
        except ValueError as error:
            raise CheckpointError(
                f"{folder}: the weights do not fit config.json: {error}; fetch the checkpoint again"
            ) from error
    stored = change(stored)
    try:
        return family.assemble(stored, text_config), ""
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    except (KeyError, ValueError) as error:
        said = f"no tensor {error}" if isinstance(error, KeyError) else str(error)
        trunk = {name: tensor for name, tensor in stored.items() if not name.startswith(HEAD)}
        try:
            return family.assemble(trunk, text_config), f"its tensors cannot be put together: {said}"
        except (KeyError, ValueError):
            raise CheckpointError(
                f"{folder}: the weights do not fit config.json: {said}; fetch the checkpoint again"
            ) from error


def _layout(folder: Path, stored: Mapping[str, mx.array]) -> Literal["huggingface", "mlx"]:
    convolutions = [tensor for name, tensor in stored.items() if name.endswith("conv1d.weight")]
    if convolutions:
        return "huggingface" if any(tensor.shape[-1] != 1 for tensor in convolutions) else "mlx"
    loaded: Any = mx.load(str(weight_files(folder)[0][0]), return_metadata=True)
    return "mlx" if loaded[1].get("format") == "mlx" else "huggingface"


def _canonical(
    files: list[Path], family: Architecture, text_config: Mapping[str, Any], notes: list[str]
) -> dict[str, mx.array]:
    tensors: dict[str, mx.array] = {}
    skipped = 0
    for path in files:
        entries(path)  # a file that lies of itself is refused
        try:
            stored = mx.load(str(path))
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"{path}: not a readable safetensors file ({error}); fetch it again") from error
        assert isinstance(stored, dict)
        for name, tensor in stored.items():
            ours = family.canonical(name, text_config)
            if ours is None:
                skipped += family.tower(name) is None
            elif ours in tensors:
                raise CheckpointError(f"{path}: tensor {name!r} is stored twice in this checkpoint")
            elif ours:
                tensors[ours] = tensor
    if skipped:
        notes.append(f"{skipped} tensors of other modalities are left out: text only")
    return tensors


def _norms(tensors: Mapping[str, mx.array], family: Architecture, layout: str, *, head: bool) -> NormConvention:
    zero_centred = family.zero_centred
    if zero_centred is None:
        return "plain"
    weights = {name: t for name, t in tensors.items() if name.startswith(HEAD) == head and zero_centred(name)}
    if not weights:
        raise ValueError(f"the {'head' if head else 'trunk'} has no norm weights; the checkpoint is incomplete")
    if broken := [name for name, weight in weights.items() if not mx.isfinite(weight).all().item()]:
        raise ValueError(f"{broken[0]} holds values that are not finite; fetch the checkpoint again")
    return norm_convention(weights.values(), "zero-centred" if layout == "huggingface" else "one-plus")


def _head(
    tensors: dict[str, mx.array],
    family: Architecture,
    layout: str,
    source: Literal["embedded", "separate", "none"],
    text_config: Mapping[str, Any],
    broken: str,
) -> HeadReport:
    if broken:
        return HeadReport(source, 0, None, broken)
    claimed = text_config.get("mtp_num_hidden_layers") or text_config.get("num_nextn_predict_layers") or 0
    count = sum(name.startswith(HEAD) for name in tensors)
    if not count:
        reason = "the checkpoint has no MTP head"
        if family.companion:
            where = f"{family.companion.strip('-')!r} in this folder, or beside it as NAME{family.companion}"
            reason = f"the head of this family is a checkpoint of its own, and none is there: put it into {where}"
        if claimed:
            reason = f"config.json claims {claimed} MTP layer(s), but the weights hold no mtp tensors"
        return HeadReport("none", 0, None, reason)
    if problem := _head_problem(tensors, family, text_config):
        return HeadReport(source, count, None, problem)
    try:
        return HeadReport(source, count, _norms(tensors, family, layout, head=True))
    except ValueError as error:
        return HeadReport(source, count, None, f"the MTP head cannot be used: {error}")


def _head_problem(tensors: Mapping[str, mx.array], family: Architecture, text_config: Mapping[str, Any]) -> str:
    """Why these head tensors do not make a head; empty when they do."""
    head = {name: tensor for name, tensor in tensors.items() if name.startswith(HEAD)}
    try:
        module = _built(family, text_config, True)
        quantise_as_stored(module, head)
    except ValueError as error:
        return f"the MTP head cannot be used: {error}"
    parameters = dict(tree_flatten(module.parameters()))
    expected = {name: tensor for name, tensor in parameters.items() if name.startswith(HEAD)}
    if missing := sorted(expected.keys() - head.keys()):
        return f"the MTP head lacks {missing[0]!r} ({len(missing)} of {len(expected)} tensors missing)"
    if surplus := sorted(head.keys() - expected.keys()):
        return f"the MTP head has {surplus[0]!r}, which this architecture does not know ({len(surplus)} surplus)"
    return f"the MTP head cannot be used: {problems[0]}" if (problems := misfits(expected, head)) else ""
