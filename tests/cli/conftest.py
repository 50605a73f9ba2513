"""The command line for tests: called in this process with one model loaded for all, or as a real process."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import selfdraft.loading
from selfdraft.cli.app import main
from selfdraft.llm import LLM

COMMAND = [sys.executable, "-m", "selfdraft"]


@dataclass(frozen=True)
class Ended:
    """What a command left behind."""

    code: int
    out: str
    err: str


Command = Callable[..., Ended]


@pytest.fixture(scope="session")
def llm() -> LLM:
    return selfdraft.loading.load("reference")


@pytest.fixture
def inside(llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Call the command line in this process, on the shared model. `stdin` is what it reads."""
    monkeypatch.setattr(selfdraft.loading, "load", lambda *args, **kwargs: llm)
    assert llm.sessions is not None
    llm.sessions.clear()  # each test begins as a process does

    def call(*arguments: str, stdin: bytes = b"") -> Ended:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        code = main(arguments)
        return Ended(code, *capsys.readouterr())

    return call


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Call the command line in this process, where loading a model is a failure."""

    def load(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(selfdraft.loading, "load", load)

    def call(*arguments: str, stdin: bytes = b"") -> Ended:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        code = main(arguments)
        return Ended(code, *capsys.readouterr())

    return call


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of real processes: their state goes to a folder of the test."""
    return {**os.environ, "XDG_STATE_HOME": str(tmp_path), "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm"}


@pytest.fixture
def process(environment: dict[str, str]) -> Command:
    """Run the command line as a real process."""

    def call(*arguments: str, stdin: bytes = b"") -> Ended:
        done = subprocess.run(
            [*COMMAND, *arguments], input=stdin, capture_output=True, env=environment, timeout=120, check=False
        )
        return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())

    return call
