"""Guards what is taken for a model: only what is computed as its files say, and nothing that is NaN is given out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.errors import CheckpointError, InvalidRequest, NonFiniteOutput, OutOfMemoryBudget, SelfdraftError
from selfdraft.retrieval import Embedder, encoder, open_reranker, plan
from tests.support.retrieval import FIXTURES, altered, finished, scores_of

Tensors = dict[str, mx.array]


def embedded(folder: Path, texts: list[str]) -> Any:
    embedder = Embedder(plan(folder))
    return finished(embedder.embed(embedder.read(texts)))


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("bert", {"model_type": "t5"}, "model_type 't5' is none that embeds or ranks here; there is bert"),
        ("bert", {"model_type": None}, "model_type None"),
        ("bert", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported; bert has 'gelu'"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ("bert", {"hidden_size": "x"}, "hidden_size must be a whole number above 0, not 'x'"),
        ("bert", {"num_hidden_layers": None}, "does not describe a bert model"),
        ("bert", {"num_hidden_layers": 4}, "missing encoder.layer.3"),
        ("bert", {"num_hidden_layers": 2}, "surplus encoder.layer.2"),
        ("bert", {"intermediate_size": 65}, r"has shape \[64\], not \[65\]"),
        ("qwen3", {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"}}, "positions of type 'yarn'"),
        ("qwen3", {"rope_scaling": {"type": "linear", "factor": 2}}, "positions of type 'linear'"),
    ],
)
def test_what_cannot_be_computed_is_refused(tmp_path: Path, name: str, config: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        open_reranker(plan(altered(name, tmp_path, config=config)))


def test_a_chat_model_does_not_embed() -> None:
    with pytest.raises(CheckpointError, match="Qwen3ForCausalLM, which writes text and was not trained to embed"):
        Embedder(plan(FIXTURES / "qwen3"))


def test_a_decoder_that_was_trained_to_embed_does(tmp_path: Path) -> None:
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "1_Pooling"}]
    files = {"modules.json": modules, "1_Pooling/config.json": {"pooling_mode_lasttoken": True}}
    assert embedded(altered("qwen3", tmp_path, files=files), ["the boat"]).shape == (1, 32)


def test_a_classifier_of_several_labels_is_no_reranker(tmp_path: Path) -> None:
    altered("bert", tmp_path, config={"id2label": {"0": "a", "1": "b", "2": "c"}})
    with pytest.raises(CheckpointError, match="3 labels; a reranker has one"):
        open_reranker(plan(tmp_path))


def test_without_a_pooler_vectors_are_the_same(tmp_path: Path) -> None:
    def bare(tensors: Tensors) -> Tensors:
        return {name.removeprefix("bert."): tensor for name, tensor in tensors.items() if "pooler" not in name}

    altered("bert", tmp_path, tensors=bare, config={"architectures": ["BertModel"]})
    texts = ["the boat", "who built it"]
    assert np.array_equal(embedded(tmp_path, texts), embedded(FIXTURES / "bert", texts))


def test_a_model_that_only_embeds_ranks_by_cosine(tmp_path: Path) -> None:
    altered("bert", tmp_path, config={"architectures": ["BertModel"]})
    reranker = open_reranker(plan(tmp_path))
    assert reranker.method == "embedding-cosine"
    query, documents = scores_of("bert")["query"], scores_of("bert")["documents"][:5]
    scores = finished(reranker.score(reranker.read(query, documents)))
    vectors = embedded(tmp_path, [query, *documents])
    assert np.allclose(scores.relevance, vectors[1:] @ vectors[0], atol=1e-6)


def test_weights_of_8_bits_are_read_as_they_are(tmp_path: Path) -> None:
    def quantised(tensors: Tensors) -> Tensors:
        found = dict(tensors)
        for name in [name for name in tensors if "attention" in name and name.endswith("query.weight")]:
            weight, scales, biases = mx.quantize(tensors[name], group_size=32, bits=8)
            stem = name.removesuffix(".weight")
            found |= {name: weight, f"{stem}.scales": scales, f"{stem}.biases": biases}
        return found

    altered("bert", tmp_path, tensors=quantised)
    near, exact = (embedded(folder, ["who built the old boat"]) for folder in (tmp_path, FIXTURES / "bert"))
    assert 1 - 1e-3 < float((near * exact).sum()) < 1


def test_prompts_are_set_before_texts(tmp_path: Path) -> None:
    config = {"prompts": {"query": "who built ", "document": ""}, "default_prompt_name": "query"}
    embedder = Embedder(plan(altered("bert", tmp_path, files={"config_sentence_transformers.json": config})))
    asked = [list(embedder.read(["the boat"], prompt=prompt)[0].ids) for prompt in (None, "query", "document")]
    spelled = list(Embedder(plan(FIXTURES / "bert")).read(["who built the boat"])[0].ids)
    assert asked[0] == asked[1] == spelled
    assert len(asked[2]) == 4
    with pytest.raises(InvalidRequest, match="prompt_name 'title' is not one of this model's: query, document"):
        embedder.read(["the boat"], prompt="title")


def test_prompts_that_are_none_are_refused(tmp_path: Path) -> None:
    files = {"config_sentence_transformers.json": {"prompts": {"a": "b"}, "default_prompt_name": "c"}}
    with pytest.raises(CheckpointError, match="default_prompt_name must be one of them"):
        Embedder(plan(altered("bert", tmp_path, files=files)))


@pytest.mark.parametrize("dimensions", [0, 33])
def test_more_dimensions_than_there_are(dimensions: int) -> None:
    embedder = Embedder(plan(FIXTURES / "bert"))
    with pytest.raises(InvalidRequest, match=f"dimensions {dimensions} is not possible: this model has 32"):
        finished(embedder.embed(embedder.read(["a"]), dimensions=dimensions))


def broken(name: str) -> Callable[[Tensors], Tensors]:
    """One token's embedding is NaN: texts without it are all right."""

    def change(tensors: Tensors) -> Tensors:
        table = next(key for key in tensors if key.endswith(name))
        tensors[table][9] = float("nan")
        return tensors

    return change


