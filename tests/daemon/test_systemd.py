"""Guards `selfdraft service` on Linux: the unit that is written, what systemctl is told, and that no key leaks."""

from __future__ import annotations

import configparser
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from selfdraft.cli.app import main
from selfdraft.server import instance as instances
from selfdraft.server.instance import noted
from tests.support.needs import lacking

from .conftest import StandIn, stand_in

Call = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a systemd of Linux")
RUNNING = "ActiveState=active\nSubState=running\nMainPID={pid}\nNRestarts=0\nExecMainStatus=0\nUnitFileState=enabled\n"
STOPPED = "ActiveState=inactive\nSubState=dead\nMainPID=0\nNRestarts=0\nExecMainStatus=0\nUnitFileState=enabled\n"


@pytest.fixture
def systemctl(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = stand_in(tmp_path, "systemctl", monkeypatch)
    found.says("show", STOPPED)
    return found


@pytest.fixture
def call(home: Path, systemctl: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    monkeypatch.setattr(instances, "_path", lambda: home / "server.json")

    def call(*arguments: str) -> tuple[int, str, str]:
        return main(["service", *arguments]), *capsys.readouterr()

    return call


def unit_of(home: Path) -> Path:
    return home / ".config/systemd/user/selfdraft.service"


def told(systemctl: StandIn) -> list[str]:
    """What systemctl was told, without questions."""
    prefix = "--user --no-pager "
    calls = systemctl.calls()
    assert all(each.startswith(prefix) for each in calls)
    return [each.removeprefix(prefix) for each in calls if " show" not in each]


def parsed(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_install_writes_enables_and_starts(home: Path, systemctl: StandIn, call: Call) -> None:
    code, out, _ = call("install")
    assert code == 0
    assert str(unit_of(home)) in out
    assert told(systemctl) == ["daemon-reload", "enable selfdraft.service", "start selfdraft.service"]
    unit = parsed(unit_of(home).read_text())
    assert shlex.split(unit["ExecStart"][0]) == [sys.executable, "-m", "selfdraft", "serve", "--model", "reference"]
    assert unit["Restart"] == ["on-failure"]
    assert {unit[name][0] for name in ("NoNewPrivileges", "PrivateTmp", "RestrictSUIDSGID")} == {"yes"}
    assert unit["ProtectSystem"] == ["strict"]
    assert unit_of(home).stat().st_mode & 0o077 == 0


def test_caches_can_be_written_to(home: Path, call: Call) -> None:
    """Everything else is read-only for the service; a path in which there is a specifier must still be that path."""
    call("install")
    unit = parsed(unit_of(home).read_text())
    folders = [Path(shlex.split(value)[0].removeprefix("-").replace("%%", "%")) for value in unit["ReadWritePaths"]]
    for wanted in (".cache/selfdraft", ".local/state/selfdraft", ".cache/selfdraft/sessions", ".cache/huggingface/hub"):
        assert home / wanted in folders
    assert all(folder.is_dir() for folder in folders)
    assert f"SELFDRAFT_CONFIG_DIR={home}/config".replace("%", "%%") in shlex.split(unit["Environment"][0])


def test_a_second_install_only_brings_up_to_date(systemctl: StandIn, call: Call) -> None:
    call("install")
    told(systemctl)
    assert "is there" in call("install")[1]
    assert told(systemctl) == ["enable selfdraft.service", "start selfdraft.service"]
    assert "is changed and started again" in call("install", "--mode", "turbo")[1]
    assert told(systemctl) == ["daemon-reload", "enable selfdraft.service", "restart selfdraft.service"]


def test_uninstall_leaves_nothing_and_may_be_done_twice(home: Path, systemctl: StandIn, call: Call) -> None:
    call("install")
    told(systemctl)
    assert call("uninstall")[0] == 0
    assert not unit_of(home).exists()
    assert told(systemctl) == ["disable --now selfdraft.service", "daemon-reload"]
    code, out, _ = call("uninstall")
    assert (code, "there is no service" in out) == (0, True)
    assert told(systemctl) == []


def test_start_and_stop_need_an_installed_one(systemctl: StandIn, call: Call) -> None:
    for each in ("start", "stop"):
        code, _, said = call(each)
        assert code == 1
        assert "`selfdraft service install` makes one" in said
    call("install")
    told(systemctl)
    assert call("stop")[0] == call("start")[0] == 0
    assert told(systemctl) == ["stop selfdraft.service", "reset-failed selfdraft.service", "start selfdraft.service"]


def test_a_dry_run_prints_the_unit_alone(home: Path, systemctl: StandIn, call: Call) -> None:
    code, out, _ = call("install", "--dry-run", "--mode", "sustained")
    assert code == 0
    assert '"--mode" "sustained"' in out
    assert not unit_of(home).exists()
    assert systemctl.calls() == []
    assert list(home.iterdir()) == []


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("systemd-analyze") is None:
        lacking("there is no systemd-analyze (apt install systemd)")
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    unit = tmp_path / "selfdraft.service"
    unit.write_text(call("install", "--dry-run")[1])
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", unit],
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_no_key_is_ever_in_the_unit(home: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "sd-0123456789abcdef0123"
    monkeypatch.setenv("SELFDRAFT_API_KEY", secret)
    monkeypatch.setenv("HF_TOKEN", secret)
    code, _, said = call("install")
    assert code == 0
    assert "SELFDRAFT_API_KEY is set in this shell alone" in said
    assert "api_key_file" in said
    assert secret not in unit_of(home).read_text() + said


def test_a_server_for_others_needs_its_key_in_a_file(home: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFDRAFT_API_KEY", "sd-0123456789abcdef0123")
    (home / "config").mkdir()
    settings = home / "config/settings.toml"
    settings.write_text('[server]\nhost = "0.0.0.0"\n')
    code, _, said = call("install")
    assert code == 1
    assert "settings set api_key_file" in said
    assert not unit_of(home).exists()
    settings.write_text(f'[server]\nhost = "0.0.0.0"\napi_key_file = "{home}/keys/one"\n')
    assert call("install")[0] == 0
    assert (home / "keys/one").read_text().startswith("sd-")  # made; a wrong one would be refused here
    assert f'ReadWritePaths="-{home}/keys"'.replace("%", "%%") in unit_of(home).read_text()


def test_what_a_shell_alone_knows_is_said(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFDRAFT_PORT", "8012")
    assert "`selfdraft settings set server.port VALUE`" in " ".join(call("install")[2].split())


def test_a_server_by_hand_is_not_doubled(home: Path, systemctl: StandIn, call: Call) -> None:
    with noted("127.0.0.1", 8000, "reference"):
        code, _, said = call("install")
        assert code == 1
        assert "`selfdraft stop` it first" in said
        assert not unit_of(home).exists()
        systemctl.says("show", RUNNING.format(pid=os.getpid()))
        assert call("install")[0] == 0  # it is the service's own


def test_status_says_how_it_is(systemctl: StandIn, call: Call) -> None:
    assert call("status")[0] == 1
    call("install")
    code, out, _ = call("status")
    assert (code, out) == (1, "systemd: inactive (dead)\n")
    systemctl.says("show", RUNNING.format(pid=4242).replace("NRestarts=0", "NRestarts=3"))
    code, out, _ = call("status")
    assert (code, out) == (0, "systemd: active (running), restarted 3 times, last exit code 0, process 4242\n")
    report = json.loads(call("status", "--json")[1])
    assert (report["schema_version"], report["running"], report["pid"], report["url"]) == (1, True, 4242, None)


def test_a_systemd_that_does_not_answer_is_explained(home: Path, systemctl: StandIn, call: Call) -> None:
    systemctl.fails("show-environment", "Failed to connect to bus: No medium found\n")
    code, _, said = call("install")
    assert code == 1
    assert "enable-linger" in said
    assert not unit_of(home).exists()


def test_without_systemd_the_remedy_is_named(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    code, _, said = call("install")
    assert code == 1
    assert "--dry-run" in said


def test_models_and_settings_are_checked_before_anything_is_written(home: Path, systemctl: StandIn, call: Call) -> None:
    for arguments, code, expected in (
        (["--model", "/no/such/folder"], 1, "no model '/no/such/folder'"),
        (["--model", "owner/never-pulled"], 1, "not among the models that were downloaded"),
        (["--mode", "fast"], 2, "'fast'"),
    ):
        found = call("install", *arguments)
        assert found[0] == code
        assert expected in found[2]
    assert not unit_of(home).exists()
    assert systemctl.calls() == []


def test_logs_are_the_journal_of_the_unit(tmp_path: Path, call: Call) -> None:
    journal = tmp_path / "stand-in/journalctl"
    journal.write_text(f'#!/bin/sh\nprintf "%s" "$*" > {tmp_path}/asked\n')
    journal.chmod(0o755)
    assert call("logs", "-n", "7")[0] == 0
    assert (tmp_path / "asked").read_text() == "--user --user-unit selfdraft.service --lines 7 --no-pager"
    assert call("logs", "-n", "0")[0] == 2


def test_other_systems_are_refused(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "freebsd14")
    code, _, said = call("install")
    assert code == 1
    assert "freebsd14" in said


def test_the_unit_is_well_formed(call: Call) -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.read_string(call("install", "--dry-run")[1])
    assert parser.sections() == ["Unit", "Service", "Install"]
