"""Whatever comes over a real socket is answered with 2xx or 4xx in its dialect's form, and nothing is left behind.

A longer run: TESTS_FUZZ=5000 pytest tests/server/test_server_fuzz.py --hypothesis-seed=N
"""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from selfdraft.llm import LLM

from .conftest import Running, running

EXAMPLES = int(os.environ.get("TESTS_FUZZ", "40"))

FUNCTION = {
    "name": "weather",
    "description": "The weather of a town",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}, "days": {"type": "integer"}}},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SHORT = {"model": "nano", "max_tokens": 4}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Rom"}'}}

BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            **SHORT,
            "messages": [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": "auto",
            "stop": ["x"],
            "logit_bias": {"5": 3},
            "logprobs": True,
            "top_logprobs": 2,
            "temperature": 0.7,
            "depth": 2,
            "n": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
            "reasoning_effort": "low",
            "chat_template_kwargs": {"enable_thinking": True},
        },
    ),
    (
        "/v1/chat/completions",
        {
            **SHORT,
            "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.1,
            "seed": 3,
            "min_p": 0.1,
            "top_k": 5,
            "top_p": 0.9,
        },
    ),
    ("/v1/completions", {**SHORT, "prompt": [[1, 2], [3]], "logprobs": 1, "n": 2, "best_of": 2, "stop": "a"}),
    ("/v1/completions", {**SHORT, "prompt": "Once", "echo": True, "stream": True, "min_tokens": 1, "seed": -1}),
    (
        "/v1/completions",
        {**SHORT, "prompt": ["a", "b"], "response_format": {"type": "regex", "regex": "[a-c]+"}, "ignore_eos": False},
    ),
    (
        "/v1/completions",
        {**SHORT, "prompt": "x", "response_format": {"type": "grammar", "grammar": 'start: "yes" | "no"'}},
    ),
    (
        "/v1/responses",
        {
            "model": "nano",
            "max_output_tokens": 4,
            "instructions": "Be short.",
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "rain"},
            ],
            "tools": [{"type": "function", **FUNCTION}, {"type": "web_search"}],
            "tool_choice": "auto",
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
            "reasoning": {"effort": "low"},
            "include": ["reasoning.encrypted_content"],
            "stream": True,
            "metadata": {"a": "b"},
        },
    ),
    (
        "/v1/messages",
        {
            **SHORT,
            "system": [{"type": "text", "text": "Be short."}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {"type": "tool_use", "id": "t1", "name": "weather", "input": {"town": "Rom"}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "rain"}]},
            ],
            "tools": [{"name": "weather", "description": "d", "input_schema": SCHEMA}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stop_sequences": ["x"],
            "stream": True,
        },
    ),
    ("/v1/messages/count_tokens", {"model": "nano", "messages": [{"role": "user", "content": "Hi"}]}),
    ("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("/tokenize", {"prompt": "Hi", "add_special_tokens": False}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/page/render", {"text": "*Hi* `x`"}),
]

ODD: list[Any] = [
    *[None, True, False, 0, -1, 1, 1.5, -0.0, 2**31, 2**53, -(2**63), 2**64, 10**30, 1e300, 1e-300],
    *[
        "",
        "a",
        "auto",
        "none",
        "{",
        "[1]",
        "../../etc/passwd",
        "\x00",
        "é" * 300,
        "𝕏\u202e\u2028",
        "<|im_end|>",
        "</think>",
    ],
    *[[], [None], [[]], ["a"], [0, "a"], [-1], [10**9], ["a"] * 300, [[1]] * 200, list(range(8192))],
    *[{}, {"type": "text"}, {"type": []}, {"a": {"b": [{"c": None}]}}, {"type": "object", "properties": {"a": False}}],
    *[
        {"99999999": 1},
        {"-1": 1},
        {"x": 1},
        {"5": 101},
        {"$ref": "#/x"},
        {"$ref": "#"},
        {"type": "string", "pattern": "("},
    ],
    *[{"type": "function", "function": {"name": "a"}}, {"type": "tool", "name": "weather"}, {"type": "image_url"}],
    *[{"type": "json_object"}, {"type": "grammar", "grammar": "start: start"}, {"type": "regex", "regex": "a{9999}"}],
    {"type": "grammar", "grammar": 'start: "a" /[^\\s\\S]/'},
]


def nested(levels: int) -> Any:
    value: Any = "x"
    for level in range(levels):
        value = [value] if level % 2 else {"properties": value}
    return value


FIELDS = [
    *[
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "seed",
        "stop",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
    ],
    *["logit_bias", "logprobs", "top_logprobs", "depth", "tools", "tool_choice", "response_format", "stream", "model"],
    *["stream_options", "messages", "prompt", "input", "system", "echo", "suffix", "thinking", "thinking_budget"],
    *["output_config", "metadata", "ignore_eos", "enable_thinking", "chat_template_kwargs", "instructions", "text"],
    *["parallel_tool_calls", "previous_response_id", "reasoning", "include", "timings_per_token", "unheard_of"],
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, entry in entries for found in places(entry, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """A copy with another value at a place."""
    if not path:
        return change(value)
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], change)
    return copy


