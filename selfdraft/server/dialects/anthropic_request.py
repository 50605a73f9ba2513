"""Requests of Anthropic's messages. Knows that format; `anthropic_messages` knows the answers."""

from __future__ import annotations

import re
from typing import Any, Literal

from ...errors import InvalidRequest
from ..jobs import ChatJob, OutputFormat, ToolChoice
from . import limits
from .anthropic_blocks import block_pieces, blocks_pieces, foreign_text
from .conversation import Content, Conversation, Piece, joined, only_text, text_of
from .limits import at_most
from .sampling import Positive, SamplingFields, json_schema, output_format, thinking
from .tools import called, chosen, function_tool, skip_tool
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

    One that loads later is not shown to the model before the client has found or added it.
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
        conversation.system(only_text(blocks_pieces(content, where), "\n\n"))
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
            case {"type": "tool_use" | "server_tool_use" | "mcp_tool_use"}:
                call_id = _string(block.get("id"), f"{here}.id")
                conversation.assistant(call=called(call_id, block.get("name"), block.get("input"), here))
            case {"type": str(kind), "tool_use_id": str(call_id)} if kind.endswith("_tool_result"):
                conversation.tool(call_id, foreign_text(block, here))
            case {"type": str(kind)} if kind not in ("text", "image"):
                conversation.assistant(text=foreign_text(block, here))
            case _:
                conversation.assistant(text=only_text(block_pieces(block, here), "\n"))


def _add_user(conversation: Conversation, blocks: list[dict[str, Any]], where: str) -> None:
    at_most(blocks, limits.MAX_PARTS, where, "blocks")
    pieces: list[Piece] = []

    def flush() -> None:
        if pieces:
            conversation.user(joined(pieces, "\n"))
            pieces.clear()

    for n, block in enumerate(blocks):
        here = f"{where}[{n}]"
        if block.get("type") == "tool_result":
            flush()
            call_id = _string(block.get("tool_use_id"), f"{here}.tool_use_id")
            conversation.tool(call_id, _tool_result(block, here))
        else:
            pieces.extend(block_pieces(block, here))
    flush()


def _tool_result(block: dict[str, Any], where: str) -> Content:
    content = block.get("content")
    if content is not None and not isinstance(content, str | list):
        raise InvalidRequest(f"{where}.content must be a string or a list of blocks", param="messages")
    pieces = blocks_pieces(content, f"{where}.content")
    if block.get("is_error") is True:
        # Templates know no failed results; without a word the model would take it for a success.
        first, *rest = pieces or [""]
        pieces = [f"Error: {first}", *rest] if isinstance(first, str) else ["Error: ", first, *rest]
    return joined(pieces, "\n")


def _string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{where} must be a string, not {str(value)[:120]!r}", param="messages")
    return value


def _tools(request: CountRequest) -> list[dict[str, Any]]:
    changed = _changed_tools(request.messages)
    tools = []
    for n, tool in enumerate(request.tools or ()):
        if tool.type not in (None, "custom"):
            skip_tool(f"tools[{n}]", tool.type)
        elif changed.get(tool.name or "", not tool.defer_loading):
            tools.append(function_tool(tool.name, tool.description, tool.input_schema, f"tools[{n}]"))
    return tools


def _changed_tools(messages: list[Message]) -> dict[str, bool]:
    """Of the tools that the conversation speaks of: whether they are offered at its end."""
    changed: dict[str, bool] = {}
    for block in (block for message in messages if isinstance(message.content, list) for block in message.content):
        match block:
            case {"type": "tool_addition" | "tool_removal" as kind, "tool": {"name": str(name)}}:
                changed[name] = kind == "tool_addition"
            case {"type": "tool_result", "content": list(parts)}:
                names = [part.get("tool_name") for part in parts if isinstance(part, dict)]
                changed |= {name: True for name in names if isinstance(name, str)}
    return changed


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
