"""Arguments written as raw text between tags, turned into JSON as they come. Knows JSON kinds; no tags of its own.

What a value is depends on the kinds its schema allows:

- a string only: a JSON string, verbatim, streamed;
- no string: the text itself if it is JSON, else a JSON string;
- a string among others, or nothing said: the text itself if it is JSON of an allowed kind other than string, else a
  JSON string. A text whose first character no such JSON can begin with is streamed.

Python's True, False and None count as JSON's words: some templates render past calls with them.
"""

from __future__ import annotations

import json

from .call import Call
from .feed import SPACES, Feed, Wait
from .json_text import JsonText, decoded
from .schema import kind_of

__all__ = ["Arguments", "read_value"]

_FIRST = {"array": "[", "boolean": "tfTF", "null": "nN", "number": "-0123456789", "object": "{"}
_WORDS = {"True": "true", "False": "false", "None": "null"}


class Arguments:
    """Writes the arguments object of one call, key by key."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._opener = "{"

    def value(self, key: str) -> Value:
        """Begin the next argument."""
        self._call.arguments(f"{self._opener}{_quoted(key)}: ")
        self._opener = ", "
        return Value(self._call, self._call.kinds(key))

    def end(self) -> None:
        """There are no more arguments."""
        self._call.arguments("}" if self._call.has_arguments else "{}")


class Value:
    """One argument's value; see the module's docstring. A value that is never ended stays as far as it came."""

    def __init__(self, call: Call, kinds: frozenset[str]) -> None:
        self._call = call
        self._others = kinds - {"string"}
        self._text_allowed = "string" in kinds
        self._held: list[str] | None = []  # None: it is a string, streamed
        self._json = JsonText()
        self._decided = not self._text_allowed
        if not self._others:
            self._stream()

    def push(self, text: str) -> None:
        """The next piece of the raw text."""
        if self._held is None:
            self._call.arguments(_escaped(text))
            return
        self._held.append(text)
        self._json.push(text)
        first = text.lstrip()[:1]
        if not self._decided and first:
            self._decided = True
            if not any(first in _FIRST[kind] for kind in self._others):
                self._stream()

    @property
    def in_json_string(self) -> bool:
        """Whether the text so far breaks off inside a string of what may be a JSON object or array."""
        return self._held is not None and self._json.in_string

    @property
    def is_json(self) -> bool:
        """Whether what is held is JSON."""
        try:
            decoded("".join(self._held or ()))
        except ValueError:
            return False
        return True

    @property
    def pieces(self) -> int:
        """How many pieces are held."""
        return len(self._held or ())

    def cut(self, pieces: int) -> None:
        """Take back all but so many pieces."""
        assert self._held is not None, "only what is held can be taken back"
        del self._held[pieces:]

    def end(self) -> None:
        """The raw text is complete."""
        if self._held is None:
            self._call.arguments('"')
        else:
            self._call.arguments(self._as_json("".join(self._held)))

    def _stream(self) -> None:
        held, self._held = "".join(self._held or []), None
        self._call.arguments('"' + _escaped(held))

    def _as_json(self, text: str) -> str:
        word = text.strip()
        word = _WORDS.get(word, word)
        if word[:1] in ("{", "["):
            inner = JsonText()
            clean, used = inner.push(word)
            word = clean + word[used:]
        try:
            kind = kind_of(decoded(word))
        except ValueError:
            return _quoted(text)
        return _quoted(text) if self._text_allowed and kind not in self._others else word


def read_value(feed: Feed, closers: tuple[str, ...], followers: tuple[str, ...], value: Value) -> Wait[bool]:
    """Read a raw value up to its closing tag. Returns whether that came.

    A tag is the closing one only if one of `followers` comes next: a value may quote its own closing tag. A string in
    JSON may quote both; that it was one is known once the value has become JSON, else the first such tag counts.
    """
    doubtful: int | None = None  # pieces of the value in front of that tag
    while closer := (yield from feed.until(closers, value.push)):
        gap = yield from feed.span(SPACES)
        closes = (yield from feed.peek(*followers)) or feed.exhausted
        if closes and not value.in_json_string:
            if doubtful is not None and not value.is_json:
                break
            feed.forget()
            value.end()
            return True
        feed.unread(gap)
        if closes and doubtful is None:
            doubtful = value.pieces
            feed.record("")
        value.push(closer)
    if doubtful is None:
        return False
    feed.unread(feed.forget())
    value.cut(doubtful)
    value.end()
    return True


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """The inside of a JSON string; pieces add up."""
    return _quoted(text)[1:-1]
