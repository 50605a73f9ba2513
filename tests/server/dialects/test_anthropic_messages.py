"""Anthropic's messages: what a request becomes, and the exact events of an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from selfdraft.errors import InvalidRequest
from selfdraft.server.dialects.anthropic_messages import (
    CountRequest,
    MessagesRequest,
    MessageStream,
    collect,
    count_body,
    to_job,
)
from selfdraft.server.dialects.wire import read
from selfdraft.server.jobs import ChatJob, OutputFormat, ToolChoice
from selfdraft.text.reply.events import Content, Reasoning

from .support import ENVELOPE, answer, body, call, finished, parsed, written

HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "weather", "description": "d", "input_schema": {"type": "object", "properties": {}}}


def request(**fields: Any) -> MessagesRequest:
    return read(MessagesRequest, body({"model": "nano", "messages": HI, "max_tokens": 9, **fields}))


def job(**fields: Any) -> ChatJob:
    return to_job(request(**fields))


def user(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}]


def result(content: Any = None, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", **({} if content is None else {"content": content}), **fields}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}}


def test_a_conversation() -> None:
    made = job(
        system=[
            text("x-anthropic-billing-header: cc_version=1; cch=0a1b;"),
            text("You are an agent."),
            text("Be brief."),
        ],
        messages=[
            *user(text("<reminder>"), text("weather?")),
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    text("I look."),
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bonn"}},
                ],
            },
            *user(result([text("rain"), text("wind")]), text("and now?")),
        ],
        tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}],
    )
    function = {"name": "weather", "arguments": {"city": "Bonn"}}
    assert made.messages == [
        {"role": "system", "content": "You are an agent.\n\nBe brief."},
        {"role": "user", "content": "<reminder>\nweather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "rain\nwind"},
        {"role": "user", "content": "and now?"},
    ]
    assert made.tools == [
        {"type": "function", "function": {"name": "weather", "description": "d", "parameters": TOOL["input_schema"]}}
    ]
    assert not made.continue_final


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (result(), ""),
        (result("rain"), "rain"),
        (result([]), ""),
        (result("boom", is_error=True), "Error: boom"),
        (result([text("boom")], is_error=True), "Error: boom"),
        (result("fine", is_error=False), "fine"),
    ],
)
def test_tool_results(block: dict[str, Any], expected: str) -> None:
    assert job(messages=user(block)).messages[0] == {"role": "tool", "tool_call_id": "t1", "content": expected}


def test_a_tool_that_loads_later_is_hidden_until_the_clients_search_has_found_it() -> None:
    tools = [{**TOOL, "name": name, "defer_loading": True} for name in ("fetch", "post")]
    search = result([{"type": "tool_reference", "tool_name": "fetch"}])
    assert job(tools=[TOOL, *tools]).tools == job(tools=[TOOL]).tools
    found = job(tools=[TOOL, *tools], messages=user(search))
    assert [tool["function"]["name"] for tool in found.tools] == ["weather", "fetch"]
    assert found.messages[0]["content"] == "fetch can be called now."


def test_tools_that_a_conversation_adds_and_removes() -> None:
    """As Claude Code announces that it may."""
    tools = [{**TOOL, "name": "fetch", "defer_loading": True}, TOOL]
    added, removed = (
        {"type": kind, "tool": {"type": "tool_reference", "name": name}}
        for kind, name in [("tool_addition", "fetch"), ("tool_removal", "weather")]
    )
    made = job(tools=tools, messages=[*HI, {"role": "system", "content": [added, text("Note."), removed]}])
    assert [tool["function"]["name"] for tool in made.tools] == ["fetch"]
    expected = "fetch can be called now.\n\nNote.\n\nweather cannot be called any more."
    assert made.messages[-1] == {"role": "system", "content": expected}


def assistant(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    return [*HI, {"role": "assistant", "content": list(blocks)}, *HI]


def test_a_search_that_ran_elsewhere_stays_in_the_conversation() -> None:
    found = [
        {"type": "web_search_result", "title": t, "url": f"http://{t}", "encrypted_content": "E", "page_age": "1 day"}
        for t in ("a", "b")
    ]
    blocks = [
        text("I search."),
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "rain"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": found},
        {**text("It rains."), "citations": [{"type": "web_search_result_location", "url": "http://a"}]},
    ]
    function = {"name": "web_search", "arguments": {"query": "rain"}}
    call = {"id": "s1", "type": "function", "function": function}
    assert job(messages=assistant(*blocks)).messages[1:-1] == [
        {"role": "assistant", "content": "I search.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "s1", "content": "a\nhttp://a\nb\nhttp://b"},
        {"role": "assistant", "content": "It rains."},
    ]
    assert not job(messages=assistant(*blocks[:3])[:-1]).continue_final


PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0"}


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (
            {"type": "web_search_tool_result", "content": {"type": "..._error", "error_code": "unavailable"}},
            "unavailable",
        ),
        (
            {
                "type": "web_fetch_tool_result",
                "content": {
                    "type": "web_fetch_result",
                    "url": "http://a",
                    "content": {"type": "document", "title": "A", "source": {"type": "text", "data": "words"}},
                },
            },
            "http://a\nA\nwords",
        ),
        ({"type": "web_fetch_tool_result", "content": {"content": {"type": "document", "source": PDF}}}, ""),
        (
            {
                "type": "bash_code_execution_tool_result",
                "content": {"stdout": "out", "stderr": "err", "return_code": 1, "content": [{"file_id": "f"}]},
            },
            "out\nerr",
        ),
        ({"type": "code_execution_tool_result", "content": {"encrypted_stdout": "E", "stderr": ""}}, ""),
        (
            {
                "type": "tool_search_tool_result",
                "content": {"tool_references": [{"type": "tool_reference", "tool_name": "fetch"}]},
            },
            "fetch",
        ),
        ({"type": "mcp_tool_result", "content": [{"type": "text", "text": "done"}], "is_error": False}, "done"),
        ({"type": "advisor_tool_result", "content": {"type": "advisor_result", "text": "try"}}, "try"),
    ],
)
def test_results_of_tools_that_ran_elsewhere(block: dict[str, Any], expected: str) -> None:
    used = {"type": "mcp_tool_use", "id": "s", "name": "t", "server_name": "x", "input": {}}
    made = job(messages=assistant(used, {**block, "tool_use_id": "s"}))
    assert made.messages[2] == {"role": "tool", "tool_call_id": "s", "content": expected}


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"type": "redacted_thinking", "data": "E"}, None),
        ({"type": "thinking", "thinking": None, "signature": "s"}, None),
        ({"type": "container_upload", "file_id": "f"}, None),
        ({"type": "fallback", "to": {"model": "m"}}, None),
        ({"type": "compaction", "content": None, "encrypted_content": "E"}, None),
        ({"type": "compaction", "content": "We spoke of rain."}, "We spoke of rain."),
        ({"type": "of_next_year", "id": "x", "text": "words"}, "words"),
    ],
)
def test_blocks_of_another_backend(
    block: dict[str, Any], expected: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    made = job(messages=assistant(block, text("So.")))
    assert made.messages[1] == {"role": "assistant", "content": f"{expected or ''}So."}
    told = f"messages[1].content[0] of type {block['type']} is left out"
    assert (told in caplog.text) == (expected is None)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"type": "document", "source": {"type": "text", "data": "words"}}, "words"),
        (
            {
                "type": "document",
                "title": "T",
                "context": "C",
                "source": {"type": "content", "content": [text("words")]},
            },
            "T\nC\nwords",
        ),
        (
            {"type": "search_result", "title": "T", "source": "http://a", "content": [text("words")]},
            "T\nhttp://a\nwords",
        ),
    ],
)
def test_documents_are_read(block: dict[str, Any], expected: str) -> None:
    assert job(messages=user(block)).messages[0]["content"] == expected
    assert job(messages=user(result([block]))).messages[0]["content"] == expected


def test_tools_that_run_elsewhere_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Claude Code declares its web search so, in a request of its own: it gets an answer without one."""
    caplog.set_level("INFO")
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    assert job(tools=[search, TOOL]).tools == job(tools=[TOOL]).tools
    assert "tools[0] of type web_search_20250305 is left out" in caplog.text


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("x-anthropic-billing-header: cch=1;\nYou are", "You are"),
        ("You are\nx-anthropic-billing-header: cch=1;", "You are\nx-anthropic-billing-header: cch=1;"),
        ("x-anthropic-billing-header: cch=1;", None),
        ("", None),
        (None, None),
    ],
)
def test_the_billing_line_does_not_reach_the_prompt(system: str | None, expected: str | None) -> None:
    first = job(system=system).messages[0]
    assert (first["content"] if first["role"] == "system" else None) == expected


