"""How much a request may hold, and the check of a parsed body against it. Knows no dialect."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sized
from typing import Any

from ...errors import InvalidRequest

__all__ = ["RequestTooLarge", "at_most", "check_depth"]

MAX_BODY_DEPTH = 100
MAX_MESSAGES = 2048
MAX_PARTS = 2048  # of one message
MAX_TOOLS = 256
MAX_TOOL_CALLS = 256  # of one message
MAX_SCHEMA_DEPTH = 64
MAX_NAME = 128
MAX_STOPS = 16
MAX_N = 8
MAX_PROMPTS = 128
MAX_INPUTS = 2048  # to embed
MAX_DOCUMENTS = 2048  # to score
MAX_READ_TOKENS = 300_000  # of all inputs, or of all documents
MAX_LOGIT_BIAS = 1024
MAX_METADATA = 64
MAX_DEPTH = 64  # of drafting
MAX_COUNT = 2**31 - 1  # any count of tokens


class RequestTooLarge(InvalidRequest):
    """The request holds more of something than is accepted."""


def at_most(value: Sized | None, most: int, param: str, what: str) -> None:
    """Refuse a list that is longer than allowed.

    Raises:
        RequestTooLarge: it is; the message has both figures.
    """
    if value is not None and len(value) > most:
        raise RequestTooLarge(f"{param} holds {len(value)} {what}; at most {most} are accepted", param=param)


def check_depth(value: Any, most: int, param: str | None) -> None:
    """Refuse JSON that is nested too deeply or holds a number that is none (1e999 parses as infinity).

    Raises:
        RequestTooLarge: nested deeper than `most`. InvalidRequest: an infinite number.
    """
    level, depth = [value], 0
    while level:
        below: list[Any] = []
        for entry in level:
            if isinstance(entry, Mapping):
                below.extend(entry.values())
            elif isinstance(entry, list):
                below.extend(entry)
            elif isinstance(entry, float) and not math.isfinite(entry):
                raise InvalidRequest(f"{param or 'the body'} holds a number out of range: {entry}", param=param)
        level, depth = below, depth + 1
        if depth > most + 1:  # the innermost level is that of the scalars
            raise RequestTooLarge(f"{param or 'the body'} is nested deeper than {most} levels", param=param)
