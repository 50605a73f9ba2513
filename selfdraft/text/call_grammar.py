"""Tool calls as a grammar: what an answer looks like that has to call a tool. Knows call syntax and JSON schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InvalidRequest
from .reply import ToolFormat

__all__ = ["call_grammar"]


def call_grammar(
    format: ToolFormat | None, tools: Sequence[Mapping[str, Any]], *, name: str | None = None, several: bool = True
) -> str:
    """A grammar, in llguidance's Lark dialect, of one or more calls and nothing else.

    Args:
        format: how the model writes calls.
        tools: the declared tools.
        name: the one tool that must be called; None leaves the choice.
        several: whether more than one call may follow.

    Raises:
        InvalidRequest: there is no such tool, or no grammar for calls in this style.
    """
    chosen = [tool["function"] for tool in tools if name is None or tool["function"]["name"] == name]
    if not chosen:
        raise InvalidRequest(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
    if format is None or format.name not in _WRITERS:
        style = "no tool calls" if format is None else f"calls in the style {format.name!r}"
        raise InvalidRequest(
            f"this model's template writes {style}, which cannot be forced; use tool_choice auto", param="tool_choice"
        )
    write = _WRITERS[format.name]
    lines = [f"start: call {'(_SEPARATOR call)*' if several else ''}", r'_SEPARATOR: "\n"']
    lines.append("call: " + " | ".join(f"tool_{index}" for index in range(len(chosen))))
    for index, function in enumerate(chosen):
        lines += write(index, function)
    return "\n".join(lines)


def _hermes(index: int, function: Mapping[str, Any]) -> list[str]:
    schema = {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": _parameters(function)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    return [
        rf'tool_{index}: "<tool_call>\n" json_{index} "\n</tool_call>"',
        f"json_{index}: %json {json.dumps(schema)}",
    ]


def _qwen_xml(index: int, function: Mapping[str, Any]) -> list[str]:
    schema = _parameters(function)
    properties: Mapping[str, Any] = schema.get("properties") or {}
    required = set(schema.get("required") or ())
    opening = json.dumps(f"<tool_call>\n<function={function['name']}>\n")
    parts, rules = [], []
    for number, (key, kind) in enumerate(properties.items()):
        rule = f"tool_{index}_{number}"
        parts.append(rule if key in required else f"{rule}?")
        begin, end = json.dumps(f"<parameter={key}>\n"), r'"\n</parameter>\n"'
        if isinstance(kind, Mapping) and kind.get("type") in ("number", "integer", "boolean", "array", "object"):
            rules += [
                f"{rule}: {begin} {rule}_value {end}",
                f"{rule}_value: %json {json.dumps(_with_defs(kind, schema))}",
            ]
        elif isinstance(kind, Mapping) and (choices := kind.get("enum")) and all(isinstance(c, str) for c in choices):
            rules.append(f"{rule}: {begin} ({' | '.join(json.dumps(c) for c in choices)}) {end}")
        else:
            rules += [f"{rule}: {begin} {rule}_text", rf'{rule}_text[suffix="\n</parameter>\n"]: /(?s:.*)/']
    closing = json.dumps("</function>\n</tool_call>")
    return [f"tool_{index}: {opening} {' '.join(parts)} {closing}", *rules]


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = function.get("parameters")
    return parameters if isinstance(parameters, Mapping) and parameters else {"type": "object", "properties": {}}


def _with_defs(kind: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """A property's schema with the definitions that it may refer to."""
    return {**kind, **{name: schema[name] for name in ("$defs", "definitions") if name in schema}}


_WRITERS = {"hermes": _hermes, "qwen-xml": _qwen_xml}
