"""From config.json to the arguments of mlx-lm's layers, with what is wrong in it named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ..errors import CheckpointError

__all__ = ["layer_args", "whole_number", "with_rope"]

Args = TypeVar("Args")


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


def with_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config whose rotary settings stand where older ones have them: `rope_theta`, `rope_scaling` and
    `partial_rotary_factor` at the top, not in `rope_parameters`."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    found = {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaling = None if kind == "default" else {**rope, "type": kind}
    return {**config, **found, "rope_scaling": scaling}
