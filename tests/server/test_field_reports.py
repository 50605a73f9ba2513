"""What users of other engines reported must be impossible here: a test each, through the server, by report number.

1 tools turn streaming off; 2 greedy text hangs on drafting; 3 no acceptance above temperature 0; 4 penalties, grammars,
budgets dropped; 5 text behind a stop; 6 late requests wait, a cancel leaves drafting off; 7 rows disturb each other;
9 a head that is not there; 11 memory refused late, or not given back; 15 health waits for the engine; 16 the reply
limit is the context. The other numbers belong to sessions, engine and forge.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import psutil
import pytest

import selfdraft
from selfdraft import budget
from selfdraft.cli.server_client import served_model
from selfdraft.llm import LLM
from tests.support.checkpoints import add_text_side
from tests.support.nano import nano_model, write_checkpoint

from .conftest import VOCABULARY, Running, running, within
from .steps import Steps, scripted
from .test_serve_command import home, serving

__all__ = ["home"]

HELLO = [{"role": "user", "content": "Hello"}]
STORY = [{"role": "user", "content": "Tell me a story about a little dog."}]


def chat(client: httpx.Client, **given: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": HELLO, "max_tokens": 12, "temperature": 0, **given}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def said(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer, as they come."""
    with client.stream("POST", path, json={"model": "m", "stream": True, **body}) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


@pytest.fixture(scope="module")
def reference() -> Iterator[Running]:
    with running(lambda: selfdraft.load("reference")) as server:
        yield server


# 1: Tools in the request turned streaming off; or arguments also appeared in `content`.

BEFORE = "Let me look that up for you, it takes only a moment."
TOWN = "a town by the sea, " * 12
CALLING = (
    f"{BEFORE}\n\n<tool_call>\n<function=weather>\n<parameter=town>\n{TOWN}\n</parameter>\n</function>\n</tool_call>"
)
PARAMETERS = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
FUNCTION = {"name": "weather", "description": "The weather", "parameters": PARAMETERS}
TOOLS = {
    "/v1/chat/completions": [{"type": "function", "function": FUNCTION}],
    "/v1/responses": [{"type": "function", **FUNCTION}],
    "/v1/messages": [{"name": "weather", "input_schema": PARAMETERS}],
}


def channels(event: dict[str, Any]) -> tuple[str, str]:
    """What an event adds to the visible text, and to a call's arguments, in any dialect."""
    if event.get("object") == "chat.completion.chunk":
        delta = event["choices"][0]["delta"]
        calls = delta.get("tool_calls") or [{}]
        return delta.get("content") or "", calls[0].get("function", {}).get("arguments", "")
    kind, delta = event["type"], event.get("delta")
    if kind.startswith("response."):
        return delta if kind.endswith("text.delta") else "", delta if kind.endswith("arguments.delta") else ""
    delta = delta or {}
    return delta.get("text", ""), delta.get("partial_json", "")


@pytest.mark.parametrize("path", TOOLS)
def test_report_1_tools_stream_and_each_byte_has_one_channel(path: str, load_nano: Callable[[], LLM]) -> None:
    asked = "input" if path == "/v1/responses" else "messages"
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    steps = Steps()
    with (
        running(steps.hold(scripted(load_nano, CALLING))) as server,
        server.client() as client,
        steps.running_at_end(),
    ):
        steps.allow(6)  # the prompt, and a few cycles: not the whole answer
        stream = events(client, path, {asked: HELLO, "tools": TOOLS[path], limit: 200, "depth": 1, "temperature": 0})
        texts, arguments = [], []
        for event in stream:
            text, piece = channels(event)
            if text and not texts:
                assert steps.taken <= 6  # text came while the answer was being written
                steps.allow(20)  # beyond the opening of the call, and not to its end
            if piece and not arguments:
                assert steps.taken <= 26  # and so did arguments
                assert server.service.figures["running"] == 1
                steps.run()
            texts += [text] if text else []
            arguments += [piece] if piece else []
        assert "".join(texts).strip() == BEFORE
        assert json.loads("".join(arguments))["town"].strip() == TOWN.strip()
        assert len(texts) > 3
        assert len(arguments) > 3


# 2: Greedy output differs with MTP on; temperature-0 runs differ from each other.


def test_report_2_greedy_text_is_the_same_with_drafting_and_without(reference: Running) -> None:
    with reference.client() as client, ThreadPoolExecutor(3) as pool:
        plain = chat(client, messages=STORY, max_tokens=16, depth=0)
        drafted = chat(client, messages=STORY, max_tokens=16, depth=3)
        again = list(pool.map(lambda depth: chat(client, messages=STORY, max_tokens=16, depth=depth), (3, 2, "auto")))
    assert sum(drafted["timings"]["drafts_accepted"]) > 0
    for answer in (drafted, *again):
        assert answer["choices"] == plain["choices"]
        assert answer["usage"] == plain["usage"]