def test_a_final_assistant_message_is_continued() -> None:
    made = job(messages=[*HI, {"role": "assistant", "content": "Once"}])
    assert made.continue_final
    assert made.messages[-1] == {"role": "assistant", "content": "Once"}


@pytest.mark.parametrize(
    ("fields", "enabled", "variables"),
    [
        ({}, False, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, True, {"thinking_budget": 2048}),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, True, {"reasoning_effort": "high"}),
        ({"thinking": {"type": "disabled"}}, False, {}),
        ({"enable_thinking": True}, True, {}),
        ({"chat_template_kwargs": {"enable_thinking": None}}, None, {}),
    ],
)
def test_thinking(fields: dict[str, Any], enabled: bool | None, variables: dict[str, Any]) -> None:
    made = job(**fields)
    assert (made.enable_thinking, made.template_variables) == (enabled, variables)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ToolChoice("auto")),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "none"}, ToolChoice("none")),
        ({"type": "tool", "name": "weather"}, ToolChoice("required", "weather")),
    ],
)
def test_tool_choice(choice: dict[str, Any], expected: ToolChoice) -> None:
    made = job(tools=[TOOL], tool_choice={**choice, "disable_parallel_tool_use": True})
    assert made.tool_choice == expected
    assert not made.parallel_tool_calls


