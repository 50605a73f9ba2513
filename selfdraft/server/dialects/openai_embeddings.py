"""OpenAI's embeddings. Knows that format, both ways; nothing of models."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from ...errors import InvalidRequest
from . import limits
from .limits import RequestTooLarge, at_most
from .sampling import Count
from .wire import WireModel

__all__ = ["EmbeddingJob", "EmbeddingRequest", "check_tokens", "response", "to_job"]


class EmbeddingRequest(WireModel):
    """The body of POST /v1/embeddings. `user` is ignored, as all that is not named here."""

    model: str | None = None
    input: str | list[str] | list[Count] | list[list[Count]]
    dimensions: Annotated[int, Field(ge=1, le=limits.MAX_COUNT)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    truncate: bool | None = None
    prompt_name: str | None = None


@dataclass(frozen=True)
class EmbeddingJob:
    """Inputs to embed, checked.

    Attributes:
        inputs: each a text, or ids of tokens.
        dimensions: numbers of each vector; None for all.
        truncate: cut off the end of what is too long.
        prompt: name of the prompt to set before texts; None for the model's own choice.
    """

    inputs: Sequence[str | Sequence[int]]
    dimensions: int | None
    truncate: bool
    prompt: str | None


def to_job(request: EmbeddingRequest) -> EmbeddingJob:
    """What the request asks for.

    Raises:
        InvalidRequest: nothing to embed. RequestTooLarge: too many inputs.
    """
    given = request.input
    single = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    inputs: list[Any] = [given] if single else list(given)
    if not inputs:
        raise InvalidRequest("input must not be empty: give a text, tokens, or a list of them", param="input")
    at_most(inputs, limits.MAX_INPUTS, "input", "texts")
    return EmbeddingJob(inputs, request.dimensions, bool(request.truncate), request.prompt_name)


def check_tokens(count: int, param: str) -> None:
    """Refuse more tokens than one request may have read.

    Raises:
        RequestTooLarge: they are.
    """
    if count > limits.MAX_READ_TOKENS:
        raise RequestTooLarge(
            f"{param} holds {count} tokens; at most {limits.MAX_READ_TOKENS} are read for a request: send several",
            param=param,
        )


def response(vectors: npt.NDArray[np.float32], tokens: int, request: EmbeddingRequest, model: str) -> dict[str, Any]:
    """The body of the response.

    Args:
        vectors: fp32 [inputs, width], finite.
        tokens: that were read.
        model: the name that the request used.
    """
    if request.encoding_format == "base64":
        encoded: list[Any] = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
    else:
        encoded = vectors.tolist()
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(encoded)],
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
