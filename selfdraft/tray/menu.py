"""The menu as data, from a reading: what stands in it and what each entry does. Knows no toolkit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, get_args

from .choices import Choices, Mode
from .reading import Reading

__all__ = ["SEPARATOR", "Actions", "Entry", "menu"]

_WIDEST = 90  # characters of a line
_MOST_MODELS = 20  # that are listed


@dataclass(frozen=True)
class Entry:
    """A line of a menu.

    Attributes:
        text: what it says.
        action: what a click does; without one it only says something, or opens `entries`.
        checked: whether it is the chosen one; None where there is nothing to choose.
        entries: a menu below it.
        default: what a click on the icon does, where the platform has that.
    """

    text: str
    action: Callable[[], object] | None = None
    checked: bool | None = None
    entries: Sequence[Entry] = field(default=())
    default: bool = False


SEPARATOR = Entry("")


class Actions(Protocol):
    """What a menu can do."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def choose_model(self, name: str) -> None: ...
    def choose_mode(self, mode: Mode) -> None: ...
    def choose_keep(self, keep: bool) -> None: ...
    def open_page(self) -> None: ...
    def open_log(self) -> None: ...
    def quit(self) -> None: ...


def menu(
    reading: Reading, chosen: Choices, models: Sequence[str] | None, modes: Sequence[Mode], actions: Actions
) -> list[Entry]:
    """The lines of the menu.

    Args:
        chosen: what would be started.
        models: those on this machine, by name; None while they are looked for.
        modes: those that can be had here.
    """
    lines = [Entry(_short(reading.headline))]
    if reading.figures:
        lines.append(Entry(reading.figures))
    if reading.url:
        lines.append(Entry(reading.url.removeprefix("http://")))
    start = "Start again" if reading.state == "crashed" else f"Start {chosen.model}"
    lines += [
        SEPARATOR,
        Entry("Open the chat page", actions.open_page if reading.ready else None, default=reading.ready),
        Entry("Stop", actions.stop) if reading.alive else Entry(_short(start), actions.start, default=True),
        SEPARATOR,
        Entry(_short(f"Model: {chosen.model}"), entries=_models(chosen, models, actions)),
        Entry(f"Mode: {chosen.mode}", entries=_modes(chosen, modes, actions)),
        Entry(
            "Keep the server when the icon is gone",
            lambda: actions.choose_keep(not chosen.keep_server),
            checked=chosen.keep_server,
        ),
        SEPARATOR,
        Entry("Open the log", actions.open_log),
        Entry("Quit" if chosen.keep_server or not reading.ours else "Quit, and stop the server", actions.quit),
    ]
    return lines


def _models(chosen: Choices, models: Sequence[str] | None, actions: Actions) -> list[Entry]:
    names = list(dict.fromkeys([*(models or ())[:_MOST_MODELS], chosen.model]))
    entries = [Entry(_short(name), partial(actions.choose_model, name), checked=name == chosen.model) for name in names]
    if models is None:
        entries.append(Entry("looking for others ..."))
    elif len(models) > _MOST_MODELS:
        entries.append(Entry(f"and {len(models) - _MOST_MODELS} more: selfdraft settings set start.model NAME"))
    return entries


def _modes(chosen: Choices, modes: Sequence[Mode], actions: Actions) -> list[Entry]:
    return [
        Entry(
            mode,
            partial(actions.choose_mode, mode) if mode in modes else None,
            checked=mode == chosen.mode,
        )
        for mode in get_args(Mode)
    ]


def _short(text: str) -> str:
    """A line that fits; of a path the end is what tells it from others."""
    if len(text) <= _WIDEST:
        return text
    return f"…{text[-_WIDEST + 1 :]}" if text.startswith("/") else f"{text[: _WIDEST - 1]}…"
