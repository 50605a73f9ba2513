"""Processes that outlive whoever starts them, the terminal and its session. Knows nothing of fans."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from ..errors import FanError

__all__ = ["detach", "start"]

_PATIENCE = 20.0  # seconds in which a process must be ready


def start(module: str, *arguments: str) -> None:
    """Run a module that calls `detach`, and come back when it is ready.

    Raises:
        FanError: it did not come to be ready, with what it said.
    """
    command = [sys.executable, "-m", module, *arguments]
    try:
        # Whoever reads its output waits until all that has it is gone: `detach` closes it when ready.
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FanError(f"{module} could not be started ({error}): the fans are left alone") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise FanError(f"{module} could not be started ({said[0]}): the fans are left alone")


def detach() -> Callable[[], None]:
    """Go on as a process that nobody waits for; `start` has seen to it that it is of no terminal.

    Returns:
        What to call when ready: then the starter's wait ends, and from there on this process is silent.
    """
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        os._exit(0 if os.read(reader, 1) else 1)
    os.close(reader)

    def ready() -> None:
        null = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(null, standard)
        os.close(null)
        os.write(writer, b"!")
        os.close(writer)

    return ready
