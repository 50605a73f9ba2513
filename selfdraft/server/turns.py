"""The device, for one at a time, in the order in which they ask. Knows nothing of what they do with it."""

from __future__ import annotations

import threading

__all__ = ["Turns"]


class Turns:
    """A lock whose holder goes to the end of the queue, as `threading.Lock` does not promise: engines take a step each.

    With steps in turn, the working memory of two models is never needed at once either.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = 0
        self._now = 0

    def __enter__(self) -> None:
        with self._changed:
            mine, self._next = self._next, self._next + 1
            self._changed.wait_for(lambda: self._now == mine)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._now += 1
            self._changed.notify_all()
