"""Rendering in a process of its own. Knows how to start, ask and replace that process, and nothing of Markdown."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref

from . import render as program

__all__ = ["RenderProcess"]

# Wall-clock seconds until a process that does not answer is given up. It bounds its own CPU time to a second,
# but a machine may be busy.
PATIENCE = 60.0


class RenderProcess:
    """Renders one text at a time, so that a long answer does not hold up the interpreter the engine runs in.

    The process starts at the first text and ends with `close`, with this object, or with this program.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._stop: weakref.finalize[[subprocess.Popen[str]], RenderProcess] | None = None

    def render(self, text: str) -> str:
        """The HTML to show for `text`; blocks, so call it on a worker thread.

        Args:
            text: Markdown, see `render.render`.

        Returns:
            Safe HTML; the text as it is, if the process died or did not answer in time.
        """
        with self._lock:
            child = self._child or self._start()
            answer = _ask(child, text)
            if not answer:
                self._replace()
        return str(json.loads(answer)) if answer else program.as_is(text)

    def close(self) -> None:
        """End the process; a text that it is busy with comes back as it is."""
        if child := self._child:
            child.kill()  # without the lock: whoever waits for an answer holds it
        with self._lock:
            self._replace()

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-I", str(program.__file__)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._stop = weakref.finalize(self, _end, self._child)
        return self._child

    def _replace(self) -> None:
        """Ends the process; the next text starts another."""
        if self._stop is not None:
            self._stop()
        self._child = None


def _ask(child: subprocess.Popen[str], text: str) -> str:
    """One line from the process, or "" if it died or took too long."""
    assert child.stdin is not None
    assert child.stdout is not None
    timer = threading.Timer(PATIENCE, child.kill)
    timer.start()
    try:
        child.stdin.write(json.dumps(text) + "\n")
        child.stdin.flush()
        return child.stdout.readline()
    except BrokenPipeError:
        return ""
    finally:
        timer.cancel()


def _end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate()  # closes the pipes and waits
