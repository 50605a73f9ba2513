"""Rank 0: the model as the engine sees it, of which every call runs on all ranks, and warm prefixes held in parts.

The engine, its rules, noise, depths, grammars and stops are on this rank alone. The others are told which forward
comes next; tokens, and a hidden they do not have, are shared on the device. So whatever is decided is decided once.
"""

from __future__ import annotations

import logging
import threading
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import mlx.core as mx
import numpy as np

from ..engine import Boundary, Cut
from ..errors import GroupBroken, InvalidRequest, SelfdraftError
from ..memory import Allowance
from ..models.checkpoint import Checkpoint
from ..models.loader import LoadedModel
from ..sessions.payload import Arrays, Payload, cut_moment, cut_span, join
from ..settings import Settings
from ..state import Captured, RowState
from .channel import Link, Message
from .facts import difference
from .group import Group
from .parts import built_part, why_no_head
from .rendezvous import meet_followers

__all__ = ["Leader", "LeadingModel"]

log = logging.getLogger(__name__)

_HEARD = 2.0  # seconds until the end of a rank is heard of, where the device notices it first


class Leader:
    """What rank 0 has of the group.

    Args:
        lost: called once, on any thread, when a rank is lost: nothing that is being computed comes to an end then.

    Attributes:
        failure: why the group can run no more; None while it can.
    """

    def __init__(self, group: Group, lost: Callable[[SelfdraftError], None] = lambda error: None) -> None:
        self.group = group
        self.lost = lost
        self.failure: GroupBroken | None = None
        self._broken = threading.Event()
        self._closing = False
        self._links: dict[int, Link] = {}
        self._numbers = count(1)

    def meet(self, mine: Mapping[str, str], granted: Allowance) -> Allowance:
        """Connect, compare what ranks have, and learn what the one with least memory can give.

        Args:
            mine: what this rank has, see `facts.facts`.

        Raises:
            SelfdraftError: they do not come; one has something else than this rank, by name.
        """
        found = meet_followers(self.group)
        self._links = {rank: link for rank, (link, _) in found.items()}
        total = min(granted.total, *(int(hello["granted"]) for _, hello in found.values()))
        for rank, link in self._links.items():
            link.beat()
            link.watch(partial(self._take, rank), partial(self._lose, rank))
        for link, hello in found.values():
            if problem := difference(mine, hello["facts"], f"{link.name} ({link.host})"):
                self.close(problem)
                raise InvalidRequest(problem)
        self.tell(["welcome"])
        return Allowance(granted.weights, total, granted.limited)

    def load(
        self, checkpoint: Checkpoint, dtype: mx.Dtype | None, progress: Callable[[int, int], None] | None
    ) -> tuple[LoadedModel, str]:
        """This rank's part of a model, which runs on all ranks; and why it has no head, if it has none."""
        loaded = built_part(checkpoint, dtype, self.group, progress)
        return replace(loaded, model=LeadingModel(loaded.model, self)), why_no_head(checkpoint)

    def adapted(self, settings: Settings) -> Settings:
        """Settings without what a group does not have; said so where the user asked for it."""
        lacking: dict[str, Any] = {"ssd_session_cache": "off", "draft_vocabulary": 0, "vision": "off"}
        for name, value in lacking.items():
            if name in settings.model_fields_set and getattr(settings, name) != value:
                log.warning("%s is %s in a group: its ranks hold parts of the model and its state", name, value)
        return settings.model_copy(update=lacking)

    @property
    def payload(self) -> Payload:
        """How the session bank takes boundaries apart, so that every rank keeps its part."""
        return Payload(self._cut_span, self._cut_moment, self._join)

    def beyond_repair(self) -> GroupBroken:
        """Why nothing can be decoded once a forward was broken off: other ranks stand in the middle of it."""
        if not self._broken.wait(_HEARD):
            self._break(GroupBroken("a forward was broken off on rank 0, and the others cannot go on from there"))
        assert self.failure is not None
        return self.failure

    @property
    def control_bytes(self) -> int:
        """Sent to the other ranks beside the device."""
        return sum(link.sent for link in self._links.values())

    def number(self, held: Any) -> int:
        """A number under which the other ranks hold their part of something, as long as this rank does."""
        number = next(self._numbers)
        weakref.finalize(held, self.tell, ["drop", number]).atexit = False
        return number

    def tell(self, message: Message) -> None:
        """Have the other ranks do something."""
        for link in self._links.values():
            link.send(message)

    def close(self, why: str = "") -> None:
        """End the other ranks: with an error if there is one to tell."""
        self._closing = True
        self.tell(["end", why])
        for link in self._links.values():
            link.close(patience=0 if self.failure else _HEARD)

    def _take(self, rank: int, message: Message) -> None:
        """What a rank says: only ever that it cannot go on."""
        log.error("rank %d says: %s", rank, message[1])
        self._lose(rank, SelfdraftError(f"rank {rank} broke down; the log says why"))

    def _lose(self, rank: int, error: SelfdraftError) -> None:
        if self.failure is None and not self._closing:
            log.error("rank %d is on %s", rank, self._links[rank].host)
            self._break(GroupBroken(f"the group of ranks is broken: {error}"))

    def _break(self, error: GroupBroken) -> None:
        log.error("%s", error)
        self.failure = error
        self._broken.set()
        self.lost(error)

    def _cut_span(self, boundary: Boundary, start: int, *, head: bool) -> Arrays:
        span = _Held(cut_span(boundary, start, head=head))
        span.number = self.number(span)
        self.tell(["span", span.number, *_place(boundary), start, head])
        return span

    def _cut_moment(self, boundary: Boundary, *, head: bool) -> Arrays:
        moment = _Held(cut_moment(boundary, head=head))
        moment.number = self.number(moment)
        self.tell(["moment", moment.number, *_place(boundary), head])
        return moment

    def _join(
        self, empty: RowState, spans: Sequence[Arrays], moment: Arrays, cuts: tuple[Cut, ...], *, head: bool
    ) -> Boundary:
        numbers = [span.number for span in spans if isinstance(span, _Held)]
        assert isinstance(moment, _Held)
        assert len(numbers) == len(spans)
        self.tell(["join", empty.number, numbers, moment.number, cuts[-1].end, head])
        return join(empty, spans, moment, cuts, head=head)


