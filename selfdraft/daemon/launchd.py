"""A launchd agent of the user. Sources: launchd.plist(5), launchctl(1). Not run on a Mac yet."""

from __future__ import annotations

import os
import plistlib
import re
import time
from pathlib import Path

from ..errors import ServiceError
from .service import Manager, Outcome, Service, Status, call

__all__ = ["Launchd"]

_LABEL = "selfdraft.server"
_MISSING = "launchctl was not found, which is part of macOS: see that /bin is on your PATH"
_THROTTLE = 30  # seconds from one start to the next, at least: launchd has no growing pause
_STOP = 45  # seconds in which answers that run may finish


class Launchd(Manager):
    """See `Manager`."""

    name = "launchd"
    has_journal = False

    def __init__(self) -> None:
        self.path = Path.home() / "Library" / "LaunchAgents" / f"{_LABEL}.plist"
        self._domain = f"gui/{os.getuid()}"
        self._target = f"{self._domain}/{_LABEL}"

    def text(self, service: Service) -> str:
        content = {
            "Label": _LABEL,
            "ProgramArguments": [*service.command, "--log-file", str(service.log)],
            "EnvironmentVariables": dict(service.environment),
            "WorkingDirectory": str(Path.home()),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": _THROTTLE,
            "ExitTimeOut": _STOP,
            "ProcessType": "Interactive",  # not slowed down like work that nobody waits for
            "Umask": 0o077,
            # What is printed beside the log, such as the last words of a crash.
            "StandardOutPath": str(service.log.with_name("service-output.txt")),
            "StandardErrorPath": str(service.log.with_name("service-output.txt")),
        }
        return plistlib.dumps(content).decode()

    def install(self, service: Service) -> Outcome:
        loaded = self._printed() is not None
        outcome = self._write(service)
        if loaded and outcome != "unchanged":
            self._unload()
        self._call("enable", self._target)
        if not loaded or outcome != "unchanged":
            self._call("bootstrap", self._domain, str(self.path))
        return outcome

    def uninstall(self) -> bool:
        if self._printed() is not None:
            self._unload()
        existed = self.path.exists()
        self.path.unlink(missing_ok=True)
        return existed

    def start(self) -> None:
        self._check_installed()
        if self._printed() is None:
            self._call("bootstrap", self._domain, str(self.path))
        else:
            self._call("kickstart", self._target)

    def stop(self) -> None:
        self._check_installed()
        if self._printed() is not None:
            self._unload()

    def status(self) -> Status:
        shown = self._printed()
        if shown is None:
            return Status(self.path.exists(), False, None, "not loaded")
        state, pid, code = (_value(shown, name) for name in ("state", "pid", "last exit code"))
        detail = f"{state or 'unknown'}{f', last exit code {code}' if code else ''}"
        return Status(self.path.exists(), state == "running", int(pid) if pid.isdecimal() else None, detail)

    def log_command(self, service_log: Path, lines: int, *, follow: bool) -> list[str]:
        return ["tail", "-n", str(lines), *(["-F"] if follow else []), str(service_log)]

    def _printed(self) -> str | None:
        """What launchd says of the service; None if it has not loaded it."""
        try:
            return self._call("print", self._target)
        except ServiceError as error:
            if str(error) == _MISSING:
                raise
            return None

    def _unload(self) -> None:
        """Stop it, and wait: launchd takes nothing under the same name before that is done."""
        self._call("bootout", self._target)
        end = time.monotonic() + _STOP
        while self._printed() is not None:
            if time.monotonic() > end:
                raise ServiceError(f"launchd does not let go of {self._target}: try again in a minute")
            time.sleep(0.2)

    def _call(self, *arguments: str) -> str:
        return call(["launchctl", *arguments], _MISSING)


def _value(shown: str, name: str) -> str:
    """A value of what `launchctl print` says; its layout is not promised by anybody."""
    found = re.search(rf"^\s*{re.escape(name)} = (.+)$", shown, re.MULTILINE)
    return found[1].strip() if found else ""
