"""The server that runs on this machine, as a note on disk: where it listens, what it serves. Knows no HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import platformdirs
import psutil

from ..errors import SelfdraftError
from ..files import write_atomically

__all__ = ["Instance", "ask_to_end", "find", "left_behind", "local_url", "noted", "stop"]


@dataclass(frozen=True)
class Instance:
    """A server that runs.

    Attributes:
        pid: its process.
        created: when that process began, seconds since 1970: a process number is used again.
        host, port: where it listens.
        model: the name it loaded; of a local folder, its path.
    """

    pid: int
    created: float
    host: str
    port: int
    model: str

    @property
    def url(self) -> str:
        """Where to reach it."""
        return local_url(self.host, self.port)

    @property
    def alive(self) -> bool:
        """Whether that very process still runs."""
        try:
            process = psutil.Process(self.pid)
            return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - self.created) < 1
        except psutil.Error:
            return False


def local_url(host: str, port: int) -> str:
    """The URL under which this machine reaches what listens on an address; all addresses include loopback."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def find() -> Instance | None:
    """The server that was noted last, if it still runs; a stale note is removed."""
    instance = _noted()
    if instance is not None and instance.alive:
        return instance
    with contextlib.suppress(NotADirectoryError):
        _path().unlink(missing_ok=True)
    return None


def left_behind(instance: Instance) -> bool:
    """Whether a server crashed: it is gone, and its note is still there. Only until somebody calls `find`."""
    return not instance.alive and _noted() == instance


@contextlib.contextmanager
def noted(host: str, port: int, model: str) -> Iterator[Instance]:
    """Keep a note of this process while it serves. Of several servers the newest is noted; then the one before it."""
    before = find()
    instance = Instance(os.getpid(), psutil.Process().create_time(), host, port, model)
    _write(instance)
    try:
        yield instance
    finally:
        if find() == instance:
            if before is not None and before.alive:
                _write(before)
            else:
                _path().unlink(missing_ok=True)


def ask_to_end(instance: Instance) -> None:
    """Tell a server to end; answers that run may finish. One that is gone already is told nothing.

    Raises:
        SelfdraftError: it is another user's.
    """
    try:
        os.kill(instance.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise SelfdraftError(
            f"the server (process {instance.pid}) is another user's: stop it as that user, or with sudo"
        ) from error


def stop(instance: Instance, patience: float) -> None:
    """Ask a server to end, and wait until it has.

    Raises:
        SelfdraftError: it is another user's, or still runs after `patience` seconds.
    """
    ask_to_end(instance)
    end = time.monotonic() + patience
    while instance.alive:
        if time.monotonic() > end:
            raise SelfdraftError(
                f"the server (process {instance.pid}) still answers requests after {patience:g} s; "
                "run the command again to stop it at once"
            )
        time.sleep(0.05)


def _noted() -> Instance | None:
    try:
        return Instance(**json.loads(_path().read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _write(instance: Instance) -> None:
    write_atomically(_path(), json.dumps(asdict(instance)))


def _path() -> Path:
    return Path(platformdirs.user_state_dir("selfdraft")) / "server.json"
