"""`python -m selfdraft.fans.keeper FOLDER EXECUTABLE`: what `selfdraft max on` leaves running, until SIGTERM.

It holds a claim, and has a watchdog look after it.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from pathlib import Path

from ..errors import FanError
from .claims import Claims
from .detached import detach
from .max_mode import ensure_watchdog
from .thermalforge import ThermalForge

__all__ = ["KEPT", "main"]

KEPT = "max on"  # what such a claim is for
_GLANCE = 1.0  # seconds between looks at whether there is a watchdog


def main(folder: str, executable: str) -> int:
    """Hold the claim."""
    ready = detach()
    ended = threading.Event()
    for each in (signal.SIGHUP, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
    claims, fans = Claims(Path(folder)), ThermalForge(Path(executable))
    held = claims.claim(KEPT)
    ready()
    while not ended.wait(_GLANCE):
        with contextlib.suppress(FanError):
            ensure_watchdog(claims, fans)
    held.release()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
