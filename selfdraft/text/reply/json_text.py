"""One JSON value followed through its text, cut anywhere. Knows where a value ends; builds no objects."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from .feed import Feed, Wait

__all__ = ["JsonText", "decoded", "read_json"]

_OUTSIDE = re.compile(r'["{}\[\]<]')
_INSIDE = re.compile(r'["\\\x00-\x1f]')
_SCALAR = re.compile(r'[^\s,{}\[\]"<]*')


class JsonText:
    """Follows an object, an array or a string to its end.

    Line breaks and other control characters inside strings, which JSON forbids and models write, come out escaped.
    A "<" outside strings is no JSON: the value is broken and ends before it, so that a lost bracket cannot swallow the
    marker behind it.

    Attributes:
        over: nothing more belongs to the value: it was read to its end, or it is broken.
        whole: it was read to its end.
        in_string: a string inside an object or an array is open, and nothing in it is no JSON.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self._broken = False  # the string that is open
        self.over = False
        self.whole = False

    def push(self, text: str) -> tuple[str, int]:
        """(the value's text, how many characters of `text` belong to it)."""
        out: list[str] = []
        at = 0
        while at < len(text) and not self.over:
            if self._escaped:
                out.append(text[at])
                at += 1
                self._escaped = False
                continue
            found = (_INSIDE if self._quoted else _OUTSIDE).search(text, at)
            if found is None:
                out.append(text[at:])
                at = len(text)
                break
            out.append(text[at : found.start()])
            at = found.start()
            if (char := self._read(found.group())) is not None:
                out.append(char)
                at += 1
        return "".join(out), at

    @property
    def in_string(self) -> bool:
        return self._quoted and self._depth > 0 and not self._broken

    def _read(self, char: str) -> str | None:
        """Read a character that means something; None: it is not part of the value."""
        if self._quoted and char == "\\":
            self._escaped = True
        elif self._quoted and char != '"':
            self._broken = True
            return json.dumps(char)[1:-1]
        elif char == '"':
            self._quoted, self._broken = not self._quoted, False
            self._close()
        elif char in "{[":
            self._depth += 1
        elif char in "]}":
            self._depth -= 1
            self._close()
        else:
            self.over = True
            return None
        return char

    def _close(self) -> None:
        if self._depth <= 0 and not self._quoted:
            self.over = self.whole = True


def read_json(feed: Feed, sink: Callable[[str], object]) -> Wait[bool]:
    """Read one JSON value; its text goes to `sink` as it comes. Returns whether it was read to its end."""
    if (yield from feed.peek("{", "[", '"')) is None:
        scalar = yield from feed.span(_SCALAR)
        sink(scalar)
        return scalar != "" and not feed.exhausted
    value = JsonText()

    def step(text: str) -> tuple[int, bool]:
        piece, used = value.push(text)
        sink(piece)
        return used, value.over

    yield from feed.scan(step)
    return value.whole


def decoded(text: str) -> object:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON (NaN and Infinity are none), or nested too deep.
    """
    try:
        return json.loads(text, parse_constant=_refused)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _refused(word: str) -> object:
    raise ValueError(f"{word} is no JSON")