def test_a_grammar_as_in_the_other_dialects() -> None:
    assert job(response_format={"type": "regex", "regex": "a+"}).output == OutputFormat("regex", grammar="a+")


def test_sampling_and_output() -> None:
    made = job(
        stop_sequences=["A", "B"],
        top_k=5,
        depth=1,
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
    )
    assert (made.params.stop, made.params.top_k, made.params.depth) == (("A", "B"), 5, 1)
    assert made.params.max_tokens == 9
    assert made.output == OutputFormat("json_schema", schema={"type": "object"})


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": []}, "messages", "empty"),
        ({"messages": user(result(5))}, "messages", "content[0].content"),
        ({"messages": assistant(IMAGE)}, "messages", "messages[1].content[0] is an image, and images stand in"),
        ({"messages": user({"type": "document", "source": PDF})}, "messages", "'document'"),
        ({"messages": assistant({"type": "text", "text": 5})}, "messages", "content[0].text"),
        ({"messages": user({"type": "server_tool_use"})}, "messages", "'server_tool_use'"),
        ({"messages": user({"type": "tool_result"})}, "messages", "tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t"}]}]}, "messages", "name"),
        ({"max_tokens": 0}, "max_tokens", "0"),
        ({"max_tokens": None}, "max_tokens", "None"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking", "0"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice", "name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "none"),
        ({"tools": [{"name": "a", "input_schema": 5}]}, "tools", "tools[0].input_schema"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences", "17"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config", "xml"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        job(**fields)
    assert caught.value.param == param
    assert says in str(caught.value)


def test_counting_needs_no_max_tokens() -> None:
    wire = read(CountRequest, body({"model": "nano", "messages": HI, "tools": [TOOL]}))
    assert to_job(wire).messages == job().messages
    assert count_body(5) == {"input_tokens": 5}


def test_the_events_of_an_answer() -> None:
    events = answer(Reasoning("hm"), Content("So"), *call("weather", "{}"), reason="tool_calls")
    told = parsed(written(MessageStream(ENVELOPE, prompt_tokens=11), events))
    told = [(name, data) for name, data in told if name != "ping"]
    assert [name for name, _ in told] == [
        "message_start",
        *["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"],
        *["content_block_start", "content_block_delta", "content_block_stop"],
        *["content_block_start", "content_block_delta", "content_block_stop"],
        "message_delta",
        "message_stop",
    ]
    assert told[0][1]["message"]["usage"]["input_tokens"] == 11
    assert [data["delta"]["type"] for name, data in told if name == "content_block_delta"] == [
        "thinking_delta",
        "signature_delta",
        "text_delta",
        "input_json_delta",
    ]
    assert [data["index"] for name, data in told if name == "content_block_start"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("reason", "stop", "calls", "expected"),
    [
        ("stop", None, False, ("end_turn", None)),
        ("stop", "END", False, ("stop_sequence", "END")),
        ("tool_calls", None, True, ("tool_use", None)),
        ("length", None, True, ("max_tokens", None)),
        ("cancelled", None, False, ("max_tokens", None)),
    ],
)
def test_stop_reasons(reason: str, stop: str | None, calls: bool, expected: tuple[str, str | None]) -> None:
    events = answer(*(call("weather", "{}") if calls else []))[:-1]
    whole = collect([*events, finished(reason=reason, stop=stop)], request(), ENVELOPE)
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected


@pytest.mark.parametrize(
    ("text", "complete", "expected"),
    [
        ('{"a": 1, "city": "Bo', False, {"a": 1}),
        ('{"a": [1, 2', False, {"a": [1, 2]}),
        ("", False, {}),
        ('{"a": 01}', False, {}),
        ("[1]", False, {}),
        ('{"a": 1e999}', True, {"a": 1.7976931348623157e308}),
    ],
)
def test_the_input_is_an_object_whatever_came(text: str, complete: bool, expected: dict[str, Any]) -> None:
    events = answer(*call("weather", *([text] if text else []), complete=complete), reason="length")
    whole = collect(events, request(), ENVELOPE)
    assert whole["content"][0]["input"] == expected
    assert whole["stop_reason"] == "max_tokens"
    json.dumps(whole, allow_nan=False)
