"""Which texts share a forward. Knows lengths alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["batches"]

MOST_TOKENS = 8192  # of one forward, padding included: enough to keep a device busy, and soon over
MOST_SCORES = 4 * 2**20  # rows x length x length: what attention holds for each of its heads
SHORT = 16  # tokens: below, padding costs less than another forward


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indexes of texts, a forward at a time, the longest first.

    A text shares a forward with one that is up to twice as long: at most half of it is padding. A text that is beyond
    a bound alone goes alone.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    at = 0
    while at < len(order):
        longest = max(lengths[order[at]], 1)
        most = max(1, min(MOST_TOKENS // longest, MOST_SCORES // longest**2))
        shortest = longest / 2 if longest > SHORT else 0
        chosen = [index for index in order[at : at + most] if lengths[index] >= shortest]
        yield chosen
        at += len(chosen)
