"""How an answer appears: piped, exactly its text; on a terminal, words wrapped and control codes disarmed."""

from __future__ import annotations

import re
import shutil
from typing import TextIO

from .terminal import DIM, PLAIN, is_fancy

__all__ = ["AnswerText", "Wrap"]

END_OF_REASONING = "</think>"

# A model's text must not move the cursor, retitle the window or paste into the clipboard.
_CONTROL = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t\r"}
_CONTROL[ord("\r")] = ""


class AnswerText:
    """Writes one answer.

    Args:
        out: where to.
        reasoning: the answer opens with reasoning: shown faint, up to its closing tag.
    """

    def __init__(self, out: TextIO, *, reasoning: bool = False) -> None:
        self._out = out
        self._wrap = Wrap(shutil.get_terminal_size().columns) if is_fancy(out) else None
        self._reasoning = reasoning
        self._open_line = False

    def write(self, text: str) -> None:
        """Show more of the answer at once."""
        if not text:
            return
        self._open_line = not text.endswith("\n")
        self._out.write(text if self._wrap is None else self._for_terminal(text, self._wrap))
        self._out.flush()

    def end(self) -> None:
        """The answer is over: leave the cursor on a line of its own."""
        if self._open_line:
            self._out.write("\n")
            self._out.flush()
        self._open_line = False

    def _for_terminal(self, text: str, wrap: Wrap) -> str:
        text = text.translate(_CONTROL)
        if not self._reasoning:
            return wrap.push(text)
        thought, tag, rest = text.partition(END_OF_REASONING)  # the tag is one token: it never comes in two pieces
        self._reasoning = not tag
        return f"{DIM}{wrap.push(thought + tag)}{PLAIN}{wrap.push(rest)}"


class Wrap:
    """Breaks lines between words, which may come in pieces: one that overflows is taken back to the next line.

    Args:
        width: columns of the terminal.
    """

    def __init__(self, width: int) -> None:
        self._width = max(width, 20) - 1  # behind its last column a terminal's cursor is in limbo
        self._column = 0
        self._word = ""  # of the word at the cursor, what stands on this line

    def push(self, text: str) -> str:
        """The text with breaks and corrections put in."""
        return "".join(map(self._character, re.sub("\t", "    ", text)))

    def _character(self, character: str) -> str:
        from prompt_toolkit.utils import get_cwidth

        if character == "\n":
            self._column, self._word = 0, ""
            return character
        if character == " ":
            self._word = ""
            if self._column >= self._width:
                self._column = 0
                return "\n"
            self._column += 1
            return character
        columns = get_cwidth(character)
        broken = self._break() if self._column + columns > self._width else ""
        self._column += columns
        self._word += character
        return broken + character

    def _break(self) -> str:
        """Go to the next line, taking the word at the cursor along if that leaves a sensible line."""
        from prompt_toolkit.utils import get_cwidth

        columns = get_cwidth(self._word)
        if 0 < columns <= self._width // 2:
            self._column = columns
            return f"\x1b[{columns}D\x1b[K\n{self._word}"
        self._column, self._word = 0, ""
        return "\n"
