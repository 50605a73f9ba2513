"""What logits say beside the token chosen: its log-probability, the most likely ones, whether they are numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .row import Row, TokenScores

__all__ = ["finite_positions", "log_softmax_at", "raw_scores", "read_scores"]


def raw_scores(logits: mx.array, tokens: mx.array, rows: Sequence[Row]) -> tuple[mx.array, ...]:
    """Raw log-probabilities of tokens [B, P] under logits [B, P, V], and the most likely ones; () if nobody asks."""
    wanted = [row.params.logprobs for row in rows if row.params.logprobs is not None]
    return log_softmax_at(logits, tokens, max(wanted)) if wanted else ()


def log_softmax_at(logits: mx.array, tokens: mx.array, top: int) -> tuple[mx.array, ...]:
    """Log-probabilities of tokens [B, P] under logits [B, P, V]; with top > 0 also the most likely ids and theirs."""
    raw = logits.astype(mx.float32)
    logprobs = raw - mx.logsumexp(raw, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]
    count = min(top, logits.shape[-1])
    if count == 0:
        return (chosen,)
    best = mx.argpartition(-logprobs, kth=count - 1, axis=-1)[..., :count]
    values = mx.take_along_axis(logprobs, best, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return chosen, mx.take_along_axis(best, order, axis=-1), mx.take_along_axis(values, order, axis=-1)


def read_scores(tokens: mx.array, scores: tuple[mx.array, ...]) -> list[list[TokenScores]] | None:
    """Evaluated tokens [B, P] and their `raw_scores` as objects, [B][P]."""
    if not scores:
        return None
    names: Any = tokens.tolist()
    chosen: Any = scores[0].tolist()
    ids: Any = scores[1].tolist() if len(scores) > 1 else None
    values: Any = scores[2].tolist() if len(scores) > 2 else None
    return [
        [
            TokenScores(names[b][i], logprob, list(zip(ids[b][i], values[b][i], strict=True)) if ids else [])
            for i, logprob in enumerate(row)
        ]
        for b, row in enumerate(chosen)
    ]


def finite_positions(logits: mx.array) -> mx.array:
    """Whether all logits of a position are finite: [B, P, V] -> [B, P]. One that is not makes their sum so."""
    return mx.isfinite(logits.astype(mx.float32).sum(axis=-1))
