"""ThermalForge's command line: asks how the fans are, holds them at maximum, gives them back. Knows no claims.

`status` prints {"fans": [{"index", "actual_rpm", "target_rpm", "min_rpm", "max_rpm", "mode"}, ...], ...}. A mode is
"auto" or "system" while macOS decides, "manual" or something unheard of otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import FanError

__all__ = ["Fan", "FanState", "FanStatus", "ThermalForge", "find"]

FanState = Literal["automatic", "max", "other", "unclear"]

_TIMEOUT = 25.0  # seconds; to unlock the fans of an M1 to M4 takes up to ten for each
_AUTOMATIC = frozenset({"auto", "automatic", "system"})
_AT_MAXIMUM = 0.98  # of the highest speed
_USUAL_FOLDERS = ("/opt/homebrew/bin", "/usr/local/bin")  # what was not started from a shell may lack them
_SAID = 160  # characters of another program's words

INSTALL = "`brew install ProducerGuy/tap/thermalforge`, then `sudo thermalforge install` once"
REPAIR = "`sudo thermalforge install` starts its service anew"


@dataclass(frozen=True)
class Fan:
    """A fan.

    Attributes:
        state: "automatic": macOS decides. "max": held at maximum. "other": held at a speed between, which is another
            program's doing. "unclear": held, and its speed cannot be right or cannot be read.
        rpm: its speed, revolutions a minute; None if unknown.
    """

    state: FanState
    rpm: int | None


@dataclass(frozen=True)
class FanStatus:
    """All fans of the machine; there is one at least."""

    fans: tuple[Fan, ...]

    @property
    def states(self) -> set[FanState]:
        """The states of the fans."""
        return {fan.state for fan in self.fans}

    def __str__(self) -> str:
        return " and ".join(sorted(self.states))


@dataclass(frozen=True)
class ThermalForge:
    """The installed program.

    Args:
        executable: its absolute path.
        timeout: seconds that a call may take; then it is killed.
    """

    executable: Path
    timeout: float = _TIMEOUT

    def status(self) -> FanStatus:
        """How the fans are.

        Raises:
            FanError: it fails, takes too long, or says what cannot be understood; there is no fan.
        """
        printed = self._call("status")
        try:
            fans = tuple(_fan(entry) for entry in json.loads(printed)["fans"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            said = " ".join(printed[:_SAID].split())
            raise FanError(
                f"`thermalforge status` printed nothing that could be understood ({said!r}): "
                "`brew upgrade thermalforge`, then `sudo thermalforge install`"
            ) from error
        if not fans:
            raise FanError("this machine has no fans: use the mode sustained")
        return FanStatus(fans)

    def max(self) -> None:
        """Hold the fans at maximum. Raises FanError: it fails or takes too long."""
        self._call("max")

    def auto(self) -> None:
        """Give the fans back to macOS. Raises FanError: it fails or takes too long. Success proves little: look."""
        self._call("auto")

    def _call(self, verb: str) -> str:
        """What a call prints on standard output."""
        try:
            process = subprocess.Popen(
                [self.executable, verb],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,  # Ctrl-C is not for it, and all of it can be killed
            )
        except OSError as error:
            raise FanError(f"{self.executable} cannot be run ({error.strerror}): {INSTALL}") from error
        with process:
            try:
                printed, complaint = process.communicate(timeout=self.timeout)
            except BaseException as error:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise FanError(f"`thermalforge {verb}` did not end in {self.timeout:g} s: {REPAIR}") from error
                raise
        if process.returncode:
            said = " ".join((complaint or printed).split())[-_SAID:] or f"exit code {process.returncode}"
            raise FanError(f"`thermalforge {verb}` failed ({said}): {REPAIR}")
        return printed


def find() -> ThermalForge:
    """The program.

    Raises:
        FanError: this is no Mac, or it is not installed.
    """
    if not _on_macos():
        raise FanError(
            f"fans are held by ThermalForge, which is for Macs, and this is {platform.system()}: use the mode "
            "sustained, which is the same without the fans"
        )
    folders = os.pathsep.join([os.environ.get("PATH", os.defpath), *_USUAL_FOLDERS])
    path = shutil.which("thermalforge", path=folders)
    if path is None:
        raise FanError(f"fans are held by ThermalForge, which is not installed: {INSTALL}")
    return ThermalForge(Path(path).absolute())


def _on_macos() -> bool:
    return sys.platform == "darwin"


def _fan(entry: dict[str, Any]) -> Fan:
    rpm = entry.get("actual_rpm")
    return Fan(_state(entry), int(rpm) if isinstance(rpm, int | float) else None)


def _state(entry: dict[str, Any]) -> FanState:
    if str(entry["mode"]).lower() in _AUTOMATIC:
        return "automatic"
    least, target, most = (entry.get(name) for name in ("min_rpm", "target_rpm", "max_rpm"))
    if not isinstance(target, int | float) or not isinstance(most, int | float) or most <= 0:
        return "unclear"
    if target >= _AT_MAXIMUM * most:
        return "max"
    lowest = least if isinstance(least, int | float) and least > 0 else 1
    return "other" if target >= lowest else "unclear"
