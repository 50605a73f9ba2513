"""Guards embeddings for OpenAI's client as it is used: base64 unasked, batches, dimensions, errors, the async client.

And a real model, to see that texts of like meaning come out near each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import openai
import pytest

from selfdraft.llm import LLM
from selfdraft.retrieval import Embedder, plan
from tests.server.conftest import Running, load_nano, nano_folder, running
from tests.support.retrieval import FIXTURES, finished, minilm_folder

from .conftest import openai_client

__all__ = ["load_nano", "nano_folder"]  # fixtures, for the tests here

TEXTS = ["the old boat", "who built it"]


@pytest.fixture(scope="module")
def embedding_server(load_nano: Callable[[], LLM]) -> Iterator[Running]:
    with running(load_nano, embedding_model=[f"tiny={FIXTURES / 'bert'}"]) as found:
        yield found


@pytest.fixture(scope="module")
def client(embedding_server: Running) -> Iterator[openai.OpenAI]:
    with openai_client(embedding_server) as client:
        yield client


@pytest.fixture(scope="module")
def expected() -> Any:
    embedder = Embedder(plan(FIXTURES / "bert"))
    return finished(embedder.embed(embedder.read(TEXTS)))


def test_what_the_client_asks_for_unasked(client: openai.OpenAI, expected: Any) -> None:
    found = client.embeddings.create(model="tiny", input=TEXTS)
    assert np.array_equal(np.array([each.embedding for each in found.data], np.float32), expected)
    assert (found.model, found.usage.prompt_tokens, found.usage.total_tokens) == ("tiny", 10, 10)


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_both_encodings_and_fewer_dimensions(client: openai.OpenAI, expected: Any, encoding: Any) -> None:
    found = client.embeddings.create(model="tiny", input=TEXTS[0], encoding_format=encoding, dimensions=8, user="me")
    given: Any = found.data[0].embedding
    if encoding == "base64":
        import base64

        given = np.frombuffer(base64.b64decode(given), "<f4")
    cut = expected[0, :8] / np.linalg.norm(expected[0, :8])
    assert np.abs(np.array(given) - cut).max() < 1e-6


def test_tokens(client: openai.OpenAI, expected: Any) -> None:
    ids = [list(each.ids) for each in Embedder(plan(FIXTURES / "bert")).read(TEXTS)]
    for given, wanted in ((ids[0], expected[:1]), (ids, expected)):
        found = client.embeddings.create(model="tiny", input=given)
        assert np.abs(np.array([each.embedding for each in found.data]) - wanted).max() < 1e-6


def test_refusals_have_the_clients_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="this model has 32") as refused:
        client.embeddings.create(model="tiny", input="a", dimensions=64)
    assert refused.value.param == "dimensions"
    with pytest.raises(openai.NotFoundError, match="there is tiny"):
        client.embeddings.create(model="text-embedding-3-small", input="a")
    with pytest.raises(openai.BadRequestError, match="'nano' writes text"):
        client.embeddings.create(model="nano", input="a")


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [each.id for each in client.models.list()] == ["nano", "tiny"]
    assert client.models.retrieve("tiny").to_dict()["type"] == "embedding"


def test_many_at_once_from_the_async_client(embedding_server: Running, expected: Any) -> None:
    async def ask() -> list[Any]:
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        async with openai.AsyncOpenAI(
            base_url=f"{embedding_server.url}/v1", api_key="none", http_client=http
        ) as client:
            asked = [client.embeddings.create(model="tiny", input=TEXTS) for _ in range(24)]
            return list(await asyncio.gather(*asked))

    for found in asyncio.run(ask()):
        assert np.abs(np.array([each.embedding for each in found.data]) - expected).max() < 1e-6


def test_a_real_model_knows_what_is_alike(load_nano: Callable[[], LLM]) -> None:
    folder = minilm_folder()
    texts = ["A cat sleeps on the sofa.", "The kitten naps on the couch.", "The central bank raised its rates."]
    with (
        running(load_nano, embedding_model=[f"minilm={folder}"], rerank_model=[f"cosine={folder}"]) as found,
        openai_client(found) as client,
        found.client() as plain,
    ):
        answer = client.embeddings.create(model="minilm", input=texts)
        vectors = np.array([each.embedding for each in answer.data])
        assert vectors.shape == (3, 384)
        near, far = float(vectors[0] @ vectors[1]), float(vectors[0] @ vectors[2])
        assert near > 0.5 > 0.2 > far
        asked = {"model": "cosine", "query": texts[0], "documents": texts[1:]}
        body = plain.post("/v1/rerank", json=asked).json()
        assert body["method"] == "embedding-cosine"
        scores = [each["relevance_score"] for each in body["results"]]
        assert np.allclose(scores, [near, far], atol=1e-5)
