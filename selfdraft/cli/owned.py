"""Runs a command of Selfdraft that ends when whoever started it does, however that happens.

    usage: python -m selfdraft.cli.owned COMMAND ...

The starter holds the other end of standard input. When that closes, the command is told to end, as by SIGTERM; unless
the last byte that came through was `KEEP`. `OWN` takes that back.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

__all__ = ["KEEP", "OWN"]

KEEP, OWN = b"k", b"o"


def _watch(owner: int) -> None:
    """Wait until the owner is gone.

    Args:
        owner: descriptor of the pipe's reading end.
    """
    last = OWN
    while said := os.read(owner, 1):
        last = said
    if last != KEEP:
        os.kill(os.getpid(), signal.SIGTERM)


def _main() -> int:
    owner = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    threading.Thread(target=_watch, args=(owner,), daemon=True).start()
    from .app import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(_main())
