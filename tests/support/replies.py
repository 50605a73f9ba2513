"""Tools with parameters of every type, and answers that call them, parsed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from selfdraft.text.reply import FORMATS, ReplyEvent, ReplyParser, ToolArguments, ToolEnd, ToolStart, merged

__all__ = ["BY_NAME", "PROPERTIES", "TOOLS", "call", "parse", "qwen"]

BY_NAME = {format.name: format for format in FORMATS}
PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "colour": {"$ref": "#/$defs/Colour"},
    "number": {"type": "integer"},
    "flag": {"type": "boolean"},
    "list": {"type": "array"},
    "object": {"type": "object"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": PROPERTIES,
                "$defs": {"Colour": {"enum": ["red", "1"]}},
            },
        },
    },
    {"name": "g", "input_schema": {"type": "object", "properties": {"number": {"type": ["number", "null"]}}}},
]


def parse(
    format: str | None,
    pieces: Iterable[str],
    *,
    tools: Sequence[Mapping[str, Any]] = TOOLS,
    in_reasoning: bool = False,
) -> list[ReplyEvent]:
    parser = ReplyParser(BY_NAME[format] if format else None, tools, in_reasoning=in_reasoning)
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged(events + parser.finish())


def call(arguments: str, *, index: int = 0, name: str = "f", complete: bool = True) -> list[ReplyEvent]:
    pieces: list[ReplyEvent] = [ToolArguments(index, arguments)] if arguments else []
    return [ToolStart(index, name), *pieces, ToolEnd(index, complete)]


def qwen(*parameters: tuple[str, str], name: str = "f") -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"
