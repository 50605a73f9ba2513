"""The other ranks: they run what rank 0 tells, in that order, and decide nothing."""

from __future__ import annotations

import contextlib
import queue
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..engine import Boundary, Cut
from ..errors import SelfdraftError
from ..memory import Allowance
from ..models.loader import LoadedModel
from ..sessions.payload import Arrays, cut_moment, cut_span, join
from ..state import Captured, RowState
from .channel import Message
from .group import Group
from .rendezvous import meet_leader

__all__ = ["follow"]

_HEARD = 2.0  # seconds until the end of rank 0 is heard of, where the device notices it first


def follow(group: Group, mine: Mapping[str, str], granted: Allowance, build: Callable[[], LoadedModel]) -> None:
    """Hold a part of a model for rank 0 until that ends.

    Args:
        mine: what this rank has, see `facts.facts`.
        granted: what it may use.
        build: makes the part, once rank 0 takes this rank.

    Raises:
        SelfdraftError: rank 0 refuses this rank, with the reason, or is lost.
    """
    link = meet_leader(group, {"facts": dict(mine), "granted": granted.total})
    if (answer := link.receive())[0] == "end":
        raise SelfdraftError(answer[1])
    link.beat()
    told: queue.SimpleQueue[Message | SelfdraftError] = queue.SimpleQueue()
    link.watch(told.put, told.put)
    try:
        part = Follower(build().model, group)
        while (message := _next(told))[0] != "end":
            part.obey(message)
    except Exception as error:
        if _told_to_end(told):
            return
        link.send(["failed", f"{type(error).__name__}: {error}"])
        raise
    finally:
        link.close()
    if message[1]:
        raise SelfdraftError(message[1])


def _told_to_end(told: queue.SimpleQueue[Message | SelfdraftError]) -> bool:
    """Whether rank 0 ended in good order, so that what this rank still computed is wanted by nobody.

    Raises:
        SelfdraftError: rank 0 is lost.
    """
    with contextlib.suppress(queue.Empty):
        while True:
            message = told.get(timeout=_HEARD)
            if isinstance(message, SelfdraftError):
                raise message
            if message == ["end", ""]:
                return True
    return False


def _next(told: queue.SimpleQueue[Message | SelfdraftError]) -> Message:
    message = told.get()
    if isinstance(message, SelfdraftError):
        raise message
    return message


class Follower:
    """A rank's part of a model, and of what rows and warm prefixes hold, by the numbers that rank 0 gives."""

    def __init__(self, part: Any, group: Group) -> None:
        self._part = part
        self._group = group
        self._rows: dict[int, RowState] = {}
        self._arrays: dict[int, Arrays] = {}
        self._output = mx.zeros(0)
        self._tokens: list[mx.array] = []
        self._pending: tuple[Captured, list[RowState]] = Captured(), []

    @property
    def held(self) -> tuple[int, int]:
        """How many rows, and arrays of warm prefixes."""
        return len(self._rows), len(self._arrays)

    def obey(self, message: Message) -> None:
        """Run one message of `LeadingModel` or `Leader`."""
        name, *rest = message
        getattr(self, f"_on_{name}")(*rest)

    def _on_forward(self, numbers: list[int], lengths: list[int], count: int, keep_steps: bool, digest: int) -> None:
        self._compare(digest)
        rows = self._at(numbers)
        for row, length in zip(rows, lengths, strict=True):
            row.length = length
        tokens = self._given([len(rows), count])
        self._tokens = [tokens]
        hidden, captured = self._part.forward(tokens, rows, keep_steps=keep_steps)
        self._pending = captured, rows
        self._put_out(hidden)

    def _on_commit(self, counts: list[int]) -> None:
        captured, rows = self._pending
        captured.commit(rows, counts)

    def _on_logits(self, shape: list[int], dtype: str) -> None:
        self._put_out(self._part.logits(self._hidden(shape, dtype)))

    def _on_draft_logits(self, shape: list[int], dtype: str, step: int) -> None:
        self._put_out(self._part.draft_logits(self._hidden(shape, dtype), step, whole=True))

    def _on_draft(self, shape: list[int], dtype: str, numbers: list[int], offsets: list[int], step: int) -> None:
        tokens = self._given(shape[:2])
        self._put_out(self._part.draft(tokens, self._hidden(shape, dtype), self._at(numbers), offsets, step))

    def _on_span(self, number: int, row: int, length: int, start: int, head: bool) -> None:
        self._arrays[number] = cut_span(self._boundary(row, length), start, head=head)

    def _on_moment(self, number: int, row: int, length: int, head: bool) -> None:
        self._arrays[number] = cut_moment(self._boundary(row, length), head=head)

    def _on_join(self, row: int, spans: list[int], moment: int, end: int, head: bool) -> None:
        parts = [self._arrays[number] for number in spans]
        join(self._at([row])[0], parts, self._arrays[moment], (Cut(end, chunk=True),), head=head)

    def _on_drop(self, number: int) -> None:
        self._rows.pop(number, None)
        self._arrays.pop(number, None)

    def _at(self, numbers: Sequence[int]) -> list[RowState]:
        """The rows of these numbers; those that are new have seen nothing."""
        for number in numbers:
            if number not in self._rows:
                self._rows[number] = self._part.new_state()
        return [self._rows[number] for number in numbers]

    def _boundary(self, number: int, length: int) -> Boundary:
        """Where a row stands; rank 0 alone keeps the hidden."""
        (row,) = self._at([number])
        row.length = length
        return Boundary(row, mx.zeros((1, 1)), ())

    def _given(self, shape: list[int], dtype: mx.Dtype = mx.int32) -> mx.array:
        """What rank 0 shares."""
        return self._group.share(mx.zeros(shape, dtype=dtype))

    def _hidden(self, shape: list[int], dtype: str) -> mx.array:
        return self._given(shape, getattr(mx, dtype)) if dtype else self._output

    def _put_out(self, output: mx.array) -> None:
        self._output = output
        self._group.follow(output)
        mx.async_eval(output)

    def _compare(self, digest: int) -> None:
        """Whether rank 0 saw the tokens of the forward before as this rank did."""
        if not self._tokens:
            return
        mine = zlib.crc32(np.array(self._tokens.pop(), dtype=np.int32).tobytes())
        if mine != digest:
            raise SelfdraftError(
                "ranks have forwarded different tokens, so what they computed since belongs to no model: start the "
                "group again, and report it if it comes back"
            )
