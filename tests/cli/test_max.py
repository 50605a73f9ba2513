"""Guards `selfdraft max on|off|status` and `--mode max`: fans stay at maximum behind the terminal until `off`, what a
crash left is mended, and where they cannot be held it is said before a model is loaded.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from selfdraft.cli import max as max_command
from selfdraft.cli import start as starting
from selfdraft.cli.app import app
from selfdraft.fans import thermalforge
from selfdraft.server.instance import noted
from tests.support.thermalforge import AS_MAC, StandIn, standing_in, within

from .conftest import Command, Ended

MAIN = "import sys; from selfdraft.cli.app import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with standing_in(tmp_path) as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(thermalforge, "_on_macos", lambda: True)
        yield found


@pytest.fixture
def nowhere(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.setattr(thermalforge, "_on_macos", lambda: False)
    return stand_in


def report(light: Command) -> dict[str, object]:
    ended = light("max", "status", "--json")
    assert ended.code == 0, ended
    found: dict[str, object] = json.loads(ended.out)
    return found


def test_on_and_off(stand_in: StandIn, light: Command) -> None:
    assert report(light) == {
        "schema_version": 1,
        "fans": "automatic",
        "rpm": [2310, 2310],
        "error": None,
        "holders": [],
        "watchdog": None,
    }
    ended = light("max", "on")
    assert (ended.code, ended.err) == (0, "")
    watchdog = stand_in.claims.watchdog
    assert ended.out.startswith(
        "fans at maximum, also when this terminal is closed, until `selfdraft max off`; a watchdog"
    )
    assert str(watchdog) in ended.out
    assert stand_in.state == "max"
    (holder,) = stand_in.claims.live()
    found = report(light)
    assert (found["fans"], found["watchdog"]) == ("max", watchdog)
    assert found["holders"] == [{"pid": holder.pid, "what": "max on", "since": holder.since}]
    said = light("max", "status").out.splitlines()
    assert said == [
        "fans: max (2,310 rpm, 2,310 rpm)",
        f"held for: max on ({holder.pid})",
        f"watchdog: process {watchdog}",
    ]
    assert light("max", "off") == Ended(0, "fans: automatic\n", "")
    assert stand_in.calls == ["max", "auto"]
    assert stand_in.settled(0)
    assert light("max", "status").out.splitlines()[1:] == ["held for: nobody", "watchdog: none is needed"]


def test_on_outlives_the_terminal_and_twice_is_once(stand_in: StandIn, light: Command) -> None:
    assert light("max", "on").code == 0
    (holder,) = stand_in.claims.live()
    watchdog = stand_in.claims.watchdog
    assert watchdog
    for pid in (holder.pid, watchdog):
        assert os.getsid(pid) != os.getsid(0)
        os.kill(pid, signal.SIGHUP)
        os.kill(pid, signal.SIGINT)
    assert light("max", "on").code == 0
    assert [claim.pid for claim in stand_in.claims.live()] == [holder.pid]
    assert stand_in.calls == ["max"]
    assert light("max", "off").code == 0


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_what_holds_them_dies(stand_in: StandIn, light: Command, by: signal.Signals) -> None:
    assert light("max", "on").code == 0
    os.kill(stand_in.claims.live()[0].pid, by)
    assert stand_in.settled()
    assert stand_in.calls == ["max", "auto"]


def test_a_killed_watchdog_is_replaced(stand_in: StandIn, light: Command) -> None:
    assert light("max", "on").code == 0
    before = stand_in.claims.watchdog
    assert before
    os.kill(before, signal.SIGKILL)
    assert within(20, lambda: stand_in.claims.watchdog not in (None, 0, before))
    assert light("max", "off").code == 0
    assert stand_in.settled(0)


def kill_all(stand_in: StandIn) -> None:
    """What holds the fans, and the watchdog: all at once, so that neither does anything about the other."""
    watchdog = stand_in.claims.watchdog
    assert watchdog
    everyone = [watchdog, *(claim.pid for claim in stand_in.claims.live())]
    for each in (signal.SIGSTOP, signal.SIGKILL):
        for pid in everyone:
            os.kill(pid, each)
    assert within(20, lambda: not stand_in.claims.live() and stand_in.claims.watchdog is None)
    assert stand_in.state == "max"


def test_status_mends_what_a_crash_left(stand_in: StandIn, light: Command) -> None:
    assert light("max", "on").code == 0
    kill_all(stand_in)
    ended = light("max", "status")
    assert ended.code == 0
    assert ended.err == "selfdraft: the watchdog of the fans was killed: there is a new one\n"
    assert ended.out.startswith("fans: automatic")
    assert stand_in.settled(0)


def test_off_mends_what_a_crash_left(stand_in: StandIn, light: Command) -> None:
    assert light("max", "on").code == 0
    kill_all(stand_in)
    assert light("max", "off").out == "fans: automatic\n"
    assert stand_in.settled(0)


@pytest.mark.parametrize("command", [["run", "Hello", "--max-tokens", "2"], ["chat"]])
def test_a_start_in_any_mode_mends_what_a_crash_left(stand_in: StandIn, inside: Command, command: list[str]) -> None:
    assert inside("max", "on").code == 0
    kill_all(stand_in)
    assert "the watchdog of the fans was killed: there is a new one" in inside(*command, stdin=b"/quit\n").err
    assert stand_in.settled()


def test_off_gives_back_fans_that_nobody_of_ours_holds(stand_in: StandIn, light: Command) -> None:
    stand_in.become("max")
    ended = light("max", "status")
    assert "no process of Selfdraft holds them; `selfdraft max off` gives them back" in ended.err
    assert light("max", "off").out == "fans: automatic\n"
    assert stand_in.calls == ["auto"]


def test_off_leaves_fans_to_a_model_that_works(stand_in: StandIn, light: Command) -> None:
    script = "import sys; from selfdraft.fans.max_mode import *; held = user_claims().claim('a test'); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as process:
        assert within(20, lambda: bool(stand_in.claims.live()))
        assert light("max", "on").code == 0
        ended = light("max", "off")
        assert ended.code == 0
        assert ended.out.startswith(f"fans still at maximum, for a test ({process.pid}); they are given back when")
        assert (stand_in.state, len(stand_in.claims.live())) == ("max", 1)
        process.communicate(b"\n")
        assert process.returncode == 0
    assert stand_in.settled()


def test_on_that_does_not_work_holds_nothing(stand_in: StandIn, light: Command) -> None:
    stand_in.plan("max", "fail")
    ended = light("max", "on")
    assert (ended.code, ended.out) == (1, "")
    assert "not allowed without sudo" in ended.err
    assert "`sudo thermalforge install`" in ended.err
    assert stand_in.settled()


def test_off_that_does_not_work_is_an_error_and_goes_on(
    stand_in: StandIn, light: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(max_command, "_GIVING_BACK", 3.0)
    assert light("max", "on").code == 0
    stand_in.plan("auto", *["lie"] * 4)
    ended = light("max", "off")
    assert (ended.code, ended.out) == (1, "")
    assert "not given back yet (after `thermalforge auto` the fans are max, not automatic" in ended.err
    assert stand_in.settled()


@pytest.mark.parametrize("verb", ["on", "off", "status"])
def test_not_installed(stand_in: StandIn, light: Command, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    ended = light("max", verb)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == (
        "selfdraft: fans are held by ThermalForge, which is not installed: `brew install "
        "ProducerGuy/tap/thermalforge`, then `sudo thermalforge install` once\n"
    )


@pytest.mark.parametrize("verb", ["on", "off", "status"])
def test_no_mac(nowhere: StandIn, light: Command, verb: str) -> None:
    ended = light("max", verb)
    assert (ended.code, ended.out) == (1, "")
    assert "which is for Macs, and this is" in ended.err
    assert nowhere.all_calls == []


def test_status_as_json_says_why_not(nowhere: StandIn, light: Command) -> None:
    ended = light("max", "status", "--json")
    assert ended.code == 1
    found = json.loads(ended.out)
    assert (found["fans"], found["holders"], found["watchdog"]) == (None, [], None)
    assert "which is for Macs" in found["error"]


# --mode max


@pytest.mark.parametrize("command", [["run", "hello"], ["chat"], ["serve"], ["start"]])
def test_the_mode_is_refused_where_it_cannot_be_had(nowhere: StandIn, light: Command, command: list[str]) -> None:
    ended = light(*command, "--mode", "max")
    assert (ended.code, ended.out) == (2, "")
    assert "Invalid value for '--mode'" in ended.err
    assert "use the mode sustained" in ended.err


def test_start_hands_the_mode_on(stand_in: StandIn, light: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str | None] = []
    monkeypatch.setattr(starting, "chat_here", lambda engine, *more: modes.append(engine.mode))
    assert light("start", "--mode", "max").code == 0
    assert light("start").code == 0
    assert modes == ["max", None]


def test_start_says_that_a_server_keeps_its_mode(
    stand_in: StandIn, light: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "_attach", lambda *more: None)
    with noted("127.0.0.1", 1, "reference"):
        assert "the server that runs keeps its own" in light("start", "--mode", "max").err
        assert light("start").err == ""


def test_a_run_holds_the_fans_and_killed_gives_them_back(stand_in: StandIn) -> None:
    """Killed while it generates, with nothing left that could clean up."""
    ask = ["run", "--mode", "max", "--max-tokens", "4000", "--ignore-eos", "Hello"]
    command = [sys.executable, "-c", AS_MAC + MAIN, *ask]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert within(60, lambda: stand_in.state == "max")
        assert process.poll() is None
        assert [claim.pid for claim in stand_in.claims.live()] == [process.pid]
        process.kill()
        assert stand_in.settled()
    assert stand_in.calls == ["max", "auto"]


def test_a_run_that_ends_gives_them_back_at_once(stand_in: StandIn) -> None:
    command = [sys.executable, "-c", AS_MAC + MAIN, "run", "--mode", "max", "--max-tokens", "2", "Hello"]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert stand_in.settled()


def test_help_says_its_defaults_and_fits() -> None:
    for arguments in (["max"], ["max", "on"], ["max", "off"], ["max", "status"]):
        text = CliRunner().invoke(app, [*arguments, "--help"], env={"COLUMNS": "80"}).output
        assert max(map(len, text.splitlines())) <= 80
        assert "…" not in text
        assert text.count("--json") == text.count("Default: off.")
