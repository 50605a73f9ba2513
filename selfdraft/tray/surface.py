"""The icon that this desktop has, kept up to date. Knows what may be missing, and the remedy; no server."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..errors import TrayError
from .menu import Entry
from .reading import Reading, State

__all__ = ["Icon", "Surface"]

_LOOK = 1.0  # seconds between looks
_NO_EXTRA = "the icon needs the extra 'tray': pip install 'selfdraft[tray]'"
_NO_DISPLAY = (
    "there is no display to show an icon on (DISPLAY is not set): `selfdraft serve` runs a server without one, "
    "`selfdraft service install` a server that is always there"
)
_WAYLAND = (
    "this Wayland session shows icons only by way of GTK and AppIndicator: sudo apt install "
    "gir1.2-ayatanaappindicator3-0.1, and install PyGObject where Selfdraft is installed; `selfdraft serve` runs a "
    "server without an icon"
)


class Icon(Protocol):
    """An icon with a menu. All but `run` may be called from any thread."""

    def run(self, ready: Callable[[], object]) -> None:
        """Show it until `stop`; on the main thread: macOS shows windows from there alone.

        Args:
            ready: called when it may be changed.
        """

    def show(self, state: State, title: str, entries: Sequence[Entry]) -> None:
        """Bring picture, tooltip and menu up to date. A menu that is open may close."""

    def stop(self) -> None:
        """Take it away."""

    def notify(self, message: str) -> None:
        """Say something beside it, where the platform can."""


class Surface:
    """An icon in the tray of this desktop.

    Args:
        look: how the server is now; called about once a second.
        entries: the lines of the menu for a reading.

    Raises:
        TrayError: there is no display, no tray, or a library is missing, with the remedy.
    """

    def __init__(self, look: Callable[[], Reading], entries: Callable[[Reading], Sequence[Entry]]) -> None:
        self._icon = _find_icon()
        self._look = look
        self._entries = entries
        self._shown: Any = None
        self._over = threading.Event()

    def run(self) -> None:
        """Show the icon until `stop`; on the main thread.

        Raises:
            TrayError: the display went away.
        """
        watcher = threading.Thread(target=self._watch, daemon=True)
        try:
            self._icon.run(watcher.start)
        except Exception as error:  # each toolkit has errors of its own
            if not self._over.is_set():  # else it goes anyway: GTK fails so where nothing shows notifications
                raise TrayError(f"the icon is gone ({error}): see that the display and its tray are there") from error
        watcher.join(_LOOK)
        if not self._over.is_set():
            self._over.set()
            raise TrayError("the icon is gone, unasked: see that the display is there; what broke is said above")

    def stop(self) -> None:
        """Take the icon away, from any thread or signal handler."""
        self._over.set()

    def _watch(self) -> None:
        state: State | None = None
        try:
            while not self._over.is_set():
                reading = self._look()
                self._show(reading)
                if reading.state == "crashed" and state not in (None, "crashed"):
                    self._icon.notify(reading.headline)
                state = reading.state
                self._over.wait(_LOOK)
        finally:
            self._icon.stop()  # one that nobody keeps up to date would lie

    def _show(self, reading: Reading) -> None:
        """Bring the icon up to date, if anything has changed."""
        entries = self._entries(reading)
        if (now := (reading.state, _texts(entries))) != self._shown:
            self._shown = now
            title = "\n".join(filter(None, (f"Selfdraft: {reading.headline}", reading.figures)))
            self._icon.show(reading.state, title, entries)


def _texts(entries: Sequence[Entry]) -> list[Any]:
    return [(entry.text, entry.checked, entry.action is None, _texts(entry.entries)) for entry in entries]


def _find_icon() -> Icon:
    """pystray's where it has a menu; else, on X11, ours."""
    missing = [name for name in ("PIL", "pystray") if importlib.util.find_spec(name) is None]
    if missing:
        raise TrayError(f"{_NO_EXTRA} ({' and '.join(missing)} not found)")
    wayland, x11 = os.environ.get("WAYLAND_DISPLAY"), os.environ.get("DISPLAY")
    if sys.platform != "darwin" and not (wayland or x11):
        raise TrayError(_NO_DISPLAY)
    if sys.platform == "darwin" or (importlib.util.find_spec("gi") is not None and _has_session_bus()):
        pystray = _load_pystray()
        if pystray is not None and pystray.Icon.HAS_MENU:
            from .pystray_icon import PystrayIcon

            return PystrayIcon(pystray)
    if not x11:
        raise TrayError(_WAYLAND)
    from .x11_icon import X11Icon

    return X11Icon()


def _has_session_bus() -> bool:
    """Whether there is the D-Bus without which GTK's icons break down."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return "DBUS_SESSION_BUS_ADDRESS" in os.environ or (runtime is not None and Path(runtime, "bus").exists())


def _load_pystray() -> Any:
    """pystray with the back end that fits; None if there is none."""
    try:
        import pystray
    except Exception:  # its back ends open the display as they are imported, and raise errors of their own
        return None
    return pystray
