"""One tool call being read, and what a call syntax is. Knows events and schemas; no particular syntax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .events import ReplyEvent, ToolArguments, ToolStart
from .feed import NAME, Feed, Wait
from .json_text import decoded
from .schema import Schemas

__all__ = ["Call", "ToolFormat", "is_name", "read_name"]

_LONGEST_NAME = 128


class Call:
    """Where a syntax puts what it reads of one call.

    Args:
        feed: the text; what was recorded of it is let go once the call has begun.
        index: the call's place in the answer.
        schemas: the declared tools.
        emit: takes the events.
    """

    def __init__(self, feed: Feed, index: int, schemas: Schemas, emit: Callable[[ReplyEvent], None]) -> None:
        self._feed = feed
        self._index = index
        self._schemas = schemas
        self._emit = emit
        self.name: str | None = None  # None: not a call so far
        self._pieces: list[str] = []

    def start(self, name: str) -> None:
        """It is a call of this tool, declared or not."""
        self.name = name
        self._feed.forget()
        self._emit(ToolStart(self._index, name))

    def arguments(self, json: str) -> None:
        """The next piece of the arguments."""
        if json:
            self._pieces.append(json)
            self._emit(ToolArguments(self._index, json))

    @property
    def has_arguments(self) -> bool:
        """Whether some came."""
        return bool(self._pieces)

    @property
    def is_sound(self) -> bool:
        """Whether the arguments are a JSON object: a model that writes them itself may write what only looks so."""
        try:
            return isinstance(decoded("".join(self._pieces)), dict)
        except ValueError:
            return False

    def kinds(self, key: str) -> frozenset[str]:
        """JSON kinds that the tool's schema allows for the argument `key`."""
        return self._schemas.kinds(self.name or "", key)


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls.

    Attributes:
        name: for messages and flags.
        opens: markers a call begins with. Each, behind content, sets `read` to work.
        markers: all markers that may be single tokens of the vocabulary.
        written_by: whether a chat template with this source text writes calls so.
        read: reads one call behind its opening marker. Returns whether its arguments are complete; if the call was
            never started, what was read is no call.
    """

    name: str
    opens: tuple[str, ...]
    markers: frozenset[str]
    written_by: Callable[[str], bool]
    read: Callable[[Feed, str, Call], Wait[bool]]


def read_name(feed: Feed) -> Wait[str]:
    """A tool's name as the next characters spell it; "" if they do not."""
    return feed.span(NAME, _LONGEST_NAME)


def is_name(text: str) -> bool:
    """Whether `text` can be a tool's name."""
    return 0 < len(text) <= _LONGEST_NAME and NAME.fullmatch(text) is not None
