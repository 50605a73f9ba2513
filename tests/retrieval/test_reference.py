"""Guards the numbers: embeddings and scores are those of transformers, alone and in a batch that is padded.

tests/reference/make_retrieval_fixtures.py writes what is compared with.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.retrieval import Embedder, open_reranker, plan
from tests.reference.retrieval_texts import TEXTS
from tests.support.retrieval import FIXTURES, finished, minilm_folder, scores_of

COSINE, LARGEST = 1 - 1e-6, 2e-5  # measured with reference BLAS: 1 - 2.4e-7 and 3.4e-7
LOGIT = 5e-5  # measured: 3.1e-6

METHODS = {"bert": "cross-encoder", "xlm-roberta": "cross-encoder", "modernbert": "cross-encoder", "qwen3": "yes-no"}


@pytest.fixture(scope="module")
def minilm() -> Embedder:
    return Embedder(plan(minilm_folder()))


@pytest.fixture(scope="module")
def expected() -> Any:
    return mx.load(str(FIXTURES / "minilm.safetensors"))


def test_a_real_model_reads_as_many_tokens(minilm: Embedder, expected: Any) -> None:
    tokens = minilm.read(TEXTS, truncate=True)
    assert [len(each) for each in tokens] == expected["tokens"].tolist()
    assert minilm.most_tokens == 256
    assert minilm.width == 384


def test_a_real_model_embeds_as_its_reference(minilm: Embedder, expected: Any) -> None:
    vectors, reference = finished(minilm.embed(minilm.read(TEXTS, truncate=True))), np.array(expected["vectors"])
    assert vectors.dtype == np.float32
    assert np.abs(vectors - reference).max() < LARGEST
    assert (vectors * reference).sum(axis=1).min() > COSINE


def test_a_text_alone_is_a_text_in_a_batch(minilm: Embedder) -> None:
    texts = [text for text in TEXTS if 0 < len(text) < 60]
    together = finished(minilm.embed(minilm.read(texts)))
    alone = np.concatenate([finished(minilm.embed(minilm.read([text]))) for text in texts])
    assert np.abs(together - alone).max() < LARGEST


def test_fewer_dimensions_are_the_first_ones_at_length_1(minilm: Embedder) -> None:
    tokens = minilm.read(TEXTS[:8])
    whole, short = finished(minilm.embed(tokens)), finished(minilm.embed(tokens, dimensions=64))
    cut = whole[:, :64] / np.linalg.norm(whole[:, :64], axis=1, keepdims=True)
    assert short.shape == (8, 64)
    assert np.abs(short - cut).max() < 1e-6


@pytest.mark.parametrize("name", METHODS)
def test_a_reranker_scores_as_its_reference(name: str) -> None:
    reference = scores_of(name)
    reranker = open_reranker(plan(FIXTURES / name))
    assert reranker.method == METHODS[name]
    for documents in (reference["documents"], reference["documents"][:1]):
        scores = finished(reranker.score(reranker.read(reference["query"], documents)))
        logits = np.array(reference["logits"][: len(documents)])
        assert np.abs(scores.logits - logits).max() < LOGIT
        assert np.abs(scores.relevance - 1 / (1 + np.exp(-logits))).max() < LOGIT
