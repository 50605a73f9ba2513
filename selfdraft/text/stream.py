"""Streaming text: ids to text piece by piece, and the search for stop strings in it.

Knows one row's tokens and text; knows nothing of sampling or of when a row ends.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Any, Protocol

import tokenizers

from ..errors import InvalidRequest

__all__ = ["StopMatcher", "TokenStream", "bytes_of"]


class TokenStream:
    """Incremental detokenisation: what `push` and `finish` return, joined, is the decoding of all ids.

    `tokenizers.decoders.DecodeStream` is not used: it cannot flush, so it loses an unfinished tail, and it
    raises "Invalid prefix encountered" on byte-fallback tokens that turn out not to be UTF-8.

    Args:
        library: the tokenizer whose decoder is followed.
        skip: ids without text (special tokens). Ids outside the vocabulary have none either.
    """

    def __init__(self, library: tokenizers.Tokenizer, *, skip: frozenset[int] = frozenset()) -> None:
        self._id_to_token = library.id_to_token
        self._skip = skip
        self._pieces: _Pieces = _ByteLevel() if _is_byte_level(library.decoder) else _Window(library.decoder)

    def push(self, ids: Sequence[int]) -> str:
        """Text completed by `ids`; "" while a character is incomplete. Any cut into calls gives the same."""
        tokens = [self._id_to_token(int(id)) for id in ids if id not in self._skip]
        return self._pieces.push([token for token in tokens if token is not None])

    def finish(self) -> str:
        """What is still held back: an incomplete character comes out as U+FFFD, as in a whole decode."""
        return self._pieces.finish()


def bytes_of(token: str, decoder: Any) -> bytes:
    """The bytes of a token, as a decoder reads it: they may be no whole characters."""
    if _is_byte_level(decoder):
        return _ByteLevel.read(token)
    return bytes.fromhex(token[3:5]) if _is_byte(token) else token.encode()


class _Pieces(Protocol):
    def push(self, tokens: list[str]) -> str: ...

    def finish(self) -> str: ...


def _is_byte_level(decoder: Any) -> bool:
    """Whether decoding is: map each token to bytes, join, read as UTF-8."""
    if decoder is None:
        return False
    state = json.loads(decoder.__getstate__())
    kinds = [part["type"] for part in state["decoders"]] if state["type"] == "Sequence" else [state["type"]]
    return kinds.count("ByteLevel") == 1 and set(kinds) <= {"ByteLevel", "Fuse"}  # Fuse only joins


def _byte_of_char() -> dict[str, int]:
    """GPT-2's byte alphabet (`bytes_to_unicode` in openai/gpt-2 src/encoder.py), inverted: printable Latin-1
    stands for itself, the other bytes for U+0100 and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_of_char()


class _ByteLevel:
    """Byte-level BPE: an incremental UTF-8 reader on the tokens' bytes. No token is decoded twice."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: list[str]) -> str:
        return self._utf8.decode(b"".join(map(self.read, tokens)))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)

    @staticmethod
    def read(token: str) -> bytes:
        """The bytes of a token."""
        try:
            return bytes([_BYTES[char] for char in token])
        except KeyError:  # an added token, written plainly (with a space, say): the library takes it as it is
            return token.encode("utf-8")


class _Window:
    """Any other decoder: decode the last emitted tokens and the pending ones together, emit what is new.

    A run of byte-fallback tokens (<0xE2>...) is held until it ends: the library decodes a run as a whole, and
    one bad byte turns every character of the run into U+FFFD, those already complete included.
    """

    def __init__(self, decoder: Any) -> None:
        self._decode = " ".join if decoder is None else decoder.decode
        self._context: list[str] = []
        self._shown = ""  # the context's text
        self._pending: list[str] = []

    def push(self, tokens: list[str]) -> str:
        self._pending += tokens
        if not self._pending or _is_byte(self._pending[-1]):
            return ""
        text: str = self._decode(self._context + self._pending)
        if text.endswith("\ufffd") or len(text) <= len(self._shown) or not text.startswith(self._shown):
            return ""
        new = text[len(self._shown) :]
        self._context, self._pending = self._pending, []
        self._shown = self._decode(self._context)
        return new

    def finish(self) -> str:
        text: str = self._decode(self._context + self._pending)
        new = text[len(self._shown) :]
        self._context, self._pending, self._shown = [], [], ""
        return new


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


class StopMatcher:
    """Streaming search for stop strings; how the text is cut into pushes does not matter.

    The stop that is complete first wins, which is the first moment a generation can end; of several complete
    at the same character the longest, since it begins earliest. (Of "abcd" and "bc", "bc" wins in "abcd": it
    is complete at "abc", when no one can know what follows.) One Knuth-Morris-Pratt automaton per stop:
    constant work a character, and its state is exactly how much of the text's end could still begin that
    stop.

    Raises:
        InvalidRequest: `stops` is a bare string, or holds an empty one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise InvalidRequest(f"stop must be a list of strings, not {stops!r}", param="stop")
        for n, stop in enumerate(stops):
            if not isinstance(stop, str) or not stop:
                raise InvalidRequest(f"stop[{n}] must be a non-empty string, not {stop!r}", param="stop")
        self._stops = tuple(dict.fromkeys(stops))
        self._borders = [_borders(stop) for stop in self._stops]
        self._progress = [0] * len(self._stops)
        self._held = ""
        self.matched: str | None = None  # the stop string that was found

    def push(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """(text that may be shown now, stopped?). Holds back the longest end that could begin a stop string.

        armed=False: this text cannot complete a stop, though one may begin in it. After a stop: ("", True).
        """
        if self.matched is not None:
            return "", True
        whole = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            found = self._step(char)
            if found is not None and armed:
                self.matched, self._held = found, ""
                return whole[: end - len(found)], True
        cut = len(whole) - max(self._progress, default=0)
        self._held = whole[cut:]
        return whole[:cut], False

    def finish(self) -> str:
        """The text held back: no stop can be completed any more."""
        held, self._held = self._held, ""
        self._progress = [0] * len(self._stops)
        return held

    def _step(self, char: str) -> str | None:
        """Read one character; the longest stop it completes."""
        found: str | None = None
        for n, stop in enumerate(self._stops):
            borders, length = self._borders[n], self._progress[n]
            while length and stop[length] != char:
                length = borders[length - 1]
            if stop[length] == char:
                length += 1
            if length == len(stop):
                found = stop if found is None or len(stop) > len(found) else found
                length = borders[length - 1]
            self._progress[n] = length
        return found


def _borders(stop: str) -> list[int]:
    """KMP's failure function: for each prefix, its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for n in range(1, len(stop)):
        while length and stop[length] != stop[n]:
            length = borders[length - 1]
        if stop[length] == stop[n]:
            length += 1
        borders[n] = length
    return borders
