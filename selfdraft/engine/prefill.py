"""Prefill: the prompt in chunks, the last token alone, the head's history primed and tokens scored on the way.

AR and MTP cut a prompt the same way, on a grid from position 0 and where its session wants a boundary, so that their
first logits are the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..errors import NonFiniteLogits
from ..models.base import Model
from .constraint import dead_end
from .cycle import Cycle, emit
from .row import Pending, Row
from .scores import finite_positions, log_softmax_at, raw_scores, read_scores
from .session import Boundary, Cut

__all__ = ["SCORED_TOGETHER", "Prefill"]

# Prompt positions whose logits are in memory at once when tokens are scored: of a whole chunk they would be gigabytes.
SCORED_TOGETHER = 64

# Tokens [1, P], whether all their logits are finite, and what `log_softmax_at` gives.
Scored = tuple[mx.array, ...]

_NOT_FINITE = (
    "the model produced NaN or infinite logits on the prompt; "
    "try another dtype (SELFDRAFT_DTYPE=float32) or fetch the checkpoint again"
)


class Prefill:
    """Advances rows through their prompts, one chunk at a time."""

    def __init__(self, model: Model, cycle: Cycle, chunk: int) -> None:
        self._model = model
        self._cycle = cycle
        self._chunk = chunk

    def advance(self, row: Row) -> bool:
        """Forward the next chunk of a row's prompt; with the last one its first token is emitted.

        Returns:
            Whether the prompt is through, or the row done.
        """
        if row.prefill_begin is None:
            row.prefill_begin = time.perf_counter()
        body, session = len(row.request.prompt) - 1, row.request.session
        if session and (known := session.resume(row.state.length, drafts=row.drafts)):
            row.go_on_from(known)
        if self._prepares(row, body):
            return row.done
        for layer in (*row.state.attention, *row.state.head):  # it may be another state by now
            layer.room = row.room
        if row.state.length < body:
            self._forward_chunk(row, self._next_cut(row, body))
            through = row.done
        elif row.request.only_prompt:
            row.report_prefill(body + 1)
            row.finish_reason = row.finish_reason or "length"
            through = True
        else:
            self._first_token(row)
            through = True
        row.statistics.prompt_seconds = time.perf_counter() - row.prefill_begin
        return through

    def _prepares(self, row: Row, body: int) -> bool:
        """Whether something that the next tokens need was made ready: it takes a turn of its own, as a chunk does."""
        inputs, length = row.request.inputs, row.state.length
        if inputs is None:
            return False
        row.state.rope_delta = inputs.rope_delta(length)
        if length < body and inputs.prepare(length, self._next_cut(row, body)):
            assert row.prefill_begin is not None
            row.statistics.prompt_seconds = time.perf_counter() - row.prefill_begin
            return True
        return False

    def settle(self, row: Row) -> None:
        """Hand a row that has ended to its session: its newest token is forwarded, and the head sees all pairs."""
        session = row.request.session
        if session is None or row.error is not None or not row.emitted:
            return
        tokens = [*row.request.prompt, *row.emitted]
        assert row.state.length == len(tokens) - 1, "a row holds all its tokens but the last"
        hidden, captured = self._model.forward(mx.array([[row.last]]), [row.state], keep_steps=True)
        captured.commit([row.state], [1])
        if row.pending:
            self._cycle.commit_history([row])
        row.tail = hidden[:, 0]
        mx.eval(row.state.arrays(), row.tail)
        row.cuts = (*row.cuts, Cut(len(tokens), chunk=False))
        self._keep(row, tokens)

    def _next_cut(self, row: Row, body: int) -> int:
        """Where the next chunk ends."""
        start = row.state.length
        ends = [(start // self._chunk + 1) * self._chunk, body]
        if row.request.session:
            ends += [stop for stop in row.request.session.stops if stop > start]
        return min(ends)

    def _forward_chunk(self, row: Row, end: int) -> None:
        start = row.state.length
        hidden = self._forward(row, start, end, keep_steps=False)
        if row.drafts:
            self._prime(row, hidden, start, end)
        row.tail = hidden[:, -1]
        scored = self._score(row, hidden, start)
        self._evaluate(row, start, end, scored)
        if row.done:
            return
        self._read(row, scored)
        row.cuts = (*row.cuts, Cut(end, chunk=True))
        if row.request.session and not row.done and end in row.request.session.stops:
            self._keep(row, row.request.prompt[:end])

    def _prime(self, row: Row, hidden: mx.array, start: int, end: int) -> None:
        """Give the head the pairs of a chunk's own tokens. The one with the token behind it waits for the next chunk,
        so that what a boundary holds does not hang on what comes after it."""
        first = start
        if row.tail is not None:
            hidden = mx.concatenate([row.tail[None], hidden], axis=1)
        else:
            first += 1  # nothing comes before the first token
        if first == end:
            return
        tokens = mx.array([list(row.request.prompt[first:end])])
        beside = row.request.inputs.head(first, end) if row.request.inputs else {}
        self._model.draft(tokens, hidden[:, :-1], [row.state], [row.state.head_length], **beside)
        row.state.head_length += end - first

    def _keep(self, row: Row, tokens: Sequence[int]) -> None:
        assert row.request.session is not None
        assert row.tail is not None
        row.request.session.keep(tokens, Boundary(row.state.fork(), row.tail, row.cuts))

    def _score(self, row: Row, hidden: mx.array, start: int) -> list[Scored]:
        """Scores of the tokens behind the positions of a chunk, a slice of these each; none if nobody asks."""
        top = row.request.prompt_logprobs
        if top is None:
            return []
        following = mx.array([list(row.request.prompt[start + 1 : start + 1 + hidden.shape[1]])])
        scored = []
        for first in range(0, hidden.shape[1], SCORED_TOGETHER):
            logits = self._model.logits(hidden[:, first : first + SCORED_TOGETHER])
            tokens = following[:, first : first + SCORED_TOGETHER]
            scored.append((tokens, finite_positions(logits).all(), *log_softmax_at(logits, tokens, top)))
        return scored

    def _evaluate(self, row: Row, start: int, end: int, scored: Sequence[Scored]) -> None:
        """Evaluate a chunk layer by layer: between layers Ctrl-C is heard, progress told, a cancelled row let go.

        Scores come after the layers, slice by slice, so that the logits of one are gone before the next.
        """
        state = row.state
        buffers = [layer.values for layer in (*state.attention, *state.head) if layer.values is not None]
        parts = [*(layer.base for layer in state.recurrent), *buffers, *scored]
        for index, part in enumerate(parts, start=1):
            mx.eval(part)
            row.report_prefill(start + (end - start) * index // len(parts))
            if row.done:
                return
        mx.eval(state.arrays(), row.tail)

    def _read(self, row: Row, scored: Sequence[Scored]) -> None:
        for tokens, finite, *scores in scored:
            if not finite.item():
                row.error = NonFiniteLogits(_NOT_FINITE)
                return
            if read := read_scores(tokens, tuple(scores)):
                row.prompt_scores += read[0]

    def _first_token(self, row: Row) -> None:
        length = row.state.length
        hidden = self._forward(row, length, length + 1, keep_steps=True)
        logits = self._model.logits(hidden)
        batch = self._cycle.batch([row], [0])
        allowed = batch.allowed()
        z, flaws = batch.chain(logits, batch.emitted, batch.histories, None, allowed)
        tokens, finite = batch.choose(z), (flaws == 0).all()
        scores = raw_scores(logits, tokens, [row])
        mx.eval(tokens, finite, *scores)
        row.draws += 1
        row.report_prefill(length + 1)
        if row.done:
            return
        if not finite.item():
            row.error = NonFiniteLogits(_NOT_FINITE)
            return
        if allowed and not allowed.open.all():
            row.error = dead_end(0)
            return
        kept = emit(row, np.array(tokens)[0].tolist())
        row.statistics.emitted["prefill"] += len(kept)
        if row.drafts and kept:
            row.pending = self._pending(row, hidden[0], kept)
        if read := read_scores(tokens, scores):
            row.scores += read[0][: len(kept)]

    def _pending(self, row: Row, hidden: mx.array, first: list[int]) -> Pending:
        """The pair of the prompt's last token, if one comes before it, and that of the token it yields."""
        if row.tail is None:
            return Pending(hidden, first)
        pairs = Pending(mx.concatenate([row.tail, hidden]), [row.request.prompt[-1], *first])
        row.tail = None
        return pairs

    def _forward(self, row: Row, start: int, end: int, *, keep_steps: bool) -> mx.array:
        tokens = mx.array([list(row.request.prompt[start:end])])
        beside = row.request.inputs.trunk(start, end) if row.request.inputs else {}
        hidden, captured = self._model.forward(tokens, [row.state], keep_steps=keep_steps, **beside)
        row.statistics.trunk_forwards += 1
        row.statistics.prefill_chunks += 1
        captured.commit([row.state], [end - start])
        return hidden
