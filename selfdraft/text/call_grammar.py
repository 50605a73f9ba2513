"""Tool calls as a grammar: what an answer looks like that has to call a tool. Knows call syntaxes and JSON schemas.

What such a grammar lets through, `ReplyParser` reads back as calls whose arguments their tool's schema accepts. Where
arguments stand between tags, they come in the schema's order, none that it does not declare, and no string holds its
own closing tag.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidRequest
from .grammar import JSON_SPACE, Grammar, Grammars, check_schema
from .raw_values import raw_values
from .reply import ToolFormat
from .reply.schema import Schemas, argument, root_of
from .tokenizer import Tokenizer

__all__ = ["call_grammar"]

_BREAK = "\n?"  # in a syntax: a line break that may be left out


@dataclass(frozen=True)
class _Json:
    """A call whose arguments are JSON. In all these texts NAME is the tool's name, KEY an argument's."""

    opening: str
    closing: str


@dataclass(frozen=True)
class _Tags:
    """A call whose arguments stand between tags.

    Attributes:
        before, after: what stands around a value.
        closer: what no string may hold; part of `after`.
    """

    opening: str
    before: str
    after: str
    closer: str
    closing: str


@dataclass(frozen=True)
class _Syntax:
    """Calls, and what stands around and between them."""

    call: _Json | _Tags
    first: str = ""
    between: str = "\n"
    last: str = ""


_SYNTAXES = {
    "hermes": _Syntax(_Json('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>")),
    "qwen-xml": _Syntax(
        _Tags(
            opening="<tool_call>\n<function=NAME>\n",
            before="<parameter=KEY>\n",
            after="\n</parameter>\n",
            closer="</parameter>",
            closing="</function>\n</tool_call>",
        )
    ),
    "mimo": _Syntax(
        _Tags(
            opening=f"<tool_call>{_BREAK}<function=NAME>{_BREAK}",
            before="<parameter=KEY>",
            after=f"</parameter>{_BREAK}",
            closer="</parameter>",
            closing=f"</function>{_BREAK}</tool_call>",
        ),
        between=_BREAK,
    ),
    "glm": _Syntax(
        _Tags(
            opening=f"<tool_call>NAME{_BREAK}",
            before=f"<arg_key>KEY</arg_key>{_BREAK}<arg_value>",
            after=f"</arg_value>{_BREAK}",
            closer="</arg_value>",
            closing="</tool_call>",
        ),
        between=_BREAK,
    ),
    "deepseek-v3": _Syntax(
        _Json("<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n", "\n```<｜tool▁call▁end｜>"),
        first="<｜tool▁calls▁begin｜>",
        last="<｜tool▁calls▁end｜>",
    ),
    "deepseek-v3.1": _Syntax(
        _Json("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        first="<｜tool▁calls▁begin｜>",
        between="",
        last="<｜tool▁calls▁end｜>",
    ),
}

# What restricts an object as a whole, and cannot be seen to where arguments stand between tags.
_OF_THE_WHOLE = frozenset(
    {"$dynamicRef", "$ref", "allOf", "anyOf", "const", "dependencies", "dependentRequired", "dependentSchemas", "else"}
    | {"enum", "if", "maxProperties", "minProperties", "not", "oneOf", "patternProperties", "propertyNames", "then"}
)


def call_grammar(
    grammars: Grammars,
    tokenizer: Tokenizer,
    format: ToolFormat | None,
    tools: Sequence[Mapping[str, Any]],
    *,
    name: str | None = None,
    several: bool = True,
    strict: bool = True,
) -> Grammar:
    """A grammar of one or more calls and nothing else.

    Args:
        grammars: compiles it.
        tokenizer: says which markers are tokens of their own: those are no text.
        format: how the model writes calls.
        tools: the declared tools, in OpenAI's form.
        name: the one tool that must be called; None leaves the choice.
        several: whether more than one call may follow.
        strict: refuse what a schema asks for and a grammar cannot enforce, rather than let it go.

    Raises:
        InvalidRequest: there is no such tool, no grammar for calls in this style, or a schema that cannot be enforced:
            the message names the tool and the keyword.
    """
    chosen = [tool["function"] for tool in tools if name is None or tool["function"]["name"] == name]
    if not chosen:
        raise InvalidRequest(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
    if format is None:
        raise InvalidRequest(
            "this model's template writes no tool calls, so none can be forced; use tool_choice auto",
            param="tool_choice",
        )
    markers = {marker: id for marker in format.markers if (id := tokenizer.token_id(marker)) is not None}
    writer = _Writer(_SYNTAXES[format.name], markers, strict)
    try:
        return grammars.calls(writer.grammar(chosen, several=several))
    except InvalidRequest as error:
        raise _blamed(grammars, writer, chosen, error) from error


def _blamed(
    grammars: Grammars, writer: _Writer, functions: Sequence[Mapping[str, Any]], error: InvalidRequest
) -> InvalidRequest:
    """The error with the name of the tool that is at fault, if one alone is."""
    for function in functions:
        try:
            grammars.calls(writer.grammar([function], several=False))
        except InvalidRequest as alone:
            return InvalidRequest(
                f"the parameters of tool {function['name']!r}: {alone}; change them, or do not force a call",
                param="tools",
            )
    return error


class _Writer:
    """Writes grammars of calls, in llguidance's Lark dialect.

    Args:
        markers: those that are tokens, with their ids.
    """

    def __init__(self, syntax: _Syntax, markers: Mapping[str, int], strict: bool) -> None:
        self._syntax = syntax
        self._strict = strict
        self._tokens = markers
        self._cut = re.compile("(" + "|".join(map(re.escape, [*markers, _BREAK])) + ")")
        self._guidance = {"whitespace_pattern": JSON_SPACE, "lenient": not strict}

    def grammar(self, functions: Sequence[Mapping[str, Any]], *, several: bool) -> str:
        """One or more calls of these functions."""
        first, between, last = map(self._spelled, (self._syntax.first, self._syntax.between, self._syntax.last))
        lines = [
            f"start: {first} call {f'({between} call)*' if several else ''} {last}",
            "call: " + " | ".join(f"call_{index}" for index in range(len(functions))),
        ]
        for index, function in enumerate(functions):
            lines += self._call(f"call_{index}", function)
        return "\n".join(lines)

    def _call(self, rule: str, function: Mapping[str, Any]) -> Iterator[str]:
        schema = root_of(function.get("parameters"))
        check_schema(schema)
        if schema.get("type", "object") != "object":
            raise InvalidRequest(f"arguments are an object, not {schema['type']!r}", param="tools")
        call = self._syntax.call
        opening = self._spelled(call.opening.replace("NAME", function["name"]))
        closing = self._spelled(call.closing)
        if isinstance(call, _Json):
            yield f"{rule}: {opening} {rule}_json {closing}"
            yield f"{rule}_json: {self._json({**schema, 'type': 'object'})}"
            return
        self._check_whole(schema)
        kinds = Schemas([function])
        parts = []
        required = _required(schema)
        for number, key in enumerate(dict.fromkeys([*_mapping(schema.get("properties")), *required])):
            if key != key.strip() or ">" in key:
                raise InvalidRequest(f"the name {key!r} cannot be written in a tag", param="tools")
            part = f"{rule}_{number}"
            lines = list(self._argument(part, call, key, schema, kinds.kinds(function["name"], key)))
            if lines:
                parts.append(part if key in required else f"{part}?")
                yield from lines
            elif key in required:
                raise InvalidRequest(f"argument {key!r} is required, and its schema accepts nothing", param="tools")
        yield f"{rule}: {opening} {' '.join(parts)} {closing}"

    def _check_whole(self, schema: Mapping[str, Any]) -> None:
        found = sorted(_OF_THE_WHOLE & schema.keys())
        if found and self._strict:
            raise InvalidRequest(f"{', '.join(map(repr, found))} of the arguments cannot be enforced", param="tools")

    def _argument(
        self, rule: str, tags: _Tags, key: str, schema: Mapping[str, Any], kinds: frozenset[str]
    ) -> Iterator[str]:
        """The rules of one argument; none if its schema accepts nothing."""
        value = argument(schema, key)
        definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        ways = []
        texts = self._texts(value, schema, kinds, tags.closer) if "string" in kinds else None
        if texts is not None:
            ways.append(f"{rule}_text")
            yield f"{rule.upper()}: {texts}"
            yield from self._closed(f"{rule}_text", rule.upper(), tags)
        structures = sorted(kinds & {"array", "object"})
        if "string" not in kinds and value is not False:
            ways.append(f"{rule}_json {self._spelled(tags.after)}")
            yield f"{rule}_json: {self._json({**_mapping(value), **definitions})}"
        elif texts is not None and structures:
            ways.append(f"{rule}_json {self._spelled(tags.after)}")
            yield f"{rule}_json: {self._json({'allOf': [_mapping(value), {'type': structures}], **definitions})}"
        if ways:
            yield f"{rule}: {self._spelled(tags.before.replace('KEY', key))} ({' | '.join(ways)})"

    def _texts(self, value: object, schema: Mapping[str, Any], kinds: frozenset[str], closer: str) -> str | None:
        try:
            return raw_values(value, schema, kinds, closer)
        except InvalidRequest:
            if self._strict:
                raise
            return raw_values({}, schema, kinds, closer)

    def _closed(self, rule: str, terminal: str, tags: _Tags) -> Iterator[str]:
        """A text and what stands behind it."""
        if tags.closer in self._tokens:  # no text holds a token, so this ends it
            yield f"{rule}: {terminal} {self._spelled(tags.after)}"
            return
        literal, *breaks = tags.after.partition(_BREAK)
        yield f"{rule}: {rule}_first {self._spelled(''.join(breaks))}"
        yield f"{rule}_first[suffix={_quoted(literal)}]: {terminal}"

    def _json(self, schema: Mapping[str, Any]) -> str:
        return f"%json {_quoted({**schema, 'x-guidance': self._guidance})}"

    def _spelled(self, text: str) -> str:
        """A text as parts of a rule: markers that are tokens by their ids, the rest as it is."""
        parts = []
        for piece in self._cut.split(text):
            if piece == _BREAK:
                parts.append(r'"\n"?')
            elif piece in self._tokens:
                parts.append(f"<[{self._tokens[piece]}]>")
            elif piece:
                parts.append(_quoted(piece))
        return " ".join(parts)


def _required(schema: Mapping[str, Any]) -> list[str]:
    """The arguments that must be there, declared or not."""
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _quoted(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