class _Held(dict[str, mx.array]):
    """Arrays of which the other ranks hold their part, under a number."""

    number = 0


def _place(boundary: Boundary) -> tuple[int, int]:
    """Whose state, and after how many tokens."""
    return boundary.state.number, boundary.state.length


class LeadingModel:
    """Implements `models.Model`; a call is told to the other ranks, then made here.

    Args:
        part: this rank's part.
    """

    looks_ahead = False  # what others were told cannot be taken back

    def __init__(self, part: Any, leader: Leader) -> None:
        self._part = part
        self._leader = leader
        self._group = leader.group
        self._output: mx.array | None = None  # of the newest call: the others have it, too
        self._tokens: list[mx.array] = []  # of the newest forward
        self.vocab_size: int = part.vocab_size
        self.context_length: int = part.context_length

    @property
    def max_depth(self) -> int:
        """See `Model`."""
        depth: int = self._part.max_depth
        return depth

    @max_depth.setter
    def max_depth(self, depth: int) -> None:
        self._part.max_depth = depth

    def new_state(self) -> RowState:
        """See `Model`; of what all ranks hold, this rank's part."""
        state: RowState = self._part.new_state()
        state.number = self._leader.number(state)
        return state

    def row_bytes(self, tokens: int) -> int:
        """See `Model`; on a rank."""
        size: int = self._part.row_bytes(tokens)
        return size

    def working_bytes(self, tokens: int, length: int) -> int:
        """See `Model`; on a rank."""
        size: int = self._part.working_bytes(tokens, length)
        return size

    def forward(self, tokens: mx.array, rows: Sequence[RowState], *, keep_steps: bool) -> tuple[mx.array, Captured]:
        """See `Model`."""
        numbers, lengths = [row.number for row in rows], [row.length for row in rows]
        self._leader.tell(["forward", numbers, lengths, tokens.shape[1], keep_steps, self._digest()])
        tokens = self._group.share(tokens.astype(mx.int32))
        self._tokens = [tokens]
        hidden, captured = self._part.forward(tokens, rows, keep_steps=keep_steps)
        return self._put_out(hidden), _Captured(captured.layers, self._leader)

    def logits(self, hidden: mx.array) -> mx.array:
        """See `Model`."""
        self._leader.tell(["logits", *self._shape(hidden)])
        return self._put_out(self._part.logits(self._shared(hidden)))

    def draft_only(self, tokens: Sequence[int] | None) -> int:
        """See `Model`; all tokens are drafted here."""
        assert tokens is None, "settings of a group draft all tokens"
        return 0

    def draft_logits(self, hidden: mx.array, step: int = 0, *, whole: bool = False) -> mx.array:
        """See `Model`."""
        self._leader.tell(["draft_logits", *self._shape(hidden), step])
        return self._put_out(self._part.draft_logits(self._shared(hidden), step, whole=whole))

    def draft(
        self, tokens: mx.array, hidden: mx.array, rows: Sequence[RowState], offsets: Sequence[int], step: int = 0
    ) -> mx.array:
        """See `Model`."""
        numbers = [row.number for row in rows]
        self._leader.tell(["draft", *self._shape(hidden), numbers, list(offsets), step])
        tokens = self._group.share(tokens.astype(mx.int32))
        return self._put_out(self._part.draft(tokens, self._shared(hidden), rows, offsets, step))

    def _shape(self, hidden: mx.array) -> tuple[list[int], str]:
        """How a hidden comes to the others: its shape and dtype, or "" for what the newest call put out there."""
        return list(hidden.shape), "" if hidden is self._output else str(hidden.dtype).removeprefix("mlx.core.")

    def _shared(self, hidden: mx.array) -> mx.array:
        return hidden if hidden is self._output else self._group.share(hidden)

    def _put_out(self, output: mx.array) -> mx.array:
        self._output = output
        self._group.follow(output)
        return output

    def _digest(self) -> int:
        """Of the tokens of the forward before, which are known by now."""
        return zlib.crc32(np.array(self._tokens.pop(), dtype=np.int32).tobytes()) if self._tokens else 0


class _Captured(Captured):
    """Of which the other ranks commit as much."""

    def __init__(self, layers: list[Any], leader: Leader) -> None:
        super().__init__(layers)
        self._leader = leader

    def commit(self, rows: Sequence[RowState], tokens: Sequence[int]) -> None:
        """See `Captured`."""
        self._leader.tell(["commit", list(tokens)])
        super().commit(rows, tokens)
