"""An answer's text told apart into reasoning, content and tool calls. Knows no syntax of calls, no tokens.

The rules:

- A `<think>` block stands at the beginning of the answer, or right behind another block; further on it is content,
  where models and users write about it. One that never closes, and whatever is inside, is reasoning.
- Line breaks at the inside of the think markers and behind them belong to the markers. White space around a call
  belongs to the call: the template writes it again.
- What opens like a call but gets no valid name is content, verbatim. A call of a tool that was not declared is a call.
- Past the name, what stands between the parts of a call and belongs to none is dropped.
- Text is held back while it could still become a marker, while it is white space that a call could claim, and from the
  opening of a call until its name is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .call import Call, ToolFormat
from .events import Content, Reasoning, ReplyEvent, ToolEnd, merged
from .feed import NEWLINES, SPACES, Feed, Wait
from .formats import THINK, THINK_END
from .schema import Schemas

__all__ = ["ReplyParser", "begins_in_reasoning"]

_NEWLINES = "\r\n"
_ALL_SPACE = None  # as str.strip understands it


class ReplyParser:
    """Parses one answer. The events, merged, do not depend on how the text is cut into pieces.

    Args:
        format: how the model writes calls, from `detect_format`.
        tools: the declared tools, as the client sent them; empty, or with no format: call markers are content.
        in_reasoning: the prompt already opened the think block.

    Attributes:
        thought: where reasoning stands in the text so far, from behind its opening marker to its closing one; to None
            if that has not come.
    """

    def __init__(self, format: ToolFormat | None, tools: Sequence[Mapping[str, Any]], *, in_reasoning: bool) -> None:
        self._format = format if tools else None
        self._schemas = Schemas(tools)
        self._feed = Feed()
        self._events: list[ReplyEvent] = []
        self._calls = 0
        self.thought: list[tuple[int, int | None]] = []
        self._reading = self._reply(in_reasoning)

    def push(self, text: str) -> list[ReplyEvent]:
        """Events completed by the next piece of text."""
        self._feed.push(text)
        return self._advance()

    def finish(self) -> list[ReplyEvent]:
        """The answer is over: the events still held back. Nothing may be pushed after it."""
        self._feed.end()
        return self._advance()

    def _advance(self) -> list[ReplyEvent]:
        next(self._reading, None)  # runs until the text does not suffice
        events, self._events = self._events, []
        return merged(events) if len(events) > 1 else events

    def _reply(self, in_reasoning: bool) -> Wait[None]:
        block_space: str | None = ""  # white space that belongs to the block before
        if in_reasoning:
            yield from self._reasoning()
            block_space = _NEWLINES
        while True:
            space = yield from self._feed.span(SPACES)
            if (yield from self._feed.at(THINK)):
                yield from self._reasoning()
                block_space = _NEWLINES
            elif (yield from self._content(space.lstrip(block_space))):
                block_space = _ALL_SPACE
            else:
                return

    def _reasoning(self) -> Wait[None]:
        """Read a think block behind its opening marker."""
        begin = self._feed.position
        self.thought.append((begin, None))
        yield from self._feed.span(NEWLINES)
        text = _Trimmed(lambda text: self._emit(Reasoning(text)), _NEWLINES)
        if (yield from self._feed.until((THINK_END,), text.push)) is None:
            text.release()
        else:
            self.thought[-1] = (begin, self._feed.position - len(THINK_END))

    def _content(self, space: str) -> Wait[bool]:
        """Read content, which begins with `space`, and the call behind it. Returns whether there was one."""
        opens = self._format.opens if self._format else ()
        text = _Trimmed(lambda text: self._emit(Content(text)), _ALL_SPACE if opens else "")
        text.push(space)
        while marker := (yield from self._feed.until(opens, text.push)):
            self._feed.record(marker)
            if (yield from self._call(marker)):
                return True
            text.push(self._feed.forget())
        text.release()
        return False

    def _call(self, marker: str) -> Wait[bool]:
        """Read a call behind its opening marker. Returns whether it was one."""
        assert self._format is not None
        call = Call(self._feed, self._calls, self._schemas, self._emit)
        complete = yield from self._format.read(self._feed, marker, call)
        if call.name is None:
            return False
        self._emit(ToolEnd(self._calls, complete and call.is_sound))
        self._calls += 1
        return True

    def _emit(self, event: ReplyEvent) -> None:
        self._events.append(event)


class _Trimmed:
    """Passes text on without the `chars` at its end (None: white space), which wait for what follows."""

    def __init__(self, emit: Callable[[str], None], chars: str | None) -> None:
        self._emit = emit
        self._chars = chars
        self._held: list[str] = []

    def push(self, text: str) -> None:
        kept = text.rstrip(self._chars)
        if kept:
            self._emit("".join(self._held) + kept)
            self._held.clear()
        if len(kept) < len(text):
            self._held.append(text[len(kept) :])

    def release(self) -> None:
        """Nothing follows that could claim what was held back."""
        if self._held:
            self._emit("".join(self._held))
            self._held.clear()


def begins_in_reasoning(prompt: str) -> bool:
    """Whether a rendered prompt ends with an open think block, so that the answer begins inside it."""
    return prompt.rstrip().endswith(THINK)
