"""What is typed in a chat: several lines, and a history that only its owner can read."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from selfdraft.cli.line_input import LineInput, open_history


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("hello\r", "hello"),
        ("one\x1b\rtwo\r", "one\ntwo"),
        ("one\\\rtwo\r", "one\ntwo"),
        ("a\\b\r", "a\\b"),
        ("\x1b[200~pasted\nlines\x1b[201~\r", "pasted\nlines"),
    ],
)
def test_keys(keys: str, message: str) -> None:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text(keys)
        assert LineInput(InMemoryHistory()).read() == message


@pytest.mark.parametrize(("key", "error"), [("\x03", KeyboardInterrupt), ("\x04", EOFError)])
def test_leaving(key: str, error: type[BaseException]) -> None:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text(key)
        with pytest.raises(error):
            LineInput(InMemoryHistory()).read()


def test_history_is_kept_and_private(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    open_history(folder).append_string("hello")
    file = folder / "chat_history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    file.chmod(0o644)  # as an older version, or a careless copy, may have left it
    again = open_history(folder)
    assert list(again.load_history_strings()) == ["hello"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_history_without_a_place_stays_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert isinstance(open_history(tmp_path / "file" / "below"), InMemoryHistory)


def test_history_whose_place_vanishes(tmp_path: Path) -> None:
    history = open_history(tmp_path / "state")
    (tmp_path / "state" / "chat_history").unlink()
    (tmp_path / "state").rmdir()
    history.append_string("hello")
    assert history.get_strings() == ["hello"]
