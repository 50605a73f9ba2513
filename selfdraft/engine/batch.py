"""Rows of one cycle, with the noise and filters they sample with. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx

from ..kernels import draw
from ..kernels.small_arrays import fresh, numbers
from . import noise
from .ahead import Unread
from .constraint import Allowed, allowed_tokens
from .row import Row
from .sampling import Chain

__all__ = ["Batch"]


class Batch:
    """Rows of one cycle, their depths, and the noise and filters they sample with.

    Args:
        unread: the cycle before, when the host has not read it yet.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        depths: Sequence[int],
        chain: Chain,
        vocab_size: int,
        unread: Unread | None = None,
    ) -> None:
        self.rows = list(rows)
        self.states = [row.state for row in rows]
        self.depths = list(depths)
        self.depth = max(depths)
        self.chain = chain
        self.emitted = [len(row.emitted) for row in rows]
        self.histories = [row.history for row in rows]
        self.unread = unread
        self.counters = [row.counter + self._used(row) for row in rows]
        self.constraints = [row.request.constraint for row in rows]
        self.constrained = any(constraint is not None for constraint in self.constraints)
        self._vocab_size = vocab_size

    @property
    def last(self) -> mx.array:
        """The newest token of every row, [B, 1]."""
        if self.unread is not None:
            return self.unread.last
        return fresh([row.last for row in self.rows], mx.uint32)[:, None]

    @property
    def streams(self) -> list[noise.Stream]:
        """Where each row's noise comes from."""
        return [row.stream for row in self.rows]

    @property
    def shift(self) -> mx.array | None:
        """What rows emitted that the host does not know of, int32 [B]; None if it knows."""
        return self.unread.counts if self.unread else None

    @property
    def counter_shift(self) -> mx.array | None:
        """The same for the counters of noise: those of coupled rows count what was emitted."""
        coupled = [row.coupled for row in self.rows]
        if self.shift is None or all(coupled):
            return self.shift
        return self.shift * self.coupled if any(coupled) else None

    def _used(self, row: Row) -> int:
        """Counters of noise that the unread cycle used, as far as the host knows."""
        if self.unread is None or (row.coupled and self.unread.counts is not None):
            return 0
        return 1 if row.coupled else self.unread.most

    @cached_property
    def _addresses(self) -> tuple[mx.array, mx.array]:
        return noise.addresses(self.streams, self.counters, self.depth, self.counter_shift)

    @property
    def keys(self) -> mx.array:
        """Of the noise at every position, [B, K+1, 2]."""
        return self._addresses[0]

    @property
    def uniforms(self) -> mx.array:
        """For rejection, one a draft, [B, K]."""
        return self._addresses[1]

    @cached_property
    def noise(self) -> mx.array | None:
        """Gumbel noise [B, K+1, V], 0 for greedy rows; None when all are greedy."""
        if all(self.chain.greedy):
            return None
        drawn = noise.gumbel(self.keys, self._vocab_size)
        return mx.where(self._noisy[:, None, None] > 0, drawn, 0) if any(self.chain.greedy) else drawn

    @property
    def coupled(self) -> mx.array:
        """1 for rows by coupled acceptance, 0 for those by rejection, int32 [B]."""
        return numbers(tuple(int(row.coupled) for row in self.rows))

    @property
    def _noisy(self) -> mx.array:
        return numbers(tuple(int(not greedy) for greedy in self.chain.greedy))

    @property
    def unread_lengths(self) -> dict[str, Any]:
        """What the model is told of lengths that the host does not know; nothing if it does."""
        return {} if self.shift is None or self.unread is None else {"shift": self.shift, "most": self.unread.most}

    def allowed(self, drafts: mx.array | None = None) -> Allowed | None:
        """What rows may emit first, or at K+1 positions along drafts [B, K]; None when no row has a constraint."""
        if not self.constrained:
            return None
        proposed: Any = [[]] * len(self.rows) if drafts is None else drafts.tolist()
        own = [tokens[:depth] for tokens, depth in zip(proposed, self.depths, strict=True)]
        positions = 1 if drafts is None else drafts.shape[1] + 1
        return allowed_tokens(self.constraints, own, positions, self._vocab_size)

    def choose(self, z: mx.array, position: int = 0) -> mx.array:
        """Draw from softmax(z) at positions from `position` on: argmax(z + noise), [B, P] of z [B, P, V]."""
        if draw.CHECK.passed and draw.fits(self._vocab_size):
            return draw.draw(z, self.keys[:, position:], self._noisy)
        if self.noise is not None:
            z = z + self.noise[:, position : position + z.shape[1]]
        return mx.argmax(z, axis=-1)
