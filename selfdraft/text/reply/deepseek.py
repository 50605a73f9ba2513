"""Calls between DeepSeek's own tokens, arguments as JSON: V3 and R1, V3.1. Knows only these syntaxes.

V3, with a line break before and a fence around the arguments:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
    ```json
    {...}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

Further calls follow before the last marker. A model that leaves the first marker out is understood.
"""

from __future__ import annotations

import re
from functools import partial

from .call import Call, ToolFormat, read_name
from .feed import NAME, SPACES, Feed, Wait
from .json_text import read_json

__all__ = ["DEEPSEEK_V3", "DEEPSEEK_V31"]

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCE = "```json"
_LEFT_OVER = re.compile(r"[\s`]*")


def _read(feed: Feed, marker: str, call: Call, *, fenced: bool) -> Wait[bool]:
    if marker == _CALLS:
        yield from feed.span(SPACES)
        if not (yield from feed.at(_CALL)):
            return False
    name = yield from (_fenced_name if fenced else _plain_name)(feed)
    if not name:
        return False
    call.start(name)
    yield from feed.span(SPACES)
    complete = bool((yield from feed.peek("{"))) and (yield from read_json(feed, call.arguments))
    yield from feed.span(_LEFT_OVER)
    yield from feed.at(_CALL_END)
    yield from feed.span(SPACES)
    yield from feed.at(_CALLS_END)
    return complete


def _fenced_name(feed: Feed) -> Wait[str]:
    """Read `function<｜tool▁sep｜>NAME` and the opening fence; "" if they are not there."""
    yield from feed.span(NAME)
    if not (yield from feed.at(_SEPARATOR)):
        return ""
    name = yield from read_name(feed)
    yield from feed.span(SPACES)
    return name if (yield from feed.at(_FENCE)) else ""


def _plain_name(feed: Feed) -> Wait[str]:
    """Read `NAME<｜tool▁sep｜>`; "" if it is not there."""
    yield from feed.span(SPACES)
    name = yield from read_name(feed)
    return name if (yield from feed.at(_SEPARATOR)) else ""


_OPENS = (_CALLS, _CALL)
_MARKERS = frozenset({_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR})

DEEPSEEK_V3 = ToolFormat(
    name="deepseek-v3",
    opens=_OPENS,
    markers=_MARKERS,
    written_by=lambda source: _CALL in source and _FENCE in source,
    read=partial(_read, fenced=True),
)

DEEPSEEK_V31 = ToolFormat(
    name="deepseek-v3.1",
    opens=_OPENS,
    markers=_MARKERS,
    written_by=lambda source: _CALL in source and _FENCE not in source,
    read=partial(_read, fenced=False),
)
