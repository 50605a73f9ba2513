"""Guards what stands between the state and the toolkits: nothing is redrawn for nothing, no crash goes unsaid."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from selfdraft.errors import TrayError
from selfdraft.tray import surface
from selfdraft.tray.menu import SEPARATOR, Entry
from selfdraft.tray.pystray_icon import PystrayIcon
from selfdraft.tray.reading import Reading, State
from selfdraft.tray.surface import Surface


class Icon:
    """An icon that writes down what it is told."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.shown: list[tuple[State, str]] = []
        self.notified: list[str] = []

    def run(self, ready: Callable[[], object]) -> None:
        ready()
        assert self.over.wait(10)

    def show(self, state: State, title: str, entries: Sequence[Entry]) -> None:
        self.shown.append((state, title))

    def stop(self) -> None:
        self.over.set()

    def notify(self, message: str) -> None:
        self.notified.append(message)


@pytest.fixture
def icon(monkeypatch: pytest.MonkeyPatch) -> Icon:
    made = Icon()
    monkeypatch.setattr(surface, "_find_icon", lambda: made)
    monkeypatch.setattr(surface, "_LOOK", 0.001)
    return made


def run(readings: Sequence[Reading | Exception]) -> None:
    """Show readings, one after the other."""
    rest = list(readings)

    def look() -> Reading:
        found = rest.pop(0)
        if not rest:
            shown.stop()
        if isinstance(found, Exception):
            raise found
        return found

    shown = Surface(look, lambda reading: [Entry(reading.headline), Entry(reading.figures)])
    shown.run()


def test_only_what_has_changed_is_shown(icon: Icon) -> None:
    serving = Reading("serving", "m")
    run([Reading("stopped", "m"), serving, serving, Reading("decoding", "m", speed=9.0), serving])
    assert [state for state, _ in icon.shown] == ["stopped", "serving", "decoding", "serving"]
    assert icon.shown[2][1] == "Selfdraft: Decoding m\n9.0 tok/s"


def test_a_crash_is_told_once_and_an_old_one_not(icon: Icon) -> None:
    crashed = Reading("crashed", "m", problem="no memory")
    run([crashed, Reading("serving", "m"), crashed, crashed, Reading("stopped", "m")])
    assert icon.notified == ["Crashed: no memory"]


def test_an_icon_that_nobody_keeps_up_to_date_goes(icon: Icon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda given: None)  # what shows it to the user
    with pytest.raises(TrayError, match="unasked"):
        run([Reading("serving", "m"), ValueError("a fault"), Reading("serving", "m")])
    assert icon.over.is_set()


def test_menus_of_the_desktop_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSTRAY_BACKEND", "dummy")
    import pystray

    done = threading.Event()
    made: Any = SimpleNamespace(HAS_NOTIFICATION=False)
    module = SimpleNamespace(Icon=lambda *given: made, Menu=pystray.Menu, MenuItem=pystray.MenuItem)
    entries = [
        Entry("says something"),
        SEPARATOR,
        Entry("does something", done.set, checked=True, default=True),
        Entry("below", entries=[Entry("deeper", lambda: None, checked=False)]),
    ]
    PystrayIcon(module).show("serving", "a title", entries)
    assert made.title == "a title"
    items = list(made.menu)
    assert [item.text for item in items] == ["says something", "- - - -", "does something", "below"]
    assert [item.enabled for item in items[::2]] == [False, True]
    assert [(item.checked, item.default) for item in items[::2]] == [(None, False), (True, True)]
    assert [(item.text, item.checked) for item in items[3].submenu] == [("deeper", False)]
    items[2](made)
    assert done.wait(5)
