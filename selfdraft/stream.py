"""Answers: a row of the engine read piece by piece as text, by whoever steps the engine or by itself."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

from .engine import Engine, Request, Row, TokenScores
from .results import Generation, Piece, TokenLogprob, Usage
from .text import RowText, Tokenizer

__all__ = ["Answer", "TextStream"]


class Answer:
    """A request, the row that serves it once it has begun, and its text.

    It steps nothing: whoever steps the engine calls `take` until `over`.

    Args:
        timed: pieces carry the figures so far.

    Attributes:
        row: None until `begin`, and when it is over: what still refers to the answer does not hold the row's memory.
        over: the last piece was taken.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, request: Request, text: RowText, *, timed: bool = False
    ) -> None:
        self.engine = engine
        mine = weakref.ref(self)  # a strong one would close a circle: memory of rows would wait for the collector

        def on_prefill(done: int, total: int) -> None:
            if answer := mine():
                answer._on_prefill(done, total)

        self.request = replace(request, on_prefill=on_prefill)
        self.text = text
        self._tokenizer = tokenizer
        self._timed = timed
        self._told = request.on_prefill
        self.row: Row | None = None
        self._prompt_scores: list[TokenScores] = []
        self.over = False
        self._given_up = False
        self._ended: Row | None = None
        self._taken = 0
        self._scored = 0

    def begin(self) -> Row:
        """Let the row join the engine."""
        row = self.row = self.engine.add(self.request)
        self._prompt_scores = row.prompt_scores
        if self._given_up:
            self.engine.cancel(row)
        return row

    def give_up(self) -> None:
        """Ask for its end, from any thread: a prefill breaks off between two layers, the rest takes a `cancel`."""
        self._given_up = True

    def cancel(self) -> None:
        """End the row; an answer that has not begun ends when it does."""
        self._given_up = True
        self._ended = None
        if self.row is not None:
            self.engine.cancel(self.row)

    def take(self) -> Piece | None:
        """What is new since the last piece; None if nothing is. The last piece carries the finished generation.

        Raises:
            NonFiniteLogits: the model broke down on this row. SelfdraftError: a step of it was broken off.
        """
        row = self.row
        if row is None:
            return None
        if len(row.emitted) > self._taken:
            tokens, self._taken = row.emitted[self._taken :], len(row.emitted)
            scores, offsets = row.scores[self._scored :], self.text.offsets[self._scored :]
            self._scored = len(row.scores)
            return Piece(
                self.text.take(),
                tokens,
                self._logprobs(scores, offsets) if scores else None,
                timings=row.statistics.timings() if self._timed else None,
            )
        if not row.done:
            return None
        self.over, self.row = True, None
        self._ended = row if row.request.session and row.error is None else None
        if row.error is not None:
            raise row.error
        return Piece(self.text.finish(), result=self._generation(row))

    def settle(self) -> None:
        """Leave what the row holds to its session, once the answer is over and delivered; see `Engine.settle`."""
        row, self._ended = self._ended, None
        if row is not None:
            self.engine.settle(row)

    @cached_property
    def prompt_pieces(self) -> list[str]:
        """The text that each token of the prompt completes; joined, all of it."""
        return self._tokenizer.pieces(self.request.prompt)

    def prompt_logprobs(self) -> list[TokenLogprob | None]:
        """The scores of the prompt's tokens, once it is forwarded; the first has none, nothing comes before it."""
        offsets = list(accumulate(map(len, self.prompt_pieces)))
        return [None, *self._logprobs(self._prompt_scores, offsets)]

    def _on_prefill(self, done: int, total: int) -> None:
        if self._told:
            self._told(done, total)
        if self._given_up:
            self.cancel()

    def _generation(self, row: Row) -> Generation:
        """The finished answer; the text must have been flushed."""
        assert row.finish_reason is not None
        return Generation(
            text=self.text.text,
            token_ids=list(row.emitted),
            # A stop string may only show once the last character is complete.
            finish_reason="stop" if self.text.stop is not None else row.finish_reason,
            usage=Usage(len(row.request.prompt), len(row.emitted), row.statistics.restored_tokens),
            timings=row.statistics.timings(),
            logprobs=self._logprobs(row.scores, self.text.offsets) if row.params.logprobs is not None else None,
        )

    def _logprobs(self, scores: Sequence[TokenScores], offsets: Sequence[int]) -> list[TokenLogprob]:
        name = self._tokenizer.token_name

        def raw(id: int) -> list[int]:
            return list(self._tokenizer.token_bytes(id))

        return [
            TokenLogprob(
                score.token,
                name(score.token),
                score.logprob,
                [(id, name(id), value, raw(id)) for id, value in score.top],
                raw(score.token),
                offset,
            )
            for score, offset in zip(scores, offsets, strict=False)
        ]


class TextStream(Iterator[Piece]):
    """Pieces of one answer; the last one carries `result`, the finished generation.

    The row joins the engine when the first piece is asked for, and leaves it when the stream ends, is closed, or is
    dropped.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        # The generator must not refer to this object: dropping a stream then ends its row at once, not at some
        # later garbage collection.
        self._pieces = _pieces(self._answer)

    def __next__(self) -> Piece:
        return next(self._pieces)

    def cancel(self) -> None:
        """End the answer now. What it has emitted counts: the next piece is the last, its reason "cancelled"."""
        self._answer.cancel()

    def close(self) -> None:
        """Give the row up; there is no further piece."""
        self._answer.cancel()
        self._pieces.close()


def _pieces(answer: Answer) -> Generator[Piece]:
    row = answer.begin()
    try:
        for _ in answer.engine.run(row):
            yield answer.take() or Piece("")  # a prefill chunk: nothing to read, but the caller may want to stop
        if last := answer.take():
            yield last
            answer.settle()  # the reader has come back, so it has read the end
    finally:
        answer.cancel()
