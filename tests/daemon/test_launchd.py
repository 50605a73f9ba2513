"""Guards the launchd agent: its property list, and what launchctl is told. Run anywhere; not on a Mac yet."""

from __future__ import annotations

import os
import plistlib
import subprocess
import sys
from pathlib import Path

import pytest

from selfdraft.daemon import find_manager
from selfdraft.daemon.launchd import Launchd
from selfdraft.daemon.service import Service
from selfdraft.errors import ServiceError

from .conftest import StandIn, stand_in

TARGET = f"gui/{os.getuid()}/selfdraft.server"
# It knows what is loaded: print fails where nothing is.
STATEFUL = """\
case "$1" in
bootstrap) touch "{folder}/loaded" ;;
bootout) rm -f "{folder}/loaded" ;;
print)
    [ -f "{folder}/loaded" ] || { echo 'Could not find service' >&2; exit 113; }
    printf '%s = {\\n\\tstate = running\\n\\tpid = 77\\n\\tlast exit code = (never exited)\\n}\\n' "$2" ;;
esac
"""


@pytest.fixture
def launchctl(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return stand_in(tmp_path, "launchctl", monkeypatch, STATEFUL)


@pytest.fixture
def service(home: Path) -> Service:
    return Service(["--model", "reference"], home / "Library/Logs/selfdraft/service.log", (), {"HF_HOME": "/hub"})


def told(launchctl: StandIn) -> list[str]:
    return [each for each in launchctl.calls() if not each.startswith("print")]


def test_the_property_list_is_one(launchctl: StandIn, home: Path, service: Service) -> None:
    manager = Launchd()
    assert manager.install(service) == "installed"
    path = home / "Library/LaunchAgents/selfdraft.server.plist"
    content = plistlib.loads(path.read_bytes())
    log = str(service.log)
    assert content["Label"] == "selfdraft.server"
    assert content["ProgramArguments"] == [
        sys.executable,
        *("-m", "selfdraft", "serve", "--model", "reference", "--log-file"),
        log,
    ]
    assert content["KeepAlive"] == {"SuccessfulExit": False}
    assert content["ThrottleInterval"] >= 10
    assert content["EnvironmentVariables"] == {"HF_HOME": "/hub"}
    assert content["Umask"] == 0o077
    assert content["StandardErrorPath"] != log  # a file that is renamed when it is full
    assert told(launchctl) == [f"enable {TARGET}", f"bootstrap gui/{os.getuid()} {path}"]


def test_a_second_install_only_brings_up_to_date(launchctl: StandIn, service: Service) -> None:
    manager = Launchd()
    manager.install(service)
    told(launchctl)
    assert manager.install(service) == "unchanged"
    assert told(launchctl) == [f"enable {TARGET}"]
    assert manager.install(Service(["--model", "/other"], service.log)) == "changed"
    assert [each.split()[0] for each in told(launchctl)] == ["bootout", "enable", "bootstrap"]


def test_stop_start_and_uninstall(launchctl: StandIn, service: Service) -> None:
    manager = Launchd()
    with pytest.raises(ServiceError, match="service install"):
        manager.start()
    manager.install(service)
    told(launchctl)
    manager.start()  # loaded already: at most started
    manager.stop()
    manager.stop()
    manager.start()
    assert [each.split()[0] for each in told(launchctl)] == ["kickstart", "bootout", "bootstrap"]
    assert manager.uninstall()
    assert not manager.uninstall()
    assert [each.split()[0] for each in told(launchctl)] == ["bootout"]
    assert not manager.path.exists()


def test_status_reads_what_launchctl_prints(launchctl: StandIn, service: Service) -> None:
    manager = Launchd()
    assert (manager.status().installed, manager.status().running) == (False, False)
    manager.install(service)
    found = manager.status()
    assert (found.running, found.pid, found.detail) == (True, 77, "running, last exit code (never exited)")


def test_a_refusal_is_told_in_its_words(launchctl: StandIn, service: Service) -> None:
    launchctl.fails("bootstrap", "Bootstrap failed: 5: Input/output error\n")
    with pytest.raises(ServiceError, match="5: Input/output error"):
        Launchd().install(service)


def test_without_launchctl_it_is_said(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ServiceError, match="PATH"):
        Launchd().status()


def test_the_log_is_shown_from_its_file(home: Path, service: Service, capfd: pytest.CaptureFixture[str]) -> None:
    service.log.parent.mkdir(parents=True)
    service.log.write_text("one\ntwo\nthree\n")
    subprocess.run(Launchd().log_command(service.log, 2, follow=False), check=True)
    assert capfd.readouterr().out == "two\nthree\n"


@pytest.mark.parametrize(("platform", "name"), [("darwin", "launchd"), ("linux", "systemd")])
def test_each_system_has_its_manager(home: Path, monkeypatch: pytest.MonkeyPatch, platform: str, name: str) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert find_manager().name == name
