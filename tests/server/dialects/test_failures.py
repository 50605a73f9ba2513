"""Errors: status, body and headers, and the end of a stream that breaks off, in each dialect's own form."""

from __future__ import annotations

import anthropic
import openai
import pytest

from selfdraft.errors import (
    CheckpointError,
    ContextOverflow,
    InvalidRequest,
    ModelNotFound,
    NonFiniteLogits,
    OutOfMemoryBudget,
    SelfdraftError,
)
from selfdraft.server.dialects import anthropic_messages, openai_chat, openai_completions, openai_responses
from selfdraft.server.dialects.failures import headers
from selfdraft.server.dialects.limits import RequestTooLarge
from selfdraft.server.dialects.wire import Encoder, read
from selfdraft.server.errors import HttpError, Loading, QueueFull

from .support import ENVELOPE, READER, body, parsed

FAILURES = [
    (InvalidRequest("bad", param="n"), 400, "invalid_request", "invalid_request_error"),
    (ContextOverflow("long"), 400, "context_length_exceeded", "invalid_request_error"),
    (RequestTooLarge("big"), 413, "request_too_large", "request_too_large"),
    (ModelNotFound("who"), 404, "model_not_found", "not_found_error"),
    (HttpError("key", status=401, code="invalid_api_key"), 401, "invalid_api_key", "authentication_error"),
    (QueueFull("full", retry_after=1.2), 429, "rate_limit_exceeded", "rate_limit_error"),
    (OutOfMemoryBudget("never"), 413, "insufficient_memory", "request_too_large"),
    (OutOfMemoryBudget("now", later=True), 507, "insufficient_memory", "api_error"),
    (Loading("soon"), 503, "model_loading", "overloaded_error"),
    (NonFiniteLogits("nan"), 500, "server_error", "api_error"),
    (KeyError("/secret/path"), 500, "server_error", "api_error"),
    (CheckpointError("/secret/path"), 500, "server_error", "api_error"),
    (SelfdraftError("decoding was broken off by OSError: /secret/path"), 500, "server_error", "api_error"),
    (HttpError("host", status=403, code="bad_host"), 403, "bad_host", "permission_error"),
    (HttpError("get", status=405, code="method_not_allowed"), 405, "method_not_allowed", "invalid_request_error"),
]


@pytest.mark.parametrize(("error", "status", "code", "kind"), FAILURES)
def test_bodies(error: Exception, status: int, code: str, kind: str) -> None:
    got, wire = openai_chat.error_body(error)
    assert (got, wire["error"]["code"]) == (status, code)
    assert set(wire["error"]) == {"message", "type", "param", "code"}
    assert wire["error"]["param"] == getattr(error, "param", None)
    got, other = anthropic_messages.error_body(error)
    assert (got, other["type"], other["error"]["type"]) == (status, "error", kind)
    assert "secret" not in str((wire, other))


def test_when_to_try_again() -> None:
    assert headers(QueueFull("full", retry_after=1.2)) == {"Retry-After": "2"}
    assert headers(QueueFull("full", retry_after=0.0)) == {"Retry-After": "1"}
    assert "Retry-After" in headers(Loading("soon"))
    assert headers(InvalidRequest("bad")) == {}


def test_claude_code_knows_an_overflow_by_its_words() -> None:
    _, wire = anthropic_messages.error_body(ContextOverflow("9 tokens"))
    assert wire["error"]["message"] == "prompt is too long: 9 tokens"


HI = [{"role": "user", "content": "hi"}]
BROKEN = NonFiniteLogits("the model broke down")


def broken(encoder: Encoder) -> list[str]:
    return [*encoder.start(), *encoder.error(BROKEN)]


def test_a_broken_chat_stream() -> None:
    stream = openai_chat.ChatStream(read(openai_chat.ChatRequest, body({"model": "m", "messages": HI})), ENVELOPE)
    chunks = READER.hand(broken(stream)).openai.chat.completions.create(model="m", messages=HI, stream=True)  # type: ignore[arg-type]
    with pytest.raises(openai.APIError, match="broke down"):
        list(chunks)


def test_a_broken_completion_stream() -> None:
    wire = read(openai_completions.CompletionRequest, body({"model": "m", "prompt": "a"}))
    blocks = broken(openai_completions.CompletionStream(wire, ENVELOPE))
    with pytest.raises(openai.APIError, match="broke down"):
        list(READER.hand(blocks).openai.completions.create(model="m", prompt="a", stream=True))


def test_a_broken_response_stream() -> None:
    wire = read(openai_responses.ResponsesRequest, body({"model": "m", "input": "a"}))
    blocks = broken(openai_responses.ResponseStream(wire, ENVELOPE))
    *_, last = READER.hand(blocks).openai.responses.create(model="m", input="a", stream=True)
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.status) == ("server_error", "failed")
    assert last.sequence_number == 2


def test_a_broken_message_stream() -> None:
    blocks = broken(anthropic_messages.MessageStream(ENVELOPE))
    assert parsed(blocks)[-1][0] == "error"
    with (
        pytest.raises(anthropic.APIError, match="broke down"),
        READER.hand(blocks).anthropic.messages.stream(model="m", messages=HI, max_tokens=1) as stream,  # type: ignore[arg-type]
    ):
        stream.get_final_message()
