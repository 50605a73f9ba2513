"""A conversation with a model: messages, settings that may change between turns, figures. Knows no terminal.

`LocalConversation` decodes in this process; `remote.RemoteConversation` asks a server.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequest
from ..params import SamplingParams
from ..results import FinishReason, Generation, Timings
from .answer import END_OF_REASONING
from .figures import Tally
from .image_files import content, image_part
from .sampling_flags import parse_depth
from .session import opens_reasoning, stream

if TYPE_CHECKING:
    from ..llm import LLM
    from ..prompts import Prompted

__all__ = ["Conversation", "LocalConversation", "Turn"]


@dataclass
class Turn:
    """A message about to be answered.

    Attributes:
        messages: the whole conversation, this message last.
        prompt: what the answer is decoded from; None where a server makes it.
        reasoning: the answer opens with reasoning; known at the latest with its first piece.
    """

    messages: list[dict[str, Any]]
    prompt: Prompted | None = None
    reasoning: bool = False

    @property
    def tokens(self) -> Sequence[int]:
        """Of the prompt."""
        return self.prompt.tokens if self.prompt else ()


class Conversation(ABC):
    """Turns of a user and a model. One that fails, or is stopped before its first token, leaves no trace.

    Attributes:
        params: how answers are sampled.
        system: the system prompt, or None.
        think: whether the model is to reason first.
        messages: the finished turns, without the system prompt.
        images: parts that the next message begins with, each with the name of its file.
        last: figures of the last answer; None before the first.
        finish: how the last answer ended.
        total: figures of all answers, also of those that `reset` made it forget.
        length: tokens of the conversation, the last answer included.
    """

    def __init__(self, params: SamplingParams, *, system: str | None = None, think: bool = False) -> None:
        self.params = params
        self.system = system
        self.think = think
        self.messages: list[dict[str, Any]] = []
        self.images: list[tuple[str, dict[str, Any]]] = []
        self.last: Tally | None = None
        self.finish: FinishReason = "stop"
        self.total = Tally()
        self.length = 0

    @property
    @abstractmethod
    def name(self) -> str:
        """Of the model, for people."""

    @property
    @abstractmethod
    def max_depth(self) -> int:
        """Deepest draft; 0 means plain decoding only."""

    @property
    @abstractmethod
    def context_length(self) -> int:
        """Most tokens of the conversation."""

    @property
    @abstractmethod
    def knows_thinking(self) -> bool:
        """Whether the model can be told to reason first."""

    @property
    @abstractmethod
    def blind(self) -> str:
        """Why the model reads no images; empty if it does."""

    @abstractmethod
    def image_part(self, path: Path) -> dict[str, Any]:
        """What stands in a message for the image in a file.

        Raises:
            InvalidRequest: it cannot be read.
        """

    @abstractmethod
    def answer(self, turn: Turn, stopped: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """The answer, piece by piece (a piece may be empty).

        Args:
            stopped: looked at between pieces; once true, the answer ends, and what there is of it counts.

        Raises:
            ContextOverflow: the conversation no longer fits the context.
            SelfdraftError: what else goes wrong.
        """

    def turn(self, text: str) -> Turn:
        """Put a message behind the conversation.

        Raises:
            InvalidRequest: the conversation cannot be rendered.
        """
        opening = [] if self.system is None else [{"role": "system", "content": self.system}]
        said = content([part for _, part in self.images], text)
        return Turn([*opening, *self.messages, {"role": "user", "content": said}])

    def attach(self, path: Path) -> None:
        """Show the image in a file with the next message.

        Raises:
            InvalidRequest: it cannot be read, or the model reads none.
        """
        if self.blind:
            raise InvalidRequest(f"{self.name} reads text only ({self.blind})")
        self.images.append((path.name, self.image_part(path)))

    @abstractmethod
    def rest(self) -> None:
        """Give back memory that no answer needs: the user may take long."""

    def reset(self) -> None:
        """Forget the messages; settings stay."""
        self.messages.clear()
        self.images.clear()
        self.length = 0

    def set_depth(self, depth: str) -> None:
        """Take another depth, a number or "auto", from the next answer on.

        Raises:
            InvalidRequest: neither a whole number from 0 nor "auto".
        """
        self.params = dataclasses.replace(self.params, depth=parse_depth(depth))

    def _remember(self, turn: Turn, answer: dict[str, str], finish: FinishReason, timings: Timings | None) -> None:
        self.messages += [turn.messages[-1], {"role": "assistant", **answer}]
        self.images.clear()
        self.finish = finish
        self.last = Tally()
        if timings is not None:
            self.last.add(timings)
            self.total.add(timings)


class LocalConversation(Conversation):
    """A conversation with a model in this process."""

    def __init__(self, llm: LLM, params: SamplingParams, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.llm = llm

    @property
    def name(self) -> str:
        return self.llm.name

    @property
    def max_depth(self) -> int:
        return self.llm.max_depth

    @property
    def context_length(self) -> int:
        return self.llm.context_length

    @property
    def knows_thinking(self) -> bool:
        return self.llm.template is not None and "enable_thinking" in self.llm.template.variables

    @property
    def blind(self) -> str:
        return self.llm.blind

    def image_part(self, path: Path) -> dict[str, Any]:
        return image_part(path)

    def rest(self) -> None:
        self.llm.release()

    def turn(self, text: str) -> Turn:
        turn = super().turn(text)
        turn.prompt = self.llm.prompted(turn.messages, enable_thinking=self.think)
        turn.reasoning = opens_reasoning(self.llm, turn.tokens)
        return turn

    def answer(self, turn: Turn, stopped: Callable[[], bool] = lambda: False) -> Iterator[str]:
        result: Generation | None = None
        assert turn.prompt is not None
        with closing(stream(self.llm, turn.prompt, self.params, stopped)) as pieces:
            for piece in pieces:
                result = piece.result
                yield piece.text
        if result is not None and result.token_ids:
            answer = {"content": result.text}
            if turn.reasoning and END_OF_REASONING not in result.text:  # stopped while it reasoned: that is no answer
                answer = {"content": "", "reasoning_content": result.text}
            self._remember(turn, answer, result.finish_reason, result.timings)
            assert self.last is not None
            self.length = len(turn.tokens) + self.last.tokens
