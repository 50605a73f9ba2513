"""Which ids a text was made of. Clients send a conversation back as text, and a tokenizer may cut it otherwise than the
model wrote it; the ids that were committed are served again where their text is the same. Knows text and ids, no state.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["Transcripts"]


class Transcripts:
    """Texts of conversations, special tokens written out, and their ids; the least recently used are forgotten.

    Any thread may call it.

    Args:
        characters: most characters of text held, of all scopes together.
    """

    def __init__(self, characters: int = 64 * 2**20) -> None:
        self._most = characters
        self._held = 0
        self._known: OrderedDict[tuple[str, str], list[int]] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, scope: str, text: str, ids: Sequence[int]) -> None:
        """Remember that `text` is `ids`. The last must be a special token: what follows it is cut apart by itself."""
        with self._lock:
            if (scope, text) not in self._known:
                self._held += len(text)
            self._known[scope, text] = list(ids)
            self._known.move_to_end((scope, text))
            while self._held > self._most:
                (_, dropped), _ = self._known.popitem(last=False)
                self._held -= len(dropped)

    def longest(self, scope: str, text: str) -> tuple[str, list[int]] | None:
        """The longest known text that begins `text`, and its ids; None if none does."""
        with self._lock:
            known = [each for owner, each in self._known if owner == scope and text.startswith(each)]
            if not known:
                return None
            found = max(known, key=len)
            self._known.move_to_end((scope, found))
            return found, self._known[scope, found]
