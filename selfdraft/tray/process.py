"""The server as a child: started, told to end, and what it said last. Knows processes and files; no HTTP.

Its log goes to a file that `serve --log-file` keeps small. What it prints beside, such as the last words of a crash,
goes to a second file, which begins anew with each start, and is added to the log when the server fails.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from ..errors import TrayError

__all__ = ["ServerProcess"]

_LINES = 20  # of what it printed last that go into the log
_MOST = 64 * 1024  # bytes of it that are read


class ServerProcess:
    """A server that was started here, one at a time.

    Args:
        command: what starts one, without its flags; it reads `keep` or `own` from its standard input.
        keep, own: bytes that say whether the server outlives this process.
        log: its log; another file beside it takes what is printed.
    """

    def __init__(self, command: Sequence[str], log: Path, *, keep: bytes, own: bytes) -> None:
        self.log = log
        self._command = command
        self._keep, self._own = keep, own
        self._output = log.with_name("server-output.txt")
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of the server that runs; None if none does."""
        return self._child.pid if self._child is not None and self._child.poll() is None else None

    def start(self, flags: Sequence[str], *, keep: bool) -> None:
        """Start a server.

        Args:
            flags: of `selfdraft serve`, beside those of the log.
            keep: whether it outlives this process.

        Raises:
            TrayError: it cannot be started, or its log cannot be written.
        """
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._output.open("wb") as output:
                self._child = subprocess.Popen(
                    [*self._command, *flags, "--log-file", str(self.log)],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C in a terminal is for the icon; it ends the server in order
                )
        except OSError as error:
            raise TrayError(
                f"the server cannot be started ({error}): see that {self.log.parent} is writable"
            ) from error
        self.outlive(keep)

    def outlive(self, keep: bool) -> None:
        """Say whether the server goes on when this process ends."""
        if self._child is not None and self._child.stdin is not None:
            with contextlib.suppress(OSError):  # it is gone already
                self._child.stdin.write(self._keep if keep else self._own)
                self._child.stdin.flush()

    def ask_to_end(self) -> None:
        """Tell the server to end; answers that run may finish. A second time ends them."""
        if self.pid is not None:
            self.outlive(True)  # or the end of this process would tell it a second time
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def take_exit(self) -> int | None:
        """The exit code of a server that has ended, told once; None otherwise. Negative: the signal that ended it."""
        if self._child is None or (code := self._child.poll()) is None:
            return None
        if self._child.stdin is not None:
            with contextlib.suppress(OSError):
                self._child.stdin.close()
        self._child = None
        return code

    def failure(self, code: int) -> str:
        """Why a server ended that should not have, in one line; what it printed last is added to the log."""
        try:
            lines = self._output.read_bytes()[-_MOST:].decode(errors="replace").splitlines()
        except OSError:
            lines = []
        said = [line.strip() for line in lines if line.strip()][-_LINES:]
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        with contextlib.suppress(OSError), self.log.open("a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} the server ended by {how}; it had printed last:\n")
            log.writelines(f"    {line}\n" for line in said)
        # What is printed at the start says nothing of the end.
        told = [line.removeprefix("selfdraft: ") for line in said if not line.startswith(("listening on", "\x1b["))]
        return f"{told[-1]} ({how})" if told else f"ended by {how}"
