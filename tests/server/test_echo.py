"""Guards the scoring of prompts over a real socket, as evaluation harnesses ask for it: echo, logprobs, few tokens."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from selfdraft.errors import OutOfMemoryBudget
from selfdraft.llm import LLM
from selfdraft.params import SamplingParams
from tests.support.budgets import budget_of

from .conftest import Running

RAIN = "Rain fell on the roof all night."
SMILES = "naïve 😀😀é, 日本語 🎈"


@pytest.fixture(scope="module")
def llm(load_nano: Callable[[], LLM]) -> LLM:
    """The server's model, to ask directly."""
    return load_nano()


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(api_key="none", base_url=f"{server.url}/v1", http_client=http, max_retries=0) as client:
        yield client


def asked(**given: Any) -> dict[str, Any]:
    return {"model": "nano", "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 7, **given}


def whole(server: Running, **given: Any) -> dict[str, Any]:
    with server.client() as client:
        response = client.post("/v1/completions", json=asked(**given))
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def streamed(server: Running, **given: Any) -> list[dict[str, Any]]:
    """The choices of a stream, put together."""
    found: dict[int, dict[str, Any]] = {}
    with server.client() as client, client.stream("POST", "/v1/completions", json=asked(stream=True, **given)) as got:
        lines = [line.removeprefix("data: ") for line in got.iter_lines() if line.startswith("data: {")]
    for choice in itertools.chain.from_iterable(json.loads(line)["choices"] for line in lines):
        known = found.setdefault(choice["index"], {"index": choice["index"], "text": "", "logprobs": {}})
        known["text"] += choice["text"]
        known["finish_reason"] = choice["finish_reason"]
        for name, values in (choice["logprobs"] or {}).items():
            known["logprobs"].setdefault(name, []).extend(values)
    return [found[index] for index in sorted(found)]


def by_text(top: list[tuple[int, str, float, list[int]]]) -> dict[str, float]:
    """The likeliest of each text."""
    return {text: logprob for _, text, logprob, _ in reversed(top)}


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_the_scores_are_those_of_the_model(server: Running, llm: LLM, max_tokens: int) -> None:
    prompts = [llm.tokens(RAIN, raw=True), [71], llm.tokens(SMILES, raw=True)]
    body = whole(server, prompt=prompts, logprobs=3, max_tokens=max_tokens, ignore_eos=True)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    for tokens, choice in zip(prompts, body["choices"], strict=True):
        text = llm.tokenizer.decode(tokens, skip_special=False)
        first, *others = llm.score(tokens, top=3)
        assert first is None
        given = choice["logprobs"]
        assert {len(values) for values in given.values()} == {len(tokens) + max_tokens}
        assert given["tokens"][: len(tokens)] == [llm.tokenizer.token_name(id) for id in tokens]
        assert given["token_logprobs"][: len(tokens)] == [None, *(score.logprob for score in others if score)]
        assert given["top_logprobs"][0] is None
        for score, top in zip(others, given["top_logprobs"][1:], strict=False):
            assert score is not None
            assert top == {score.token: score.logprob, **by_text(score.top)}
        assert choice["text"].startswith(text)
        assert choice["finish_reason"] == "length"
        if max_tokens == 0:
            assert choice["text"] == text
        else:
            answer = llm.generate(tokens, SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=3))
            assert choice["text"] == text + answer.text
            assert given["token_logprobs"][len(tokens) :] == [score.logprob for score in answer.logprobs or ()]
            assert given["text_offset"][len(tokens)] == len(text)
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert body["usage"]["completion_tokens"] == 3 * max_tokens


@pytest.mark.parametrize("given", [{"max_tokens": 0}, {"max_tokens": 6, "n": 2, "temperature": 1}, {"logprobs": None}])
def test_streamed_and_whole_give_the_same(server: Running, given: dict[str, Any]) -> None:
    given = {"prompt": [RAIN, SMILES], "ignore_eos": True, "logprobs": 2, **given}
    expected = whole(server, **given)["choices"]
    for choice in expected:
        choice["logprobs"] = choice["logprobs"] or {}
        choice.pop("timings", None)
    assert streamed(server, **given) == expected
    assert len(expected) == 2 * given.get("n", 1)
    assert expected[0]["text"].startswith(RAIN)


