"""What a model writes, taken apart as it arrives: reasoning, content, tool calls.

Knows strings only: the markers models write and the JSON schemas of declared tools. Knows nothing of tokens, templates
beyond their source text, or any HTTP API.

    format = detect_format(template_source)                           # None: no call syntax we can read
    parser = ReplyParser(format, tools, in_reasoning=begins_in_reasoning(prompt))
    for piece in pieces:                                              # cut anywhere
        events = parser.push(piece)
    events = parser.finish()
"""

from __future__ import annotations

from .call import ToolFormat
from .events import Content, Reasoning, ReplyEvent, ToolArguments, ToolEnd, ToolStart, merged
from .formats import FORMATS, detect_format, markers
from .parser import ReplyParser, begins_in_reasoning

__all__ = [
    "FORMATS",
    "Content",
    "Reasoning",
    "ReplyEvent",
    "ReplyParser",
    "ToolArguments",
    "ToolEnd",
    "ToolFormat",
    "ToolStart",
    "begins_in_reasoning",
    "detect_format",
    "markers",
    "merged",
]
