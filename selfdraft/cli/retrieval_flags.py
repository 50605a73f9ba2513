"""The flags of `serve` that are about embedding models and rerankers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .flags import flag, whole

__all__ = ["RetrievalFlags"]

_RETRIEVAL = "Embeddings and reranking, with mlx-embeddings (extra retrieval)"


@dataclass(frozen=True, kw_only=True)
class RetrievalFlags:
    """Which models there are beside the one that writes, and how many of them at once."""

    embedding_model: Annotated[
        list[str] | None,
        flag(
            "--embedding-model",
            "Model behind /v1/embeddings, a folder or a pulled Hugging Face id: MODEL, or NAME=MODEL with a name "
            "for requests; loaded on its first request; repeatable. Default: none.",
            _RETRIEVAL,
            "MODEL",
        ),
    ] = None
    rerank_model: Annotated[
        list[str] | None,
        flag(
            "--rerank-model",
            "Likewise for /v1/rerank: a cross-encoder, a Qwen3 reranker, or an embedding model, of which cosines are "
            "taken; repeatable. Default: none.",
            _RETRIEVAL,
            "MODEL",
        ),
    ] = None
    max_loaded_retrieval: Annotated[
        int | None,
        flag(
            "--max-loaded-retrieval",
            "How many of these models are loaded at once, 1 to 256; the one used longest ago gives way. Default: 4.",
            _RETRIEVAL,
            "N",
            whole,
        ),
    ] = None
