"""The flags that commands share, each defined once, in groups that a command takes as objects (see `command`).

Defaults left at None are the checkpoint's, or the environment's (SELFDRAFT_*): see `SamplingParams` and `Settings`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Option

from ..device import Blas, Dtype
from ..errors import InvalidRequest
from ..params import SamplingParams

if TYPE_CHECKING:
    from ..settings import Settings

__all__ = ["ChatFlags", "EngineFlags", "SamplingFlags", "TraceFlags", "flag", "parse_depth"]

_SAMPLING, _LENGTH, _ENGINE = "Sampling", "Decoding and length", "Model and engine"


def flag(name: str, help: str, panel: str | None = None, metavar: str = " ", short: str = "") -> Any:
    """An option. One without a metavar is a switch; the help text says unit, range and default itself."""
    names = (name, short) if short else (name,)
    return Option(*names, help=help, rich_help_panel=panel, metavar=metavar, show_default=False)


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """Which model, and how the engine runs it."""

    model: Annotated[
        str,
        flag(
            "--model",
            "'reference' (bundled), a local folder, or a Hugging Face id, OWNER/NAME or OWNER/NAME@REVISION. "
            "Default: reference.",
            _ENGINE,
            "NAME",
            "-m",
        ),
    ] = "reference"
    dtype: Annotated[
        Dtype | None,
        flag(
            "--dtype",
            "Of dense weights: bfloat16, float16, float32, or auto: as stored, but float32 on a CPU with OpenBLAS, "
            "where it is faster. Default: $SELFDRAFT_DTYPE, else auto.",
            _ENGINE,
            "TYPE",
        ),
    ] = None
    blas: Annotated[
        Blas | None,
        flag(
            "--blas",
            "Matrix library of MLX on a Linux CPU: openblas, reference, or auto: OpenBLAS where it is installed. "
            "Default: $SELFDRAFT_BLAS, else auto.",
            _ENGINE,
            "NAME",
        ),
    ] = None
    acceptance: Annotated[
        Literal["block", "tokenwise"] | None,
        flag(
            "--acceptance",
            "Rejection rule of unseeded sampling: block or tokenwise; both are exact. "
            "Default: $SELFDRAFT_ACCEPTANCE, else block.",
            _ENGINE,
            "RULE",
        ),
    ] = None
    prefill_chunk: Annotated[
        int | None,
        flag(
            "--prefill-chunk",
            "Prompt tokens of one forward pass, 1 to 65536. Default: $SELFDRAFT_PREFILL_CHUNK, else 4096.",
            _ENGINE,
            "TOKENS",
        ),
    ] = None

    def settings(self) -> Settings:
        """Settings from these flags, over the environment.

        Raises:
            typer.BadParameter: a value that is not allowed, under the flag's name.
            InvalidRequest: an environment variable with such a value.
        """
        from ..settings import load_settings

        given = dataclasses.asdict(self)
        del given["model"]
        try:
            return load_settings(**given)
        except InvalidRequest as error:
            if given.get(error.param or "") is None:
                raise
            raise _bad(error) from error


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """How requests are sampled: a flag for every field of `SamplingParams` but logprobs, under the same name."""

    depth: Annotated[
        str,
        flag(
            "--depth",
            "Tokens drafted a cycle: 0 (plain decoding) up to the model's limit, or auto, which adapts "
            "to measured cost and acceptance. Default: auto.",
            _LENGTH,
            "auto|N",
        ),
    ] = "auto"
    max_tokens: Annotated[
        int | None,
        flag(
            "--max-tokens", "Most tokens of an answer, at least 1. Default: the checkpoint's, else 1024.", _LENGTH, "N"
        ),
    ] = None
    min_tokens: Annotated[
        int, flag("--min-tokens", "No end token and no stop string before so many tokens. Default: 0.", _LENGTH, "N")
    ] = 0
    ignore_eos: Annotated[bool, flag("--ignore-eos", "Go on after an end token. Default: off.", _LENGTH)] = False
    stop: Annotated[
        list[str] | None,
        flag(
            "--stop",
            "Text that ends the answer and is no part of it; repeatable, up to 16 times. Default: none.",
            _LENGTH,
            "TEXT",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        flag("--temperature", "0 (greedy) to 100. Default: the checkpoint's, else 1.", _SAMPLING, "T"),
    ] = None
    top_p: Annotated[
        float | None,
        flag(
            "--top-p",
            "Nucleus: probability mass kept, over 0 up to 1; 1 is off. Default: the checkpoint's, else 1.",
            _SAMPLING,
            "P",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        flag("--top-k", "Most likely tokens kept; 0 is off. Default: the checkpoint's, else 0.", _SAMPLING, "N"),
    ] = None
    min_p: Annotated[
        float | None,
        flag(
            "--min-p",
            "Least probability relative to the largest, 0 (off) to 1. Default: the checkpoint's, else 0.",
            _SAMPLING,
            "P",
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        flag(
            "--presence-penalty",
            "Taken off the logit of a token that the output has, -2 to 2. Default: 0.",
            _SAMPLING,
            "X",
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        flag(
            "--frequency-penalty",
            "Taken off for each time that the output has it, -2 to 2. Default: 0.",
            _SAMPLING,
            "X",
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        flag(
            "--repetition-penalty",
            "Factor against tokens of prompt and output, over 0 up to 10; 1 is off. Default: the checkpoint's, else 1.",
            _SAMPLING,
            "X",
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
            raise _bad(error) from error


@dataclass(frozen=True, kw_only=True)
class ChatFlags:
    """What the chat template is told besides the messages."""

    system: Annotated[str | None, flag("--system", "System prompt. Default: none.", metavar="TEXT")] = None
    think: Annotated[
        bool,
        flag(
            "--think", "Let the model reason first, where its template knows thinking (enable_thinking). Default: off."
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class TraceFlags:
    """What is told about a run, on standard error."""

    verbose: Annotated[
        bool, flag("--verbose", "Log a line of figures for each request to standard error. Default: off.", short="-v")
    ] = False
    profile: Annotated[
        bool,
        flag(
            "--profile",
            "Time the stages of every cycle (this slows them down) and report to standard error at "
            "the end. Default: off.",
        ),
    ] = False


def parse_depth(text: str) -> int | Literal["auto"]:
    """A depth as SamplingParams takes it; what is neither a number nor "auto" is left for it to refuse."""
    try:
        return int(text)
    except ValueError:
        return text  # type: ignore[return-value]


def _bad(error: InvalidRequest) -> typer.BadParameter:
    name = (error.param or "").split(" ")[0].replace("_", "-")
    return typer.BadParameter(str(error), param_hint=f"'--{name}'")


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not ID=VALUE, like 42=-5", param_hint="'--logit-bias'") from error