def test_nan_is_an_error_that_names_the_text(tmp_path: Path) -> None:
    altered("bert", tmp_path, tensors=broken("word_embeddings.weight"))
    embedder = Embedder(plan(tmp_path))
    tokens = [*embedder.read(["who built the"]), *embedder.read([[9, 10]])]
    with pytest.raises(NonFiniteOutput, match=r"the embedding of input\[1\] is NaN or infinite"):
        finished(embedder.embed(tokens))


def test_a_score_of_nan_is_an_error_too(tmp_path: Path) -> None:
    altered("bert", tmp_path, tensors=lambda tensors: tensors | {"classifier.bias": mx.array([float("inf")])})
    reranker = open_reranker(plan(tmp_path))
    with pytest.raises(NonFiniteOutput, match=r"the score of documents\[0\] is NaN or infinite"):
        finished(reranker.score(reranker.read("who", ["the mill"])))


def test_attention_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = Embedder(plan(FIXTURES / "bert"))
    monkeypatch.setattr(encoder, "free_memory", lambda: 100)
    with pytest.raises(OutOfMemoryBudget, match=r"a text of 3 tokens needs .* for attention"):
        finished(embedder.embed(embedder.read(["boat"])))


def test_without_mlx_embeddings_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "find_spec", lambda name: None)
    with pytest.raises(SelfdraftError, match=r"pip install 'selfdraft\[retrieval\]'"):
        Embedder(plan(FIXTURES / "bert"))


def test_the_size_is_known_before_weights_are_read() -> None:
    planned = plan(FIXTURES / "bert")
    before = mx.get_active_memory()
    embedder = Embedder(planned)
    held = mx.get_active_memory() - before
    assert 0.5 * planned.nbytes < held < 1.5 * planned.nbytes
    assert embedder.width == 32
