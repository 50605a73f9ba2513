"""Guards several models in one server: the right one answers, loading holds nobody else up, memory comes back.

All over HTTP, with tiny checkpoints of different weights.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest

import selfdraft
from selfdraft.errors import SelfdraftError
from selfdraft.llm import LLM
from selfdraft.memory import Holdings
from selfdraft.opening import weight_bytes
from selfdraft.params import SamplingParams
from selfdraft.server.registry import Given
from selfdraft.server.served import ServedModel
from selfdraft.settings import Settings, load_settings
from tests.support.checkpoints import add_text_side
from tests.support.nano import nano_model, write_checkpoint

from .conftest import VOCABULARY, running, within
from .steps import Steps

NAMES = ("ada", "bob", "cyd")
MIB = 2**20


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints that differ in their weights alone."""
    root = tmp_path_factory.mktemp("several")
    made = {}
    for seed, name in enumerate(NAMES):
        model = nano_model(seed, vocab_size=VOCABULARY, sharpness=3.0)
        made[name] = add_text_side(write_checkpoint(root / name, model, config={"vocab_size": VOCABULARY}))
    return made


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> dict[str, str]:
    """What each model says by itself."""
    params = SamplingParams(max_tokens=12, temperature=0)
    return {name: selfdraft.load(str(folder)).generate("Hello", params).text for name, folder in folders.items()}


class Loads:
    """Models whose loading can be held back, or broken."""

    def __init__(self, folders: dict[str, Path], settings: Settings | None = None) -> None:
        self.folders = folders
        self.settings = settings or load_settings()
        self.begun: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        self.broken: set[str] = set()
        self.around: Callable[[Callable[[], LLM]], Callable[[], LLM]] = lambda load: load

    def hold(self, name: str) -> threading.Event:
        self.gates[name] = threading.Event()
        return self.gates[name]

    def models(self, *names: str) -> list[ServedModel]:
        return [self._model(name) for name in names]

    def _model(self, name: str) -> ServedModel:
        folder = self.folders[name]
        return ServedModel(
            Given(name, str(folder)),
            lambda: weight_bytes(folder, self.settings),
            lambda beside: self._load(name, beside),
        )

    def _load(self, name: str, beside: Callable[[], Holdings]) -> LLM:
        self.begun.append(name)
        if name in self.gates:
            assert self.gates[name].wait(30)
        if name in self.broken:
            raise SelfdraftError("/somewhere is made of cheese")
        return self.around(lambda: selfdraft.load(str(self.folders[name]), settings=self.settings, beside=beside))()


@pytest.fixture
def loads(folders: dict[str, Path]) -> Loads:
    return Loads(folders)


