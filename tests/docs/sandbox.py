"""A machine for the commands of one page: a home of its own, a Hub on loopback, ports that nobody has, no network.

Commands run one after another in one folder, as a reader would run them. What serves keeps running while those behind
it run, and is stopped before the next one serves, or at the page's end. `make` says what it would do.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from .pages import ROOT

__all__ = ["Ran", "Sandbox", "serves", "shown_otherwise"]

_PATIENCE = 180  # seconds for one command
_ADDRESS = re.compile(r"(127\.0\.0\.1:|localhost:|--port[ =])(\d{4,5})\b")
_SERVES = re.compile(r"(?:^|\s)selfdraft (?:serve\b|start\b.*--browser)(?!.*(?:--help|-h\b|--stop))")
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@dataclass(frozen=True)
class Ran:
    """How a command ended, and what it printed to both streams."""

    code: int
    output: str


def serves(command: str) -> bool:
    """Whether a command goes on until it is stopped."""
    return _SERVES.search(command) is not None and not command.rstrip().endswith("&")


def shown_otherwise(output: str, expected: list[str]) -> str:
    """Why an output is not what a page shows; "" if it is. "…" is anything, alone on a line any number of lines."""
    lines = [line.rstrip() for line in expected]
    parts = [r"(?:[^\n]*\n)*" if line.strip() in ("…", "...") else f"{_pattern(line)}\n" for line in lines]
    found = "\n".join(line.rstrip() for line in output.strip("\n").split("\n")) + "\n"
    if re.fullmatch("".join(parts), found):
        return ""
    return f"the page shows\n{chr(10).join(lines)}\nand it printed\n{found}"


def _pattern(line: str) -> str:
    return "[^\n]*".join(re.escape(" ".join(part.split(" "))) for part in line.split("…"))


@dataclass
class Sandbox:
    """See above.

    Args:
        folder: an empty one. hub: URL of the Hub.
    """

    folder: Path
    hub: str
    ports: dict[str, str] = field(default_factory=dict)
    server: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        for name in ("bin", "home", "work"):
            (self.folder / name).mkdir()
        self._program("selfdraft", f'exec "{sys.executable}" -m selfdraft "$@"')
        self._program("make", f'exec /usr/bin/make --no-print-directory -n -C "{ROOT}" "$@"')
        self._program("python", f'exec "{sys.executable}" "$@"')

    def _program(self, name: str, line: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        """Nothing of the user's but the language."""
        home = self.folder / "home"
        return {
            "HOME": str(home),
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "LANG": "C.UTF-8",
            "NO_COLOR": "1",
            "TERM": "dumb",
            "COLUMNS": "120",
            "HTTP_PROXY": "http://127.0.0.1:9",  # nothing listens there: what is not on this machine cannot be reached
            "HTTPS_PROXY": "http://127.0.0.1:9",
            "NO_PROXY": "127.0.0.1,localhost",
            "HF_ENDPOINT": self.hub,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "SELFDRAFT_PORT": self._port("8000"),
        }

    def run(self, command: str) -> Ran:
        """A command to its end; of one that serves, to where it answers."""
        command = _ADDRESS.sub(lambda found: found[1] + self._port(found[2]), command)
        return self._serve(command) if serves(command) else self._finish(["bash", "-c", command])

    def python(self, code: str) -> Ran:
        """A program."""
        code = _ADDRESS.sub(lambda found: found[1] + self._port(found[2]), code)
        return self._finish([sys.executable, "-c", code])

    def stop(self) -> None:
        """End what serves."""
        if self.server is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.server.pid, signal.SIGTERM)
        try:
            self.server.wait(30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.server.pid, signal.SIGKILL)
            self.server = None

    def _finish(self, arguments: list[str]) -> Ran:
        with self._log("command") as path, path.open("wb") as log:
            process = self._started(arguments, log.fileno())
            try:
                code = process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                code = -signal.SIGKILL
            finally:  # whatever a command left behind goes with it
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            return Ran(code, self._said(path))

    def _serve(self, command: str) -> Ran:
        self.stop()
        with self._log("server") as path, path.open("wb") as log:
            self.server = self._started(["bash", "-c", f"exec {command}"], log.fileno())
            end = time.monotonic() + _PATIENCE
            while time.monotonic() < end and self.server.poll() is None:
                found = re.search(r"http://[\d.]+:\d+", self._said(path, mapped=False))
                if found and _is_ready(found[0]):
                    return Ran(0, self._said(path))
                time.sleep(0.2)
            return Ran(self.server.poll() or 1, self._said(path))

    def _started(self, arguments: list[str], log: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            arguments,
            cwd=self.folder / "work",
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    @contextlib.contextmanager
    def _log(self, name: str) -> Iterator[Path]:
        yield self.folder / f"{name}.log"

    def _said(self, path: Path, *, mapped: bool = True) -> str:
        """What was printed, with the ports that a page has."""
        text = _COLOUR.sub("", path.read_text(encoding="utf-8", errors="replace"))
        for shown, real in self.ports.items() if mapped else ():
            text = text.replace(real, shown)
        return text.replace(str(self.folder / "home"), "~")

    def _port(self, shown: str) -> str:
        """A free port in the place of one that a page names."""
        if shown not in self.ports:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.ports[shown] = str(probe.getsockname()[1])
        return self.ports[shown]


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
