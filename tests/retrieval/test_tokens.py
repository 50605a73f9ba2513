"""Guards what an encoder reads: the tokenizer's own tokens, within the model's limits, nothing injected."""

from __future__ import annotations

from pathlib import Path

import pytest

from selfdraft.errors import CheckpointError, ContextOverflow, InvalidRequest
from selfdraft.retrieval.batches import MOST_SCORES, MOST_TOKENS, SHORT, batches
from selfdraft.retrieval.tokens import Texts, most_tokens
from tests.support.retrieval import FIXTURES, altered


@pytest.fixture
def texts() -> Texts:
    return Texts(FIXTURES / "bert", 8)


def test_a_text_has_what_the_tokenizer_adds(texts: Texts) -> None:
    tokens = texts.text("the old boat", truncate=False, where="input[0]")
    assert tokens.ids[0] == 2
    assert tokens.ids[-1] == 3
    assert len(tokens) == 5
    assert set(tokens.segments) == {0}


def test_a_pair_has_two_segments(texts: Texts) -> None:
    tokens = texts.pair("the", "old boat", truncate=False, where="documents[0]")
    assert list(tokens.segments) == [0, 0, 0, 1, 1, 1]


def test_a_long_text_is_refused_unless_it_may_be_cut(texts: Texts) -> None:
    with pytest.raises(ContextOverflow, match=r"input\[3\] has 12 tokens, and this model reads 8") as refused:
        texts.text("boat " * 10, truncate=False, where="input[3]")
    assert refused.value.param == "input"
    cut = texts.text("boat " * 10, truncate=True, where="input[3]")
    assert len(cut) == 8
    assert cut.ids[-1] == 3  # what the tokenizer adds is there all the same
    assert len(texts.text("boat " * 6, truncate=False, where="input[0]")) == 8


def test_of_a_pair_the_document_is_cut(texts: Texts) -> None:
    tokens = texts.pair("old boat", "mill " * 10, truncate=True, where="documents[0]")
    assert len(tokens) == 8
    assert list(tokens.segments) == [0, 0, 0, 0, 1, 1, 1, 1]
    with pytest.raises(ContextOverflow, match="the query alone fills the 8 tokens") as refused:
        texts.pair("boat " * 10, "mill", truncate=True, where="documents[0]")
    assert refused.value.param == "query"
    with pytest.raises(ContextOverflow):
        texts.pair("old", "mill " * 10, truncate=False, where="documents[0]")


def test_ids_are_taken_as_they_are(texts: Texts) -> None:
    assert list(texts.ids([5, 6, 7], truncate=False, where="input[0]").ids) == [5, 6, 7]
    assert len(texts.ids([5] * 20, truncate=True, where="input[0]")) == 8
    with pytest.raises(ContextOverflow):
        texts.ids([5] * 9, truncate=False, where="input[0]")
    for wrong in (-1, 10**6):
        with pytest.raises(InvalidRequest, match=f"the model has no token {wrong}, only 0 to"):
            texts.ids([5, wrong], truncate=False, where="input[0]")
    with pytest.raises(InvalidRequest, match="is empty"):
        texts.ids([], truncate=False, where="input[0]")


def test_documents_cannot_spell_a_boundary() -> None:
    tokens = Texts(FIXTURES / "bert", 48).pair("old [SEP]", "boat [CLS]", truncate=False, where="documents[0]")
    assert list(tokens.ids).count(3) == 2
    assert list(tokens.ids).count(2) == 1


def test_a_lone_surrogate_is_no_text(texts: Texts) -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        texts.text("a\ud800", truncate=False, where="input[0]")


def test_shipped_padding_and_truncation_do_not_count(tmp_path: Path) -> None:
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(FIXTURES / "bert" / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=16, pad_id=0)
    altered("bert", tmp_path)
    library.save(str(tmp_path / "tokenizer.json"))
    assert len(Texts(tmp_path, 8).text("the old boat", truncate=False, where="input[0]")) == 5


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({}, 48),
        ({"sentence_bert_config.json": {"max_seq_length": 12}}, 12),
        ({"sentence_bert_config.json": {"max_seq_length": None}}, 48),
        ({"tokenizer_config.json": {"model_max_length": 1000000000000000019884624838656}}, 48),
        ({"tokenizer_config.json": {"model_max_length": 20}, "sentence_bert_config.json": {"max_seq_length": 30}}, 20),
        ({"sentence_bert_config.json": {"max_seq_length": 512}}, 48),
    ],
)
def test_the_least_limit_holds(tmp_path: Path, files: dict[str, object], most: int) -> None:
    assert most_tokens(altered("bert", tmp_path, files=files), 48) == most


@pytest.mark.parametrize("wrong", [0, "256", 3.5, True])
def test_a_limit_that_is_none_is_refused(tmp_path: Path, wrong: object) -> None:
    altered("bert", tmp_path, files={"sentence_bert_config.json": {"max_seq_length": wrong}})
    with pytest.raises(CheckpointError, match="max_seq_length must be a whole number above 0"):
        most_tokens(tmp_path, 48)


def test_a_folder_without_a_usable_tokenizer(tmp_path: Path) -> None:
    altered("bert", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not a usable tokenizer"):
        Texts(tmp_path, 8)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json there"):
        Texts(tmp_path, 8)


@pytest.mark.parametrize(
    "lengths", [[], [1], [10] * 5000, [8192, 1, 1], [20000, 3], [256, 2, 2, 3, 9], list(range(1, 600))]
)
def test_each_text_is_in_one_forward_and_forwards_are_bounded(lengths: list[int]) -> None:
    chosen = list(batches(lengths))
    assert sorted(index for batch in chosen for index in batch) == list(range(len(lengths)))
    for batch in chosen:
        longest = max(lengths[index] for index in batch)
        assert len(batch) == 1 or (len(batch) * longest <= MOST_TOKENS and len(batch) * longest**2 <= MOST_SCORES)
        assert longest <= SHORT or 2 * sum(lengths[index] for index in batch) >= len(batch) * longest
