"""What an answer is made of, in the order it arrives. Vocabulary only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

__all__ = ["Content", "Reasoning", "ReplyEvent", "ToolArguments", "ToolEnd", "ToolStart", "merged"]


@dataclass(frozen=True)
class Reasoning:
    """A piece of the model's thinking, markers left out."""

    text: str


@dataclass(frozen=True)
class Content:
    """A piece of the visible answer."""

    text: str


@dataclass(frozen=True)
class ToolStart:
    """A tool call begins: its place among the calls of this answer, and the tool's name."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolArguments:
    """A piece of a call's arguments. The pieces of a complete call, joined, are one JSON object."""

    index: int
    json: str


@dataclass(frozen=True)
class ToolEnd:
    """A tool call is over.

    Attributes:
        complete: False if the answer ended, or the syntax broke, inside the arguments, or if they are no JSON object.
            They are then left as they came and not closed, so that no client can take half a value for a whole one.
    """

    index: int
    complete: bool = True


ReplyEvent = Reasoning | Content | ToolStart | ToolArguments | ToolEnd


def merged(events: Iterable[ReplyEvent]) -> list[ReplyEvent]:
    """The same events with neighbouring pieces of one channel joined: the same however the text was cut."""
    return [_joined(list(group)) for _, group in groupby(events, key=_channel)]


def _channel(event: ReplyEvent) -> tuple[type, int]:
    return type(event), -1 if isinstance(event, Reasoning | Content) else event.index


def _joined(group: list[ReplyEvent]) -> ReplyEvent:
    match group[0]:
        case Reasoning():
            return Reasoning("".join(event.text for event in group if isinstance(event, Reasoning)))
        case Content():
            return Content("".join(event.text for event in group if isinstance(event, Content)))
        case ToolArguments(index):
            return ToolArguments(index, "".join(event.json for event in group if isinstance(event, ToolArguments)))
        case event:
            return event
