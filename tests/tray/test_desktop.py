"""Guards the icon on a real X display with a real tray: docked, clicked, obeyed, there again after crashes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from selfdraft.cli.app import main
from selfdraft.tray import surface, x11_icon
from selfdraft.tray.icon import only_one
from tests.server.conftest import within
from tests.support.needs import lacking

_PROGRAMS = ("Xvfb", "trayer", "xdotool")
_RECORD = '#!/bin/sh\nprintf "%s\\n" "$*" >> "{file}"\n'


@dataclass
class Desktop:
    """A display with a tray."""

    name: str
    folder: Path
    tray: subprocess.Popen[bytes]

    @property
    def environment(self) -> dict[str, str]:
        """Of a user of it, who has a browser and a notification program that write down what they are told."""
        return {
            **os.environ,
            "DISPLAY": self.name,
            "HOME": str(self.folder),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "SELFDRAFT_CONFIG_DIR": str(self.folder / "config"),
            "SELFDRAFT_PORT": "0",
            "BROWSER": str(self.folder / "bin/browser"),
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
        }

    def start_tray(self) -> None:
        self.tray = subprocess.Popen(
            ["trayer", "--edge", "top", "--align", "right", "--widthtype", "request", "--height", "26"],
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def xdotool(self, *arguments: str) -> str:
        done = subprocess.run(["xdotool", *arguments], env=self.environment, capture_output=True, text=True)
        return done.stdout.strip()

    def icon(self) -> str:
        """The icon's window; empty if there is none to be seen."""
        return self.xdotool("search", "--onlyvisible", "--name", "^Selfdraft: ").partition("\n")[0]

    def title(self) -> str:
        """The icon's tooltip: state and figures."""
        return self.xdotool("getwindowname", self.icon())

    def says(self, text: str, seconds: float = 60) -> bool:
        return within(seconds, lambda: text in self.title())

    def click(self, button: int = 1) -> None:
        """Click the icon, and wait for the menu."""
        assert within(10, lambda: bool(self.icon()))
        self.xdotool("mousemove", "--window", self.icon(), "5", "5", "click", str(button))
        assert within(10, lambda: bool(self.xdotool("search", "--onlyvisible", "--name", "^Selfdraft$")))

    def choose(self, place: int) -> None:
        """Click the icon, and choose one of the entries that do something, by the keyboard."""
        self.click()
        self.xdotool("key", "--delay", "40", *["Down"] * place, "Return")
        assert within(10, lambda: not self.xdotool("search", "--onlyvisible", "--name", "^Selfdraft$"))

    def told(self, program: str) -> str:
        path = self.folder / program
        return path.read_text() if path.exists() else ""

    def server(self) -> dict[str, object] | None:
        path = self.folder / "state/selfdraft/server.json"
        found: dict[str, object] | None = json.loads(path.read_text()) if path.exists() else None
        return found


@contextmanager
def x_display() -> Iterator[str]:
    for program in _PROGRAMS:
        if shutil.which(program) is None:
            lacking(f"there is no {program} (apt install xvfb trayer xdotool)")
    reader, writer = os.pipe()
    command = ["Xvfb", "-displayfd", str(writer), "-screen", "0", "900x600x24", "-nolisten", "tcp"]
    server = subprocess.Popen(command, pass_fds=[writer], stderr=subprocess.DEVNULL)
    os.close(writer)
    try:
        with os.fdopen(reader) as told:
            yield f":{told.readline().strip()}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def display() -> Iterator[str]:
    with x_display() as name:
        yield name


@pytest.fixture
def desktop(display: str, tmp_path: Path) -> Iterator[Desktop]:
    (tmp_path / "bin").mkdir()
    for name in ("browser", "notify-send"):
        program = tmp_path / "bin" / name
        program.write_text(_RECORD.format(file=tmp_path / name))
        program.chmod(0o755)
    made = Desktop(display, tmp_path, None)  # type: ignore[arg-type]
    made.start_tray()
    yield made
    made.tray.kill()
    made.tray.wait()