def test_answers_to_one_prompt_share_its_scores(server: Running) -> None:
    one, other = whole(server, prompt=RAIN, n=2, temperature=1, max_tokens=4, ignore_eos=True)["choices"]
    length = len(one["logprobs"]["tokens"]) - 4
    assert one["logprobs"]["token_logprobs"][:length] == other["logprobs"]["token_logprobs"][:length]
    assert one["text"] != other["text"]


def test_offsets_point_into_the_text(server: Running, llm: LLM) -> None:
    """Tokens that are part of a character point at its beginning."""
    tokens = llm.tokens(f"{SMILES}<|im_end|>\n{SMILES}", raw=True)
    (choice,) = whole(server, prompt=tokens, max_tokens=12, ignore_eos=True, temperature=1)["choices"]
    text, given = choice["text"], choice["logprobs"]
    offsets = given["text_offset"]
    assert any(token.startswith("bytes:") for token in given["tokens"][: len(tokens)])
    assert offsets[: len(tokens)] == [
        len(llm.tokenizer.decode(tokens[:place], skip_special=False).rstrip("\ufffd")) for place in range(len(tokens))
    ]
    for token, offset in zip(given["tokens"], offsets, strict=True):
        if not token.startswith("bytes:") and token not in llm.tokenizer.decode(
            sorted(llm.tokenizer.special_ids), False
        ):
            assert text[offset:].startswith(token)


def test_with_no_alternatives_a_token_has_its_own_score(server: Running) -> None:
    (choice,) = whole(server, prompt=RAIN, logprobs=0)["choices"]
    given = choice["logprobs"]
    for token, logprob, top in list(zip(given["tokens"], given["token_logprobs"], given["top_logprobs"], strict=True))[
        1:
    ]:
        assert top == {token: logprob}


def test_echo_without_scores(server: Running) -> None:
    (plain,) = whole(server, prompt=RAIN, logprobs=None, echo=False, max_tokens=6)["choices"]
    (choice,) = whole(server, prompt=RAIN, logprobs=None, max_tokens=6)["choices"]
    assert choice["logprobs"] is None
    assert choice["text"] == RAIN + plain["text"]
    (choice,) = whole(server, prompt=RAIN, logprobs=None, max_tokens=0)["choices"]
    assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == (RAIN, None, "length")


def test_no_tokens_at_all_are_refused_elsewhere(server: Running) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    bodies = {
        "/v1/completions": asked(prompt=RAIN, max_tokens=0, echo=False),
        "/v1/chat/completions": {"model": "nano", "messages": messages, "max_tokens": 0},
        "/v1/messages": {"model": "nano", "messages": messages, "max_tokens": 0},
    }
    with server.client() as client:
        for path, body in bodies.items():
            response = client.post(path, json=body)
            assert response.status_code in (400, 422), path
            assert "max_tokens" in response.text


def test_the_sdk_reads_it(client: openai.OpenAI, llm: LLM) -> None:
    tokens = llm.tokens(RAIN, raw=True)
    answer = client.completions.create(model="nano", prompt=[tokens], echo=True, logprobs=1, max_tokens=0)
    (choice,) = answer.choices
    assert choice.text == RAIN
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.top_logprobs is not None
    first, *others = choice.logprobs.token_logprobs
    assert first is None
    assert others == [score.logprob for score in llm.score(tokens)[1:] if score]
    assert all(max(top.values()) >= own for own, top in zip(others, choice.logprobs.top_logprobs[1:], strict=True))
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(tokens), 0)


def test_memory_for_scores_is_asked_for(llm: LLM) -> None:
    plain = llm.answer([1] * 500, SamplingParams(max_tokens=1)).request
    scored = llm.answer([1] * 500, SamplingParams(max_tokens=1), prompt_logprobs=20).request
    budget = budget_of(llm.engine, llm.budget.need(plain).bytes)
    budget.check(plain)
    with pytest.raises(OutOfMemoryBudget) as caught:
        budget.check(scored)
    assert not caught.value.later
