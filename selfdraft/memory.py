"""How much memory there is, is free and is used; and MLX's own limits. Imports MLX; knows no model."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import psutil

from .errors import OutOfMemoryBudget

__all__ = ["Allowance", "Holdings", "device_memory", "free_memory", "gibibytes", "release_buffers", "used_memory"]

_MOST = 2**60  # bytes: more than any machine has


class Holdings(NamedTuple):
    """Bytes that models hold, or have promised: weights, rows as long as they may become, warm prefixes."""

    weights: int = 0
    rows: int = 0
    prefixes: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


@dataclass(frozen=True)
class Allowance:
    """What the models of this process may use: weights, rows, warm prefixes and MLX's buffers together.

    Attributes:
        weights: bytes of this model's weights.
        total: bytes at the most, of all models.
        limited: whether the user named them, or they are what was free.
        beside: bytes of it that other models held when this one was loaded.
    """

    weights: int
    total: int
    limited: bool
    beside: int = 0

    @classmethod
    def of(cls, weights: int, limit: int | None, beside: int = 0) -> Allowance:
        """What a model is granted, before its weights are read.

        Args:
            weights: bytes that they will take.
            limit: bytes of the user's; None grants what is free now, beside what models hold already.
            beside: bytes that other models hold.

        Raises:
            OutOfMemoryBudget: the weights alone are more than that leaves.
        """
        total = free_memory() + beside if limit is None else limit
        if weights >= total - beside:
            needed = f"the weights need {gibibytes(weights)}"
            if beside:
                needed += f" beside the {gibibytes(beside)} of other models"
            if limit is not None:
                raise OutOfMemoryBudget(
                    f"{needed}, and memory_limit is {gibibytes(limit)} for weights and answers together: raise it, or "
                    "take a smaller or a quantised model"
                )
            raise OutOfMemoryBudget(
                f"{needed}, and {gibibytes(total - beside)} of {gibibytes(device_memory())} are free: close other "
                "programs, take a smaller or a quantised model, or set memory_limit to load it all the same",
                later=True,
            )
        return cls(weights, total, limit is not None, beside)

    @property
    def warning(self) -> str:
        """What a user should know of the limit; empty if nothing."""
        most = device_memory()
        if not self.limited or self.total <= most:
            return ""
        return (
            f"memory_limit {gibibytes(self.total)} is more than the {gibibytes(most)} that this device has: it is "
            "obeyed, and the system may swap, or end the process"
        )

    def enforce(self) -> None:
        """Have MLX keep to it, beside what it holds already: it lets go of spare buffers before it takes more memory.

        On Metal the weights stay resident as well, as far as the system lets them.
        """
        own = _own_limits()
        total = min(self.total - self.beside + mx.get_active_memory(), _MOST)
        mx.set_memory_limit(total if self.limited else min(total, own.memory))
        mx.set_cache_limit(min(self.total - self.beside - self.weights, own.cache))
        if mx.metal.is_available():
            most = int(mx.device_info().get("max_recommended_working_set_size", 0))
            mx.set_wired_limit(min(total, most))


class _Limits(NamedTuple):
    memory: int
    cache: int


@functools.cache
def _own_limits() -> _Limits:
    """MLX's limits before any model changed them. It tells one only when that is set."""
    limits = _Limits(mx.set_memory_limit(_MOST), mx.set_cache_limit(_MOST))
    mx.set_memory_limit(limits.memory)
    mx.set_cache_limit(limits.cache)
    return limits


def device_memory() -> int:
    """Bytes that the default device has at all: on Metal those that the system lets a program use."""
    if mx.default_device() == mx.gpu:
        info = mx.device_info()
        for name in ("max_recommended_working_set_size", "memory_size", "total_memory"):
            if most := int(info.get(name, 0)):
                return most
    return int(psutil.virtual_memory().total)


def free_memory() -> int:
    """Bytes the default device could still give."""
    if mx.default_device() == mx.gpu:
        free = mx.device_info().get("free_memory")  # CUDA: of the whole device, whoever uses it
        if free is not None:
            return int(free) + mx.get_cache_memory()
        return max(device_memory() - mx.get_active_memory(), 0)
    return int(psutil.virtual_memory().available) + mx.get_cache_memory()


def used_memory() -> dict[str, int]:
    """Bytes by kind: of this process, of MLX's arrays, and of buffers that MLX keeps for its next arrays."""
    return {
        "resident": int(psutil.Process().memory_info().rss),
        "arrays": mx.get_active_memory(),
        "array_cache": mx.get_cache_memory(),
    }


def release_buffers() -> int:
    """Give back the buffers that MLX keeps for its next arrays.

    Returns:
        Bytes that this set free.
    """
    before = mx.get_cache_memory()
    mx.clear_cache()
    return before - mx.get_cache_memory()


def gibibytes(count: float) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.2f} GiB"
