"""The web application: paths, who answers them, what becomes of errors. Knows HTTP; decides nothing about decoding."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated

from fastapi import FastAPI, Path, Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__
from ..errors import InvalidRequest, ModelNotFound, SelfdraftError
from ..memory import used_memory
from . import page
from .api_docs import add_docs
from .chat import Chats
from .completions import Completions
from .config import ServerSettings
from .dialects import anthropic_messages, openai_chat, openai_responses
from .dialects.failures import headers
from .dialects.wire import WireModel, read
from .endpoints import ChatEndpoint, CompletionEndpoint, Endpoint
from .errors import HttpError
from .metrics import Metrics
from .openapi import described
from .pictures import Pictures
from .registry import DEFAULT, Registry
from .security import Gate
from .service import EngineService

__all__ = ["create_app"]

log = logging.getLogger(__name__)


class TokenizeRequest(openai_chat.ChatPrompt):
    """The body of POST /tokenize: a text, or a chat, with all that may stand in one."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(WireModel):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


def create_app(service: EngineService, registry: Registry, settings: ServerSettings) -> FastAPI:
    """The application around a service.

    Args:
        service: started already, or about to be.
        registry: the names the model answers to.
    """
    access = settings.access()

    app = FastAPI(
        title="Selfdraft",
        version=__version__,
        summary="Exact speculative decoding with a model's own MTP head",
        docs_url=None,  # FastAPI's own pages load scripts from elsewhere
        redoc_url=None,
        middleware=[
            Middleware(Measure, metrics=service.metrics),
            Middleware(Catch),
            Middleware(Gate, access=access, refuse=_error),
        ],
    )
    chats, completions = Chats(service, Pictures(settings)), Completions(service)
    _add_errors(app)
    for endpoint in _endpoints(chats, completions):
        endpoint.mount(app, registry, settings.keepalive)
    _add_status(app, service)
    _add_models(app, service, registry)
    _add_tokens(app, service, registry, chats)
    app.include_router(page.router())
    add_docs(app)
    return app


def _endpoints(chats: Chats, completions: Completions) -> list[Endpoint]:
    return [
        ChatEndpoint(
            "/v1/chat/completions",
            openai_chat,
            openai_chat.ChatRequest,
            lambda asked, envelope, _: openai_chat.ChatStream(asked, envelope),
            chats,
        ),
        ChatEndpoint(
            "/v1/responses",
            openai_responses,
            openai_responses.ResponsesRequest,
            lambda asked, envelope, _: openai_responses.ResponseStream(asked, envelope),
            chats,
        ),
        ChatEndpoint(
            "/v1/messages",
            anthropic_messages,
            anthropic_messages.MessagesRequest,
            lambda _, envelope, tokens: anthropic_messages.MessageStream(envelope, prompt_tokens=tokens),
            chats,
        ),
        CompletionEndpoint("/v1/completions", completions),
    ]


def _error(scope: Scope, error: BaseException) -> Response:
    """An error in the form that the client of a request reads: Anthropic's say which version they speak."""
    anthropic = scope["path"].startswith("/v1/messages") or (
        scope["path"].startswith("/v1/models") and "anthropic-version" in Headers(scope=scope)
    )
    dialect = anthropic_messages if anthropic else openai_chat
    status, body = dialect.error_body(error)
    return JSONResponse(body, status, headers(error))


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(SelfdraftError)
    async def known(request: Request, error: SelfdraftError) -> Response:
        return _error(request.scope, error)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            wrong = HttpError(f"{path} takes {allowed}", status=405, code="method_not_allowed")
        else:
            wrong = HttpError(f"there is nothing at {path[:200]}", status=error.status_code, code="not_found")
        response = _error(request.scope, wrong)
        response.headers.update(error.headers or {})  # Allow
        return response

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it


def _add_status(app: FastAPI, service: EngineService) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get(
        "/health",
        summary="Whether the model is there; never waits for it",
        responses={503: {"description": "It is still being loaded, or failed", "content": {"application/json": {}}}},
    )
    async def health() -> Response:
        figures = {"version": __version__, **service.figures}
        if service.failure is not None:
            return JSONResponse({"status": "failed", "error": "the server's log says why", **figures}, 503)
        if service.stopping:
            return JSONResponse({"status": "stopping", **figures}, 503)
        if not service.ready:
            return JSONResponse({"status": "loading", **figures}, 503, {"Retry-After": "2"})
        adapter = service.llm.adapter.name if service.llm.adapter else None
        return JSONResponse({"status": "ok", **figures, "mode": service.llm.mode, "adapter": adapter})

    @app.get("/metrics", summary="Counters for Prometheus", response_class=PlainTextResponse)
    async def metrics() -> Response:
        figures, counts = service.figures, service.metrics
        counts.running.set(figures["running"])
        counts.waiting.set(figures["waiting"])
        for kind, size in {**used_memory(), **service.memory_figures}.items():
            counts.memory.labels(kind).set(size)
        return PlainTextResponse(counts.text(), media_type="text/plain; version=0.0.4")


