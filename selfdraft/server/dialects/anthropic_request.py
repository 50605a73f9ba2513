"""Requests of Anthropic's messages. Knows that format; `anthropic_messages` knows the answers."""

from __future__ import annotations

import re
from typing import Any, Literal

from ...errors import InvalidRequest
from ..jobs import ChatJob, OutputFormat, ToolChoice
from . import limits
from .conversation import Conversation, part_text, text_of
from .limits import at_most
from .sampling import Positive, SamplingFields, json_schema, output_format, thinking
from .tools import called, chosen, function_tool
from .wire import WireModel

__all__ = ["CountRequest", "MessagesRequest", "to_job"]

# Claude Code's first system line differs from request to request, and a prefix that differs is never warm.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")


class Message(WireModel):
    """A message of a request."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class Tool(WireModel):
    """A tool that a request declares; one with a type of its own runs at Anthropic, and is skipped.

    One that loads later is not shown to the model before the client's tool search has found it.
    """

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: bool | None = None


class Choice(WireModel):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(WireModel):
    """`thinking`. "between_tools" is disabled, but for notes between calls, which no template tells apart."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Positive | None = None


class OutputConfig(WireModel):
    """`output_config`."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class CountRequest(SamplingFields):
    """The body of POST /v1/messages/count_tokens."""

    model: str
    messages: list[Message]
    system: str | list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None

    @property
    def parallel(self) -> bool:
        """Whether an answer may hold several calls."""
        return not (self.tool_choice and self.tool_choice.disable_parallel_tool_use)


class MessagesRequest(CountRequest):
    """The body of POST /v1/messages."""

    max_tokens: Positive
    stop_sequences: list[str] | None = None
    stream: bool | None = None


def to_job(request: CountRequest) -> ChatJob:
    """What the request asks for, or what it asks to count.

    Without `thinking` there is none, as in the original. A final message of the assistant is continued.

    Raises:
        InvalidRequest: something that cannot be done. RequestTooLarge: too much of something.
    """
    at_most(request.messages, limits.MAX_MESSAGES, "messages", "messages")
    at_most(request.tools, limits.MAX_TOOLS, "tools", "tools")
    at_most(request.metadata, limits.MAX_METADATA, "metadata", "entries")
    conversation = Conversation()
    conversation.system(_BILLING.sub("", text_of(request.system, "system", separator="\n\n")))
    for n, message in enumerate(request.messages):
        _add_message(conversation, message, f"messages[{n}].content")
    if not conversation.messages:
        raise InvalidRequest("messages is empty; send at least one message", param="messages")
    tools = _tools(request)
    max_tokens = None
    if isinstance(request, MessagesRequest):
        max_tokens = request.max_tokens
        at_most(request.stop_sequences, limits.MAX_STOPS, "stop_sequences", "strings")
        if request.stop_sequences:
            request = request.model_copy(update={"stop": request.stop_sequences})
    config = request.output_config
    enabled, variables = thinking(request, config.effort if config else None)
    if request.enable_thinking is None and "enable_thinking" not in (request.chat_template_kwargs or {}):
        enabled = request.thinking is not None and request.thinking.type in ("enabled", "adaptive")
    if request.thinking and request.thinking.budget_tokens:
        variables["thinking_budget"] = request.thinking.budget_tokens
    return ChatJob(
        messages=conversation.finish(),
        params=request.sampling(max_tokens=max_tokens),
        tools=tools,
        tool_choice=chosen(_tool_choice(request.tool_choice), tools),
        parallel_tool_calls=request.parallel,
        output=_output(request),
        enable_thinking=enabled,
        template_variables=variables,
        continue_final=conversation.open_ended,
    )


def _add_message(conversation: Conversation, message: Message, where: str) -> None:
    content = message.content
    if message.role == "system":
        conversation.system(text_of(content, where, separator="\n\n"))
    elif message.role == "assistant":
        conversation.assistant()  # an empty one is a turn, too
        _add_assistant(
            conversation, [{"type": "text", "text": content}] if isinstance(content, str) else content, where
        )
    elif isinstance(content, str):
        conversation.user(content)
    else:
        _add_user(conversation, content, where)


def _add_assistant(conversation: Conversation, blocks: list[dict[str, Any]], where: str) -> None:
    at_most(blocks, limits.MAX_PARTS, where, "blocks")
    for n, block in enumerate(blocks):
        here = f"{where}[{n}]"
        match block:
            case {"type": "thinking", "thinking": str(text)}:
                conversation.assistant(reasoning=text)
            case {"type": "redacted_thinking"}:
                pass  # only who wrote it can read it
            case {"type": "tool_use"}:
                call_id = _string(block.get("id"), f"{here}.id")
                conversation.assistant(call=called(call_id, block.get("name"), block.get("input"), here))
            case _:
                conversation.assistant(text=part_text(block, here))


def _add_user(conversation: Conversation, blocks: list[dict[str, Any]], where: str) -> None:
    at_most(blocks, limits.MAX_PARTS, where, "blocks")
    texts: list[str] = []

    def flush() -> None:
        if texts:
            conversation.user("\n".join(texts))
            texts.clear()

    for n, block in enumerate(blocks):
        here = f"{where}[{n}]"
        if block.get("type") == "tool_result":
            flush()
            call_id = _string(block.get("tool_use_id"), f"{here}.tool_use_id")
            conversation.tool(call_id, _tool_result(block, here))
        else:
            texts.append(_user_block(block, here))
    flush()


def _tool_result(block: dict[str, Any], where: str) -> str:
    content = block.get("content")
    if content is not None and not isinstance(content, str | list):
        raise InvalidRequest(f"{where}.content must be a string or a list of blocks", param="messages")
    if isinstance(content, list):
        content = [_found_tool(part) for part in content]
    text = text_of(content, f"{where}.content", separator="\n")
    # Templates know no failed results; without a word the model would take it for a success.
    return f"Error: {text}" if block.get("is_error") is True else text


def _found_tool(part: object) -> object:
    """A reference to a tool in words; the definition itself is among the tools."""
    match part:
        case {"type": "tool_reference", "tool_name": str(name)}:
            return f"{name} can be called now."
        case _:
            return part


def _user_block(block: dict[str, Any], where: str) -> str:
    match block:
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            return text
        case _:
            return part_text(block, where)


def _string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{where} must be a string, not {str(value)[:120]!r}", param="messages")
    return value


def _tools(request: CountRequest) -> list[dict[str, Any]]:
    found = _found_tools(request.messages)
    return [
        function_tool(tool.name, tool.description, tool.input_schema, f"tools[{n}]")
        for n, tool in enumerate(request.tools or ())
        if tool.type in (None, "custom") and not (tool.defer_loading and tool.name not in found)
    ]


def _found_tools(messages: list[Message]) -> set[str]:
    """Names that results of a tool search refer to."""
    blocks = [block for message in messages if isinstance(message.content, list) for block in message.content]
    results = [block.get("content") for block in blocks if block.get("type") == "tool_result"]
    parts = [part for result in results if isinstance(result, list) for part in result if isinstance(part, dict)]
    return {str(part.get("tool_name")) for part in parts if part.get("type") == "tool_reference"}


def _tool_choice(choice: Choice | None) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequest("tool_choice of type tool needs a name", param="tool_choice")
        return ToolChoice("required", choice.name)
    return ToolChoice("required" if choice.type == "any" else choice.type)


def _output(request: CountRequest) -> OutputFormat | None:
    if request.response_format is not None:  # our extension: JSON, grammars and expressions as in the other dialects
        return output_format(request.response_format, "response_format")
    format = (request.output_config and request.output_config.format) or request.output_format
    if format is None:
        return None
    if format.get("type") != "json_schema":
        raise InvalidRequest(
            f"output_config.format.type must be json_schema, not {format.get('type')!r}", param="output_config"
        )
    return json_schema(format.get("schema"), "output_config")
