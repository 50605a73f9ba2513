"""Guards the server with what coding agents sent it (tests/fixtures/clients, recorded by tools/record_clients.py).

Their own prompts and tools, ten thousand tokens long, over a real socket to a random model that decodes a few tokens.
"""

from __future__ import annotations

import copy
import gzip
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import selfdraft
from selfdraft.llm import LLM
from selfdraft.prompts import NEAR, Prompted
from selfdraft.stream import Answer
from tests.agents.agents import AGENTS, NOTES, PINNED, PROMPT
from tests.agents.scripted import FIRST, quick_checkpoint

from .conftest import Running, running, within

FOLDER = Path(__file__).parents[1] / "fixtures" / "clients"
RECORDED = {name: json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes())) for name in AGENTS}
REQUESTS = [(name, number) for name, recorded in RECORDED.items() for number in range(len(recorded["requests"]))]
CLAUDE = RECORDED["claude-code"]["requests"]
LIMIT = {"/v1/messages": "max_tokens", "/v1/responses": "max_output_tokens", "/v1/chat/completions": "max_tokens"}
FEW = 4
CHUNK = 4096

Request = dict[str, Any]
Event = dict[str, Any]

names = pytest.mark.parametrize("name", AGENTS)


def recorded(name: str, number: int) -> Request:
    """A request as it was sent, but for the length of its answer."""
    request: Request = copy.deepcopy(RECORDED[name]["requests"][number])
    request["body"][LIMIT[path_of(request)]] = FEW
    request["body"] |= {"ignore_eos": True, "temperature": 0}
    return request


def path_of(request: Request) -> str:
    return str(request["path"]).split("?")[0]


def send(client: httpx.Client, request: Request) -> httpx.Response:
    return client.request(request["method"], request["path"], headers=request["headers"], json=request["body"])


def events_of(response: httpx.Response) -> list[Event]:
    """The events of a stream; an event's name, where there is one, is its type."""
    found = []
    for block in response.text.strip().split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        if not lines:
            continue
        data = lines[-1].removeprefix("data: ")
        found.append({"type": "[DONE]"} if data == "[DONE]" else json.loads(data))
        assert lines[:-1] in ([], [f"event: {found[-1].get('type')}"])
    return found


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    """What the model was given to read, request by request."""
    return []


@pytest.fixture(scope="module")
def agents_server(tmp_path_factory: pytest.TempPathFactory, prompts: list[str]) -> Iterator[Running]:
    """A server for long prompts that notes what it renders."""
    folder = quick_checkpoint(tmp_path_factory.mktemp("models") / "quick")

    def load() -> LLM:
        llm = selfdraft.load(str(folder))
        answer: Callable[..., Answer] = llm.answer

        def noted(prompted: Prompted, *given: Any, **options: Any) -> Answer:
            prompts.append(llm.tokenizer.decode(prompted.tokens, skip_special=False))
            return answer(prompted, *given, **options)

        llm.answer = noted  # type: ignore[method-assign]
        return llm

    with running(load) as server:
        yield server


@pytest.fixture
def client(agents_server: Running) -> Iterator[httpx.Client]:
    with agents_server.client() as client:
        yield client
    assert agents_server.idle()


def test_the_recordings_are_of_the_pinned_versions() -> None:
    assert {recorded["agent"]: recorded["version"] for recorded in RECORDED.values()} == PINNED


@pytest.mark.parametrize(("name", "number"), REQUESTS)
def test_each_request_is_answered_as_its_api_has_it(
    name: str, number: int, client: httpx.Client, prompts: list[str]
) -> None:
    request = recorded(name, number)
    response = send(client, request)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    CHECKS[path_of(request)](events_of(response))
    prompt = prompts[-1]
    assert PROMPT in prompt
    assert "x-anthropic-billing-header" not in prompt
    for tool in tool_names(request["body"].get("tools", [])):
        assert f'"name": "{tool}"' in prompt
    _, _, turns = prompt.partition("<|im_end|>")  # the system prompt shows what a call looks like
    assert turns.count("<tool_call>") == turns.count("<tool_response>")
    assert (FIRST in turns) == ("<tool_response>" in turns)
    if number == len(RECORDED[name]["requests"]) - 1:
        assert NOTES.strip() in turns


def tool_names(tools: list[Any]) -> list[str]:
    """The names under which a request's own tools can be called, those aside that load later."""
    found = []
    for tool in tools:
        if tool.get("type") == "namespace":
            found += [f"{tool['name']}__{inner['name']}" for inner in tool["tools"]]
        elif tool.get("type", "function") == "function" and not tool.get("defer_loading"):
            found.append(tool["name"] if "name" in tool else tool["function"]["name"])
    return found


def check_messages(events: list[Event]) -> None:
    """Anthropic's order: a message begins, its blocks open and close one after the other, it ends."""
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert set(kinds[1:-2]) <= {"content_block_start", "content_block_delta", "content_block_stop"}
    blocks = [event for event in events if event["type"].startswith("content_block")]
    for index in range(max(event["index"] for event in blocks) + 1):
        of_one = [event["type"] for event in blocks if event["index"] == index]
        assert of_one[0] == "content_block_start"
        assert of_one[-1] == "content_block_stop"
    assert [event["index"] for event in blocks] == sorted(event["index"] for event in blocks)
    start, end = events[0]["message"]["usage"], events[-2]["usage"]
    assert total_input(start) == total_input(end) > 5000
    assert end["output_tokens"] == FEW
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"


