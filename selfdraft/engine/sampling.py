"""The sampling chain: from raw logits to the law that tokens are drawn from, at every position, for p and q alike.

Order, in fp32: repetition penalty, presence and frequency penalties, logit bias, the constraint's mask, end tokens
withheld before min_tokens, temperature, top-k, top-p, min-p. The last three keep exactly the tokens whose logit reaches
a threshold, so ties are kept and the result does not depend on how a sort breaks them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

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
        self.output = self.output + _counts(tokens, self.output.shape[0])


def _counts(tokens: Sequence[int], vocab_size: int) -> mx.array:
    return mx.array(np.bincount(np.asarray(tokens, dtype=np.int64), minlength=vocab_size).astype(np.float32))


@dataclass(frozen=True)
class _Column:
    """One number a row, shaped to broadcast over [B, P, V]."""

    values: tuple[float, ...]

    @property
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
        self._temperature = _Column(tuple(p.temperature or 1.0 for p in params))
        self._repetition = _Column(tuple(p.repetition_penalty or 1.0 for p in params))
        self._presence = _Column(tuple(p.presence_penalty or 0.0 for p in params))
        self._frequency = _Column(tuple(p.frequency_penalty or 0.0 for p in params))
        # The filters never touch the most likely token, so greedy rows need none.
        self._top_k = [p.top_k or 0 if p.temperature else 0 for p in params]
        self._top_p = _Column(tuple(p.top_p or 1.0 if p.temperature else 1.0 for p in params))
        self._min_p = [p.min_p or 0.0 if p.temperature else 0.0 for p in params]
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
    ) -> mx.array:
        """Filtered logits: softmax of them is the law; -inf outside its support.

        Args:
            logits: [B, P, V], any dtype.
            emitted: index of the token that position 0 would emit, for each row.
            histories: of the rows that have penalties.
            drafts: tokens drafted before each position. [B, P-1] for P positions in a row (position i is preceded by
                drafts[:, :i]), or [B, n] with P = 1 (all of them precede it). None for none.
            allowed: by constraints, at P positions or at one for all; None allows everything.

        Returns:
            [B, P, V] in fp32.
        """
        z = logits.astype(mx.float32)
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
            early = mx.arange(positions) < mx.array(withheld)[:, None]
            early = early[..., None] & self._stops
            if allowed is not None:  # a sentence that is complete and cannot go on ends, however short it is
                early = early & (allowed.tokens & ~self._stops).any(axis=-1, keepdims=True)
            z = mx.where(early, -mx.inf, z)
        if self._temperature.differs(1):
            z = z / self._temperature.array
        return self._filtered(z)

    def _penalised(self, z: mx.array, histories: Sequence[History | None], drafts: mx.array | None) -> mx.array:
        blank = History((), self._vocab_size)  # for the rows beside that have no penalties
        held = [history or blank for history in histories]
        counts = mx.stack([history.output for history in held])[:, None]
        prompt = mx.stack([history.prompt for history in held])[:, None]
        if drafts is not None and drafts.shape[1]:
            drafted = (drafts[..., None] == mx.arange(self._vocab_size)).astype(mx.float32)
            if z.shape[1] > 1:
                before = mx.pad(mx.cumsum(drafted, axis=1), [(0, 0), (1, 0), (0, 0)])
            else:
                before = drafted.sum(axis=1, keepdims=True)
            counts = counts + before
        if self._repetition.differs(1):
            penalty = self._repetition.array
            z = mx.where((counts > 0) | prompt, mx.where(z > 0, z / penalty, z * penalty), z)
        return z - self._presence.array * (counts > 0) - self._frequency.array * counts

    def _filtered(self, z: mx.array) -> mx.array:
        threshold = None
        bounds_top_k = any(self._top_k)
        if bounds_top_k or self._top_p.differs(1):
            threshold = self._rank_threshold(z)
        if any(self._min_p):
            log_min = mx.array([math.log(p) if p else -math.inf for p in self._min_p])[:, None, None]
            floor = z.max(axis=-1, keepdims=True) + log_min
            threshold = floor if threshold is None else mx.maximum(threshold, floor)
        return z if threshold is None else mx.where(z >= threshold, z, -mx.inf)

    def _rank_threshold(self, z: mx.array) -> mx.array:
        """The least logit that top-k, then top-p, keep: [B, P, 1]."""
        ks = [min(k or self._vocab_size, self._vocab_size) for k in self._top_k]
        widest = max(ks)  # a full sort only when some row has no top-k
        best = mx.sort(mx.topk(z, widest, axis=-1) if widest < self._vocab_size else z, axis=-1)[..., ::-1]
        last = mx.array(ks)[:, None, None] - 1
        kth = mx.take_along_axis(best, mx.broadcast_to(last, (*best.shape[:2], 1)), axis=-1)
        if not self._top_p.differs(1):
            return kth
        # Mass over the whole support of top-k, ties included; a token is kept if less than top_p lies before it.
        peak = best[..., :1]
        mass = mx.where(z >= kth, mx.exp(z - peak), 0).sum(axis=-1, keepdims=True)
        share = mx.exp(best - peak) / mass
        kept = (mx.cumsum(share, axis=-1) - share < self._top_p.array) | (self._top_p.array >= 1)
        crossing = mx.maximum(kept.sum(axis=-1, keepdims=True) - 1, 0)
        return mx.maximum(kth, mx.take_along_axis(best, crossing, axis=-1))

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
