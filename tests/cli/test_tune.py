"""`selfdraft tune`: what it says and keeps, and that what it keeps is where `depth=auto` begins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import selfdraft.loading
from selfdraft import SamplingParams, tuned
from selfdraft.engine import DepthStart
from selfdraft.llm import LLM
from selfdraft.tuning import tune as tuning
from selfdraft.tuning.measure import Tally

from .conftest import COMMAND, Command

RATES = {0: 40.0, 1: 50.0, 2: 45.0}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tuned, "records_folder", lambda: tmp_path / "tuning")
    return tmp_path / "tuning"


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Runs that are made up, at rates a test may change."""
    rates = dict(RATES)

    def ask(job: dict[str, Any]) -> dict[str, Any]:
        if not job["tokens"]:
            return {"belongs_to": {"build": "b"}, "max_depth": 2, "notes": []}
        depth = job["depth"]
        drafts = {"tried": [50] * depth, "accepted": [40] * depth}
        return {
            "tokens": 100,
            "seconds": 100 / rates[depth],
            "cycles": 100 // (depth + 1),
            "prompt_seconds": 0,
            **drafts,
        }

    monkeypatch.setattr(tuning, "_ask", ask)
    return rates


def test_says_which_depth_pays_and_keeps_it(light: Command, folder: Path, answered: dict[int, float]) -> None:
    ended = light("tune", "--pause", "0", "--rounds", "3")
    assert ended.code == 0
    assert "depth 1 decodes 1.25 times as fast" in ended.out
    (kept,) = folder.iterdir()
    assert str(kept) in ended.err
    found = tuned.find({"build": "b"})
    assert found is not None
    assert (found.depth, found.acceptance) == (1, [0.8, 0.8])


def test_says_so_when_none_pays(light: Command, folder: Path, answered: dict[int, float]) -> None:
    answered.update({1: 39.0, 2: 20.0})
    ended = light("tune", "--pause", "0", "--json")
    assert ended.code == 0
    report = json.loads(ended.out)
    assert (report["chosen"], report["schema_version"], report["rounds"]) == (0, 1, 4)
    assert "no depth beats plain decoding" in report["verdict"]
    assert [row["tokens_per_second"]["median"] for row in report["candidates"]] == [40, 39, 20]
    assert Path(report["stored"]).parent == folder
    found = tuned.find({"build": "b"})
    assert found is not None
    assert found.depth == 0


def test_the_limit_of_depths(light: Command, folder: Path, answered: dict[int, float]) -> None:
    report = json.loads(light("tune", "--pause", "0", "--max-depth", "1", "--json").out)
    assert [row["depth"] for row in report["candidates"]] == [0, 1]


def test_figures_are_shown_even_if_they_cannot_be_kept(
    light: Command, folder: Path, answered: dict[int, float]
) -> None:
    folder.write_text("a file, not a folder")
    ended = light("tune", "--pause", "0")
    assert ended.code == 1
    assert "depth 1 decodes 1.25" in ended.out
    assert "nothing is kept" in ended.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--rounds", "2"),
        ("--max-depth", "0"),
        ("--tokens", "7"),
        ("--pause", "-1"),
        ("--pause", "nan"),
        ("--rounds", "many"),
    ],
)
def test_wrong_usage_starts_nothing(light: Command, answered: dict[int, float], arguments: tuple[str, str]) -> None:
    ended = light("tune", *arguments)
    assert ended.code == 2
    assert arguments[0] in ended.err


def test_a_wrong_name_is_said_at_once(light: Command) -> None:
    ended = light("tune", "/no/such/model")
    assert ended.code == 1
    assert "no model '/no/such/model'" in ended.err


def test_forgetting(light: Command, folder: Path, llm: LLM) -> None:
    belongs = tuned.belongs_to(llm.checkpoint.folder, llm.describe())
    tuned.store(belongs, DepthStart(1, {0: 1.0, 1: 1.0}, [0.5]))
    assert light("tune", "--forget").out == "1 record deleted\n"
    assert json.loads(light("tune", "--forget", "--json").out) == {"schema_version": 1, "forgotten": 0}


def test_auto_begins_with_what_is_kept(folder: Path, llm: LLM) -> None:
    """Without a record it begins at the deepest, 8, and probes; with this one it drafts one token, and no more."""
    belongs = tuned.belongs_to(llm.checkpoint.folder, llm.describe())
    tuned.store(belongs, DepthStart(1, {0: 1e-3, 1: 1e-3, 2: 10.0}, [1.0, 0.0]))
    params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, cache_prompt=False)
    begun = selfdraft.loading.load("reference").generate("What is the capital of Japan?", params)
    assert len(begun.timings.drafts_tried) == 1
    tuned.forget(llm.checkpoint.folder)
    without = selfdraft.loading.load("reference").generate("What is the capital of Japan?", params)
    assert len(without.timings.drafts_tried) == 8
    assert begun.text == without.text


def test_a_run_in_a_process_of_its_own(llm: LLM) -> None:
    """What it measures belongs to what this process would load: else no record were ever found again."""
    found = tuning.describe("reference")
    assert found["belongs_to"] == tuned.belongs_to(llm.checkpoint.folder, llm.describe())
    assert found["max_depth"] == llm.max_depth
    run = Tally(**tuning._ask({"model": "reference", "depth": 1, "tokens": 9}))
    assert run.tokens == 4 * 8
    assert run.cycles == run.tokens - run.accepted[0]
    assert run.seconds > 0


def test_ctrl_c_leaves_nothing(environment: dict[str, str], tmp_path: Path) -> None:
    environment["XDG_DATA_HOME"] = str(tmp_path / "data")
    process = subprocess.Popen(
        [*COMMAND, "tune", "--pause", "0"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    time.sleep(4)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err) == (b"", b"")
    assert not (tmp_path / "data").exists()


def test_a_worker_says_what_is_wrong_with_a_model(environment: dict[str, str], tmp_path: Path) -> None:
    job = json.dumps({"model": str(tmp_path), "depth": 0, "tokens": 0})
    worker = [sys.executable, "-m", "selfdraft.tuning.worker", job]
    done = subprocess.run(worker, capture_output=True, env={**os.environ, **environment}, check=False)
    assert done.returncode == 1
    assert "config.json" in json.loads(done.stdout)["error"]
