"""A time limit on Python code of strangers. Knows threads; nothing of what runs in them."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator

__all__ = ["DeadlineExceeded", "deadline"]


class DeadlineExceeded(BaseException):
    """Raised inside the code that took too long. No `Exception`, so that it cannot be swallowed there."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise DeadlineExceeded in this thread, at its next bytecode, if the body runs longer than `seconds`.

    A single call into C is not broken off.
    """
    thread, over, lock = threading.get_ident(), False, threading.Lock()

    def strike() -> None:
        with lock:
            if not over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(DeadlineExceeded))

    timer = threading.Timer(seconds, strike)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            over = True
        timer.cancel()
