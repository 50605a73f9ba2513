"""The two formats of LoRA adapters, mlx-lm's and PEFT's: what their configuration says. Knows names; no tensors.

mlx-lm (`mlx_lm.tuner.utils.load_adapters`): adapter_config.json with `fine_tune_type`, `lora_parameters` {rank,
scale}, and adapters.safetensors with LAYER.lora_a [in, r], LAYER.lora_b [r, out] and, of DoRA, LAYER.m [out]; of
stacked experts lora_a [E, r, in] and lora_b [E, out, r].

PEFT (`peft.LoraConfig`): adapter_config.json with `peft_type`, `r`, `lora_alpha`, `use_rslora`, `use_dora`, and
adapter_model.safetensors with base_model.model.LAYER.lora_A.weight [r, in], LAYER.lora_B.weight [out, r] and, of DoRA,
LAYER.lora_magnitude_vector [out].
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["AdapterConfig", "Part", "read_config"]

Part = Literal["a", "b", "m"]

_MLX_LM = re.compile(r"(?P<layer>.+)\.(?P<part>lora_a|lora_b|m)")
_PEFT = re.compile(
    r"(?:base_model\.model\.)?(?P<layer>.+)\.(?P<part>lora_A|lora_B|lora_magnitude_vector)(?:\.default)?(?:\.weight)?"
)
_PARTS: Mapping[str, Part] = {
    **{"lora_a": "a", "lora_b": "b", "m": "m"},
    **{"lora_A": "a", "lora_B": "b", "lora_magnitude_vector": "m"},
}
# Ways to begin that take something out of the base weights: what is left of these is not in the adapter.
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True)
class AdapterConfig:
    """What adapter_config.json says.

    Attributes:
        form: whose format it is.
        file: name of the weights beside it.
        pattern: of tensor names, with the groups `layer` and `part`.
        dora: whether each layer has a magnitude, too.
        base: the model it was made for, by name or path; "" if it is not said.
        transposed: whether matrices are stored as [in, r] and [r, out].
        rank: of a layer by its stored name. scale: of its update, by name and rank.
    """

    form: Literal["mlx-lm", "PEFT"]
    file: str
    pattern: re.Pattern[str]
    dora: bool
    base: str
    transposed: bool
    rank: Callable[[str], int]
    scale: Callable[[str, int], float]

    def split(self, name: str) -> tuple[str, Part] | None:
        """A tensor's layer and part; None if it is neither half of a low-rank update, nor its magnitude."""
        found = self.pattern.fullmatch(name)
        return (found["layer"], _PARTS[found["part"]]) if found else None


def read_config(config: Mapping[str, Any]) -> AdapterConfig:
    """Read adapter_config.json.

    Raises:
        ValueError: it describes no adapter that is taken, with what is wrong.
    """
    return _peft(config) if "peft_type" in config else _mlx_lm(config)


def _mlx_lm(config: Mapping[str, Any]) -> AdapterConfig:
    kind, given = config.get("fine_tune_type", "lora"), config.get("lora_parameters")
    if kind not in ("lora", "dora"):
        raise ValueError(
            f"fine_tune_type is {kind!r}, and only 'lora' and 'dora' are adapters: `mlx_lm.fuse` makes a model of it"
        )
    if not isinstance(given, dict):
        raise ValueError("it has neither peft_type nor lora_parameters: it is of neither PEFT's nor mlx-lm's format")
    rank, scale = _rank(given.get("rank"), "lora_parameters.rank"), _number(given.get("scale"), "lora_parameters.scale")
    return AdapterConfig(
        form="mlx-lm",
        file="adapters.safetensors",
        pattern=_MLX_LM,
        dora=kind == "dora",
        base=str(config.get("model") or ""),
        transposed=True,
        rank=lambda layer: rank,
        scale=lambda layer, rank: scale,
    )


def _peft(config: Mapping[str, Any]) -> AdapterConfig:
    _refuse_what_is_not_lora(config)
    rank, alpha = _rank(config.get("r"), "r"), _number(config.get("lora_alpha"), "lora_alpha")
    ranks = {layer: _rank(each, "rank_pattern") for layer, each in _pattern(config, "rank_pattern")}
    alphas = {layer: _number(each, "alpha_pattern") for layer, each in _pattern(config, "alpha_pattern")}
    root = bool(config.get("use_rslora"))
    return AdapterConfig(
        form="PEFT",
        file="adapter_model.safetensors",
        pattern=_PEFT,
        dora=bool(config.get("use_dora")),
        base=str(config.get("base_model_name_or_path") or ""),
        transposed=False,
        rank=lambda layer: _matching(ranks, layer, rank),
        # arXiv 2106.09685, section 4.1; with use_rslora arXiv 2312.03732.
        scale=lambda layer, rank: _matching(alphas, layer, alpha) / (math.sqrt(rank) if root else rank),
    )


def _refuse_what_is_not_lora(config: Mapping[str, Any]) -> None:
    if config["peft_type"] != "LORA":
        raise ValueError(f"peft_type is {config['peft_type']!r}, and only 'LORA' is taken")
    for name in ("fan_in_fan_out", "lora_bias", "use_qalora", "layer_replication", "alora_invocation_tokens"):
        if config.get(name):
            raise ValueError(f"{name} is {config[name]!r}, which is not taken: merge the adapter with PEFT instead")
    begin = str(config.get("init_lora_weights", "")).lower()
    if begin.startswith(_CHANGE_THE_BASE):
        raise ValueError(
            f"init_lora_weights is {config['init_lora_weights']!r}: what it took out of the base weights is missing "
            "here; save it with PEFT's path_initial_model_for_weight_conversion"
        )


def _pattern(config: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    found = config.get(name) or {}
    if not isinstance(found, dict):
        raise ValueError(f"{name} is {found!r}, not an object")
    return list(found.items())


def _matching(patterns: Mapping[str, Any], layer: str, otherwise: Any) -> Any:
    """As PEFT finds them: the first whose pattern is a layer's whole name, or the end of it behind a dot."""
    for pattern, value in patterns.items():
        try:
            if re.fullmatch(rf"(.*\.)?({pattern})", layer):
                return value
        except re.error as error:
            raise ValueError(f"a pattern {pattern!r} cannot be read ({error})") from error
    return otherwise


def _rank(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}, not a whole number of at least 1")
    return value


def _number(value: object, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}, not a finite number")
    return float(value)
