"""What a server refuses for reasons of its own: places, time. Knows no wire format.

SelfdraftError
├── QueueFull  too many answers wait already
├── Loading    there is no model yet, or none any more
│   └── NoRoom what must give way to a model is in use
├── LoadFailed a model cannot be loaded
└── HttpError  turned away before any dialect saw it: host, origin, key, method, path
"""

from __future__ import annotations

from ..errors import SelfdraftError

__all__ = ["HttpError", "LoadFailed", "Loading", "NoRoom", "QueueFull"]


class QueueFull(SelfdraftError):
    """Too many answers wait. `retry_after` is the seconds until it is worth another try."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Loading(SelfdraftError):
    """No model is ready to answer. `retry_after` is the seconds until it is worth another try."""

    def __init__(self, message: str, *, retry_after: float = 2) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NoRoom(Loading):
    """A model could not be loaded because others, in use, have the memory, or the places."""


class LoadFailed(SelfdraftError):
    """A model cannot be loaded, for a reason that is the server's alone."""


class HttpError(SelfdraftError):
    """Turned away for what the HTTP request is. `status` is the HTTP status, `code` a short name."""

    def __init__(self, message: str, *, status: int, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
