"""Reading messages from a terminal: editing, several lines, a history that outlives the program."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import platformdirs
from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

__all__ = ["LineInput", "open_history"]


class LineInput:
    """The prompt of a chat. Enter sends; Alt-Enter, Esc Enter or a trailing backslash begins a new line."""

    def __init__(self, history: History) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=history, multiline=True, key_bindings=_keys(), prompt_continuation=". "
        )

    @property
    def typed(self) -> str:
        """What stood in the line when `read` was interrupted."""
        return self._session.default_buffer.text

    def read(self) -> str:
        """The next message.

        Raises:
            KeyboardInterrupt: Ctrl-C.
            EOFError: Ctrl-D in an empty line.
        """
        return self._session.prompt(HTML("<ansicyan><b>&gt;</b></ansicyan> "))


def open_history(folder: Path | None = None) -> History:
    """The history file of this user, readable by nobody else; in memory where it cannot be written.

    Args:
        folder: where to keep it; by default the user's state folder.
    """
    try:
        folder = folder or platformdirs.user_state_path("selfdraft")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / "chat_history"
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        path.chmod(0o600)
        path.read_bytes()
    except OSError:
        return InMemoryHistory()
    return _FileHistory(str(path))


class _FileHistory(FileHistory):
    """A history file that may become unreadable or unwritable while the chat runs: then entries live in memory only."""

    def load_history_strings(self) -> Iterable[str]:
        try:
            return list(super().load_history_strings())
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        try:
            super().store_string(string)
        except OSError:
            return


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\") and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
