"""What a command shows beside its answer: messages, figures, progress. All of it on standard error.

Progress appears only where standard error is a terminal: in a pipe a command is quiet but for what a user must know.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["DIM", "PLAIN", "Bar", "dim", "is_fancy", "printable", "say", "silent_keys"]

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def say(message: str) -> None:
    """A message on standard error, under the program's name: one line, folded between words on a terminal."""
    line = printable(f"selfdraft: {' '.join(message.split())}")
    if is_fancy(sys.stderr):
        width = shutil.get_terminal_size().columns - 1
        line = textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    print(line, file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Text in which control characters are spelled out: a name of a file must not drive the terminal."""
    return "".join(repr(each)[1:-1] if unicodedata.category(each) == "Cc" else each for each in text)


def dim(text: str) -> None:
    """Figures that accompany an answer: faint lines on standard error."""
    print(f"{DIM}{text}{PLAIN}" if is_fancy(sys.stderr) else text, file=sys.stderr, flush=True)


def is_fancy(stream: TextIO) -> bool:
    """Whether a stream is a terminal that understands escape codes."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


@contextmanager
def silent_keys() -> Iterator[None]:
    """While entered, keys typed in the terminal do not show; they stay for whoever reads next."""
    import termios

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(descriptor, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class Bar:
    """A transient progress bar; nothing where standard error is no terminal. Call it with (done, total).

    Args:
        description: what goes on.
        unit: of the counts.
        shown: whether to show it at all.
        at_once: already before the first count, where nothing else draws on the terminal meanwhile.
    """

    def __init__(
        self, description: str, unit: Literal["bytes", "tokens", "answers"], *, shown: bool = True, at_once: bool = True
    ) -> None:
        self._description = description
        self._unit = unit
        self._shown = shown and is_fancy(sys.stderr)
        self._at_once = at_once
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        if self._shown and self._at_once:
            self._start()
        return self

    def __call__(self, done: int, total: int) -> None:
        if self._shown and self._progress is None:
            self._start()
        if self._progress is not None:
            self._progress.update(
                self._progress.task_ids[0], completed=done, total=total, count=self._count(done, total)
            )

    def stop(self) -> None:
        """Take it off the screen, for good."""
        self._shown = False
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _count(self, done: int, total: int) -> str:
        if self._unit == "bytes":
            return f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
        return f"{done:,} of {total:,} {self._unit}"

    def _start(self) -> None:
        from rich import progress
        from rich.console import Console

        self._progress = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=24),
            progress.TextColumn("{task.fields[count]}", markup=False),
            progress.TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._progress.add_task(self._description, total=None, count="")
        self._progress.start()
