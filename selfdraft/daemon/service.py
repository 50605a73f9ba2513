"""What a service is, whoever keeps it up: what it runs, where it may write, what becomes of it. Knows no manager."""

from __future__ import annotations

import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..errors import ServiceError
from ..files import write_atomically

__all__ = ["KEPT_VARIABLES", "Manager", "Outcome", "Service", "Status", "call"]

# What says where things are; never what may be secret. A service starts without its user's shell.
KEPT_VARIABLES = (
    "SELFDRAFT_CONFIG_DIR",
    "HF_HOME",
    "HF_HUB_CACHE",
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
    "XDG_STATE_HOME",
)

Outcome = Literal["installed", "changed", "unchanged"]

_PATIENCE = 60.0  # seconds: a stop waits for answers that run


@dataclass(frozen=True)
class Service:
    """What is to run.

    Attributes:
        flags: of `selfdraft serve`; all else comes from settings.toml.
        log: file for its log, where the manager keeps none.
        writable: folders that it writes to; they exist.
        environment: variables that it gets.
    """

    flags: Sequence[str]
    log: Path
    writable: Sequence[Path] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        """The program and its arguments, by absolute paths."""
        return [os.path.abspath(sys.executable), "-m", "selfdraft", "serve", *self.flags]


@dataclass(frozen=True)
class Status:
    """How a service is.

    Attributes:
        installed: whether its file is there.
        running: whether it runs now.
        pid: its process; None while it does not run.
        detail: the manager's own words.
    """

    installed: bool
    running: bool
    pid: int | None
    detail: str


class Manager(ABC):
    """Keeps one service of one user up.

    Attributes:
        name: of the manager.
        path: the file that describes the service.
        has_journal: whether it keeps the log itself.
    """

    name: str
    path: Path
    has_journal: bool

    @abstractmethod
    def text(self, service: Service) -> str:
        """The file that describes a service."""

    @abstractmethod
    def install(self, service: Service) -> Outcome:
        """Write the file, start the service, and have it started at each login. Done again, it only brings up to date.

        Raises:
            ServiceError: the manager is not there, or refuses.
        """

    @abstractmethod
    def uninstall(self) -> bool:
        """Stop the service and take its file away; false if there was none.

        Raises:
            ServiceError: the manager is not there, or refuses.
        """

    @abstractmethod
    def start(self) -> None:
        """Start what is installed.

        Raises:
            ServiceError: it is not installed; the manager is not there, or refuses.
        """

    @abstractmethod
    def stop(self) -> None:
        """Stop it until the next start or login; it stays installed.

        Raises:
            ServiceError: it is not installed; the manager is not there, or refuses.
        """

    @abstractmethod
    def status(self) -> Status:
        """How it is.

        Raises:
            ServiceError: the manager is not there.
        """

    @abstractmethod
    def log_command(self, service_log: Path, lines: int, *, follow: bool) -> list[str]:
        """What shows the log.

        Args:
            service_log: where `Service.log` was.
            lines: of its end.
        """

    def _write(self, service: Service) -> Outcome:
        text = self.text(service)
        before = self.path.read_text(encoding="utf-8") if self.path.exists() else None
        if before == text:
            return "unchanged"
        write_atomically(self.path, text)
        return "installed" if before is None else "changed"

    def _check_installed(self) -> None:
        if not self.path.exists():
            raise ServiceError(f"there is no service yet ({self.path}): `selfdraft service install` makes one")


def call(command: Sequence[str], missing: str) -> str:
    """The output of a manager's program.

    Args:
        missing: the message if the program is not there.

    Raises:
        ServiceError: it is not there, fails, or does not come back.
    """
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except FileNotFoundError as error:
        raise ServiceError(missing) from error
    except subprocess.TimeoutExpired as error:
        raise ServiceError(f"`{' '.join(command)}` does not come back") from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise ServiceError(f"`{' '.join(command)}` failed: {said}")
    return done.stdout