def asked(model: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hello"}]
    return {"model": model, "messages": messages, "max_tokens": 12, "temperature": 0, **more}


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def chat(client: httpx.Client, model: str, **more: Any) -> str:
    return text(client.post("/v1/chat/completions", json=asked(model, **more)))


def states(client: httpx.Client) -> dict[str, str]:
    return {entry["id"]: entry["state"] for entry in client.get("/v1/models").json()["data"]}


def streamed(lines: Iterator[str]) -> str:
    """The text of a stream's chunks, from where it is read."""
    found = ""
    for line in lines:
        if line.startswith("data: {"):
            for choice in json.loads(line[6:]).get("choices", ()):
                found += choice["delta"].get("content") or ""
    return found


def test_each_model_answers_in_its_own_words_and_is_loaded_when_it_is_asked_for(
    loads: Loads, alone: dict[str, str]
) -> None:
    assert len(set(alone.values())) == 3
    with running(*loads.models(*NAMES), alias=("fast=cyd", "main")) as server, server.client() as client:
        assert loads.begun == ["ada"]
        assert states(client) == dict.fromkeys(NAMES, "unloaded") | {
            "ada": "loaded",
            "fast": "unloaded",
            "main": "loaded",
        }
        (unloaded,) = [entry for entry in client.get("/v1/models").json()["data"] if entry["id"] == "bob"]
        assert "max_model_len" not in unloaded
        for name in ("bob", "ada", "bob"):
            assert chat(client, name) == alone[name]
        assert chat(client, "default") == chat(client, "main") == alone["ada"]
        response = client.post("/v1/chat/completions", json=asked("fast"))
        assert (text(response), response.json()["model"]) == (alone["cyd"], "fast")
        assert loads.begun == ["ada", "bob", "cyd"]
        assert client.get("/v1/models/bob").json()["max_model_len"] == 4096
        assert client.get("/health").json()["models"] == dict.fromkeys(NAMES, "loaded")


def test_names_are_taken_strictly_where_there_are_several(loads: Loads, folders: dict[str, Path]) -> None:
    with running(*loads.models("ada", "bob")) as server, server.client() as client:
        for name in ("claude-opus", str(folders["bob"]), str(folders["cyd"]), "../bob"):
            refused = client.post("/v1/chat/completions", json=asked(name))
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert loads.begun == ["ada"]


def test_a_bad_request_loads_nothing(loads: Loads) -> None:
    with running(*loads.models("ada", "bob")) as server, server.client() as client:
        for wrong in ({"temperature": -1}, {"messages": []}, {"keep_alive": "soon"}, {"keep_alive": "1e300"}):
            refused = client.post("/v1/chat/completions", json=asked("bob", **wrong))
            assert refused.status_code == 400, wrong
        assert "keep_alive" in refused.json()["error"]["message"]
        assert loads.begun == ["ada"]


def test_other_paths_take_the_model_that_they_name(loads: Loads, alone: dict[str, str]) -> None:
    with running(*loads.models("ada", "bob"), max_loaded_models=1) as server, server.client() as client:
        body = {"model": "bob", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "temperature": 0}
        answer = client.post("/v1/messages", json=body).json()
        assert "".join(part.get("text", "") for part in answer["content"]) == alone["bob"]
        assert states(client) == {"ada": "unloaded", "bob": "loaded"}
        assert client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"] > 0
        assert client.get("/tokenizer_info", params={"model": "bob"}).json()["chat_template"]
        assert states(client) == {"ada": "unloaded", "bob": "loaded"}
        tokens = client.post("/tokenize", json={"model": "ada", "prompt": "Once"}).json()["tokens"]
        assert states(client) == {"ada": "loaded", "bob": "unloaded"}
        assert client.post("/detokenize", json={"model": "ada", "tokens": tokens}).json() == {"prompt": "Once"}
        assert client.get("/tokenizer_info", params={"model": "cyd"}).status_code == 404


def test_while_one_is_loaded_the_others_answer_and_streams_are_kept_alive(loads: Loads, alone: dict[str, str]) -> None:
    gate = loads.hold("bob")
    with running(*loads.models("ada", "bob"), keepalive=0.05) as server, server.client() as client:
        with (
            server.client() as other,
            other.stream("POST", "/v1/chat/completions", json=asked("bob", stream=True)) as s,
        ):
            lines = s.iter_lines()
            assert [next(lines) for _ in range(4)] == [": keep-alive", ""] * 2
            assert states(client)["bob"] == "loading"
            assert client.get("/health").json() | {"status": "ok", "waiting": 1} == client.get("/health").json()
            assert chat(client, "ada") == alone["ada"]
            gate.set()
            assert streamed(lines) == alone["bob"]
        assert server.idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_its_model_is_loaded_waits_no_more(loads: Loads, stream: bool) -> None:
    gate = loads.hold("bob")
    with running(*loads.models("ada", "bob"), keepalive=0.05) as server, server.client() as client:
        body = asked("bob", stream=stream, max_tokens=3000)
        if stream:
            with server.client() as leaving, leaving.stream("POST", "/v1/chat/completions", json=body) as response:
                lines = response.iter_lines()
                assert next(lines) == ": keep-alive"
                assert server.models.pool.waiting == 1
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=0.5)
        assert within(20, lambda: server.models.pool.waiting == 0)
        gate.set()
        assert within(20, lambda: states(client)["bob"] == "loaded")
        assert server.idle(5)  # 3000 tokens take longer
        assert 'selfdraft_answers_total{finish_reason="cancelled",model_name="bob"}' not in client.get("/metrics").text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"])
