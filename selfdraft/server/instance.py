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

__all__ = ["Instance", "find", "noted", "stop"]


@dataclass(frozen=True)
class Instance:
    """A server that runs.

    Attributes:
        pid: its process.
        created: when that process began, seconds since 1970: a process number is used again.
        host, port: where it listens.
        model: the name it loaded.
    """

    pid: int
    created: float
    host: str
    port: int
    model: str

    @property
    def url(self) -> str:
        """Where to reach it."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether that very process still runs."""
        try:
            process = psutil.Process(self.pid)
            return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - self.created) < 1
        except psutil.Error:
            return False


def find() -> Instance | None:
    """The server that was noted last, if it still runs; a stale note is removed."""
    path = _path()
    try:
        instance = Instance(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        instance = None
    if instance is not None and instance.alive:
        return instance
    path.unlink(missing_ok=True)
    return None


@contextlib.contextmanager
def noted(host: str, port: int, model: str) -> Iterator[Instance]:
    """Keep a note of this process while it serves. With several servers the newest is noted."""
    instance = Instance(os.getpid(), psutil.Process().create_time(), host, port, model)
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_suffix(f".{instance.pid}")
    fresh.write_text(json.dumps(asdict(instance)), encoding="utf-8")
    fresh.chmod(0o600)
    fresh.replace(path)
    try:
        yield instance
    finally:
        if find() == instance:
            path.unlink(missing_ok=True)


def stop(instance: Instance, patience: float) -> None:
    """Ask a server to end, and wait until it has.

    Raises:
        SelfdraftError: it still runs after `patience` seconds.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(instance.pid, signal.SIGTERM)
    end = time.monotonic() + patience
    while instance.alive:
        if time.monotonic() > end:
            raise SelfdraftError(
                f"the server (process {instance.pid}) still answers requests after {patience:g} s; "
                "run the command again to stop it at once"
            )
        time.sleep(0.05)


def _path() -> Path:
    return Path(platformdirs.user_state_dir("selfdraft")) / "server.json"
