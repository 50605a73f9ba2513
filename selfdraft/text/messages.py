"""Chat messages as a template wants them. Knows the OpenAI message shape; knows nothing of templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InvalidRequest

__all__ = ["prepare_messages", "prepare_tools"]


def prepare_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Validated copies; the caller's objects are never changed.

    - role `developer` becomes `system`, the name every template knows;
    - content that is a list of text parts becomes their concatenation, for templates that print content as it
      is; a list with any other part is left to the template;
    - a tool call's `arguments` given as a JSON string (OpenAI's wire form) become the object, which templates
      iterate.

    Raises:
        InvalidRequest: anything else than a non-empty list of such messages; it names the index and the
            value.
    """
    if not isinstance(messages, (list, tuple)):
        raise _bad("messages", "a list", messages)
    if not messages:
        raise InvalidRequest("messages is empty; send at least one message", param="messages")
    return [_message(message, f"messages[{n}]") for n, message in enumerate(messages)]


def prepare_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools as a list of objects, or None when there are none (templates differ on empty lists)."""
    if not tools:
        return None
    if not isinstance(tools, (list, tuple)):
        raise _bad("tools", "a list of objects", tools)
    for n, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise _bad(f"tools[{n}]", "an object", tool)
    return list(tools)


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _bad(where, "an object with a role", message)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _bad(f"{where}.role", "a non-empty string", role)
    copy = dict(message)
    if role == "developer":
        copy["role"] = "system"
    if "content" in copy:
        copy["content"] = _content(copy["content"], f"{where}.content")
    calls = copy.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, (list, tuple)):
            raise _bad(f"{where}.tool_calls", "a list", calls)
        copy["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(calls)]
    return copy


def _content(content: object, where: str) -> object:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise _bad(where, "a string, null or a list of parts", content)
    for n, part in enumerate(content):
        if not isinstance(part, dict):
            raise _bad(f"{where}[{n}]", "an object with a type", part)
        if not isinstance(part.get("type"), str):
            raise _bad(f"{where}[{n}].type", "a string", part.get("type"))
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            raise _bad(f"{where}[{n}].text", "a string", part.get("text"))
    if all(part["type"] == "text" for part in content):
        return "".join(part["text"] for part in content)
    return list(content)


def _tool_call(call: object, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise _bad(where, "an object", call)
    copy = dict(call)
    function = copy.get("function")
    if function is None:  # some clients send {name, arguments} without the envelope
        holder = copy
    elif isinstance(function, dict):
        holder = copy["function"] = dict(function)
        where += ".function"
    else:
        raise _bad(f"{where}.function", "an object", function)
    arguments = holder.get("arguments")
    if isinstance(arguments, str):
        holder["arguments"] = _arguments(arguments, f"{where}.arguments")
    elif arguments is not None and not isinstance(arguments, dict):
        raise _bad(f"{where}.arguments", "an object or a JSON string of one", arguments)
    return copy


def _arguments(text: str, where: str) -> dict[str, Any]:
    if not text.strip():  # how some clients write "no arguments"
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where} is not JSON ({error}): {_short(text)}", param="messages") from error
    if not isinstance(value, dict):
        raise _bad(where, "a JSON object", text)
    return value


def _bad(where: str, wanted: str, value: object) -> InvalidRequest:
    param = "tools" if where.startswith("tools") else "messages"
    return InvalidRequest(f"{where} must be {wanted}, not {_short(value)}", param=param)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:120] + "..."
