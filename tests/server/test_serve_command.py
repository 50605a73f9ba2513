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
from selfdraft.cli.server_client import served_model

from .conftest import within

COMMAND = [sys.executable, "-m", "selfdraft"]


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """An environment whose notes are kept apart."""
    return {**os.environ, "XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path)}


@contextmanager
def serving(folder: Path, home: dict[str, str], *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [*COMMAND, "serve", str(folder), "--port", "0", *arguments],
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


def test_several_models_are_served_by_name_and_the_first_is_the_default(
    nano_folder: Path, home: dict[str, str]
) -> None:
    with serving(nano_folder, home, f"small={nano_folder}", "--alias", "tiny=small", "--idle-ttl", "5m") as (_, url):
        listed = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]
        assert {each["id"]: each["state"] for each in listed} == {
            "nano": "loaded",
            "small": "unloaded",
            "tiny": "unloaded",
        }
        model = served_model(url, name="small")  # has it loaded
        assert (model.name, model.context) == ("small", 4096)
        assert httpx.get(f"{url}/v1/models/tiny", trust_env=False).json()["state"] == "loaded"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["{nano}", "{nano}/"], 1, "two models would be called 'nano': serve one as NAME="),
        (["{nano}", "nobody/nothing"], 1, "'nobody/nothing' is no local folder, and not among the models"),
        (["{nano}", "b={nano}/none"], 1, "no model"),
        (["{nano}", "--alias", "x=y"], 1, "not the model that is served, nano"),
        (["{nano}", "b={nano}", "--alias", "b"], 1, "means another model already"),
        (["{nano}", "--alias", "default=b", "b={nano}"], 1, "'default' means another model already"),
        (["{nano}", "--max-loaded-models", "0"], 2, "--max-loaded-models"),
        (["{nano}", "--idle-ttl", "soon"], 2, "90s, 5m, 1h30m or 2d; got 'soon'"),
        (["{nano}", "--idle-ttl", "-5"], 2, "--idle-ttl"),
    ],
)
def test_models_that_cannot_be_served_are_refused_at_the_start(
    nano_folder: Path, control: Callable[..., tuple[int, str, str]], arguments: list[str], code: int, said: str
) -> None:
    given = [each.replace("{nano}", str(nano_folder)) for each in arguments]
    found, _, error = control("serve", "--port", "0", *given)
    assert said in error
    assert found == code


def test_models_may_stand_in_the_settings(
    nano_folder: Path, home: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "settings.toml").write_text(f'[server]\nmodels = ["b={nano_folder}"]\nidle_ttl = "1m"\nlazy = true\n')
    home["SELFDRAFT_CONFIG_DIR"] = str(tmp_path)
    with serving(nano_folder, home) as (_, url):
        listed = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]
        assert [(each["id"], each["state"]) for each in listed] == [("nano", "unloaded")]
