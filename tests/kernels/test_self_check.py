"""Guards which kernels are used: none that differs, breaks, or is slower than what it replaces."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
import pytest

from selfdraft.kernels import self_check
from selfdraft.kernels.self_check import SelfCheck, relative_error, self_checks, speed_over


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "backend", lambda: "cuda")
    monkeypatch.setattr(self_check, "_CHECKS", [])


def fails() -> float:
    raise RuntimeError("no such instruction")


@pytest.mark.parametrize(
    ("error", "gain", "reason"),
    [
        (lambda: 0.01, None, None),
        (lambda: 0.01, lambda: 1.3, None),
        (lambda: 0.02, None, "differs from its reference by 0.02, more than 0.01"),
        (lambda: math.nan, None, "differs"),
        (fails, None, "cannot be run here: no such instruction"),
        (lambda: 0.0, lambda: 0.8, "0.80 times as fast"),
        (lambda: 0.0, fails, "cannot be run here"),
        (lambda: 1.0, lambda: 9.0, "differs"),
    ],
)
def test_a_verdict(error: Callable[[], float], gain: Callable[[], float] | None, reason: str | None) -> None:
    check = SelfCheck("kernel", error, 0.01, gain)
    assert check.passed == (reason is None)
    assert reason is None or reason in (check.reason or "")
    assert self_checks() == [check]


def test_one_slow_measurement_does_not_leave_a_kernel_out() -> None:
    gains = iter([0.9, 0.8, 1.2, 0.9, 0.97, 0.95])
    assert SelfCheck("kernel", lambda: 0.0, 0.01, lambda: next(gains)).passed
    check = SelfCheck("kernel", lambda: 0.0, 0.01, lambda: next(gains))
    assert not check.passed
    assert "0.97 times as fast" in (check.reason or "")


def test_a_check_runs_once_and_not_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    check = SelfCheck("kernel", lambda: float(runs.append(1) or 0), 0.1)
    monkeypatch.setattr(self_check, "backend", lambda: None)
    assert not check.passed
    assert not runs
    monkeypatch.setattr(self_check, "backend", lambda: "metal")
    assert check.passed
    assert check.passed
    assert len(runs) == 1


def test_errors_are_relative_and_nan_stays() -> None:
    reference = mx.array([1.0, -4.0, 2.0])
    assert relative_error(mx.array([1.0, -4.0, 2.5]), reference) == 0.125
    assert math.isnan(relative_error(mx.array([1.0, math.nan, 2.0]), reference))


def test_speed_is_the_time_of_the_other_over_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(self_check.time, "perf_counter", lambda: clock[0])

    def taking(seconds: float) -> Callable[[], list[mx.array]]:
        def run() -> list[mx.array]:
            clock[0] += seconds
            return []

        return run

    assert speed_over(taking(3.0), taking(2.0)) == pytest.approx(1.5)
