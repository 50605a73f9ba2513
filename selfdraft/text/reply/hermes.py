"""Calls as one JSON object between tags: Hermes, Qwen2.5 and Qwen3, MiMo-7B. Knows only this syntax.

    <tool_call>
    {"name": NAME, "arguments": {...}}
    </tool_call>

The arguments are passed on as the model wrote them, once the name is known. Arguments written as a JSON string are
passed on when the string is complete.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from .call import Call, ToolFormat, is_name
from .feed import SPACES, Feed, Wait, ignore
from .json_text import JsonText, decoded, read_json

__all__ = ["HERMES"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_LEFT_OVER = re.compile(r"[\s}\]]*")  # small models close one bracket too many


def _read(feed: Feed, marker: str, call: Call) -> Wait[bool]:
    yield from feed.span(SPACES)
    if not (yield from feed.at("{")):
        return False
    complete = yield from _members(feed, call)
    if call.name is not None:
        yield from feed.span(_LEFT_OVER)
        yield from feed.at(_CLOSE)
    return complete


def _members(feed: Feed, call: Call) -> Wait[bool]:
    """Read the object behind its bracket. Returns whether the arguments are complete."""
    early: list[str] = []  # arguments that came before the name
    complete = False
    while not (yield from feed.at("}")):
        key = yield from _string(feed)
        yield from feed.span(SPACES)
        if key is None or not (yield from feed.at(":")):
            return complete  # broken, or cut off
        yield from feed.span(SPACES)
        if key == "name" and call.name is None:
            name = yield from _string(feed)
            if name is None or not is_name(name):
                return False
            call.start(name)
            call.arguments("".join(early))
        elif key == "arguments" and not complete:
            complete = yield from _arguments(feed, early.append if call.name is None else call.arguments)
        elif not (yield from read_json(feed, ignore)):
            return complete
        yield from feed.span(SPACES)
        yield from feed.at(",")
        yield from feed.span(SPACES)
    if call.name is None:
        return False
    if not call.has_arguments:
        call.arguments("{}")
        return True
    return complete


def _arguments(feed: Feed, sink: Callable[[str], object]) -> Wait[bool]:
    """Read the arguments: an object, a JSON string that holds one, or null for none."""
    if (yield from feed.peek("{", "[")):
        return (yield from read_json(feed, sink))
    parts: list[str] = []
    if not (yield from read_json(feed, parts.append)):
        return False
    text = "".join(parts)
    try:
        inner = decoded(text)
    except ValueError:
        inner = text
    if inner is not None:
        sink(JsonText().push(inner)[0] if isinstance(inner, str) else text)
    return True


def _string(feed: Feed) -> Wait[str | None]:
    """Read a JSON string; None: there is none, or it does not end."""
    if not (yield from feed.peek('"')):
        return None
    parts: list[str] = []
    if not (yield from read_json(feed, parts.append)):
        return None
    try:
        return str(decoded("".join(parts)))
    except ValueError:
        return None


HERMES = ToolFormat(
    name="hermes",
    opens=(_OPEN,),
    markers=frozenset({_OPEN, _CLOSE}),
    written_by=lambda source: _OPEN in source,
    read=_read,
)
