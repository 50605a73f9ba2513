"""Counts of one row, and the figures made of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..results import Timings

__all__ = ["RowStatistics"]


@dataclass
class RowStatistics:
    """What happened to one row.

    Attributes:
        restored_tokens: tokens of the prompt whose state was known and not forwarded.
        prefill_chunks: trunk forwards of the prompt, the lone last token included.
        cycles: cycles it took part in.
        trunk_forwards: trunk forwards it took part in, counted where they are made.
        prompt_seconds: wall time from its first prefill chunk to its first token, other rows' cycles between included.
        decode_seconds: wall time of its cycles.
        tried, accepted: drafts by position.
        emitted: tokens by kind.
    """

    restored_tokens: int = 0
    prefill_chunks: int = 0
    cycles: int = 0
    trunk_forwards: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    tried: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    emitted: dict[str, int] = field(
        default_factory=lambda: {"prefill": 0, "draft": 0, "correction": 0, "bonus": 0, "plain": 0}
    )

    def count_drafts(self, tried: int, accepted: int) -> None:
        """Add a cycle that tried `tried` drafts and kept `accepted` of them."""
        self.tried += [0] * (tried - len(self.tried))
        self.accepted += [0] * (tried - len(self.accepted))
        for position in range(tried):
            self.tried[position] += 1
        for position in range(accepted):
            self.accepted[position] += 1

    def timings(self) -> Timings:
        """The figures, in the schema shared by all surfaces."""
        by_cycles = sum(count for kind, count in self.emitted.items() if kind != "prefill")
        return Timings(
            prompt_ms=round(self.prompt_seconds * 1e3, 3),
            decode_ms=round(self.decode_seconds * 1e3, 3),
            tokens_per_second=round(by_cycles / self.decode_seconds, 3) if self.decode_seconds else 0.0,
            cycles=self.cycles,
            tokens_per_cycle=round(by_cycles / self.cycles, 4) if self.cycles else 0.0,
            acceptance_per_position=[round(a / t, 4) for a, t in zip(self.accepted, self.tried, strict=True) if t],
            drafts_tried=list(self.tried),
            drafts_accepted=list(self.accepted),
            emitted=dict(self.emitted),
            trunk_forwards=self.trunk_forwards,
            trunk_replays=self.trunk_forwards - self.prefill_chunks - self.cycles,
        )
