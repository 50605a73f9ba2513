"""Sampling fields, thinking and output formats of a request: what the dialects share. Knows no messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from ...errors import InvalidRequest
from ...params import SamplingParams
from ...text.template import TEMPLATE_VARIABLES
from ..durations import seconds
from ..jobs import OutputFormat
from ..pool import STAY
from . import limits
from .limits import at_most, check_depth
from .wire import WireModel

__all__ = ["Count", "Positive", "SamplingFields", "json_schema", "output_format", "thinking"]

Count = Annotated[int, Field(ge=0, le=limits.MAX_COUNT)]
Positive = Annotated[int, Field(ge=1, le=limits.MAX_COUNT)]


class SamplingFields(WireModel):
    """What every dialect takes, under the same names. `SamplingParams` says the ranges and checks them."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    depth: Literal["auto"] | Annotated[int, Field(ge=0, le=limits.MAX_DEPTH)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    cache_prompt: bool | None = None
    enable_thinking: bool | None = None
    thinking_budget: Count | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    keep_alive: float | str | None = None

    @property
    def stay(self) -> float | None:
        """Seconds that the model is to stay loaded when it is idle; None for the server's own rule.

        Raises:
            InvalidRequest: no span of time.
        """
        if self.keep_alive is None:
            return None
        try:
            stay = seconds(self.keep_alive)
        except ValueError as error:
            raise InvalidRequest(f"keep_alive: {error}; got {self.keep_alive!r}"[:300], param="keep_alive") from error
        return STAY if stay < 0 else stay

    def sampling(self, *, max_tokens: int | None, logprobs: int | None = None) -> SamplingParams:
        """Our parameters.

        Args:
            max_tokens: under whatever name the dialect has it.
            logprobs: likewise; None for none.

        Raises:
            InvalidRequest: a value out of its range.
        """
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        at_most(stops, limits.MAX_STOPS, "stop", "strings")
        return SamplingParams(
            depth="auto" if self.depth is None else self.depth,
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=_bias(self.logit_bias),
            seed=self.seed,
            stop=stops,
            logprobs=logprobs,
            ignore_eos=bool(self.ignore_eos),
            min_tokens=self.min_tokens or 0,
            cache_prompt=self.cache_prompt is not False,
        )


def thinking(request: SamplingFields, effort: str | None) -> tuple[bool | None, dict[str, Any]]:
    """`enable_thinking` and the other template variables. One of these, `thinking_budget`, is enforced besides.

    An effort switches thinking on, or off if it is "none"; `chat_template_kwargs` outweighs that, and the request's own
    `enable_thinking` both.

    Raises:
        InvalidRequest: a variable that may not be set.
    """
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    enabled = None if effort is None else effort != "none"
    for name, value in (request.chat_template_kwargs or {}).items():
        if name == "enable_thinking":
            if value is not None and not isinstance(value, bool):
                raise InvalidRequest(
                    f"chat_template_kwargs.enable_thinking must be true or false, not {value!r}",
                    param="chat_template_kwargs",
                )
            enabled = value
        elif name in TEMPLATE_VARIABLES:
            variables[name] = value
        else:
            known = ", ".join(sorted(TEMPLATE_VARIABLES | {"enable_thinking"}))
            raise InvalidRequest(f"chat_template_kwargs may hold {known}; not {name!r}", param="chat_template_kwargs")
    if request.enable_thinking is not None:
        enabled = request.enable_thinking
    if request.thinking_budget is not None:
        variables["thinking_budget"] = request.thinking_budget
    budget = variables.get("thinking_budget")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
        raise InvalidRequest(
            f"thinking_budget must be a whole number of tokens, at least 0, not {budget!r}"[:200],
            param="chat_template_kwargs",
        )
    return enabled, variables


def output_format(value: Mapping[str, Any] | None, param: str) -> OutputFormat | None:
    """The constraint of a `response_format` or `text.format` object.

    Beside OpenAI's text, json_object and json_schema: {"type": "grammar", "grammar": LARK} and
    {"type": "regex", "regex": PATTERN}.

    Raises:
        InvalidRequest: none of these, or without its schema or grammar.
    """
    if value is None:
        return None
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return OutputFormat("json_object")
        case "json_schema":
            nested = value.get("json_schema", value)  # the Responses API has no such envelope
            return json_schema(nested.get("schema") if isinstance(nested, dict) else None, param)
        case "grammar" | "regex" as kind:
            text = value.get(kind)
            if not isinstance(text, str) or not text:
                raise InvalidRequest(f"{param}.{kind} must be a non-empty string, not {text!r}", param=param)
            return OutputFormat(kind, grammar=text)
        case other:
            raise InvalidRequest(
                f"{param}.type must be text, json_object, json_schema, grammar or regex, not {other!r}", param=param
            )


def json_schema(schema: object, param: str) -> OutputFormat:
    """JSON of a schema.

    Raises:
        InvalidRequest: not an object. RequestTooLarge: nested too deeply.
    """
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param} needs a schema that is a JSON object, not {json.dumps(schema)}", param=param)
    check_depth(schema, limits.MAX_SCHEMA_DEPTH, param)
    return OutputFormat("json_schema", schema=schema)


def _bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    at_most(bias, limits.MAX_LOGIT_BIAS, "logit_bias", "entries")
    wrong = [token for token in bias or () if not (token.isascii() and token.isdigit() and len(token) < 10)]
    if wrong:
        raise InvalidRequest(f"logit_bias maps token ids to numbers; {wrong[0][:40]!r} is no id", param="logit_bias")
    return {int(token): value for token, value in (bias or {}).items()}
