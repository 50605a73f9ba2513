"""Routes of the chat page: the page, its files, and its Markdown. Knows no model; keys and hosts are checked before."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib import resources

import anyio
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError

from .process import RenderProcess
from .render import highlight_css

__all__ = ["HEADERS", "MAX_BODY", "router"]

MAX_BODY = 1024 * 1024

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
MEDIA_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


class RenderRequest(BaseModel):
    """Body of POST /page/render."""

    text: str


def router() -> APIRouter:
    """The routes of the page, read from the package once.

    Returns:
        A router with `GET /`, `GET /page/{name}` and `POST /page/render` {"text"} -> {"html"}. The two GETs must be
        open to a browser that has no key yet: the page asks for it. None of the three is in the OpenAPI schema.
    """
    files = _files()
    renderer = RenderProcess()
    limiter = anyio.CapacityLimiter(1)  # texts that wait must not fill the pool of threads

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        yield
        renderer.close()

    routes = APIRouter(include_in_schema=False, lifespan=lifespan)

    @routes.head("/")  # Claude Code asks so whether anybody is there
    @routes.get("/")
    async def page() -> Response:
        return _file("index.html", files["index.html"])

    @routes.get("/page/{name}")
    async def file(name: str) -> Response:
        if name not in files:
            return _error(404, f"The chat page has no file {name!r}; it starts at /", "not_found")
        return _file(name, files[name])

    @routes.post("/page/render")
    async def render_markdown(request: Request) -> Response:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY:
                return _error(413, f"The text to render is above {MAX_BODY} bytes; show it as it is", "too_large")
        try:
            text = RenderRequest.model_validate_json(bytes(body)).text
        except ValidationError:
            return _error(422, 'The body must be JSON {"text": "..."}', "invalid_body")
        html = await anyio.to_thread.run_sync(renderer.render, text, limiter=limiter)
        return JSONResponse({"html": html}, headers=HEADERS)

    return routes


def _files() -> dict[str, bytes]:
    static = resources.files(__package__) / "static"
    files = {entry.name: entry.read_bytes() for entry in static.iterdir() if entry.name.split(".")[-1] in MEDIA_TYPES}
    return {**files, "highlight.css": highlight_css().encode()}


def _file(name: str, content: bytes) -> Response:
    return Response(content, media_type=MEDIA_TYPES[name.split(".")[-1]], headers=HEADERS)


def _error(status: int, message: str, code: str) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": error}, status_code=status, headers=HEADERS)
