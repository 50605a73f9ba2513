"""Modes: how large the buffers of a row's keys and values are made. Knows lengths; no model and no bytes.

What a row emits does not hang on its mode: prompts are forwarded in the same chunks, and what is in a buffer is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..state import DOUBLED, Room

__all__ = ["TURBO_TOKENS", "EngineMode", "Plan", "RowMode", "plan"]

RowMode = Literal["turbo", "sustained"]
EngineMode = Literal["auto", "turbo", "sustained"]

TURBO_TOKENS = DOUBLED  # of the longest prompt for which `auto` takes turbo


@dataclass(frozen=True)
class Plan:
    """The mode of one row, how its buffers are made in it, and the entries of each at the most."""

    mode: RowMode
    room: Room
    entries: int


def plan(mode: EngineMode, prompt: int, tokens: int, *, beside: int, context: int) -> Plan:
    """How a row's buffers are made.

    Turbo: in powers of two. The graph of a forward is compiled once a size, so rows of any length meet graphs that rows
    before them had compiled; a buffer holds up to twice what its row needs by then, and is copied when that is too
    little. Sustained: once, as large as the row may ever need, and never copied.

    Args:
        prompt: its tokens. tokens: these and all that it may emit.
        beside: entries that may be written behind those, for the sake of rows beside it.
        context: most tokens of any row.
    """
    if mode == "turbo" or (mode == "auto" and prompt <= TURBO_TOKENS):
        room = Room(least=min(prompt + 1, tokens), doubling=True, most=context + beside)
        return Plan("turbo", room, room.entries(tokens + beside))
    room = Room(least=tokens + beside)
    return Plan("sustained", room, room.entries(0))
