"""Whether a kernel is used on this device: it is run against its reference, and against what MLX has. Knows no kernel.

A kernel that is wrong, does not compile, or is slower than what it replaces is left out; decoding goes on without it.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from .portable import backend

__all__ = ["SelfCheck", "relative_error", "self_checks", "speed_over", "used_kernels"]

log = logging.getLogger(__name__)

_CHECKS: list[SelfCheck] = []


@dataclass
class SelfCheck:
    """A kernel's test on the user's device.

    Attributes:
        name: of the kernel.
        error: runs kernel and reference; returns the largest difference relative to the reference's largest value.
        most: the largest that passes.
        gain: measures how many times faster it is than what it replaces; None if that needs no measurement.
        reason: why it is left out, once it was run and failed; else None.
        found_error, found_gain: what the run measured; None for what it did not come to.
    """

    name: str
    error: Callable[[], float]
    most: float
    gain: Callable[[], float] | None = None
    reason: str | None = field(default=None, init=False)
    found_error: float | None = field(default=None, init=False)
    found_gain: float | None = field(default=None, init=False)
    _passed: bool | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        _CHECKS.append(self)

    @property
    def passed(self) -> bool:
        """Whether the kernel may be used here; False where there is no GPU. The first look runs the check."""
        if backend() is None:
            return False
        if self._passed is None:
            self._passed = self._run()
        return self._passed

    @property
    def slower(self) -> bool:
        """Whether it is left out for that alone: it is right."""
        return self.found_gain is not None and self.found_gain < 1

    def _run(self) -> bool:
        try:
            error = self.found_error = self.error()
            gain = self._gain() if error <= self.most else 1.0
        except Exception as failure:  # whatever a compiler or a driver may say
            self.reason = f"it cannot be run here: {failure}"
        else:
            if not error <= self.most:  # as NaN is not
                self.reason = f"it differs from its reference by {error:.2g}, more than {self.most:.2g}"
            elif gain < 1:
                log.info("kernel %s is left out: it is %.2f times as fast as MLX's own", self.name, gain)
                self.reason = f"it is {gain:.2f} times as fast as MLX's own"
                return False
            else:
                return True
        log.warning("kernel %s is left out: %s", self.name, self.reason)
        return False

    def _gain(self) -> float:
        """The best of three measurements, if the first is a loss: whatever else the machine does only slows it down."""
        if self.gain is None:
            return 1.0
        gain = self.gain()
        for _ in range(2):
            if gain < 1:
                gain = max(gain, self.gain())
        self.found_gain = gain
        return gain


def self_checks() -> list[SelfCheck]:
    """The checks of all kernels that were imported."""
    return list(_CHECKS)


def used_kernels() -> list[str]:
    """Names of the kernels that are used on this device."""
    return [check.name for check in _CHECKS if check.passed]


def speed_over(stock: Callable[[], list[mx.array]], kernel: Callable[[], list[mx.array]], rounds: int = 7) -> float:
    """Time of the one over that of the other: medians of some rounds in turn, after one that does not count."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + 1):
        for ours in (True, False):
            begin = time.perf_counter()
            mx.eval(kernel() if ours else stock())
            if number:
                times[ours].append(time.perf_counter() - begin)
    return statistics.median(times[False]) / statistics.median(times[True])


def relative_error(found: mx.array, reference: mx.array) -> float:
    """Largest difference over the largest value of the reference, in fp32; NaN if anything is."""
    found, reference = found.astype(mx.float32), reference.astype(mx.float32)
    worst: Any = (mx.abs(found - reference).max() / mx.abs(reference).max()).item()
    return float(worst)
