"""Calls as nested tags with raw values: Qwen3-Coder, Qwen3.5 and later; MiMo-V2 and later. Knows only this syntax.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

MiMo writes `<parameter=KEY>VALUE</parameter>`: there, a line break at either end of a value is the value's own.
"""

from __future__ import annotations

import re
from functools import partial

from .call import Call, ToolFormat, read_name
from .feed import SPACES, Feed, Wait, ignore
from .values import Arguments, read_value

__all__ = ["MIMO", "QWEN_XML"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PARAMETER, _FUNCTION_END = "<parameter=", "</function>"
_NEXT = (_PARAMETER, _FUNCTION_END, _CLOSE)  # what can stand behind a parameter; models forget _FUNCTION_END
_WRAPPED = re.compile(r"<parameter=[^>]*>(?:\\n|\n)")  # in a template's source the line break may be spelled \n


def _read(feed: Feed, marker: str, call: Call, *, wrapped: bool) -> Wait[bool]:
    yield from feed.span(SPACES)
    if not (yield from feed.at("<function=")):
        return False
    name = yield from read_name(feed)
    if not name or not (yield from feed.at(">")):
        return False
    call.start(name)
    arguments = Arguments(call)
    while (tag := (yield from feed.until(_NEXT, ignore))) == _PARAMETER:
        key = yield from feed.collect(">")
        if key is None:
            return False
        # The line breaks around a value come in pairs: a model that leaves out the first leaves out the second.
        broken = wrapped and (yield from feed.at("\n"))
        closers = ("\n</parameter>", "</parameter>") if broken else ("</parameter>",)
        if not (yield from read_value(feed, closers, _NEXT, arguments.value(key.strip()))):
            return False
    if tag is None:
        return False
    arguments.end()
    if tag == _FUNCTION_END:
        yield from feed.span(SPACES)
        yield from feed.at(_CLOSE)
    return True


def _writes_tags(source: str) -> bool:
    return _OPEN in source and "<function=" in source and _PARAMETER in source


QWEN_XML = ToolFormat(
    name="qwen-xml",
    opens=(_OPEN,),
    markers=frozenset({_OPEN, _CLOSE}),
    written_by=lambda source: _writes_tags(source) and _WRAPPED.search(source) is not None,
    read=partial(_read, wrapped=True),
)

MIMO = ToolFormat(
    name="mimo",
    opens=(_OPEN,),
    markers=frozenset({_OPEN, _CLOSE}),
    written_by=lambda source: _writes_tags(source) and _WRAPPED.search(source) is None,
    read=partial(_read, wrapped=False),
)
