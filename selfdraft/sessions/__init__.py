"""Exact warm prefixes: what was forwarded once for some tokens is not forwarded again for these.

`SessionBank` holds boundaries in a tree over token ids, in memory and on disk; `PromptSession` is what one request sees
of it. Knows nothing of text, templates or HTTP. They import MLX, and the command line looks after the disk without it,
so nothing is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bank import SessionBank
    from .payload import Payload
    from .prompt_session import PromptSession
    from .transcripts import Transcripts

__all__ = ["Payload", "PromptSession", "SessionBank", "Transcripts"]

_MODULES = {
    "Payload": ".payload",
    "PromptSession": ".prompt_session",
    "SessionBank": ".bank",
    "Transcripts": ".transcripts",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
