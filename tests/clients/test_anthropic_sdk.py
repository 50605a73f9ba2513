"""Guards the Messages API as the official anthropic client sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import anthropic
import pytest
from anthropic.types import TextBlock, ThinkingBlock, ToolUseBlock

from selfdraft.llm import LLM
from tests.server.conftest import Running, running, within

from .conftest import anthropic_client

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
GREEDY = {"temperature": 0}  # the client has no parameter for it any more
ASKED: dict[str, Any] = {
    "model": "nano",
    "messages": HELLO,
    "max_tokens": 12,
    "extra_body": {**GREEDY, "ignore_eos": True},
}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["c", "f"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
CALLING: dict[str, Any] = {"model": "nano", "max_tokens": 200, "extra_body": GREEDY, "tools": [WEATHER]}


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(server) as found:
        yield found


@pytest.fixture(scope="module")
def trained(reference: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(reference) as found:
        yield found


def ask(client: anthropic.Anthropic, **given: Any) -> Any:
    return client.messages.create(**{**ASKED, **given})


def is_weather(given: object) -> bool:
    return isinstance(given, dict) and set(given) == {"city", "unit"} and given["unit"] in ("c", "f")


def total(usage: Any) -> int:
    """Tokens of a prompt, as Anthropic has it: those that were read, and those that were known."""
    known: int = usage.cache_read_input_tokens
    return usage.input_tokens + usage.cache_creation_input_tokens + known


def test_messages_streamed_and_whole(client: anthropic.Anthropic) -> None:
    whole = ask(client)
    (block,) = whole.content
    assert isinstance(block, TextBlock)
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 12)
    with client.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text != ""
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)
    events = list(ask(client, stream=True))
    assert [event.type for event in events[:2]] == ["message_start", "content_block_start"]
    assert [event.type for event in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[0].message.usage.input_tokens == total(whole.usage)
    assert events[-2].usage.output_tokens == 12


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    text = ask(client).content[0].text
    stop = text[5:8]
    stopped = ask(client, stop_sequences=[stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert stopped.content[0].text == text[: text.index(stop)]


def test_system_blocks_and_counts(client: anthropic.Anthropic) -> None:
    forms: list[Any] = [
        anthropic.omit,
        "Be brief.",
        [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        [{"type": "text", "text": "x-anthropic-billing-header: 12ab"}, {"type": "text", "text": "Be brief."}],
    ]
    counts = []
    for system in forms:
        counted = client.messages.count_tokens(model="nano", messages=HELLO, system=system, tools=[WEATHER])  # type: ignore[list-item]
        assert total(ask(client, system=system, tools=[WEATHER]).usage) == counted.input_tokens
        counts.append(counted.input_tokens)
    assert counts[0] < counts[1] == counts[2] == counts[3]
    assert client.messages.count_tokens(model="nano", messages=HELLO).input_tokens < counts[0]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_calls_and_their_results(client: anthropic.Anthropic, choice: dict[str, Any]) -> None:
    asked = {**CALLING, "messages": QUESTION, "tool_choice": {**choice, "disable_parallel_tool_use": True}}
    whole = client.messages.create(**asked)
    assert whole.stop_reason == "tool_use"
    (block,) = whole.content
    assert isinstance(block, ToolUseBlock)
    assert (block.name, is_weather(block.input)) == ("get_weather", True)
    with client.messages.stream(**asked) as stream:
        pieces = [event for event in stream if event.type == "input_json"]
        (streamed,) = stream.get_final_message().content
    assert len(pieces) > 2, "arguments come as they are written"
    assert isinstance(streamed, ToolUseBlock)
    assert streamed.input == pieces[-1].snapshot == block.input
    result = {
        "type": "tool_result",
        "tool_use_id": block.id,
        "content": [{"type": "text", "text": "clear, 21 degrees"}],
    }
    back = [*QUESTION, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(**{**CALLING, "messages": back, "max_tokens": 20})
    counted = client.messages.count_tokens(model="nano", messages=back, tools=[WEATHER])  # type: ignore[list-item]
    assert total(second.usage) == counted.input_tokens
    back[-1] = {"role": "user", "content": [{**result, "content": ""}]}
    without = client.messages.count_tokens(model="nano", messages=back, tools=[WEATHER])  # type: ignore[list-item]
    assert total(whole.usage) < without.input_tokens < counted.input_tokens


def test_free_choices(client: anthropic.Anthropic) -> None:
    auto, none, bare = (
        ask(client, messages=QUESTION, **given)
        for given in (
            {"tools": [WEATHER], "tool_choice": {"type": "auto"}},
            {"tools": [WEATHER], "tool_choice": {"type": "none"}},
            {},
        )
    )
    assert total(auto.usage) > total(none.usage) == total(bare.usage)
    assert none.content == bare.content


def test_thinking_is_signed_and_sent_back(trained: anthropic.Anthropic) -> None:
    asked = {"messages": HELLO, "max_tokens": 1100, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    with trained.messages.stream(**{**ASKED, **asked, "extra_body": GREEDY}) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert "thinking" in kinds
    assert kinds.index("signature") < kinds.index("content_block_stop")
    thought, *rest = message.content
    assert isinstance(thought, ThinkingBlock)
    assert thought.thinking
    assert thought.signature
    assert [block.type for block in rest] == ["text"]
    back = [*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": "Go on."}]
    second = ask(trained, **{**asked, "messages": back, "max_tokens": 1030, "extra_body": {**GREEDY, "max_tokens": 8}})
    assert second.usage.output_tokens <= 8
    assert isinstance(second.content[0], ThinkingBlock)
    assert second.usage.output_tokens_details.thinking_tokens > 0
    for kind in ("disabled", "between_tools"):
        plain = ask(trained, max_tokens=4, thinking={"type": kind}, extra_body=GREEDY)
        assert [block.type for block in plain.content] == ["text"]
        assert plain.usage.output_tokens_details.thinking_tokens == 0


def test_models(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.display_name, model.max_input_tokens) == ("nano", "model", "nano", 4096)
    assert model.created_at <= datetime.now(UTC)
    assert model.lifecycle == "active"
    assert client.models.retrieve("nano").id == "nano"
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("other")


def test_the_async_client(server: Running) -> None:
    async def stream() -> tuple[str, Any]:
        http = anthropic.DefaultAsyncHttpxClient(trust_env=False)
        async with (
            anthropic.AsyncAnthropic(base_url=server.url, api_key="none", http_client=http) as client,
            client.messages.stream(**ASKED) as stream,
        ):
            return "".join([text async for text in stream.text_stream]), await stream.get_final_message()

    text, message = asyncio.run(stream())
    assert text == message.content[0].text != ""


def test_bad_requests(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long") as long:
        ask(client, messages=[{"role": "user", "content": "word " * 5000}])
    assert long.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        ask(client, extra_body={"temperature": -1})
    with pytest.raises(anthropic.BadRequestError, match="get_time"):
        ask(client, tools=[WEATHER], tool_choice={"type": "tool", "name": "get_time"})


KEY = "a key that is long enough"


def test_keys_and_names(load_nano: Callable[[], LLM]) -> None:
    with running(load_nano, strict_model=True, api_key=KEY) as server:
        with anthropic_client(server, api_key="wrong") as client, pytest.raises(anthropic.AuthenticationError):
            ask(client)
        with anthropic_client(server, api_key=None, auth_token=KEY) as client:
            assert ask(client).usage.output_tokens == 12
        with anthropic_client(server, api_key=KEY) as client, pytest.raises(anthropic.NotFoundError) as missing:
            ask(client, model="claude-opus-4")
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


def test_a_full_queue(load_nano: Callable[[], LLM]) -> None:
    with running(load_nano, rows=1, queue=0) as server, anthropic_client(server) as client:
        with ask(client, stream=True, max_tokens=3000), pytest.raises(anthropic.RateLimitError) as full:
            ask(client)
        assert int(full.value.response.headers["retry-after"]) >= 1


def test_a_stream_that_is_closed_frees_its_row(server: Running, client: anthropic.Anthropic) -> None:
    with client.messages.stream(**{**ASKED, "max_tokens": 3000}) as stream:
        next(iter(stream.text_stream))
        assert within(5, lambda: server.service.figures["running"] == 1)
    assert server.idle(5)
