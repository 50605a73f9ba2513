"""/v1/embeddings and /v1/rerank, from a request's body to its response. Knows HTTP; decides nothing about models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Generator, Mapping
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from ..retrieval import Embedder, Reranker, Scores, Vectors
from .dialects import openai_embeddings, rerank
from .dialects.openai_embeddings import EmbeddingRequest, check_tokens
from .dialects.rerank import RerankRequest
from .dialects.wire import Envelope, WireModel, read
from .openapi import described
from .registry import DEFAULT
from .retrieval import Kind, Named, Retrieval
from .streaming import unless_gone

__all__ = ["add_retrieval", "entries"]

Answer = Callable[[Request], Coroutine[Any, Any, Response]]


def add_retrieval(app: FastAPI, retrieval: Retrieval) -> None:
    """Serve the paths. Those for which there is no model say what is missing, and are not described at /docs."""
    routes = Routes(retrieval)
    kinds = {named.kind for named in retrieval.models}

    def add(path: str, kind: Kind, answer: Answer, request: type[WireModel], summary: str, example: object) -> None:
        about = described(request)
        about["openapi_extra"]["requestBody"]["content"]["application/json"]["example"] = example
        app.post(path, summary=summary, include_in_schema=kind in kinds, **about)(answer)

    add(
        "/v1/embeddings",
        "embedding",
        routes.embed,
        EmbeddingRequest,
        "Vectors of texts, in the form of OpenAI's embeddings",
        {"model": DEFAULT, "input": "Hello"},
    )
    add(
        "/v1/rerank",
        "rerank",
        routes.rerank,
        RerankRequest,
        "Documents by their relevance to a query, in the form of Jina's and Cohere's rerank",
        {"model": DEFAULT, "query": "Hello", "documents": ["Good day", "An apple"]},
    )
    app.post("/v2/rerank", include_in_schema=False)(routes.rerank)  # where Cohere's newer clients look for it


def entries(retrieval: Retrieval) -> list[dict[str, Any]]:
    """What /v1/models says of each model; of those that are loaded, also their limits."""
    return [_entry(retrieval, named) for named in retrieval.models]


def _entry(retrieval: Retrieval, named: Named) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "id": named.name,
        "object": "model",
        "type": named.kind,
        "created": retrieval.created,
        "owned_by": "selfdraft",
        "display_name": named.name,
        "state": retrieval.states[named.name],
    }
    model = retrieval.loaded(named)
    if model is not None:
        entry["max_input_tokens"] = model.most_tokens
    if isinstance(model, Embedder):
        entry["dimensions"] = model.width
    if isinstance(model, Reranker):
        entry["method"] = model.method
    return entry


class Routes:
    """Who answers the paths."""

    def __init__(self, retrieval: Retrieval) -> None:
        self._retrieval = retrieval

    async def embed(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        asked = read(EmbeddingRequest, await request.body())
        named = self._retrieval.find("embedding", asked.model)
        job = openai_embeddings.to_job(asked)

        def work(model: Embedder) -> Generator[None, None, tuple[Vectors, int]]:
            tokens = model.read(job.inputs, truncate=job.truncate, prompt=job.prompt)
            count = sum(len(each) for each in tokens)
            check_tokens(count, "input")
            vectors = yield from model.embed(tokens, dimensions=job.dimensions)
            return vectors, count

        vectors, count = await unless_gone(request, self._retrieval.run(named, work))
        self._retrieval.metrics.observe(named.name, len(vectors), count)
        return await _json(lambda: openai_embeddings.response(vectors, count, asked, named.name))

    async def rerank(self, request: Request) -> Response:
        """POST /v1/rerank."""
        asked = read(RerankRequest, await request.body())
        named = self._retrieval.find("rerank", asked.model)
        job = rerank.to_job(asked)

        def work(model: Reranker) -> Generator[None, None, tuple[Scores, int, str]]:
            tokens = model.read(job.query, job.documents, truncate=job.truncate, instruction=job.instruction)
            count = sum(len(each) for each in tokens)
            check_tokens(count, "documents")
            scores = yield from model.score(tokens)
            return scores, count, model.method

        scores, count, method = await unless_gone(request, self._retrieval.run(named, work))
        self._retrieval.metrics.observe(named.name, len(job.documents), count)
        values = (scores.logits if asked.raw_scores else scores.relevance).tolist()
        code = Envelope.new(named.name).code
        return await _json(lambda: rerank.response(values, count, asked, code=code, model=named.name, method=method))


async def _json(body: Callable[[], Mapping[str, Any]]) -> Response:
    """A JSON response, written on a thread: it may hold a million numbers."""
    text = await asyncio.to_thread(lambda: json.dumps(body(), separators=(",", ":"), allow_nan=False))
    return Response(text, media_type="application/json")
