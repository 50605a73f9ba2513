"""`selfdraft bench`: what it prints and where it writes. What is measured: `tests/tuning/test_bench.py`."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from selfdraft.tuning import bench as benching
from selfdraft.tuning.bench import Extent

from .conftest import Command

SMALL = Extent(
    depths=(1,), rounds=1, prompts=1, tokens=4, widths=(1, 2), repeats=1, prefills=(8,), contexts=(8,), ladder_tokens=4
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benching, "QUICK", SMALL)


@pytest.mark.usefixtures("small")
def test_a_synthetic_model(light: Command, tmp_path: Path) -> None:
    ended = light("bench", "--synthetic", "tiny", "--quick", "--output", str(tmp_path / "new"))
    assert ended.code == 0
    assert "SYNTHETIC" in ended.out
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert [name.split("_")[:2] for name in names] == [["bench", "synthetic-tiny"]] * 2
    report, picture = (tmp_path / "new" / name for name in names)
    assert json.loads(report.read_text())["label"].startswith("SYNTHETIC")
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert str(report) in ended.err


@pytest.mark.usefixtures("small")
def test_a_real_model_as_json_into_the_current_folder(
    inside: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = inside("bench", "--quick", "--json")
    report = json.loads(ended.out)
    assert (report["schema_version"], report["label"], report["model"]) == (1, "", "reference")
    assert sorted(report["files"]) == sorted(path.name for path in tmp_path.iterdir())
    assert json.loads(Path(report["files"][0]).read_text()) == {k: v for k, v in report.items() if k != "files"}


@pytest.mark.usefixtures("small")
def test_inside_a_checkout_results_have_their_folder(
    light: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert light("bench", "--synthetic", "tiny", "--quick").code == 0
    assert len(list((tmp_path / "benchmarks" / "results").iterdir())) == 2


def test_a_folder_that_cannot_be_made_is_said_before_anything_runs(light: Command, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = light("bench", "--output", str(tmp_path / "file"))
    assert ended.code == 1
    assert str(tmp_path / "file") in ended.err


def test_one_model_at_a_time(light: Command) -> None:
    ended = light("bench", "reference", "--synthetic", "tiny")
    assert ended.code == 2
    assert "--synthetic" in ended.err


def test_a_gguf_file_that_is_not_there_is_said_before_anything_runs(light: Command, tmp_path: Path) -> None:
    ended = light("bench", "--gguf", str(tmp_path / "absent.gguf"), "--output", str(tmp_path / "new"))
    assert ended.code == 1
    assert "absent.gguf is not a file" in ended.err
    assert not (tmp_path / "new").exists()
