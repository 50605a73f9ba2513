"""What content blocks of Anthropic's messages say and show. Knows the blocks; not how messages are put together.

A conversation may have begun at Anthropic, whose own tools leave blocks in it that no local model can make. They stay
in every later request, so what can be read of them is read, and the rest is left out: refused, they would end it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from . import limits
from .conversation import Piece, piece_of
from .limits import at_most

__all__ = ["block_pieces", "blocks_pieces", "foreign_text"]

log = logging.getLogger(__name__)

# Where the words of a foreign block stand, in the order in which they are read. The rest is ids and what is encrypted.
_WORDS = ("title", "url", "source", "content", "text", "data", "stdout", "stderr", "error_code", "tool_references")


def blocks_pieces(content: str | list[Any] | None, where: str) -> list[Piece]:
    """The texts and images of a content that is a string or a list of blocks.

    Raises:
        InvalidRequest: a block that is neither. RequestTooLarge: too many blocks.
    """
    if content is None or isinstance(content, str):
        return [content or ""]
    at_most(content, limits.MAX_PARTS, where, "blocks")
    return [piece for n, block in enumerate(content) for piece in block_pieces(block, f"{where}[{n}]")]


def block_pieces(block: object, where: str) -> list[Piece]:
    """What a block that a client wrote holds: text, an image, a document, a search result, a change of the tools.

    Raises:
        InvalidRequest: a document that is no text, or anything else.
    """
    match block:
        case {"type": "document", "source": {"type": "text", "data": str(text)}, **rest}:
            return [*_title(rest), text]
        case {"type": "document", "source": {"type": "content", "content": str() | list() as content}, **rest}:
            return [*_title(rest), *blocks_pieces(content, f"{where}.source.content")]
        case {"type": "search_result", "content": list(content), **rest}:
            return [*_title(rest), *blocks_pieces(content, f"{where}.content")]
        case {"type": "tool_reference", "tool_name": str(name)} | {
            "type": "tool_addition",
            "tool": {"name": str(name)},
        }:
            return [f"{name} can be called now."]  # its definition is among the tools
        case {"type": "tool_removal", "tool": {"name": str(name)}}:
            return [f"{name} cannot be called any more."]
        case _:
            return [piece_of(block, where)]


def _title(given: Mapping[Any, Any]) -> list[str]:
    about = [given.get(name) for name in ("title", "source", "context")]
    return [line for line in about if isinstance(line, str) and line]


def foreign_text(block: Mapping[str, Any], where: str) -> str:
    """The text of a block that the turn of another model left; "", with a line in the log, if there is none in it."""
    text = _words(block) if block.get("type") != "redacted_thinking" else ""
    if not text:
        log.info("%s of type %s is left out: there is nothing to read in it", where, str(block.get("type"))[:120])
    return text


def _words(value: object) -> str:
    match value:
        case str():
            return value
        case list():
            return "\n".join(filter(None, map(_words, value)))
        case {"type": "tool_reference", "tool_name": str(name)}:
            return name
        case dict() if value.get("type") != "base64":
            return "\n".join(filter(None, (_words(value.get(name)) for name in _WORDS)))
        case _:
            return ""
