"""Whether a request's memory is there, asked before its prompt is forwarded. Knows sizes; nothing of queues."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from .engine import SCORED_TOGETHER, Engine, Request
from .errors import OutOfMemoryBudget
from .memory import Allowance, Holdings, free_memory, gibibytes

__all__ = ["MemoryBudget", "Need", "together"]

_PROMISED = 0.9  # share of what the weights leave; the rest is for logits, and for what nobody counts
_REPLY_SHARE, _MOST_REPLY, _LEAST_REPLY = 4, 32768, 256  # of a context; tokens
_SIDE_BY_SIDE = 4  # answers of the default length that should fit at once
_SCORED_LOGIT = 20  # bytes a logit of a scored position: itself, in fp32, as log-probability, twice in its ranking
_SCORE = 200  # bytes of a score that is kept, as the objects it becomes


@dataclass(frozen=True)
class Need:
    """Bytes that a request comes to hold.

    Attributes:
        state: until it ends: keys and values, recurrent states, the scores of its prompt.
        working: while its longest chunk is forwarded; chunks of several requests take turns.
    """

    state: int
    working: int

    @property
    def bytes(self) -> int:
        """Alone."""
        return self.state + self.working


def together(needs: Iterable[Need]) -> int:
    """Bytes that requests come to hold side by side."""
    needs = list(needs)
    return sum(need.state for need in needs) + max((need.working for need in needs), default=0)


class MemoryBudget:
    """The one budget of a loaded model: rows, warm prefixes and working memory share what the weights leave.

    Args:
        engine: says how large a row's buffers are made, and how long its chunks are.
        granted: what it may use, together with other models.
        beside: what the others hold now.
    """

    def __init__(self, engine: Engine, granted: Allowance, beside: Callable[[], Holdings] = Holdings) -> None:
        self.granted = granted
        self.beside = beside
        self._engine = engine
        self._model = engine.model

    @property
    def total(self) -> int:
        """Bytes for rows, warm prefixes and working memory, beside the weights of all models."""
        return max(0, int(_PROMISED * (self.granted.total - self.granted.weights - self.beside().weights)))

    def need(self, request: Request) -> Need:
        """What a request may come to hold: prompt and all tokens it may emit, and the scores of its prompt."""
        prompt = len(request.prompt)
        state = self._model.row_bytes(self._engine.plan(request).entries) + self._scores(request)
        working = self._model.working_bytes(min(prompt, self._engine.prefill_chunk), prompt)
        if (inputs := request.inputs) is not None:
            state, working = state + inputs.nbytes, max(working, inputs.working_bytes)
        return Need(state, working)

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
        """Whether rows that need this much together fit, if no other model has any."""
        return needed <= self.total

    def fits_now(self, needed: int) -> bool:
        """Whether they fit beside the rows of other models."""
        return self.fits(needed + self.beside().rows)

    def prefix_room(self, needed: int) -> int:
        """Bytes that warm prefixes may take beside rows that need so much, and beside all of other models."""
        others = self.beside()
        return max(0, self.total - needed - others.rows - others.prefixes)

    @property
    def _beside_others(self) -> str:
        weights = self.beside().weights
        return f" while other models take {gibibytes(weights)}" if weights else ""

    def check_together(self, needs: Sequence[Need]) -> None:
        """Whether requests that fit alone fit side by side.

        Raises:
            OutOfMemoryBudget: they do not.
        """
        if not self.fits(together(needs)):
            raise OutOfMemoryBudget(
                f"{len(needs)} answers side by side need {gibibytes(together(needs))} beside the weights, and answers "
                f"may use {gibibytes(self.total)}: run fewer at a time",
                later=True,
            )

    def lacking(self, need: int) -> int:
        """Bytes of `need` that are not free now; 0 where a limit was given, for then nobody asks."""
        return 0 if self.granted.limited else max(0, need - free_memory())

    def fitted(self, request: Request, *, spare: int = 0) -> tuple[Request, Need]:
        """A request and what it needs: as it is, or sustained where it fits only so. Arguments as of `check`.

        Raises:
            OutOfMemoryBudget: see `check`.
        """
        try:
            return request, self.check(request, spare=spare)
        except OutOfMemoryBudget:
            if self._engine.plan(request).mode == "sustained":
                raise
        request = replace(request, mode="sustained")
        return request, self.check(request, spare=spare)

    def check(self, request: Request, *, spare: int = 0) -> Need:
        """What a request needs.

        Args:
            spare: bytes in use that would be let go for it.

        Raises:
            OutOfMemoryBudget: more than there is, ever or now.
        """
        need = self.need(request)
        figures = (
            f"{len(request.prompt)} prompt tokens and up to {request.params.max_tokens} more need "
            f"{gibibytes(need.bytes)} beside the weights, {gibibytes(need.working)} of it to read the prompt"
        )
        if not self.fits(need.bytes):
            remedy = "shorten the prompt, lower max_tokens" + (" or prefill_chunk" if need.working > need.state else "")
            remedy += ", send smaller images" if request.inputs is not None else ""
            raise OutOfMemoryBudget(
                f"{figures}, and answers may use {gibibytes(self.total)}{self._beside_others}: {remedy}",
                later=bool(self._beside_others),
            )
        if not self.granted.limited and need.bytes > (free := free_memory() + spare):
            raise OutOfMemoryBudget(
                f"{figures}, and {gibibytes(free)} are free now: close other programs or try again later", later=True
            )
        return need
