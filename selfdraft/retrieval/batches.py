"""Which texts share a forward. Knows lengths alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["batches"]

MOST_TOKENS = 8192  # of one forward, padding included: enough to keep a device busy, and soon over
MOST_SCORES = 4 * 2**20  # rows x length x length: what attention holds for each of its heads


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indexes of texts, a forward at a time, the longest first: texts of like length waste little on padding.

    A text that is beyond a bound alone goes alone.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    at = 0
    while at < len(order):
        longest = max(lengths[order[at]], 1)
        rows = max(1, min(MOST_TOKENS // longest, MOST_SCORES // longest**2))
        yield order[at : at + rows]
        at += rows
