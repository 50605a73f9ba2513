"""Which JSON kinds a tool's schema allows for an argument. Knows JSON Schema's type words; validates nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["ANY", "Schemas", "argument", "kind_of", "resolved", "root_of"]

ANY = frozenset({"array", "boolean", "null", "number", "object", "string"})


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
        return _kinds(argument(root, key), root) or ANY


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


def _kinds(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """Kinds a schema names: the union over its alternatives, empty if it names none."""
    kinds: set[str] = set()
    seen: set[int] = set()  # references may be circular, and many
    left = [schema]
    while left:
        part = left.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        if "type" in part:
            words = part["type"] if isinstance(part["type"], list) else [part["type"]]
            kinds |= {"number" if word == "integer" else str(word) for word in words} & ANY
        elif "const" in part:
            kinds.add(kind_of(part["const"]))
        elif isinstance(part.get("enum"), list):
            kinds |= set(map(kind_of, part["enum"]))
        else:
            left += [entry for word in ("anyOf", "oneOf", "allOf") for entry in _items(part.get(word))]
            if isinstance(part.get("$ref"), str):
                left.append(resolved(part["$ref"], root))
    return frozenset(kinds)


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
