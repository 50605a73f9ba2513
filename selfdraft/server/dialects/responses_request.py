"""Requests of OpenAI's Responses API. Knows that format, stateless; `openai_responses` knows the answers."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from ...errors import InvalidRequest
from ...params import MAX_LOGPROBS
from ..jobs import ChatJob
from . import limits
from .conversation import Content, Conversation, content_of, text_of
from .limits import at_most
from .openai_common import allowed_tools, tool_choice
from .sampling import Positive, SamplingFields, output_format, thinking
from .tools import called, chosen, function_tool, skip_tool
from .wire import WireModel

__all__ = ["ResponsesRequest", "declared", "to_job"]

_TOOLS = ("function", "namespace")
_LOGPROBS = "message.output_text.logprobs"


class Reasoning(WireModel):
    """`reasoning`."""

    effort: str | None = None
    summary: str | None = None


class Text(WireModel):
    """`text`."""

    format: dict[str, Any] | None = None


class ResponsesRequest(SamplingFields):
    """The body of POST /v1/responses."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: Text | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    prompt: dict[str, Any] | None = None

    @property
    def parallel(self) -> bool:
        """Whether an answer may hold several calls."""
        return self.parallel_tool_calls is not False

    @property
    def scored(self) -> bool:
        """Whether scores of tokens are wanted."""
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())


def to_job(request: ResponsesRequest) -> ChatJob:
    """What the request asks for.

    Messages of role developer and system join the instructions. Tools of other types than function and namespace are
    skipped (`tools.skip_tool`); so are items of the conversation that only tools at OpenAI make.

    Raises:
        InvalidRequest: something that cannot be done. RequestTooLarge: too much of something.
    """
    _refuse_state(request)
    at_most(request.metadata, limits.MAX_METADATA, "metadata", "entries")
    tools = [tool for tool, _ in declared(request)]
    for n, tool in enumerate(request.tools or ()):
        if tool.get("type") not in _TOOLS:
            skip_tool(f"tools[{n}]", tool.get("type"))
    at_most(tools, limits.MAX_TOOLS, "tools", "tools")
    tools = allowed_tools(request.tool_choice, tools)
    conversation = Conversation()
    conversation.system(request.instructions or "")
    if isinstance(request.input, str):
        conversation.user(request.input)
    else:
        at_most(request.input, limits.MAX_MESSAGES, "input", "items")
        for n, item in enumerate(request.input):
            _add_item(conversation, item, f"input[{n}]")
    enabled, variables = thinking(request, request.reasoning.effort if request.reasoning else None)
    return ChatJob(
        messages=conversation.finish(),
        params=request.sampling(
            max_tokens=request.max_output_tokens,
            logprobs=(request.top_logprobs or 0) if request.scored else None,
        ),
        tools=tools,
        tool_choice=chosen(tool_choice(request.tool_choice), tools),
        parallel_tool_calls=request.parallel,
        output=output_format(request.text.format if request.text else None, "text.format"),
        enable_thinking=enabled,
        template_variables=variables,
        continue_final=conversation.open_ended,
    )


def _refuse_state(request: ResponsesRequest) -> None:
    for name in ("previous_response_id", "conversation", "background", "prompt"):
        value = getattr(request, name)
        if value not in (None, False):
            raise InvalidRequest(
                f"{name} is not supported: this server keeps nothing between requests; send the whole input",
                param=name,
            )


def declared(request: ResponsesRequest) -> list[tuple[dict[str, Any], tuple[str, str] | None]]:
    """The function tools, each with its (namespace, name) if it stands in a namespace.

    Such a tool is known to the model by both names in one word.

    Raises:
        InvalidRequest, RequestTooLarge: a malformed one.
    """
    found: list[tuple[dict[str, Any], tuple[str, str] | None]] = []
    for n, tool in enumerate(request.tools or ()):
        where = f"tools[{n}]"
        if tool.get("type") == "function":
            found.append((_function(tool, tool.get("name"), where), None))
        elif tool.get("type") == "namespace":
            space, inner = tool.get("name"), tool.get("tools")
            if not isinstance(space, str) or not isinstance(inner, list):
                raise InvalidRequest(f"{where} must have a name and a list of tools", param="tools")
            for m, entry in enumerate(inner):
                if isinstance(entry, dict) and entry.get("type") == "function":
                    name = str(entry.get("name"))
                    found.append((_function(entry, joined(space, name), f"{where}.tools[{m}]"), (space, name)))
    return found


def _function(tool: dict[str, Any], name: object, where: str) -> dict[str, Any]:
    return function_tool(name, tool.get("description"), tool.get("parameters"), where)


def joined(namespace: str, name: str) -> str:
    """The one word for a tool in a namespace."""
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def _add_item(conversation: Conversation, item: dict[str, Any], where: str) -> None:
    match item.get("type") or "message":
        case "message":
            _add_message(conversation, item, where)
        case "reasoning":
            if text := _reasoning(item, where):
                conversation.assistant(reasoning=text)
        case "function_call":
            space = item.get("namespace")
            name = joined(space, str(item.get("name"))) if isinstance(space, str) else item.get("name")
            conversation.assistant(call=called(_call_id(item, where), name, item.get("arguments"), where))
        case "custom_tool_call":
            given = {"input": item.get("input")}
            conversation.assistant(call=called(_call_id(item, where), item.get("name"), given, where))
        case "function_call_output" | "custom_tool_call_output":
            conversation.tool(_call_id(item, where), _content(item.get("output"), f"{where}.output"))
        case "item_reference":
            raise InvalidRequest(
                f"{where} refers to a stored item, and this server stores none: send the item itself", param="input"
            )
        case _:
            pass


def _add_message(conversation: Conversation, item: dict[str, Any], where: str) -> None:
    content = item.get("content")
    match item.get("role"):
        case "system" | "developer":
            conversation.system(_text(content, f"{where}.content", "\n"))
        case "user":
            conversation.user(_content(content, f"{where}.content"))
        case "assistant":
            conversation.assistant(text=_text(content, f"{where}.content", ""))
        case other:
            raise InvalidRequest(
                f"{where}.role must be user, assistant, system or developer, not {other!r}", param="input"
            )


def _content(content: object, where: str) -> Content:
    return content_of(_checked(content, where), where, separator="\n")


def _text(content: object, where: str, separator: str) -> str:
    return text_of(_checked(content, where), where, separator=separator)


def _checked(content: object, where: str) -> str | list[Any] | None:
    if content is not None and not isinstance(content, str | list):
        raise InvalidRequest(f"{where} must be a string or a list, not {str(content)[:120]!r}", param="input")
    return content


def _reasoning(item: dict[str, Any], where: str) -> str:
    """The text itself if it is there, else its summary; what is encrypted is somebody else's."""
    for name in ("content", "summary"):
        entries = item.get(name)
        if isinstance(entries, list) and entries:
            return "".join(_reasoned(entry, f"{where}.{name}") for entry in entries)
    return ""


def _reasoned(entry: object, where: str) -> str:
    if isinstance(entry, dict) and isinstance(text := entry.get("text"), str):
        return text
    raise InvalidRequest(f"{where} must hold objects with a text, not {str(entry)[:120]!r}", param="input")


def _call_id(item: dict[str, Any], where: str) -> str:
    call_id = item.get("call_id")
    if not isinstance(call_id, str):
        raise InvalidRequest(f"{where}.call_id must be a string, not {str(call_id)[:120]!r}", param="input")
    return call_id
