"""Whether a request's memory is there, asked before its prompt is forwarded. Knows sizes; nothing of queues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..engine import SCORED_TOGETHER, Plan, Request
from ..memory import free_memory
from ..models.loader import LoadedModel
from .errors import OutOfMemoryBudget

__all__ = ["MemoryBudget"]

_SPARE = 0.9  # share of what is free that may be promised
_GIB = 2**30
_REPLY_SHARE, _MOST_REPLY, _LEAST_REPLY = 4, 32768, 256  # of a context; tokens
_SIDE_BY_SIDE = 4  # answers of the default length that should fit at once
_SCORED_LOGIT = 20  # bytes a logit of a scored position: itself, in fp32, as log-probability, twice in its ranking
_SCORE = 200  # bytes of a score that is kept, as the objects it becomes


class MemoryBudget:
    """What rows may use beside the weights.

    Args:
        loaded: the model, its weights in memory already.
        limit: bytes for rows; None takes 90% of what is free now.
        plan: how large a row's buffers are made; None takes them for as large as need be.
    """

    def __init__(
        self, loaded: LoadedModel, limit: int | None = None, plan: Callable[[Request], Plan] | None = None
    ) -> None:
        self._model = loaded.model
        self._plan = plan
        self.total = limit if limit is not None else int(_SPARE * free_memory())
        self._limited = limit is not None

    def need(self, request: Request) -> int:
        """Bytes a request may come to hold: prompt and all tokens it may emit, and the scores of its prompt."""
        assert request.params.max_tokens is not None
        entries = min(len(request.prompt) + request.params.max_tokens, self._model.context_length)
        if self._plan is not None:
            entries = self._plan(request).entries
        return self._model.row_bytes(entries) + self._scores(request)

    def _scores(self, request: Request) -> int:
        if request.prompt_logprobs is None:
            return 0
        scored = len(request.prompt) - 1
        logits = min(scored, SCORED_TOGETHER) * self._model.vocab_size
        return _SCORED_LOGIT * logits + _SCORE * scored * (1 + request.prompt_logprobs)

    def reply_tokens(self) -> int:
        """Tokens of an answer whose request names no limit: a part of the context, so that prompts have room.

        Enough for a coding agent's turn where the memory allows it, and it is what clients are told as the limit.
        """
        tokens = min(self._model.context_length // _REPLY_SHARE, _MOST_REPLY)
        while tokens > _LEAST_REPLY and not self.fits(_SIDE_BY_SIDE * self._model.row_bytes(2 * tokens)):
            tokens //= 2
        return max(tokens, 1)

    def fits(self, needed: int) -> bool:
        """Whether rows that need this much together fit."""
        return needed <= self.total

    def lacking(self, need: int) -> int:
        """Bytes of `need` that are not free now; 0 where a limit was given, for then nobody asks."""
        return 0 if self._limited else max(0, need - free_memory())

    def fitted(self, request: Request, *, spare: int = 0) -> tuple[Request, int]:
        """A request and the bytes it needs: as it is, or sustained where it fits only so. Arguments as of `check`.

        Raises:
            OutOfMemoryBudget: see `check`.
        """
        try:
            return request, self.check(request, spare=spare)
        except OutOfMemoryBudget:
            if self._plan is None or self._plan(request).mode == "sustained":
                raise
        request = replace(request, mode="sustained")
        return request, self.check(request, spare=spare)

    def check(self, request: Request, *, spare: int = 0) -> int:
        """Bytes a request needs.

        Args:
            spare: bytes in use that would be let go for it.

        Raises:
            OutOfMemoryBudget: more than there is: 413 if it never fits, 507 if it does not now.
        """
        need = self.need(request)
        figures = (
            f"{len(request.prompt)} prompt tokens and up to {request.params.max_tokens} more need "
            f"{need / _GIB:.2f} GiB beside the weights"
        )
        if not self.fits(need):
            raise OutOfMemoryBudget(
                f"{figures}, and rows may use {self.total / _GIB:.2f} GiB: shorten the prompt or lower max_tokens",
                status=413,
            )
        if not self._limited and need > (free := free_memory() + spare):
            raise OutOfMemoryBudget(
                f"{figures}, and {free / _GIB:.2f} GiB are free now: close other programs or try again later",
                status=507,
            )
        return need
