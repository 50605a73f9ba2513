"""Guards the Homebrew formula as Ruby runs it: Homebrew is not here, so a stand-in reads it and runs its install."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import selfdraft
from tests.support.needs import lacking

from .conftest import ROOT

FORMULA = ROOT / "packaging" / "homebrew" / "selfdraft.rb"
WHEEL = f"selfdraft-{selfdraft.__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the formula says and does, with this package's wheel in the folder of the build, as Homebrew stages it."""
    if shutil.which("ruby") is None:
        lacking("there is no ruby")
    folder = tmp_path_factory.mktemp("homebrew")
    for name in ("build", "cache"):
        (folder / name).mkdir()
    (folder / "build" / WHEEL).touch()
    program = Path(__file__).with_name("homebrew.rb")
    done = subprocess.run(["ruby", "-w", program, FORMULA, folder], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_it_installs_every_wheel_under_its_own_name(read: dict[str, Any]) -> None:
    """pip goes by the names of wheels, and Homebrew's cache has others."""
    (pip,) = [line for line in read["done"] if "pip" in line]
    assert pip[:5] == ["python3.13", "-m", "pip", "--python=libexec/bin/python", "install"]
    assert {"--no-deps", "--no-index"} <= set(pip)
    wheels = {Path(word).name for word in pip if word.endswith(".whl")}
    assert wheels == {WHEEL, *(Path(each["url"]).name for each in read["resources"])}


def test_nothing_is_unpacked(read: dict[str, Any]) -> None:
    """A wheel is a zip file, which Homebrew would open."""
    assert {each["using"] for each in read["resources"]} == {"nounzip"}
    assert read["said"]["url"][0][1] == "using=nounzip"


def test_it_asks_for_what_the_wheels_need(read: dict[str, Any]) -> None:
    assert read["said"]["depends_on"] == [["arch=arm64"], ["macos=sonoma"], ["python@3.13"]]
    assert "preserve_rpath" in read["said"]
    assert ["virtualenv", "libexec", "python3.13", False] in read["done"]
    for each in read["resources"]:
        *_, python, _, platform = Path(each["url"]).stem.split("-")
        assert python.startswith(("py", "cp313")) or "abi3" in each["url"], each["url"]
        assert platform == "any" or "macosx" in platform, each["url"]


def test_what_it_links_is_in_the_wheel(read: dict[str, Any]) -> None:
    links = {place: target for word, place, target in (line for line in read["done"] if line[0] == "symlink")}
    assert links.pop("bin") == "libexec/bin/selfdraft"
    assert set(links) == {"man1", "bash_completion", "zsh_completion", "fish_completion"}
    for target in links.values():
        assert (ROOT / "packaging" / target.removeprefix("libexec/")).is_file(), target


def test_it_runs_as_a_service_and_is_tested(read: dict[str, Any]) -> None:
    assert read["said"]["run"] == [["/opt/bin/selfdraft", "serve"]]
    assert read["said"]["keep_alive"] == [["crashed=true"]]
    assert [line[1] for line in read["done"] if line[0] == "shell"] == [
        "bin/selfdraft --version",
        "bin/selfdraft inspect reference",
        "bin/selfdraft completions bash",
    ]
