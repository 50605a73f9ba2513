"""Answers on their way from the engine to a dialect, in the order in which they come. Knows no wire format."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from ..results import Piece
from .service import EngineService, Ticket

__all__ = ["Answers", "Writer"]


class Writer(Protocol):
    """Turns the pieces of one answer into events."""

    def events(self, piece: Piece) -> Sequence[Any]:
        """What a piece says; the one with a result is the last."""


class Answers:
    """The answers of one request. Whoever has them closes them.

    Args:
        tickets, writers: one of each an answer.
        prompt_tokens: length of the (first) prompt.
    """

    def __init__(
        self, service: EngineService, tickets: Sequence[Ticket], writers: Sequence[Writer], prompt_tokens: int
    ) -> None:
        self._service = service
        self._tickets = tickets
        self._writers = writers
        self.prompt_tokens = prompt_tokens

    async def events(self, silence: float | None = None) -> AsyncGenerator[Sequence[Any]]:
        """What each piece says, as the pieces come; nothing, whenever none came for `silence` seconds.

        Raises:
            SelfdraftError: the model broke down.
        """
        received = self._tickets[0].received  # they share it
        unfinished = len(self._tickets)
        while unfinished:
            try:
                async with asyncio.timeout(silence):
                    index, got = await received.get()
            except TimeoutError:
                yield ()
                continue
            if isinstance(got, Exception):
                raise got
            unfinished -= got.result is not None
            yield self._writers[index].events(got)

    def close(self) -> None:
        """Give up what is not finished: nobody reads any more."""
        # The trace of a cancelled reader keeps this object until garbage is collected, but not prompts and images.
        tickets, self._tickets, self._writers = self._tickets, (), ()
        self._service.cancel(tickets)
