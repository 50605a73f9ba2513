"""OpenAI's Responses API: the conversation as Codex sends it, and what a stateless server refuses."""

from __future__ import annotations

from typing import Any

import pytest

from selfdraft.errors import InvalidRequest
from selfdraft.server.dialects.openai_responses import ResponsesRequest, ResponseStream, collect, to_job
from selfdraft.server.dialects.wire import read
from selfdraft.server.jobs import ChatJob, Choice, OutputFormat, ToolChoice
from selfdraft.text.reply.events import Content, Reasoning

from .support import ENVELOPE, answer, body, call, finished, parsed, score, written


def request(**fields: Any) -> ResponsesRequest:
    return read(ResponsesRequest, body({"model": "nano", "input": "hi", **fields}))


def job(**fields: Any) -> ChatJob:
    return to_job(request(**fields))


def message(role: str, *texts: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}


SHELL = {"type": "function", "name": "shell", "description": "run", "strict": False, "parameters": {"type": "object"}}
MCP = {"type": "namespace", "name": "mcp__files", "description": "d", "tools": [{"type": "function", "name": "read"}]}


def test_a_final_assistant_message_is_continued() -> None:
    begun = [message("user", "count"), message("assistant", "one, two", kind="output_text")]
    assert job(input=begun).continue_final
    assert not job(input=begun[:1]).continue_final


def test_scores_of_text_that_is_held_back_come_with_the_next() -> None:
    asked = request(include=["message.output_text.logprobs"])
    events = [
        Choice(0, [Reasoning("hm")], [score("hm")]),
        Choice(0, [], [score("\n")]),
        Choice(0, [Content("\nhi")], [score("hi")]),
        Choice(0, [], [score("!")]),
        Choice(0, [Content("!")], []),
        finished(),
    ]
    (_, written_text) = collect(events, asked, ENVELOPE)["output"]
    assert [each["token"] for each in written_text["content"][0]["logprobs"]] == ["\n", "hi", "!"]


# What Codex sends, in kind: every form of item it has.
CODEX = {
    "instructions": "You are a coding agent.",
    "input": [
        message("developer", "Sandbox: read-only."),
        message("user", "<environment>", "</environment>"),
        {"type": "message", "role": "user", "content": "list the files"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "ls"}]},
        message("assistant", "I look.", kind="output_text"),
        {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls"]}', "call_id": "c1"},
        {"type": "function_call", "name": "read", "namespace": "mcp__files", "arguments": "{}", "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "README.md"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "text"}]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "reasoning", "summary": [], "encrypted_content": "opaque"},
    ],
    "tools": [SHELL, MCP, {"type": "web_search"}, {"type": "custom", "name": "apply_patch"}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "text": {"verbosity": "low"},
    "client_metadata": {"x": "y"},
}


def test_what_codex_sends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    made = job(**CODEX)
    assert [record.getMessage().partition(" is ")[0] for record in caplog.records] == [
        "tools[2] of type web_search",
        "tools[3] of type custom",
    ]
    shell, read_ = {"name": "shell", "arguments": {"command": ["ls"]}}, {"name": "mcp__files__read", "arguments": {}}
    assert made.messages == [
        {"role": "system", "content": "You are a coding agent."},
        {"role": "system", "content": "Sandbox: read-only."},
        {"role": "user", "content": "<environment>\n</environment>"},
        {"role": "user", "content": "list the files"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "ls",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": shell},
                {"id": "c2", "type": "function", "function": read_},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "README.md"},
        {"role": "tool", "tool_call_id": "c2", "content": "text"},
    ]
    assert [tool["function"]["name"] for tool in made.tools] == ["shell", "mcp__files__read"]
    assert made.tool_choice == ToolChoice("auto")
    assert not made.parallel_tool_calls
    assert made.enable_thinking is True
    assert made.template_variables == {"reasoning_effort": "medium"}
    assert made.params.logprobs is None
    assert not made.continue_final


def test_a_tool_in_a_namespace_is_called_by_both_names() -> None:
    whole = collect(answer(*call("mcp__files__read", "{}"), reason="tool_calls"), request(**CODEX), ENVELOPE)
    (item,) = whole["output"]
    assert (item["namespace"], item["name"]) == ("mcp__files", "read")


def test_an_answer_can_be_sent_back() -> None:
    wire = request(**CODEX)
    events = answer(Reasoning("think"), Content("done"), *call("shell", '{"command":["ls"]}'), reason="tool_calls")
    output = collect(events, wire, ENVELOPE)["output"]
    made = job(**{**CODEX, "input": [message("user", "go"), *output]})
    assert made.messages[-1] == {
        "role": "assistant",
        "content": "done",
        "reasoning_content": "think",
        "tool_calls": [
            {
                "id": output[2]["call_id"],
                "type": "function",
                "function": {"name": "shell", "arguments": {"command": ["ls"]}},
            }
        ],
    }


def test_output_formats_and_scores() -> None:
    format = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    made = job(text={"format": format}, include=["message.output_text.logprobs"], max_output_tokens=7)
    assert made.output == OutputFormat("json_schema", schema={"type": "object"})
    assert (made.params.logprobs, made.params.max_tokens) == (0, 7)
    assert job(text={"format": {"type": "text"}}).output is None
    assert job(top_logprobs=2).params.logprobs == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"input": [message("user", "x", kind="input_image")]}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": 5}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": 5, "call_id": "c"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input"),
        ({"input": [{"type": "reasoning", "summary": [{"type": "summary_text"}]}]}, "input"),
        ({"input": [message("user", "x")] * 2049}, "input"),
        ({"input": []}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        job(**fields)
    assert caught.value.param == param


def test_the_events_of_an_answer() -> None:
    events = answer(Reasoning("hm"), Content("So"), *call("shell", "{}"), reason="tool_calls")
    names = [name for name, _ in parsed(written(ResponseStream(request(tools=[SHELL]), ENVELOPE), events))]
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    whole = collect(answer(Content("So"), reason="length"), request(), ENVELOPE)
    assert whole["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["output"][0]["status"] == "incomplete"
    assert collect([finished(reason="cancelled")], request(), ENVELOPE)["incomplete_details"] is None


def test_a_call_that_is_cut_off_is_an_incomplete_item() -> None:
    events = answer(*call("f", "{}"), *call("shell", '{"command": ["l', index=1, complete=False), reason="length")
    whole = collect(events, request(tools=[SHELL]), ENVELOPE)
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in whole["output"]] == ["completed", "incomplete"]
    assert whole["output"][1]["arguments"] == '{"command": ["l'
    told = parsed(written(ResponseStream(request(tools=[SHELL]), ENVELOPE), events))
    assert told[-1][1]["response"] == whole
    assert told[-1][0] == "response.incomplete"