@contextmanager
def icon_of(desktop: Desktop) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "selfdraft", "tray"], env=desktop.environment, stderr=subprocess.PIPE, text=True
    )
    try:
        assert desktop.says("Stopped", 30)
        yield process
    finally:
        process.kill()
        _, said = process.communicate()
        assert "Traceback" not in said, said
        assert within(40, lambda: not (found := desktop.server()) or not _runs(int(str(found["pid"]))))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_server_is_started_used_lost_started_again_and_stopped(desktop: Desktop) -> None:
    with icon_of(desktop) as icon:
        desktop.choose(1)  # Start
        assert desktop.says("Serving reference", 120)
        found = desktop.server()
        assert found is not None
        url = f"http://127.0.0.1:{found['port']}"
        desktop.choose(1)  # Open the chat page
        assert within(20, lambda: url in desktop.told("browser"))

        asked = {"model": "default", "prompt": "Hello", "max_tokens": 100, "ignore_eos": True}
        httpx.post(f"{url}/v1/completions", json=asked, timeout=60, trust_env=False).raise_for_status()
        assert desktop.says("tok/s")

        os.kill(int(str(found["pid"])), signal.SIGKILL)
        assert desktop.says("Crashed: ended by signal SIGKILL")
        assert within(10, lambda: "Crashed: ended by signal SIGKILL" in desktop.told("notify-send"))
        assert icon.poll() is None
        desktop.choose(1)  # Start again
        assert desktop.says("Serving reference", 120)

        desktop.choose(2)  # Stop
        assert desktop.says("Stopped")
        assert desktop.server() is None
        icon.terminate()
        assert icon.wait(10) == 0


def test_the_icon_comes_back_with_a_new_tray_and_takes_its_server_along(desktop: Desktop) -> None:
    with icon_of(desktop) as icon:
        desktop.choose(1)
        assert desktop.says("Serving reference", 120)
        for end in (signal.SIGTERM, signal.SIGKILL):
            desktop.tray.send_signal(end)
            desktop.tray.wait(10)
            desktop.start_tray()
            assert within(20, lambda: bool(desktop.icon()))
            assert desktop.says("Serving reference")
        desktop.click(button=3)
        desktop.xdotool("key", "Escape")
        icon.send_signal(signal.SIGINT)
        assert icon.wait(10) == 0
        assert within(40, lambda: desktop.server() is None)


def test_a_menu_page_deeper_and_back_and_a_click_elsewhere(desktop: Desktop) -> None:
    def shown() -> bool:
        return bool(desktop.xdotool("search", "--onlyvisible", "--name", "^Selfdraft$"))

    with icon_of(desktop):
        desktop.click()
        desktop.xdotool("key", "--delay", "40", "Down", "Down", "Down", "Return")  # Mode
        desktop.xdotool("key", "--delay", "40", "Down", "Down", "Down", "Return")  # behind "back" and auto: turbo
        settings = desktop.folder / "config/settings.toml"
        assert within(10, settings.exists)
        assert 'mode = "turbo"' in settings.read_text()
        desktop.click()
        desktop.xdotool("mousemove", "20", "500", "click", "1")
        assert within(10, lambda: not shown())
        assert desktop.server() is None


@pytest.fixture
def tray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Run the command in this process where it must fail, and return what it says."""
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def call() -> str:
        assert main(["tray"]) == 1
        return " ".join(capsys.readouterr().err.split())

    return call


def test_without_a_display_the_remedy_is_named(tray: Callable[[], str]) -> None:
    assert "`selfdraft service install`" in tray()
    done = subprocess.run(  # python-xlib leaves sockets open that it could not connect
        [sys.executable, "-m", "selfdraft", "tray"],
        env={**os.environ, "DISPLAY": ":9999"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "':9999' cannot be used" in done.stderr
    assert "Traceback" not in done.stderr


def test_on_wayland_alone_the_libraries_are_named(tray: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    assert "gir1.2-ayatanaappindicator3-0.1" in tray()


def test_without_the_extra_it_is_named(tray: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surface.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'selfdraft[tray]'" in tray()


def test_without_a_tray_it_is_said(display: str, tray: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.setattr(x11_icon, "_PATIENCE", 0.3)
    assert "no tray on this display takes icons" in tray()


def test_there_is_one_icon_for_each_user(tray: Callable[[], str], tmp_path: Path) -> None:
    with only_one(tmp_path / "selfdraft/tray.lock"):
        assert f"the icon is there already (process {os.getpid()})" in tray()
    assert "there already" not in tray()
