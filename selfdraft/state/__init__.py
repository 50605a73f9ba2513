"""What a row remembers between cycles: attention KV, recurrent state, the head's committed history.

A row's state knows lengths and arrays; it knows nothing of tokens, sampling or text.
"""

from .captured import Captured, CapturedLayer
from .kv import DOUBLED, GROWTH, KeyValues, KeyValueShape, Room, attend, capacity
from .row import HeadOutputs, RecurrentState, RowState, StateShape, stacked

__all__ = [
    "DOUBLED",
    "GROWTH",
    "Captured",
    "CapturedLayer",
    "HeadOutputs",
    "KeyValueShape",
    "KeyValues",
    "RecurrentState",
    "Room",
    "RowState",
    "StateShape",
    "attend",
    "capacity",
    "stacked",
]
