"""Anthropic's messages. Knows how answers are written, streamed and whole; `anthropic_request` reads requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from ...errors import ContextOverflow
from ..jobs import Finished, JobEvent
from .answers import Close, More, Open, Part, PartCutter, Step, gather
from .anthropic_request import CountRequest, MessagesRequest, to_job
from .failures import Failure, describe
from .wire import Envelope, sse

__all__ = ["CountRequest", "MessageStream", "MessagesRequest", "collect", "count_body", "error_body", "to_job"]

# Thinking blocks carry a signature that their reader cannot check; clients send it back as it is, and so we ignore it.
_SIGNATURE = "selfdraft"

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def count_body(tokens: int) -> dict[str, Any]:
    """The response of count_tokens."""
    return {"input_tokens": tokens}


def error_body(exception: BaseException) -> tuple[int, dict[str, Any]]:
    """Status and body for an exception."""
    failure = describe(exception)
    return failure.status, _error(exception, failure)


class MessageStream:
    """An answer as events (see `wire.Encoder`).

    Args:
        envelope: what the response says about itself.
        prompt_tokens: length of the prompt, which the first event tells.
    """

    def __init__(self, envelope: Envelope, *, prompt_tokens: int = 0) -> None:
        self._envelope = envelope
        self._prompt_tokens = prompt_tokens
        self._cutter = PartCutter()

    def start(self) -> list[str]:
        """The message, still empty, and a first ping."""
        message = {
            **_head(self._envelope),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self._prompt_tokens),
        }
        return [_event({"type": "message_start", "message": message}), self.keepalive()]

    def event(self, event: JobEvent) -> list[str]:
        """Blocks begun, gone on with and ended; at the end the stop reason."""
        if isinstance(event, Finished):
            ends = [block for step in self._cutter.finish() for block in self._step(step)]
            reason, stop = _stop_reason(event, self._cutter.calls)
            delta = {
                "type": "message_delta",
                "delta": {"stop_reason": reason, "stop_sequence": stop},
                "usage": _usage(event.usage.prompt_tokens, event),
                "timings": asdict(event.timings),
            }
            return [*ends, _event(delta)]
        steps = [step for reply in event.events for step in self._cutter.push(reply)]
        return [block for step in steps for block in self._step(step)]

    def done(self) -> list[str]:
        """The end mark."""
        return [_event({"type": "message_stop"})]

    def error(self, exception: BaseException) -> list[str]:
        """An error event."""
        return [_event(_error(exception, describe(exception)))]

    def keepalive(self) -> str:
        """A ping."""
        return _event({"type": "ping"})

    def _step(self, step: Step) -> list[str]:
        index = step.part.number
        match step:
            case Open(part):
                block = _block(part, self._envelope, whole=False)
                return [_event({"type": "content_block_start", "index": index, "content_block": block})]
            case More(part, text):
                return [_delta(index, _piece(part, text))]
            case Close(part):
                signature = {"type": "signature_delta", "signature": _SIGNATURE}
                signed = [_delta(index, signature)] if part.kind == "reasoning" else []
                return [*signed, _event({"type": "content_block_stop", "index": index})]


def collect(events: Iterable[JobEvent], request: MessagesRequest, envelope: Envelope) -> dict[str, Any]:
    """The whole response, from all events of the one answer."""
    (answer,) = gather(events)
    end = answer.finished
    reason, stop = _stop_reason(end, len(answer.calls))
    return {
        **_head(envelope),
        "content": [_block(part, envelope, whole=True) for part in answer.parts],
        "stop_reason": reason,
        "stop_sequence": stop,
        "usage": _usage(end.usage.prompt_tokens, end),
        "timings": asdict(end.timings),
    }


def _block(part: Part, envelope: Envelope, *, whole: bool) -> dict[str, Any]:
    """A content block, empty when it begins."""
    text = part.text if whole else ""
    match part.kind:
        case "text":
            return {"type": "text", "text": text}
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": _SIGNATURE if whole else ""}
        case "call":
            return {
                "type": "tool_use",
                "id": envelope.call_id(0, part.call).replace("call_", "toolu_"),
                "name": part.name,
                "input": part.arguments if whole else {},
            }


def _piece(part: Part, text: str) -> dict[str, Any]:
    match part.kind:
        case "text":
            return {"type": "text_delta", "text": text}
        case "reasoning":
            return {"type": "thinking_delta", "thinking": text}
        case "call":
            return {"type": "input_json_delta", "partial_json": text}


def _stop_reason(end: Finished, calls: int) -> tuple[str, str | None]:
    if end.reason in ("length", "cancelled"):  # either way it breaks off, and a call may be incomplete
        return "max_tokens", None
    if calls:
        return "tool_use", None
    return ("end_turn", None) if end.stop is None else ("stop_sequence", end.stop)


def _usage(input_tokens: int, end: Finished | None = None) -> dict[str, Any]:
    """The tokens of the prompt, and of the answer once it is at its end; then it is also known what was cached."""
    cached = end.usage.cached_tokens if end else 0
    return {
        "input_tokens": input_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": end.usage.completion_tokens if end else 0,
        "output_tokens_details": {"thinking_tokens": end.reasoning_tokens if end else 0},
    }


def _head(envelope: Envelope) -> dict[str, Any]:
    return {"id": f"msg_{envelope.code}", "type": "message", "role": "assistant", "model": envelope.model}


def _error(exception: BaseException, failure: Failure) -> dict[str, Any]:
    message = failure.message
    if isinstance(exception, ContextOverflow):  # the words by which Claude Code knows that it has to compact
        message = f"prompt is too long: {message}"
    return {"type": "error", "error": {"type": _ERROR_TYPES.get(failure.status, "api_error"), "message": message}}


def _delta(index: int, delta: dict[str, Any]) -> str:
    return _event({"type": "content_block_delta", "index": index, "delta": delta})


def _event(body: dict[str, Any]) -> str:
    return sse(body, body["type"])
