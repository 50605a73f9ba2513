"""One HTTP connection: uvicorn's, with a time limit on headers. Knows no path and no application."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["HEADER_SECONDS", "Connection"]

HEADER_SECONDS = 20.0


class Connection(H11Protocol):
    """Ends when a client takes longer than `HEADER_SECONDS` to ask for something.

    uvicorn itself ends a connection that is silent after an answer, and neither one that is silent from the start nor
    one that sends its headers a byte at a time. The rest of a body whose request is answered already counts likewise.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        if self._answering:
            self._unwatch()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self._end)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end(self) -> None:
        if not self._answering:
            self.transport.close()
