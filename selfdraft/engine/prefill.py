"""Prefill: the prompt in chunks, the last token alone, the head's history primed on the way.

AR and MTP cut a prompt the same way, on a grid from position 0, so that their first logits are the same bits.
"""

from __future__ import annotations

import time

import mlx.core as mx
import numpy as np

from ..errors import NonFiniteLogits
from ..models.base import Model
from .constraint import dead_end
from .cycle import Cycle, emit, finite_positions, raw_scores, read_scores
from .row import Pending, Row

__all__ = ["Prefill"]


class Prefill:
    """Advances rows through their prompts, one chunk at a time."""

    def __init__(self, model: Model, cycle: Cycle, chunk: int) -> None:
        self._model = model
        self._cycle = cycle
        self._chunk = chunk

    def advance(self, row: Row) -> bool:
        """Forward the next chunk of a row's prompt; with the last one its first token is emitted.

        Returns:
            Whether the prompt is through.
        """
        if row.prefill_begin is None:
            row.prefill_begin = time.perf_counter()
        body = len(row.request.prompt) - 1
        if row.state.length < body:
            self._forward_chunk(row, min(row.state.length + self._chunk, body))
            through = False
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
        self._evaluate(row, start, end)

    def _evaluate(self, row: Row, start: int, end: int) -> None:
        """Evaluate a chunk layer by layer: between layers Ctrl-C is heard, progress told, a cancelled row let go."""
        state = row.state
        buffers = [layer.values for layer in (*state.attention, *state.head) if layer.values is not None]
        layers = [layer.memory for layer in state.recurrent] + buffers
        for index, array in enumerate(layers, start=1):
            mx.eval(array)
            row.report_prefill(start + (end - start) * index // len(layers))
            if row.done:
                return
        mx.eval(state.arrays())

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
            row.error = NonFiniteLogits("the model produced NaN or infinite logits on the prompt")
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
