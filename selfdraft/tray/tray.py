"""The state machine behind the icon: finds, starts, watches and stops the server. Knows no screen and no HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import FanError, SelfdraftError
from ..fans import thermalforge
from ..server import instance as instances
from ..server.instance import Instance
from .choices import Choices, Mode, keep
from .process import ServerProcess
from .rates import Rates, counts
from .reading import Reading, State

__all__ = ["Server", "Tray", "modes_here"]

_GONE = "the server (process {pid}) ended without a word; its own log may say why"


@dataclass(frozen=True)
class Server:
    """How a server is asked.

    Attributes:
        health: what /health at a URL says; "status" is "unreachable" if nothing answers.
        metrics: the text of /metrics.
    """

    health: Callable[[str], dict[str, Any]]
    metrics: Callable[[str], str]


class Tray:
    """One server, ours or another's, as the icon sees it.

    Args:
        process: starts servers.
        server: asks them.
        chosen: what was chosen.
        now: seconds on a clock that only goes forward.

    Attributes:
        chosen: what would be started.
        reading: how it was at the last `poll`.
    """

    def __init__(
        self,
        process: ServerProcess,
        server: Server,
        chosen: Choices,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.chosen = chosen
        self.reading = Reading("stopped", chosen.model)
        self._process = process
        self._server = server
        self._now = now
        self._rates = Rates()
        self._known: Instance | None = None
        self._stopping = False
        self._again = False
        self._crash = ""  # why the last server is gone
        self._notice = ""  # what else went wrong
        self._lock = threading.RLock()  # a menu acts while another thread polls

    def poll(self) -> Reading:
        """Look at the server, and do what is due."""
        with self._lock:
            self._notice_end()
            found = instances.find()
            if found is not None and found != self._known:
                self._rates.clear()
                self._crash = ""
                self._stopping = self._stopping and found.pid == self._process.pid
            self._known = found
            self.reading = self._look(found)
            return self.reading

    def start(self) -> None:
        """Start a server, unless there is one."""
        with self._lock:
            if self._process.pid is not None or self.poll().alive:
                return
            self._crash, self._notice, self._stopping, self._again = "", "", False, False
            try:
                self._process.start(self._flags(), keep=self.chosen.keep_server)
            except SelfdraftError as error:
                self._crash = str(error)
            self.poll()

    def stop(self) -> None:
        """Stop the server, whoever started it. Answers that run may finish; a second call ends them."""
        with self._lock:
            self._again = False
            self._end()
            self.poll()

    def choose(self, **choice: Any) -> None:
        """Choose a model, a mode, or whether the server is kept: remembered; our server starts again if it must."""
        with self._lock:
            before, self.chosen = self.chosen, replace(self.chosen, **choice)
            if before == self.chosen:
                return
            try:
                keep(choice)
            except (OSError, SelfdraftError) as error:
                self._notice = f"this is not remembered: {error}"
            self._process.outlive(self.chosen.keep_server)
            if self._process.pid is not None and (before.model, before.mode) != (self.chosen.model, self.chosen.mode):
                self._end()
                self._again = True

    def complain(self, problem: str) -> None:
        """Show that something went wrong, until the next start."""
        with self._lock:
            self._notice = problem

    def leave(self) -> None:
        """The icon goes: so does a server that it started, unless that is to be kept."""
        with self._lock:
            if not self.chosen.keep_server:
                self._process.ask_to_end()

    def _end(self) -> None:
        self._stopping = True
        if self._process.pid is not None:
            self._process.ask_to_end()
        elif (found := instances.find()) is not None:
            try:
                instances.ask_to_end(found)
            except SelfdraftError as error:
                self._stopping, self._notice = False, str(error)

    def _notice_end(self) -> None:
        """See that a server is gone, and why; start the next if one is due."""
        code = self._process.take_exit()
        if code is not None:
            expected = self._stopping or code == 0
            self._crash = "" if expected else self._process.failure(code)
            self._stopping, self._known = False, None
            if self._again:
                self.start()
        elif self._known is not None and not self._known.alive:
            crashed = instances.left_behind(self._known) and not self._stopping
            self._crash = _GONE.format(pid=self._known.pid) if crashed else ""
            self._stopping, self._known = False, None

    def _look(self, found: Instance | None) -> Reading:
        child = self._process.pid
        if found is None or (child is not None and found.pid != child):
            state: State = "starting" if child is not None else "crashed" if self._crash else "stopped"
            return Reading(state, self.chosen.model, ours=child is not None, problem=self._crash or self._notice)
        health = self._server.health(found.url)
        reading = Reading(
            self._state(health),
            found.model,
            found.url,
            found.pid == child,
            int(health.get("running", 0)),
            int(health.get("waiting", 0)),
            problem=self._notice,
        )
        if not reading.ready:
            return reading
        if health["status"] == "unreachable":
            return replace(reading, problem="it does not answer")
        try:
            self._rates.add(self._now(), counts(self._server.metrics(found.url)))
        except (SelfdraftError, ValueError) as error:
            return replace(reading, problem=str(error))
        return replace(reading, speed=self._rates.speed, acceptance=self._rates.acceptance)

    def _state(self, health: dict[str, Any]) -> State:
        status = health["status"]
        if self._stopping or status == "stopping":
            return "stopping"
        if status == "unreachable" and self.reading.ready:
            return self.reading.state  # busy, perhaps; it is not dead while its process is there
        if status != "ok":
            return "starting"
        return "decoding" if health.get("running") else "serving"

    def _flags(self) -> list[str]:
        mode = ["--mode", self.chosen.mode] if self.chosen.mode in modes_here() else []
        return ["--model", self.chosen.model, *mode]


def modes_here() -> Sequence[Mode]:
    """Modes that can be had on this machine."""
    always: tuple[Mode, ...] = ("auto", "turbo", "sustained")
    try:
        thermalforge.find()
    except FanError:
        return always
    return (*always, "max")
