"""One request of a dialect, from its body to its response, streamed or whole. Knows HTTP and the dialects' shape."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from ..errors import SelfdraftError
from .chat import Chats
from .completions import Completions
from .dialects import openai_completions
from .dialects.wire import Encoder, Envelope, WireModel, read
from .jobs import ChatJob
from .openapi import described
from .registry import Registry
from .running import Answers
from .streaming import EventStream, unless_gone

__all__ = ["ChatEndpoint", "CompletionEndpoint", "Endpoint"]

log = logging.getLogger(__name__)


class Endpoint(ABC):
    """A path that decodes.

    Subclasses say how a request becomes running answers, and how their events are written.
    """

    def __init__(self, path: str, request: type[WireModel]) -> None:
        self.path = path
        self._request = request

    def mount(self, app: FastAPI, registry: Registry, keepalive: float) -> None:
        """Serve the path, and describe its body for /docs."""

        async def answer(request: Request) -> Response:
            asked: Any = read(self._request, await request.body())
            envelope = Envelope.new(registry.resolve(asked.model))
            running = await self.start(asked, request.state.owner)
            if asked.stream:
                encoder = self.encoder(asked, envelope, running)
                return EventStream(_blocks(encoder, running, keepalive), running.close)
            try:
                events = await unless_gone(request, _all(running))
            finally:
                running.close()
            return JSONResponse(self.collect(events, asked, envelope))

        app.post(self.path, **described(self._request))(answer)

    @abstractmethod
    async def start(self, asked: Any, owner: str) -> Answers:
        """Queue what is asked for.

        Args:
            owner: whose request it is; see `security.owner_of`.
        """

    @abstractmethod
    def encoder(self, asked: Any, envelope: Envelope, running: Answers) -> Encoder:
        """Writes the stream."""

    @abstractmethod
    def collect(self, events: Iterable[Any], asked: Any, envelope: Envelope) -> dict[str, Any]:
        """Writes the whole response."""


class ChatEndpoint(Endpoint):
    """A dialect of chats.

    Args:
        dialect: its module: `to_job` and `collect`.
        stream: its encoder, of a request, an envelope and the length of the prompt.
    """

    def __init__(
        self,
        path: str,
        dialect: Any,
        request: type[WireModel],
        stream: Callable[[Any, Envelope, int], Encoder],
        chats: Chats,
    ) -> None:
        super().__init__(path, request)
        self._dialect = dialect
        self._stream = stream
        self._chats = chats

    async def start(self, asked: Any, owner: str) -> Answers:
        job: ChatJob = self._dialect.to_job(asked)
        return await self._chats.start(replace(job, scope=owner))

    def encoder(self, asked: Any, envelope: Envelope, running: Answers) -> Encoder:
        return self._stream(asked, envelope, running.prompt_tokens)

    def collect(self, events: Iterable[Any], asked: Any, envelope: Envelope) -> dict[str, Any]:
        body: dict[str, Any] = self._dialect.collect(events, asked, envelope)
        return body


class CompletionEndpoint(Endpoint):
    """Bare prompts."""

    def __init__(self, path: str, completions: Completions) -> None:
        super().__init__(path, openai_completions.CompletionRequest)
        self._completions = completions

    async def start(self, asked: Any, owner: str) -> Answers:
        return await self._completions.start(replace(openai_completions.to_job(asked), scope=owner))

    def encoder(self, asked: Any, envelope: Envelope, running: Answers) -> Encoder:
        return openai_completions.CompletionStream(asked, envelope)

    def collect(self, events: Iterable[Any], asked: Any, envelope: Envelope) -> dict[str, Any]:
        return openai_completions.collect(events, asked, envelope)


async def _all(running: Answers) -> list[Any]:
    return [event async for events in running.events() for event in events]


async def _blocks(encoder: Encoder, running: Answers, keepalive: float) -> AsyncGenerator[str]:
    """A stream's blocks. While it says nothing, what keeps it alive comes every so many seconds: clients drop silent
    streams. An error ends it in the dialect's own form: the status is sent already.
    """
    spoken = time.monotonic()
    try:
        yield "".join(encoder.start())
        async for events in running.events(keepalive):
            blocks = "".join([block for event in events for block in encoder.event(event)])
            if not blocks and time.monotonic() - spoken >= keepalive:
                blocks = encoder.keepalive()
            if blocks:
                yield blocks
                spoken = time.monotonic()
        yield "".join(encoder.done())
    except SelfdraftError as error:
        yield "".join(encoder.error(error))
    except Exception as error:
        log.exception("a stream broke off")
        yield "".join(encoder.error(error))
