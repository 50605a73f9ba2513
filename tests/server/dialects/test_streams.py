"""A stream, put together by the official SDK, is the answer that `collect` makes of the same events."""

from __future__ import annotations

from typing import Any

import anthropic.types
import openai.types.chat
import openai.types.completion
import openai.types.responses
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from pydantic import TypeAdapter

from selfdraft.server.dialects import anthropic_messages, openai_chat, openai_completions, openai_responses
from selfdraft.server.dialects.openai_completions import Echo
from selfdraft.server.dialects.wire import read
from selfdraft.server.jobs import JobEvent

from .support import ENVELOPE, READER, answer, body, call, finished, parsed, score, streams, texts, written

CHAT = {"model": "nano", "messages": [{"role": "user", "content": "hi"}]}
RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(openai.types.responses.ResponseStreamEvent)
MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(anthropic.types.RawMessageStreamEvent)


def without(value: Any, *names: str) -> Any:
    """JSON without nulls and without fields of these names."""
    if isinstance(value, dict):
        return {k: without(v, *names) for k, v in value.items() if k not in names and v is not None}
    return [without(entry, *names) for entry in value] if isinstance(value, list) else value


@settings(deadline=None, max_examples=15)
@given(streams(scored=True, n=2))
def test_chat(events: list[JobEvent]) -> None:
    wire = {"n": 2, "stream": True, "logprobs": True, "stream_options": {"include_usage": True}}
    request = read(openai_chat.ChatRequest, body({**CHAT, **wire}))
    whole = openai_chat.collect(events, request, ENVELOPE)
    openai.types.chat.ChatCompletion.model_validate(whole)

    blocks = written(openai_chat.ChatStream(request, ENVELOPE), events)
    *chunks, (_, end) = parsed(blocks)
    assert end == "[DONE]"
    for _, chunk in chunks:
        openai.types.chat.ChatCompletionChunk.model_validate(chunk)
    assert chunks[-1][1]["choices"] == []

    state = ChatCompletionStreamState()
    for chunk in READER.hand(blocks).openai.chat.completions.create(**CHAT, **wire):  # type: ignore[call-overload]
        state.handle_chunk(chunk)
    assembled = state.current_completion_snapshot.to_dict(mode="json")
    assert assembled["usage"] == whole["usage"]
    for left, right in zip(assembled["choices"], whole["choices"], strict=True):  # type: ignore[call-overload]
        message, expected = left["message"], right["message"]
        assert (message.get("content") or "") == (expected["content"] or "")
        assert message.get("reasoning_content", "") == expected.get("reasoning_content", "")
        assert without(message.get("tool_calls"), "index", "parsed_arguments") == expected.get("tool_calls")
        assert left["finish_reason"] == right["finish_reason"]
        scores = (left.get("logprobs") or {}).get("content") or []
        assert scores == right["logprobs"]["content"]


@settings(deadline=None, max_examples=15)
@given(streams(scored=True, n=2), texts, st.booleans())
def test_completions(events: list[JobEvent], prompt: str, echoed: bool) -> None:
    wire = {"prompt": prompt, "n": 2, "logprobs": 1, "echo": echoed}
    request = read(openai_completions.CompletionRequest, body({"model": "nano", **wire, "stream": True}))
    echoes = [Echo(i, prompt, [prompt, "x"], [None, score("x")]) for i in range(2 if echoed else 0)]
    whole = openai_completions.collect([*echoes, *events], request, ENVELOPE)
    blocks = written(openai_completions.CompletionStream(request, ENVELOPE), [*echoes, *events])
    if not echoed:  # the first token of a prompt has no score: null in the API, and no such thing in the SDK's types
        openai.types.completion.Completion.model_validate(whole)

    scores = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    joined: list[dict[str, Any]] = [{"text": "", "logprobs": {name: [] for name in scores}} for _ in range(2)]
    for chunk in READER.hand(blocks).openai.completions.create(model="nano", **wire, stream=True):  # type: ignore[call-overload]
        (choice,) = chunk.choices
        joined[choice.index]["text"] += choice.text
        for name, values in (choice.logprobs.to_dict() if choice.logprobs else {}).items():
            joined[choice.index]["logprobs"][name] += values
        if choice.finish_reason:
            joined[choice.index]["finish_reason"] = choice.finish_reason
    for choice in whole["choices"]:
        assert joined[choice["index"]] == {name: choice[name] for name in ("text", "logprobs", "finish_reason")}


@settings(deadline=None, max_examples=15)
@given(streams(scored=True))
def test_responses(events: list[JobEvent]) -> None:
    wire = {"model": "nano", "input": "hi", "top_logprobs": 1}
    request = read(openai_responses.ResponsesRequest, body(wire))
    whole = openai_responses.collect(events, request, ENVELOPE)
    openai.types.responses.Response.model_validate(whole)

    blocks = written(openai_responses.ResponseStream(request, ENVELOPE), events)
    for number, (name, event) in enumerate(parsed(blocks)):
        RESPONSE_EVENT.validate_python(event)
        assert event["type"] == name
        assert event["sequence_number"] == number

    seen = []
    with READER.hand(blocks).openai.responses.stream(model="nano", input="hi") as stream:
        for event in stream:
            seen.append(event)
        last = seen[-1].response  # type: ignore[union-attr]
    dropped = ("parsed", "parsed_arguments")
    assert without(last.to_dict(mode="json"), *dropped) == without(whole, *dropped)
    # What the deltas say is what the items hold.
    for item, index in [(item, index) for index, item in enumerate(whole["output"])]:
        deltas = "".join(e["delta"] for _, e in parsed(blocks) if "delta" in e and e["output_index"] == index)
        assert deltas == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


@settings(deadline=None, max_examples=15)
@given(streams())
def test_anthropic(events: list[JobEvent]) -> None:
    request = read(anthropic_messages.MessagesRequest, body({**CHAT, "max_tokens": 9}))
    whole = anthropic_messages.collect(events, request, ENVELOPE)
    anthropic.types.Message.model_validate(whole)

    blocks = written(anthropic_messages.MessageStream(ENVELOPE, prompt_tokens=11), events)
    for name, event in parsed(blocks):
        assert event["type"] == name
        if name != "ping":
            MESSAGE_EVENT.validate_python(event)

    with READER.hand(blocks).anthropic.messages.stream(**CHAT, max_tokens=9) as stream:  # type: ignore[arg-type]
        assembled = stream.get_final_message().to_dict(mode="json")
    assert without(assembled, "parsed_output", "timings") == without(whole, "timings")


def test_each_call_has_an_id_of_its_own() -> None:
    events = answer(*call("a", "{}"), *call("b", "{}", index=1), reason="tool_calls")
    calls = openai_chat.collect(events, read(openai_chat.ChatRequest, body(CHAT)), ENVELOPE)["choices"][0]["message"]
    assert [call["function"]["name"] for call in calls["tool_calls"]] == ["a", "b"]
    assert len({call["id"] for call in calls["tool_calls"]}) == 2


def test_an_answer_without_events_is_an_answer() -> None:
    request = read(openai_chat.ChatRequest, body(CHAT))
    whole = openai_chat.collect([finished()], request, ENVELOPE)
    assert whole["choices"][0]["message"]["content"] == ""
