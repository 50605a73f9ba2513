"""Which HTTP status an exception is, and what may be said about it. Knows no dialect."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...errors import (
    ContextOverflow,
    GroupBroken,
    ImageTooLarge,
    InvalidRequest,
    ModelNotFound,
    NonFiniteLogits,
    NonFiniteOutput,
    OutOfMemoryBudget,
    SelfdraftError,
)
from ..errors import HttpError, LoadFailed, Loading, NoRoom, QueueFull
from .limits import RequestTooLarge

__all__ = ["Failure", "describe", "headers"]


@dataclass(frozen=True)
class Failure:
    """An exception as a client may see it.

    Attributes:
        status: HTTP status.
        code: a short name of the kind.
        param: the field at fault, where there is one.
    """

    status: int
    code: str
    message: str
    param: str | None = None


# Subclasses stand before what they derive from.
_KINDS: tuple[tuple[type[SelfdraftError], int, str], ...] = (
    (ContextOverflow, 400, "context_length_exceeded"),
    (RequestTooLarge, 413, "request_too_large"),
    (ImageTooLarge, 413, "image_too_large"),
    (InvalidRequest, 400, "invalid_request"),
    (ModelNotFound, 404, "model_not_found"),
    (QueueFull, 429, "rate_limit_exceeded"),
    (NoRoom, 503, "no_room_for_model"),
    (Loading, 503, "model_loading"),
    (GroupBroken, 503, "group_broken"),
    (LoadFailed, 500, "model_load_failed"),
    (NonFiniteLogits, 500, "server_error"),
    (NonFiniteOutput, 500, "server_error"),
)


def describe(exception: BaseException) -> Failure:
    """Status, code and message. What a client cannot help stays in the log: its text may name paths or internals."""
    if isinstance(exception, OutOfMemoryBudget):
        return Failure(507 if exception.later else 413, "insufficient_memory", str(exception))
    if isinstance(exception, HttpError):
        return Failure(exception.status, exception.code, str(exception))
    for kind, status, code in _KINDS:
        if isinstance(exception, kind):
            return Failure(status, code, str(exception), getattr(exception, "param", None))
    return Failure(500, "server_error", "the server failed on this request; its log says why")


def headers(exception: BaseException) -> dict[str, str]:
    """HTTP headers that go with the error, such as Retry-After where another try makes sense."""
    match exception:
        case QueueFull() | Loading():
            return {"Retry-After": str(max(1, math.ceil(exception.retry_after)))}
        case HttpError(status=401):
            return {"WWW-Authenticate": "Bearer"}
        case HttpError(status=408):
            return {"Connection": "close"}  # the rest of the request is not waited for
        case _:
            return {}
