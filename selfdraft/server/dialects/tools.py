"""Tool definitions, tool choices and the arguments of past calls. Knows OpenAI's function tool, our common form."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from ...errors import InvalidRequest
from ..jobs import ToolChoice
from . import limits
from .limits import RequestTooLarge, check_depth

__all__ = ["arguments", "called", "chosen", "function_tool"]

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
    function = {"name": tool_name(name, f"{where}.name"), "arguments": arguments(given, f"{where}.arguments")}
    return {"id": call_id, "type": "function", "function": function}


def arguments(given: object, where: str) -> dict[str, Any]:
    """Arguments as an object, which is what templates iterate.

    Clients send back what a model wrote, or the conversation could never go on. So of a string that breaks off, what
    came is kept; and what is no object becomes an argument of the name "arguments".

    Raises:
        InvalidRequest: neither an object nor a string.
    """
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    if isinstance(given, dict):
        return given
    if not isinstance(given, str):
        param = where.split("[")[0]
        raise InvalidRequest(f"{where} must be a JSON object or a string of one, not {str(given)[:120]!r}", param=param)
    try:
        value = from_json(given, allow_partial=True, allow_inf_nan=False)
    except ValueError:
        value = given
    return value if isinstance(value, dict) else {"arguments": value}
