"""The icon with its menu and its server, put together; one for each user. Knows signals and the lock."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..errors import SelfdraftError, TrayError
from . import opener
from .choices import Mode
from .menu import Entry, menu
from .reading import Reading
from .surface import Surface
from .tray import Tray, modes_here

__all__ = ["TrayIcon", "only_one"]


class TrayIcon:
    """What the menu does; see `menu.Actions`.

    Args:
        tray: the server's side.
        models: names of the models on this machine; may take seconds.
        log: file of the server's log.
    """

    def __init__(self, tray: Tray, models: Callable[[], Sequence[str]], log: Path) -> None:
        self._tray = tray
        self._find_models = models
        self._models: Sequence[str] | None = None
        self._log = log
        self._surface = Surface(tray.poll, self._entries)

    def run(self, *, start: bool) -> None:
        """Show the icon until the user or a signal ends it.

        Args:
            start: whether to start a server at once.

        Raises:
            TrayError: the display went away.
        """
        if sys.platform != "darwin":  # there no handler runs while Cocoa waits; the server ends by its pipe as well
            for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(each, lambda number, frame: self._surface.stop())
        threading.Thread(target=self._look_for_models, daemon=True).start()
        if start:
            self._tray.start()
        try:
            self._surface.run()
        finally:
            self._tray.leave()

    def start(self) -> None:
        """Start a server."""
        self._tray.start()

    def stop(self) -> None:
        """Stop the one that runs."""
        self._tray.stop()

    def choose_model(self, name: str) -> None:
        """Take another model."""
        self._tray.choose(model=name)

    def choose_mode(self, mode: Mode) -> None:
        """Take another mode."""
        self._tray.choose(mode=mode)

    def choose_keep(self, keep: bool) -> None:
        """Say whether the server outlives the icon."""
        self._tray.choose(keep_server=keep)

    def open_page(self) -> None:
        """Show the chat page; it asks for the key, where the server has one."""
        self._try(lambda: opener.open_page(self._tray.reading.url))

    def open_log(self) -> None:
        """Show the log of the servers that were started here."""
        self._try(lambda: opener.open_file(self._log))

    def quit(self) -> None:
        """Take the icon away."""
        self._surface.stop()

    def _entries(self, reading: Reading) -> list[Entry]:
        return menu(reading, self._tray.chosen, self._models, modes_here(), self)

    def _look_for_models(self) -> None:
        try:
            self._models = self._find_models()
        except SelfdraftError as error:
            self._models = ()
            self._tray.complain(str(error))

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except TrayError as error:
            self._tray.complain(str(error))


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Hold the lock of this user's icon.

    Raises:
        TrayError: another process has it.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.open("a+", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise TrayError(f"the icon is there already (process {file.read().strip() or 'unknown'})") from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
