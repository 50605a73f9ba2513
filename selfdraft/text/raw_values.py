"""Which raw texts stand for values of a JSON schema, where arguments are written without quotes between tags.

Knows JSON Schema, how `reply.values` reads such a text, and the terminals of llguidance's Lark; no tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..errors import InvalidRequest
from .reply.schema import kind_of, resolved

__all__ = ["raw_values"]

_ANY = "/(?s:.*)/"
_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"
_INTEGER = r"/-?(0|[1-9][0-9]*)/"
_SPACE = r"[\s\x1c-\x1f]*"  # what Python strips
_BARE = re.compile(r"(?s)\\.|/")
_MOST_VISITS = 4000
_DEEPEST = 64
_LARGEST = 64 * 1024  # characters of an expression

# Texts that are read as a value of a kind where that kind is allowed; of "[" and "{" more than are read so.
_READ_AS = {
    "array": rf"/{_SPACE}\[(?s:.*)/",
    "boolean": rf"/{_SPACE}(true|false|True|False){_SPACE}/",
    "null": rf"/{_SPACE}(null|None){_SPACE}/",
    "number": rf"/{_SPACE}{_NUMBER}{_SPACE}/",
    "object": rf"/{_SPACE}\{{(?s:.*)/",
}
_WRITTEN = {"boolean": '"true" | "false"', "null": '"null"', "number": f"/{_NUMBER}/", "string": _ANY}

# What else restricts a value, and is not understood; nor are the words that are, where their value is malformed.
_UNSUPPORTED = frozenset(
    {"$dynamicRef", "$recursiveRef", "$ref", "allOf", "anyOf", "else", "enum", "if", "not", "oneOf", "then", "type"}
)
_LIMITS = {
    "number": frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"}),
    "string": frozenset({"maxLength", "minLength", "pattern"}),
}


def raw_values(schema: object, root: Mapping[str, Any], kinds: frozenset[str], closer: str) -> str | None:
    """An expression over terminals: the texts that are read back as a string, number, boolean or null of the schema.

    Args:
        schema: of one argument.
        root: where references lead.
        kinds: those its reader allows, "string" among them.
        closer: what no text may hold.

    Returns:
        The expression; None if the schema accepts no such value.

    Raises:
        InvalidRequest: the schema has a keyword that this cannot express; the message names it.
    """
    parts = [_Values(root, kind).accepted(schema) for kind in sorted(kinds & _WRITTEN.keys() - {"string"})]
    strings = _Values(root, "string").accepted(schema)
    if strings is not None:
        others = [f"~{_READ_AS[kind]}" for kind in sorted(kinds - {"string"})]
        closed = f"~({_ANY} {_quoted(closer)} {_ANY})"
        parts.append(_all([strings, closed, *others]))
    return _either([part for part in parts if part is not None])


class _Values:
    """The values of one kind that a schema accepts: strings as they are, others as JSON."""

    def __init__(self, root: Mapping[str, Any], kind: str) -> None:
        self._root = root
        self._kind = kind
        self._any = _WRITTEN[kind]
        self._visits = 0  # references make a small schema large
        self._depth = 0  # or endless

    def accepted(self, schema: object) -> str | None:
        """An expression; None: there is no such value."""
        if schema is False:
            return None
        if not isinstance(schema, Mapping):
            return self._any
        self._visits += 1
        if self._visits > _MOST_VISITS or self._depth == _DEEPEST:
            raise _refused("a schema that is so large, or refers to itself,")
        self._depth += 1
        parts = [self._keyword(keyword, value) for keyword, value in schema.items()]
        self._depth -= 1
        # What restricts nothing is left out: it is costly beside many alternatives.
        return None if None in parts else _all([part for part in parts if part and part != self._any] or [self._any])

    def _keyword(self, keyword: str, value: Any) -> str | None:
        """What one keyword accepts."""
        text = self._kind == "string"
        match keyword, value:
            case "type", str() | list():
                return _typed(value if isinstance(value, list) else [value], self._kind)
            case ("enum", list()) | ("const", _):
                choices = [c for c in (value if keyword == "enum" else [value]) if kind_of(c) == self._kind]
                return _either([_quoted(choice if text else json.dumps(choice)) for choice in choices])
            case ("pattern", str()) if text:
                return _searched(value)
            case ("minLength" | "maxLength", int()) if text:
                return f"/(?s:.){{{value},}}/" if keyword == "minLength" else f"/(?s:.){{0,{value}}}/"
            case "$ref", str() if (target := resolved(value, self._root)) is not None:
                return self.accepted(target)
            case "allOf", list():
                found = [self.accepted(part) for part in value]
                return None if None in found else _all([part for part in found if part])
            case "anyOf", list():
                return _either(self._some(value))
            case "oneOf", list():
                return self._one(value)
            case _ if keyword in _UNSUPPORTED or keyword in _LIMITS.get(self._kind, ()):
                raise _refused(f"{keyword!r} of {str(value)[:80]}")
            case _:
                return self._any

    def _some(self, schemas: list[Any]) -> list[str]:
        return [part for schema in schemas if (part := self.accepted(schema)) is not None]

    def _one(self, schemas: list[Any]) -> str | None:
        """What exactly one of the schemas accepts; different constants are never accepted by two."""
        fixed = [s for s in schemas if isinstance(s, Mapping) and "const" in s and kind_of(s["const"]) == self._kind]
        if len({schema["const"] for schema in fixed}) < len(fixed):
            fixed = []
        known = set(map(id, fixed))
        constants = _either(self._some(fixed))
        parts = [] if constants is None else [constants]
        parts += self._some([schema for schema in schemas if id(schema) not in known])
        if len(parts) > 1 and self._kind == "number":  # 1.0 is an integer, too, and none of the expressions knows
            raise _refused("'oneOf' with several kinds of numbers")
        if sum(map(len, parts)) * len(parts) > _LARGEST:
            raise _refused("so large a 'oneOf'")
        return _either([_all([part, *(f"~({o})" for o in parts[:n] + parts[n + 1 :])]) for n, part in enumerate(parts)])


def _typed(words: list[Any], kind: str) -> str | None:
    if kind == "number" and "number" not in words and "integer" in words:
        return _INTEGER
    return _WRITTEN[kind] if kind in words else None


def _searched(pattern: str) -> str:
    """Texts in which a pattern is found. Terminals match as a whole: an anchor at an edge says what they do anyway."""
    parts = []
    for choice in _choices(pattern):
        begins, ends = choice.startswith("^"), choice.endswith("$") and not choice.endswith(r"\$")
        inner = choice[begins : len(choice) - ends]
        parts.append(f"{'' if begins else '(?s:.*)'}(?:{inner}){'' if ends else '(?s:.*)'}")
    text = _BARE.sub(lambda bare: rf"\{bare[0]}" if bare[0] == "/" else bare[0], "|".join(parts))
    return f"/{text}/".replace("\n", r"\n")


def _choices(pattern: str) -> list[str]:
    """A pattern cut at the bars that stand outside of groups and classes."""
    choices, depth, in_class, skip = [""], 0, False, False
    for char in pattern:
        if skip or char == "\\":
            skip = not skip
        elif in_class or char == "[":
            in_class = char != "]"
        else:
            depth += (char == "(") - (char == ")")
        if char == "|" and not (depth or in_class or skip) and choices[-1][-1:] != "\\":
            choices.append("")
        else:
            choices[-1] += char
    return choices


def _all(parts: list[str]) -> str:
    """The texts that all expressions accept."""
    return _joined(" & ", parts)


def _either(parts: list[str]) -> str | None:
    """The texts that one of the expressions accepts."""
    return _joined(" | ", parts) or None


def _joined(operator: str, parts: list[str]) -> str:
    if sum(map(len, parts)) > _LARGEST:
        raise _refused("so large a schema")
    return operator.join(f"({part})" for part in dict.fromkeys(parts))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refused(what: str) -> InvalidRequest:
    return InvalidRequest(f"where a string is allowed, {what} cannot be enforced", param="tools")
