"""OpenAI's chat completions. Knows that format, both ways; nothing of how an answer is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import Field

from ...errors import InvalidRequest
from ...params import MAX_LOGPROBS
from ...text.reply.events import Content, Reasoning, ReplyEvent, ToolArguments, ToolStart
from ..jobs import ChatJob, Finished, JobEvent, ToolChoice
from . import limits
from .answers import Answer, Part, gather
from .conversation import content_of, is_open, results_in_order, text_of
from .failures import describe
from .limits import at_most
from .openai_common import (
    StreamOptions,
    allowed_tools,
    error_body,
    error_object,
    token_scores,
    tool_choice,
    usage,
)
from .sampling import Positive, SamplingFields, output_format, thinking
from .tools import called, chosen, function_tool, skip_tool
from .wire import COMMENT, Envelope, WireModel, sse

__all__ = ["ChatPrompt", "ChatRequest", "ChatStream", "collect", "error_body", "to_job"]


class CalledFunction(WireModel):
    """The function of a past call."""

    name: str
    arguments: str | dict[str, Any] | None = None


class CalledCustom(WireModel):
    """The custom tool of a past call, whose one argument is a text."""

    name: str
    input: str | None = None


class PastCall(WireModel):
    """A call of an earlier answer."""

    id: str | None = None
    function: CalledFunction | None = None
    custom: CalledCustom | None = None


class Message(WireModel):
    """A message of a request. Role function and `function_call` are the old forms of role tool and `tool_calls`."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[PastCall] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None
    name: str | None = None


