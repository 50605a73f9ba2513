"""Guards max mode of a server: fans at maximum from its first request until it has been idle, and automatic again when
it ends, whichever way.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import selfdraft
from selfdraft.fans import max_mode, thermalforge
from selfdraft.fans.max_mode import MaxMode
from selfdraft.llm import LLM
from selfdraft.server.instance import Instance
from selfdraft.settings import load_settings
from tests.support.thermalforge import AS_MAC, StandIn, standing_in

from .conftest import Running, running, within

MAIN = "import sys; from selfdraft.cli.app import main; sys.exit(main(sys.argv[1:]))"
LONG = {"model": "x", "prompt": "Hello", "max_tokens": 3000, "ignore_eos": True, "stream": True}
SHORT = {"model": "x", "prompt": "Hello", "max_tokens": 2}


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with standing_in(tmp_path) as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(thermalforge, "_on_macos", lambda: True)
        yield found


@pytest.fixture
def load_max(stand_in: StandIn, nano_folder: Path) -> Callable[..., LLM]:
    def load(linger: float) -> LLM:
        llm = selfdraft.load(str(nano_folder), settings=load_settings(mode="max"))
        llm.hold_fans(MaxMode(stand_in.fans, stand_in.claims, "test", linger=linger))
        return llm

    return load


def ask(server: Running, body: dict[str, Any] = SHORT) -> None:
    with server.client() as client:
        assert client.post("/v1/completions", json=body).status_code == 200


def test_fans_follow_the_requests(stand_in: StandIn, load_max: Callable[..., LLM]) -> None:
    with running(lambda: load_max(0.2)) as server:
        with server.client() as client:
            assert client.get("/health").json()["mode"] == "max"
            assert stand_in.calls == []
            with client.stream("POST", "/v1/completions", json=LONG) as response:
                next(response.iter_lines())
                assert within(20, lambda: stand_in.state == "max")
        assert server.idle()  # the client has gone, and its answer with it
        assert stand_in.settled()
        ask(server)
        assert within(20, lambda: stand_in.calls.count("max") == 2)
        assert stand_in.settled()


def test_requests_in_quick_succession_do_not_toggle(stand_in: StandIn, load_max: Callable[..., LLM]) -> None:
    with running(lambda: load_max(60)) as server:
        for _ in range(3):
            ask(server)
            assert within(20, lambda: stand_in.state == "max")
            assert server.idle()
            assert not within(0.3, lambda: not stand_in.claims.live())
    assert stand_in.state == "auto"  # at the end it waits for that
    assert stand_in.calls == ["max", "auto"]


def test_when_the_engine_ends_the_fans_are_given_back(stand_in: StandIn, load_max: Callable[..., LLM]) -> None:
    with running(lambda: load_max(60)) as server:
        ask(server)
        assert within(20, lambda: stand_in.state == "max")
        server.service._hand_out = lambda: 1 / 0  # type: ignore[assignment, method-assign]
        with server.client() as client:
            client.post("/v1/completions", json=SHORT)
            assert stand_in.settled()
            assert client.get("/health").json()["status"] == "failed"


def serving(folder: Path, state: Path) -> tuple[subprocess.Popen[bytes], str]:
    arguments = ["serve", "--mode", "max", "--model", str(folder), "--port", "0"]
    process = subprocess.Popen([sys.executable, "-c", AS_MAC + MAIN, *arguments], stderr=subprocess.DEVNULL)
    note = state / "state/selfdraft/server.json"
    assert within(60, note.exists)
    url = Instance(**json.loads(note.read_text())).url
    assert within(60, lambda: httpx.get(f"{url}/health", trust_env=False).json()["status"] == "ok")
    return process, url


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_is_ended_while_it_generates(
    stand_in: StandIn, nano_folder: Path, tmp_path: Path, by: signal.Signals
) -> None:
    process, url = serving(nano_folder, tmp_path)
    with process:
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60, trust_env=False) as response:
                next(response.iter_lines())
                assert within(20, lambda: stand_in.state == "max")
                process.send_signal(by)
                process.send_signal(by)
                process.wait(30)
            assert stand_in.settled()
        finally:
            process.kill()
    assert stand_in.calls == ["max", "auto"]


def test_the_log_says_what_does_not_work(
    stand_in: StandIn, load_max: Callable[..., LLM], caplog: pytest.LogCaptureFixture
) -> None:
    stand_in.plan("max", "fail")
    with running(lambda: load_max(60)) as server:
        ask(server)
        assert within(20, lambda: "sudo thermalforge install" in caplog.text)
    assert [record.name for record in caplog.records if "thermalforge" in record.message] == [max_mode.__name__]
