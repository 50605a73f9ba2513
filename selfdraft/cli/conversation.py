"""A conversation with a model: messages, settings that may change between turns, figures. Knows no terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, cast

from ..params import SamplingParams
from ..results import Piece, Timings
from .answer import END_OF_REASONING
from .figures import Tally
from .flags import parse_depth
from .session import stream

if TYPE_CHECKING:
    from ..llm import LLM

__all__ = ["Conversation"]


class Conversation:
    """Turns of a user and a model. A turn that fails, or is stopped before its first token, leaves no trace.

    Attributes:
        params: how answers are sampled.
        system: the system prompt, or None.
        think: whether the model is to reason first.
        messages: the finished turns, without the system prompt.
        last: figures of the last answer; None before the first.
        total: figures of all answers, also of those forgotten by `reset`.
        length: tokens of the conversation, the last answer included.
    """

    def __init__(self, llm: LLM, params: SamplingParams, *, system: str | None = None, think: bool = False) -> None:
        self.llm = llm
        self.params = params
        self.system = system
        self.think = think
        self.messages: list[dict[str, str]] = []
        self.last: Tally | None = None
        self.total = Tally()
        self.length = 0

    def ask(self, text: str, stopped: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """The answer to a message, piece by piece (a piece may be empty).

        Args:
            stopped: looked at between pieces; once true, the answer ends and what there is of it counts.

        Raises:
            ContextOverflow: the conversation no longer fits the context.
            SelfdraftError: what else `LLM.stream` raises.
        """
        question = {"role": "user", "content": text}
        tokens = self.llm.tokens([*self._opening(), *self.messages, question], enable_thinking=self.think)
        answer: list[str] = []
        timings: Timings | None = None
        with closing(cast("Generator[Piece]", stream(self.llm, tokens, self.params))) as pieces:
            for piece in pieces:
                answer.append(piece.text)
                yield piece.text
                if piece.result is not None:
                    timings = piece.result.timings
                elif stopped():
                    timings = self._timings_so_far()
                    break
        if timings is None or not sum(timings.emitted.values()):
            return
        self.messages += [question, self._message("".join(answer))]
        self.last = Tally.of(timings)
        self.total.add(timings)
        self.length = len(tokens) + self.last.tokens

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

    def _opening(self) -> list[dict[str, str]]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _message(self, answer: str) -> dict[str, str]:
        """An answer as the template wants it; reasoning that was stopped before its end is not taken for an answer."""
        if self.think and END_OF_REASONING not in answer:
            return {"role": "assistant", "content": "", "reasoning_content": answer}
        return {"role": "assistant", "content": answer}

    def _timings_so_far(self) -> Timings | None:
        """Figures of the answer being stopped: its row is the engine's only one."""
        rows = self.llm.engine.rows
        return rows[-1].statistics.timings() if rows else None
