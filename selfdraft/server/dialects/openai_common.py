"""What OpenAI's three dialects share: error bodies, usage, scores of tokens. Knows none of their messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...errors import InvalidRequest
from ...results import TokenLogprob
from ..jobs import Finished, ToolChoice
from .failures import Failure, describe
from .wire import WireModel

__all__ = [
    "StreamOptions",
    "allowed_tools",
    "error_body",
    "error_object",
    "finite",
    "token_scores",
    "tool_choice",
    "usage",
]

_LEAST_LOGPROB = -9999.0  # JSON has no infinity


class StreamOptions(WireModel):
    """`stream_options` of a request."""

    include_usage: bool | None = None


def error_body(exception: BaseException) -> tuple[int, dict[str, Any]]:
    """Status and body for an exception."""
    failure = describe(exception)
    return failure.status, {"error": error_object(failure)}


def error_object(failure: Failure) -> dict[str, Any]:
    """The `error` of a body or of a streamed event."""
    if failure.status == 401:
        kind = "authentication_error"
    elif failure.status == 429:
        kind = "rate_limit_error"
    else:
        kind = "invalid_request_error" if failure.status < 500 else "server_error"
    return {"message": failure.message, "type": kind, "param": failure.param, "code": failure.code}


def tool_choice(value: str | dict[str, Any] | None) -> ToolChoice:
    """none, auto, required, a named function, or a list of allowed ones: see `allowed_tools`.

    Raises:
        InvalidRequest: anything else.
    """
    match value:
        case None:
            return ToolChoice()
        case "none" | "auto" | "required" as mode:
            return ToolChoice(mode)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return ToolChoice("required", name)
        case {"type": "allowed_tools", **listed}:
            match _allowed(listed).get("mode"):
                case "auto" | "required" as mode:
                    return ToolChoice(mode)
    raise InvalidRequest(
        "tool_choice must be none, auto, required, a named function or allowed_tools of mode auto or required, not "
        f"{str(value)[:120]!r}",
        param="tool_choice",
    )


def allowed_tools(choice: str | dict[str, Any] | None, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the declared tools those that a choice of type allowed_tools names; with any other choice all of them.

    The others are not shown to the model either, so that it cannot call them.

    Raises:
        InvalidRequest: it names a tool that is not declared.
    """
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return list(tools)
    named = _allowed(choice).get("tools")
    names = [_name(entry) for entry in named if not _hosted(entry)] if isinstance(named, list) else []
    declared = [tool["function"]["name"] for tool in tools]
    if unknown := [name for name in names if name not in declared]:
        raise InvalidRequest(
            f"tool_choice allows {str(unknown[0])[:120]!r}, which tools does not declare", param="tool_choice"
        )
    return [tool for tool in tools if tool["function"]["name"] in names]


def _allowed(choice: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The list and its mode: in an object of their own in chats, beside the type in responses."""
    nested = choice.get("allowed_tools", choice)
    return nested if isinstance(nested, dict) else {}


def _hosted(entry: object) -> bool:
    """Whether it is a tool of another kind than a function, which the model is not shown."""
    return isinstance(entry, dict) and entry.get("type", "function") != "function"


def _name(entry: object) -> object:
    function = entry.get("function", entry) if isinstance(entry, dict) else None
    return function.get("name") if isinstance(function, dict) else entry


def usage(finished: Iterable[Finished], prompts: Iterable[int]) -> dict[str, Any]:
    """The `usage` of a chat or a completion.

    Args:
        finished: the ends of all answers.
        prompts: the length of every prompt, whatever the number of its answers.
    """
    ends, lengths = sorted(finished, key=lambda end: end.index), list(prompts)
    prompt_tokens = sum(lengths)
    n = max(len(ends) // max(len(lengths), 1), 1)
    # Of several answers to a prompt one forwards it and the others go on from there.
    cached = sum(min(end.usage.cached_tokens for end in ends[at : at + n]) for at in range(0, len(ends), n))
    completion_tokens = sum(end.usage.completion_tokens for end in ends)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": sum(end.reasoning_tokens for end in ends)},
    }


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, _LEAST_LOGPROB)


def token_scores(scores: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """Entries of `logprobs.content`."""
    return [
        {
            **_token(score.token, score.logprob, score.bytes),
            "top_logprobs": [_token(text, logprob, raw) for _, text, logprob, raw in score.top],
        }
        for score in scores
    ]


def _token(text: str, logprob: float, raw: Sequence[int]) -> dict[str, Any]:
    return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}
