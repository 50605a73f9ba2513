"""Guards lm-eval's `local-completions`: choices scored by echoed log-probabilities, and answers written out."""

from __future__ import annotations

from typing import Any

import pytest

from selfdraft.source import find_model
from tests.server.conftest import Running

from .conftest import Client, openai_client


@pytest.fixture(scope="module")
def runs(reference: Running, outside: Client) -> dict[str, Any]:
    return outside("scripts/with_lm_eval.py", reference.url, str(find_model("reference")))


@pytest.fixture(scope="module")
def found(runs: dict[str, Any]) -> dict[str, Any]:
    here: dict[str, Any] = runs["here"]
    return here


def test_the_server_can_tokenize_for_it(runs: dict[str, Any], reference: Running) -> None:
    """With `tokenizer_backend=remote` no tokenizer is needed where lm-eval runs, and nothing else changes."""
    assert runs["remote"] == runs["here"]
    assert runs["remote_eos"] == reference.service.llm.tokenizer.token_id("<|im_end|>")


def test_it_runs_to_a_score(found: dict[str, Any]) -> None:
    results = found["results"]
    right = [sample["scores"].index(max(sample["scores"])) == sample["answer"] for sample in found["samples"]]
    assert len(right) == 4
    assert results["tiny_choices"]["acc,none"] == sum(right) / 4 >= 0.5
    assert 0 <= results["tiny_written"]["exact_match,none"] <= 1


def test_its_scores_are_those_of_the_model(found: dict[str, Any], reference: Running) -> None:
    """The score of a choice is the sum over its tokens, as the model gives them behind the question."""
    sample = found["samples"][0]
    with openai_client(reference) as client:
        for choice, score in zip(sample["choices"], sample["scores"], strict=True):
            asked = {"prompt": f"{sample['question']} {choice}", "echo": True, "logprobs": 1, "max_tokens": 0}
            scores: Any = client.completions.create(model="reference", **asked).choices[0].logprobs
            start = scores.text_offset.index(len(sample["question"]))
            assert score == pytest.approx(sum(scores.token_logprobs[start:]), abs=1e-4)
