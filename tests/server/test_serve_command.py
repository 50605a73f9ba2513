"""Guards `selfdraft serve`, `status` and `stop` as real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from selfdraft.cli.app import main

from .conftest import within

COMMAND = [sys.executable, "-m", "selfdraft"]


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """An environment whose notes are kept apart."""
    return {**os.environ, "XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path)}


@contextmanager
def serving(folder: Path, home: dict[str, str], *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [*COMMAND, "serve", "--model", str(folder), "--port", "0", *arguments],
        env=home,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        shown = ""
        while not (found := re.search(r"http://\S+:\d+", shown)):
            line = process.stderr.readline()
            assert line, shown
            shown += line
        assert within(60, lambda: httpx.get(f"{found[0]}/health", trust_env=False).status_code == 200)
        yield process, found[0]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.fixture
def control(
    home: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Call the command line in this process, with the same notes: what ends at once, and loads no model."""
    for name in ("XDG_STATE_HOME", "HOME"):
        monkeypatch.setenv(name, home[name])
    monkeypatch.setattr("selfdraft.loading.load", None)

    def call(*arguments: str) -> tuple[int, str, str]:
        return main(arguments), *capsys.readouterr()

    return call


def test_status_and_stop_find_the_server(
    nano_folder: Path, home: dict[str, str], control: Callable[..., tuple[int, str, str]]
) -> None:
    assert control("status")[0] == 1
    assert "no server runs" in control("stop")[2]
    with serving(nano_folder, home) as (process, url):
        status = json.loads(control("status", "--json")[1])
        assert (status["status"], status["url"], status["pid"]) == ("ok", url, process.pid)
        a_taken_port_is_one_clear_line(home, url.rsplit(":", 1)[1])
        assert control("stop")[0] == 0
        assert process.wait(5) == 0
    assert json.loads(control("status", "--json")[1]) == {"status": "stopped"}


def a_taken_port_is_one_clear_line(home: dict[str, str], port: str) -> None:
    command = [*COMMAND, "serve", "--port", port]
    ended = subprocess.run(command, env=home, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "is in use" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_sigterm_lets_an_answer_finish(nano_folder: Path, home: dict[str, str]) -> None:
    asked = {"model": "x", "prompt": "Hello", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with (
        serving(nano_folder, home) as (process, url),
        httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=60, trust_env=False) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(20) == 0


def test_bad_flags_are_refused_before_a_model_is_loaded(control: Callable[..., tuple[int, str, str]]) -> None:
    for arguments, expected in (
        (["--port", "x"], "not a whole number"),
        (["--port", "70000"], "--port"),
        (["--host", "0.0.0.0"], "--api-key-file"),
        (["--cors-origin", "*"], "no origin"),
        (["--log-file", "/nonexistent/folder/log"], "--log-file"),
    ):
        code, _, said = control("serve", *arguments)
        assert code == 2, said
        assert expected in said