# 3: 0% acceptance above temperature 0.


def test_report_3_drafts_are_accepted_above_temperature_0(reference: Running) -> None:
    with reference.client() as client:
        before = metric(client, "spec_decode_num_accepted_tokens_total")
        timings = chat(client, messages=STORY, max_tokens=40, depth=2, temperature=1.0, top_p=1.0, top_k=0)["timings"]
        assert timings["acceptance_per_position"][0] > 0.2
        assert metric(client, "spec_decode_num_accepted_tokens_total") - before == sum(timings["drafts_accepted"]) > 0


# 4: Penalties, grammars, thinking budgets silently dropped with MTP; stale token context in processors.


def test_report_4_penalties_hold_at_every_drafted_position(reference: Running) -> None:
    strong = {"presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.3, "logit_bias": {"5": -50}}
    with reference.client() as client:
        free = chat(client, messages=STORY, max_tokens=18, depth=0)
        plain = chat(client, messages=STORY, max_tokens=18, depth=0, **strong)
        drafted = chat(client, messages=STORY, max_tokens=18, depth=3, **strong)
    assert said(drafted) == said(plain) != said(free)
    assert sum(drafted["timings"]["drafts_accepted"]) > 0


def test_report_4_a_schema_holds_with_drafting_on(reference: Running) -> None:
    name = {"type": "string", "enum": ["Rex", "Luna", "Bella"]}
    schema = {"type": "object", "properties": {"name": name, "age": {"type": "integer"}}, "required": ["name"]}
    asked = {
        "messages": [{"role": "user", "content": "Give me a dog as JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "dog", "schema": schema}},
        "max_tokens": 40,
    }
    with reference.client() as client:
        plain, drafted = chat(client, depth=0, **asked), chat(client, depth=3, **asked)
    assert said(drafted) == said(plain)
    assert json.loads(said(drafted))["name"] in name["enum"]
    assert sum(drafted["timings"]["drafts_accepted"]) > 0


THOUGHT = "I wonder what to say to this person who only says hello and nothing else at all."


@pytest.fixture(scope="module")
def thinker(load_nano: Callable[[], LLM]) -> Iterator[Running]:
    """One that would think on, and whose head drafts beyond any budget."""
    with running(scripted(load_nano, THOUGHT)) as server:
        yield server


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("budget", [0, 1, 5, 6])
def test_report_4_a_thinking_budget_is_kept(depth: int, budget: int, thinker: Running) -> None:
    with thinker.client() as client:
        tokens = client.post("/tokenize", json={"prompt": THOUGHT}).json()["tokens"]
        thought = client.post("/detokenize", json={"tokens": tokens[:budget]}).json()["prompt"]
        answer = chat(client, max_tokens=30, depth=depth, enable_thinking=True, thinking_budget=budget)
        message = answer["choices"][0]["message"]
        assert message.get("reasoning_content", "").strip() == thought.strip()
        # It goes on where its script would be: behind the mark there is text, and it is content.
        assert message["content"]
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget
        if depth and budget > 4:
            assert sum(answer["timings"]["drafts_accepted"]) > 0


def test_report_4_a_thinking_budget_of_messages_is_kept(thinker: Running) -> None:
    with thinker.client() as client:
        body = {"model": "m", "messages": HELLO, "max_tokens": 30, "temperature": 0}
        thinking = {"type": "enabled", "budget_tokens": 4}
        bounded = client.post("/v1/messages", json={**body, "thinking": thinking}).json()["content"]
        free = client.post("/v1/messages", json={**body, "thinking": {**thinking, "budget_tokens": 29}}).json()
        assert [block["type"] for block in bounded] == ["thinking", "text"]
        assert len(bounded[0]["thinking"]) < len(THOUGHT) / 2
        assert free["content"][0]["thinking"].strip() == THOUGHT


# 5: EOS or a stop string inside an accepted run: text after it leaks, or `length` is reported.

RUN = "One two three HALT four five six"


@pytest.fixture(scope="module")
def runner(load_nano: Callable[[], LLM]) -> Iterator[Running]:
    with running(scripted(load_nano, RUN, behind=" and what nobody may see")) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("depth", [0, 3, 8])
def test_report_5_a_stop_inside_an_accepted_run_wins(depth: int, stream: bool, runner: Running) -> None:
    with runner.client() as client:

        def ask(**given: Any) -> tuple[str, str, int]:
            body = {"messages": HELLO, "max_tokens": 40, "temperature": 0, "depth": depth, **given}
            if not stream:
                answer = chat(client, **body)
                return said(answer), answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]
            found = list(events(client, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}))
            choices = [event["choices"][0] for event in found if event["choices"]]
            text = "".join(choice["delta"].get("content", "") for choice in choices)
            return text, choices[-1]["finish_reason"], found[-1]["usage"]["completion_tokens"]

        def length(text: str) -> int:
            return len(client.post("/tokenize", json={"prompt": text}).json()["tokens"])

        assert ask() == (RUN, "stop", length(RUN) + 1)  # and the end token
        assert ask(max_tokens=length(RUN) + 1) == (RUN, "stop", length(RUN) + 1)
        text, reason, used = ask(stop=["HALT"])
        assert (text, reason) == ("One two three ", "stop")
        assert length("One two three ") <= used <= length("One two three HALT")
        assert runner.idle()


# 6: A late request waits behind a decoding one; a burst or a cancel leaves MTP off; a disconnect wedges the engine.


def post(server: Running, body: dict[str, Any]) -> socket.socket:
    """Send a request and do not read its answer."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    raw = json.dumps({"model": "m", "temperature": 0, "ignore_eos": True, **body}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


def waiting(server: Running) -> Callable[[], bool]:
    return lambda: server.service.figures["waiting"] == 1


def test_report_6_a_late_request_is_admitted_at_the_next_cycle(load_nano: Callable[[], LLM]) -> None:
    steps = Steps()
    with running(steps.hold(load_nano)) as server, steps.running_at_end():
        first = post(server, {"messages": HELLO, "max_tokens": 3000, "depth": 2})
        steps.allow(8)
        assert within(30, lambda: steps.taken == 8)
        answered = threading.Event()

        def late() -> None:
            with server.client() as client:
                stream = events(client, "/v1/chat/completions", {"messages": HELLO, "max_tokens": 3, "temperature": 0})
                next(event for event in stream if event["choices"][0]["delta"].get("content"))
                answered.set()
                list(stream)

        reader = threading.Thread(target=late)
        reader.start()
        assert within(30, waiting(server))  # a step is in progress
        steps.allow(1)
        assert within(30, lambda: server.service.figures == {"running": 2, "waiting": 0})
        assert steps.taken == 9
        before = steps.taken
        while not answered.wait(0.3):  # its prompt is one chunk and a last token, in turn with cycles of the other
            steps.allow(1)
            assert steps.taken - before < 8
        steps.run()
        reader.join(30)
        first.close()
        assert server.idle()


@pytest.mark.parametrize("stream", [False, True])
def test_report_6_a_disconnect_in_prefill_frees_the_row(stream: bool, load_nano: Callable[[], LLM]) -> None:
    def load() -> LLM:
        llm = load_nano()
        llm.engine._prefill._chunk = 64
        return llm

    steps = Steps()
    with running(steps.hold(load)) as server, steps.running_at_end():
        prompt = [{"role": "user", "content": "word " * 1500}]
        connection = post(server, {"messages": prompt, "max_tokens": 9, "stream": stream})
        steps.allow(3)
        assert within(30, lambda: steps.taken == 3)
        connection.close()
        time.sleep(0.3)  # until the server has heard of it
        steps.allow(2)
        assert server.idle()
        assert steps.taken <= 5
        steps.run()
        with server.client() as client:
            assert chat(client, max_tokens=5, ignore_eos=True)["usage"]["completion_tokens"] == 5


def test_report_6_drafting_goes_on_after_a_burst_and_cancels(load_nano: Callable[[], LLM]) -> None:
    text = " ".join(f"word {n}" for n in range(40))
    with running(scripted(load_nano, text), rows=8) as server, server.client() as client:

        def drafted(depth: Any) -> float:
            timings = chat(client, max_tokens=60, depth=depth)["timings"]
            return float(timings["tokens_per_cycle"])

        before = drafted(4)
        left = [post(server, {"messages": HELLO, "max_tokens": 3000}) for _ in range(12)]
        assert within(30, lambda: sum(bool(row.emitted) for row in server.service.llm.engine.rows) == 8)
        kept = [post(server, {"messages": HELLO, "max_tokens": 30, "depth": depth}) for depth in (0, 2, 4)]
        for connection in left:
            connection.close()
        for connection in kept:
            assert b" 200 " in connection.recv(100)
            connection.close()
        assert server.idle(30)
        assert drafted(4) == before > 4
        assert drafted("auto") > 1


# 7: Concurrent rows corrupt each other (endless "!").


def test_report_7_sixteen_rows_equal_each_alone(load_nano: Callable[[], LLM]) -> None:
    asked = [
        {
            "messages": [{"role": "user", "content": f"Tell me about {'rain and ' * (n % 5)}{n}"}],
            "max_tokens": 6 + n % 5,
            "depth": [0, 1, 3, 8, "auto"][n % 5],
            "ignore_eos": True,
            **([{}, {"temperature": 1.0, "seed": n}, {"frequency_penalty": 1.0}][n % 3]),
        }
        for n in range(16)
    ]
    steps = Steps()
    steps.run()
    with running(steps.hold(load_nano)) as server, server.client() as client, steps.running_at_end():
        alone = [chat(client, **given)["choices"] for given in asked]
        steps._free = False
        with ThreadPoolExecutor(16) as pool:
            together = [pool.submit(chat, client, **given) for given in asked]
            assert within(30, lambda: sum(server.service.figures.values()) == 16)
            steps.run()
            assert [answer.result()["choices"] for answer in together] == alone
        assert len({json.dumps(choices) for choices in alone}) == 16


# 9: Config claims a head, tensors absent: traceback.


def test_report_9_a_head_that_is_not_there_is_one_line(tmp_path: Path, home: dict[str, str]) -> None:
    folder = tmp_path / "headless"
    model = nano_model(vocab_size=VOCABULARY, with_head=False)
    add_text_side(write_checkpoint(folder, model, config={"vocab_size": VOCABULARY}))
    log = tmp_path / "log"
    with serving(folder, home, "--log-file", str(log)) as (process, url), httpx.Client(base_url=url) as client:
        answer = chat(client, depth="auto")
        assert answer["timings"]["drafts_tried"] == []
        assert client.get("/v1/models").json()["data"][0]["max_depth"] == 0
        refused = client.post("/v1/chat/completions", json={"model": "m", "messages": HELLO, "depth": 2})
        assert refused.status_code == 400
        assert "0 only: no" in refused.json()["error"]["message"]
        process.terminate()
        assert process.stderr is not None
        printed = process.stderr.read() + log.read_text()
    assert "Traceback" not in printed
    assert len([line for line in printed.splitlines() if "plain decoding" in line]) == 1, printed


# 11: 507 after minutes of prefill; growth until restart.


def test_report_11_memory_is_refused_before_prefill(
    load_nano: Callable[[], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps()
    with running(steps.hold(load_nano)) as server, server.client() as client, steps.running_at_end():
        monkeypatch.setattr(budget, "free_memory", lambda: 1000)
        body = {"model": "m", "messages": HELLO, "max_tokens": 3000}
        for path in ("/v1/chat/completions", "/v1/messages"):
            refused = client.post(path, json=body)
            assert refused.status_code == 507
            message = refused.json()["error"]["message"]
            assert "3000 more need" in message
            assert "GiB are free now" in message
        assert steps.taken == 0
        assert server.idle()


def test_report_11_memory_is_given_back(server: Running) -> None:
    with server.client() as client:

        def load() -> tuple[int, int]:
            for n in range(50):
                chat(client, messages=[{"role": "user", "content": "word " * (n % 7 * 8)}], max_tokens=2, depth=n % 4)
            assert server.idle()
            mx.clear_cache()
            return mx.get_active_memory(), psutil.Process().memory_info().rss

        first, second = load(), load()
    assert second[0] <= first[0] + 2**20
    assert second[1] <= first[1] + 24 * 2**20


# 15: A busy server was killed as dead.


def test_report_15_health_never_waits_for_the_engine(load_nano: Callable[[], LLM]) -> None:
    steps = Steps()
    with running(steps.hold(load_nano)) as server, server.client() as client, steps.running_at_end():
        connection = post(server, {"messages": HELLO, "max_tokens": 9, "stream": True})
        assert within(30, lambda: server.service.figures["running"] == 1)  # in a step that does not end
        took = []
        for _ in range(10):
            begin = time.perf_counter()
            assert client.get("/health").json()["status"] == "ok"
            assert client.get("/metrics").status_code == 200
            took.append(time.perf_counter() - begin)
        assert min(took) < 0.1
        connection.close()


# 16: The advertised reply limit equalled the context window.


def test_report_16_the_reply_limit_is_a_part_of_the_context(load_nano: Callable[[], LLM]) -> None:
    def load() -> LLM:
        llm = load_nano()
        llm.limit_context(1024)
        return llm

    with running(scripted(load, "word " * 900)) as server, server.client() as client:
        (model,) = client.get("/v1/models").json()["data"]
        assert 0 < model["max_output_tokens"] <= model["max_model_len"] / 2
        assert model["max_output_tokens"] == served_model(server.url).output  # what `connect` writes
        body = {"model": "m", "messages": HELLO, "temperature": 0, "depth": 8}
        answer = client.post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == model["max_output_tokens"]  # what is told is what holds
        more = chat(client, max_tokens=model["max_output_tokens"] + 9, depth=8)
        assert more["usage"]["completion_tokens"] == model["max_output_tokens"] + 9  # and a client may ask for more
