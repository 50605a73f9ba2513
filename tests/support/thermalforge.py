"""A stand-in for ThermalForge: an executable that records its calls, keeps the state of two fans, and fails as told.

It prints what ThermalForge prints; no fan of any machine moves.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from selfdraft.fans.claims import Claims
from selfdraft.fans.thermalforge import ThermalForge

__all__ = ["AS_MAC", "StandIn", "standing_in", "within"]

AS_MAC = "from selfdraft.fans import thermalforge; thermalforge._on_macos = lambda: True\n"  # for a process of its own

_SCRIPT = """#!{python} -SE
import json, os, sys, time

here, verb = os.path.dirname(os.path.abspath(__file__)), sys.argv[1]
with open(here + "/calls", "a") as file:
    file.write(verb + "\\n")
act = "work"
try:
    with open(here + "/plan-" + verb) as file:
        act, *rest = file.read().split()
    with open(here + "/plan-" + verb, "w") as file:
        file.write(" ".join(rest))
except (OSError, ValueError):
    pass
if act == "hang":
    time.sleep(600)
if act == "slow":
    time.sleep(1)
    act = "work"
if act == "fail":
    sys.exit("Error: not allowed without sudo")
if act == "garbage":
    print("Segmentation fault: 11")
    sys.exit()
if verb in ("max", "auto") and act == "work":
    with open(here + "/state.new", "w") as file:
        file.write(verb)
    os.rename(here + "/state.new", here + "/state")
if verb == "status":
    with open(here + "/state") as file:
        state = file.read()
    modes = {{"auto": ("auto", 0), "max": ("manual", 5900), "between": ("manual", 3000), "stuck": ("manual", 0)}}
    mode, target = modes[act if act in modes else state]
    fan = {{"actual_rpm": 2310, "target_rpm": target, "min_rpm": 1200, "max_rpm": 5900, "mode": mode}}
    print(json.dumps({{"fans": [dict(fan, index=0), dict(fan, index=1)], "temperatures": {{"Tp01": 51.5}}}}))
"""


class StandIn:
    """The executable in a folder, and the claims in another.

    Attributes:
        fans: it, as the package sees it.
        claims: those that its watchdogs look after.
        environment: of a process that is to find it and these claims.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "bin"
        self._folder.mkdir()
        executable = self._folder / "thermalforge"
        executable.write_text(_SCRIPT.format(python=sys.executable))
        executable.chmod(0o755)
        self.become("auto")
        self.fans = ThermalForge(executable, timeout=20)
        self.claims = Claims(folder / "state/selfdraft/fans")
        self.environment = {
            "HOME": str(folder),
            "XDG_STATE_HOME": str(folder / "state"),
            "PATH": f"{self._folder}{os.pathsep}{os.environ['PATH']}",
        }

    @property
    def calls(self) -> list[str]:
        """What it was called with, but `status`, in order."""
        return [verb for verb in self.all_calls if verb != "status"]

    @property
    def all_calls(self) -> list[str]:
        """What it was called with, in order."""
        path = self._folder / "calls"
        return path.read_text().split() if path.exists() else []

    @property
    def state(self) -> str:
        """What the fans were told last: "max" or "auto"."""
        return (self._folder / "state").read_text()

    def become(self, state: str) -> None:
        """Put the fans into a state: "auto", "max", "between" (another program's) or "stuck" (held at no speed)."""
        (self._folder / "state").write_text(state)

    def plan(self, verb: str, *acts: str) -> None:
        """What its next calls do: work, slow (after a second), fail, hang, garbage, lie; a status may be a state."""
        (self._folder / f"plan-{verb}").write_text(" ".join(acts))

    def settled(self, seconds: float = 20) -> bool:
        """Whether the fans are given back, and nothing of ours is left, within so many seconds."""
        return within(seconds, lambda: self.state == "auto" and not self.claims.all() and self.claims.watchdog is None)


@contextlib.contextmanager
def standing_in(folder: Path) -> Iterator[StandIn]:
    """A stand-in; what still looks after its fans at the end is killed."""
    stand_in = StandIn(folder)
    try:
        yield stand_in
    finally:
        for pid in [stand_in.claims.watchdog, *(claim.pid for claim in stand_in.claims.live())]:
            if pid and pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    """Whether something comes to hold."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
