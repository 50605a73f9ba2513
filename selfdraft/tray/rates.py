"""Tokens a second and acceptance as they are now, from counters of /metrics. Knows their names; no HTTP."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

__all__ = ["Counts", "Rates", "counts"]

_TOKENS = "selfdraft_generation_tokens_total"
_TRIED = "spec_decode_num_draft_tokens_total"
_ACCEPTED = "spec_decode_num_accepted_tokens_total"


@dataclass(frozen=True)
class Counts:
    """Since the server began: tokens emitted, drafts decided, drafts kept."""

    tokens: float = 0.0
    tried: float = 0.0
    accepted: float = 0.0


def counts(exposition: str) -> Counts:
    """Counts from the text of /metrics; series of several models are added up.

    Args:
        exposition: Prometheus' text format.
    """
    sums = {_TOKENS: 0.0, _TRIED: 0.0, _ACCEPTED: 0.0}
    for line in exposition.splitlines():
        name = line.partition(" ")[0].partition("{")[0]
        if name in sums:
            sums[name] += float(line.rsplit(" ", 1)[1])
    return Counts(sums[_TOKENS], sums[_TRIED], sums[_ACCEPTED])


class Rates:
    """Rates over the last seconds in which something was decoded. When nothing is, the last ones stay.

    Args:
        seconds: how long a count is looked back at.

    Attributes:
        speed, acceptance: as in `Reading`.
    """

    def __init__(self, seconds: float = 8.0) -> None:
        self._seconds = seconds
        self.clear()

    def clear(self) -> None:
        """Forget all: another server."""
        self._seen: deque[tuple[float, Counts]] = deque()
        self.speed: float | None = None
        self.acceptance: float | None = None

    def add(self, now: float, found: Counts) -> None:
        """Take in counts.

        Args:
            now: seconds on any clock that only goes forward.
        """
        if self._seen and found.tokens < self._seen[-1][1].tokens:
            self.clear()
        if self._seen and found.tokens == self._seen[-1][1].tokens:
            self._seen.clear()  # idle time is not decoding time
        self._seen.append((now, found))
        while self._seen[-1][0] - self._seen[0][0] > self._seconds and len(self._seen) > 2:
            self._seen.popleft()
        (begin, before), (end, last) = self._seen[0], self._seen[-1]
        if end > begin and last.tokens > before.tokens:
            self.speed = (last.tokens - before.tokens) / (end - begin)
            tried = last.tried - before.tried
            self.acceptance = (last.accepted - before.accepted) / tried if tried else None