def test_a_load_that_fails_says_so_without_the_reason_and_is_tried_again(
    loads: Loads, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With a status where none was sent yet, else in the stream; the reason, which may name folders, is logged."""
    loads.broken.add("bob")
    content = {"input": "Hello"} if "responses" in path else {"prompt": "Hello"} if "v1/comp" in path else {}
    body = asked("bob", **content) if "responses" not in path else {"model": "bob", **content}
    with running(*loads.models("ada", "bob"), keepalive=0.05) as server, server.client() as client:
        refused = client.post(path, json=body)
        assert refused.status_code == 500
        assert "'bob' could not be loaded; the server's log says why" in refused.text
        gate = loads.hold("bob")
        with client.stream("POST", path, json={**body, "stream": True}) as response:
            lines = response.iter_lines()
            assert next(lines) == ": keep-alive"
            gate.set()
            rest = "\n".join(lines)
        assert "could not be loaded" in rest
        assert "cheese" not in refused.text + rest
        assert "cheese" in caplog.text
        assert states(client) == {"ada": "loaded", "bob": "unloaded"}
        assert 'selfdraft_model_failures_total{model_name="bob"} 2.0' in client.get("/metrics").text
        loads.broken.clear()
        assert client.post(path, json=body).status_code == 200


def test_answers_that_run_keep_their_model_and_others_wait_for_it(loads: Loads, alone: dict[str, str]) -> None:
    steps = Steps()
    loads.around = lambda load: steps.hold(load) if loads.begun[-1] == "ada" else load
    with (
        running(*loads.models("ada", "bob"), max_loaded_models=1, keepalive=0.05) as server,
        server.client() as client,
        steps.running_at_end(),
    ):
        first_body, second_body = (asked(name, stream=True) for name in ("ada", "bob"))
        with (
            client.stream("POST", "/v1/chat/completions", json=first_body) as first,
            server.client() as other,
            other.stream("POST", "/v1/chat/completions", json=second_body) as second,
        ):
            waiting = second.iter_lines()
            assert next(waiting) == ": keep-alive"
            assert loads.begun == ["ada"]
            steps.run()
            assert streamed(first.iter_lines()) == alone["ada"]
            first.close()
            assert streamed(waiting) == alone["bob"]
        assert states(client) == {"ada": "unloaded", "bob": "loaded"}


def test_idle_models_are_unloaded_and_a_request_says_how_long_its_one_stays(loads: Loads) -> None:
    with running(*loads.models(*NAMES), idle_ttl="0.3s") as server, server.client() as client:
        chat(client, "bob", keep_alive=-1)
        chat(client, "cyd", keep_alive="0s")
        assert within(5, lambda: states(client)["cyd"] == "unloaded")
        assert within(5, lambda: states(client)["ada"] == "unloaded")
        assert states(client)["bob"] == "loaded"
        chat(client, "bob", keep_alive="1h")
        time.sleep(0.6)
        assert states(client)["bob"] == "loaded"
        chat(client, "bob")
        assert within(5, lambda: states(client)["bob"] == "unloaded")
        assert client.get("/health").json()["status"] == "ok"
        assert chat(client, "ada")


def test_an_unloaded_model_gives_its_memory_back(loads: Loads) -> None:
    """Down to the last few bytes, also after answers with grammars, drafts and warm prefixes."""

    def held() -> int:
        gc.collect()
        return mx.get_active_memory()

    def use(client: httpx.Client) -> None:
        chat(client, "bob", depth=2, response_format={"type": "json_object"}, max_tokens=20)
        chat(client, "bob", depth=0, keep_alive=0)
        assert within(10, lambda: states(client)["bob"] == "unloaded")

    with running(*loads.models("ada", "bob")) as server, server.client() as client:
        chat(client, "ada")
        use(client)  # what is made once for all is there now
        before = held()
        chat(client, "bob")
        assert held() > before + 3 * MIB
        use(client)
        assert held() <= before + 64 * 1024
        assert mx.get_cache_memory() == 0
        weights = 'selfdraft_memory_bytes{kind="weights"}'
        assert f"{weights} 0.0" not in client.get("/metrics").text
        chat(client, "ada", keep_alive=0)
        assert within(10, lambda: states(client)["ada"] == "unloaded")
        assert f"{weights} 0.0" in client.get("/metrics").text


def test_warm_prefixes_of_a_model_that_leaves_go_on_when_it_is_back(folders: dict[str, Path], tmp_path: Path) -> None:
    """Also when it leaves before its files are known by their digest; and both models write to the one folder."""
    loads = Loads(folders, load_settings(ssd_session_cache="on", ssd_session_cache_dir=tmp_path / "warm"))
    message = [{"role": "user", "content": "one two three four five " * 40}]

    def cached(client: httpx.Client, model: str) -> int:
        body = {**asked(model), "messages": message, "keep_alive": 0}
        usage = client.post("/v1/chat/completions", json=body).json()["usage"]
        assert within(20, lambda: states(client)[model] == "unloaded")
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    with running(*loads.models("ada", "bob"), max_loaded_models=2) as server, server.client() as client:
        for model in ("ada", "bob"):
            assert cached(client, model) == 0
        for model in ("ada", "bob"):
            assert cached(client, model) > 100
        chat(client, "ada")
        chat(client, "bob")
        text = client.get("/metrics").text
        assert "selfdraft_session_disk_writing 1.0" in text
        assert 'selfdraft_session_cache_hits_total{model_name="bob"}' in text


def test_what_does_not_fit_in_the_limit_is_refused_and_idle_ones_give_way(folders: dict[str, Path]) -> None:
    weights = weight_bytes(folders["ada"], load_settings())
    limit = int(weights * 2.1)  # a second one needs an eighth more
    loads = Loads(folders, load_settings(memory_limit=limit))
    with running(*loads.models(*NAMES), memory_limit=limit) as server, server.client() as client:
        assert chat(client, "bob")
        assert states(client) == {"ada": "unloaded", "bob": "loaded", "cyd": "unloaded"}
        assert server.models.pool.held() <= limit
    limit = int(weights * 1.05)
    with running(*loads.models("ada", "bob"), memory_limit=limit, lazy=True) as server, server.client() as client:
        refused = client.post("/v1/chat/completions", json=asked("bob"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "insufficient_memory")
        assert "raise memory_limit" in refused.json()["error"]["message"]


def test_rows_of_all_models_share_the_limit(folders: dict[str, Path]) -> None:
    """An answer that fits alone waits for the rows of another model; it is not refused, and not let in beside them."""
    weights = weight_bytes(folders["ada"], load_settings())
    limit = int(2.3 * weights) + 3 * MIB
    loads = Loads(folders, load_settings(memory_limit=limit, session_cache_max_bytes=0))
    steps = Steps()
    loads.around = lambda load: steps.hold(load) if loads.begun[-1] == "ada" else load
    with (
        running(*loads.models("ada", "bob"), memory_limit=limit) as server,
        server.client() as client,
        steps.running_at_end(),
    ):
        chat(client, "bob", max_tokens=4)
        bob = server.models.loaded("bob")
        assert bob is not None
        long = 4000  # tokens: one such answer fits beside both models, and two do not
        first_body, second_body = (asked(name, max_tokens=long, stream=True) for name in ("ada", "bob"))
        with (
            client.stream("POST", "/v1/chat/completions", json=first_body) as first,
            server.client() as other,
        ):
            ada = server.service
            assert within(10, lambda: ada.figures["running"] == 1)
            with other.stream("POST", "/v1/chat/completions", json=second_body) as second:
                assert second.status_code == 200
                assert within(10, lambda: bob.figures == {"running": 0, "waiting": 1})
                time.sleep(0.2)
                assert bob.figures == {"running": 0, "waiting": 1}
                assert server.models.memory_figures["promised_to_rows"] + 2 * weights <= limit
                first.close()
                steps.run()
                assert within(10, lambda: bob.figures == {"running": 1, "waiting": 0})


def test_two_models_decode_at_once_and_take_turns(loads: Loads, alone: dict[str, str]) -> None:
    """Neither waits for the other's answers to end, and each says what it says alone."""
    with running(*loads.models("ada", "bob")) as server, server.client() as client:
        chat(client, "bob")
        order: list[str] = []

        def read(name: str) -> str:
            with (
                server.client() as mine,
                mine.stream(
                    "POST", "/v1/chat/completions", json=asked(name, stream=True, max_tokens=100, ignore_eos=True)
                ) as response,
            ):
                found = ""
                for line in response.iter_lines():
                    order.append(name)
                    found += streamed(iter([line]))
            return found

        both = [threading.Thread(target=read, args=(name,)) for name in ("ada", "bob")]
        for each in both:
            each.start()
        for each in both:
            each.join(60)
        middle = order[len(order) // 4 : -len(order) // 4]
        assert {"ada", "bob"} == set(middle)
        assert chat(client, "ada") == alone["ada"]


@pytest.mark.parametrize("most", [1, 2])
def test_under_load_every_answer_is_of_the_model_that_was_asked(loads: Loads, alone: dict[str, str], most: int) -> None:
    """Requests at random for three models of which one or two fit, some given up, some kept for no time."""
    chance = random.Random(most)

    async def one(client: httpx.AsyncClient) -> None:
        name = chance.choice(NAMES)
        body = asked(name, keep_alive=chance.choice([None, 0, "1m"]), depth=chance.choice([0, 2, "auto"]))
        await asyncio.sleep(chance.random() * 3)
        if chance.random() < 0.2:
            with suppress(httpx.TimeoutException):
                await client.post("/v1/chat/completions", json=body, timeout=0.05)
            return
        assert text(await client.post("/v1/chat/completions", json=body)) == alone[name]

    async def crowd() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=120, trust_env=False) as client:
            await asyncio.gather(*(one(client) for _ in range(40)))

    with running(*loads.models(*NAMES), max_loaded_models=most) as server:
        asyncio.run(crowd())
        assert server.idle()
        with server.client() as client:
            assert list(states(client).values()).count("loaded") <= most


def test_the_end_tells_those_who_wait_for_a_model(loads: Loads) -> None:
    gate = loads.hold("bob")
    told: list[httpx.Response] = []
    with running(*loads.models("ada", "bob"), drain=5) as server:
        waiting = threading.Thread(
            target=lambda: told.append(httpx.post(f"{server.url}/v1/chat/completions", json=asked("bob"), timeout=30))
        )
        waiting.start()
        assert within(10, lambda: server.models.pool.waiting == 1)
        server.stop()
        waiting.join(10)
        gate.set()
    assert told[0].status_code == 503
    assert "shutting down" in told[0].text


def test_a_lazy_server_is_well_without_a_model(loads: Loads, alone: dict[str, str]) -> None:
    with running(*loads.models("ada"), lazy=True) as server, server.client() as client:
        health = client.get("/health")
        assert (health.status_code, health.json()["models"]) == (200, {"ada": "unloaded"})
        assert loads.begun == []
        assert chat(client, "claude-opus") == alone["ada"]  # of one model any name will do


def test_figures_are_told_by_model(loads: Loads) -> None:
    with running(*loads.models("ada", "bob"), max_loaded_models=1) as server, server.client() as client:
        chat(client, "bob", max_tokens=5, ignore_eos=True)
        chat(client, "ada", max_tokens=7, ignore_eos=True)
        lines = client.get("/metrics").text.splitlines()
        for line in (
            'selfdraft_generation_tokens_total{model_name="bob"} 5.0',
            'selfdraft_generation_tokens_total{model_name="ada"} 7.0',
            'selfdraft_model_loads_total{model_name="ada"} 2.0',
            'selfdraft_model_unloads_total{model_name="bob"} 1.0',
            'selfdraft_model_loaded{model_name="ada"} 1.0',
            'selfdraft_model_loaded{model_name="bob"} 0.0',
            'selfdraft_num_requests_running{model_name="bob"} 0.0',
        ):
            assert line in lines, line


def test_the_pool_of_a_server_is_bounded(loads: Loads) -> None:
    gate = loads.hold("bob")
    with running(*loads.models("ada", "bob"), rows=1, queue=0) as server, server.client() as client:
        waiting = threading.Thread(
            target=lambda: httpx.post(f"{server.url}/v1/chat/completions", json=asked("bob"), timeout=30)
        )
        waiting.start()
        assert within(10, lambda: server.models.pool.waiting == 1)
        refused = client.post("/v1/chat/completions", json=asked("bob"))
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        gate.set()
        waiting.join(30)
