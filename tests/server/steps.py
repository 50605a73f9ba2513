"""Models for server tests that write a given text, and engines that go on only when they are told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from selfdraft.engine import Engine, Request, Row
from selfdraft.llm import LLM
from selfdraft.state import Captured, RowState
from tests.support.scripted import MARK, ScriptedHead

__all__ = ["Steps", "scripted"]


class _ScriptedTrunk(ScriptedHead):
    """Its trunk says given tokens, too, whatever it reads."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.replies: list[tuple[RowState, int, Sequence[int]]] = []  # state, length of its prompt, tokens

    def forward(self, tokens: mx.array, rows: Sequence[RowState], *, keep_steps: bool) -> tuple[mx.array, Captured]:
        before = [row.length for row in rows]
        hidden, captured = super().forward(tokens, rows, keep_steps=keep_steps)
        for b, (row, length) in enumerate(zip(rows, before, strict=True)):
            for state, prompt, reply in self.replies:
                if state is row:
                    for t in range(tokens.shape[1]):
                        place = length + t + 1 - prompt
                        if 0 <= place < len(reply):
                            hidden[b, t] = mx.array([MARK, float(reply[place])] + [0.0] * (hidden.shape[2] - 2))
        return hidden, captured


def scripted(load: Callable[[], LLM], text: str, behind: str = "") -> Callable[[], LLM]:
    """A loader of a model whose every answer is `text`, then an end token, then `behind`; its head drafts all of it."""

    def loaded() -> LLM:
        llm = load()
        llm.sessions = None  # a script follows the state that a row began with
        encode = llm.tokenizer.encode
        reply = [*encode(text, special=True), min(llm.tokenizer.eos_ids), *encode(behind, special=True)]
        model = _ScriptedTrunk(llm.engine.model)
        llm.engine = engine = Engine(model)
        add = engine.add

        def followed(request: Request) -> Row:
            row = add(request)
            model.replies.append((row.state, len(request.prompt), reply))
            model.follow(row, reply)
            return row

        engine.add = followed  # type: ignore[method-assign]
        return llm

    return loaded


class Steps:
    """Holds an engine's steps back: `llm = steps.hold(load)`, then `allow(n)`.

    Attributes:
        taken: steps that were begun.
    """

    def __init__(self) -> None:
        self.taken = 0
        self._allowed = threading.Semaphore(0)
        self._free = False

    def hold(self, load: Callable[[], LLM]) -> Callable[[], LLM]:
        """A loader of the same model, whose engine waits before each step."""

        def loaded() -> LLM:
            llm = load()
            step = llm.engine.step

            def held() -> list[Row]:
                if not self._free:
                    assert self._allowed.acquire(timeout=60)
                self.taken += 1
                return step()

            llm.engine.step = held  # type: ignore[method-assign]
            return llm

        return loaded

    def allow(self, count: int) -> None:
        """So many steps more."""
        self._allowed.release(count)

    def run(self) -> None:
        """All steps from now on."""
        self._free = True
        self._allowed.release(1)

    @contextmanager
    def running_at_end(self) -> Any:
        """Lets the engine run when the block is left, however it is left: the server could not stop otherwise."""
        try:
            yield self
        finally:
            self.run()
