"""One row's visible text: detokenised, cut at its stop string. Knows no engine: it is handed ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import InvalidRequest
from .stream import StopMatcher
from .tokenizer import Tokenizer

__all__ = ["RowText"]


class RowText:
    """Couples a TokenStream and a StopMatcher. For one row, used by one thread at a time.

    Ids are followed one at a time whatever the calls, so a cycle that emits five tokens and five cycles that
    emit one give the same text and stop at the same token.

    Args:
        tokenizer: decodes; its EOS ids never appear in the text, its special ids only if `keep` names them.
        stops: stop strings; the first one completed ends the row and is not part of the text.
        min_tokens: the first min_tokens ids cannot complete a stop string (they may begin one), just as none
            of them can be an EOS.
        keep: tokens to show although they are special, such as the markers a `ReplyParser` looks for.
        ends: told each piece of text as it becomes visible, to the last; where it says so, the row ends with that
            token.

    Attributes:
        offsets: where each id begins in the text, in characters; inside a character, where that begins.

    Raises:
        InvalidRequest: an empty stop string, a negative min_tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        keep: frozenset[str] = frozenset(),
        ends: Callable[[str], bool] | None = None,
    ) -> None:
        if min_tokens < 0:
            raise InvalidRequest(f"min_tokens must be 0 or more, not {min_tokens}", param="min_tokens")
        self._stream = tokenizer.stream(keep)
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._ends = ends
        self._ended = False  # so it was said; with min_tokens, the row goes on
        self._over = False
        self._decoded = 0  # characters so far, those held back included
        self.offsets: list[int] = []
        self._shown: list[str] = []
        self._taken = 0  # how many entries of _shown were taken

    @property
    def text(self) -> str:
        """All visible text so far; what is held back (half a character, a possible stop) is not in it yet."""
        return "".join(self._shown)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the row, if one did; it may also be found by `finish`."""
        return self._matcher.matched

    def push(self, ids: Sequence[int]) -> int | None:
        """Take newly emitted ids, in order.

        Returns:
            None: all are kept. A number: the row ends, and this many of these ids belong to it, the one that
            completed the stop string included; 0 in any later call.
        """
        if self._over:
            return 0
        for kept, id in enumerate(ids, 1):
            self.offsets.append(self._decoded)
            text = self._stream.push((id,))
            self._decoded += len(text)
            if self._show(text, armed=len(self.offsets) > self._min_tokens):
                self._over = True
                return kept
        return None

    def take(self) -> str:
        """The text that became visible since the last take."""
        new = "".join(self._shown[self._taken :])
        self._taken = len(self._shown)
        return new

    def finish(self) -> str:
        """The row is over: let go of what was held back. Returns all text not taken yet."""
        if self.stop is None:
            self._show(self._stream.finish(), armed=len(self.offsets) > self._min_tokens)
            self._append(self._matcher.finish())
        return self.take()

    def _show(self, text: str, *, armed: bool) -> bool:
        visible, stopped = self._matcher.push(text, armed=armed)
        self._append(visible)
        return stopped or (self._ended and armed)

    def _append(self, visible: str) -> None:
        if visible:
            self._shown.append(visible)
            if self._ends is not None:
                self._ended = self._ends(visible) or self._ended
