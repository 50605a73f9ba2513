"""How long a model may reason: after so many tokens its reasoning is ended for it. Knows markers and ids; no model.

The end is forced through the mask of a constraint, at every position of a draft: drafting goes on, and what is emitted
is what plain decoding under the same budget emits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .reply.formats import THINK, THINK_END
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .grammar import Grammar, Mask, Sentence

__all__ = ["ThinkingBudget"]

_OPENING = 8  # tokens within which an answer that reasons opens its reasoning


class ThinkingBudget:
    """Makes sentences whose reasoning is bounded, one for each row, as a `Grammar` does.

    Args:
        tokens: most tokens of reasoning; the end marker comes behind them.
        begun: whether the prompt opens the reasoning; else the answer may.
        vocab_size: width of the masks.
        inner: what the answer must be besides.
    """

    def __init__(
        self, tokens: int, tokenizer: Tokenizer, vocab_size: int, *, begun: bool, inner: Grammar | None = None
    ) -> None:
        self.tokens = tokens
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.begun = begun
        self.inner = inner
        self.closing = tokenizer.encode(THINK_END, special=True)

    def start(self) -> Sentence:
        """A sentence at its beginning, for one row."""
        return _Bounded(self, self.inner.start() if self.inner else None)


class _Bounded:
    """A sentence of which the beginning is watched: opening, reasoning, end."""

    def __init__(self, budget: ThinkingBudget, inner: Sentence | None) -> None:
        self._budget = budget
        self._inner = inner
        self._place: _Opening | _Reasoning | None = _Reasoning(budget.tokens) if budget.begun else _Opening()

    def allowed(self, drafts: Sequence[int]) -> Mask:
        if self._inner is None:
            masks: Mask = np.ones((len(drafts) + 1, self._budget.vocab_size), dtype=np.bool_)
        else:
            masks = self._inner.allowed(drafts)
        place = self._place
        for position in range(len(masks)):
            if isinstance(place, _Reasoning) and place.left <= 0:
                masks[position] = False
                masks[position, self._budget.closing[min(-place.left, len(self._budget.closing) - 1)]] = True
            if place is None or position == len(drafts):
                break
            place = self._behind(place, drafts[position])
        return masks

    def emit(self, tokens: Sequence[int]) -> None:
        if self._inner is not None:
            self._inner.emit(tokens)
        for token in tokens:
            self._place = self._behind(self._place, token)

    def _behind(self, place: _Opening | _Reasoning | None, token: int) -> _Opening | _Reasoning | None:
        """Where the sentence is after one more token; None behind its reasoning."""
        if place is None:
            return None
        text = place.tail + self._budget.tokenizer.token_text(token)
        if isinstance(place, _Opening):
            if THINK in text:
                return _Reasoning(self._budget.tokens)
            return _Opening(place.left - 1, text) if place.left > 1 else None
        return None if THINK_END in text else _Reasoning(place.left - 1, text[1 - len(THINK_END) :])


class _Opening:
    """No reasoning yet: `left` more tokens in which it may open, behind the text `tail`."""

    def __init__(self, left: int = _OPENING, tail: str = "") -> None:
        self.left, self.tail = left, tail


class _Reasoning:
    """Inside the reasoning: `left` more tokens of it (below 0: so many of the end marker), behind the text `tail`."""

    def __init__(self, left: int, tail: str = "") -> None:
        self.left, self.tail = left, tail
