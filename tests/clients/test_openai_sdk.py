"""Guards chat, completions, models and errors as the official openai client sees them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel, Field

from selfdraft.llm import LLM
from tests.server.conftest import Running, running, within

from .conftest import openai_client

ASKED: dict[str, Any] = {
    "model": "nano",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 12,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["c", "f"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


class Person(BaseModel):
    name: str = Field(max_length=12)
    mood: Literal["calm", "wild"]


def chat(client: openai.OpenAI, **given: Any) -> Any:
    return client.chat.completions.create(**{**ASKED, **given})


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def is_weather(arguments: str) -> bool:
    """Whether a call's arguments are what its schema asks for."""
    read = json.loads(arguments)
    return set(read) == {"city", "unit"} and isinstance(read["city"], str) and read["unit"] in ("c", "f")


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 7}])
def test_streamed_and_whole_chats_are_equal(oai: openai.OpenAI, sampling: dict[str, Any]) -> None:
    whole = chat(oai, **sampling)
    chunks = list(chat(oai, stream=True, stream_options={"include_usage": True}, **sampling))
    assert text_of(chunks) == whole.choices[0].message.content != ""
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
    ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert ends == [whole.choices[0].finish_reason] == ["length"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_stream_helper_puts_the_same_answer_together(trained: openai.OpenAI) -> None:
    asked = {**ASKED, "max_tokens": 60, "extra_body": {}}
    with trained.chat.completions.stream(**asked, logprobs=True) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        choice = stream.get_final_completion().choices[0]
    assert text == choice.message.content == chat(trained, **asked).choices[0].message.content != ""
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert "".join(score.token for score in choice.logprobs.content or ()).startswith(text)


def test_logprobs_streamed_and_whole(oai: openai.OpenAI) -> None:
    asked = {"logprobs": True, "top_logprobs": 3, "temperature": 1.0, "seed": 3}
    whole = chat(oai, **asked).choices[0].logprobs.content
    chunks = list(chat(oai, stream=True, **asked))
    pieces = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    assert [score for piece in pieces for score in piece.content or ()] == whole
    assert len(whole) == 12
    for score in whole:
        top = [entry.logprob for entry in score.top_logprobs]
        assert len(top) == 3
        assert top == sorted(top, reverse=True)
        assert score.logprob <= top[0] <= 0
        assert bytes(score.bytes or ()).decode() == score.token


def test_several_answers_and_seeds(oai: openai.OpenAI) -> None:
    asked = {"n": 3, "temperature": 1.0, "seed": 5}
    some = chat(oai, **asked)
    texts = [choice.message.content for choice in some.choices]
    assert [choice.index for choice in some.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert some.usage.completion_tokens == 36
    chunks = list(chat(oai, stream=True, **asked))
    assert [text_of(chunks, index) for index in range(3)] == texts
    assert [choice.message.content for choice in chat(oai, **{**asked, "seed": 6}).choices] != texts


def test_stops_biases_and_least_lengths(oai: openai.OpenAI) -> None:
    whole = chat(oai, logprobs=True).choices[0]
    text = whole.message.content
    third = whole.logprobs.content[3].token
    stopped = chat(oai, stop=[third]).choices[0]
    assert stopped.message.content == text[: text.index(third)]
    assert stopped.finish_reason == "stop"
    assert chat(oai, logit_bias={"65": 100}).choices[0].message.content == 12 * bias_token(oai)
    end = {"logit_bias": {str(eos_id(oai)): 100}}
    assert chat(oai, extra_body={}, **end).usage.completion_tokens == 1
    assert chat(oai, extra_body={"min_tokens": 5}, **end).usage.completion_tokens == 6


def bias_token(client: openai.OpenAI) -> str:
    found = client.post("/../detokenize", body={"tokens": [65]}, cast_to=object)
    return str(found["prompt"])  # type: ignore[index]


def eos_id(client: openai.OpenAI) -> int:
    found: Any = client.post("/../tokenize", body={"prompt": "<|im_end|>"}, cast_to=object)
    (token,) = found["tokens"]
    return int(token)


@pytest.mark.parametrize("depth", [0, 2])
def test_depth_and_timings(oai: openai.OpenAI, depth: int) -> None:
    body = {"ignore_eos": True, "depth": depth}
    whole = chat(oai, extra_body=body)
    assert whole.choices == chat(oai).choices
    *_, last = chat(oai, extra_body=body, stream=True, stream_options={"include_usage": True})
    for timings in (whole.timings, last.timings):
        assert len(timings["drafts_tried"]) in (range(1, depth + 1) if depth else (0,))
        assert sum(timings["emitted"].values()) == 12
        assert timings["tokens_per_cycle"] >= 1
        assert timings["trunk_replays"] == 0


def test_thinking_goes_to_reasoning_content(trained: openai.OpenAI) -> None:
    asked = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40}
    thought = chat(trained, **asked, extra_body={"enable_thinking": True})
    plain = chat(trained, **asked, extra_body={"enable_thinking": False})
    assert thought.choices[0].message.reasoning_content
    assert "<think>" not in (thought.choices[0].message.content or "")
    assert thought.usage.completion_tokens_details.reasoning_tokens > 0
    assert not hasattr(plain.choices[0].message, "reasoning_content")
    chunks = list(chat(trained, **asked, extra_body={"enable_thinking": True}, stream=True))
    deltas = [getattr(choice.delta, "reasoning_content", None) or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(deltas) == thought.choices[0].message.reasoning_content
    assert text_of(chunks) == thought.choices[0].message.content


def test_grammars(oai: openai.OpenAI) -> None:
    for form in ({"type": "regex", "regex": "(ab|cd){2}"}, {"type": "grammar", "grammar": 'start: ("ab"|"cd"){2}'}):
        text = chat(oai, response_format=form, extra_body={}).choices[0].message.content
        assert text in ("abab", "abcd", "cdab", "cdcd")


def test_structured_output(trained: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Describe a person as JSON."}]
    schema = {"name": "person", "schema": Person.model_json_schema(), "strict": True}
    asked = {"messages": messages, "max_tokens": 200, "extra_body": {}}
    whole = chat(trained, **asked, response_format={"type": "json_schema", "json_schema": schema})
    person = Person.model_validate_json(whole.choices[0].message.content)
    assert whole.choices[0].finish_reason == "stop"
    parsed = trained.chat.completions.parse(
        model="reference",
        messages=messages,  # type: ignore[arg-type]
        max_tokens=200,
        temperature=0,
        response_format=Person,
    )
    assert parsed.choices[0].message.parsed == person
    with trained.chat.completions.stream(
        model="reference",
        messages=messages,  # type: ignore[arg-type]
        max_tokens=200,
        temperature=0,
        response_format=Person,
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == person


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_calls_streamed_and_whole(oai: openai.OpenAI, choice: Any) -> None:
    asked = {
        "messages": QUESTION,
        "tools": [WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "extra_body": {},
    }
    whole = chat(oai, **asked).choices[0]
    (call,) = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    assert call.function.name == "get_weather"
    assert is_weather(call.function.arguments)
    chunks = list(chat(oai, **asked, stream=True))
    deltas = [delta for chunk in chunks for entry in chunk.choices for delta in entry.delta.tool_calls or ()]
    assert text_of(chunks) == ""
    assert [delta.id is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert {delta.index for delta in deltas} == {0}
    assert deltas[0].function.name == "get_weather"
    assert len(deltas) > 2, "arguments come as they are written"
    assert "".join(delta.function.arguments or "" for delta in deltas) == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_choice_of_auto_and_none(trained: openai.OpenAI) -> None:
    asked = {"messages": QUESTION, "tools": [WEATHER], "max_tokens": 40, "extra_body": {}}
    free = chat(trained, **asked).choices[0]
    (call,) = free.message.tool_calls
    assert (free.finish_reason, free.message.content) == ("tool_calls", None)
    assert (call.function.name, json.loads(call.function.arguments)["city"]) == ("get_weather", "Paris")
    chunks = list(chat(trained, **asked, stream=True))
    deltas = [delta for chunk in chunks for entry in chunk.choices for delta in entry.delta.tool_calls or ()]
    assert "".join(delta.function.arguments or "" for delta in deltas) == call.function.arguments
    assert text_of(chunks) == ""
    bound = chat(trained, **asked, tool_choice="none").choices[0]
    assert bound.message.tool_calls is None
    assert "<tool_call>" not in bound.message.content != ""


def test_results_of_tools_are_sent_back(oai: openai.OpenAI) -> None:
    asked = {"tools": [WEATHER], "parallel_tool_calls": False, "max_tokens": 200, "extra_body": {}}
    first = chat(oai, messages=QUESTION, tool_choice="required", **asked)
    message = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "clear", "degrees": 21}'}
        for call in message.tool_calls
    ]
    second = chat(oai, messages=[*QUESTION, message, *results], **{**asked, "max_tokens": 20})
    assert second.choices[0].finish_reason in ("stop", "length", "tool_calls")
    plain = [*QUESTION, message.model_dump(exclude_none=True), *results]
    again = chat(oai, messages=plain, **{**asked, "max_tokens": 1})
    assert again.usage.prompt_tokens == second.usage.prompt_tokens
    empty = [{**result, "content": ""} for result in results]
    without = chat(oai, messages=[*QUESTION, message, *empty], **{**asked, "max_tokens": 1})
    assert first.usage.prompt_tokens < without.usage.prompt_tokens < second.usage.prompt_tokens


def test_completions_of_text_and_tokens(oai: openai.OpenAI) -> None:
    tokens: Any = oai.post("/../tokenize", body={"prompt": "Once upon a time"}, cast_to=object)
    common: dict[str, Any] = {**ASKED}
    del common["messages"]
    words = tokens["tokens"]
    prompts: list[Any] = ["Once upon a time", words, ["Once upon a time", "Hello"], [words, [5, 6]]]
    found = [oai.completions.create(prompt=prompt, **common) for prompt in prompts]
    texts = [[choice.text for choice in completion.choices] for completion in found]
    assert texts[0] == texts[1] == texts[2][:1] == texts[3][:1]
    assert [len(entry) for entry in texts] == [1, 1, 2, 2]
    assert found[2].usage is not None
    assert found[2].usage.completion_tokens == 24
    stream = oai.completions.create(prompt=prompts[0], stream=True, stream_options={"include_usage": True}, **common)
    chunks = list(stream)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == texts[0][0]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == found[0].usage.total_tokens
    echoed = oai.completions.create(prompt=words, echo=True, **common)
    assert echoed.choices[0].text == "Once upon a time" + texts[0][0]


def test_completions_score_the_prompt(oai: openai.OpenAI) -> None:
    common: dict[str, Any] = {"model": "nano", "prompt": "Once upon a time", "temperature": 0, "logprobs": 2}
    choice = oai.completions.create(echo=True, max_tokens=4, extra_body={"ignore_eos": True}, **common).choices[0]
    scores = choice.logprobs
    assert scores is not None
    assert scores.tokens is not None
    assert scores.token_logprobs is not None
    assert scores.top_logprobs is not None
    assert "".join(scores.tokens) == choice.text
    assert scores.token_logprobs[0] is None
    assert all(score <= 0 for score in scores.token_logprobs[1:])
    for token, score, top in list(zip(scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True))[1:]:
        assert 2 <= len(top) <= 3
        assert top[token] == score
    (alone,) = oai.completions.create(max_tokens=4, extra_body={"ignore_eos": True}, **common).choices
    assert alone.logprobs is not None
    assert alone.logprobs.token_logprobs == scores.token_logprobs[-4:]
    (prompt,) = oai.completions.create(echo=True, max_tokens=0, **common).choices
    assert prompt.text == "Once upon a time"
    assert prompt.logprobs is not None
    assert prompt.logprobs.token_logprobs == scores.token_logprobs[:-4]
    ended = oai.completions.create(echo=True, max_tokens=1, logit_bias={str(eos_id(oai)): 100}, **common).choices[0]
    assert ended.logprobs is not None
    # lm-eval takes the last score for that of a written token, be it one that ends the answer.
    assert len(ended.logprobs.token_logprobs or ()) == len(prompt.logprobs.token_logprobs or ()) + 1


def test_models(oai: openai.OpenAI) -> None:
    (model,) = oai.models.list()
    assert (model.id, model.object, model.owned_by) == ("nano", "model", "selfdraft")
    assert oai.models.retrieve("nano") == model
    with pytest.raises(openai.NotFoundError) as missing:
        oai.models.retrieve("other")
    assert missing.value.code == "model_not_found"


def test_the_async_client(server: Running) -> None:
    async def ask() -> tuple[list[Any], Any]:
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http) as client:
            whole, stream = await asyncio.gather(
                client.chat.completions.create(**ASKED), client.chat.completions.create(**ASKED, stream=True)
            )
            return [chunk async for chunk in stream], whole

    chunks, whole = asyncio.run(ask())
    assert text_of(chunks) == whole.choices[0].message.content != ""


def test_bad_requests(oai: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as long:
        chat(oai, messages=[{"role": "user", "content": "word " * 5000}])
    assert long.value.code == "context_length_exceeded"
    assert "4096" in str(long.value)
    with pytest.raises(openai.BadRequestError) as cold:
        chat(oai, temperature=-1)
    assert cold.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as schema:
        chat(oai, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": 5}})
    assert schema.value.type == "invalid_request_error"


KEY = "a key that is long enough"


@pytest.fixture(scope="module")
def guarded(load_nano: Callable[[], LLM]) -> Iterator[Running]:
    with running(load_nano, strict_model=True, api_key=KEY) as found:
        yield found


def test_keys_and_names(guarded: Running) -> None:
    with openai_client(guarded, api_key="wrong") as client, pytest.raises(openai.AuthenticationError) as wrong:
        chat(client)
    assert wrong.value.code == "invalid_api_key"
    with openai_client(guarded, api_key=KEY) as client:
        assert chat(client).usage.completion_tokens == 12
        with pytest.raises(openai.NotFoundError) as missing:
            chat(client, model="gpt-5")
    assert missing.value.code == "model_not_found"


def test_a_full_queue(load_nano: Callable[[], LLM]) -> None:
    with running(load_nano, rows=1, queue=1) as server, openai_client(server) as client:
        first = chat(client, stream=True, max_tokens=3000)
        second = chat(client, stream=True, max_tokens=3000)
        with pytest.raises(openai.RateLimitError) as full:
            chat(client)
        assert int(full.value.response.headers["retry-after"]) >= 1
        assert full.value.code == "rate_limit_exceeded"
        first.close()
        second.close()
        assert server.idle()
        assert chat(client).usage.completion_tokens == 12


def test_a_stream_that_is_closed_frees_its_row(server: Running, oai: openai.OpenAI) -> None:
    with chat(oai, stream=True, max_tokens=3000) as stream:
        next(stream)
        assert within(5, lambda: server.service.figures["running"] == 1)
    assert server.idle(5)


def test_a_client_that_gives_up_frees_its_row(server: Running) -> None:
    with openai_client(server, timeout=0.5) as client, pytest.raises(openai.APITimeoutError):
        chat(client, max_tokens=3000)
    assert server.idle(5)
