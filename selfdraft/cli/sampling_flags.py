"""The flags of a request: one for every field of `SamplingParams`, under the same name."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from ..errors import InvalidRequest
from ..params import SamplingParams
from .flags import flag, number, refusal, whole

__all__ = ["SamplingFlags", "parse_depth"]

_DECODING, _SAMPLING = "Decoding and length", "Sampling"


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """All of them but logprobs, which only `run --json` can show."""

    depth: Annotated[
        str,
        flag(
            "--depth",
            "Tokens drafted a cycle: 0 (plain decoding) up to the model's limit, or auto, which adapts to measured "
            "cost and acceptance. Default: auto.",
            _DECODING,
            "auto|N",
        ),
    ] = "auto"
    max_tokens: Annotated[
        int | None,
        flag(
            "--max-tokens",
            "Most tokens of an answer, at least 1. Default: the checkpoint's, else 1024.",
            _DECODING,
            "N",
            whole,
        ),
    ] = None
    min_tokens: Annotated[
        int,
        flag(
            "--min-tokens",
            "No end token and no stop text before so many tokens, from 0. Default: 0.",
            _DECODING,
            "N",
            whole,
        ),
    ] = 0
    ignore_eos: Annotated[bool, flag("--ignore-eos", "Go on after an end token. Default: off.", _DECODING)] = False
    stop: Annotated[
        list[str] | None,
        flag(
            "--stop",
            "Text that ends the answer and is no part of it; repeatable, up to 16 times. Default: none.",
            _DECODING,
            "TEXT",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        flag("--temperature", "0 (greedy) to 100. Default: the checkpoint's, else 1.", _SAMPLING, "T", number),
    ] = None
    top_p: Annotated[
        float | None,
        flag(
            "--top-p",
            "Nucleus: probability mass kept, over 0 up to 1; 1 is off. Default: the checkpoint's, else 1.",
            _SAMPLING,
            "P",
            number,
        ),
    ] = None
    top_k: Annotated[
        int | None,
        flag(
            "--top-k",
            "Most likely tokens kept; 0 is off. Default: the checkpoint's, else 0.",
            _SAMPLING,
            "N",
            whole,
        ),
    ] = None
    min_p: Annotated[
        float | None,
        flag(
            "--min-p",
            "Least probability relative to the largest, 0 (off) to 1. Default: the checkpoint's, else 0.",
            _SAMPLING,
            "P",
            number,
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        flag(
            "--presence-penalty",
            "Taken off the logit of a token that the output has, -2 to 2. Default: 0.",
            _SAMPLING,
            "X",
            number,
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        flag(
            "--frequency-penalty",
            "Taken off for each time that the output has it, -2 to 2. Default: 0.",
            _SAMPLING,
            "X",
            number,
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        flag(
            "--repetition-penalty",
            "Factor against tokens of prompt and output, over 0 up to 10; 1 is off. Default: the checkpoint's, else 1.",
            _SAMPLING,
            "X",
            number,
        ),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        flag(
            "--logit-bias",
            "Added to the logit of token ID, -100 to 100; repeatable. Default: none.",
            _SAMPLING,
            "ID=VALUE",
        ),
    ] = None
    seed: Annotated[
        int | None,
        flag(
            "--seed",
            "Whole number: the same seed and prompt give the same text, at every depth. Default: fresh randomness.",
            _SAMPLING,
            "N",
            whole,
        ),
    ] = None

    def params(self, logprobs: int | None = None) -> SamplingParams:
        """Checked parameters.

        Raises:
            typer.BadParameter: a value out of its range, under the flag's name.
        """
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        given["depth"] = parse_depth(self.depth)
        given["logit_bias"] = dict(map(_bias, self.logit_bias or ()))
        given["stop"] = tuple(self.stop or ())
        try:
            return SamplingParams(**given, logprobs=logprobs)
        except InvalidRequest as error:
            raise refusal(error) from error


def parse_depth(text: str) -> int | Literal["auto"]:
    """A depth as SamplingParams takes it; what is neither a number nor "auto" is left for it to refuse."""
    try:
        return int(text)
    except ValueError:
        return text  # type: ignore[return-value]


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not ID=VALUE, like 42=-5", param_hint="'--logit-bias'") from error
