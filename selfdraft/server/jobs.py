"""What every dialect translates into: one chat request, and the events of its answers. Knows no wire format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..params import SamplingParams
from ..prompts import LOCAL
from ..results import Timings, TokenLogprob, Usage
from ..text.reply.events import ReplyEvent

__all__ = ["ChatJob", "Choice", "Finished", "ImageSource", "JobEvent", "OutputFormat", "ToolChoice"]


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model may, must, or must not call a tool; `name` singles one out (then mode is "required")."""

    mode: Literal["none", "auto", "required"] = "auto"
    name: str | None = None


@dataclass(frozen=True)
class OutputFormat:
    """What the visible answer must be: any JSON object, JSON of a schema, or a sentence of a grammar.

    Attributes:
        kind: "json_object"; "json_schema" (`schema` is a JSON schema); "grammar" (`grammar` is Lark as llguidance
            reads it); "regex" (`grammar` is a regular expression).
    """

    kind: Literal["json_object", "json_schema", "grammar", "regex"]
    schema: Mapping[str, Any] | None = None
    grammar: str | None = None


@dataclass(frozen=True)
class ImageSource:
    """An image of a request, before it is read (see `pictures`).

    Attributes:
        url: a `data:` URL that holds it, or where it is to be fetched.
        where: the path of its field, for messages.
    """

    url: str = field(repr=False)
    where: str


@dataclass(frozen=True, kw_only=True)
class ChatJob:
    """A chat request in OpenAI's shapes, checked, with our own parameters.

    Attributes:
        messages: dicts of role system, user, assistant or tool; assistant ones may carry `reasoning_content` and
            `tool_calls` ({"id", "type": "function", "function": {"name", "arguments"}}), tool ones `tool_call_id`.
            Content is a string or, where it holds images, a list of {"type": "text", "text"} and {"type": "image",
            "image"}: an `ImageSource` first, a `Picture` once it is read.
        params: sampling, resolved later against the checkpoint's defaults.
        tools: function tools, {"type": "function", "function": {"name", "description", "parameters"}}.
        parallel_tool_calls: whether an answer may hold several calls.
        output: constraint on the visible answer.
        n: answers wanted.
        enable_thinking: None leaves it to the template's own default.
        template_variables: further template variables (reasoning_effort, ...).
        continue_final: the last message is an assistant's, and the answer goes on where it ends.
        timed: a Choice is to carry the figures so far.
        scope: whose it is; see `Prompted`.
    """

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams = field(default_factory=SamplingParams)
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    output: OutputFormat | None = None
    n: int = 1
    enable_thinking: bool | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    continue_final: bool = False
    timed: bool = False
    scope: str = LOCAL


@dataclass(frozen=True)
class Choice:
    """New content of answer `index`.

    Attributes:
        logprobs: scores of the tokens behind the events, if the request asks for them.
        timings: the figures so far, if the request asks for them with every piece.
    """

    index: int
    events: Sequence[ReplyEvent]
    logprobs: Sequence[TokenLogprob] | None = None
    timings: Timings | None = None


@dataclass(frozen=True)
class Finished:
    """Answer `index` is over.

    Attributes:
        reason: "stop", "length", "tool_calls" or "cancelled".
        stop: the stop string that ended it, if one did.
        usage: tokens of prompt and of this answer.
        reasoning_tokens: how many of the answer's tokens were reasoning.
    """

    index: int
    reason: Literal["stop", "length", "tool_calls", "cancelled"]
    stop: str | None
    usage: Usage
    reasoning_tokens: int
    timings: Timings


JobEvent = Choice | Finished
