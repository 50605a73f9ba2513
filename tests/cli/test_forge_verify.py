"""Guards `selfdraft forge verify` and `publish` as commands: what they print, and that a no is exit code 1."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from selfdraft.forge import Recipe, build, exactness, verify
from selfdraft.forge.wiring import AS_BUILT
from selfdraft.stamp import STAMP, read_stamp
from tests.forge.support import nano_source
from tests.support.hub import use
from tests.support.upload_hub import UploadHub, upload_hub

from .conftest import Command


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(exactness, "TOKENS", 4)
    monkeypatch.setattr(exactness, "HELD_OUT", exactness.HELD_OUT[:1])
    return build(nano_source(tmp_path / "source"), tmp_path / "package", Recipe.named("4bit", head="dense")).folder


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(verify.__globals__, "wirings", lambda *given: {AS_BUILT: 0.6})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[UploadHub]:
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    with upload_hub() as found:
        use(found.url, tmp_path / "home", monkeypatch)
        yield found


def test_a_no(light: Command, package: Path) -> None:
    ended = light("forge", "verify", str(package), "--no-speed")
    assert ended.code == 1
    assert "verdict" in ended.out
    assert "no better in another wiring" in " ".join(ended.out.split())
    assert "not measured" in ended.out
    refused = light("forge", "publish", str(package), "owner/name")
    assert (refused.code, refused.out) == (1, "")
    assert "not worth publishing" in " ".join(refused.err.split())


def test_a_yes(light: Command, package: Path, sound: None, hub: UploadHub) -> None:
    ended = light("forge", "verify", str(package), "--no-speed", "--json")
    assert ended.code == 0
    report = json.loads(ended.out)
    stamp = read_stamp(package)
    assert stamp is not None
    assert (report["schema_version"], report["verdict"], report["files"]) == (1, "yes", stamp.files)
    tried = light("forge", "publish", str(package), "owner/name", "--dry-run")
    assert (tried.code, hub.asked) == (0, [])
    assert "would be uploaded to owner/name" in tried.out
    done = light("forge", "publish", str(package), "owner/name", "--json")
    assert json.loads(done.out)["address"] == f"{hub.url}/owner/name"


@pytest.mark.parametrize("name", ["nowhere", "reference"])
def test_only_folders(light: Command, name: str) -> None:
    """What a name stands for lies in an installation or in a cache, which are not written to."""
    for command in (["verify", name], ["publish", name, "owner/name"]):
        ended = light("forge", *command)
        assert ended.code == 2
        assert "is no folder" in ended.err


def test_what_is_no_model(light: Command, tmp_path: Path) -> None:
    ended = light("forge", "verify", str(tmp_path), "--no-speed")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.count("\n") == 1
    assert not (tmp_path / STAMP).exists()


def test_speeds_are_shown(light: Command, package: Path, sound: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from selfdraft.tuning.measure import Tally
    from selfdraft.tuning.tune import Candidate, Tuning

    def tune(name: str, found: dict[str, Any], **given: Any) -> Tuning:
        rates = (20.0, 30.0, 10.0)
        candidates = [Candidate(depth, [Tally(100, 100 / rate, 50)] * 3) for depth, rate in enumerate(rates)]
        return Tuning(name, {}, 10, candidates)

    monkeypatch.setitem(verify.__globals__, "tune", tune)
    monkeypatch.setitem(verify.__globals__, "describe", lambda name: {"max_depth": 8})
    ended = light("forge", "verify", str(package))
    assert ended.code == 0
    shown = " ".join(ended.out.split())
    assert "30.0 tokens a second at depth 1, 1.5 of plain decoding" in shown
    assert "depth limit 1" in shown
