"""OpenAI's Responses API. Knows how answers are written, streamed and whole; `responses_request` reads requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from ...results import TokenLogprob
from ..jobs import Finished, JobEvent
from .answers import Close, More, Open, Part, PartCutter, Step
from .failures import describe
from .openai_common import error_body, token_scores
from .responses_request import ResponsesRequest, declared, to_job
from .wire import COMMENT, Envelope, sse

__all__ = ["ResponseStream", "ResponsesRequest", "collect", "error_body", "to_job"]

Event = dict[str, Any]

# The codes a client may see in a response that failed; the API knows no others that fit.
_ERROR_CODES = ("rate_limit_exceeded", "context_length_exceeded")


class ResponseStream:
    """An answer as events (see `wire.Encoder`)."""

    def __init__(self, request: ResponsesRequest, envelope: Envelope) -> None:
        self._writer = _Writer(request, envelope)

    def start(self) -> list[str]:
        """The response, still empty."""
        return _blocks(self._writer.start())

    def event(self, event: JobEvent) -> list[str]:
        """Items begun, gone on with and ended; at the end the whole response."""
        return _blocks(self._writer.event(event))

    def done(self) -> list[str]:
        """Nothing: the last event says that it is the last."""
        return []

    def error(self, exception: BaseException) -> list[str]:
        """The response, failed."""
        return _blocks(self._writer.error(exception))

    def keepalive(self) -> str:
        """A comment."""
        return COMMENT


def collect(events: Iterable[JobEvent], request: ResponsesRequest, envelope: Envelope) -> dict[str, Any]:
    """The whole response, from all events of the one answer."""
    writer = _Writer(request, envelope)
    for event in events:
        writer.event(event)
    return writer.response


class _Writer:
    """Puts the response together, and says by events what it does.

    Attributes:
        response: the response as far as it has come.
    """

    def __init__(self, request: ResponsesRequest, envelope: Envelope) -> None:
        self._envelope = envelope
        self._scored = request.scored
        self._spaces = {tool["function"]["name"]: space for tool, space in declared(request) if space}
        self._cutter = PartCutter()
        self._scores: dict[int, list[TokenLogprob]] = {}  # by part
        self._unclaimed: list[TokenLogprob] = []
        self._sent = 0
        self.response = _empty(request, envelope)

    def start(self) -> list[Event]:
        """The first events."""
        return [self._lifecycle("response.created"), self._lifecycle("response.in_progress")]

    def event(self, event: JobEvent) -> list[Event]:
        """What an event changes."""
        if isinstance(event, Finished):
            whole = event.reason not in ("length", "cancelled")
            ends = [out for step in self._cutter.finish() for out in self._close(step.part, whole=whole)]
            return [*ends, self._finish(event, whole=whole)]
        steps = [step for reply in event.events for step in self._cutter.push(reply)]
        scores = [*self._unclaimed, *(event.logprobs or ())]
        events = []
        for step in steps:
            text = isinstance(step, More) and step.part.kind == "text"
            # Scores belong to the tokens behind all these steps; they are told once, with text if there is some.
            events += self._step(step, scores if text else [])
            scores = [] if text else scores
        self._unclaimed = [] if steps else scores  # without a step the text is held back: the next one claims them
        return events

    def error(self, exception: BaseException) -> list[Event]:
        """The last event, after a failure."""
        failure = describe(exception)
        code = failure.code if failure.code in _ERROR_CODES else "server_error"
        self.response |= {"status": "failed", "error": {"code": code, "message": failure.message}}
        return [self._lifecycle("response.failed")]

    def _finish(self, end: Finished, *, whole: bool) -> Event:
        prompt, completion = end.usage.prompt_tokens, end.usage.completion_tokens
        self.response |= {
            "status": "completed" if whole else "incomplete",
            "incomplete_details": {"reason": "max_output_tokens"} if end.reason == "length" else None,
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": end.usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": completion,
                "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
                "total_tokens": prompt + completion,
            },
            "timings": asdict(end.timings),
        }
        return self._lifecycle("response.completed" if whole else "response.incomplete")

    def _step(self, step: Step, scores: list[TokenLogprob]) -> list[Event]:
        match step:
            case Open(part):
                return self._open(part)
            case More(part, text):
                return [self._more(part, text, scores)]
            case Close(part):
                return self._close(part)

    def _open(self, part: Part) -> list[Event]:
        item = self._item(part, whole=False)
        added = self._event("response.output_item.added", output_index=part.number, item=item)
        if part.kind == "call":
            return [added]
        return [added, self._of(part, "response.content_part.added", part=self._content(part, whole=False))]

    def _more(self, part: Part, text: str, scores: list[TokenLogprob]) -> Event:
        match part.kind:
            case "call":
                return self._of(part, "response.function_call_arguments.delta", delta=text)
            case "reasoning":
                return self._of(part, "response.reasoning_text.delta", delta=text)
            case "text":
                self._scores.setdefault(part.number, []).extend(scores)
                return self._of(part, "response.output_text.delta", delta=text, logprobs=token_scores(scores))

    def _close(self, part: Part, *, whole: bool = True) -> list[Event]:
        item = self._item(part, whole=True)
        if not (whole and part.complete):
            item["status"] = "incomplete"
        self.response["output"].append(item)
        events = []
        if part.kind == "call":
            fields = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._of(part, "response.function_call_arguments.done", **fields))
        else:
            content = item["content"][0]
            if part.kind == "text":
                fields = {"text": part.text, "logprobs": content["logprobs"]}
                events.append(self._of(part, "response.output_text.done", **fields))
            else:
                events.append(self._of(part, "response.reasoning_text.done", text=part.text))
            events.append(self._of(part, "response.content_part.done", part=content))
        return [*events, self._event("response.output_item.done", output_index=part.number, item=item)]

    def _item(self, part: Part, *, whole: bool) -> dict[str, Any]:
        """An item of `output`, empty when it begins."""
        common = {"id": self._item_id(part), "status": "completed" if whole else "in_progress"}
        content = [self._content(part, whole=True)] if whole and part.kind != "call" else []
        match part.kind:
            case "text":
                return {**common, "type": "message", "role": "assistant", "content": content}
            case "reasoning":
                return {**common, "type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
            case "call":
                space, name = self._spaces.get(part.name, (None, part.name))
                return {
                    **common,
                    "type": "function_call",
                    "call_id": self._envelope.call_id(0, part.call),
                    "name": name,
                    "arguments": part.text if whole else "",
                    **({"namespace": space} if space else {}),
                }

    def _content(self, part: Part, *, whole: bool) -> dict[str, Any]:
        text = part.text if whole else ""
        if part.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        scores = token_scores(self._scores.get(part.number, ())) if whole else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}

    def _item_id(self, part: Part) -> str:
        prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[part.kind]
        return f"{prefix}_{self._envelope.code}{part.number:02x}"

    def _lifecycle(self, kind: str) -> Event:
        # A copy: the response goes on changing, and the event is written out later.
        return self._event(kind, response={**self.response, "output": list(self.response["output"])})

    def _of(self, about: Part, kind: str, **fields: Any) -> Event:
        """An event about a part."""
        place: dict[str, Any] = {"item_id": self._item_id(about), "output_index": about.number}
        if about.kind != "call":
            place["content_index"] = 0
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._sent, **fields}
        self._sent += 1
        return event


def _empty(request: ResponsesRequest, envelope: Envelope) -> dict[str, Any]:
    """The response before anything was written, with what it repeats of the request."""
    tools = [
        {
            "type": "function",
            "name": tool["function"]["name"],
            "description": tool["function"].get("description"),
            "parameters": tool["function"]["parameters"],
            "strict": False,
        }
        for tool, _ in declared(request)
    ]
    return {
        "id": f"resp_{envelope.code}",
        "object": "response",
        "created_at": envelope.created,
        "model": envelope.model,
        "status": "in_progress",
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel,
        "previous_response_id": None,
        "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
        "store": False,
        "temperature": request.temperature,
        "text": {"format": (request.text and request.text.format) or {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": tools,
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _blocks(events: list[Event]) -> list[str]:
    return [sse(event, event["type"]) for event in events]
