"""Calls as key and value tags behind a bare name: GLM-4.5 and later. Knows only this syntax.

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

From GLM-4.7 on without the line breaks.
"""

from __future__ import annotations

from .call import Call, ToolFormat, read_name
from .feed import SPACES, Feed, Wait, ignore
from .values import Arguments, read_value

__all__ = ["GLM"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def _read(feed: Feed, marker: str, call: Call) -> Wait[bool]:
    yield from feed.span(SPACES)
    name = yield from read_name(feed)
    yield from feed.span(SPACES)
    if not name or not (yield from feed.peek(_KEY, _CLOSE)):
        return False
    call.start(name)
    arguments = Arguments(call)
    while (tag := (yield from feed.until((_KEY, _CLOSE), ignore))) == _KEY:
        key = yield from feed.collect(_KEY_END)
        yield from feed.span(SPACES)
        if key is None or not (yield from feed.at(_VALUE)):
            continue  # a key without a value says nothing; at the end of the text, the loop ends
        if not (yield from read_value(feed, (_VALUE_END,), (_KEY, _CLOSE), arguments.value(key.strip()))):
            return False
    if tag is None:
        return False
    arguments.end()
    return True


GLM = ToolFormat(
    name="glm",
    opens=(_OPEN,),
    markers=frozenset({_OPEN, _CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END}),
    written_by=lambda source: _OPEN in source and _KEY in source,
    read=_read,
)
