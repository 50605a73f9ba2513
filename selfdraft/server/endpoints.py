"""One request of a dialect, from its body to its response, streamed or whole. Knows HTTP and the dialects' shape."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from ..errors import SelfdraftError
from .chat import Chats
from .completions import Completions
from .dialects import openai_completions
from .dialects.sampling import SamplingFields
from .dialects.wire import COMMENT, Encoder, Envelope, read
from .jobs import ChatJob
from .openapi import described
from .pictures import Pictures
from .pool import Lease
from .running import Answers
from .served import ServedModels
from .service import EngineService
from .streaming import EventStream, unless_gone

__all__ = ["ChatEndpoint", "CompletionEndpoint", "Endpoint"]

log = logging.getLogger(__name__)


class Endpoint(ABC):
    """A path that decodes.

    Subclasses say how a request becomes a job and then running answers, and how their events are written.
    """

    def __init__(self, path: str, request: type[SamplingFields]) -> None:
        self.path = path
        self._request = request

    def mount(self, app: FastAPI, models: ServedModels, keepalive: float) -> None:
        """Serve the path, and describe its body for /docs."""

        async def answer(request: Request) -> Response:
            asked: Any = read(self._request, await request.body())
            envelope = Envelope.new(models.registry.resolve(asked.model).shown)
            job = replace(self.job(asked), scope=request.state.owner)  # what is wrong with it loads no model
            work = _Work(models.use(asked.model, stay=asked.stay))
            try:
                if not await unless_gone(request, work.has_model(keepalive if asked.stream else None)):
                    return EventStream(self._late(work, job, asked, envelope, keepalive), work.close)
                running = await unless_gone(request, work.begin(lambda service: self.start(job, service)))
                if asked.stream:
                    encoder = self.encoder(asked, envelope, running.prompt_tokens)
                    return EventStream(_blocks(encoder, running, keepalive), work.close)
                events = await unless_gone(request, _all(running))
            except BaseException:
                work.close()
                raise
            work.close()
            return JSONResponse(self.collect(events, asked, envelope))

        app.post(self.path, **described(self._request))(answer)

    async def _late(
        self, work: _Work, job: Any, asked: Any, envelope: Envelope, keepalive: float
    ) -> AsyncGenerator[str]:
        """The blocks of a stream that begins before its model is loaded, with comments until it is."""
        try:
            yield COMMENT
            while not await work.has_model(keepalive):
                yield COMMENT
            running = await work.begin(lambda service: self.start(job, service))
            encoder = self.encoder(asked, envelope, running.prompt_tokens)
        except Exception as error:
            if not isinstance(error, SelfdraftError):
                log.exception("a stream broke off before it began")
            encoder = self.encoder(asked, envelope, 0)
            yield "".join([*encoder.start(), *encoder.error(error)])
            return
        async for block in _blocks(encoder, running, keepalive):
            yield block

    @abstractmethod
    def job(self, asked: Any) -> Any:
        """What is asked for.

        Raises:
            InvalidRequest: something that cannot be done.
        """

    @abstractmethod
    async def start(self, job: Any, service: EngineService) -> Answers:
        """Queue a job."""

    @abstractmethod
    def encoder(self, asked: Any, envelope: Envelope, prompt_tokens: int) -> Encoder:
        """Writes the stream."""

    @abstractmethod
    def collect(self, events: Iterable[Any], asked: Any, envelope: Envelope) -> dict[str, Any]:
        """Writes the whole response."""


class ChatEndpoint(Endpoint):
    """A dialect of chats.

    Args:
        dialect: its module: `to_job` and `collect`.
        stream: its encoder, of a request, an envelope and the length of the prompt.
        pictures: reads the images of chats.
    """

    def __init__(
        self,
        path: str,
        dialect: Any,
        request: type[SamplingFields],
        stream: Callable[[Any, Envelope, int], Encoder],
        pictures: Pictures,
    ) -> None:
        super().__init__(path, request)
        self._dialect = dialect
        self._stream = stream
        self._pictures = pictures

    def job(self, asked: Any) -> ChatJob:
        job: ChatJob = self._dialect.to_job(asked)
        return job

    async def start(self, job: ChatJob, service: EngineService) -> Answers:
        return await Chats(service, self._pictures).start(job)

    def encoder(self, asked: Any, envelope: Envelope, prompt_tokens: int) -> Encoder:
        return self._stream(asked, envelope, prompt_tokens)

    def collect(self, events: Iterable[Any], asked: Any, envelope: Envelope) -> dict[str, Any]:
        body: dict[str, Any] = self._dialect.collect(events, asked, envelope)
        return body


class CompletionEndpoint(Endpoint):
    """Bare prompts."""

    def __init__(self, path: str) -> None:
        super().__init__(path, openai_completions.CompletionRequest)

    def job(self, asked: Any) -> openai_completions.CompletionJob:
        return openai_completions.to_job(asked)

    async def start(self, job: openai_completions.CompletionJob, service: EngineService) -> Answers:
        return await Completions(service).start(job)

    def encoder(self, asked: Any, envelope: Envelope, prompt_tokens: int) -> Encoder:
        return openai_completions.CompletionStream(asked, envelope)

    def collect(self, events: Iterable[Any], asked: Any, envelope: Envelope) -> dict[str, Any]:
        return openai_completions.collect(events, asked, envelope)


class _Work:
    """What a request holds: the lease of its model, or the wait for it, and its answers. Whoever has it closes it."""

    def __init__(self, use: Coroutine[Any, Any, Lease[EngineService]]) -> None:
        self._leasing = asyncio.ensure_future(use)
        self._running: Answers | None = None

    async def has_model(self, patience: float | None) -> bool:
        """Whether the model is there, or will not be, within so many seconds; None for however long it takes."""
        done, _ = await asyncio.wait({self._leasing}, timeout=patience)
        return bool(done)

    async def begin(self, start: Callable[[EngineService], Awaitable[Answers]]) -> Answers:
        """The answers.

        Raises:
            SelfdraftError: there is no model, or it refuses them.
        """
        self._running = await start(self._leasing.result().thing)
        return self._running

    def close(self) -> None:
        """Give up what is not finished, and the model."""
        if self._running is not None:
            self._running.close()
        if not self._leasing.done():
            self._leasing.cancel()
        elif not self._leasing.cancelled() and self._leasing.exception() is None:
            self._leasing.result().release()


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
