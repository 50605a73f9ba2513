"""A menu for X11 trays, of which pystray knows a click alone: drawn here, near the pointer. Needs no toolkit.

Mouse and keyboard belong to it while it is open: arrows, Enter, Escape; a click elsewhere closes it.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from typing import Any

import Xlib.display
import Xlib.X
import Xlib.XK
from PIL import Image, ImageDraw, ImageFont

from .menu import SEPARATOR, Entry

__all__ = ["draw", "show"]

_LINE, _RULE, _MARGIN, _SIGN = 26, 9, 14, 18  # pixels: of an entry, of a separator, at the sides, for a check mark
_BACK = Entry("‹ back")
_BACKGROUND, _TEXT, _FAINT, _CHOSEN, _RULES = "#fafafa", "#18181b", "#71717a", "#dbe4ff", "#d4d4d8"
_SECONDS = 1.0  # between looks at whether the figures have changed


def show(entries: Callable[[], Sequence[Entry]]) -> None:
    """Show a menu until something is chosen or it is left; what is chosen is done after it has closed.

    Args:
        entries: the lines as they are now; they may change while the menu is open.
    """
    display = Xlib.display.Display()
    try:
        action = _Popup(display, entries).run()
    finally:
        display.close()
    if action is not None:
        action()


def draw(entries: Sequence[Entry], chosen: int | None) -> Image.Image:
    """The picture of a menu.

    Args:
        chosen: which entry is under the pointer.
    """
    font = ImageFont.load_default(14)
    width = int(max(font.getlength(entry.text) for entry in entries)) + 2 * (_MARGIN + _SIGN)
    tops = _tops(entries)
    image = Image.new("RGB", (width, tops[-1] + 6), _BACKGROUND)
    canvas = ImageDraw.Draw(image)
    canvas.rectangle((0, 0, width - 1, image.height - 1), outline=_RULES)
    for index, (entry, top) in enumerate(zip(entries, tops, strict=False)):
        if entry is SEPARATOR:
            canvas.line((1, top + _RULE // 2, width - 2, top + _RULE // 2), fill=_RULES)
            continue
        if index == chosen:
            canvas.rectangle((1, top, width - 2, top + _LINE - 1), fill=_CHOSEN)
        middle = top + _LINE // 2
        colour = _TEXT if _acts(entry) else _FAINT
        if entry.checked:
            canvas.ellipse((_MARGIN, middle - 4, _MARGIN + 8, middle + 4), fill=colour)
        elif entry.checked is not None:
            canvas.ellipse((_MARGIN, middle - 4, _MARGIN + 8, middle + 4), outline=_FAINT)
        canvas.text((_MARGIN + _SIGN, middle), entry.text, fill=colour, font=font, anchor="lm")
        if entry.entries:
            canvas.text((width - _MARGIN, middle), "›", fill=colour, font=font, anchor="rm")
    return image


def _tops(entries: Sequence[Entry]) -> list[int]:
    """Where each entry begins, and where the last ends."""
    tops = [6]
    for entry in entries:
        tops.append(tops[-1] + (_RULE if entry is SEPARATOR else _LINE))
    return tops


def _acts(entry: Entry) -> bool:
    return entry is _BACK or entry.action is not None or bool(entry.entries)


class _Popup:
    """One showing of a menu."""

    def __init__(self, display: Any, entries: Callable[[], Sequence[Entry]]) -> None:
        self._display = display
        self._all = entries
        self._path: list[str] = []  # texts of the entries that were opened
        self._chosen: int | None = None
        self._lines = self._page()
        self._screen = display.screen()
        pointer = self._screen.root.query_pointer()
        self._pointer = (pointer.root_x, pointer.root_y)
        self._window = self._screen.root.create_window(
            *self._place(draw(self._lines, None)),
            0,
            self._screen.root_depth,
            override_redirect=True,
            event_mask=Xlib.X.ExposureMask,
        )
        self._window.set_wm_name("Selfdraft")
        self._context = self._window.create_gc()

    def run(self) -> Callable[[], object] | None:
        """Show it; returns what was chosen."""
        self._window.map()
        self._window.raise_window()
        mask = Xlib.X.ButtonPressMask | Xlib.X.ButtonReleaseMask | Xlib.X.PointerMotionMask
        mode = Xlib.X.GrabModeAsync
        self._window.grab_pointer(False, mask, mode, mode, 0, 0, Xlib.X.CurrentTime)
        self._window.grab_keyboard(False, mode, mode, Xlib.X.CurrentTime)
        self._paint()
        while True:
            if not self._display.pending_events():
                select.select([self._display.fileno()], [], [], _SECONDS)
            if not self._display.pending_events():
                self._refresh()
                continue
            event = self._display.next_event()
            if self._is_left(event):
                return None
            action = self._heed(event)
            if action is not None:
                return action

    def _heed(self, event: Any) -> Callable[[], object] | None:
        """Follow pointer and keys; returns the action of an entry that was chosen."""
        if event.type == Xlib.X.Expose:
            self._paint()
        elif event.type == Xlib.X.MotionNotify:
            self._choose(self._under(event.event_x, event.event_y))
        elif event.type == Xlib.X.ButtonRelease:
            self._choose(self._under(event.event_x, event.event_y))
            return self._take()
        elif event.type == Xlib.X.KeyPress:
            key = self._display.keycode_to_keysym(event.detail, 0)
            if key in (Xlib.XK.XK_Up, Xlib.XK.XK_Down):
                self._step(1 if key == Xlib.XK.XK_Down else -1)
            elif key in (Xlib.XK.XK_Return, Xlib.XK.XK_KP_Enter, Xlib.XK.XK_Right):
                return self._take()
        return None

    def _is_left(self, event: Any) -> bool:
        if event.type == Xlib.X.KeyPress:
            return bool(self._display.keycode_to_keysym(event.detail, 0) == Xlib.XK.XK_Escape)
        size = self._window.get_geometry() if event.type == Xlib.X.ButtonPress else None
        return size is not None and not (0 <= event.event_x < size.width and 0 <= event.event_y < size.height)

    def _take(self) -> Callable[[], object] | None:
        """Open what is chosen, or return what it does."""
        if self._chosen is None:
            return None
        entry = self._lines[self._chosen]
        if entry.entries or entry is _BACK:
            self._path = [*self._path, entry.text] if entry.entries else self._path[:-1]
            self._chosen = None
            self._refresh()
        return entry.action

    def _step(self, by: int) -> None:
        places = [index for index, entry in enumerate(self._lines) if _acts(entry)]
        if self._chosen in places:
            self._choose(places[(places.index(self._chosen) + by) % len(places)])
        else:
            self._choose(places[0 if by > 0 else -1])

    def _choose(self, index: int | None) -> None:
        if index != self._chosen:
            self._chosen = index
            self._paint()

    def _under(self, x: int, y: int) -> int | None:
        """The entry at a place of the window that does something."""
        tops = _tops(self._lines)
        if not 0 <= x < self._window.get_geometry().width:
            return None
        found = (
            index for index, entry in enumerate(self._lines) if tops[index] <= y < tops[index + 1] and _acts(entry)
        )
        return next(found, None)

    def _refresh(self) -> None:
        """Show the lines as they are now, if they have changed."""
        lines = self._page()
        if [(entry.text, entry.checked) for entry in lines] == [(each.text, each.checked) for each in self._lines]:
            return
        self._lines = lines
        if self._chosen is not None and self._chosen >= len(lines):
            self._chosen = None
        left, top, width, height = self._place(draw(lines, None))
        self._window.configure(x=left, y=top, width=width, height=height)
        self._paint()

    def _page(self) -> list[Entry]:
        lines = list(self._all())
        for text in self._path:
            below = next((entry.entries for entry in lines if entry.text == text and entry.entries), None)
            if below is None:
                break
            lines = [_BACK, SEPARATOR, *below]
        return lines

    def _place(self, image: Image.Image) -> tuple[int, int, int, int]:
        """Left, top, width and height: beside the pointer, and on the screen."""
        width, height = image.size
        left = min(self._pointer[0], self._screen.width_in_pixels - width)
        below = self._pointer[1] + 4
        top = below if below + height <= self._screen.height_in_pixels else self._pointer[1] - 4 - height
        return max(left, 0), max(top, 0), width, height

    def _paint(self) -> None:
        self._window.put_pil_image(self._context, 0, 0, draw(self._lines, self._chosen))
        self._display.flush()
