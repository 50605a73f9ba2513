"""Memory budgets of a given size, whatever this machine has."""

from __future__ import annotations

import math
from typing import Any

from selfdraft.budget import MemoryBudget
from selfdraft.memory import Allowance

__all__ = ["budget_of"]


def budget_of(engine: Any, total: int, *, limited: bool = True) -> MemoryBudget:
    """One that leaves exactly `total` bytes beside weights of 5 bytes."""
    budget = MemoryBudget(engine, Allowance(5, 5 + math.ceil(total / 0.9), limited))
    assert budget.total == total
    return budget
