"""Chat messages as a template wants them. Knows the OpenAI message shape; knows nothing of templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from ..errors import InvalidRequest

__all__ = ["call_arguments", "place_instructions", "prepare_messages", "prepare_tools"]


def prepare_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Validated copies; the caller's objects are never changed.

    - role `developer` becomes `system`, the name every template knows;
    - content that is a list of text parts becomes their concatenation, for templates that print content as it
      is; a list with any other part is left to the template;
    - a tool call's `arguments` become an object: see `call_arguments`.

    Raises:
        InvalidRequest: anything else than a non-empty list of such messages; it names the index and the
            value.
    """
    if not isinstance(messages, (list, tuple)):
        raise _bad("messages", "a list", messages)
    if not messages:
        raise InvalidRequest("messages is empty; send at least one message", param="messages")
    return [_message(message, f"messages[{n}]") for n, message in enumerate(messages)]


def place_instructions(messages: Sequence[Mapping[str, Any]], *, late: bool) -> list[Mapping[str, Any]]:
    """System messages where a template can render them: those at the start as one; later ones at their place, so that
    what comes before them stays as it was and need not be read again.

    Args:
        late: whether the template takes them anywhere; else later ones become the user's.
    """
    first = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    rest = [
        {**message, "role": "user"} if message["role"] == "system" and not late else message
        for message in messages[first:]
    ]
    texts = [message.get("content") for message in messages[:first]]
    if first < 2 or not all(isinstance(text, str) for text in texts):
        return [*messages[:first], *rest]
    return [{"role": "system", "content": "\n\n".join(filter(None, map(str, texts)))}, *rest]


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


def call_arguments(given: object, where: str) -> dict[str, Any]:
    """The arguments of a past call as an object, which is what templates iterate.

    Clients send back what a model wrote, as a JSON string, or the conversation could never go on. So of a string that
    breaks off, what came is kept; and what is no object becomes an argument of the name "arguments".

    Args:
        given: what came.
        where: the field's path, for messages.

    Raises:
        InvalidRequest: neither an object nor a string.
    """
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    if isinstance(given, dict):
        return given
    if not isinstance(given, str):
        raise _bad(where, "an object or a JSON string of one", given)
    try:
        value = from_json(given, allow_partial=True, allow_inf_nan=False)
    except ValueError:
        value = given
    return value if isinstance(value, dict) else {"arguments": value}


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
    if "arguments" in holder:
        holder["arguments"] = call_arguments(holder["arguments"], f"{where}.arguments")
    return copy


def _bad(where: str, wanted: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"{where} must be {wanted}, not {_short(value)}", param=where.split("[")[0])


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:120] + "..."
