"""A streamed answer: one row of the engine, read piece by piece as text."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence

from .engine import Engine, Request, Row, TokenScores
from .results import Generation, Piece, TokenLogprob, Usage
from .text import RowText, Tokenizer

__all__ = ["TextStream"]

Progress = Callable[[int, int], None]


class TextStream(Iterator[Piece]):
    """Pieces of one answer; the last one carries `result`, the finished generation.

    The row joins the engine when the first piece is asked for, and leaves it when the stream ends, is closed, or is
    dropped.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, request: Request, text: RowText, on_prefill: Progress | None = None
    ) -> None:
        self._answer = _Answer(engine, tokenizer, request, text)
        # The generator must not refer to this object: dropping a stream then ends its row at once, not at some
        # later garbage collection.
        self._pieces = _pieces(self._answer, on_prefill)

    def __next__(self) -> Piece:
        return next(self._pieces)

    def cancel(self) -> None:
        """End the answer now. What it has emitted counts: the next piece is the last, its reason "cancelled"."""
        self._answer.cancel()

    def close(self) -> None:
        """Give the row up; there is no further piece."""
        self._answer.cancel()
        self._pieces.close()


class _Answer:
    """A request, the row that serves it once it has begun, and its text."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, request: Request, text: RowText) -> None:
        self.engine = engine
        self.request = request
        self.text = text
        self._tokenizer = tokenizer
        self._row: Row | None = None
        self._cancelled = False

    def begin(self) -> Row:
        row = self._row = self.engine.add(self.request)
        if self._cancelled:
            self.engine.cancel(row)
        return row

    def cancel(self) -> None:
        self._cancelled = True
        if self._row is not None:
            self.engine.cancel(self._row)

    def generation(self, row: Row) -> Generation:
        """The finished answer; the text must have been flushed."""
        assert row.finish_reason is not None
        return Generation(
            text=self.text.text,
            token_ids=list(row.emitted),
            # A stop string may only show once the last character is complete.
            finish_reason="stop" if self.text.stop is not None else row.finish_reason,
            usage=Usage(len(row.request.prompt), len(row.emitted)),
            timings=row.statistics.timings(),
            logprobs=self.logprobs(row.scores) if row.params.logprobs is not None else None,
        )

    def logprobs(self, scores: Sequence[TokenScores]) -> list[TokenLogprob]:
        name = self._tokenizer.token_text
        return [
            TokenLogprob(
                score.token, name(score.token), score.logprob, [(id, name(id), value) for id, value in score.top]
            )
            for score in scores
        ]


def _pieces(answer: _Answer, on_prefill: Progress | None) -> Generator[Piece]:
    row = answer.begin()
    scored = 0
    try:
        for tokens in answer.engine.run(row):
            if on_prefill and not row.emitted:
                on_prefill(row.prefilled, len(row.request.prompt))
            scores = answer.logprobs(row.scores[scored:]) if tokens and row.scores else None
            scored = len(row.scores)
            yield Piece(answer.text.take(), tokens, scores)
        yield Piece(answer.text.finish(), result=answer.generation(row))
    finally:
        answer.engine.cancel(row)
