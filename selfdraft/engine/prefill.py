"""Prefill: the prompt in chunks, the last token alone, the head's history primed and tokens scored on the way.

AR and MTP cut a prompt the same way, on a grid from position 0, so that their first logits are the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..errors import NonFiniteLogits
from ..models.base import Model
from .constraint import dead_end
from .cycle import Cycle, emit, finite_positions, log_softmax_at, raw_scores, read_scores
from .row import Pending, Row

__all__ = ["SCORED_TOGETHER", "Prefill"]

# Prompt positions whose logits are in memory at once when tokens are scored: of a whole chunk they would be gigabytes.
SCORED_TOGETHER = 64

# Tokens [1, P], whether all their logits are finite, and what `log_softmax_at` gives.
Scored = tuple[mx.array, ...]

_NOT_FINITE = "the model produced NaN or infinite logits on the prompt"


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
        body = len(row.request.prompt) - 1
        if row.state.length < body:
            self._forward_chunk(row, min(row.state.length + self._chunk, body))
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

    def _forward_chunk(self, row: Row, end: int) -> None:
        start = row.state.length
        prompt = row.request.prompt
        hidden = self._forward(row, start, end, keep_steps=False)
        if row.drafts:
            following = mx.array([list(prompt[start + 1 : end + 1])])
            self._model.draft(following, hidden, [row.state], [row.state.head_length])
            row.state.head_length += end - start
        scored = self._score(row, hidden, start)
        self._evaluate(row, start, end, scored)
        if not row.done:
            self._read(row, scored)

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
        parts = [*(layer.memory for layer in state.recurrent), *buffers, *scored]
        for index, part in enumerate(parts, start=1):
            mx.eval(part)
            row.report_prefill(start + (end - start) * index // len(parts))
            if row.done:
                return
        mx.eval(state.arrays())

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
        tokens = batch.choose(batch.chain(logits, batch.emitted, batch.histories, None, allowed))
        finite = finite_positions(logits).all()
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
        if row.drafts:
            row.pending = Pending(hidden[0], kept)
        if read := read_scores(tokens, scores):
            row.scores += read[0][: len(kept)]

    def _forward(self, row: Row, start: int, end: int, *, keep_steps: bool) -> mx.array:
        tokens = mx.array([list(row.request.prompt[start:end])])
        hidden, captured = self._model.forward(tokens, [row.state], keep_steps=keep_steps)
        row.statistics.trunk_forwards += 1
        row.statistics.prefill_chunks += 1
        captured.commit([row.state], [end - start])
        return hidden
