"""Text that arrives in pieces, read as if it were whole. Knows strings; nothing of what they mean.

The readers are generators that yield while they wait for more text, so a grammar is written as straight code. Each
decides on the text alone, never on where it was cut, and waits only while what is there could still become what it
looks for.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

__all__ = ["NAME", "NEWLINES", "SPACES", "Feed", "Wait", "ignore"]

T = TypeVar("T")
Wait = Generator[None, None, T]  # yields: more text is needed; returns: the result

SPACES = re.compile(r"\s*")
NEWLINES = re.compile(r"[\r\n]*")
NAME = re.compile(r"[\w.:/-]*")


class Feed:
    """The text not read yet."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._pushed = 0
        self._ended = False
        self._record: list[str] | None = None

    def push(self, text: str) -> None:
        """More text arrived."""
        self._text = self._text[self._at :] + text
        self._at = 0
        self._pushed += len(text)

    def end(self) -> None:
        """No more text will come."""
        self._ended = True

    @property
    def position(self) -> int:
        """How many characters of all the text were read."""
        return self._pushed - len(self._text) + self._at

    @property
    def exhausted(self) -> bool:
        """The end has come and everything was read."""
        return self._ended and self._at == len(self._text)

    def record(self, text: str) -> None:
        """Remember `text`, and from here on everything that is read."""
        self._record = [text]

    def forget(self) -> str:
        """Stop remembering. Returns what was remembered."""
        recorded, self._record = self._record or [], None
        return "".join(recorded)

    def until(self, markers: tuple[str, ...], sink: Callable[[str], object]) -> Wait[str | None]:
        """Read up to and past the first of `markers`; what stands before it goes to `sink` as it comes.

        No marker may be the beginning of another, or stand in the middle of one.

        Returns:
            The marker, or None: the text ended without one.
        """
        wanted = _wanted(markers)
        while True:
            found = wanted.pattern.search(self._text, self._at)
            before = found.start() if found else len(self._text) if self._ended else self._undoubted(wanted)
            if before > self._at:
                sink(self._take(before))
            if found:
                return self._take(found.end())
            if self._ended:
                return None
            yield

    def collect(self, marker: str) -> Wait[str | None]:
        """What stands before `marker`, which is read too; None: the text ended without it."""
        parts: list[str] = []
        found = yield from self.until((marker,), parts.append)
        return None if found is None else "".join(parts)

    def peek(self, *literals: str) -> Wait[str | None]:
        """Which of `literals` comes next, without reading it."""
        longest = max(map(len, literals))
        while True:
            rest = self._text[self._at : self._at + longest]
            for literal in literals:
                if rest.startswith(literal):
                    return literal
            if self._ended or not any(literal.startswith(rest) for literal in literals):
                return None
            yield

    def at(self, *literals: str) -> Wait[str | None]:
        """Read the one of `literals` that comes next; if none does, read nothing."""
        found = yield from self.peek(*literals)
        return self._take(self._at + len(found)) if found else None

    def span(self, pattern: re.Pattern[str], limit: int = sys.maxsize) -> Wait[str]:
        """Read the longest run that `pattern`, a repeated set of characters, allows; at most `limit` of them."""
        parts: list[str] = []
        while True:
            found = pattern.match(self._text, self._at, min(len(self._text), self._at + limit))
            parts.append(self._take(found.end() if found else self._at))
            limit -= len(parts[-1])
            if self._at < len(self._text) or limit == 0 or self._ended:
                return "".join(parts)
            yield

    def scan(self, step: Callable[[str], tuple[int, bool]]) -> Wait[None]:
        """Hand text to `step` until it is done. It returns how much of the text it read, and whether that was all."""
        while True:
            used, done = step(self._text[self._at :])
            self._take(self._at + used)
            if done or self._ended:
                return
            yield

    def unread(self, text: str) -> None:
        """Put back what was read last."""
        self._text = text + self._text[self._at :]
        self._at = 0
        rest = len(text) if self._record else 0
        while rest > 0 and self._record:
            last = self._record.pop()
            rest -= len(last)
        if rest < 0 and self._record is not None:
            self._record.append(last[:-rest])

    def _take(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        if self._record is not None:
            self._record.append(text)
        return text

    def _undoubted(self, wanted: _Wanted) -> int:
        """Where the longest end of the text begins that could still become a marker."""
        size = len(self._text)
        for start in range(max(self._at, size - wanted.longest + 1), size):
            if self._text[start:] in wanted.beginnings:
                return start
        return size


@dataclass(frozen=True)
class _Wanted:
    """A set of markers, prepared."""

    pattern: re.Pattern[str]
    longest: int
    beginnings: frozenset[str]  # all proper beginnings of the markers


@cache
def _wanted(markers: tuple[str, ...]) -> _Wanted:
    return _Wanted(
        re.compile("|".join(map(re.escape, markers)) or "(?!)"),
        max(map(len, markers), default=1),
        frozenset(marker[:size] for marker in markers for size in range(1, len(marker))),
    )


def ignore(_: str) -> None:
    """A sink for text that belongs to no channel."""
