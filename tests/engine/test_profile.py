"""Guards the profiling mode: it times every stage, says what it does to the total, and changes nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from selfdraft.engine import RULES, Engine, ProfiledCycle
from selfdraft.engine.cycle import Cycle
from tests.support.nano import SMALLER, nano_model
from tests.support.rows import finish, request

STAGES = ["head history", "draft", "verify", "accept", "commit", "host"]


@pytest.fixture(scope="module")
def model() -> Any:
    return nano_model(sharpness=3.0, **SMALLER)


def decode(model: Any, cycle: Cycle | None) -> list[list[int]]:
    engine = Engine(model, cycle=cycle)
    rows = [
        engine.add(request([1, 2, 3], depth=3, max_tokens=12, temperature=0.0)),
        engine.add(request([4, 5], depth=0, max_tokens=12, temperature=1.0, seed=1)),
        engine.add(request([6], depth=2, max_tokens=12, temperature=0.9, seed=2, top_k=5)),
    ]
    finish(engine)
    return [row.emitted for row in rows]


def test_profiling_does_not_change_the_tokens(model: Any) -> None:
    profiled = ProfiledCycle(model, RULES["block"])
    assert decode(model, profiled) == decode(model, None)
    assert profiled.cycles > 0
    assert list(profiled.seconds) == STAGES
    assert all(seconds > 0 for seconds in profiled.seconds.values()), profiled.seconds


def test_the_report_names_all_stages_and_warns(model: Any) -> None:
    profiled = ProfiledCycle(model, RULES["tokenwise"])
    decode(model, profiled)
    report = profiled.report()
    for stage in STAGES:
        assert f"  {stage} " in report
    assert "evaluation was forced at every stage border" in report
    assert "slower" in report
    shares = [float(line.rsplit(" ", 1)[1].removesuffix("%")) for line in report.splitlines()[1:]]
    assert sum(shares) == pytest.approx(100, abs=0.5)


def test_a_report_of_nothing_is_no_error(model: Any) -> None:
    assert "0.00 ms" in ProfiledCycle(model, RULES["block"]).report()


def test_no_time_is_lost_or_counted_twice(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that ticks once a reading. The head history is a part of drafting, and taken out of it."""
    ticks = itertools.count()
    monkeypatch.setattr("selfdraft.engine.profile.time.perf_counter", lambda: float(next(ticks)))
    profiled = ProfiledCycle(model, RULES["block"])
    engine = Engine(model, cycle=profiled)
    row = engine.add(request([1, 2, 3], depth=2, max_tokens=9, temperature=0.0))
    finish(engine)
    cycles = row.statistics.cycles
    drafting = cycles - row.statistics.emitted["plain"]
    assert 0 < drafting == profiled.cycles - row.statistics.emitted["plain"]
    assert profiled.seconds == {
        "head history": drafting,
        "draft": cycles + drafting,
        "verify": cycles,
        "accept": cycles,
        "commit": cycles,
        "host": 5 * cycles,  # the gaps between the stages
    }


def test_an_ordinary_cycle_evaluates_once(model: Any) -> None:
    """Nothing of the profiler is in it: one synchronisation a cycle, and no timings."""
    engine = Engine(model)
    row = engine.add(request([1, 2, 3], depth=3, max_tokens=12, temperature=0.0))
    finish(engine)
    assert type(engine.cycle) is Cycle
    assert engine.cycle.synchronisations == row.statistics.cycles
    assert not hasattr(engine.cycle, "seconds")