class ToolFunction(WireModel):
    """A function that a request declares."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class NamedFunction(WireModel):
    """The one function that must be called."""

    name: str


class Tool(WireModel):
    """A tool that a request declares."""

    type: str = "function"
    function: ToolFunction | None = None


class ChatPrompt(SamplingFields):
    """What becomes the prompt and the answers of a chat, whichever path it is sent to.

    `functions` and `function_call` are the old forms of `tools` and `tool_choice`; they allow one call, which is
    answered in the old form, too.
    """

    messages: list[Message] = Field(default_factory=list)
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    n: Annotated[int, Field(ge=1, le=limits.MAX_N)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[ToolFunction] | None = None
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    timings_per_token: bool | None = None
    metadata: dict[str, Any] | None = None

    @property
    def parallel(self) -> bool:
        """Whether an answer may hold several calls."""
        return self.parallel_tool_calls is not False and not self.old_calls

    @property
    def old_calls(self) -> bool:
        """Whether calls are asked for in the old form."""
        return self.functions is not None


class ChatRequest(ChatPrompt):
    """The body of POST /v1/chat/completions."""

    model: str
    messages: list[Message]


def to_job(request: ChatPrompt) -> ChatJob:
    """What the request asks for.

    A final message of the assistant is continued. Of `max_completion_tokens` and `max_tokens` the former counts.

    Raises:
        InvalidRequest: something that cannot be done. RequestTooLarge: too much of something.
    """
    at_most(request.messages, limits.MAX_MESSAGES, "messages", "messages")
    at_most(request.metadata, limits.MAX_METADATA, "metadata", "entries")
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    if not request.messages:
        raise InvalidRequest("messages is empty; send at least one message", param="messages")
    messages = [_message(entry, f"messages[{n}]") for n, entry in enumerate(request.messages)]
    messages = results_in_order(messages)
    tools = allowed_tools(request.tool_choice, _tools(request))
    enabled, variables = thinking(request, request.reasoning_effort)
    return ChatJob(
        messages=messages,
        params=request.sampling(
            max_tokens=request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        ),
        tools=tools,
        tool_choice=chosen(_tool_choice(request), tools),
        parallel_tool_calls=request.parallel,
        output=output_format(request.response_format, "response_format"),
        n=request.n or 1,
        enable_thinking=enabled,
        template_variables=variables,
        continue_final=is_open(messages[-1]),
        timed=bool(request.stream and request.timings_per_token),
    )


def _tools(request: ChatPrompt) -> list[dict[str, Any]]:
    if request.functions is not None and request.tools:
        raise InvalidRequest("functions is the old name of tools: send one of them", param="functions")
    old, name = request.old_calls, "functions" if request.old_calls else "tools"
    at_most(request.functions if old else request.tools, limits.MAX_TOOLS, name, name)
    declared = [(function, f"functions[{n}]") for n, function in enumerate(request.functions or ())]
    for n, tool in enumerate(request.tools or ()):
        where = f"tools[{n}]"
        if tool.type == "custom":
            skip_tool(where, tool.type)
        elif tool.type != "function" or tool.function is None:
            what = "has no function" if tool.type == "function" else f"is of type {tool.type[:120]!r}"
            raise InvalidRequest(
                f"{where} {what}, and tools of a chat are functions: declare it as one, or leave it out", param="tools"
            )
        else:
            declared.append((tool.function, f"{where}.function"))
    return [function_tool(tool.name, tool.description, tool.parameters, where) for tool, where in declared]


def _tool_choice(request: ChatPrompt) -> ToolChoice:
    """The choice in the new form, else in the old one."""
    if isinstance(request.function_call, NamedFunction):
        return ToolChoice("required", request.function_call.name)
    return tool_choice(request.tool_choice or request.function_call)


def _message(message: Message, where: str) -> dict[str, Any]:
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    read = content_of if role in ("user", "tool") else text_of
    wire: dict[str, Any] = {"role": role, "content": read(message.content, f"{where}.content")}
    if role == "tool":  # in the old form, calls and their results have no id but the function's name
        wire["tool_call_id"] = (message.name if message.role == "function" else message.tool_call_id) or ""
    if role != "assistant":
        return wire
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        wire["reasoning_content"] = reasoning
    if message.tool_calls:
        at_most(message.tool_calls, limits.MAX_TOOL_CALLS, f"{where}.tool_calls", "calls")
        wire["tool_calls"] = [_past(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(message.tool_calls)]
    elif old := message.function_call:
        wire["tool_calls"] = [called(old.name, old.name, old.arguments, f"{where}.function_call")]
    return wire


def _past(call: PastCall, where: str) -> dict[str, Any]:
    if call.function is not None:
        return called(call.id or "", call.function.name, call.function.arguments, f"{where}.function")
    if call.custom is not None:
        return called(call.id or "", call.custom.name, {"input": call.custom.input}, f"{where}.custom")
    raise InvalidRequest(f"{where} must have a function or a custom tool", param="messages")


class ChatStream:
    """An answer as chunks (see `wire.Encoder`)."""

    def __init__(self, request: ChatRequest, envelope: Envelope) -> None:
        self._envelope = envelope
        self._n = request.n or 1
        self._old_calls = request.old_calls
        self._calls = [0] * self._n
        self._finished: dict[int, Finished] = {}
        options = request.stream_options
        self._with_usage = bool(options and options.include_usage)

    def start(self) -> list[str]:
        """The role of every answer."""
        return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self._n)]

    def event(self, event: JobEvent) -> list[str]:
        """Deltas, or the finish reason."""
        if isinstance(event, Finished):
            return [self._end(event)]
        deltas = [delta for reply in event.events if (delta := self._delta(event.index, reply))]
        if not deltas and event.logprobs:  # their text is still held back
            deltas = [{"content": ""}]
        chunks = []
        figures = None if event.timings is None else asdict(event.timings)
        for n, delta in enumerate(deltas):
            # Scores belong to the tokens behind all these events; they are told once.
            logprobs = {"content": token_scores(event.logprobs), "refusal": None} if event.logprobs and n == 0 else None
            chunks.append(self._chunk(event.index, delta, logprobs=logprobs, timings=figures))
        return chunks

    def done(self) -> list[str]:
        """Usage, if it was asked for, and the end mark."""
        blocks = []
        if self._with_usage:
            ends = list(self._finished.values())
            extra = {"timings": asdict(ends[0].timings)} if len(ends) == 1 else {}
            blocks.append(sse(self._body([], usage=_usage(ends), **extra)))
        return [*blocks, sse("[DONE]")]

    def error(self, exception: BaseException) -> list[str]:
        """An error object in place of a chunk, and the end mark."""
        return [sse({"error": error_object(describe(exception))}), sse("[DONE]")]

    def keepalive(self) -> str:
        """A comment."""
        return COMMENT

    def _delta(self, choice: int, reply: ReplyEvent) -> dict[str, Any] | None:
        match reply:
            case Reasoning(text):
                return {"reasoning_content": text} if text else None
            case Content(text):
                return {"content": text} if text else None
            case ToolStart(index, name):
                self._calls[choice] += 1
                if self._old_calls:
                    return {"function_call": {"name": name, "arguments": ""}}
                return {"tool_calls": [{"index": index, **_call(self._envelope, choice, index, name, "")}]}
            case ToolArguments(index, piece):
                if self._old_calls:
                    return {"function_call": {"arguments": piece}}
                return {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
        return None

    def _end(self, end: Finished) -> str:
        self._finished[end.index] = end
        reason = _finish_reason(end, self._calls[end.index], old=self._old_calls)
        return self._chunk(end.index, {}, reason, timings=asdict(end.timings))

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        reason: str | None = None,
        *,
        logprobs: dict[str, Any] | None = None,
        timings: dict[str, Any] | None = None,
    ) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        extra: dict[str, Any] = {"usage": None} if self._with_usage else {}
        if timings is not None:
            extra["timings"] = timings
        return sse(self._body([choice], **extra))

    def _body(self, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        return {**_head(self._envelope, "chat.completion.chunk"), "choices": choices, **extra}


def collect(events: Iterable[JobEvent], request: ChatRequest, envelope: Envelope) -> dict[str, Any]:
    """The whole response, from all events.

    Returns:
        The body; `timings` stands beside `choices` if there is one answer, else in each of them.
    """
    answers = gather(events)
    body = {
        **_head(envelope, "chat.completion"),
        "choices": [_choice(answer, request, envelope) for answer in answers],
        "usage": _usage([answer.finished for answer in answers]),
    }
    if len(answers) == 1:
        body["timings"] = asdict(answers[0].finished.timings)
    else:
        for choice, answer in zip(body["choices"], answers, strict=True):
            choice["timings"] = asdict(answer.finished.timings)
    return body


def _choice(answer: Answer, request: ChatRequest, envelope: Envelope) -> dict[str, Any]:
    index = answer.finished.index
    calls: Sequence[Part] = answer.calls
    message: dict[str, Any] = {"role": "assistant", "content": answer.text("text") or (None if calls else "")}
    message["refusal"] = None
    if reasoning := answer.text("reasoning"):
        message["reasoning_content"] = reasoning
    if calls and request.old_calls:
        message["function_call"] = {"name": calls[0].name, "arguments": calls[0].text}
    elif calls:
        message["tool_calls"] = [_call(envelope, index, call.call, call.name, call.text) for call in calls]
    return {
        "index": index,
        "message": message,
        "logprobs": {"content": token_scores(answer.logprobs), "refusal": None} if request.logprobs else None,
        "finish_reason": _finish_reason(answer.finished, len(calls), old=request.old_calls),
    }


def _call(envelope: Envelope, choice: int, index: int, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": envelope.call_id(choice, index), "type": "function", "function": function}


def _finish_reason(end: Finished, calls: int, *, old: bool) -> str:
    if end.reason in ("length", "cancelled"):  # either way it breaks off, and a call may be incomplete
        return "length"
    if not calls:
        return "stop"
    return "function_call" if old else "tool_calls"


def _usage(ends: Sequence[Finished]) -> dict[str, Any]:
    return usage(ends, [end.usage.prompt_tokens for end in ends[:1]])


def _head(envelope: Envelope, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{envelope.code}",
        "object": kind,
        "created": envelope.created,
        "model": envelope.model,
    }
