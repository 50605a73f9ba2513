"""One request's view of the bank: where its row may go on from, and what it leaves behind. See `engine.Session`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..engine import Boundary
from .bank import SessionBank
from .tree import Node

__all__ = ["PromptSession"]


class PromptSession:
    """Implements `engine.Session`.

    Args:
        bank: where boundaries are.
        scope: whose they are; other scopes neither see nor time them.
        prompt: the request's tokens, or ids in their places by which it is told from prompts that only look the same.
        stops: lengths of it at which the next request may want to go on; what is out of range is ignored.
        on_reply: called with the tokens of prompt and answer once these are known to the bank.
    """

    def __init__(
        self,
        bank: SessionBank,
        scope: str,
        prompt: Sequence[int],
        stops: Sequence[int] = (),
        *,
        on_reply: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self._bank = bank
        self._scope = scope
        self._prompt = np.array(prompt, dtype=np.int32)
        self._on_reply = on_reply
        self._node: Node | None = None  # the root of its scope; the bank is the engine's thread's alone
        self.stops = sorted({stop for stop in stops if 0 < stop < len(prompt)})

    def resume(self, length: int, *, drafts: bool) -> Boundary | None:
        """See `engine.Session`."""
        found = self._bank.resume(self._scope, self._prompt[:-1], longer_than=length, drafts=drafts)
        if found is None:
            return None
        self._move_to(found[0])
        return found[1]

    def keep(self, tokens: Sequence[int], boundary: Boundary) -> None:
        """See `engine.Session`."""
        reply = len(tokens) > len(self._prompt)
        behind = self._node or self._bank.root(self._scope)
        ids = [*self._prompt[: len(tokens)].tolist(), *tokens[len(self._prompt) :]]
        node = self._bank.keep(self._scope, behind, ids, boundary, reply=reply)
        if node is not None:
            self._move_to(node)
        if reply and self._on_reply:
            self._on_reply(tokens)

    def release(self) -> None:
        """See `engine.Session`."""
        if self._node is not None:
            self._node.users.discard(self)

    def _move_to(self, node: Node) -> None:
        self.release()
        node.users.add(self)
        self._node = node
