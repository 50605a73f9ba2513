"""From config.json to the arguments of mlx-lm's layers, with what is wrong in it named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ..errors import CheckpointError

__all__ = ["layer_args", "positive_number", "whole_number", "with_rope"]

Args = TypeVar("Args")

# Rotary embeddings that mlx-lm knows.
_UNSCALED = ("default", "longrope", "mrope", "proportional")
_SCALED = ("linear", "dynamic", "llama3", "yarn", "deepseek_yarn", "telechat3-yarn")


def layer_args(kind: type[Args], config: Mapping[str, Any], whole_numbers: Sequence[str]) -> Args:
    """The arguments of mlx-lm's layers of a family.

    Args:
        kind: a dataclass with `from_dict`.
        whole_numbers: fields that must be there, at least 1.

    Raises:
        CheckpointError: a field is missing or has no supported value, by name.
    """
    for name in whole_numbers:
        whole_number(config, name)
    try:
        args: Args = kind.from_dict(config)  # type: ignore[attr-defined]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: a field is missing or has a value of the wrong kind ({error})") from error
    return args


def whole_number(config: Mapping[str, Any], name: str, *, least: int = 1, default: int | None = None) -> int:
    """A field that is a whole number.

    Raises:
        CheckpointError: it is none, or less than `least`, or missing where there is no default.
    """
    value = config.get(name, default)
    if value is None:
        raise CheckpointError(f"config.json lacks {name!r}, which a {config.get('model_type')!r} model needs")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        kind = "a positive whole number" if least == 1 else f"a whole number of at least {least}"
        raise CheckpointError(f"config.json: {name} must be {kind}, not {value!r}")
    return value


def positive_number(config: Mapping[str, Any], name: str, *, within: str = "") -> float:
    """A field that is a number above 0.

    Args:
        within: the field that `config` is of, for the message.

    Raises:
        CheckpointError: it is missing or none.
    """
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise CheckpointError(f"config.json: {within}{name} must be a number above 0, not {value!r}")
    return value


def with_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config whose rotary settings stand where older ones have them: `rope_theta`, `rope_scaling` and
    `partial_rotary_factor` at the top, not in `rope_parameters`.

    Raises:
        CheckpointError: they are no object, or of a kind that mlx-lm does not know, or lack its factor.
    """
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    settings = config.get(field) or {}
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"config.json: {field} must be an object, not {settings!r}")
    rope = dict(settings)
    found = {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in (*_UNSCALED, *_SCALED):
        raise CheckpointError(f"config.json: {field} of type {kind!r} is not supported")
    if kind in _SCALED:
        positive_number(rope, "factor", within=f"{field}.")
    scaling = None if kind == "default" else {**rope, "type": kind}
    return {**config, **found, "rope_scaling": scaling}
