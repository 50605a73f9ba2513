"""Answers on their way from the engine to a dialect: given up when nobody reads. Knows no wire format."""

from __future__ import annotations

import asyncio
import contextlib
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
    """The answers of one request.

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

    async def events(self) -> AsyncGenerator[Any]:
        """What comes, in the order in which it comes. Closing the generator gives the answers up.

        Raises:
            SelfdraftError: the model broke down.
        """
        waiting = {asyncio.ensure_future(ticket.next_piece()): at for at, ticket in enumerate(self._tickets)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    at = waiting.pop(future)
                    piece = future.result()
                    for event in self._writers[at].events(piece):
                        yield event
                    if piece.result is None:
                        waiting[asyncio.ensure_future(self._tickets[at].next_piece())] = at
        finally:
            for future in waiting:
                future.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await future
            self._service.cancel(self._tickets)
