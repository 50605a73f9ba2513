"""The sampling chain: from raw logits to the law that tokens are drawn from, at every position, for p and q alike.

Order, in fp32: repetition penalty, presence and frequency penalties, logit bias, the constraint's mask, end tokens
withheld before min_tokens, temperature, top-k, top-p, min-p. The last three keep exactly the tokens whose logit reaches
a threshold, so ties are kept and the result does not depend on how a sort breaks them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

from ..kernels.kept_logits import CHECK, Rules, fits, flaws_reference, kept_logits, kept_logits_reference
from ..params import SamplingParams
from .constraint import Allowed

__all__ = ["Chain", "History"]


class History:
    """Which tokens a row has seen, for its penalties.

    Attributes:
        prompt: 1 for tokens of the prompt, [V].
        output: how often each token was emitted, [V].
    """

    def __init__(self, prompt: Sequence[int], vocab_size: int) -> None:
        self.prompt = _counts(prompt, vocab_size) > 0
        self.output = mx.zeros((vocab_size,), dtype=mx.float32)

    def emit(self, tokens: Sequence[int]) -> None:
        """Count tokens that were emitted."""
        if len(tokens):
            self.output = self.output.at[mx.array(list(tokens))].add(1.0)


def _counts(tokens: Sequence[int], vocab_size: int) -> mx.array:
    return mx.array(np.bincount(np.asarray(tokens, dtype=np.int64), minlength=vocab_size).astype(np.float32))


@dataclass(frozen=True)
class _Column:
    """One number a row, shaped to broadcast over [B, P, V]."""

    values: tuple[float, ...]

    @cached_property
    def array(self) -> mx.array:
        return mx.array(self.values, dtype=mx.float32)[:, None, None]

    def differs(self, neutral: float) -> bool:
        return any(value != neutral for value in self.values)


class Chain:
    """The chain for a fixed batch of rows. Steps that no row asks for cost nothing.

    Args:
        params: resolved parameters, one a row.
        stop_ids: the end tokens of each row.
        vocab_size: V.
    """

    def __init__(self, params: Sequence[SamplingParams], stop_ids: Sequence[Collection[int]], vocab_size: int) -> None:
        self.greedy = [p.temperature == 0 for p in params]
        self._vocab_size = vocab_size
        self._repetition = _Column(tuple(p.repetition_penalty or 1.0 for p in params))
        self._presence = _Column(tuple(p.presence_penalty or 0.0 for p in params))
        self._frequency = _Column(tuple(p.frequency_penalty or 0.0 for p in params))
        # The filters never touch the most likely token, so greedy rows need none.
        top_k = [(p.temperature and p.top_k) or 0 for p in params]
        self._rules = Rules(
            tuple(p.temperature or 1.0 for p in params),
            tuple(k if k < vocab_size else 0 for k in top_k),
            tuple((p.temperature and p.top_p) or 1.0 for p in params),
            tuple((p.temperature and p.min_p) or 0.0 for p in params),
        )
        self._bias = self._bias_of(params)
        self._min_tokens = [p.min_tokens if stops else 0 for p, stops in zip(params, stop_ids, strict=True)]
        self._stops = self._stop_masks(stop_ids) if any(self._min_tokens) else None

        self._penalises = self._repetition.differs(1) or self._presence.differs(0) or self._frequency.differs(0)

    def __call__(
        self,
        logits: mx.array,
        emitted: Sequence[int],
        histories: Sequence[History | None],
        drafts: mx.array | None,
        allowed: Allowed | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Filtered logits: softmax of them is the law; -inf outside its support.

        Args:
            logits: [B, P, V], any dtype.
            emitted: index of the token that position 0 would emit, for each row.
            histories: of the rows that have penalties.
            drafts: tokens drafted before each position. [B, P-1] for P positions in a row (position i is preceded by
                drafts[:, :i]), or [B, n] with P = 1 (all of them precede it). None for none.
            allowed: by constraints, at P positions or at one for all; None allows everything.

        Returns:
            [B, P, V] in fp32, and the flaws [B, P] of `logits` (see `kept_logits`).
        """
        raw = z = logits.astype(mx.float32)
        positions = z.shape[1]
        if self._penalises:
            z = self._penalised(z, histories, drafts)
        if self._bias is not None:
            z = z + self._bias
        if allowed is not None:
            z = mx.where(allowed.tokens, z, -mx.inf)
        if self._stops is not None:
            first = 0 if drafts is None or positions > 1 else drafts.shape[1]
            withheld = [max(least - done - first, 0) for least, done in zip(self._min_tokens, emitted, strict=True)]
            if any(withheld):
                z = self._without_stops(z, withheld, allowed)
        if z is raw:
            return self._filtered(logits)
        return self._filtered(z)[0], flaws_reference(logits)

    def _penalised(self, z: mx.array, histories: Sequence[History | None], drafts: mx.array | None) -> mx.array:
        held = [history or self._blank for history in histories]
        counts = mx.stack([history.output for history in held])[:, None]
        if drafts is not None and drafts.shape[1]:
            drafted = (drafts[..., None] == mx.arange(self._vocab_size)).astype(mx.float32)
            if z.shape[1] > 1:
                before = mx.pad(mx.cumsum(drafted, axis=1), [(0, 0), (1, 0), (0, 0)])
            else:
                before = drafted.sum(axis=1, keepdims=True)
            counts = counts + before
        if self._repetition.differs(1):
            prompt = mx.stack([history.prompt for history in held])[:, None]
            penalty = self._repetition.array
            z = mx.where((counts > 0) | prompt, mx.where(z > 0, z / penalty, z * penalty), z)
        if self._presence.differs(0):
            z = z - self._presence.array * (counts > 0)
        if self._frequency.differs(0):
            z = z - self._frequency.array * counts
        return z

    @cached_property
    def _blank(self) -> History:
        """Of the rows that have no penalties, beside others."""
        return History((), self._vocab_size)

    def _without_stops(self, z: mx.array, withheld: list[int], allowed: Allowed | None) -> mx.array:
        """End tokens removed from the first positions, as many as each row withholds."""
        assert self._stops is not None
        early = mx.arange(z.shape[1]) < mx.array(withheld)[:, None]
        early = early[..., None] & self._stops
        if allowed is not None:  # a sentence that is complete and cannot go on ends, however short it is
            early = early & (allowed.tokens & ~self._stops).any(axis=-1, keepdims=True)
        return mx.where(early, -mx.inf, z)

    def _filtered(self, z: mx.array) -> tuple[mx.array, mx.array]:
        """By the kernel the rows that it serves, whatever their neighbours ask for."""
        served = self._rules.served
        if not any(served) or not fits(self._vocab_size) or not CHECK.passed:
            return kept_logits_reference(z, self._rules)
        kept, flaws = kept_logits(z, self._rules)
        if not all(served):
            kept = mx.where(mx.array(served)[:, None, None], kept, kept_logits_reference(z, self._rules)[0])
        return kept, flaws

    def _bias_of(self, params: Sequence[SamplingParams]) -> mx.array | None:
        if not any(p.logit_bias for p in params):
            return None
        bias = np.zeros((len(params), 1, self._vocab_size), dtype=np.float32)
        for row, p in enumerate(params):
            for token, value in (p.logit_bias or {}).items():
                bias[row, 0, token] = value
        return mx.array(bias)

    def _stop_masks(self, stop_ids: Sequence[Collection[int]]) -> mx.array:
        mask = np.zeros((len(stop_ids), 1, self._vocab_size), dtype=bool)
        for row, ids in enumerate(stop_ids):
            mask[row, 0, list(ids)] = True
        return mx.array(mask)
