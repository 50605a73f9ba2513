"""Figures for people, of one answer or of a session, made from the `Timings` that every surface shares."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..results import FinishReason, Timings

__all__ = ["Tally"]


_IN_A_LINE = 4  # positions whose acceptance fits a line of 80 columns beside the rest


@dataclass
class Tally:
    """Counts that add up. Rates come from the sums, so a long answer weighs more than a short one.

    Attributes:
        tokens: emitted in all.
        by_cycles: of these, all but the tokens that prefill yielded.
        cycles, decode_ms: as in `Timings`.
        tried, accepted: drafts by position.
    """

    tokens: int = 0
    by_cycles: int = 0
    cycles: int = 0
    decode_ms: float = 0.0
    tried: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, timings: Timings) -> Tally:
        """The counts of one answer."""
        tally = cls()
        tally.add(timings)
        return tally

    def add(self, timings: Timings) -> None:
        """Take in one more answer."""
        tokens = sum(timings.emitted.values())
        self.tokens += tokens
        self.by_cycles += tokens - timings.emitted.get("prefill", 0)
        self.cycles += timings.cycles
        self.decode_ms += timings.decode_ms
        self.tried = _sum(self.tried, timings.drafts_tried)
        self.accepted = _sum(self.accepted, timings.drafts_accepted)

    def line(self, finish: FinishReason = "stop") -> str:
        """One line: tokens, speed, tokens a cycle, acceptance; and first, if the answer did not end by itself, so."""
        parts = {"length": ["cut short"], "cancelled": ["stopped"]}.get(finish, [])
        parts += [f"{self.tokens} token{'' if self.tokens == 1 else 's'}"]
        if self.cycles:
            parts += [f"{self.speed:.1f} tok/s", f"{self.per_cycle:.2f} a cycle"]
            parts.append(f"accepted {self._acceptance(_IN_A_LINE)}" if self.tried else "plain decoding")
        return ", ".join(parts)

    @property
    def speed(self) -> float:
        """Tokens a second, of the cycles."""
        return self.by_cycles / self.decode_ms * 1e3 if self.decode_ms else 0.0

    @property
    def per_cycle(self) -> float:
        """Tokens emitted by cycles / cycles."""
        return self.by_cycles / self.cycles if self.cycles else 0.0

    @property
    def acceptance(self) -> str:
        """Accepted / tried in percent, position by position; empty where nothing was drafted."""
        return self._acceptance(len(self.tried)) if self.tried else ""

    def _acceptance(self, most: int) -> str:
        rates = [f"{100 * a / t:.0f}" for a, t in zip(self.accepted, self.tried, strict=True) if t]
        return " ".join([*rates[:most], *["…"] * (len(rates) > most), "%"])


def _sum(left: list[int], right: list[int]) -> list[int]:
    width = max(len(left), len(right))
    return [sum(counts) for counts in zip(_padded(left, width), _padded(right, width), strict=True)]


def _padded(counts: list[int], width: int) -> list[int]:
    return counts + [0] * (width - len(counts))