def total_input(usage: dict[str, int]) -> int:
    """Anthropic counts what a cache held apart."""
    return usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]


def check_responses(events: list[Event]) -> None:
    """The Responses API's order: numbered events, items added and done, the whole response last."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.incomplete"
    added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    response = events[-1]["response"]
    assert added == [item["id"] for item in done]
    assert response["output"] == done != []
    assert response["usage"]["input_tokens"] > 5000
    assert response["usage"]["output_tokens"] == FEW
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def check_chat(events: list[Event]) -> None:
    """Chat's order: a role, text, one reason to finish, the usage, the end mark."""
    *chunks, usage, end = events
    assert end == {"type": "[DONE]"}
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == FEW
    assert usage["usage"]["prompt_tokens"] > 500
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[0]["delta"]["role"] == "assistant"
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]


CHECKS = {"/v1/messages": check_messages, "/v1/responses": check_responses, "/v1/chat/completions": check_chat}


@names
def test_a_client_that_leaves_in_prefill_leaves_nothing_behind(name: str, agents_server: Running) -> None:
    request = recorded(name, 1)
    request["body"][LIMIT[path_of(request)]] = 4000  # far longer than the test waits
    body = json.dumps(request["body"]).encode()
    headers = request["headers"] | {"host": "localhost", "content-length": str(len(body))}
    lines = [f"POST {request['path']} HTTP/1.1", *(f"{key}: {value}" for key, value in headers.items())]
    with socket.create_connection(("127.0.0.1", agents_server.port)) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        assert within(20, lambda: agents_server.service.figures["running"] == 1)
    assert agents_server.idle(5)


def test_the_changing_billing_line_does_not_change_the_prompt(client: httpx.Client, prompts: list[str]) -> None:
    first, second = recorded("claude-code", 0), recorded("claude-code", 0)
    line = second["body"]["system"][0]["text"]
    assert line.startswith("x-anthropic-billing-header:")
    second["body"]["system"][0]["text"] = "x-anthropic-billing-header: cc_version=9.9.9.fff; cch=0a1b2;"
    assert send(client, first).status_code == send(client, second).status_code == 200
    assert prompts[-1] == prompts[-2]


def test_what_claude_code_asks_beside_its_turns(client: httpx.Client) -> None:
    request = recorded("claude-code", 2)
    headers, body = request["headers"], request["body"]
    assert client.head("/", headers=headers).status_code == 200
    assert client.get("/v1/models?limit=1000", headers=headers).json()["data"][0]["max_model_len"] == 32768
    counted = {key: body[key] for key in ("messages", "model", "system", "thinking", "tools")}
    count = client.post("/v1/messages/count_tokens?beta=true", headers=headers, json=counted)
    title = body | {"model": "claude-haiku-4-5-20251001", "stream": False}
    answer = client.post("/v1/messages?beta=true", headers=headers, json=title).json()
    assert count.json() == {"input_tokens": total_input(answer["usage"])}
    assert answer["model"] == "nano"
    assert client.post("/api/event_logging/batch", headers=headers, json={"events": []}).status_code == 404


@names
def test_a_turn_forwards_what_is_new_to_it(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The turns of a conversation with tools, one after the other: all but what is new was forwarded before, up to the
    distance of one boundary. Claude Code's second turn declares a further tool, which stands in the middle of a prompt:
    there boundaries are a chunk apart."""
    folder = quick_checkpoint(tmp_path_factory.mktemp("models") / "quick")
    asked: list[list[int]] = []
    forwarded: list[int] = []

    def load() -> LLM:
        llm = selfdraft.load(str(folder))
        answer: Callable[..., Answer] = llm.answer

        def noted(prompted: Prompted, *given: Any, **options: Any) -> Answer:
            asked.append(list(prompted.tokens))
            return answer(prompted, *given, **options)

        llm.answer = noted  # type: ignore[method-assign]
        return llm

    with running(load) as server, server.client() as client:
        for number in range(len(RECORDED[name]["requests"])):
            assert send(client, recorded(name, number)).status_code == 200
            assert server.idle()
            figures = server.service.llm.sessions.figures if server.service.llm.sessions else None
            assert figures is not None
            forwarded.append(len(asked[-1]) - (figures.restored_tokens - sum(map(len, asked[:-1])) + sum(forwarded)))
    new = [
        len(tokens) - max((shared(tokens, before) for before in asked[:n]), default=0) for n, tokens in enumerate(asked)
    ]
    print(f"{name}: prompts {[len(tokens) for tokens in asked]}, new {new}, forwarded {forwarded}")
    assert forwarded[0] == len(asked[0])
    assert all(
        mine <= least + (CHUNK if least > CHUNK else NEAR) for mine, least in zip(forwarded[1:], new[1:], strict=True)
    )
    assert forwarded[-1] <= 160


def shared(a: list[int], b: list[int]) -> int:
    """Tokens that two prompts begin with alike."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
