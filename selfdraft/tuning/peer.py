"""What a benchmark asks of another runtime. Knows none of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..errors import SelfdraftError
from .measure import Tally

__all__ = ["Peer", "PeerError"]


class PeerError(SelfdraftError):
    """A runtime is not here, cannot decode this model, or broke down; its message is the reason, for people."""


class Peer(Protocol):
    """Another runtime with a model in memory. It takes its turn with ours, one prompt at a time.

    Attributes:
        name: for tables.
        version: of the runtime.
        drafts: tokens that it drafts a cycle; 0 if it decodes plainly.
    """

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def drafts(self) -> int: ...

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int) -> Tally:
        """Decode prompts greedily, one after another, each to `tokens` tokens whatever they are.

        The first token of each is counted as the prompt's: neither it nor its time is in the rate.

        Raises:
            PeerError: it broke down.
        """
