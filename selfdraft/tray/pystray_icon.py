"""An icon by pystray, with the desktop's own menu: on macOS, and where GTK is there. Knows no server."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from .menu import SEPARATOR, Entry
from .picture import picture
from .reading import State

__all__ = ["PystrayIcon"]


class PystrayIcon:
    """See `surface.Icon`.

    Args:
        pystray: the module, whose back end has menus.
    """

    def __init__(self, pystray: Any) -> None:
        self._pystray = pystray
        self._icon = pystray.Icon("selfdraft", picture("stopped"), "Selfdraft")

    def run(self, ready: Callable[[], object]) -> None:
        def begin(icon: Any) -> None:
            icon.visible = True
            ready()

        self._icon.run(begin)

    def show(self, state: State, title: str, entries: Sequence[Entry]) -> None:
        def update() -> None:
            self._icon.icon = picture(state)
            self._icon.title = title
            self._icon.menu = self._menu(entries)

        _on_main_thread(update)

    def stop(self) -> None:
        _on_main_thread(self._icon.stop)

    def notify(self, message: str) -> None:
        if self._icon.HAS_NOTIFICATION:
            _on_main_thread(lambda: self._icon.notify(message, "Selfdraft"))

    def _menu(self, entries: Sequence[Entry]) -> Any:
        return self._pystray.Menu(*[self._item(entry) for entry in entries])

    def _item(self, entry: Entry) -> Any:
        if entry is SEPARATOR:
            return self._pystray.Menu.SEPARATOR
        if entry.entries:
            return self._pystray.MenuItem(entry.text, self._menu(entry.entries))
        action = entry.action  # done on a thread of its own: what waits must not hold the desktop up
        return self._pystray.MenuItem(
            entry.text,
            None if action is None else lambda icon, item: threading.Thread(target=action, daemon=True).start(),
            checked=None if entry.checked is None else lambda item: bool(entry.checked),
            default=entry.default,
            enabled=action is not None,
        )


def _on_main_thread(action: Callable[[], object]) -> None:
    """Do something where the platform wants it done; GTK's icons see to that themselves."""
    if sys.platform == "darwin":
        from PyObjCTools import AppHelper

        AppHelper.callAfter(action)
    else:
        action()