def _add_models(app: FastAPI, service: EngineService, registry: Registry) -> None:
    def described(name: str) -> dict[str, object]:
        llm = service.llm
        return {
            "id": name,
            "object": "model",
            "type": "model",
            "created": registry.created,
            "created_at": datetime.fromtimestamp(registry.created, UTC).isoformat(),
            "lifecycle": "active",
            "owned_by": "selfdraft",
            "display_name": name,
            "max_model_len": llm.context_length,
            "max_input_tokens": llm.context_length,
            "max_output_tokens": llm.defaults["max_tokens"],
            "max_depth": llm.max_depth,
            "architecture": {
                "input_modalities": ["text", "image"] if llm.vision else ["text"],
                "output_modalities": ["text"],
            },
            "capabilities": {"image_input": {"supported": llm.vision}},
            "adapter": llm.adapter.describe() if llm.adapter else None,
        }

    @app.get("/v1/models", summary="The model, under each of its names")
    async def models() -> dict[str, object]:
        names = registry.names
        listed = [described(name) for name in names]
        return {"object": "list", "data": listed, "first_id": names[0], "last_id": names[-1], "has_more": False}

    @app.get("/v1/models/{name:path}", summary="One of them")
    async def model(name: Annotated[str, Path(examples=[DEFAULT])]) -> dict[str, object]:
        if name not in (*registry.names, DEFAULT):
            raise ModelNotFound(f"no model {name[:200]!r} here; there is {', '.join(registry.names)}")
        return described(registry.resolve(name))


def _add_tokens(app: FastAPI, service: EngineService, registry: Registry, chats: Chats) -> None:
    @app.post(
        "/v1/messages/count_tokens",
        summary="How many tokens a message request sends to the model",
        **described(anthropic_messages.CountRequest),
    )
    async def count(request: Request) -> dict[str, object]:
        asked = read(anthropic_messages.CountRequest, await request.body())
        registry.resolve(asked.model)
        job = replace(anthropic_messages.to_job(asked), scope=request.state.owner)
        return anthropic_messages.count_body(len(await chats.tokens(job)))

    @app.post(
        "/tokenize",
        summary="The tokens of a text, or of messages as the model reads them",
        **described(TokenizeRequest),
    )
    async def tokenize(request: Request) -> dict[str, object]:
        asked = read(TokenizeRequest, await request.body())
        registry.resolve(asked.model)
        if (asked.prompt is None) == (not asked.messages):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        llm = service.llm
        if asked.messages:
            job = replace(openai_chat.to_job(asked), scope=request.state.owner)
            tokens = list(await chats.tokens(job))
        else:
            tokens = await asyncio.to_thread(llm.tokenizer.encode, asked.prompt or "", special=True)
            bos = llm.tokenizer.bos_id
            if asked.add_special_tokens and bos is not None and tokens[:1] != [bos]:
                tokens = [bos, *tokens]  # as a completion begins
        return {"tokens": tokens, "count": len(tokens), "max_model_len": llm.context_length}

    @app.post("/detokenize", summary="The text of tokens", **described(DetokenizeRequest))
    async def detokenize(request: Request) -> dict[str, object]:
        asked = read(DetokenizeRequest, await request.body())
        registry.resolve(asked.model)
        llm = service.llm
        if outside := [token for token in asked.tokens if not 0 <= token < llm.loaded.model.vocab_size]:
            raise InvalidRequest(f"token id {outside[0]} is outside the vocabulary", param="tokens")
        return {"prompt": await asyncio.to_thread(llm.tokenizer.decode, asked.tokens, skip_special=False)}

    @app.get("/tokenizer_info", summary="The tokens with a meaning and the chat template, as in the model's files")
    async def tokenizer_info() -> dict[str, str | None]:
        template = service.llm.template
        if template is None:
            return {"chat_template": None}
        return {**template.tokens, "chat_template": template.source}


class Catch:
    """ASGI middleware that answers where something broke that nobody foresaw.

    Starlette would answer, too, and then let the exception go on to the server, which drops the connection.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = scope["type"] != "http"

        async def sent(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, sent)
        except Exception as error:
            if begun:
                raise
            log.exception("a request failed")
            await _error(scope, error)(scope, receive, send)


class Measure:
    """ASGI middleware that counts requests by path and status. Paths nobody serves go under one name."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 499

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            route = scope.get("route")
            self._metrics.requests.labels(getattr(route, "path", "other"), str(status)).inc()
