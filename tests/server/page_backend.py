"""A server for tests of the chat page: the page's own router, and a scripted chat endpoint in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from selfdraft.server.page import router

TIMINGS = {"tokens_per_second": 41.84, "cycles": 9, "tokens_per_cycle": 2.847, "prompt_ms": 312.0, "decode_ms": 900.0}
TIMINGS["acceptance_per_position"] = [0.93, 0.71, 0.5]  # type: ignore[assignment]
USAGE = {"prompt_tokens": 512, "completion_tokens": 26, "prompt_tokens_details": {"cached_tokens": 480}}

# A step of a script: ("text" | "think" | "error", str), ("wait", seconds), ("hold",), ("cut",), or, alone,
# ("refuse", status, message).
Step = tuple[Any, ...]


class Backend:
    """What the scripted server answers, and what it was asked.

    Attributes:
        scripts: steps by the text of the last user message; other messages are answered with "You said: ...".
        health: status in /health: "ok", "loading" or "failed".
        key: the API key it asks for, if any.
        vision: whether its model reads images.
        loaded: whether its model is loaded: before, it tells nothing but its name. A chat request loads it.
        held: while true, a ("hold",) step waits.
        asked: bodies of the chat requests.
        cancelled: how many answers the client broke off.
    """

    def __init__(self) -> None:
        self.scripts: dict[str, list[Step]] = {}
        self.health = "ok"
        self.key: str | None = None
        self.vision = False
        self.loaded = True
        self.held = True
        self.asked: list[dict[str, Any]] = []
        self.cancelled = 0

    def app(self) -> FastAPI:
        app = FastAPI()
        app.include_router(router())

        @app.get("/health")
        async def health() -> Response:
            body = {"status": self.health, "error": "weights are missing"}
            return JSONResponse(body, status_code=200 if self.health == "ok" else 503)

        @app.get("/v1/models")
        async def models(request: Request) -> Response:
            model: dict[str, Any] = {"id": "nano-mtp"}
            if self.loaded:
                model |= {"max_model_len": 4096, "max_output_tokens": 1024, "max_depth": 5}
                model["architecture"] = {"input_modalities": ["text", "image"] if self.vision else ["text"]}
            return self.refusal(request) or JSONResponse({"data": [model]})

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            body = await request.json()
            refusal = self.refusal(request)
            if refusal:
                return refusal
            self.asked.append(body)
            self.loaded = True
            said = said_in(body["messages"][-1]["content"])
            steps = self.scripts.get(said, [("text", f"You said: {said}")])
            if steps[0][0] == "refuse":
                return JSONResponse({"error": {"message": steps[0][2]}}, status_code=steps[0][1])
            return StreamingResponse(self.stream(steps), media_type="text/event-stream")

        return app

    def refusal(self, request: Request) -> Response | None:
        if self.key is None or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return JSONResponse({"error": {"message": "An API key is needed."}}, status_code=401)

    async def stream(self, steps: list[Step]) -> AsyncIterator[str]:
        complete = False
        try:
            yield ": still here\n\n"
            for kind, *values in steps:
                if kind == "wait":
                    await asyncio.sleep(values[0])
                elif kind == "hold":
                    while self.held:
                        await asyncio.sleep(0.01)
                elif kind == "error":
                    yield event({"error": {"message": values[0]}})
                    complete = True
                    return
                elif kind == "cut":
                    complete = True
                    return
                else:
                    yield piece({"content" if kind == "text" else "reasoning_content": values[0]})
            yield event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            yield event({"choices": [], "usage": USAGE, "timings": TIMINGS})
            yield "data: [DONE]\n\n"
            complete = True
        finally:
            self.cancelled += not complete


def said_in(content: Any) -> str:
    """The text of a content, and how many images stand before it."""
    if isinstance(content, str):
        return content
    images = [part for part in content if part["type"] == "image_url"]
    return " ".join([f"[{len(images)} images]", *(part["text"] for part in content if part["type"] == "text")])


def piece(delta: dict[str, str]) -> str:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "timings": TIMINGS})


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """The address of `app`, served on a free port of this machine."""
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", ws="none", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the test server did not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