ODD_VALUES = st.one_of(
    st.sampled_from(ODD),
    st.text(max_size=20),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(),
    st.builds(nested, st.integers(1, 130)),
    st.recursive(
        st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from(["type", "text", "content", "role", "name", "properties"]), inner)
        ),
    ),
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A valid request with a few odd values in it."""
    path, body = draw(st.sampled_from(BODIES))
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.sampled_from(places(body)[1:]))
        odd = draw(ODD_VALUES)
        body = replaced(body, place, lambda _, odd=odd: odd)
    if draw(st.booleans()):
        body = {**body, draw(st.sampled_from(FIELDS)): draw(ODD_VALUES)}
    return path, body


def written(body: Any) -> bytes:
    return json.dumps(body, allow_nan=True).encode("utf-8", "surrogatepass")


@st.composite
def broken(draw: st.DrawFn) -> tuple[str, bytes, dict[str, str]]:
    """Bytes that are nearly a request, and headers that are nearly right."""
    path, body = draw(st.sampled_from(BODIES))
    raw = written(body)
    at = draw(st.integers(0, len(raw)))
    raw = draw(
        st.sampled_from(
            [
                raw,
                raw[:at],
                b"\xef\xbb\xbf" + raw,
                raw[:at] + b"\x00" + raw[at:],
                raw[:at] + b"\xff\xfe" + raw[at:],
                raw[:at] + b"\xed\xa0\x80" + raw[at:],
                raw.replace(b'"nano"', b'"\\ud800"').replace(b'"Hi"', b'"\\udc00 hi"').replace(b"rain", b"\\ud83d"),
                raw.replace(b": 4", b": NaN").replace(b": 2", b": -Infinity").replace(b": 1", b": 1e999"),
                raw[:-1] + b', "model": "other", "max_tokens": 3, "messages": [], "prompt": ""}',
                raw + raw,
                raw + b" " * 5000,
                b"[" * 100_000,
                b'{"a":' * 5000,
                b"9" * 10_000,
                gzip.compress(raw),
                raw.decode().encode("utf-16"),
                b"",
                b"null",
                b'""',
                draw(st.binary(max_size=40)),
            ]
        )
    )
    kinds = [
        "application/json",
        "text/plain",
        "multipart/form-data",
        "application/x-www-form-urlencoded",
        "a/b; c=é",
        "",
    ]
    headers = {"content-type": draw(st.sampled_from(kinds))}
    if draw(st.booleans()):
        headers["content-encoding"] = draw(st.sampled_from(["gzip", "br", "identity", "nonsense"]))
    return path, raw, headers


@pytest.fixture(scope="module")
def fuzzed(load_nano: Callable[[], LLM]) -> Iterator[Running]:
    """A server whose answers are short even where a request does not say so."""

    def load() -> LLM:
        llm = load_nano()
        llm.limit_context(512)
        llm.defaults["max_tokens"] = 4
        return llm

    with running(load) as server:
        before = fixed(server)
        yield server
        assert server.idle()
        assert fixed(server) == before  # nothing of all that is left behind
        with server.client() as client:
            assert 'status="5' not in client.get("/metrics").text


@pytest.fixture(scope="module")
def client(fuzzed: Running) -> Iterator[httpx.Client]:
    with fuzzed.client() as client:  # one for all: making one takes longer than a request
        yield client


def fixed(server: Running) -> Any:
    """A request whose answer is always the same."""
    body = {**SHORT, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "temperature": 0}
    with server.client() as client:
        answer = client.post("/v1/chat/completions", json={**body, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"], answer.json()["usage"]


def check_error(path: str, body: Any) -> None:
    """The error form of a path's dialect."""
    assert isinstance(body, dict)
    error = body["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    if path.startswith("/v1/messages"):
        assert body["type"] == "error"
        assert set(error) == {"type", "message"}
    else:
        assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] not in ("server_error", "api_error"), error


def check(path: str, response: httpx.Response) -> None:
    """A success or the client's own fault, in the path's form."""
    status, text = response.status_code, response.text
    assert 200 <= status < 300 or 400 <= status < 500, (status, text)
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        for line in text.splitlines():
            if line.startswith("data: ") and line != "data: [DONE]":
                event = json.loads(line.removeprefix("data: "))
                if event.get("error"):
                    check_error(path, event)
                failed = (event.get("response") or {}).get("error") or {}
                assert failed.get("code") != "server_error", failed
    elif status >= 400:
        check_error(path, response.json())
    else:
        response.json()


