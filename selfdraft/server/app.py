"""The web application: paths, who answers them, what becomes of errors. Knows HTTP; decides nothing about decoding."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Annotated, TypeVar

from fastapi import FastAPI, Path, Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__
from ..errors import ModelNotFound, SelfdraftError
from ..memory import used_memory
from . import page
from .api_docs import add_docs
from .config import ServerSettings
from .dialects import anthropic_messages, openai_chat, openai_responses
from .dialects.failures import headers
from .endpoints import ChatEndpoint, CompletionEndpoint, Endpoint
from .errors import HttpError
from .metrics import Metrics
from .pictures import Pictures
from .registry import DEFAULT
from .retrieval import Retrieval
from .retrieval_routes import add_retrieval, entries
from .security import Gate
from .served import ServedModels
from .token_routes import add_tokens

__all__ = ["create_app"]

log = logging.getLogger(__name__)

T = TypeVar("T")


def create_app(models: ServedModels, retrieval: Retrieval, settings: ServerSettings) -> FastAPI:
    """The application around models."""
    access = settings.access()

    app = FastAPI(
        title="Selfdraft",
        version=__version__,
        summary="Exact speculative decoding with a model's own MTP head",
        docs_url=None,  # FastAPI's own pages load scripts from elsewhere
        redoc_url=None,
        middleware=[
            Middleware(Measure, metrics=models.metrics),
            Middleware(Catch),
            Middleware(Gate, access=access, refuse=_error),
        ],
    )
    pictures = Pictures(settings)
    _add_errors(app)
    for endpoint in _endpoints(pictures):
        endpoint.mount(app, models, settings.keepalive)
    _add_status(app, models, retrieval)
    _add_models(app, models, retrieval)
    add_retrieval(app, retrieval)
    add_tokens(app, models, pictures)
    app.include_router(page.router())
    add_docs(app)
    return app


def _endpoints(pictures: Pictures) -> list[Endpoint]:
    return [
        ChatEndpoint(
            "/v1/chat/completions",
            openai_chat,
            openai_chat.ChatRequest,
            lambda asked, envelope, _: openai_chat.ChatStream(asked, envelope),
            pictures,
        ),
        ChatEndpoint(
            "/v1/responses",
            openai_responses,
            openai_responses.ResponsesRequest,
            lambda asked, envelope, _: openai_responses.ResponseStream(asked, envelope),
            pictures,
        ),
        ChatEndpoint(
            "/v1/messages",
            anthropic_messages,
            anthropic_messages.MessagesRequest,
            lambda _, envelope, tokens: anthropic_messages.MessageStream(envelope, prompt_tokens=tokens),
            pictures,
        ),
        CompletionEndpoint("/v1/completions"),
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


def _add_status(app: FastAPI, models: ServedModels, retrieval: Retrieval) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get(
        "/health",
        summary="Whether the models can be asked; never waits for one",
        responses={503: {"description": "It is still being loaded, or failed", "content": {"application/json": {}}}},
    )
    async def health() -> Response:
        states = {name: models.pool.state(name) for name in models.registry.models}
        figures = {"version": __version__, **models.figures, "models": states | retrieval.states}
        if models.broken:
            return JSONResponse({"status": "failed", "error": "the server's log says why", **figures}, 503)
        if models.stopping:
            return JSONResponse({"status": "stopping", **figures}, 503)
        if not models.ready:
            return JSONResponse({"status": "loading", **figures}, 503, {"Retry-After": "2"})
        return JSONResponse({"status": "ok", **figures, "mode": models.mode, "adapter": models.adapter})

    @app.get("/metrics", summary="Counters for Prometheus", response_class=PlainTextResponse)
    async def metrics() -> Response:
        counts = models.metrics
        for name in models.registry.models:
            service = models.loaded(name)
            figures = service.figures if service else {"running": 0, "waiting": 0}
            counts.running.labels(name).set(figures["running"])
            counts.waiting.labels(name).set(figures["waiting"])
        for kind, size in {**used_memory(), **models.memory_figures}.items():
            counts.memory.labels(kind).set(size)
        return PlainTextResponse(counts.text(), media_type="text/plain; version=0.0.4")


def _add_models(app: FastAPI, models: ServedModels, retrieval: Retrieval) -> None:
    registry = models.registry

    def described(name: str) -> dict[str, object]:
        model = registry.resolve(name).model
        return {
            "id": name,
            "object": "model",
            "type": "model",
            "created": registry.created,
            "created_at": datetime.fromtimestamp(registry.created, UTC).isoformat(),
            "lifecycle": "active",
            "owned_by": "selfdraft",
            "display_name": name,
            "state": models.pool.state(model),
            **models.limits(model),
        }

    @app.get("/v1/models", summary="The models, under each of their names, loaded or not")
    async def list_models() -> dict[str, object]:
        names = registry.names
        listed = [*(described(name) for name in names), *entries(retrieval)]
        ends = {"first_id": names[0], "last_id": listed[-1]["id"]}
        return {"object": "list", "data": listed, **ends, "has_more": False}

    @app.get("/v1/models/{name:path}", summary="One of them")
    async def model(name: Annotated[str, Path(examples=[DEFAULT])]) -> dict[str, object]:
        for entry in entries(retrieval):
            if entry["id"] == name:
                return entry
        if name not in (*registry.names, DEFAULT):
            raise ModelNotFound(f"no model {name[:200]!r} here; there is {', '.join(registry.names)}")
        return described(registry.resolve(name).shown)


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
