"""Guards the Responses API as the official openai client sees it."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall

from .test_openai_sdk import Person, is_weather

ASKED: dict[str, Any] = {
    "model": "nano",
    "input": "Hello",
    "max_output_tokens": 12,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["c", "f"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALLING: dict[str, Any] = {
    "model": "nano",
    "temperature": 0,
    "max_output_tokens": 200,
    "tools": [WEATHER],
    "tool_choice": {"type": "function", "name": "get_weather"},
    "parallel_tool_calls": False,
}


def respond(client: openai.OpenAI, **given: Any) -> Any:
    return client.responses.create(**{**ASKED, **given})


def test_whole_and_streamed_responses_are_equal(oai: openai.OpenAI) -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = respond(oai, **asked)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == 12
    assert whole.output_text
    assert whole.timings["cycles"] > 0
    (message,) = whole.output
    assert len(message.content[0].logprobs) == 12
    events = list(respond(oai, stream=True, **asked))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text
    assert [score.token for event in deltas for score in event.logprobs] == [
        score.token for score in message.content[0].logprobs
    ]
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text
    assert last.response.usage == whole.usage


def test_the_stream_helper_puts_the_same_response_together(trained: openai.OpenAI) -> None:
    asked = {**ASKED, "max_output_tokens": 60, "extra_body": {}}
    with trained.responses.stream(**asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.status == "completed"
    assert text == final.output_text == respond(trained, **asked).output_text != ""


def test_calls_and_their_results(oai: openai.OpenAI) -> None:
    whole = oai.responses.create(input=QUESTION, **CALLING)
    (call,) = whole.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert call.name == "get_weather"
    assert is_weather(call.arguments)
    with oai.responses.stream(input=QUESTION, **CALLING) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (streamed,) = stream.get_final_response().output
    assert len(deltas) > 1, "arguments come as they are written"
    assert isinstance(streamed, ResponseFunctionToolCall)
    assert "".join(deltas) == streamed.arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"sky": "clear"}'}
    asked = {**CALLING, "tool_choice": "none", "max_output_tokens": 20}
    second = oai.responses.create(input=[*QUESTION, *whole.output, result], **asked)
    assert second.output_text
    without = oai.responses.create(input=[*QUESTION, *whole.output, {**result, "output": ""}], **asked)
    assert second.usage is not None
    assert without.usage is not None
    assert second.usage.input_tokens > without.usage.input_tokens


def test_reasoning_is_an_item_of_its_own(trained: openai.OpenAI) -> None:
    asked = {"max_output_tokens": 40, "reasoning": {"effort": "medium"}, "extra_body": {}}
    first = respond(trained, **asked)
    assert first.output[0].type == "reasoning"
    assert first.output[0].content[0].text
    assert first.usage.output_tokens_details.reasoning_tokens > 0
    hello, more = {"role": "user", "content": "Hello"}, {"role": "user", "content": "Give me three fruits."}
    again = respond(trained, **{**asked, "input": [hello, *first.output, more], "stream": True})
    kinds = {event.type for event in again}
    assert "response.reasoning_text.delta" in kinds


def test_structured_text(trained: openai.OpenAI) -> None:
    parsed = trained.responses.parse(
        model="reference",
        input="Describe a person as JSON.",
        text_format=Person,
        max_output_tokens=200,
        temperature=0,
    )
    assert isinstance(parsed.output_parsed, Person)
    assert Person.model_validate_json(parsed.output_text) == parsed.output_parsed


def test_state_is_refused(oai: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        respond(oai, previous_response_id="resp_123")
    assert refused.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        oai.responses.retrieve("resp_123")
