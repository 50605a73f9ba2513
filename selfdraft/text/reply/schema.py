"""Which JSON kinds a tool's schema allows for an argument. Knows JSON Schema's type words; validates nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["ANY", "Schemas", "argument", "kind_of", "resolved", "root_of"]

ANY = frozenset({"array", "boolean", "null", "number", "object", "string"})
_DEEPEST = 16  # references may be circular


class Schemas:
    """The argument schemas of the declared tools.

    Args:
        tools: definitions as clients send them: OpenAI's `{"function": {"name", "parameters"}}`, the same without the
            wrapper, or Anthropic's `{"name", "input_schema"}`.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        specs = [_mapping(tool.get("function", tool)) for tool in tools]
        self._parameters = {
            str(spec.get("name")): root_of(spec.get("parameters", spec.get("input_schema"))) for spec in specs
        }

    def kinds(self, tool: str, key: str) -> frozenset[str]:
        """Kinds allowed for argument `key` of `tool`; ANY where the schema says nothing."""
        root = self._parameters.get(tool, {})
        return _kinds(argument(root, key), root, _DEEPEST) or ANY


def root_of(parameters: object) -> Mapping[str, Any]:
    """A tool's schema, in place of a reference into its own definitions what that leads to."""
    root = _mapping(parameters)
    if not isinstance(root.get("$ref"), str):
        return root
    return {**_mapping(resolved(root["$ref"], root)), **{name: root[name] for name in root if name != "$ref"}}


def argument(root: Mapping[str, Any], key: str) -> object:
    """The schema of an argument; None if nothing is said about it."""
    return _mapping(root.get("properties")).get(key, root.get("additionalProperties"))


def kind_of(value: object) -> str:
    """The JSON kind of a parsed value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _kinds(schema: object, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    """Kinds a schema names: the union over its alternatives, empty if it names none."""
    if not isinstance(schema, Mapping) or depth == 0:
        return frozenset()
    if "type" in schema:
        words = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return frozenset("number" if word == "integer" else str(word) for word in words) & ANY
    if "const" in schema:
        return frozenset({kind_of(schema["const"])})
    if isinstance(schema.get("enum"), list):
        return frozenset(map(kind_of, schema["enum"]))
    parts: list[object] = [part for word in ("anyOf", "oneOf", "allOf") for part in _items(schema.get(word))]
    if isinstance(schema.get("$ref"), str):
        parts.append(resolved(schema["$ref"], root))
    return frozenset().union(*(_kinds(part, root, depth - 1) for part in parts))


def resolved(reference: str, root: Mapping[str, Any]) -> object:
    """What a local reference ("#/$defs/Colour") points to; None if nothing."""
    found: object = root
    for step in reference.removeprefix("#").split("/")[1:]:
        found = _mapping(found).get(step.replace("~1", "/").replace("~0", "~"))
    return found


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _items(value: object) -> Iterable[object]:
    return value if isinstance(value, list) else ()
