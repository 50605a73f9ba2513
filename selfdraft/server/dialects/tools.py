"""Tool definitions, tool choices and past calls. Knows OpenAI's function tool, our common form."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InvalidRequest
from ...text.messages import call_arguments
from ..jobs import ToolChoice
from . import limits
from .limits import RequestTooLarge, check_depth

__all__ = ["called", "chosen", "function_tool", "skip_tool"]

log = logging.getLogger(__name__)

_NAME = re.compile(r"[\w.:/-]+")


def function_tool(name: object, description: object, parameters: object, where: str) -> dict[str, Any]:
    """A function tool in OpenAI's form.

    Raises:
        InvalidRequest: no name, or parameters that are no object. RequestTooLarge: name too long, schema too deep.
    """
    checked = tool_name(name, f"{where}.name")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f"{where}.description must be a string, not {description!r}", param="tools")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(f"{where} needs a schema that is a JSON object, not {parameters!r}", param="tools")
    check_depth(parameters, limits.MAX_SCHEMA_DEPTH, "tools")
    function: dict[str, Any] = {"name": checked}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def skip_tool(where: str, kind: object) -> None:
    """Say in the log that a declared tool is not shown to the model.

    Agents declare what their own provider would run, such as a web search, in every request, and go on without it; and
    Codex a custom tool, whose calls are no JSON, beside functions that do the same.
    """
    log.info("%s of type %s is left out: this server offers the model function tools only", where, str(kind)[:120])


def tool_name(name: object, where: str) -> str:
    """A name that a model can write as one word.

    Raises:
        InvalidRequest: it is none. RequestTooLarge: it is too long.
    """
    param = where.split("[")[0].split(".")[0]
    if isinstance(name, str) and len(name) > limits.MAX_NAME:
        raise RequestTooLarge(
            f"{where} has {len(name)} characters; at most {limits.MAX_NAME} are accepted", param=param
        )
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(f"{where} must be letters, digits and _ - . : /, not {name!r}", param=param)
    return name


def chosen(choice: ToolChoice, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    """The choice, if the tools allow it.

    Raises:
        InvalidRequest: a call is required and there is no tool, or none of that name.
    """
    names = [tool["function"]["name"] for tool in tools]
    if choice.mode == "required" and not names:
        raise InvalidRequest("tool_choice requires a call, and tools declares none", param="tool_choice")
    if choice.name is not None and choice.name not in names:
        raise InvalidRequest(f"tool_choice names {choice.name!r}, which tools does not declare", param="tool_choice")
    return choice


def called(call_id: str, name: object, given: object, where: str) -> dict[str, Any]:
    """A call of an earlier answer, in OpenAI's form, its arguments as an object.

    Raises:
        InvalidRequest: no name, or arguments that are neither an object nor a string.
    """
    function = {"name": tool_name(name, f"{where}.name"), "arguments": call_arguments(given, f"{where}.arguments")}
    return {"id": call_id, "type": "function", "function": function}
