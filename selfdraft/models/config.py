"""From config.json to the arguments of mlx-lm's layers, with what is wrong in it named."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import CheckpointError

__all__ = [
    "check_kinds",
    "check_routing",
    "each_layer",
    "layer_args",
    "layers_built",
    "positive_number",
    "whole_number",
    "with_rope",
]

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


def check_kinds(args: Any, but: Collection[str] = ()) -> None:
    """Hold the arguments of mlx-lm's layers to what these declare.

    Args:
        args: a dataclass; whole numbers and others are not told apart in it.
        but: fields that take more than their declaration says.

    Raises:
        CheckpointError: a field has a value of another kind, by name.
    """
    hints = get_type_hints(type(args))
    for field in fields(args):
        value = getattr(args, field.name)
        if field.name not in but and not _is_of_kind(value, hints[field.name]):
            raise CheckpointError(f"config.json: {field.name} has a value of the wrong kind, {value!r}")


def _is_of_kind(value: Any, kind: Any) -> bool:
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return any(_is_of_kind(value, each) for each in get_args(kind))
    if kind is Any:
        return True
    if kind in (int, float):
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, origin or kind)


@contextmanager
def layers_built() -> Iterator[None]:
    """While layers are built from a config.

    Raises:
        CheckpointError: what it says of them cannot be built.
    """
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"config.json: its layers cannot be built ({error})") from error


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


def check_routing(config: Mapping[str, Any], experts: int, chosen: int) -> None:
    """Whether a token can choose so many of the experts: of the best `topk_group` of `n_group` groups, each of which is
    judged by its best two.

    Raises:
        CheckpointError: it cannot.
    """
    groups, best = whole_number(config, "n_group", default=1), whole_number(config, "topk_group", default=1)
    alone = groups > 1 and experts // groups < 2
    if experts % groups or best > groups or chosen > experts // groups * best or alone:
        raise CheckpointError(
            f"config.json: num_experts_per_tok {chosen} of n_routed_experts {experts} cannot be chosen in topk_group "
            f"{best} of n_group {groups}"
        )


def positive_number(config: Mapping[str, Any], name: str, *, within: str = "", most: float = math.inf) -> float:
    """A field that is a number above 0.

    Args:
        within: the field that `config` is of, for the message.
        most: the largest it can be.

    Raises:
        CheckpointError: it is missing or none.
    """
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most or value == math.inf:
        bound = "" if most == math.inf else f" and at most {most:g}"
        raise CheckpointError(f"config.json: {within}{name} must be a number above 0{bound}, not {value!r}")
    return value


def each_layer(config: Mapping[str, Any], name: str, layers: int, among: Collection[Any] = ()) -> list[Any]:
    """A field that has a value for each of the first `layers` layers, at least.

    Args:
        among: the values it may have; any number above 0 if there are none.

    Raises:
        CheckpointError: it has fewer, or another value, or is missing.
    """
    values = config.get(name)
    if not isinstance(values, list) or len(values) < layers:
        found = f"{len(values)} values" if isinstance(values, list) else repr(values)
        raise CheckpointError(f"config.json: {name} must have a value for each of {layers} layers, not {found}")
    for value in values[:layers]:
        if not among:
            positive_number({name: value}, name)
        elif value not in among:
            raise CheckpointError(f"config.json: {name} holds {value!r}; known: {', '.join(map(repr, among))}")
    return values


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
