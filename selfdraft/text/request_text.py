"""One row's visible text: detokenised, cut at its stop string. Knows no engine: it is handed ids."""

from __future__ import annotations

from collections.abc import Sequence

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

    Raises:
        InvalidRequest: an empty stop string, a negative min_tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        keep: frozenset[str] = frozenset(),
    ) -> None:
        if min_tokens < 0:
            raise InvalidRequest(f"min_tokens must be 0 or more, not {min_tokens}", param="min_tokens")
        self._stream = tokenizer.stream(keep)
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._count = 0
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
            None: all are kept. A number: a stop string was completed, and this many of these ids belong to
            the row, the one that completed it included; 0 in any later call.
        """
        if self.stop is not None:
            return 0
        for kept, id in enumerate(ids, 1):
            self._count += 1
            if self._show(self._stream.push((id,)), armed=self._count > self._min_tokens):
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
            self._show(self._stream.finish(), armed=self._count > self._min_tokens)
            self._shown.append(self._matcher.finish())
        return self.take()

    def _show(self, text: str, *, armed: bool) -> bool:
        visible, stopped = self._matcher.push(text, armed=armed)
        if visible:
            self._shown.append(visible)
        return stopped
