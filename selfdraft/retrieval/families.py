"""Which architectures of mlx-embeddings are read, and what each needs beside its own code. Reads no files.

mlx-embeddings has the layers; a family says how its tensors are named in the wild, where its hidden states come out,
and which settings of config.json it must not pass over in silence.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import CheckpointError

__all__ = ["FAMILIES", "Family", "family_of"]

# ModernBERT's two kinds of layers, and where mlx-embeddings has their bases.
_ROPE = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}

Hidden = Callable[[Any, mx.array, mx.array, mx.array], mx.array]


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        module: of `mlx_embeddings.models`.
        hidden: from the module, ids, mask and segment ids (each [rows, length]) to the last hidden states,
            [rows, length, width].
        prefix: that tensors have where a head was trained on top.
        activation: key of config.json, and the value which mlx-embeddings computes.
        pooling: as mlx-embeddings pools where the model's files do not say.
        reserved: positions that no token can have.
        prepare: what is set on the module before weights are read.
    """

    module: str
    hidden: Hidden
    prefix: str = ""
    activation: tuple[str, str] = ("hidden_act", "gelu")
    pooling: str = "mean"
    reserved: int = 0
    prepare: Callable[[Any], None] = lambda module: None

    def build(self, config: Mapping[str, Any]) -> Any:
        """The module, with random weights.

        Raises:
            CheckpointError: the configuration names something that mlx-embeddings would not compute.
        """
        code = importlib.import_module(f"mlx_embeddings.models.{self.module}")
        settings = self._settings(config)
        try:
            module = code.Model(code.ModelArgs.from_dict(settings))
        except (TypeError, ValueError, KeyError, ZeroDivisionError) as error:
            raise CheckpointError(f"config.json does not describe a {self.module} model: {error}") from error
        self.prepare(module)
        return module

    def _settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        key, known = self.activation
        if (given := config.get(key, known)) != known:
            raise CheckpointError(f"config.json: {key} {given!r} is not supported; {self.module} has {known!r}")
        if (kind := config.get("position_embedding_type", "absolute")) != "absolute":
            raise CheckpointError(f"config.json: position_embedding_type {kind!r} is not supported, only 'absolute'")
        return {**config, **_rope(config), "architectures": []}


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings under the names that mlx-embeddings reads; newer files have them in an object.

    Raises:
        CheckpointError: positions are scaled, which mlx-embeddings would not do.
    """
    given = config.get("rope_parameters") or {}
    parts = (
        {"rope_theta": given}
        if "rope_theta" in given
        else {_ROPE.get(name, name): part for name, part in given.items()}
    )
    found = {}
    for name, part in {**parts, "rope_scaling": config.get("rope_scaling")}.items():
        if not isinstance(part, dict):
            continue
        kind = part.get("rope_type", part.get("type", "default"))
        if kind != "default":
            raise CheckpointError(f"config.json: rotary positions of type {kind!r} are not supported")
        if "rope_theta" in part:
            found[name] = part["rope_theta"]
    return found


def _bert(module: Any, ids: mx.array, mask: mx.array, segments: mx.array) -> mx.array:
    states: mx.array = module(ids, token_type_ids=segments, attention_mask=mask).last_hidden_state
    return states


def _decoder(module: Any, ids: mx.array, mask: mx.array, segments: mx.array) -> mx.array:
    states: mx.array = module.model(ids, attention_mask=mask)  # the outer module pools
    return states


def _modernbert(module: Any, ids: mx.array, mask: mx.array, segments: mx.array) -> mx.array:
    states: mx.array = module.model(ids, attention_mask=mask)["last_hidden_state"]  # likewise
    return states


def _exact_gelu(module: Any) -> None:
    """ModernBERT was trained with the exact function, and the layers here approximate it."""
    for layer in module.model.layers:
        layer.mlp.act = nn.GELU()


FAMILIES: dict[str, Family] = {
    "bert": Family("bert", _bert, prefix="bert."),
    "xlm-roberta": Family("xlm_roberta", _bert, prefix="roberta.", reserved=2),
    "modernbert": Family("modernbert", _modernbert, activation=("hidden_activation", "gelu"), prepare=_exact_gelu),
    "qwen3": Family("qwen3", _decoder, activation=("hidden_act", "silu"), pooling="lasttoken"),
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json.

    Raises:
        CheckpointError: none that is read here.
    """
    kind = str(config.get("model_type", "")).lower()
    if kind not in FAMILIES:
        raise CheckpointError(
            f"config.json: model_type {config.get('model_type')!r} is none that embeds or ranks here; there is "
            f"{', '.join(FAMILIES)}"
        )
    return FAMILIES[kind]