def test_hundreds_of_tools_and_depth_of_schemas_have_bounds(fuzzed: Running) -> None:
    hello = [{"role": "user", "content": "Hi"}]
    with fuzzed.client() as client:
        for count, levels, status in ((200, 1, 200), (257, 1, 413), (1, 40, 200), (1, 80, 413)):
            function = {**FUNCTION, "parameters": {"type": "object", "properties": nested(levels)}}
            functions = [{**function, "name": f"tool_{n}"} for n in range(count)]
            asked: dict[str, dict[str, Any]] = {
                "/v1/chat/completions": {"tools": [{"type": "function", "function": each} for each in functions]},
                "/v1/messages": {
                    "tools": [{"name": each["name"], "input_schema": each["parameters"]} for each in functions]
                },
            }
            for path, tools in asked.items():
                answer = client.post(path, json={**SHORT, "messages": hello, **tools})
                check(path, answer)
                # 200 tools do not fit the context of this server: that is the client's to hear, too.
                assert answer.status_code in (status, 400), answer.text


@settings(max_examples=3 * EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(bodies())
def test_odd_values(client: httpx.Client, asked: tuple[str, dict[str, Any]]) -> None:
    path, body = asked
    check(path, client.post(path, content=written(body), headers={"content-type": "application/json"}))


@settings(max_examples=2 * EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(broken(), st.booleans())
def test_broken_bodies(client: httpx.Client, asked: tuple[str, bytes, dict[str, str]], chunked: bool) -> None:
    path, raw, headers = asked
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    content = iter([raw[:7], raw[7:]]) if chunked else raw
    check(path, client.post(path, content=content, headers=encoded))


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
HI = written({**SHORT, "messages": [{"role": "user", "content": "Hi"}]})
LENGTH = b"Content-Length: %d\r\n\r\n" % len(HI)
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
LAST = b"Connection: close\r\n"


def talk(server: Running, *pieces: bytes, close: bool = False) -> bytes:
    """Send pieces over one connection, and read what comes until the server closes it.

    Args:
        close: close our half when all is sent.
    """
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        said = b""
        try:
            for piece in pieces:
                connection.sendall(piece)
            if close:
                connection.shutdown(socket.SHUT_WR)
            while got := connection.recv(65536):
                said += got
        except OSError:  # the server may close it while we still send
            pass
        return said


MALFORMED = [
    b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500,  # TLS
    b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
    b"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.0\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nno colon\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n",
    b"GET " + b"/" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    GET + b"X: " + b"a" * 2_000_000 + b"\r\n\r\n",
    GET + b"".join(b"X-%d: y\r\n" % n for n in range(50_000)) + b"\r\n",
    HEAD + b"Content-Length: -1\r\n\r\n",
    HEAD + b"Content-Length: 1e3\r\n\r\n",
    HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
    HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
    HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",  # what smuggles requests
    HEAD + b"Transfer-Encoding: gzip\r\n\r\nxx",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"CONNECT evil.example:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /v1/models/%ED%A0%80%00%2e%2e%2f HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /%ff%fe?%ff=%00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
]


@pytest.mark.parametrize("raw", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_http(fuzzed: Running, raw: bytes) -> None:
    said = talk(fuzzed, raw, close=True)
    assert b" 500 " not in said.split(b"\r\n")[0]
    assert said[:9] in (b"", b"HTTP/1.1 ")


def test_a_body_that_never_comes_holds_nothing_up(fuzzed: Running) -> None:
    slow = [socket.create_connection(("127.0.0.1", fuzzed.port)) for _ in range(60)]
    for n, connection in enumerate(slow):
        connection.sendall([HEAD, HEAD + LENGTH, HEAD + LENGTH + HI[:20], b"G"][n % 4])
    fixed(fuzzed)
    assert fuzzed.idle()
    for connection in slow:
        connection.close()


def test_connections_closed_at_any_moment(fuzzed: Running) -> None:
    whole = HEAD + LENGTH + HI
    for at in range(0, len(whole) + 1, 17):
        with socket.create_connection(("127.0.0.1", fuzzed.port)) as connection:
            connection.sendall(whole[:at])
    talk(fuzzed, whole, close=True)  # half-closed: whether it is answered or not, its row is let go
    assert fuzzed.idle()


def test_requests_in_a_row_on_one_connection(fuzzed: Running) -> None:
    said = talk(
        fuzzed, HEAD + LENGTH + HI + GET + b"\r\n" + HEAD + b"Content-Length: 1\r\n\r\n{" + GET + LAST + b"\r\n"
    )
    assert re.findall(rb"HTTP/1.1 (\d+)", said) == [b"200", b"200", b"400", b"200"]


def test_a_body_that_trickles_in_is_read(fuzzed: Running) -> None:
    assert b" 200 " in talk(fuzzed, HEAD + LAST + LENGTH, *[HI[at : at + 5] for at in range(0, len(HI), 5)])
    assert b" 200 " in talk(fuzzed, HEAD + LAST + b"Expect: 100-continue\r\n" + LENGTH, HI).split(b"\r\n\r\n")[1]
