"""Guards the talk with ThermalForge: what it says of fans is read right, and whatever it does wrong is one clear error
that names the remedy, in bounded time.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest

from selfdraft.errors import FanError
from selfdraft.fans import thermalforge
from selfdraft.fans.thermalforge import ThermalForge, find
from tests.support.thermalforge import StandIn


def printing(folder: Path, text: str) -> ThermalForge:
    (folder / "text").write_text(text)
    executable = folder / "prints"
    executable.write_text(f'#!/bin/sh\ncat "{folder}/text"\n')
    executable.chmod(0o755)
    return ThermalForge(executable)


def test_it_is_found_and_obeys(stand_in: StandIn) -> None:
    fans = find()
    assert fans.executable == stand_in.fans.executable
    assert [fan.rpm for fan in fans.status().fans] == [2310, 2310]
    assert str(fans.status()) == "automatic"
    fans.max()
    assert (stand_in.state, str(fans.status())) == ("max", "max")
    fans.auto()
    assert (stand_in.state, str(fans.status())) == ("auto", "automatic")
    assert stand_in.calls == ["max", "auto"]


FANS = [
    ({"mode": "auto"}, "automatic"),
    ({"mode": "system", "target_rpm": 2000}, "automatic"),
    ({"mode": "Auto"}, "automatic"),
    ({"mode": "manual", "target_rpm": 5899}, "max"),
    ({"mode": "manual", "target_rpm": 3000}, "other"),
    ({"mode": "manual", "target_rpm": 3000, "min_rpm": None}, "other"),
    ({"mode": "manual", "target_rpm": 0}, "unclear"),  # a reset that got half way: the fan stands still
    ({"mode": "manual", "target_rpm": 800}, "unclear"),
    ({"mode": "manual", "target_rpm": None}, "unclear"),
    ({"mode": "manual", "target_rpm": 5900, "max_rpm": 0}, "unclear"),
    ({"mode": "unknown(2)", "target_rpm": 5900}, "max"),
    ({"mode": 0}, "unclear"),
]


@pytest.mark.parametrize(("fan", "state"), FANS)
def test_states_of_a_fan(tmp_path: Path, fan: dict[str, Any], state: str) -> None:
    usual = {"index": 0, "actual_rpm": 2300, "target_rpm": 0, "min_rpm": 1200, "max_rpm": 5900}
    status = printing(tmp_path, json.dumps({"fans": [{**usual, **fan}], "temperatures": {}})).status()
    assert status.states == {state}


def test_fans_may_differ(tmp_path: Path) -> None:
    held = {"mode": "manual", "target_rpm": 5900, "max_rpm": 5900}
    assert str(printing(tmp_path, json.dumps({"fans": [{"mode": "auto"}, held]})).status()) == "automatic and max"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "oops",
        "[]",
        "3",
        '{"fans": 3}',
        '{"fans": [3]}',
        '{"fans": [{}]}',
        '{"fans": [{"mode": "auto", "actual_rpm": Infinity}]}',
        "{" * 9,
        "[" * 100_000,
        "\x00\xff",
    ],
)
def test_garbage_is_said_so(tmp_path: Path, text: str) -> None:
    with pytest.raises(FanError, match=r"nothing that could be understood \(.*brew upgrade") as refused:
        printing(tmp_path, text).status()
    assert len(str(refused.value)) < 400


def test_a_machine_without_fans(tmp_path: Path) -> None:
    with pytest.raises(FanError, match="no fans: use the mode sustained"):
        printing(tmp_path, '{"fans": []}').status()


def test_a_failure_says_why_and_what_to_do(stand_in: StandIn) -> None:
    stand_in.plan("max", "fail")
    with pytest.raises(
        FanError, match=r"`thermalforge max` failed \(.*not allowed without sudo\): `sudo thermalforge install`"
    ):
        stand_in.fans.max()


def test_what_hangs_is_killed_with_all_that_it_started(stand_in: StandIn, tmp_path: Path) -> None:
    stand_in.plan("auto", "hang")
    begin = time.monotonic()
    with pytest.raises(FanError, match=r"`thermalforge auto` did not end in 0.5 s: `sudo thermalforge install`"):
        dataclasses.replace(stand_in.fans, timeout=0.5).auto()
    late, child = tmp_path / "late", tmp_path / "starts"
    child.write_text(f'#!/bin/sh\n(sleep 2; touch "{late}") &\nwait\n')  # it holds the pipe of the output, too
    child.chmod(0o755)
    with pytest.raises(FanError, match="did not end"):
        ThermalForge(child, timeout=0.5).auto()
    assert time.monotonic() - begin < 20
    time.sleep(2.2)
    assert not late.exists()


def test_what_cannot_be_run(tmp_path: Path) -> None:
    with pytest.raises(FanError, match=r"cannot be run \(No such file or directory\): `brew install"):
        ThermalForge(tmp_path / "gone").status()


def test_not_installed(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FanError, match=r"not installed: `brew install ProducerGuy/tap/thermalforge`, then `sudo"):
        find()


def test_no_mac(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thermalforge, "_on_macos", lambda: False)
    with pytest.raises(FanError, match=r"which is for Macs, and this is .*: use the mode sustained"):
        find()
    assert stand_in.all_calls == []
