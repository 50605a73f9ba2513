"""A conversation with a model: messages, settings that may change between turns, figures. Knows no terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..params import SamplingParams
from ..results import FinishReason, Generation
from .answer import END_OF_REASONING
from .figures import Tally
from .sampling_flags import parse_depth
from .session import opens_reasoning, stream

if TYPE_CHECKING:
    from ..llm import LLM

__all__ = ["Conversation", "Turn"]


@dataclass(frozen=True)
class Turn:
    """A message about to be answered.

    Attributes:
        text: of the message.
        tokens: the whole conversation up to where the answer begins.
        reasoning: the answer will open with reasoning.
    """

    text: str
    tokens: list[int]
    reasoning: bool


class Conversation:
    """Turns of a user and a model. One that fails, or is stopped before its first token, leaves no trace.

    Attributes:
        params: how answers are sampled.
        system: the system prompt, or None.
        think: whether the model is to reason first.
        messages: the finished turns, without the system prompt.
        last: figures of the last answer; None before the first.
        finish: how the last answer ended.
        total: figures of all answers, also of those that `reset` made it forget.
        length: tokens of the conversation, the last answer included.
    """

    def __init__(self, llm: LLM, params: SamplingParams, *, system: str | None = None, think: bool = False) -> None:
        self.llm = llm
        self.params = params
        self.system = system
        self.think = think
        self.messages: list[dict[str, str]] = []
        self.last: Tally | None = None
        self.finish: FinishReason = "stop"
        self.total = Tally()
        self.length = 0

    def turn(self, text: str) -> Turn:
        """Put a message behind the conversation. Raises what `LLM.tokens` raises."""
        opening = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = [*opening, *self.messages, {"role": "user", "content": text}]
        tokens = self.llm.tokens(messages, enable_thinking=self.think)
        return Turn(text, tokens, opens_reasoning(self.llm, tokens))

    def answer(self, turn: Turn, stopped: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """The answer, piece by piece (a piece may be empty).

        Args:
            stopped: looked at between pieces; once true, the answer ends, and what there is of it counts.

        Raises:
            ContextOverflow: the conversation no longer fits the context.
            SelfdraftError: what else `LLM.stream` raises.
        """
        result: Generation | None = None
        with closing(stream(self.llm, turn.tokens, self.params, stopped)) as pieces:
            for piece in pieces:
                result = piece.result
                yield piece.text
        if result is not None and result.token_ids:
            self._remember(turn, result.text)
            self.finish = result.finish_reason
            self.last = Tally.of(result.timings)
            self.total.add(result.timings)
            self.length = len(turn.tokens) + self.last.tokens

    def reset(self) -> None:
        """Forget the messages; settings stay."""
        self.messages.clear()
        self.length = 0

    def set_depth(self, depth: str) -> None:
        """Take another depth, a number or "auto", from the next answer on.

        Raises:
            InvalidRequest: neither a whole number from 0 nor "auto".
        """
        self.params = dataclasses.replace(self.params, depth=parse_depth(depth))

    def _remember(self, turn: Turn, answer: str) -> None:
        message = {"role": "assistant", "content": answer}
        if turn.reasoning and END_OF_REASONING not in answer:  # stopped while it reasoned: that is no answer
            message = {"role": "assistant", "content": "", "reasoning_content": answer}
        self.messages += [{"role": "user", "content": turn.text}, message]
