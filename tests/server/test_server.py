"""Guards the server over a real socket: what clients get, who is refused, and that nothing is left behind."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import selfdraft
from selfdraft.errors import SelfdraftError
from selfdraft.llm import LLM
from selfdraft.server.chat import Chats
from selfdraft.server.run import bind
from selfdraft.settings import load_settings

from .conftest import Running, running, within

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]


def asked(**given: Any) -> dict[str, Any]:
    return {"model": "nano", "messages": HELLO, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **given}


def chat(client: httpx.Client, **given: Any) -> dict[str, Any]:
    response = client.post("/v1/chat/completions", json=asked(**given))
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def streamed(client: httpx.Client, **given: Any) -> list[dict[str, Any]]:
    with client.stream("POST", "/v1/chat/completions", json=asked(stream=True, **given)) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.parametrize("depth", [0, 1, 4, "auto"])
def test_streamed_and_whole_give_the_same_text_at_every_depth(server: Running, depth: Any) -> None:
    with server.client() as client:
        whole = chat(client, depth=depth)
        chunks = streamed(client, depth=depth, stream_options={"include_usage": True})
        assert text_of(chunks) == whole["choices"][0]["message"]["content"] != ""
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == whole["usage"]
        assert whole["usage"]["completion_tokens"] == 12
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["timings"]["trunk_replays"] == 0
        assert chat(client, depth=0)["choices"] == whole["choices"]


def test_several_answers_differ_and_a_seed_repeats_them(server: Running) -> None:
    with server.client() as client:
        some = chat(client, n=3, temperature=1.0, seed=4)
        texts = [choice["message"]["content"] for choice in some["choices"]]
        assert [choice["index"] for choice in some["choices"]] == [0, 1, 2]
        assert len(set(texts)) == 3
        chunks = streamed(client, n=3, temperature=1.0, seed=4)
        assert [text_of(chunks, index) for index in range(3)] == texts


def test_rows_side_by_side_equal_rows_alone(server: Running) -> None:
    prompts = [
        [{"role": "user", "content": f"Tell me about {word}"}] for word in ("rain", "bread", "the sea", "ink") * 3
    ]

    def ask(messages: list[dict[str, Any]]) -> str:
        with server.client() as client:
            return str(chat(client, messages=messages, max_tokens=24)["choices"][0]["message"]["content"])

    alone = [ask(messages) for messages in prompts[:4]]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, prompts))
    assert together == alone * 3
    assert server.idle()


def test_a_client_that_leaves_frees_its_row(server: Running) -> None:
    for stream in (True, False):
        connection = socket.create_connection(("127.0.0.1", server.port))
        body = json.dumps(asked(stream=stream, max_tokens=3000)).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        assert within(10, lambda: server.service.figures["running"] == 1)
        connection.close()
        assert server.idle(5)
    with server.client() as client:
        assert chat(client)["usage"]["completion_tokens"] == 12


def test_a_client_that_leaves_before_it_is_answered_is_given_up(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prepared, left, submitted = threading.Event(), threading.Event(), threading.Event()
    prepare, submit = Chats._prepare, server.service.submit

    def slowly(self: Chats, job: Any) -> Any:
        done = prepare(self, job)
        prepared.set()
        assert left.wait(10)
        return done

    def noting(answers: Any) -> Any:
        tickets = submit(answers)
        submitted.set()
        return tickets

    monkeypatch.setattr(Chats, "_prepare", slowly)
    monkeypatch.setattr(server.service, "submit", noting)
    body = json.dumps(asked(stream=True, max_tokens=3000)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    for sent in (body[:20], body):
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.sendall(head.encode() + sent)
        assert sent != body or prepared.wait(10)
        connection.close()
        with server.client() as client:
            assert client.get("/health").status_code == 200  # by now the server has seen it go
    left.set()
    assert not submitted.wait(1)
    assert server.idle(3)  # 3000 tokens take longer
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_health_answers_while_loading_and_while_busy(load_nano: Callable[[], LLM]) -> None:
    go = threading.Event()

    def load() -> LLM:
        go.wait(30)
        return load_nano()

    with running(load, ready=False) as server, server.client() as client:
        response = client.get("/health")
        assert response.status_code == 503
        assert response.json()["status"] == "loading"
        assert response.headers["retry-after"]
        go.set()
        assert within(30, lambda: client.get("/health").status_code == 200)
        assert client.head("/health").status_code == 200
        with client.stream("POST", "/v1/chat/completions", json=asked(stream=True, max_tokens=3000)):
            assert within(10, lambda: client.get("/health").json()["running"] == 1)


def test_a_model_that_cannot_be_loaded_is_said_so(caplog: pytest.LogCaptureFixture) -> None:
    """To whoever reads the log; clients are not told what the reason may name, such as folders."""

    def load() -> LLM:
        raise SelfdraftError("/somewhere is made of cheese")

    with running(load) as server, server.client() as client:
        health, refused = client.get("/health"), client.post("/v1/chat/completions", json=asked())
        assert (health.status_code, health.json()["status"], refused.status_code) == (503, "failed", 500)
        assert client.head("/health").status_code == 503
        for response in (health, refused):
            assert "log" in response.text
            assert "cheese" not in response.text
    assert "cheese" in caplog.text


def test_a_full_queue_is_429_and_a_place_is_found_again(load_nano: Callable[[], LLM]) -> None:
    with running(load_nano, rows=1, queue=1) as server, server.client() as client:
        first = asked(stream=True, max_tokens=3000)
        with (
            client.stream("POST", "/v1/chat/completions", json=first),
            client.stream("POST", "/v1/chat/completions", json=first),
        ):
            refused = client.post("/v1/chat/completions", json=asked())
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert server.service.figures == {"running": 1, "waiting": 1}
        assert server.idle()
        assert chat(client)["usage"]["completion_tokens"] == 12
        assert b'selfdraft_refused_total{model_name="nano"} 1.0' in client.get("/metrics").content


def test_memory_is_refused_before_prefill_with_the_figures(nano_folder: Path) -> None:
    def load() -> LLM:
        return selfdraft.load(str(nano_folder), settings=load_settings(memory_limit="5MiB"))

    with running(load) as server, server.client() as client:
        refused = client.post("/v1/chat/completions", json=asked(max_tokens=4000))
        assert refused.status_code == 413
        assert "GiB" in refused.json()["error"]["message"]
        assert server.service.figures == {"running": 0, "waiting": 0}


def test_a_prompt_beyond_the_context(server: Running) -> None:
    with server.client() as client:
        long = [{"role": "user", "content": "word " * 5000}]
        refused = client.post("/v1/chat/completions", json=asked(messages=long))
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        refused = client.post("/v1/messages", json={"model": "nano", "messages": long, "max_tokens": 5})
        assert refused.status_code == 400
        assert refused.json()["type"] == "error"


def test_comments_keep_a_silent_stream_alive(load_nano: Callable[[], LLM]) -> None:
    hold = threading.Event()

    def load() -> LLM:
        llm = load_nano()
        step = llm.engine.step
        llm.engine.step = lambda: (hold.wait(10), step())[1]  # type: ignore[method-assign]
        return llm

    with (
        running(load, keepalive=0.05) as server,
        server.client() as client,
        client.stream("POST", "/v1/chat/completions", json=asked(stream=True)) as response,
    ):
        lines = response.iter_lines()
        comments = 0
        while comments < 3:
            comments += next(lines).startswith(":")
        hold.set()
        assert list(lines)[-2] == "data: [DONE]"


def test_text_is_tokenized_as_a_completion_is_or_as_it_stands(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = server.service.llm
    (end,) = llm.tokenizer.encode("<|im_end|>", special=True)
    monkeypatch.setattr(llm.tokenizer, "bos_id", end)
    with server.client() as client:

        def tokens(text: str, **given: bool) -> list[int]:
            found: list[int] = client.post("/tokenize", json={"prompt": text, **given}).json()["tokens"]
            return found

        bare = tokens("Once<|im_end|>", add_special_tokens=False)
        assert bare == [*tokens("Once", add_special_tokens=False), end]
        assert tokens("Once<|im_end|>") == tokens("Once<|im_end|>", add_special_tokens=True) == [end, *bare]
        assert tokens("<|im_end|>") == [end]
        asked = {"model": "nano", "prompt": "Once<|im_end|>", "max_tokens": 1}
        assert client.post("/v1/completions", json=asked).json()["usage"]["prompt_tokens"] == len(bare) + 1


def test_what_a_client_needs_to_tokenize_here(server: Running, load_nano: Callable[[], LLM]) -> None:
    with server.client() as client:
        found = client.get("/tokenizer_info").json()
    assert found["eos_token"] == "<|im_end|>"
    assert "add_generation_prompt" in found["chat_template"]
    assert not any("/" in value for name, value in found.items() if name != "chat_template")


def test_completions_take_text_tokens_and_lists(server: Running) -> None:
    with server.client() as client:
        tokens = client.post("/tokenize", json={"prompt": "Once upon a time"}).json()["tokens"]
        common = {"model": "nano", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        bodies = [
            client.post("/v1/completions", json={"prompt": prompt, **common}).json()
            for prompt in ("Once upon a time", tokens, ["Once upon a time", "Hello"], [tokens, [5, 6]])
        ]
        texts = [[choice["text"] for choice in body["choices"]] for body in bodies]
        assert texts[0] == texts[1] == texts[2][:1] == texts[3][:1]
        assert len(texts[2]) == len(texts[3]) == 2
        echoed = client.post("/v1/completions", json={"prompt": tokens, "echo": True, **common}).json()
        assert echoed["choices"][0]["text"] == "Once upon a time" + texts[0][0]
        assert client.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "Once upon a time"


def test_models_metrics_and_description(server: Running) -> None:
    with server.client() as client:
        (model,) = client.get("/v1/models").json()["data"]
        assert (model["id"], model["max_model_len"], model["max_depth"]) == ("nano", 4096, 8)
        assert client.get("/v1/models/nano").json() == model
        assert client.get("/v1/models/../../etc/passwd").status_code == 404
        assert client.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
        chat(client, depth=3, max_tokens=30)
        lines = client.get("/metrics").text.splitlines()
        counts = {line.split(" ")[0]: float(line.split(" ")[1]) for line in lines if not line.startswith("#")}
        drafts, accepted, cycles = (
            counts[f'spec_decode_num_{name}_total{{model_name="nano"}}']
            for name in ("draft_tokens", "accepted_tokens", "drafts")
        )
        assert drafts > accepted >= 0
        assert cycles > 0
        assert counts['selfdraft_requests_total{path="/v1/chat/completions",status="200"}'] >= 1
        paths = client.get("/openapi.json").json()["paths"]
        assert {"/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"} <= set(paths)


def test_unknown_paths_and_methods_are_errors_in_the_dialects_form(server: Running) -> None:
    with server.client() as client:
        missing = client.get("/v1/nothing")
        assert missing.status_code == 404
        assert "/v1/nothing" in missing.json()["error"]["message"]
        wrong = client.get("/v1/chat/completions")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert "POST" in wrong.json()["error"]["message"]
        assert client.get("/v1/messages").json()["type"] == "error"
        broken = client.post("/v1/chat/completions", content=b"{")
        assert broken.status_code == 400
        assert "JSON" in broken.json()["error"]["message"]


def test_a_busy_port_is_said_so_with_the_remedy(server: Running) -> None:
    with pytest.raises(SelfdraftError, match=f"port {server.port} on 127.0.0.1 is in use.*--port"):
        bind("127.0.0.1", server.port)
    with pytest.raises(SelfdraftError, match="cannot listen"):
        bind("192.0.2.7", 0)
