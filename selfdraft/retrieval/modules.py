"""What comes behind the encoder, as a model's own sentence-transformers files say. Reads JSON and small weights.

modules.json lists the steps; each of them but the first and the normalisation has a folder with a config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from ..errors import CheckpointError
from ..models.fit import describe_misfits
from ..models.folder import read_json, read_list
from .pooling import POOLINGS, normalised, pool

__all__ = ["Dense", "Normalize", "Pooling", "Step", "read_steps"]

_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "Identity": lambda x: x,
    "Tanh": mx.tanh,
    "ReLU": nn.relu,
    "GELU": nn.gelu,
}


class Step(Protocol):
    """One step behind the encoder."""

    def __call__(self, values: mx.array, mask: mx.array) -> mx.array:
        """From states [rows, length, width], or vectors [rows, width], to vectors; mask is [rows, length]."""


@dataclass(frozen=True)
class Pooling:
    """States of tokens to one vector a text."""

    ways: tuple[str, ...]

    def __call__(self, values: mx.array, mask: mx.array) -> mx.array:
        """See `Step`."""
        return pool(values, mask, self.ways)

    @classmethod
    def read(cls, folder: Path) -> Pooling:
        """From its folder.

        Raises:
            CheckpointError: no config.json, or a way that is not known.
        """
        path = folder / "config.json"
        if not path.exists():
            raise CheckpointError(
                f"{path} is named in modules.json and missing: how the model pools is not known. Fetch the original "
                "model with its folders"
            )
        config = read_json(path)
        if config.get("include_prompt", True) is not True:
            raise CheckpointError(f"{path}: include_prompt false is not supported; choose another model")
        given = config.get("pooling_mode")
        ways = [way for flag, way in _FLAGS.items() if config.get(flag)]
        if given is not None:
            ways = [given] if isinstance(given, str) else list(given)
        unknown = [way for way in ways if way not in POOLINGS]
        if unknown or not ways:
            raise CheckpointError(f"{path}: {unknown[0] if unknown else 'nothing'!r} is no way of pooling known here")
        return cls(tuple(ways))


class Dense(nn.Module):
    """A linear layer with an activation, in fp32."""

    def __init__(self, inputs: int, outputs: int, bias: bool, activation: str) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias)
        self._activation = _ACTIVATIONS[activation]

    def __call__(self, values: mx.array, mask: mx.array) -> mx.array:
        """See `Step`."""
        return self._activation(self.linear(values))

    @classmethod
    def read(cls, folder: Path) -> Dense:
        """From its folder.

        Raises:
            CheckpointError: files are missing, or do not fit each other; an activation that is not known.
        """
        config = read_json(folder / "config.json")
        activation = str(config.get("activation_function", "Tanh")).rsplit(".", 1)[-1]
        if activation not in _ACTIVATIONS:
            raise CheckpointError(f"{folder}: activation {activation!r} is not supported")
        weights = folder / "model.safetensors"
        if not weights.is_file():
            raise CheckpointError(f"{weights} is missing; other weight formats are not read")
        try:
            step = cls(config["in_features"], config["out_features"], bool(config.get("bias", True)), activation)
            stored: dict[str, mx.array] = mx.load(str(weights))  # type: ignore[assignment]
            tensors = {name: tensor.astype(mx.float32) for name, tensor in stored.items()}
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{folder}: no usable dense layer ({error}); fetch the model again") from error
        if problems := describe_misfits(step, tensors):
            raise CheckpointError(f"{folder}: the weights do not fit its config.json: {problems}")
        step.load_weights(list(tensors.items()))
        mx.eval(step.parameters())
        return step


@dataclass(frozen=True)
class Normalize:
    """Vectors of length 1."""

    def __call__(self, values: mx.array, mask: mx.array) -> mx.array:
        """See `Step`."""
        return normalised(values)


_READERS: Mapping[str, Callable[[Path], Step]] = {
    "Pooling": Pooling.read,
    "Dense": Dense.read,
    "Normalize": lambda folder: Normalize(),
}


def read_steps(folder: Path, default: str) -> tuple[Step, ...]:
    """The steps behind the encoder.

    Args:
        folder: of the model.
        default: way of pooling where there is no modules.json; vectors are normalised then, as mlx-embeddings does.

    Raises:
        CheckpointError: a step that is not known, or whose files cannot be used.
    """
    path = folder / "modules.json"
    if not path.exists():
        return Pooling((default,)), Normalize()
    steps = []
    for number, entry in enumerate(read_list(path)):
        kind, place = _entry(path, entry)
        if kind == "Transformer" and number == 0:
            continue
        if kind not in _READERS:
            raise CheckpointError(f"{path}: a step of type {kind!r} is not supported; there is {', '.join(_READERS)}")
        steps.append(_READERS[kind](folder / place))
    if not steps or not isinstance(steps[0], Pooling):
        raise CheckpointError(f"{path}: no Pooling behind the Transformer; this is no model of one vector a text")
    return tuple(steps)


def _entry(path: Path, entry: Any) -> tuple[str, str]:
    """Kind and folder of a step; a folder is one part below the model's."""
    kind, place = (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else (None, None)
    if not isinstance(kind, str) or not isinstance(place, str) or Path(place).name != place:
        raise CheckpointError(f"{path}: {entry!r} is no step with a type and a folder of its own")
    return kind.rsplit(".", 1)[-1], place
