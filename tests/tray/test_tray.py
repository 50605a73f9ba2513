"""Guards the state machine behind the icon: no server twice, none lost unsaid, none of another's ended unasked."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from selfdraft.errors import InvalidRequest, TrayError
from selfdraft.server import instance as instances
from selfdraft.server.instance import Instance
from selfdraft.settings_file import read_settings
from selfdraft.tray.choices import Choices
from selfdraft.tray.tray import Server, Tray, modes_here


class Process:
    """A server's process, without one."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.exit: int | None = None
        self.started: list[list[str]] = []
        self.kept: list[bool] = []
        self.asked = 0
        self.refusal: TrayError | None = None

    def start(self, flags: list[str], *, keep: bool) -> None:
        if self.refusal:
            raise self.refusal
        self.started.append(list(flags))
        self.outlive(keep)
        self.pid = 4_000_000 + len(self.started)

    def outlive(self, keep: bool) -> None:
        self.kept.append(keep)

    def ask_to_end(self) -> None:
        self.asked += self.pid is not None

    def take_exit(self) -> int | None:
        code, self.exit = self.exit, None
        return code

    def ends(self, code: int) -> None:
        self.pid, self.exit = None, code

    def failure(self, code: int) -> str:
        return f"it broke ({code})"


class World:
    """What the tray looks at: a note on disk, and what a server says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.note = folder / "server.json"
        self.health: dict[str, Any] = {"status": "ok", "running": 0, "waiting": 0}
        self.metrics: str | Exception = ""
        self.time = 0.0
        self.process = Process()
        self.others: list[subprocess.Popen[bytes]] = []
        monkeypatch.setattr(instances, "_path", lambda: self.note)
        monkeypatch.setattr(Instance, "alive", property(self.is_alive))
        self.tray = self.new()

    def new(self) -> Tray:
        server = Server(lambda url: self.health, self.asked_for_metrics)
        return Tray(self.process, server, Choices("reference", "auto"), lambda: self.time)  # type: ignore[arg-type]

    def asked_for_metrics(self, url: str) -> str:
        if isinstance(self.metrics, Exception):
            raise self.metrics
        return self.metrics

    def is_alive(self, instance: Instance) -> bool:
        return instance.pid == self.process.pid or any(
            each.pid == instance.pid and each.poll() is None for each in self.others
        )

    def note_server(self, pid: int | None = None, model: str = "reference") -> None:
        """As `selfdraft serve` does when it listens."""
        instances._write(Instance(pid or self.process.pid or 0, 1.0, "127.0.0.1", 8000, model))

    def other_server(self) -> subprocess.Popen[bytes]:
        """One that somebody else started."""
        process = subprocess.Popen(["sleep", "600"])
        self.others.append(process)
        self.note_server(process.pid, "another")
        return process


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("SELFDRAFT_CONFIG_DIR", str(tmp_path / "config"))
    made = World(tmp_path, monkeypatch)
    yield made
    for process in made.others:
        process.kill()
        process.wait()


def started(world: World) -> Tray:
    """A tray whose server answers."""
    world.tray.start()
    world.note_server()
    assert world.tray.poll().state == "serving"
    return world.tray


def test_from_stopped_to_decoding_and_back(world: World) -> None:
    tray = world.tray
    assert tray.poll().state == "stopped"
    tray.start()
    assert tray.reading.state == "starting"
    assert world.process.started == [["--model", "reference", "--mode", "auto"]]
    world.note_server()
    world.health = {"status": "loading"}
    assert tray.poll().state == "starting"
    world.health = {"status": "ok", "running": 0, "waiting": 0}
    reading = tray.poll()
    assert (reading.state, reading.url, reading.ours) == ("serving", "http://127.0.0.1:8000", True)
    world.health = {"status": "ok", "running": 2, "waiting": 1}
    assert tray.poll().state == "decoding"
    tray.stop()
    assert tray.reading.state == "stopping"
    assert world.process.asked == 1
    world.process.ends(0)
    world.note.unlink()
    assert tray.poll().state == "stopped"
    assert tray.reading.problem == ""


def test_figures_are_of_the_server(world: World) -> None:
    tray = started(world)
    for second in range(4):
        world.time = second
        world.metrics = (
            f"selfdraft_generation_tokens_total {40 * second}\nspec_decode_num_draft_tokens_total {20 * second}\n"
            f"spec_decode_num_accepted_tokens_total {15 * second}\n"
        )
        reading = tray.poll()
    assert reading.figures == "40.0 tok/s · accepted 75%"


def test_a_second_start_starts_nothing(world: World) -> None:
    tray = started(world)
    tray.start()
    assert len(world.process.started) == 1


def test_a_server_that_runs_already_is_used(world: World) -> None:
    world.other_server()
    tray = world.tray
    reading = tray.poll()
    assert (reading.state, reading.model, reading.ours) == ("serving", "another", False)
    tray.start()
    assert world.process.started == []


def test_a_crash_is_said_and_can_be_started_again(world: World) -> None:
    tray = started(world)
    world.process.ends(-9)
    reading = tray.poll()
    assert (reading.state, reading.problem) == ("crashed", "it broke (-9)")
    assert reading.headline == "Crashed: it broke (-9)"
    assert tray.poll().state == "crashed"  # until something is done about it
    tray.start()
    assert tray.reading.state == "starting"
    assert len(world.process.started) == 2


def test_a_crash_while_it_loads_is_one(world: World) -> None:
    world.tray.start()
    world.process.ends(1)
    assert world.tray.poll().state == "crashed"


def test_a_crash_of_anothers_server_is_said_but_a_stop_is_none(world: World) -> None:
    """Ended in order, a server takes its note along."""
    process = world.other_server()
    world.tray.poll()
    process.kill()
    process.wait()
    reading = world.tray.poll()
    assert reading.state == "crashed"
    assert str(process.pid) in reading.problem
    process = world.other_server()
    assert world.tray.poll().state == "serving"  # whoever keeps it up started it again
    world.note.unlink()
    process.kill()
    process.wait()
    assert world.tray.poll().state == "stopped"


def test_stop_ends_anothers_server_too_and_that_is_no_crash(world: World) -> None:
    process = world.other_server()
    world.tray.poll()
    world.tray.stop()
    process.wait(5)
    assert world.tray.poll().state == "stopped"


def test_leaving_ends_our_server_unless_it_is_kept(world: World) -> None:
    process = world.other_server()
    world.tray.poll()
    world.tray.leave()
    assert process.poll() is None  # another's is none of our business
    world.note.unlink()
    tray = started(world)
    tray.choose(keep_server=True)
    assert world.process.kept[-1] is True
    tray.leave()
    assert world.process.asked == 0
    tray.choose(keep_server=False)
    assert world.process.kept[-1] is False
    tray.leave()
    assert world.process.asked == 1


def test_a_choice_is_remembered_and_our_server_starts_again(world: World, tmp_path: Path) -> None:
    tray = started(world)
    tray.choose(model="/models/other")
    tray.choose(mode="turbo")
    assert read_settings() == {"mode": "turbo", "start": {"model": "/models/other"}}
    assert tray.poll().state == "stopping"
    world.process.ends(0)
    world.note.unlink()
    tray.poll()
    assert tray.reading.state == "starting"
    assert world.process.started[1:] == [["--model", "/models/other", "--mode", "turbo"]]


def test_a_choice_starts_nothing_that_did_not_run(world: World) -> None:
    world.tray.choose(model="/models/other")
    assert world.tray.poll().state == "stopped"
    world.other_server()
    world.tray.choose(mode="turbo")
    assert world.tray.poll().state == "serving"
    assert world.process.started == []


def test_a_stop_calls_off_the_next_start(world: World) -> None:
    tray = started(world)
    tray.choose(model="/models/other")
    tray.stop()
    world.process.ends(0)
    world.note.unlink()
    assert tray.poll().state == "stopped"
    assert len(world.process.started) == 1


def test_a_busy_server_is_not_dead(world: World) -> None:
    tray = started(world)
    world.health = {"status": "unreachable"}
    reading = tray.poll()
    assert (reading.state, reading.problem) == ("serving", "it does not answer")


def test_a_server_that_will_not_tell_figures_still_serves(world: World) -> None:
    tray = started(world)
    world.metrics = InvalidRequest("it wants an API key")
    reading = tray.poll()
    assert (reading.state, reading.problem) == ("serving", "it wants an API key")
    world.metrics = "selfdraft_generation_tokens_total what"
    assert tray.poll().state == "serving"


def test_what_cannot_be_started_or_remembered_is_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.process.refusal = TrayError("no room")
    world.tray.start()
    assert world.tray.reading.headline == "Crashed: no room"
    world.process.refusal = None
    monkeypatch.setenv("SELFDRAFT_CONFIG_DIR", "/dev/null/none")
    tray = started(world)
    tray.choose(keep_server=True)
    assert "this is not remembered" in tray.poll().problem
    assert tray.chosen.keep_server


def test_max_is_offered_where_fans_can_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert modes_here() == ("auto", "turbo", "sustained")
