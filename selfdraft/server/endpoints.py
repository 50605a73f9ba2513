"""One request of a dialect, from its body to its response, streamed or whole. Knows HTTP and the dialects' shape."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from ..errors import SelfdraftError
from .chat import Chats
from .completions import Completions
from .dialects import openai_completions
from .dialects.wire import Encoder, Envelope, WireModel, read
from .jobs import ChatJob
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
            running = await self.start(asked)
            if asked.stream:
                encoder = self.encoder(asked, envelope, running)
                return EventStream(_blocks(encoder, running), keepalive=encoder.keepalive(), every=keepalive)
            return JSONResponse(self.collect(await unless_gone(request, _all(running)), asked, envelope))

        schema = self._request.model_json_schema(ref_template="#/components/schemas/{model}")
        schema.pop("$defs", None)
        app.post(
            self.path,
            response_model=None,
            summary=(self._request.__doc__ or "").splitlines()[0],
            openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
        )(answer)

    @abstractmethod
    async def start(self, asked: Any) -> Answers:
        """Queue what is asked for."""

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

    async def start(self, asked: Any) -> Answers:
        job: ChatJob = self._dialect.to_job(asked)
        return await self._chats.start(job)

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

    async def start(self, asked: Any) -> Answers:
        return await self._completions.start(openai_completions.to_job(asked))

    def encoder(self, asked: Any, envelope: Envelope, running: Answers) -> Encoder:
        return openai_completions.CompletionStream(asked, envelope)

    def collect(self, events: Iterable[Any], asked: Any, envelope: Envelope) -> dict[str, Any]:
        return openai_completions.collect(events, asked, envelope)


async def _all(running: Answers) -> list[Any]:
    async with aclosing(running.events()) as events:
        return [event async for event in events]


async def _blocks(encoder: Encoder, running: Answers) -> AsyncGenerator[str]:
    """A stream's blocks. An error ends it in the dialect's own form: the status is sent already."""
    try:
        async with aclosing(running.events()) as events:
            for block in encoder.start():
                yield block
            async for event in events:
                for block in encoder.event(event):
                    yield block
        for block in encoder.done():
            yield block
    except SelfdraftError as error:
        for block in encoder.error(error):
            yield block
    except Exception as error:
        log.exception("a stream broke off")
        for block in encoder.error(error):
            yield block
