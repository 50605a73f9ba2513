"""Which ids a text was made of. Clients send a conversation back as text, and a tokenizer may cut it otherwise than the
model wrote it; the ids that were committed are served again where their text is the same. Knows text and ids, no state.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence

__all__ = ["TEXT_BYTES", "Transcripts"]

TEXT_BYTES = 64 * 2**20  # of texts and their ids


class Transcripts:
    """Texts of conversations, special tokens written out, and their ids.

    Where room is short, the least recently used of the scope that holds most are forgotten.

    Any thread may call it.

    Args:
        limit: most bytes held, of all scopes together.
    """

    def __init__(self, limit: int = TEXT_BYTES) -> None:
        self._limit = limit
        self._held: Counter[str] = Counter()
        self._known: dict[str, OrderedDict[str, array[int]]] = {}
        self._lock = threading.Lock()

    def add(self, scope: str, text: str, ids: Sequence[int]) -> None:
        """Remember that `text` is `ids`. The last must be a special token: what follows it is cut apart by itself."""
        with self._lock:
            known = self._known.setdefault(scope, OrderedDict())
            if text in known:
                self._forget(scope, text)
            known[text] = array("i", ids)
            self._held[scope] += _size(text, known[text])
            while self._held.total() > self._limit:
                (largest, _), *_ = self._held.most_common(1)
                self._forget(largest, next(iter(self._known[largest])))

    def longest(self, scope: str, text: str) -> tuple[str, list[int]] | None:
        """The longest known text that begins `text`, and its ids; None if none does."""
        with self._lock:
            known = self._known.get(scope, OrderedDict())
            found = max((each for each in known if text.startswith(each)), key=len, default=None)
            if found is None:
                return None
            known.move_to_end(found)
            return found, known[found].tolist()

    def _forget(self, scope: str, text: str) -> None:
        self._held[scope] -= _size(text, self._known[scope].pop(text))


def _size(text: str, ids: array[int]) -> int:
    return sys.getsizeof(text) + sys.getsizeof(ids)
