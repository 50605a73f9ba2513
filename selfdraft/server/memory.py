"""Whether a request's memory is there, asked before its prompt is forwarded. Knows sizes; nothing of queues."""

from __future__ import annotations

import mlx.core as mx
import psutil

from ..engine import Request
from ..models.loader import LoadedModel
from .errors import OutOfMemoryBudget

__all__ = ["MemoryBudget"]

_SPARE = 0.9  # share of what is free that may be promised
_GIB = 2**30


class MemoryBudget:
    """What rows may use beside the weights.

    Args:
        loaded: the model, its weights in memory already.
        limit: bytes for rows; None takes 90% of what is free now.
    """

    def __init__(self, loaded: LoadedModel, limit: int | None = None) -> None:
        self._model = loaded.model
        self.total = limit if limit is not None else int(_SPARE * free_memory())
        self._limited = limit is not None

    def need(self, request: Request) -> int:
        """Bytes a request may come to hold: prompt and all tokens it may emit."""
        assert request.params.max_tokens is not None
        tokens = min(len(request.prompt) + request.params.max_tokens, self._model.context_length)
        return self._model.row_bytes(tokens)

    def fits(self, needed: int) -> bool:
        """Whether rows that need this much together fit."""
        return needed <= self.total

    def check(self, request: Request) -> int:
        """Bytes a request needs.

        Raises:
            OutOfMemoryBudget: more than there is: 413 if it never fits, 507 if it does not now.
        """
        need = self.need(request)
        figures = (
            f"{len(request.prompt)} prompt tokens and up to {request.params.max_tokens} more need "
            f"{need / _GIB:.2f} GiB beside the weights"
        )
        if not self.fits(need):
            raise OutOfMemoryBudget(
                f"{figures}, and rows may use {self.total / _GIB:.2f} GiB: shorten the prompt or lower max_tokens",
                status=413,
            )
        if not self._limited and need > (free := free_memory()):
            raise OutOfMemoryBudget(
                f"{figures}, and {free / _GIB:.2f} GiB are free now: close other programs or try again later",
                status=507,
            )
        return need


def free_memory() -> int:
    """Bytes the default device could still give."""
    if mx.default_device() == mx.gpu:
        info = mx.device_info()
        most = info.get("max_recommended_working_set_size") or info.get("memory_size")
        if most:
            return max(int(most) - mx.get_active_memory(), 0)
    return int(psutil.virtual_memory().available) + mx.get_cache_memory()
