"""An icon in an X11 tray (freedesktop.org's System Tray Protocol), which a click opens the menu of. Needs no toolkit.

pystray's own icon for X11 cannot be clicked, and asks the tray for a new place with every change.
"""

from __future__ import annotations

import os
import queue
import select
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import Xlib.display
import Xlib.error
import Xlib.protocol.event
import Xlib.X
import Xlib.Xutil

from ..errors import TrayError
from .menu import Entry
from .picture import picture
from .reading import State
from .x11_menu import show as show_menu

__all__ = ["X11Icon"]

_PATIENCE = 10.0  # seconds in which a panel may come up: at login the icon may be first
_LEAST = 24  # pixels
_XEMBED_VERSION, _XEMBED_MAPPED = 0, 1
_DOCK = 0  # SYSTEM_TRAY_REQUEST_DOCK
_NO_TRAY = (
    "no tray on this display takes icons: start one, such as trayer or stalonetray; for GNOME install its AppIndicator "
    "extension, and PyGObject where Selfdraft is installed. `selfdraft serve` runs a server without an icon"
)


class X11Icon:
    """See `surface.Icon`.

    Raises:
        TrayError: the display cannot be used, or nothing on it takes icons.
    """

    def __init__(self) -> None:
        try:
            self._display = Xlib.display.Display()
        except (Xlib.error.DisplayError, OSError) as error:
            raise TrayError(
                f"the display {os.environ.get('DISPLAY')!r} cannot be used ({error}): start this from the desktop"
            ) from error
        self._root = self._display.screen().root
        self._tray = self._atom(f"_NET_SYSTEM_TRAY_S{self._display.get_default_screen()}")
        self._await_tray()
        self._root.change_attributes(event_mask=Xlib.X.StructureNotifyMask)  # a tray that comes up says so there
        self._shown: tuple[State, str] = ("stopped", "Selfdraft")
        self._entries: Sequence[Entry] = ()
        self._changes: queue.SimpleQueue[tuple[State, str] | None] = queue.SimpleQueue()
        self._woken, self._wake = os.pipe()
        self._window = self._create_window()

    def run(self, ready: Callable[[], object]) -> None:
        self._dock()
        ready()
        while self._take_changes():
            if not self._display.pending_events():
                select.select([self._display.fileno(), self._woken], [], [])
            while self._display.pending_events():
                self._heed(self._display.next_event())
        self._window.destroy()
        self._display.close()

    def show(self, state: State, title: str, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._change((state, title))

    def stop(self) -> None:
        self._change(None)

    def notify(self, message: str) -> None:
        if found := shutil.which("notify-send"):
            subprocess.run([found, "--app-name=Selfdraft", "Selfdraft", message], timeout=10, check=False)

    def _change(self, change: tuple[State, str] | None) -> None:
        self._changes.put(change)
        os.write(self._wake, b"!")

    def _take_changes(self) -> bool:
        """Bring the icon up to date; false once it is to go."""
        if select.select([self._woken], [], [], 0)[0]:
            os.read(self._woken, 4096)
        while not self._changes.empty():
            change = self._changes.get()
            if change is None:
                return False
            self._shown = change
            self._paint()
        return True

    def _heed(self, event: Any) -> None:
        if event.type == Xlib.X.ClientMessage and event.client_type == self._atom("MANAGER"):
            if event.data[1][1] == self._tray:
                self._dock()
        elif event.type == Xlib.X.DestroyNotify and event.window == self._window:
            self._window = self._create_window()  # a tray that died took it along
            self._dock()
        elif event.type in (Xlib.X.Expose, Xlib.X.ConfigureNotify) and event.window == self._window:
            self._paint()
        elif event.type == Xlib.X.ButtonPress and event.detail in (1, 3):
            # On a thread of its own: the icon goes on being drawn meanwhile.
            threading.Thread(target=show_menu, args=(lambda: self._entries,), daemon=True).start()

    def _create_window(self) -> Any:
        screen = self._display.screen()
        mask = Xlib.X.ExposureMask | Xlib.X.StructureNotifyMask | Xlib.X.ButtonPressMask
        window = self._root.create_window(-1, -1, 22, 22, 0, screen.root_depth, event_mask=mask)
        window.set_wm_class("selfdraft", "Selfdraft")
        window.set_wm_normal_hints(flags=Xlib.Xutil.PMinSize, min_width=_LEAST, min_height=_LEAST)
        info = self._atom("_XEMBED_INFO")
        window.change_property(info, info, 32, [_XEMBED_VERSION, _XEMBED_MAPPED])
        self._context = window.create_gc()
        return window

    def _dock(self) -> None:
        """Ask the tray for a place; without a tray, the next one that comes up is asked."""
        owner = self._display.get_selection_owner(self._tray)
        if owner != Xlib.X.NONE:
            ask = Xlib.protocol.event.ClientMessage(
                window=owner,
                client_type=self._atom("_NET_SYSTEM_TRAY_OPCODE"),
                data=(32, [Xlib.X.CurrentTime, _DOCK, self._window.id, 0, 0]),
            )
            owner.send_event(ask)
        self._paint()

    def _paint(self) -> None:
        state, title = self._shown
        ignored = Xlib.error.CatchError(Xlib.error.BadDrawable, Xlib.error.BadWindow, Xlib.error.BadMatch)
        try:
            size = self._window.get_geometry()
        except (Xlib.error.BadDrawable, Xlib.error.BadWindow):
            return  # its end is in the queue
        image = picture(state, size.width, size.height)
        self._window.put_pil_image(self._context, 0, 0, image, onerror=ignored)
        for name in ("_NET_WM_NAME", "WM_NAME"):  # some trays read the old one
            self._window.change_property(
                self._atom(name), self._atom("UTF8_STRING"), 8, title.encode(), onerror=ignored
            )
        self._display.flush()

    def _atom(self, name: str) -> int:
        return int(self._display.intern_atom(name))

    def _await_tray(self) -> None:
        end = time.monotonic() + _PATIENCE
        while self._display.get_selection_owner(self._tray) == Xlib.X.NONE:
            if time.monotonic() > end:
                self._display.close()
                raise TrayError(_NO_TRAY)
            time.sleep(0.2)
