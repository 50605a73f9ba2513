"""The session bank: boundaries by token prefix, in memory within a byte budget, and on disk where there is one.

Called on the engine's thread only, but for `attach`.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..engine import Boundary
from ..state import RowState
from .disk.store import Damaged, DiskStore, Record, Stored
from .payload import Arrays, Payload
from .tree import Ids, Node, longest, walk

__all__ = ["BankFigures", "SessionBank"]

log = logging.getLogger(__name__)

_IDLE = 3600.0  # seconds without use after which a boundary leaves memory
_LOOK = 60.0  # seconds between looks for such, and for what the disk has let go, as long as there is room


@dataclass
class BankFigures:
    """Counts since the bank was made; read from any thread.

    Attributes:
        hits: rows that went on from a boundary. disk_hits: for which something was read from disk.
        misses: rows that found none.
        restored_tokens: tokens that were not forwarded.
        kept: boundaries taken in. evicted: boundaries that left memory.
        bytes, entries: what is in memory now.
    """

    hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    restored_tokens: int = 0
    kept: int = 0
    evicted: int = 0
    bytes: int = 0
    entries: int = 0


class SessionBank:
    """Boundaries by whose they are and which tokens they stand behind.

    Which leave memory first is decided by value (GreedyDual-Size, Cao and Irani 1997): tokens that a boundary saves
    over the one before it, per byte that goes with it, on top of a clock that rises with every departure. Where room is
    short it is taken from scopes that hold more than an equal share of it.

    Args:
        new_state: makes the state of a row that has seen nothing.
        limit: most bytes in memory.
        idle: seconds without use after which a boundary leaves memory.
        clock: monotonic time in seconds.
        payload: how boundaries are taken apart and put together.
    """

    def __init__(
        self,
        new_state: Callable[[], RowState],
        limit: int,
        *,
        idle: float = _IDLE,
        clock: Callable[[], float] = time.monotonic,
        payload: Payload | None = None,
    ) -> None:
        self._new_state = new_state
        self._payload = payload or Payload()
        self._idle = idle
        self._clock = clock
        self._age = 0.0
        self._looked = clock()
        self._roots: dict[str, Node] = {}
        self._disk: DiskStore | None = None
        self._arrivals: queue.SimpleQueue[tuple[DiskStore, Sequence[tuple[Record, Stored]]]] = queue.SimpleQueue()
        self._allowed = limit
        self.limit = limit
        self.figures = BankFigures()

    def root(self, scope: str) -> Node:
        """Where the boundaries of a scope begin."""
        if scope not in self._roots:
            self._roots[scope] = Node(None, np.zeros(0, dtype=np.int32), (), drafts=True)
        return self._roots[scope]

    def attach(self, disk: DiskStore, records: Sequence[tuple[Record, Stored]]) -> None:
        """Use what a disk holds, and leave boundaries there, from the next call on. Any thread may call this."""
        self._arrivals.put((disk, records))

    def store_all(self) -> None:
        """Have what is only in memory written to the disk that was attached."""
        self._take_arrivals()

    def resume(self, scope: str, prompt: Ids, *, longer_than: int, drafts: bool) -> tuple[Node, Boundary] | None:
        """The longest boundary that begins `prompt`; None unless it has more than `longer_than` tokens.

        Args:
            drafts: it must hold the head's history.
        """
        self._take_arrivals()
        while True:
            node = self._longest(scope, prompt, drafts=drafts)
            if node is None or node.end <= longer_than:
                self.figures.misses += longer_than == 0
                return None
            try:
                boundary = self._restored(node, head=drafts)
            except Damaged:
                continue  # it is gone from the tree: what is left may be shorter
            self.figures.hits += 1
            self.figures.restored_tokens += node.end - longer_than
            return node, boundary

    def keep(
        self, scope: str, behind: Node, tokens: Sequence[int], boundary: Boundary, *, reply: bool = False
    ) -> Node | None:
        """Take a boundary in.

        Args:
            behind: the boundary its row went on from or left last.
            tokens: all of its tokens.
            reply: it is the end of an answer.

        Returns:
            Its node; None if one with these tokens is there already, or there is no room.
        """
        self._take_arrivals()
        ids = np.array(tokens, dtype=np.int32)
        known = self._longest(scope, ids, drafts=boundary.drafts)
        if known is not None and known.end == len(ids):
            self._touch(known)
            return None
        if not behind.attached or behind.drafts < boundary.drafts or not all(map(self._has_span, behind.path)):
            behind = self.root(scope)  # the row holds all of it
        node = Node(behind, ids[behind.end :], boundary.cuts, drafts=boundary.drafts)
        node.reply = reply
        head, cut = boundary.drafts, self._payload
        self._hold(node, cut.cut_span(boundary, behind.end, head=head), cut.cut_moment(boundary, head=head))
        self.figures.kept += 1
        self._store(scope, node)
        self._touch(node)
        self.shrink(self._room)
        return node if node.span is not None else None

    def allow(self, limit: int) -> None:
        """Hold at most `limit` bytes from now on, and never more than the bank's own limit: rows need the rest."""
        self._allowed = limit
        self.shrink(self._room)

    def shrink(self, limit: int) -> None:
        """Let boundaries go until at most `limit` bytes are held, and those that nobody used for long."""
        now = self._clock()
        if self.figures.bytes <= limit and now < self._looked + min(_LOOK, self._idle):
            return
        self._looked, before = now, now - self._idle
        holders = {scope: list(walk(root)) for scope, root in self._roots.items()}
        held = {scope: sum(node.nbytes for node in nodes) for scope, nodes in holders.items()}
        share = limit / max(1, sum(size > 0 for size in held.values()))
        candidates = [
            (node.priority, node.touched, scope, node)
            for scope, nodes in holders.items()
            for node in nodes
            if node.moment is not None and not node.users
        ]
        for priority, touched, scope, node in sorted(candidates, key=lambda each: each[:2]):
            if touched < before or (self.figures.bytes > limit and held[scope] > share):
                self._age = max(self._age, priority)
                held[scope] -= self._let_go(node)
        for node in [node for nodes in holders.values() for node in nodes]:
            if node.span is None and not self._returns(node) and node.attached:
                self._forget(node)  # the disk has let it go

    def clear(self) -> None:
        """Forget everything in memory, and what the disk holds until it is attached again."""
        for root in self._roots.values():
            for child in root.children:
                self._forget(child)

    @property
    def _room(self) -> int:
        """Bytes it may hold now."""
        return min(self._allowed, self.limit)

    def _longest(self, scope: str, ids: Ids, *, drafts: bool) -> Node | None:
        def usable(node: Node) -> bool:
            there = node.moment is not None or (self._readable(node) and node.stored is not None and node.stored.whole)
            return there and node.drafts >= drafts

        return longest(self.root(scope), ids, self._has_span, usable)

    def _restored(self, node: Node, *, head: bool) -> Boundary:
        """A boundary as arrays; what is not in memory is read and stays there.

        Raises:
            Damaged: the disk does not hold it any more; then its node is gone, with all behind it.
        """
        read = False
        for each in node.path:
            if each.span is None or (each is node and each.moment is None):
                self._load(each, with_moment=each is node)
                read = True
            self._touch(each)
        if self._disk is not None and node.stored is not None:
            self._disk.touch(node.stored)
        self.figures.disk_hits += read
        spans = [each.span for each in node.path if each.span is not None]
        assert node.moment is not None
        boundary = self._payload.join(self._new_state(), spans, node.moment, node.cuts, head=head)
        if read:
            self.shrink(self._room)
        return boundary

    def _load(self, node: Node, *, with_moment: bool) -> None:
        assert self._disk is not None
        assert node.stored is not None
        try:
            span = node.span if node.span is not None else self._disk.read_span(node.stored)
            moment = self._disk.read_moment(node.stored) if with_moment and node.moment is None else node.moment
        except Damaged:
            self._forget(node)
            raise
        self._hold(node, span, moment)

    def _hold(self, node: Node, span: Arrays | None, moment: Arrays | None) -> None:
        self.figures.bytes -= node.nbytes
        self.figures.entries += (moment is not None) - (node.moment is not None)
        node.hold(span, moment)
        self.figures.bytes += node.nbytes

    def _touch(self, node: Node) -> None:
        above = next((each.end for each in reversed(node.path[:-1]) if each.moment is not None), 0)
        node.priority = self._age + (node.end - above) / max(node.nbytes, 1)
        node.touched = self._clock()

    def _let_go(self, node: Node) -> int:
        """Drop a boundary from memory; spans stay where boundaries behind it need them. Returns the bytes freed."""
        before = self.figures.bytes
        self.figures.evicted += 1
        self._hold(node, node.span, None)
        self._prune(node)
        return before - self.figures.bytes

    def _forget(self, node: Node) -> None:
        """Take a node out of the tree, with all that hangs on it."""
        for each in (node, *walk(node)):
            self._hold(each, None, None)
        node.detach()
        assert node.parent is not None
        self._prune(node.parent)

    def _prune(self, node: Node) -> None:
        """Drop spans that no boundary needs, from a node upwards, and nodes of which nothing is left."""
        current: Node | None = node
        while current is not None and current.parent is not None and current.moment is None:
            if any(child.span is not None for child in current.children):
                return
            self._hold(current, None, None)
            if not current.children and not self._returns(current):
                current.detach()
            current = current.parent

    def _returns(self, node: Node) -> bool:
        """Whether it can be had from the disk, or will be."""
        return self._disk is not None and self._disk.reads and _on_disk(node)

    def _has_span(self, node: Node) -> bool:
        return node.span is not None or self._readable(node)

    def _readable(self, node: Node) -> bool:
        return self._disk is not None and self._disk.reads and node.stored is not None and node.stored.key is not None

    def _take_arrivals(self) -> None:
        while not self._arrivals.empty():
            self._disk, records = self._arrivals.get()
            nodes: dict[str | None, Node] = {}
            for record, stored in records:
                parent = nodes.get(record.parent) if record.parent else self.root(record.scope)
                if parent is None:
                    continue
                node = nodes[record.key] = Node(parent, record.ids, record.cuts, drafts=record.drafts)
                node.stored, node.reply = stored, record.reply
            for scope, root in self._roots.items():
                for node in walk(root):
                    if node.stored is None:
                        self._store(scope, node)

    def _store(self, scope: str, node: Node) -> None:
        """Have a boundary written to disk, and first what it stands behind, where that was refused before: of such,
        what is still in memory."""
        for each in node.path:
            if self._disk is None or (not _on_disk(each) and each.span is None):
                return
            if not _on_disk(each):
                assert each.span is not None
                assert each.parent is not None
                each.stored = self._disk.offer(
                    parent=each.parent.stored,
                    scope=scope,
                    ids=each.ids,
                    cuts=each.cuts,
                    drafts=each.drafts,
                    reply=each.reply,
                    span=each.span,
                    moment=each.moment or {},
                )


def _on_disk(node: Node) -> bool:
    """Whether the disk holds it, or is to."""
    return node.stored is not None and (node.stored.waiting or node.stored.key is not None)
