"""JSON bodies in, JSON bodies and server-sent events out. Knows what all dialects share and none of them."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, from_json

from ...errors import InvalidRequest
from ..jobs import JobEvent
from .limits import MAX_BODY_DEPTH, check_depth

__all__ = ["COMMENT", "Encoder", "Envelope", "WireModel", "read", "sse"]

COMMENT = ": keep-alive\n\n"
"""A server-sent comment: keeps a silent connection open, and every client skips it."""


class WireModel(BaseModel):
    """An object of a request: unknown fields are ignored, types are not converted, no NaN."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=WireModel)


@dataclass(frozen=True)
class Envelope:
    """What a response says about itself.

    Attributes:
        code: hex digits, unlike those of any other response; every id in it derives from them.
        created: seconds since 1970.
        model: the name of the model that answers.
    """

    code: str
    created: int
    model: str

    @classmethod
    def new(cls, model: str) -> Envelope:
        """One for a response that begins now."""
        return cls(secrets.token_hex(12), int(time.time()), model)

    def call_id(self, choice: int, call: int) -> str:
        """The id of a tool call."""
        return f"call_{self.code}{choice:02x}{call:02x}"


class Encoder(Protocol):
    """Turns the events of an answer into server-sent events, each list whole blocks, ready to be written."""

    def start(self) -> list[str]:
        """What comes before the first event."""

    def event(self, event: JobEvent) -> list[str]:
        """What an event becomes; nothing, at times."""

    def done(self) -> list[str]:
        """What comes after the last event."""

    def error(self, exception: BaseException) -> list[str]:
        """The end of a stream that breaks off."""

    def keepalive(self) -> str:
        """What shows that the connection lives."""


def read(model: type[Model], body: bytes) -> Model:
    """A request from its body.

    Raises:
        InvalidRequest: not JSON, or not this object; the message names the field and the value.
        RequestTooLarge: nested too deeply.
    """
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {_short(value)}")
    check_depth(value, MAX_BODY_DEPTH, None)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _invalid(error) from error


def sse(data: Mapping[str, Any] | str, event: str | None = None) -> str:
    """One server-sent event.

    The JSON is plain ASCII: some clients take U+2028 and the like for the end of a line.
    """
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"), allow_nan=False)
    return f"data: {text}\n\n" if event is None else f"event: {event}\ndata: {text}\n\n"


def _invalid(error: ValidationError) -> InvalidRequest:
    # Of a union, every branch reports; the one that came furthest is the one that was meant.
    detail = max(error.errors(include_url=False), key=lambda detail: len(detail["loc"]))
    path = _path(detail)
    message = f"{path}: {detail['msg'][0].lower()}{detail['msg'][1:]}"
    if detail["type"] != "missing":
        message += f"; got {_short(detail['input'])}"
    return InvalidRequest(message, param=path.split("[")[0].split(".")[0])


def _path(detail: ErrorDetails) -> str:
    """The field, as a client would write it: messages[0].content."""
    path = ""
    for step in detail["loc"]:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step.isidentifier() and step not in ("str", "int", "float", "bool"):  # the rest names a union's branch
            path += f".{step}" if path else step
    return path or "the body"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:120] + "..."
