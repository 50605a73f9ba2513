"""A tree over token ids. Every node is a boundary: what it adds to its parent, in memory, on disk, or both.

A node hangs on the boundary that its row went on from or left last, never on one that only holds the same tokens: keys
and values from two computations may differ in their low bits, and what is joined along a path must be one computation.
Ids are compared one by one; no hash decides.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ..engine import Cut
from .disk.store import Stored
from .payload import Arrays, nbytes

__all__ = ["Ids", "Node", "longest", "walk"]

Ids = NDArray[np.int32]


class Node:
    """A boundary.

    Attributes:
        parent: the boundary before it; None at the root, which stands for no tokens.
        ids: tokens since the parent's end.
        end: tokens up to here.
        cuts: how all of them were forwarded (see `engine.Boundary`).
        drafts: whether the spans up to here hold the head's history.
        span, moment: its arrays while they are in memory (see payload.py); `hold` sets them.
        nbytes: bytes of these.
        reply: whether it is the end of an answer.
        stored: its place on disk, if it has one or is to have one.
        priority: the lower, the sooner it leaves memory.
        touched: clock time of its last use.
        users: sessions whose row goes on from it: it stays in memory for them.
    """

    def __init__(self, parent: Node | None, ids: Ids, cuts: tuple[Cut, ...], *, drafts: bool) -> None:
        self.parent = parent
        self.ids = ids
        self.end: int = (parent.end if parent else 0) + len(ids)
        self.cuts = cuts
        self.drafts = drafts
        self.span: Arrays | None = None
        self.moment: Arrays | None = None
        self.nbytes = 0
        self.reply = False
        self.stored: Stored | None = None
        self.priority = 0.0
        self.touched = 0.0
        self.users: weakref.WeakSet[object] = weakref.WeakSet()
        self._children: dict[int, list[Node]] = {}
        if parent:
            parent._children.setdefault(int(ids[0]), []).append(self)

    @property
    def start(self) -> int:
        """Tokens up to its parent."""
        return self.end - len(self.ids)

    @property
    def path(self) -> list[Node]:
        """From below the root to this node."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def children(self) -> list[Node]:
        """Boundaries that rows reached from here."""
        return [child for group in self._children.values() for child in group]

    @property
    def attached(self) -> bool:
        """Whether it is still part of its tree."""
        node = self
        while node.parent is not None:
            if not any(child is node for child in node.parent._children.get(int(node.ids[0]), ())):
                return False
            node = node.parent
        return True

    def hold(self, span: Arrays | None, moment: Arrays | None) -> None:
        """Have these arrays in memory, and no others."""
        self.span, self.moment = span, moment
        self.nbytes = nbytes(span) + nbytes(moment)

    def detach(self) -> None:
        """Leave the tree, with all that hangs on it."""
        assert self.parent is not None
        first = int(self.ids[0])
        group = self.parent._children[first]
        group.remove(self)
        if not group:
            del self.parent._children[first]

    def tokens(self) -> Ids:
        """All ids up to here."""
        return np.concatenate([node.ids for node in self.path]) if self.parent else self.ids

    def matching(self, ids: Ids) -> list[Node]:
        """Children whose tokens come next in `ids`."""
        if len(ids) <= self.end:
            return []
        group = self._children.get(int(ids[self.end]), ())
        return [child for child in group if np.array_equal(ids[self.end : child.end], child.ids)]


def longest(
    root: Node, ids: Sequence[int] | Ids, passable: Callable[[Node], bool], usable: Callable[[Node], bool]
) -> Node | None:
    """The usable node with most tokens, all of which begin `ids`; None if there is none.

    Args:
        passable: whether a node's span can be had; behind one that is not, none can be used.
        usable: whether a row could go on from a node whose path is passable.
    """
    ids = np.asarray(ids, dtype=np.int32)
    best: Node | None = None
    open_nodes = [root]
    while open_nodes:
        for child in filter(passable, open_nodes.pop().matching(ids)):
            open_nodes.append(child)
            if (best is None or child.end > best.end) and usable(child):
                best = child
    return best


def walk(root: Node) -> Iterator[Node]:
    """Every node below the root, parents before children."""
    waiting = [root]
    while waiting:
        children = waiting.pop().children
        yield from children
        waiting += children
