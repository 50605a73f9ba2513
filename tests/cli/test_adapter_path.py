"""Guards --adapter-path: which commands take it, what they say of it, and how they refuse one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import selfdraft.loading
from selfdraft.cli import start as starting
from selfdraft.server import instance
from selfdraft.tuning import bench as benching
from selfdraft.tuning import tune as tuning
from tests.support.adapters import random_updates, save_mlx_lm, save_peft

from .conftest import Command
from .test_bench import SMALL

REAL_LOAD = selfdraft.loading.load


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """For the bundled model under mlx-lm's names, strong enough to change what it says."""
    names = [f"language_model.model.layers.{layer}.mlp.up_proj.weight" for layer in range(8)]
    updates = random_updates({name: np.full((1024, 384), 0.1, np.float32) for name in names})
    strong = {"rank": 4, "scale": 60.0, "dropout": 0.0}
    return save_mlx_lm(tmp_path / "pirate", updates, model="reference", lora_parameters=strong)


def test_inspect_says_what_it_changes(light: Command, adapter: Path) -> None:
    ended = light("inspect", "--adapter-path", str(adapter))
    assert ended.code == 0
    assert "pirate: LoRA of rank 4 in mlx-lm's format; changed: 8 dense, 0 quantised" in ended.out
    report = json.loads(light("inspect", "--json", "--adapter-path", str(adapter)).out)
    assert (report["adapter"]["layers"], report["adapter"]["fused"], report["adapter"]["beside"]) == (8, 8, 0)
    assert "selfdraft bench --adapter-path" in report["notes"][-1]
    assert json.loads(light("inspect", "--json").out)["adapter"] is None


@pytest.mark.parametrize("command", [["inspect"], ["run", "Hello"], ["bench", "--quick"]])
def test_one_that_does_not_fit_is_refused(
    command: list[str], inside: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selfdraft.loading, "load", REAL_LOAD)
    monkeypatch.chdir(tmp_path)
    updates = random_updates({"model.layers.0.mlp.up_proj.weight": np.ones((64, 64), np.float32)})
    ended = inside(*command, "--adapter-path", str(save_peft(tmp_path / "small", updates)))
    assert ended.code == 1
    assert "was trained for a model of another size" in ended.err.splitlines()[-1]
    assert ended.out == ""


def test_run_decodes_with_it(inside: Command, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["run", "Who are you?", "--temperature", "0", "--max-tokens", "12"]
    plain = inside(*asked)
    monkeypatch.setattr(selfdraft.loading, "load", REAL_LOAD)
    texts = {inside(*asked, "--adapter-path", str(adapter), "--depth", depth).out for depth in ("0", "2")}
    assert len(texts) == 1
    assert plain.out not in texts


def test_bench_says_what_it_does_to_acceptance(
    inside: Command, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside that of the same model without it; other runtimes have it too, or are left out."""
    monkeypatch.setattr(selfdraft.loading, "load", REAL_LOAD)
    monkeypatch.setattr(benching, "QUICK", SMALL)
    ended = inside("bench", "--quick", "--output", str(tmp_path), "--adapter-path", str(adapter))
    assert "adapter pirate, depth 3: " in ended.out
    assert "left out, as they would decode without the adapter" in ended.out
    report = json.loads(next(tmp_path.glob("bench*.json")).read_text())
    effect = report["adapter_effect"]
    assert effect["with"] != effect["without"]
    assert {side["depth"] for side in effect.values()} == {3}
    assert report["adapter"]["name"] == "pirate"
    assert [row["name"] for row in report["decoding"] if row["depth"] is None] == ["mlx-lm bfloat16"]


def test_bench_makes_no_adapter_for_a_synthetic_model(light: Command, adapter: Path) -> None:
    ended = light("bench", "--synthetic", "tiny", "--adapter-path", str(adapter))
    assert ended.code == 2
    assert "--adapter-path" in ended.err


def test_tune_measures_with_it(light: Command, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[dict[str, object]] = []

    def ask(job: dict[str, object]) -> dict[str, object]:
        jobs.append(job)
        return {"belongs_to": {}, "max_depth": 0, "notes": []}

    monkeypatch.setattr(tuning, "_ask", ask)
    assert light("tune", "--adapter-path", str(adapter)).code == 1
    assert light("tune").code == 1
    assert [job["adapter"] for job in jobs] == [str(adapter), None]


def test_start_says_that_a_running_server_keeps_its_own(
    light: Command, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = instance.Instance(1, 0.0, "127.0.0.1", 9, "reference")
    monkeypatch.setattr(instance, "find", lambda: here)
    monkeypatch.setattr(starting, "_attach", lambda *args: None)
    ended = light("start", "--adapter-path", str(adapter))
    assert "--adapter-path is for what is started now" in ended.err
