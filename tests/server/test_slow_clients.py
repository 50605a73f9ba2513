"""Guards against clients that take their time, and against too many of them: none holds a connection for ever."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from selfdraft.llm import LLM
from selfdraft.server import connection, run, security

from .conftest import Running, running, within
from .steps import Steps

LIMIT = 0.4
HEAD = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
ASKED = {"model": "m", "prompt": "Hello", "max_tokens": 2, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module", autouse=True)
def haste() -> Iterator[None]:
    """Headers and bodies are waited for only for a moment."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(connection, "HEADER_SECONDS", LIMIT)
        patched.setattr(security, "BODY_SECONDS", LIMIT)
        yield


@pytest.fixture(scope="module")
def hasty(haste: None, load_nano: Callable[[], LLM]) -> Iterator[Running]:
    with running(load_nano) as server:
        yield server


@contextmanager
def connected(server: Running) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        yield client


def trickled(client: socket.socket, drop: bytes) -> bytes:
    """What the server says before it hangs up on somebody who sends a drop now and then; 10 s are the most."""
    client.settimeout(0.05)
    heard = b""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            client.sendall(drop)
            if not (data := client.recv(65536)):
                return heard
            heard += data
        except TimeoutError:
            pass
        except ConnectionError:  # it hung up while we spoke
            return heard
    raise AssertionError(f"still connected; heard {heard!r}")


@pytest.mark.parametrize("begin", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
def test_headers_that_trickle_or_never_come_end_the_connection(hasty: Running, begin: bytes) -> None:
    with connected(hasty) as client:
        client.sendall(begin)
        assert trickled(client, b"x" if begin else b"") == b""


def test_nor_may_they_trickle_behind_an_answer(hasty: Running) -> None:
    with connected(hasty) as client:
        for pause in (2 * LIMIT, 0):  # to be silent in between is something else
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while b"}" not in answer:
                data = client.recv(65536)
                assert data, "it hung up"
                answer += data
            assert b"200 OK" in answer
            time.sleep(pause)
        client.sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")
        assert trickled(client, b"x") == b""


def test_nor_may_the_rest_of_a_body_that_was_refused(hasty: Running) -> None:
    with connected(hasty) as client:
        client.sendall(HEAD % b"/nothing")
        assert trickled(client, b"x").startswith(b"HTTP/1.1 404")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/tokenize", "/page/render"])
@pytest.mark.parametrize("drop", [b" ", b""])
def test_a_body_that_trickles_is_answered_with_408(hasty: Running, path: str, drop: bytes) -> None:
    with connected(hasty) as client:
        client.sendall(HEAD % path.encode())
        head, _, body = trickled(client, drop).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 Request Timeout")
    assert b"connection: close" in head.lower()
    found = json.loads(body)
    assert "longer than 0.4 s" in found["error"]["message"]
    assert (found.get("type") == "error") == (path == "/v1/messages")
    with hasty.client() as other:
        assert f'selfdraft_requests_total{{path="{path}",status="408"}}' in other.get("/metrics").text


@pytest.mark.parametrize("stream", [True, False])
def test_whoever_waits_for_an_answer_has_time(load_nano: Callable[[], LLM], stream: bool) -> None:
    steps = Steps()
    with running(steps.hold(load_nano)) as server, server.client() as client, steps.running_at_end():
        threading.Timer(3 * LIMIT, steps.run).start()
        with client.stream("POST", "/v1/completions", json={**ASKED, "stream": stream}) as answer:
            assert answer.status_code == 200
            assert "length" in answer.read().decode()
        assert client.get("/health").status_code == 200


def test_connections_have_an_upper_limit(load_nano: Callable[[], LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_SPARE_CONNECTIONS", 3)
    with running(load_nano, rows=1, queue=1) as server, ExitStack() as silent:
        for _ in range(4):
            silent.enter_context(connected(server))
        with server.client() as client:
            assert within(5, lambda: client.get("/health").status_code == 503)
            silent.close()
            assert within(5, lambda: client.get("/health").status_code == 200)
