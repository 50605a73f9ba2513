"""`python -m selfdraft.fans.watchdog FOLDER EXECUTABLE`: the one process that moves the fans, and gives them back.

While a claim in FOLDER lives the fans are at maximum. When the last has ended, in whatever way, it runs `auto`, reads
`status`, and tries again until the fans are macOS's; only then it forgets the claims and ends. It is detached, ignores
signals that a terminal or a shell sends, and imports the standard library alone, all of it before it begins.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import FanError
from .claims import Claim, Claims, Outcome
from .detached import detach
from .thermalforge import REPAIR, ThermalForge

__all__ = ["Watchdog", "look_after", "main"]

_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # seconds between attempts; the last one again and again
_GLANCE = 0.25  # seconds between looks at the claims
_LOG_BYTES = 64 * 1024


class Watchdog:
    """Sees to it that the fans are where the claims want them.

    Args:
        pauses: seconds after the first, second, ... attempt in a row that failed; the last one for all others.
    """

    def __init__(self, claims: Claims, fans: ThermalForge, *, pauses: Sequence[float] = _PAUSES) -> None:
        self._claims = claims
        self._fans = fans
        self._pauses = pauses
        self._failures = 0
        self._told = Outcome()

    def run(self) -> None:
        """Hold the fans while they are claimed; return when they are not, and are given back."""
        held: set[str] = set()
        while True:
            dead, live = self._claims.dead(), self._claims.live()
            names = {claim.name for claim in live}
            if not live:
                held = set()
                if self._attempt("automatic", self._give_back, dead):
                    return
            elif not names <= held and self._attempt("max", self._hold, live):
                held = names
            self._wait(names, done=bool(live) and names <= held)

    def _attempt(self, fans: str, act: Callable[[Sequence[Claim]], None], claims: Sequence[Claim]) -> bool:
        """Whether it worked. Nothing that goes wrong ends the watchdog."""
        error = None
        try:
            act(claims)
        except Exception as raised:
            error = str(raised) or type(raised).__name__
        self._failures = self._failures + 1 if error else 0
        self._tell(Outcome(fans, error, [claim.name for claim in claims]))
        return error is None

    def _hold(self, live: Sequence[Claim]) -> None:
        self._fans.max()
        status = self._fans.status()
        if status.states != {"max"}:
            raise FanError(f"after `thermalforge max` the fans are {status}, not at maximum: {REPAIR}")

    def _give_back(self, dead: Sequence[Claim]) -> None:
        failure: FanError | None = None
        try:
            self._fans.auto()
        except FanError as error:
            failure = error  # what counts is how the fans are
        status = self._fans.status()
        if status.states != {"automatic"}:
            if failure is not None:
                raise failure
            if not status.states <= {"automatic", "other"}:  # other: another program has taken them since
                raise FanError(f"after `thermalforge auto` the fans are {status}, not automatic: {REPAIR}")
        self._claims.forget(dead)

    def _wait(self, live: set[str], *, done: bool) -> None:
        """Until it is time for another look, or attempt; less when other claims live than before."""
        pause = _GLANCE if done else self._pauses[min(self._failures, len(self._pauses)) - 1]
        end = time.monotonic() + pause
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _GLANCE))
            if {claim.name for claim in self._claims.live()} != live:
                self._failures = 0
                return

    def _tell(self, outcome: Outcome) -> None:
        """Leave what happened for others to read, if it is new. A full disk does not matter here."""
        if outcome == self._told:
            return
        self._told = outcome
        with contextlib.suppress(OSError):
            self._claims.outcome = outcome
        with contextlib.suppress(OSError):
            log = self._claims.log
            long = log.exists() and log.stat().st_size > _LOG_BYTES
            with log.open("w" if long else "a", encoding="utf-8") as file:
                said = f"fans {outcome.fans}: {outcome.error or 'done'}"
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {said}\n")


def look_after(claims: Claims, fans: ThermalForge, ready: Callable[[], None]) -> None:
    """Be the watchdog, unless another process is it.

    Args:
        ready: called once there is one, whichever.
    """
    lock = claims.watch()
    if lock is not None:
        with contextlib.suppress(OSError):
            claims.outcome = Outcome()
    with contextlib.suppress(OSError):  # nobody listens any more
        ready()
    while lock is not None:
        Watchdog(claims, fans).run()
        lock.release()
        # A claim that was made before the lock was free relies on this process.
        lock = claims.watch() if claims.all() else None


def main(folder: str, executable: str) -> int:
    """Look after the claims in a folder, as a process that outlives its starter."""
    ready = detach()
    for each in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    look_after(Claims(Path(folder)), ThermalForge(Path(executable)), ready)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
