"""What the index says, in memory: which records stand behind which, which blobs they share, which was used last."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from .index import Kept, Row

__all__ = ["Catalogue", "Entry"]


class Entry:
    """A record.

    Attributes:
        number: of its row; 0 until it has one.
        row: what it says.
        used: when it was last used, as a count.
        parent, children: the records it stands behind and before.
        there: whether it is on disk, and known.
    """

    def __init__(self, number: int, row: Row, used: int, parent: Entry | None) -> None:
        self.number = number
        self.row = row
        self.used = used
        self.parent = parent
        self.children: set[Entry] = set()
        self.there = number > 0

    @property
    def path(self) -> list[Entry]:
        """It, and all that it stands behind."""
        path = [self]
        while path[-1].parent:
            path.append(path[-1].parent)
        return path


class Catalogue:
    """Records by key. Not safe between threads by itself.

    Attributes:
        entries: by key, each behind its parent.
        references: how many records need a blob, by its name.
    """

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.references: Counter[str] = Counter()
        self._count = 0

    def fill(self, kept: Iterable[Kept], is_there: Callable[[Row], bool]) -> list[int]:
        """Take in rows whose blobs are there and whose parents are taken in.

        Returns:
            Numbers of the others.
        """
        waiting: dict[str | None, list[Kept]] = {}
        for each in kept:
            waiting.setdefault(each.row.parent, []).append(each)
        ready = waiting.pop(None, [])
        refused = []
        while ready:
            number, row, used = ready.pop()
            if row.key not in self.entries and self._fits(row) and is_there(row):
                self.add(row, number=number, used=used)
                ready += waiting.pop(row.key, [])
            else:
                refused.append(number)
        return refused + [each.number for group in waiting.values() for each in group]

    def add(self, row: Row, *, number: int = 0, used: int | None = None) -> Entry:
        """Take in a record; its parent must be there. It counts as used now, or when `used` says."""
        parent = self.entries[row.parent] if row.parent else None
        entry = Entry(number, row, 0, parent)
        self.entries[row.key] = entry
        self.references.update(row.blobs.keys())
        if parent:
            parent.children.add(entry)
        if used is None:
            self.touch(entry)
        else:
            entry.used = used
            self._count = max(self._count, used)
        return entry

    def touch(self, entry: Entry) -> None:
        """Count a record as used now. What it stands behind cannot leave before it anyway."""
        self._count += 1
        entry.used = self._count

    def drop(self, entry: Entry) -> list[Entry]:
        """Forget a record and all behind it.

        Returns:
            These; none if it was forgotten before.
        """
        if self.entries.get(entry.row.key) is not entry:
            return []
        if entry.parent:
            entry.parent.children.discard(entry)
        gone = [entry]
        for each in gone:
            gone += each.children
        for each in gone:
            del self.entries[each.row.key]
            self.references.subtract(each.row.blobs.keys())
            each.there = False
        self.references = +self.references
        return gone

    def clear(self) -> None:
        """Forget everything."""
        for entry in self.entries.values():
            entry.there = False
        self.entries = {}
        self.references = Counter()

    def oldest(
        self, nbytes: int, spared: Collection[Entry] = (), incoming: Mapping[str, int] | None = None
    ) -> tuple[list[Entry], bool]:
        """Records used longest ago that together free so many bytes, each after all that stand behind it.

        Scopes that hold more than an equal share of what all hold give first.

        Args:
            spared: records that must stay.
            incoming: bytes that are to come, by scope: they count as held.

        Returns:
            These, and whether they are enough: if not, they are all there are.
        """
        held = Counter(incoming or {})
        for entry in self.entries.values():
            held[entry.row.scope] += entry.row.nbytes + entry.row.in_index
        share = held.total() / max(1, len(held))
        behind = {entry: len(entry.children) for entry in self.entries.values()}
        queues: dict[str, list[tuple[int, str]]] = {}
        for entry, count in behind.items():
            if not count and entry not in spared:
                queues.setdefault(entry.row.scope, []).append((entry.used, entry.row.key))
        for queue in queues.values():
            heapq.heapify(queue)
        lost: Counter[str] = Counter()
        chosen: list[Entry] = []
        freed = 0
        while freed < nbytes and any(queues.values()):
            _, _, scope = min((held[scope] <= share, queue[0], scope) for scope, queue in queues.items() if queue)
            entry = self.entries[heapq.heappop(queues[scope])[1]]
            chosen.append(entry)
            lost.update(entry.row.blobs.keys())
            held[scope] -= entry.row.nbytes + entry.row.in_index
            freed += entry.row.in_index
            freed += sum(size for name, size in entry.row.blobs.items() if lost[name] == self.references[name])
            parent = entry.parent
            if parent is not None:
                behind[parent] -= 1
                if not behind[parent] and parent not in spared:
                    heapq.heappush(queues[scope], (parent.used, parent.row.key))
        return chosen, freed >= nbytes

    def _fits(self, row: Row) -> bool:
        """Whether its parent is of the same tokens' owner and the same model."""
        parent = self.entries[row.parent].row if row.parent else row
        return (parent.identity, parent.scope) == (row.identity, row.scope)
