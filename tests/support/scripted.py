"""A model whose head says what a test wants, and whose trunk forwards are counted from outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from selfdraft.engine import Row
from selfdraft.models.base import Model
from selfdraft.state import Captured, RowState

__all__ = ["ScriptedHead"]

# A token by its index in prompt + output, or None for NaN logits.
Script = Callable[[int], int | None]

MARK = 8192.0  # first channel of a marker; a normed hidden never comes near it
GAP = 40.0  # logit of the scripted token; e^-40 is below fp32's resolution beside 1


class ScriptedHead:
    """Wraps a model; `draft` returns markers that `logits` turns into logits of the scripted token.

    The real head still runs, so its history is what it would be. Pair (h_{i-1}, t_i) sits at entry i-1 and predicts
    t_{i+1}: the marker of entry e asks for the token at index e + 2.

    Attributes:
        forwards: tokens of every trunk forward, rows x width, in order.
        poisoned: row -> index in prompt + output of the token whose trunk logits are NaN.
    """

    def __init__(self, inner: Model) -> None:
        self._inner = inner
        self.vocab_size = inner.vocab_size
        self.context_length = inner.context_length
        self.max_depth = inner.max_depth
        self.forwards: list[tuple[int, int]] = []
        self._scripts: list[tuple[RowState, Script]] = []
        self._poisoned: list[tuple[RowState, int]] = []

    def script(self, state: RowState, script: Script) -> None:
        """What the head says for a row."""
        self._scripts.append((state, script))

    def follow(self, row: Row, tokens: Sequence[int], right: Callable[[int], bool] = lambda index: True) -> None:
        """Say a row's coming tokens; where `right(index of the token in the output)` is false, another one."""
        start = len(row.request.prompt)

        def script(index: int) -> int:
            token = tokens[index - start] if 0 <= index - start < len(tokens) else 0
            return token if right(index - start) else (token + 1) % self.vocab_size

        self.script(row.state, script)

    def poison(self, state: RowState, index: int) -> None:
        """Make the trunk's logits for the token at `index` NaN."""
        self._poisoned.append((state, index))

    def new_state(self) -> RowState:
        return self._inner.new_state()

    def row_bytes(self, tokens: int) -> int:
        return self._inner.row_bytes(tokens)

    def working_bytes(self, tokens: int, length: int) -> int:
        return self._inner.working_bytes(tokens, length)

    def forward(self, tokens: mx.array, rows: Sequence[RowState], *, keep_steps: bool) -> tuple[mx.array, Captured]:
        self.forwards.append((tokens.shape[0], tokens.shape[1]))
        hidden, captured = self._inner.forward(tokens, rows, keep_steps=keep_steps)
        for b, row in enumerate(rows):
            for state, index in self._poisoned:
                position = index - 1 - row.length  # the token at index i is predicted at position i - 1
                if state is row and 0 <= position < tokens.shape[1]:
                    hidden[b, position] = mx.full(hidden.shape[2:], mx.nan, dtype=hidden.dtype)
        return hidden, captured

    def logits(self, hidden: mx.array) -> mx.array:
        return self._said(hidden, self._inner.logits(hidden))

    def _said(self, hidden: mx.array, real: mx.array) -> mx.array:
        marked = mx.abs(hidden[..., :1]) == MARK
        wanted = hidden[..., 1:2] == mx.arange(self.vocab_size)
        said = mx.where(hidden[..., :1] < 0, mx.nan, mx.where(wanted, GAP, -GAP))
        return mx.where(marked, said.astype(real.dtype), real)

    def draft_only(self, tokens: Sequence[int] | None) -> int:
        return self._inner.draft_only(tokens)

    def draft_logits(self, hidden: mx.array, step: int = 0, *, whole: bool = False) -> mx.array:
        return self._said(hidden, self._inner.draft_logits(hidden, step, whole=whole))

    def draft(
        self, tokens: mx.array, hidden: mx.array, rows: Sequence[RowState], offsets: Sequence[int], step: int = 0
    ) -> mx.array:
        # Markers that come back as hiddens only make entries that are overwritten by true pairs.
        out = self._inner.draft(tokens, hidden, rows, offsets, step)
        batch, width, size = out.shape
        values = []
        for row, offset in zip(rows, offsets, strict=True):
            script = next((script for state, script in self._scripts if state is row), lambda _: 0)
            said = [script(offset + w + 2) for w in range(width)]
            values.append([[-MARK, 0.0] if token is None else [MARK, float(token)] for token in said])
        marks = mx.array(values, dtype=out.dtype)
        return mx.concatenate([marks, mx.zeros((batch, width, size - 2), dtype=out.dtype)], axis=-1)
