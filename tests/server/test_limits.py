"""Guards what a request may hold, how many may wait, how one row may hold up others, and how a server ends."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from selfdraft.errors import SelfdraftError
from selfdraft.llm import LLM

from .conftest import Running, running, within
from .steps import Steps, scripted
from .test_field_reports import HELLO, chat, events, post
from .test_serve_command import home, serving

__all__ = ["home"]

PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions")


def request(path: str, **given: Any) -> dict[str, Any]:
    """A short request of a dialect."""
    body: dict[str, Any] = {"model": "m", "max_tokens": 3, "temperature": 0}
    match path:
        case "/v1/responses":
            return {"model": "m", "input": "Hello", "max_output_tokens": 3, **given}
        case "/v1/completions":
            return {**body, "prompt": "Hello", **given}
        case _:
            return {**body, "messages": HELLO, **given}


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"properties": value}
    return value


def openai_tools(count: int, parameters: Any = None) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{n}", "parameters": parameters}} for n in range(count)]


def tools(count: int, parameters: Any = None) -> list[dict[str, Any]]:
    return [{"name": f"f{n}", "input_schema": parameters or {}} for n in range(count)]


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USER = {"role": "user", "content": "x"}

TOO_MUCH: list[tuple[str, int, str, Any]] = [
    ("/v1/chat/completions", 413, "messages", [USER] * 2049),
    ("/v1/messages", 413, "messages", [USER] * 2049),
    ("/v1/responses", 413, "input", [USER] * 2049),
    ("/v1/chat/completions", 413, "messages", [{"role": "user", "content": [{"type": "text", "text": "x"}] * 2049}]),
    ("/v1/chat/completions", 413, "messages", [USER, {"role": "assistant", "tool_calls": [CALL] * 257}]),
    ("/v1/chat/completions", 413, "tools", openai_tools(257)),
    ("/v1/messages", 413, "tools", tools(257)),
    ("/v1/responses", 413, "tools", [{"type": "function", "name": f"f{n}"} for n in range(257)]),
    ("/v1/chat/completions", 413, "tools", openai_tools(1, deep(70))),
    ("/v1/messages", 413, "tools", tools(1, deep(70))),
    ("/v1/chat/completions", 413, "tools", [{"type": "function", "function": {"name": "f" * 129}}]),
    ("/v1/chat/completions", 413, "response_format", {"type": "json_schema", "json_schema": {"schema": deep(70)}}),
    ("/v1/chat/completions", 413, "metadata", deep(120)),
    ("/v1/chat/completions", 413, "metadata", {str(n): "x" for n in range(65)}),
    ("/v1/chat/completions", 413, "stop", ["x"] * 17),
    ("/v1/messages", 413, "stop_sequences", ["x"] * 17),
    ("/v1/completions", 413, "logit_bias", {str(n): 1 for n in range(1025)}),
    ("/v1/completions", 413, "prompt", ["x"] * 129),
    ("/v1/completions", 400, "prompt", ["x"] * 100),  # more answers than may run and wait together
    ("/v1/completions", 400, "n", 9),
    ("/v1/completions", 400, "max_tokens", 0),
    ("/v1/completions", 400, "max_tokens", 2**31),
    ("/v1/completions", 400, "temperature", 101),
    ("/v1/completions", 400, "top_p", 0),
    ("/v1/completions", 400, "top_k", -1),
    ("/v1/completions", 400, "min_p", 1.1),
    ("/v1/completions", 400, "presence_penalty", -2.1),
    ("/v1/completions", 400, "repetition_penalty", 0),
    ("/v1/completions", 400, "seed", 2**64),
    ("/v1/completions", 400, "logprobs", 21),
    ("/v1/completions", 400, "logit_bias", {"5": 101}),
    ("/v1/completions", 400, "logit_bias", {"8192": 1}),
    ("/v1/completions", 400, "prompt", [8192]),
    ("/v1/completions", 400, "depth", 9),
    ("/v1/chat/completions", 400, "thinking_budget", -1),
    ("/v1/chat/completions", 400, "chat_template_kwargs", {"thinking_budget": "5"}),
    ("/v1/chat/completions", 400, "chat_template_kwargs", {"chat_template": "{{ x }}"}),
    ("/v1/chat/completions", 400, "messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
    ("/detokenize", 400, "tokens", [8192]),
]


@pytest.mark.parametrize(("path", "status", "field", "value"), TOO_MUCH, ids=lambda value: str(value)[:24])
def test_too_much_is_refused_by_name(path: str, status: int, field: str, value: Any, server: Running) -> None:
    begin = server.service.metrics.completion_tokens._value.get()
    with server.client() as client:
        refused = client.post(path, json=request(path, **{field: value}))
        assert refused.status_code == status, refused.text
        error = refused.json()["error"]
        assert field in (error.get("param") or "") or field in error["message"] or "body" in error["message"], error
    assert server.service.metrics.completion_tokens._value.get() == begin


def test_no_number_is_none(server: Running) -> None:
    with server.client() as client:
        for path in PATHS:
            for number in (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999"):
                raw = json.dumps(request(path)).encode()[:-1] + b', "temperature": %s}' % number
                assert client.post(path, content=raw).status_code == 400, (path, number)


def test_a_template_of_a_client_is_not_rendered(server: Running) -> None:
    with server.client() as client:
        plain = chat(client)
        assert chat(client, chat_template="{{ 1 / 0 }}")["usage"] == plain["usage"]


def test_every_answer_of_a_request_takes_a_place(load_nano: Callable[[], LLM]) -> None:
    steps = Steps()
    with running(steps.hold(load_nano), rows=2, queue=2) as server, server.client() as client, steps.running_at_end():
        first = post(server, {"messages": HELLO, "max_tokens": 30, "n": 2})
        assert within(10, lambda: server.service.figures["running"] == 2)
        second = post(server, {"messages": HELLO, "max_tokens": 30})
        assert within(10, lambda: server.service.figures["waiting"] == 1)
        for path in PATHS[:1] + PATHS[3:]:
            refused = client.post(path, json=request(path, n=2))
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
        never = client.post("/v1/completions", json=request("/v1/completions", n=5))
        assert never.status_code == 400  # trying again would not help
        assert "at most" in never.json()["error"]["message"] or "4 are the most" in never.json()["error"]["message"]
        assert server.service.figures == {"running": 2, "waiting": 1}
        steps.run()
        assert server.idle()
        first.close()
        second.close()


def test_a_prompt_holds_a_running_stream_up_for_one_chunk_at_most(load_nano: Callable[[], LLM]) -> None:
    """Between two steps that forward a long prompt, the stream that runs gets its cycle."""
    log: list[tuple[int, int]] = []  # after each step: tokens of the stream, prompt tokens of the newcomer

    def load() -> LLM:
        llm = load_nano()
        llm.engine._prefill._chunk = 64
        step, add = llm.engine.step, llm.engine.add
        rows: list[Any] = []

        def counted() -> list[Any]:
            advanced = step()
            if len(rows) == 2 and not rows[1].emitted:
                log.append((len(rows[0].emitted), rows[1].prefilled))
            return advanced

        llm.engine.add = lambda request: rows.append(add(request)) or rows[-1]  # type: ignore[method-assign, func-returns-value]
        llm.engine.step = counted  # type: ignore[method-assign]
        return llm

    with running(load) as server, server.client() as client:
        stream = events(client, "/v1/chat/completions", {"messages": HELLO, "max_tokens": 3000, "ignore_eos": True})
        next(event for event in stream if event["choices"][0]["delta"].get("content"))
        with server.client() as other:
            chat(other, messages=[{"role": "user", "content": "word " * 1200}], max_tokens=2)
        stream.close()
        assert server.idle()
    assert len({prefilled for _, prefilled in log}) > 10  # many chunks
    for before, after in zip(log, log[2:], strict=False):
        assert after[0] > before[0], log
        assert after[1] - before[1] <= 64


class Broken(Exception):
    """Not one of ours."""


@pytest.mark.parametrize("at", ["begin", "take"])
@pytest.mark.parametrize("error", [Broken("a fault of ours"), SelfdraftError("one that is foreseen")])
def test_an_answer_that_fails_takes_no_other_with_it(at: str, error: Exception, load_nano: Callable[[], LLM]) -> None:
    def load() -> LLM:
        llm = load_nano()
        answer = llm.answer

        def failing(*args: Any, **given: Any) -> Any:
            made = answer(*args, **given)
            if made.request.params.seed == 13:

                def fail() -> Any:
                    raise error

                setattr(made, at, fail)
            return made

        llm.answer = failing  # type: ignore[method-assign]
        return llm

    with running(load) as server, server.client() as client:
        connection = post(server, {"messages": HELLO, "max_tokens": 60, "stream": True})
        for stream in (False, True):
            for path in PATHS:
                body = request(path, seed=13, stream=stream)
                failed = client.post(path, json=body)
                assert failed.status_code == (200 if stream else 500)
                assert "a fault of ours" not in failed.text
                assert "Traceback" not in failed.text
                assert "error" in failed.text
        said = b""
        while b"[DONE]" not in said:
            said += connection.recv(65536)
        assert b'"error"' not in said
        connection.close()
        assert server.idle()
        assert chat(client)["choices"]


def test_a_grammar_without_a_way_out_is_the_clients_fault(load_nano: Callable[[], LLM]) -> None:
    def load() -> LLM:
        llm = load_nano()
        start = type(llm.grammars.regex("a")).start

        class Stuck:
            """Allows nothing behind the first token."""

            def __init__(self, sentence: Any) -> None:
                self.sentence, self.emitted = sentence, 0

            def allowed(self, drafts: Any) -> Any:
                masks = self.sentence.allowed(drafts)
                masks[0 if self.emitted else 1 :] = False
                return masks

            def emit(self, tokens: Any) -> None:
                self.emitted += len(tokens)
                self.sentence.emit(tokens)

        regex = llm.grammars.regex

        def stuck(pattern: str) -> Any:
            grammar = regex(pattern)
            grammar.start = lambda: Stuck(start(grammar))  # type: ignore[method-assign]
            return grammar

        llm.grammars.regex = stuck  # type: ignore[method-assign]
        return llm

    with running(load) as server, server.client() as client:
        body = request("/v1/completions", response_format={"type": "regex", "regex": "[a-z]+"}, max_tokens=9, depth=2)
        refused = client.post("/v1/completions", json=body)
        assert refused.status_code == 400, refused.text
        assert "dead end" in refused.json()["error"]["message"]


def test_a_server_that_ends_turns_newcomers_away_and_lets_the_others_finish(load_nano: Callable[[], LLM]) -> None:
    steps = Steps()
    with running(steps.hold(scripted(load_nano, "one two three")), drain=30) as server, steps.running_at_end():
        first = post(server, {"messages": HELLO, "max_tokens": 30, "stream": True, "ignore_eos": False})
        assert within(10, lambda: server.service.figures["running"] == 1)
        server.stop()
        assert within(10, lambda: server.service.stopping)
        with server.client() as client:
            for path in PATHS:
                refused = client.post(path, json=request(path))
                assert refused.status_code == 503
                assert refused.headers["retry-after"]
                assert "shutting down" in refused.json()["error"]["message"]
                assert (refused.json().get("type") == "error") == (path == "/v1/messages")
            assert client.get("/health").json()["status"] == "stopping"
            assert client.get("/health").status_code == 503
        steps.run()
        said = b""
        while got := first.recv(65536):
            said += got
        assert b"three" in said
        assert b"[DONE]" in said
        first.close()


def test_a_second_signal_ends_it_at_once(nano_folder: Path, home: dict[str, str]) -> None:
    asked = {"model": "x", "prompt": "Hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with (
        serving(nano_folder, home, "--drain", "600") as (process, url),
        httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=60, trust_env=False) as response,
    ):
        lines = response.iter_lines()  # kept: the stream is closed with it
        next(lines)
        process.send_signal(signal.SIGTERM)
        assert within(20, lambda: httpx.get(f"{url}/health", trust_env=False).json()["status"] == "stopping")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_the_queue_is_in_order(load_nano: Callable[[], LLM]) -> None:
    steps = Steps()
    with running(steps.hold(load_nano), rows=1, queue=8) as server, steps.running_at_end():
        ended: list[int] = []

        def ask(number: int) -> None:
            with server.client() as client:
                chat(client, max_tokens=4)
            ended.append(number)

        threads = []
        for number in range(4):
            threads.append(threading.Thread(target=ask, args=(number,)))
            threads[-1].start()
            assert within(10, lambda number=number: sum(server.service.figures.values()) == number + 1)
        while len(ended) < 4:
            steps.allow(1)
            time.sleep(0.02)
        assert ended == [0, 1, 2, 3]
        for thread in threads:
            thread.join()


def test_connections_beyond_the_rows_wait_without_harm(server: Running) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(150)]
    with server.client() as client:
        assert chat(client)["choices"]
    for connection in idle:
        connection.close()
