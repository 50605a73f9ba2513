"""One archive and one thread that writes for all stores of a process on a folder. Knows neither from the inside."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .archive import Archive
from .writer import Writer

__all__ = ["Shared"]

Opened = tuple[Archive | None, Writer | None]


class Shared:
    """Opened by the first of several stores, closed by the last. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._opened: Opened = (None, None)

    def take(self, open: Callable[[], Opened]) -> Opened:
        """The archive and the thread; `open` makes them if nobody has them."""
        with self._lock:
            if not self._users:
                self._opened = open()
            self._users += 1
            return self._opened

    def give(self, timeout: float) -> None:
        """Write what was taken, for `timeout` seconds at most; the last one gives the folder back."""
        with self._lock:
            self._users -= 1
            _, writer = self._opened
            if writer is not None and self._users:
                writer.flush(timeout)
            elif writer is not None:
                writer.close(timeout)
