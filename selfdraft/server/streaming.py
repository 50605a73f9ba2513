"""Server-sent events: comments while nothing comes, an end when the reader is gone. Knows no dialect."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import StreamingResponse

__all__ = ["ClientGone", "EventStream", "unless_gone"]

T = TypeVar("T")

_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class ClientGone(Exception):
    """The client closed the connection; nobody reads a response."""


class EventStream(StreamingResponse):
    """A stream of SSE blocks. While none comes, `keepalive` is sent every few seconds: clients drop silent streams.

    Args:
        blocks: ready blocks; closed when the client leaves.
        keepalive: what to send, a comment or a ping event.
        every: seconds.
    """

    media_type = "text/event-stream"

    def __init__(self, blocks: AsyncGenerator[str], *, keepalive: str = ": waiting\n\n", every: float = 3.0) -> None:
        super().__init__(_kept_alive(blocks, keepalive, every), headers=_HEADERS)


async def _kept_alive(blocks: AsyncGenerator[str], keepalive: str, every: float) -> AsyncGenerator[str]:
    coming: asyncio.Future[str] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(blocks))
            done, _ = await asyncio.wait((coming,), timeout=every)
            if not done:
                yield keepalive
                continue
            finished, coming = coming, None
            try:
                block = finished.result()
            except StopAsyncIteration:
                return
            yield block
    finally:
        if coming is not None:
            coming.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                await coming
        await blocks.aclose()


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes.

    Raises:
        ClientGone: it went first.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
