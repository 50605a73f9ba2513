"""Guards /v1/embeddings and /v1/rerank: what they answer and refuse, and that their models come and go alone."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest

from selfdraft.errors import CheckpointError, InvalidRequest, ModelNotFound
from selfdraft.llm import LLM
from selfdraft.retrieval import Embedder, encoder, plan
from selfdraft.server.config import load_server_settings
from selfdraft.server.registry import Given
from selfdraft.server.retrieval import retrieval_of
from selfdraft.server.served import ServedModel, ServedModels
from tests.support.retrieval import FIXTURES, altered, finished, scores_of

from .conftest import Running, running, within

TEXTS = ["the old boat", "who built it", "the river carried the boat past the mill"]


def embeddings(count: int) -> dict[str, Any]:
    """Settings of a server with so many embedding models, which are different models."""
    return {"embedding_model": [f"e{index}={FIXTURES / 'bert'}" for index in range(count)]}


@pytest.fixture(scope="module")
def server(load_nano: Callable[[], LLM]) -> Iterator[Running]:
    rerankers = [f"{name}={FIXTURES / name}" for name in ("bert", "qwen3")]
    embedders = [f"vectors={FIXTURES / 'bert'}", f"same={FIXTURES / 'bert'}"]
    with running(load_nano, embedding_model=embedders, rerank_model=rerankers) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def expected() -> Any:
    embedder = Embedder(plan(FIXTURES / "bert"))
    return finished(embedder.embed(embedder.read(TEXTS)))


def vectors(body: dict[str, Any]) -> Any:
    assert [each["index"] for each in body["data"]] == list(range(len(body["data"])))
    return np.array([each["embedding"] for each in body["data"]])


def test_texts_become_vectors(client: httpx.Client, expected: Any) -> None:
    body = client.post("/v1/embeddings", json={"model": "vectors", "input": TEXTS, "user": "x", "new": 1}).json()
    assert body["object"] == "list"
    assert body["model"] == "vectors"
    assert body["usage"] == {"prompt_tokens": 20, "total_tokens": 20}
    assert np.abs(vectors(body) - expected).max() < 1e-6


def test_one_text_tokens_and_lists_of_tokens(client: httpx.Client, expected: Any) -> None:
    ids = [list(each.ids) for each in Embedder(plan(FIXTURES / "bert")).read(TEXTS)]
    for given, wanted in ((TEXTS[0], expected[:1]), (ids[0], expected[:1]), (ids, expected)):
        body = client.post("/v1/embeddings", json={"model": "vectors", "input": given}).json()
        assert np.abs(vectors(body) - wanted).max() < 1e-6


def test_base64_is_little_endian_fp32(client: httpx.Client, expected: Any) -> None:
    asked = {"model": "vectors", "input": TEXTS, "encoding_format": "base64", "dimensions": 8}
    data = client.post("/v1/embeddings", json=asked).json()["data"]
    found = np.array([np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in data])
    cut = expected[:, :8] / np.linalg.norm(expected[:, :8], axis=1, keepdims=True)
    assert np.abs(found - cut).max() < 1e-6


@pytest.mark.parametrize(
    ("given", "status", "param", "said"),
    [
        ({"input": []}, 400, "input", "must not be empty"),
        ({"input": [[]]}, 400, "input", "input[0] is empty"),
        ({"input": [1, "a"]}, 400, "input", "input"),
        ({"input": [True]}, 400, "input", "input"),
        ({"input": {"a": 1}}, 400, "input", "input"),
        ({}, 400, "input", "field required"),
        ({"input": "a", "dimensions": 33}, 400, "dimensions", "this model has 32"),
        ({"input": "a", "dimensions": 0}, 400, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format", "'float' or 'base64'"),
        ({"input": [99999999]}, 400, "input", "the model has no token 99999999"),
        ({"input": "boat " * 50}, 400, "input", "input[0] has 52 tokens, and this model reads 48"),
        ({"input": ["a"] * 2049}, 413, "input", "2049 texts; at most 2048"),
        ({"input": "a", "prompt_name": "query"}, 400, "prompt_name", "not one of this model's: none"),
        ({"input": "\ud800"}, 400, None, "the body is not JSON"),
    ],
)
def test_what_cannot_be_embedded(
    client: httpx.Client, given: dict[str, Any], status: int, param: str | None, said: str
) -> None:
    answer = client.post("/v1/embeddings", content=json.dumps({"model": "vectors", **given}))
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert said in error["message"]
    assert error["param"] == param


def test_a_long_text_is_cut_off_if_that_is_asked_for(client: httpx.Client) -> None:
    asked = {"model": "vectors", "input": "boat " * 50, "truncate": True}
    assert client.post("/v1/embeddings", json=asked).json()["usage"]["prompt_tokens"] == 48
    error = client.post("/v1/embeddings", json={**asked, "truncate": False}).json()["error"]
    assert error["code"] == "context_length_exceeded"


def test_too_many_tokens_at_once(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfdraft.server.dialects.limits.MAX_READ_TOKENS", 19)
    for path, given in (
        ("/v1/embeddings", {"model": "vectors", "input": TEXTS}),
        ("/v1/rerank", {"model": "bert", "query": "boat", "documents": TEXTS}),
    ):
        answer = client.post(path, json=given)
        assert answer.status_code == 413
        assert "at most 19 are read for a request" in answer.json()["error"]["message"]


def test_documents_come_back_by_relevance(client: httpx.Client) -> None:
    reference = scores_of("bert")
    documents = [{"text": text} if index % 2 else text for index, text in enumerate(reference["documents"])]
    asked = {"model": "bert", "query": reference["query"], "documents": documents, "return_documents": True}
    body = client.post("/v1/rerank", json=asked).json()
    order = sorted(range(len(documents)), key=lambda index: -reference["logits"][index])
    assert [each["index"] for each in body["results"]] == order
    for each in body["results"]:
        logit = reference["logits"][each["index"]]
        assert abs(each["relevance_score"] - 1 / (1 + np.exp(-logit))) < 1e-5
        assert each["document"] == {"text": reference["documents"][each["index"]]}
    assert (body["model"], body["method"], body["object"]) == ("bert", "cross-encoder", "list")
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] > 0
    few = client.post("/v2/rerank", json=asked | {"top_n": 2, "raw_scores": True, "return_documents": False}).json()
    assert [set(each) for each in few["results"]] == [{"index", "relevance_score"}] * 2
    assert abs(few["results"][0]["relevance_score"] - reference["logits"][order[0]]) < 1e-4
    assert few["id"] != body["id"]


def test_a_reranker_that_says_yes_or_no(client: httpx.Client) -> None:
    reference = scores_of("qwen3")
    asked = {"model": "qwen3", "query": reference["query"], "documents": reference["documents"], "raw_scores": True}
    body = client.post("/v1/rerank", json=asked).json()
    assert body["method"] == "yes-no"
    found = {each["index"]: each["relevance_score"] for each in body["results"]}
    assert max(abs(found[index] - logit) for index, logit in enumerate(reference["logits"])) < 1e-4
    other = client.post("/v1/rerank", json=asked | {"instruction": "the boat"}).json()
    assert other["results"][0]["relevance_score"] != body["results"][0]["relevance_score"]


@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        ({"documents": []}, "documents", "must not be empty"),
        ({"query": ""}, "query", "must not be empty"),
        ({"documents": [{"title": "x"}]}, "documents", "documents[0]"),
        ({"documents": [3]}, "documents", "documents[0]"),
        ({"top_n": 0}, "top_n", "greater than or equal to 1"),
        ({"query": "boat " * 50}, "query", "the query alone fills the 48 tokens"),
        ({"documents": ["boat " * 50], "truncate": False}, "documents", "documents[0] has"),
    ],
)
def test_what_cannot_be_scored(client: httpx.Client, given: dict[str, Any], param: str, said: str) -> None:
    answer = client.post("/v1/rerank", json={"model": "bert", "query": "boat", "documents": ["mill"], **given})
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == param


def test_a_name_means_a_model_of_the_kind(client: httpx.Client) -> None:
    def said(path: str, model: object) -> tuple[int, str]:
        given = {"input": "a", "query": "a", "documents": ["b"], "model": model}
        answer = client.post(path, json=given)
        return answer.status_code, answer.json().get("error", {}).get("message", answer.json().get("model"))

    assert said("/v1/embeddings", "default") == said("/v1/embeddings", None) == (200, "vectors")
    assert said("/v1/rerank", "default") == (200, "bert")
    assert said("/v1/embeddings", "nano") == (
        400,
        "'nano' writes text; no chat model embeds: there is vectors, same",
    )
    assert said("/v1/embeddings", "bert")[0] == 400
    assert "a model of the other kind" in said("/v1/embeddings", "bert")[1]
    status, message = said("/v1/embeddings", str(FIXTURES / "bert"))
    assert status == 404
    assert message.endswith("here that embeds: there is vectors, same")
    assert said("/v1/rerank", "text-embedding-3-small")[0] == 404


def test_a_model_that_embeds_does_not_chat(client: httpx.Client) -> None:
    asked = {"messages": [{"role": "user", "content": "boat"}], "max_tokens": 2}
    answer = client.post("/v1/chat/completions", json={"model": "vectors", **asked})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "'vectors' writes no text; there is nano"
    assert client.post("/v1/chat/completions", json={"model": "any other", **asked}).status_code == 200


def test_models_health_metrics_and_docs_know_them(client: httpx.Client) -> None:
    client.post("/v1/embeddings", json={"model": "vectors", "input": "a"})
    listed = client.get("/v1/models").json()
    entries = {each["id"]: each for each in listed["data"]}
    assert list(entries)[-4:] == ["vectors", "same", "bert", "qwen3"]
    assert listed["last_id"] == "qwen3"
    assert entries["vectors"]["type"] == "embedding"
    assert entries["same"]["dimensions"] == 32  # the same model under another name
    assert entries["vectors"]["max_input_tokens"] == 48
    assert entries["bert"]["type"] == "rerank"
    assert client.get("/v1/models/vectors").json() == entries["vectors"]
    assert client.get("/health").json()["models"]["vectors"] == "loaded"
    metrics = client.get("/metrics").text
    assert 'selfdraft_retrieval_loaded{model="vectors"} 1.0' in metrics
    assert 'selfdraft_retrieval_texts_total{model="vectors"}' in metrics
    schema = client.get("/openapi.json").json()["paths"]
    for path in ("/v1/embeddings", "/v1/rerank"):
        example = schema[path]["post"]["requestBody"]["content"]["application/json"]["example"]
        assert client.post(path, json=example).status_code == 200
        assert path in client.get("/docs").text


def test_without_models_it_says_how_to_have_some(load_nano: Callable[[], LLM]) -> None:
    with running(load_nano) as found, found.client() as client:
        answer = client.post("/v1/embeddings", json={"input": "a"})
        assert answer.status_code == 404
        assert "start the server with --embedding-model" in answer.json()["error"]["message"]
        answer = client.post("/v1/rerank", json={"query": "a", "documents": ["b"], "model": "nano"})
        assert answer.status_code == 400
        assert (
            "no chat model scores documents: start the server with --rerank-model" in answer.json()["error"]["message"]
        )
        assert "/v1/embeddings" not in client.get("/openapi.json").json()["paths"]
        assert list(client.get("/health").json()["models"]) == ["nano"]


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (["/nowhere/at/all"], ModelNotFound, "no model '/nowhere/at/all'"),
        (["owner/never-pulled"], ModelNotFound, "not among the models that were downloaded"),
        ([f"default={FIXTURES / 'bert'}"], InvalidRequest, "another model has the name 'default'"),
        ([f"nano={FIXTURES / 'bert'}"], InvalidRequest, "another model has the name 'nano'"),
        ([str(FIXTURES / "bert"), str(FIXTURES / "bert")], InvalidRequest, "another model has the name 'bert'"),
        (["=x"], ModelNotFound, "no model '=x'"),
        (["x="], ModelNotFound, "no model 'x='"),
        ([str(FIXTURES / "qwen3")], CheckpointError, "writes text and was not trained to embed"),
    ],
)
def test_a_model_that_cannot_serve_is_refused_at_the_start(given: list[str], error: type[Exception], said: str) -> None:
    settings = load_server_settings(embedding_model=given)
    chat = ServedModels([ServedModel(Given("nano", "nano"), lambda: 0, lambda beside: pytest.fail("loaded"))], settings)
    with pytest.raises(error, match=said):
        retrieval_of(settings, chat)


def test_nan_is_an_error_and_never_sent(load_nano: Callable[[], LLM], tmp_path: Path) -> None:
    folder = altered("bert", tmp_path, tensors=lambda tensors: tensors | {"classifier.bias": mx.array([float("nan")])})
    with running(load_nano, rerank_model=[f"broken={folder}"]) as found, found.client() as client:
        asked = {"model": "broken", "query": "boat", "documents": ["mill"]}
        answer = client.post("/v1/rerank", json=asked)
        assert answer.status_code == 500
        assert "the score of documents[0] is NaN or infinite" in answer.json()["error"]["message"]


def test_a_model_that_cannot_be_loaded_is_tried_again(load_nano: Callable[[], LLM], tmp_path: Path) -> None:
    folder = altered("bert", tmp_path)
    with running(load_nano, embedding_model=[f"e={folder}"]) as found, found.client() as client:
        (folder / "tokenizer.json").rename(folder / "away")
        answer = client.post("/v1/embeddings", json={"input": "boat"})
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "the model 'e' could not be loaded; the server's log says why"
        (folder / "away").rename(folder / "tokenizer.json")
        assert client.post("/v1/embeddings", json={"input": "boat"}).status_code == 200


def test_models_give_way_to_each_other_under_load(load_nano: Callable[[], LLM], tmp_path: Path) -> None:
    """Three models, one at a time, and requests of all three at once: each is answered, and with its own vectors."""
    folders = [altered("bert", tmp_path / str(seed), tensors=_scaled(1 + seed)) for seed in range(3)]
    wanted = []
    for folder in folders:
        embedder = Embedder(plan(folder))
        wanted.append(finished(embedder.embed(embedder.read(TEXTS))))
    names = {f"m{index}": folder for index, folder in enumerate(folders)}
    given = [f"{name}={folder}" for name, folder in names.items()]
    with running(load_nano, embedding_model=given, max_loaded_retrieval=1) as found, found.client() as client:

        def ask(index: int) -> float:
            body = client.post("/v1/embeddings", json={"model": f"m{index % 3}", "input": TEXTS}).json()
            return float(np.abs(vectors(body) - wanted[index % 3]).max())

        with ThreadPoolExecutor(8) as crowd:
            assert max(crowd.map(ask, range(48))) < 1e-6
        assert within(5, lambda: list(client.get("/health").json()["models"].values()).count("loaded") == 2)
    assert len({tuple(each[0][:3]) for each in wanted}) == 3


def _scaled(factor: float) -> Callable[[dict[str, mx.array]], dict[str, mx.array]]:
    def change(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
        name = "bert.encoder.layer.0.output.dense.weight"
        return tensors | {name: tensors[name] * factor}

    return change


def test_the_least_recently_used_gives_way(load_nano: Callable[[], LLM], tmp_path: Path) -> None:
    given = [f"{name}={altered('bert', tmp_path / name)}" for name in ("a", "b", "c")]
    with running(load_nano, embedding_model=given, max_loaded_retrieval=2) as found, found.client() as client:
        for name in ("a", "b", "a", "c"):
            client.post("/v1/embeddings", json={"model": name, "input": "boat"}).raise_for_status()
        states = client.get("/health").json()["models"]
        assert states == {"nano": "loaded", "a": "loaded", "b": "unloaded", "c": "loaded"}


def test_memory_that_is_not_there_is_said(load_nano: Callable[[], LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfdraft.server.served.free_memory", lambda: 1000)
    with running(load_nano, **embeddings(1)) as found, found.client() as client:
        answer = client.post("/v1/embeddings", json={"model": "e0", "input": "boat"})
        assert answer.status_code == 507
        assert "e0 needs" in answer.json()["error"]["message"]


def test_memory_is_shared_with_chat_models(load_nano: Callable[[], LLM]) -> None:
    with running(load_nano, **embeddings(1), memory_limit="1GiB") as found, found.client() as client:
        before = found.models.free()
        client.post("/v1/embeddings", json={"model": "e0", "input": "boat"}).raise_for_status()
        size = plan(FIXTURES / "bert").nbytes
        assert found.models.others() == size
        assert found.models.free() == before - size


def test_idle_chat_and_embedding_models_give_way_to_each_other(load_nano: Callable[[], LLM]) -> None:
    """Under one limit that has room for either: none of them is refused for what nobody uses."""
    size = plan(FIXTURES / "bert").nbytes
    weights = load_nano().weights_bytes
    chat = ServedModel(Given("nano", "nano"), lambda: weights * 8 // 9, lambda beside: load_nano())
    with running(chat, **embeddings(1), memory_limit=weights + size // 2) as found, found.client() as client:
        for _ in range(2):
            answer = client.post("/v1/embeddings", json={"model": "e0", "input": "boat"})
            assert answer.status_code == 200, answer.text
            assert client.get("/health").json()["models"] == {"nano": "unloaded", "e0": "loaded"}
            answer = client.post("/tokenize", json={"model": "nano", "prompt": "boat"})
            assert answer.status_code == 200, answer.text
            assert client.get("/health").json()["models"] == {"nano": "loaded", "e0": "unloaded"}


def test_a_client_that_goes_frees_its_place(load_nano: Callable[[], LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    gate, forwards = threading.Event(), list[int]()
    plain = encoder.Encoder.hidden

    def slow(self: Any, batch: Any, padding: int) -> Any:
        forwards.append(len(batch))
        gate.wait(10)
        return plain(self, batch, padding)

    monkeypatch.setattr(encoder.Encoder, "hidden", slow)
    monkeypatch.setattr("selfdraft.retrieval.batches.MOST_TOKENS", 1)
    with running(load_nano, **embeddings(1)) as found, found.client() as client:
        gate.set()
        client.post("/v1/embeddings", json={"model": "e0", "input": "boat"}).raise_for_status()
        gate.clear()
        forwards.clear()
        body = b'{"model": "e0", "input": ["a", "b", "c", "d", "e", "f"]}'
        with socket.create_connection(("127.0.0.1", found.port)) as gone:
            gone.sendall(
                b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
            assert within(5, lambda: forwards == [1])
        assert client.get("/health").json()["status"] == "ok"  # nobody waits for the forward that runs
        assert within(5, lambda: client.get("/metrics").text.find("selfdraft_retrieval_requests 1.0") > 0)
        gate.set()
        assert within(5, lambda: client.get("/metrics").text.find("selfdraft_retrieval_requests 0.0") > 0)
        assert len(forwards) < 4


def test_chat_goes_on_beside_it(server: Running, client: httpx.Client) -> None:
    asked = {"model": "nano", "messages": [{"role": "user", "content": "boat"}], "max_tokens": 40, "seed": 1}
    alone = client.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]
    with ThreadPoolExecutor(8) as crowd:
        embedded = [
            crowd.submit(client.post, "/v1/embeddings", json={"model": "vectors", "input": TEXTS * 40})
            for _ in range(12)
        ]
        chats = [crowd.submit(client.post, "/v1/chat/completions", json=asked) for _ in range(4)]
        assert all(each.result().status_code == 200 for each in embedded)
        assert all(each.result().json()["choices"][0]["message"] == alone for each in chats)


def test_keys_guard_it_too(load_nano: Callable[[], LLM]) -> None:
    with running(load_nano, **embeddings(1), api_key="0123456789abcdef") as found, found.client() as client:
        asked = {"model": "e0", "input": "boat"}
        assert client.post("/v1/embeddings", json=asked).status_code == 401
        held = {"authorization": "Bearer 0123456789abcdef"}
        assert client.post("/v1/embeddings", json=asked, headers=held).status_code == 200
