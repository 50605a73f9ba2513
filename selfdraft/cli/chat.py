"""`selfdraft chat`: a conversation in a terminal or, piped, a message a line."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from .. import __version__
from ..errors import ContextOverflow, InvalidRequest, SelfdraftError
from ..params import SamplingParams
from .answer import AnswerText
from .command import command
from .conversation import Conversation, LocalConversation
from .flags import ChatFlags, EngineFlags, SessionFlags, TraceFlags
from .sampling_flags import SamplingFlags
from .session import check_thinking, decoded, is_terminal, open_model, report_profile
from .slash import Leave, depth_now, obey
from .terminal import dim, say, silent_keys

__all__ = ["GREETING", "Interrupt", "chat", "chat_here", "converse"]

GREETING = "Hello! Who are you?"


@command
def chat(*, chat: ChatFlags, trace: TraceFlags, sampling: SamplingFlags, engine: SessionFlags) -> None:
    """Talk with a model.

    In a terminal: Enter sends; Alt-Enter, Esc Enter or a trailing backslash
    begins a new line; Ctrl-C stops an answer, Ctrl-D leaves; /help lists
    commands. Piped: each line is a message (or a command), answers go to
    standard output; without any input the model answers a greeting.
    """
    chat_here(engine, sampling.params(), chat, trace)


def chat_here(engine: EngineFlags, params: SamplingParams, chat: ChatFlags, trace: TraceFlags) -> None:
    """Load a model and talk with it; see `chat`.

    Raises:
        InvalidRequest: it has no chat template; a parameter that every answer would be refused for.
    """
    llm = open_model(engine, trace)
    if llm.template is None:
        raise InvalidRequest(f"{engine.model} has no chat template, so it cannot chat; try selfdraft run --raw")
    llm.stream([0], params)  # never started: refuses now what every answer would be refused for
    from ..keeping import DiskSessions

    kept = DiskSessions(llm)
    try:
        converse(LocalConversation(llm, params, system=chat.system, think=check_thinking(llm, chat.think)))
    finally:
        kept.close()
    report_profile(llm)


def converse(conversation: Conversation) -> None:
    """Talk until the user leaves: in the terminal, or piped."""
    if is_terminal("stdin") and is_terminal("stdout"):
        _terminal(conversation)
    else:
        _piped(conversation)


class Interrupt:
    """While entered, Ctrl-C sets `requested` instead of ending the program; a second one does end what runs."""

    def __init__(self) -> None:
        self.requested = False
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def _terminal(conversation: Conversation) -> None:
    """Read and answer until the user leaves. An error ends a turn, not the chat."""
    from .line_input import LineInput, open_history

    print(f"selfdraft {__version__} · {conversation.name} · depth {depth_now(conversation)}")
    dim("Enter sends; Alt-Enter, Esc Enter or a trailing \\ begins a new line.")
    dim("Ctrl-C stops an answer, Ctrl-D leaves, /help lists commands.")
    reader = LineInput(open_history())
    while True:
        conversation.rest()
        try:
            line = reader.read()
        except KeyboardInterrupt:
            if not reader.typed:
                dim("Ctrl-D or /quit leaves")
            continue
        except EOFError:
            return
        try:
            if line.startswith("/"):
                _show(obey(conversation, line.strip()))
            elif line.strip():
                _answer_in_terminal(conversation, line.strip())
        except KeyboardInterrupt:  # in the moment before an answer, or in a command
            continue
        except Leave:
            return


def _answer_in_terminal(conversation: Conversation, text: str) -> None:
    before = len(conversation.messages)
    with silent_keys(), Interrupt() as interrupt:
        try:
            _answer(conversation, text, lambda: interrupt.requested)
        except KeyboardInterrupt:
            pass
        except SelfdraftError as error:
            say(_with_remedy(error))
            return
    if len(conversation.messages) == before:
        dim("stopped before an answer: the message is taken back")
    elif conversation.last is not None:
        dim(conversation.last.line(conversation.finish))


def _answer(conversation: Conversation, text: str, stopped: Callable[[], bool] = lambda: False) -> None:
    """Show an answer as it comes."""
    turn = conversation.turn(text)
    answer: AnswerText | None = None
    try:
        for piece in conversation.answer(turn, stopped):
            answer = answer or AnswerText(sys.stdout, reasoning=turn.reasoning)
            answer.write(piece)
    finally:
        if answer is not None:
            answer.end()


def _show(text: str) -> None:
    """Text of ours, laid out like an answer."""
    out = AnswerText(sys.stdout)
    out.write(text)
    out.end()


def _with_remedy(error: SelfdraftError) -> str:
    if isinstance(error, ContextOverflow):
        return f"{error}; /reset begins a new conversation. The message was not added"
    return f"{str(error).rstrip('.')}. The message was not added"


def _piped(conversation: Conversation) -> None:
    """A message a line; what commands say goes to standard error. The first failure ends it."""
    silent = True
    for data in sys.stdin.buffer if sys.stdin else ():
        line = decoded(data).rstrip("\r\n")
        if not line.strip():
            continue
        silent = False
        try:
            if line.startswith("/"):
                print(obey(conversation, line.strip()), file=sys.stderr)
            else:
                _answer(conversation, line.strip())
        except Leave:
            return
    if silent:
        say(f"no input: answering {GREETING!r}")
        _answer(conversation, GREETING)
