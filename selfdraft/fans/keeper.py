"""`python -m selfdraft.fans.keeper FOLDER`: what `selfdraft max on` leaves running. Holds a claim until SIGTERM."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from .claims import Claims
from .detached import detach

__all__ = ["KEPT", "main"]

KEPT = "max on"  # what such a claim is for


def main(folder: str) -> int:
    """Hold the claim."""
    ready = detach()
    for each in (signal.SIGHUP, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    held = Claims(Path(folder)).claim(KEPT)
    ready()
    signal.sigwait({signal.SIGTERM})
    held.release()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
