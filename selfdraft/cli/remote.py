"""A conversation with the model of a server that runs already. Knows its chat API; no terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from ..params import SamplingParams
from ..results import FinishReason, Timings
from .answer import END_OF_REASONING
from .conversation import Conversation, Turn
from .image_files import image_url_part
from .server_client import ServedModel, chat_events

__all__ = ["RemoteConversation"]


class RemoteConversation(Conversation):
    """A conversation over HTTP.

    Args:
        url: of the server.
        model: what it serves.
        key: the API key it asks for.
    """

    def __init__(self, url: str, model: ServedModel, params: SamplingParams, *, key: str | None = None) -> None:
        super().__init__(params)
        self._url = url
        self._model = model
        self._key = key

    @property
    def name(self) -> str:
        return f"{self._model.name} at {self._url}"

    @property
    def max_depth(self) -> int:
        return self._model.max_depth

    @property
    def context_length(self) -> int:
        return self._model.context

    @property
    def knows_thinking(self) -> bool:
        return True  # the server leaves it out where the template knows none

    @property
    def blind(self) -> str:
        return "" if self._model.vision else "by what its server says"

    def image_part(self, path: Path) -> dict[str, Any]:
        return image_url_part(path)

    def rest(self) -> None:
        """Nothing: the server knows when it is idle."""

    def answer(self, turn: Turn, stopped: Callable[[], bool] = lambda: False) -> Iterator[str]:
        answer = {"content": "", "reasoning_content": ""}
        finish: FinishReason = "cancelled"
        timings: dict[str, Any] = {}
        tokens = 0
        with closing(chat_events(self._url, self._key, self._request(turn), stopped)) as chunks:
            for chunk in chunks:
                timings = chunk.get("timings") or timings
                tokens = (chunk.get("usage") or {}).get("total_tokens", tokens)
                for choice in chunk["choices"]:
                    yield from _pieces(choice["delta"], turn, answer)
                    finish = choice["finish_reason"] or finish
        if any(answer.values()) or tokens:
            said = {name: text for name, text in answer.items() if text or name == "content"}
            self._remember(turn, said, finish, _timings(timings))
            self.length = tokens or self.length

    def _request(self, turn: Turn) -> dict[str, Any]:
        asked = {
            field.name: value
            for field in dataclasses.fields(SamplingParams)
            if (value := getattr(self.params, field.name)) not in (None, (), field.default)
        }
        return {
            **asked,
            "model": self._model.name,
            "messages": turn.messages,
            "enable_thinking": self.think,
            "stream": True,
            "stream_options": {"include_usage": True},
            "timings_per_token": True,  # so that an answer which is stopped has figures too
        }


def _pieces(delta: dict[str, Any], turn: Turn, answer: dict[str, str]) -> Iterator[str]:
    """The text of a delta as it is shown: reasoning first, then its closing tag, then the answer."""
    if reasoning := delta.get("reasoning_content"):
        turn.reasoning = True
        answer["reasoning_content"] += reasoning
        yield reasoning
    if content := delta.get("content"):
        if turn.reasoning and not answer["content"]:
            yield f"{END_OF_REASONING}\n\n"
        answer["content"] += content
        yield content


def _timings(figures: dict[str, Any]) -> Timings | None:
    """The server's `timings`; None if there are none. A newer server may send more than is known here."""
    names = {field.name for field in dataclasses.fields(Timings)}
    return Timings(**{name: figures[name] for name in names}) if names <= figures.keys() else None
