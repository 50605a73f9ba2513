"""Who wants the fans at maximum: locked files in one folder of the user. Knows no fans and starts no process.

A claim lives as long as its process has the file locked (flock). The kernel lets go of the lock when the process ends,
in whatever way; so no process number is trusted, which another process could have by then. A claim that has died stays
on disk until the fans were seen to be given back: that is how a later start learns of a crash.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import FanError
from ..files import write_atomically

__all__ = ["Claim", "Claims", "Held", "Outcome", "WatchLock"]

_PATIENCE = 0.5  # seconds; whoever asks whether a lock is taken has it for a moment
_GLANCE = 0.02


@dataclass(frozen=True)
class Claim:
    """A claim as it stands on disk.

    Attributes:
        pid: the process that made it; 0 if the file cannot be read.
        what: for what, in a few words.
        since: when, seconds since 1970.
        live: whether that process still holds it.
    """

    path: Path
    pid: int
    what: str
    since: float
    live: bool

    @property
    def name(self) -> str:
        """Of its file: no two claims have the same."""
        return self.path.name


@dataclass(frozen=True)
class Outcome:
    """What the watchdog did last.

    Attributes:
        fans: "max" or "automatic": what it wanted of them; "" as long as it did nothing.
        error: why that did not work; None if it did.
        claims: names of the claims for which it did that.
    """

    fans: str = ""
    error: str | None = None
    claims: Sequence[str] = ()


class Held:
    """A claim of this process; `release` ends it, and so does the end of the process.

    Attributes:
        name: see `Claim`.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.name = path.name
        self._path = path
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Let go. The file stays until the fans are given back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def withdraw(self) -> None:
        """Let go of fans that were not taken: nothing is to be given back."""
        self._path.unlink(missing_ok=True)
        self.release()


class WatchLock:
    """The right to be the watchdog, of which there is one."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Let another process be it."""
        os.close(self._descriptor)


class Claims:
    """The claims in a folder, and the watchdog that looks after them.

    Args:
        folder: made when it is needed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "watchdog.log"
        self._lock = folder / "watchdog.lock"
        self._outcome = folder / "outcome.json"

    def claim(self, what: str) -> Held:
        """Want the fans, for this process.

        Raises:
            FanError: the folder cannot be written.
        """
        try:
            self._make_folder()
            # Locked before it has its name: nobody ever sees a claim of a living process unlocked.
            descriptor, fresh = tempfile.mkstemp(prefix=f"{os.getpid()}-", suffix=".new", dir=self.folder)
            content = {"pid": os.getpid(), "what": what, "since": time.time()}
            os.write(descriptor, json.dumps(content).encode())
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            path = Path(fresh).with_suffix(".claim")
            os.rename(fresh, path)
        except OSError as error:
            raise FanError(
                f"{self.folder} cannot be written ({error.strerror}): fans that nobody could give back stay alone"
            ) from error
        return Held(path, descriptor)

    def all(self) -> list[Claim]:
        """Every claim, the oldest first."""
        found = [claim for path in self.folder.glob("*.claim") if (claim := _read(path)) is not None]
        return sorted(found, key=lambda claim: claim.since)

    def live(self) -> list[Claim]:
        """Those of processes that still hold them."""
        return [claim for claim in self.all() if claim.live]

    def dead(self) -> list[Claim]:
        """Those that ended, while the fans were not yet seen to be given back."""
        return [claim for claim in self.all() if not claim.live]

    def forget(self, dead: Iterable[Claim]) -> None:
        """Remove claims that ended: the fans are given back. For the watchdog alone."""
        for claim in dead:
            claim.path.unlink(missing_ok=True)

    def watch(self) -> WatchLock | None:
        """Become the watchdog; None if another process is it."""
        self._make_folder()
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return WatchLock(descriptor)
            except BlockingIOError:
                if time.monotonic() > end:
                    os.close(descriptor)
                    return None
                time.sleep(_GLANCE)

    @property
    def watchdog(self) -> int | None:
        """The process that is the watchdog; None if there is none, 0 if its number is not known yet."""
        try:
            with self._lock.open("rb") as file:
                if not _is_locked(file.fileno()):
                    return None
                text = file.read(20)
        except OSError:
            return None
        return int(text) if text.isdigit() else 0

    @property
    def outcome(self) -> Outcome:
        """What the watchdog did last."""
        try:
            return Outcome(**json.loads(self._outcome.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return Outcome()

    @outcome.setter
    def outcome(self, outcome: Outcome) -> None:
        write_atomically(self._outcome, json.dumps(asdict(outcome)))

    def _make_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def _read(path: Path) -> Claim | None:
    """A claim; None if it has gone meanwhile."""
    try:
        with path.open("rb") as file:
            live = _is_locked(file.fileno())
            text = file.read(4096)
    except OSError:
        return None
    try:
        content = json.loads(text)
        pid, what, since = int(content["pid"]), str(content["what"]), float(content["since"])
    except (KeyError, TypeError, ValueError):
        return Claim(path, 0, "unknown", 0.0, live)
    return Claim(path, pid, what, since, live)


def _is_locked(descriptor: int) -> bool:
    """Whether a living process has the file locked. A shared lock, so that two who ask do not see each other."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
