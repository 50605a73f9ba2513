"""Guards the verdict of `tune` and what is kept of it.

A depth that is faster by less than the machine wobbles is not faster; and a record of another build, machine or version
must never steer a model. Runs are made up here; `tests/cli/test_tune.py` makes real ones.
"""

from __future__ import annotations

import json
import logging
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from selfdraft import tuned
from selfdraft.engine import DepthStart, Engine
from selfdraft.errors import SelfdraftError
from selfdraft.tuning import tune as tuning
from selfdraft.tuning.measure import Spread, Tally, decode
from selfdraft.tuning.tune import Candidate, Tuning, winner
from tests.support.nano import SMALLER, nano_model, write_checkpoint

WANTED: dict[str, Any] = {
    "machine": ["x"],
    "build": "b",
    "mlx": "1",
    "device": "cpu",
    "dtype": "float32",
    "kernels": [],
}
START = DepthStart(2, {0: 0.02, 1: 0.03, 2: 0.035}, [0.9, 0.8])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tuned, "records_folder", lambda: tmp_path / "kept" / "tuning")
    return tmp_path / "kept" / "tuning"


def candidate(depth: int, rates: Sequence[float]) -> Candidate:
    return Candidate(depth, [Tally(100, 100 / rate, 100 // (depth + 1), 0.1, [40], [30]) for rate in rates])


def test_quartiles() -> None:
    spread = Spread.of([1, 2, 3, 4, 100])
    assert (spread.low, spread.median, spread.high, spread.width) == (2, 3, 4, 2)
    assert Spread.of([7.0]) == Spread(7, 7, 7)


@pytest.mark.parametrize(
    ("plain", "drafting", "kept"),
    [
        ([40, 41, 42, 43], [50, 51, 52, 53], True),
        ([40, 41, 42, 43], [42, 42, 42, 42], False),  # faster by 0.5; plain decoding itself moves by 1.5
        ([41, 41, 41, 41], [30, 42, 44, 60], False),  # faster by 2, but now and then slower
        ([40, 41, 42, 43], [30, 31, 32, 33], False),
        ([41, 41, 41, 41], [41, 41, 41, 41], False),  # no spread, no gain
    ],
)
def test_a_depth_is_kept_only_if_it_wins_by_more_than_the_spread(
    plain: list[float], drafting: list[float], kept: bool
) -> None:
    candidates = [candidate(0, plain), candidate(1, drafting)]
    assert winner(candidates).depth == int(kept)
    done = Tuning("m", WANTED, 64, candidates)
    assert ("no depth beats" in done.verdict) is not kept
    assert done.report()["candidates"][1]["beats_plain"] is kept


def test_of_those_that_win_the_fastest_is_taken_not_one_that_wobbles() -> None:
    plain = candidate(0, [40, 40, 40, 40])
    steady, faster, wild = candidate(1, [50] * 4), candidate(2, [55] * 4), candidate(3, [20, 60, 60, 130])
    assert winner([plain, steady, faster, wild]).depth == 2


def test_what_auto_begins_with() -> None:
    start = Tuning("m", WANTED, 64, [candidate(0, [40] * 4), candidate(1, [50, 50, 50, 45])]).start
    assert start.depth == 1
    assert start.seconds == pytest.approx(
        {0: 1 / 40, 1: 2 / 50}
    )  # of a cycle, not of a token; one slow round is no harm
    assert start.acceptance == [0.75]


def test_tallies_add_position_by_position() -> None:
    total = Tally(1, 1.0, 1, 0.5, [3, 2], [2, 1]) + Tally(2, 1.0, 1, 0.5, [1], [1])
    assert (total.tried, total.accepted, total.rate, total.prompt_seconds) == ([4, 2], [3, 1], 1.5, 1.0)


def test_decoding_is_counted_without_the_token_of_the_prefill() -> None:
    total = decode(Engine(nano_model(**SMALLER)), [[1, 2], [3]], 2, 9)
    assert total.tokens == 16
    assert total.seconds > 0
    assert total.prompt_seconds > 0
    assert len(total.tried) == 2
    assert decode(Engine(nano_model(**SMALLER)), [[1, 2]], 0, 9).cycles == 8


def rounds_of(monkeypatch: pytest.MonkeyPatch, rounds: int) -> list[int]:
    asked: list[int] = []

    def ask(job: dict[str, Any]) -> dict[str, Any]:
        asked.append(job["depth"])
        return {"tokens": 10, "seconds": 1.0, "cycles": 5, "prompt_seconds": 0.1, "tried": [5], "accepted": [4]}

    monkeypatch.setattr(tuning, "_ask", ask)
    found = {"belongs_to": WANTED, "max_depth": 2, "notes": []}
    tuning.tune("m", found, max_depth=8, rounds=rounds, tokens=8, pause=0)
    return asked


def test_rounds_alternate_and_the_heads_limit_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that warms up, or cools down, favours nobody."""
    assert rounds_of(monkeypatch, 3) == [0, 1, 2, 2, 1, 0, 0, 1, 2]


def test_nothing_to_tune_without_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_ask", lambda job: {"belongs_to": {}, "max_depth": 0, "notes": ["it has none"]})
    with pytest.raises(SelfdraftError, match=r"nothing to tune in m: .*it has none"):
        tuning.describe("m")


def test_a_run_that_dies_is_said_and_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning.sys, "executable", shutil.which("false"))
    with pytest.raises(SelfdraftError, match="measuring depth 3 failed \\(exit code 1\\): it said nothing"):
        tuning._ask({"depth": 3})


def test_a_run_ends_with_whoever_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the asking process only: the other must not go on decoding."""
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def communicate(self, *args: Any, **kwargs: Any) -> Any:
            started.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(tuning.subprocess, "Popen", Interrupted)
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 20\n")
    sleeper.chmod(0o700)
    monkeypatch.setattr(tuning.sys, "executable", str(sleeper))
    with pytest.raises(KeyboardInterrupt):
        tuning._ask({"depth": 0})
    assert started[0].wait(30) == -signal.SIGKILL


def test_a_record_comes_back(folder: Path) -> None:
    path = tuned.store(WANTED, START, report={"rounds": 4})
    assert path.parent == folder
    assert tuned.find(WANTED) == START
    assert json.loads(path.read_text())["report"] == {"rounds": 4}
    tuned.store(WANTED, DepthStart(0, START.seconds, START.acceptance))
    found = tuned.find(WANTED)
    assert found is not None
    assert found.depth == 0
    assert len(list(folder.iterdir())) == 1  # in its place, and nothing half written beside it


@pytest.mark.parametrize("name", WANTED)
def test_a_record_of_something_else_is_not_found(name: str) -> None:
    tuned.store(WANTED, START)
    assert tuned.find({**WANTED, name: "other"}) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text[:50],
        lambda text: "[]",
        lambda text: text.replace('"schema_version": 1', '"schema_version": 2'),
        lambda text: text.replace('"build": "b"', '"build": "c"'),
        lambda text: text.replace("0.03,", "-0.03,"),
        lambda text: text.replace("0.03,", '"fast",'),
        lambda text: text.replace("0.03,", "NaN,"),
        lambda text: text.replace("0.8", "1.8"),
        lambda text: text.replace('"depth": 2', '"depth": 7'),
        lambda text: text.replace('"depth": 2', '"depth": [2]'),
        lambda text: text.replace('"0": 0.02,', ""),
        lambda text: text.replace('"seconds"', '"minutes"'),
    ],
)
def test_a_record_that_cannot_be_used_is_ignored_with_a_line(change: Any, caplog: pytest.LogCaptureFixture) -> None:
    path = tuned.store(WANTED, START)
    changed = change(path.read_text())
    assert changed != path.read_text()
    path.write_text(changed)
    with caplog.at_level(logging.WARNING):
        assert tuned.find(WANTED) is None
    assert path.name in caplog.text


def test_a_folder_that_cannot_be_written_is_said(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("a file")
    with pytest.raises(SelfdraftError, match="nothing is kept"):
        tuned.store(WANTED, START)
    assert tuned.find(WANTED) is None


def test_builds_are_told_apart(tmp_path: Path) -> None:
    """Also two trainings of one shape, whose files have equal names, sizes and headers."""
    one = write_checkpoint(tmp_path / "one", nano_model(0))
    other = write_checkpoint(tmp_path / "other", nano_model(1))
    assert tuned.build_print(one) != tuned.build_print(other)
    copied = shutil.copytree(one, tmp_path / "copy")
    assert tuned.build_print(one) == tuned.build_print(copied)
    (copied / "config.json").write_text(json.dumps({"model_type": "other"}))
    assert tuned.build_print(one) != tuned.build_print(copied)


def test_the_samples_reach_the_end_of_a_large_file(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "one", nano_model(0))
    mx.save_safetensors(str(folder / "more.safetensors"), {"x": mx.zeros((1 << 20,))})
    before = tuned.build_print(folder)
    with (folder / "more.safetensors").open("r+b") as file:
        file.seek(-100, 2)
        file.write(b"x")
    assert tuned.build_print(folder) != before


def test_forgetting_leaves_other_builds_alone(tmp_path: Path, folder: Path) -> None:
    one = write_checkpoint(tmp_path / "one", nano_model(0))
    build = tuned.build_print(one)
    tuned.store({**WANTED, "build": build}, START)
    tuned.store({**WANTED, "build": build, "mlx": "2"}, START)
    tuned.store(WANTED, START)
    (folder / "strange.json").write_text("{")
    assert tuned.forget(one) == 2
    assert tuned.forget(one) == 0
    assert tuned.find(WANTED) == START
    assert (folder / "strange.json").exists()
