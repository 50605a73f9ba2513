"""Leaving a thread that used MLX. Knows nothing of rows."""

from __future__ import annotations

import threading

import mlx.core as mx

__all__ = ["leave_tidily"]

_local = threading.local()


class _AtThreadEnd:
    """Goes with its thread's locals, while the thread still runs Python."""

    def __del__(self) -> None:
        mx.clear_streams()


def leave_tidily() -> None:
    """Have this thread give its MLX streams back when it ends.

    MLX keeps streams and compiled functions per thread. Left to the thread's own teardown, their destructors want
    Python when it may be gone already, and the process aborts at exit after all its work is done (ml-explore/mlx
    issues 4110 and 4506).
    """
    if not hasattr(_local, "guard") and threading.current_thread() is not threading.main_thread():
        _local.guard = _AtThreadEnd()
