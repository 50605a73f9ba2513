"""Guards what `serve` refuses of a group before any rank is started: what only models in one process have."""

from __future__ import annotations

from pathlib import Path

import pytest

from selfdraft.distributed import launch

from .conftest import Command


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*given: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(launch, "run_here", started)
    monkeypatch.setattr(launch, "run_on_hosts", started)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["reference", "small=reference"], "ranks share one model, and 2 are given: serve reference with them"),
        (["--adapter-path", "mine"], "the adapter mine cannot be shared by several ranks yet"),
        (["--lazy"], "ranks have their part of the model from the start: leave --lazy out"),
    ],
)
@pytest.mark.parametrize("how", [["--ranks", "2"], ["--hosts", "hosts.json"]])
def test_what_a_group_does_not_have(
    light: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], said: str, how: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.json").write_text('[{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}]')
    ended = light("serve", *given, *how)
    assert ended.code != 0
    assert said in " ".join(ended.err.split())
    assert "Traceback" not in ended.err


def test_an_adapter_is_for_one_model(light: Command) -> None:
    ended = light("serve", "reference", "small=reference", "--adapter-path", "mine")
    assert ended.code != 0
    assert "the adapter mine is for one model, and 2 are given" in " ".join(ended.err.split())
