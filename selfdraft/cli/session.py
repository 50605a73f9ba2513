"""What `run` and `chat` share: loading a model with progress, and streaming an answer with progress of its prefill."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import FanError, InvalidRequest
from ..params import SamplingParams
from ..results import Piece
from ..source import REFERENCE
from .flags import EngineFlags, TraceFlags
from .terminal import Bar, say

if TYPE_CHECKING:
    from ..distributed.leading import Leader
    from ..llm import LLM
    from ..memory import Holdings
    from ..prompts import Prompted
    from ..settings import Settings

__all__ = [
    "check_thinking",
    "decoded",
    "is_terminal",
    "loading_bar",
    "model_id",
    "open_model",
    "opens_reasoning",
    "report_profile",
    "stream",
]

REASONING = "<think>"
LONG_PROMPT = 256  # tokens; a shorter one is read before a bar could be


def open_model(
    engine: EngineFlags,
    trace: TraceFlags,
    settings: Settings | None = None,
    *,
    beside: Callable[[], Holdings] | None = None,
    leader: Leader | None = None,
) -> LLM:
    """Load a model, showing progress; what a user should know of it goes to standard error.

    Args:
        settings: of the engine; by default those of the flags.
        beside, leader: see `load`.
    """
    from ..loading import load

    settings = settings or engine.settings()
    if trace.verbose:
        logging.basicConfig(stream=sys.stderr, format="%(name)s: %(message)s")
        logging.getLogger("selfdraft").setLevel(logging.INFO)
    _mend_fans()
    with loading_bar(engine.model) as bar:
        llm = load(engine.model, settings=settings, profile=trace.profile, progress=bar, beside=beside, leader=leader)
    for note in llm.notes:
        say(note)
    if llm.max_mode is not None:
        llm.max_mode.warn = say
    return llm


def _mend_fans() -> None:
    """Have the fans given back that a crash left at maximum, if it took the watchdog, too."""
    from ..fans.max_mode import mend, user_claims

    try:
        if mend(user_claims()):
            say("the watchdog of the fans was killed: there is a new one")
    except FanError as error:
        say(f"fans may be at maximum since a crash: {error}")


def model_id(name: str) -> str:
    """What a model's name stands for, whatever the current folder: a local folder goes by its whole path."""
    folder = Path(name).expanduser()
    return str(folder.resolve()) if name and name != REFERENCE and folder.is_dir() else name


def loading_bar(model: str) -> Bar:
    """Progress of reading weights. During a download the Hub client draws its own, so this one waits for its turn."""
    local = model == REFERENCE or Path(model).expanduser().exists()
    return Bar(f"loading {model}", "bytes", at_once=local)


def check_thinking(llm: LLM, think: bool) -> bool:
    """Whether thinking can be asked for; said so if it was and cannot."""
    if think and (llm.template is None or "enable_thinking" not in llm.template.variables):
        say("the model's chat template knows no thinking: it is left off")
        return False
    return think


def opens_reasoning(llm: LLM, tokens: Sequence[int]) -> bool:
    """Whether the template has opened the reasoning, so that an answer begins inside it."""
    return llm.tokenizer.decode(tokens[-4:], skip_special=False).rstrip().endswith(REASONING)


def stream(
    llm: LLM, prompt: Prompted, params: SamplingParams, stopped: Callable[[], bool] = lambda: False
) -> Generator[Piece]:
    """The pieces of an answer, with a bar on standard error while a long prompt is read.

    Bad input is refused at the first piece. Closing the generator ends the row.

    Args:
        stopped: looked at between pieces, and between layers of the prefill; once true, the answer is cancelled, and
            its last piece follows.
    """
    bar = Bar("reading the prompt", "tokens", shown=len(prompt.tokens) >= LONG_PROMPT)

    def on_prefill(done: int, total: int) -> None:
        bar(done, total)
        if stopped():
            pieces.cancel()

    with bar, closing(llm.stream(prompt, params, on_prefill=on_prefill)) as pieces:
        for piece in pieces:
            if piece.token_ids or piece.result:
                bar.stop()
            yield piece
            if stopped():
                pieces.cancel()


def report_profile(llm: LLM) -> None:
    """The profile, if one was taken, to standard error."""
    if report := llm.profile_report():
        print(report, file=sys.stderr)


def is_terminal(name: str) -> bool:
    """Whether standard input or output ("stdin", "stdout") is a terminal; a closed one is none."""
    stream = getattr(sys, name)
    return stream is not None and bool(stream.isatty())


def decoded(data: bytes) -> str:
    """Text of standard input.

    Raises:
        InvalidRequest: not UTF-8.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"standard input is not UTF-8 (byte {data[error.start]:#04x} at {error.start}); convert it with iconv"
        ) from error
