"""`selfdraft run`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Annotated, Any

import typer

from ..errors import InvalidRequest
from ..results import Generation, Piece
from .answer import AnswerText
from .command import command
from .figures import Tally
from .flags import ChatFlags, EngineFlags, TraceFlags, flag, whole
from .image_files import content, image_part
from .image_flags import ShownFlags
from .sampling_flags import SamplingFlags
from .session import check_thinking, decoded, is_terminal, open_model, opens_reasoning, report_profile, stream
from .terminal import dim

__all__ = ["run"]


@command
def run(
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="What to answer; without it, or with -, standard input is read."),
    ] = None,
    *,
    chat: ChatFlags,
    shown: ShownFlags,
    raw: Annotated[
        bool,
        flag(
            "--raw", "Take the prompt as it is, without the chat template; of standard input every byte. Default: off."
        ),
    ] = False,
    as_json: Annotated[
        bool,
        flag(
            "--json",
            "Print one JSON object when the answer is complete: schema_version, text, finish_reason, usage, timings, "
            "and with --logprobs logprobs. Default: off.",
        ),
    ] = False,
    logprobs: Annotated[
        int | None,
        flag(
            "--logprobs",
            "With --json: the raw log-probability of each token and of the N likeliest, 0 to 20. Default: none.",
            metavar="N",
            parser=whole,
        ),
    ] = None,
    trace: TraceFlags,
    sampling: SamplingFlags,
    engine: EngineFlags,
) -> None:
    """Answer one prompt.

    The answer streams to standard output; Ctrl-C stops it. Notes go to
    standard error and, where that is a terminal, progress and figures.
    """
    params = sampling.params(logprobs)
    if logprobs is not None and not as_json:
        raise typer.BadParameter("needs --json: plain text has no place for them", param_hint="'--logprobs'")
    if raw and (chat.system is not None or chat.think or shown.image):
        raise typer.BadParameter(
            "goes without --system, --think and --image, which are the chat template's", param_hint="'--raw'"
        )
    images = [image_part(path) for path in shown.image or ()]
    text = _read(prompt, raw)

    once = engine.settings().model_copy(update={"session_cache_max_bytes": 0})  # no turn follows
    llm = open_model(engine, trace, once)
    think = check_thinking(llm, chat.think)
    prompted = llm.prompted(text if raw else _messages(text, images, chat.system), raw=raw, enable_thinking=think)
    with closing(stream(llm, prompted, params)) as pieces:
        if as_json:
            print(_json(_last(pieces)))
        else:
            _show(pieces, AnswerText(sys.stdout, reasoning=opens_reasoning(llm, prompted.tokens)))
    report_profile(llm)


def _read(prompt: str | None, raw: bool) -> str:
    """The prompt, from the argument or from standard input."""
    if prompt is None or prompt == "-":
        if is_terminal("stdin"):
            raise InvalidRequest('no prompt: give one, as in selfdraft run "Who are you?", or pipe one in')
        prompt = decoded(sys.stdin.buffer.read()) if sys.stdin else ""
    if not raw:
        prompt = prompt.strip()  # templates trim a message as well, and `echo` adds a newline
    if not prompt:
        raise InvalidRequest("the prompt is empty; write something", param="prompt")
    return prompt


def _messages(text: str, images: list[dict[str, Any]], system: str | None) -> list[dict[str, Any]]:
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, {"role": "user", "content": content(images, text)}]


def _last(pieces: Iterator[Piece]) -> Generation:
    result = None
    for piece in pieces:
        result = piece.result
    assert result is not None
    return result


def _json(result: Generation) -> str:
    utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return json.dumps(result.to_dict(), ensure_ascii=not utf8)


def _show(pieces: Iterator[Piece], answer: AnswerText) -> None:
    """The text as it comes and, on a terminal, a line of figures."""
    try:
        for piece in pieces:
            answer.write(piece.text)
    finally:
        answer.end()
    if piece.result is not None and sys.stderr.isatty():
        dim(Tally.of(piece.result.timings).line(piece.result.finish_reason))
