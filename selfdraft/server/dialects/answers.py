"""The events of an answer as its parts: reasoning, text and calls, one after the other. Knows no wire format."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import from_json

from ...results import TokenLogprob
from ...text.reply.events import Content, Reasoning, ReplyEvent, ToolArguments, ToolEnd, ToolStart
from ..jobs import Choice, Finished, JobEvent

__all__ = ["Answer", "Close", "More", "Open", "Part", "PartCutter", "Step", "gather"]


@dataclass(eq=False)
class Part:
    """A stretch of an answer that is of one kind.

    Attributes:
        number: its place among the parts.
        name, call: of a call, the tool's name and its place among the calls.
        pieces: the text, or a call's arguments, as they came.
        complete: False of a call whose arguments broke off.
    """

    kind: Literal["reasoning", "text", "call"]
    number: int
    name: str = ""
    call: int = 0
    pieces: list[str] = field(default_factory=list)
    complete: bool = True

    @property
    def text(self) -> str:
        """All that came."""
        return "".join(self.pieces)

    @property
    def arguments(self) -> dict[str, Any]:
        """A call's arguments as an object: of a call that was cut off, the members that are complete.

        So do the official clients read such a stream. They have to look at the stop reason before they call.
        """
        text = self.text or "{}"
        try:
            if self.complete:
                value = json.loads(text, parse_float=_finite)
            else:
                value = from_json(text, allow_partial=True, allow_inf_nan=False)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


def _finite(number: str) -> float:
    """A number as far as JSON can be written: a model may write 1e999."""
    most = sys.float_info.max
    return max(-most, min(float(number), most))


@dataclass(frozen=True)
class Open:
    """A part begins."""

    part: Part


@dataclass(frozen=True)
class More:
    """A part goes on."""

    part: Part
    text: str


@dataclass(frozen=True)
class Close:
    """A part is over."""

    part: Part


Step = Open | More | Close


class PartCutter:
    """Cuts the events of one answer into parts, none of them inside another.

    Attributes:
        parts: those that have begun.
    """

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._open: Part | None = None

    @property
    def calls(self) -> int:
        """Calls that have begun."""
        return sum(part.kind == "call" for part in self.parts)

    def push(self, event: ReplyEvent) -> list[Step]:
        """What an event means for the parts."""
        match event:
            case Reasoning(text):
                return self._more("reasoning", text)
            case Content(text):
                return self._more("text", text)
            case ToolStart(index, name):
                return [*self.finish(), self._begin(Part("call", len(self.parts), name, index))]
            case ToolArguments(_, piece):
                return self._more("call", piece)
            case ToolEnd(_, complete):
                if self._open is not None:
                    self._open.complete = complete
                return self.finish()

    def finish(self) -> list[Step]:
        """Close the part that is open, if one is."""
        if self._open is None:
            return []
        part, self._open = self._open, None
        return [Close(part)]

    def _more(self, kind: Literal["reasoning", "text", "call"], text: str) -> list[Step]:
        if not text:
            return []
        steps: list[Step] = []
        if self._open is None or self._open.kind != kind:
            assert kind != "call", "a call's arguments come after its start"
            steps = [*self.finish(), self._begin(Part(kind, len(self.parts)))]
        assert self._open is not None
        self._open.pieces.append(text)
        return [*steps, More(self._open, text)]

    def _begin(self, part: Part) -> Open:
        self.parts.append(part)
        self._open = part
        return Open(part)


@dataclass
class Answer:
    """One answer, whole."""

    parts: list[Part]
    logprobs: list[TokenLogprob]
    finished: Finished

    def text(self, kind: Literal["reasoning", "text"]) -> str:
        """The text of all parts of a kind."""
        return "".join(part.text for part in self.parts if part.kind == kind)

    @property
    def calls(self) -> list[Part]:
        """The calls it makes."""
        return [part for part in self.parts if part.kind == "call"]


def gather(events: Iterable[JobEvent]) -> list[Answer]:
    """The answers of a job, by index; every answer has its Finished among the events."""
    cutters: dict[int, PartCutter] = {}
    logprobs: dict[int, list[TokenLogprob]] = {}
    finished: dict[int, Finished] = {}
    for event in events:
        cutter = cutters.setdefault(event.index, PartCutter())
        if isinstance(event, Choice):
            logprobs.setdefault(event.index, []).extend(event.logprobs or ())
            for reply in event.events:
                cutter.push(reply)
        else:
            finished[event.index] = event
    return [Answer(cutters[index].parts, logprobs.get(index, []), finished[index]) for index in sorted(finished)]
