"""Reranking, in the form that Jina's and Cohere's clients share. Knows that format, both ways; nothing of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from ...errors import InvalidRequest
from . import limits
from .limits import at_most
from .wire import WireModel

__all__ = ["RerankJob", "RerankRequest", "response", "to_job"]


class Document(WireModel):
    """A document that is an object; of its fields, the text is read."""

    text: str


class RerankRequest(WireModel):
    """The body of POST /v1/rerank."""

    model: str | None = None
    query: str
    documents: list[str | Document]
    top_n: Annotated[int, Field(ge=1, le=limits.MAX_COUNT)] | None = None
    return_documents: bool | None = None
    truncate: bool | None = None
    raw_scores: bool | None = None
    instruction: str | None = None


@dataclass(frozen=True)
class RerankJob:
    """Documents to score, checked.

    Attributes:
        documents: their texts.
        truncate: cut off the end of those that are too long; on if not said, as everywhere in this API.
        instruction: what is searched for, for models that take one.
    """

    query: str
    documents: Sequence[str]
    truncate: bool
    instruction: str | None


def to_job(request: RerankRequest) -> RerankJob:
    """What the request asks for.

    Raises:
        InvalidRequest: no query, or no documents. RequestTooLarge: too many documents.
    """
    if not request.query:
        raise InvalidRequest("query must not be empty", param="query")
    if not request.documents:
        raise InvalidRequest("documents must not be empty: give texts, or objects with a text", param="documents")
    at_most(request.documents, limits.MAX_DOCUMENTS, "documents", "texts")
    texts = [each if isinstance(each, str) else each.text for each in request.documents]
    return RerankJob(request.query, texts, request.truncate is not False, request.instruction)


def response(
    scores: Sequence[float], tokens: int, request: RerankRequest, *, code: str, model: str, method: str
) -> dict[str, Any]:
    """The body of the response: the most relevant document first, equal ones in the order given.

    Args:
        scores: of each document, finite.
        tokens: that were read.
        code: hex digits, unlike those of any other response.
        model: the name that the request used.
        method: how the scores were made; see `Reranker`.
    """
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
    if request.return_documents:
        for result in results:
            document = request.documents[result["index"]]
            result["document"] = {"text": document if isinstance(document, str) else document.text}
    return {
        "id": f"rerank-{code}",
        "object": "list",
        "model": model,
        "method": method,
        "results": results,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
