"""OpenAI's chat completions: what a request becomes, and the exact chunks of an answer."""

from __future__ import annotations

from typing import Any

import pytest

from selfdraft.errors import InvalidRequest
from selfdraft.params import SamplingParams
from selfdraft.server.dialects.limits import RequestTooLarge
from selfdraft.server.dialects.openai_chat import ChatRequest, ChatStream, collect, to_job
from selfdraft.server.dialects.wire import read
from selfdraft.server.jobs import ChatJob, Choice, OutputFormat, ToolChoice
from selfdraft.text.reply.events import Content, Reasoning

from .support import ENVELOPE, TIMINGS, answer, body, call, finished, parsed, score, written

HI = [{"role": "user", "content": "hi"}]
NAMED = {"function": {"name": "weather"}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def job(**fields: Any) -> ChatJob:
    return to_job(request(**fields))


def request(**fields: Any) -> ChatRequest:
    return read(ChatRequest, body({"model": "nano", "messages": HI, **fields}))


def test_sampling_arrives_under_our_names() -> None:
    made = job(
        temperature=0,
        top_p=0.9,
        top_k=20,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        logit_bias={"5": -100, "6": 2.5},
        seed=-3,
        stop="END",
        depth=2,
        ignore_eos=True,
        min_tokens=4,
        max_tokens=50,
        max_completion_tokens=40,
        logprobs=True,
        top_logprobs=3,
        n=2,
        unknown_field={"ignored": True},
    )
    assert made.n == 2
    assert made.params == SamplingParams(
        temperature=0,
        top_p=0.9,
        top_k=20,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        logit_bias={5: -100, 6: 2.5},
        seed=-3,
        stop=("END",),
        depth=2,
        ignore_eos=True,
        min_tokens=4,
        max_tokens=40,
        logprobs=3,
    )


def test_null_is_the_default_everywhere() -> None:
    names = set(ChatRequest.model_fields) - {"model", "messages"}
    assert job(**dict.fromkeys(names)) == job()
    assert job().params == SamplingParams()


def test_instructions_in_mid_conversation_stay_where_they_are() -> None:
    """So that what comes before them need not be read again; the template says whether it takes them there."""
    late = [*HI, {"role": "assistant", "content": "hey"}, {"role": "developer", "content": "b"}, *HI]
    made = job(messages=[{"role": "system", "content": "a"}, *late])
    assert [message["role"] for message in made.messages] == ["system", "user", "assistant", "system", "user"]
    assert job(messages=late).messages[2] == {"role": "system", "content": "b"}


def test_messages() -> None:
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "system", "content": [{"type": "text", "text": "and "}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": [{"type": "text", "text": "wea"}, {"type": "text", "text": "ther?"}], "name": "x"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}},
                {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}},
                {"id": "c3", "type": "function", "function": {"name": "weather", "arguments": ""}},
                {"id": "c4", "type": "function", "function": {"name": "weather", "arguments": '{"a": 1, "city": "R'}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
    ]
    made = job(messages=messages)
    calls = made.messages[3]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [{"city": "Bonn"}, {"city": "Rome"}, {}, {"a": 1}]
    assert [call["id"] for call in calls] == ["c1", "c2", "c3", "c4"]
    assert [{k: v for k, v in message.items() if k != "tool_calls"} for message in made.messages] == [
        {"role": "system", "content": "be kind"},
        {"role": "system", "content": "and brief"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    assert not made.continue_final


def test_a_final_assistant_message_is_continued() -> None:
    assert job(messages=[*HI, {"role": "assistant", "content": "Once"}]).continue_final
    called = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    assert not job(messages=[*HI, {"role": "assistant", "tool_calls": [called]}]).continue_final


@pytest.mark.parametrize(
    ("fields", "enabled", "variables"),
    [
        ({}, None, {}),
        ({"reasoning_effort": "none"}, False, {"reasoning_effort": "none"}),
        ({"reasoning_effort": "low"}, True, {"reasoning_effort": "low"}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            False,
            {"reasoning_effort": "low"},
        ),
        ({"chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": True}, True, {}),
        ({"chat_template_kwargs": {"thinking_budget": 5}}, None, {"thinking_budget": 5}),
    ],
)
def test_thinking(fields: dict[str, Any], enabled: bool | None, variables: dict[str, Any]) -> None:
    made = job(**fields)
    assert (made.enable_thinking, made.template_variables) == (enabled, variables)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "weather"}}, ToolChoice("required", "weather")),
        ({"type": "function", "name": "weather"}, ToolChoice("required", "weather")),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"type": "function", **NAMED}]}},
            ToolChoice("required"),
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"name": "weather"}]}, ToolChoice()),
    ],
)
def test_tool_choice(choice: Any, expected: ToolChoice) -> None:
    made = job(tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)
    assert made.tool_choice == expected
    assert made.tools == [WEATHER]
    assert not made.parallel_tool_calls


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, OutputFormat("json_object")),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}},
            OutputFormat("json_schema", schema={"type": "object"}),
        ),
        ({"type": "grammar", "grammar": 'start: "a"'}, OutputFormat("grammar", grammar='start: "a"')),
        ({"type": "regex", "regex": "a+"}, OutputFormat("regex", grammar="a+")),
    ],
)
def test_response_format(given: Any, expected: OutputFormat | None) -> None:
    assert job(response_format=given).output == expected


def test_of_the_declared_tools_only_the_allowed_ones_are_shown() -> None:
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", **NAMED}]}}
    assert job(tools=[other, WEATHER], tool_choice=choice).tools == [WEATHER]


@pytest.mark.parametrize("tools", [["x"], [{"name": ["weather"]}], [{}], [None], [{"function": 3}], [{"name": "x"}]])
def test_an_allowed_tool_that_is_none_is_refused(tools: list[Any]) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}
    with pytest.raises(InvalidRequest, match="tools does not declare"):
        job(tools=[WEATHER], tool_choice=choice)


@pytest.mark.parametrize("inner", [None, 3, [], {}, {"mode": "always"}, {"mode": ["auto"]}])
def test_allowed_tools_need_a_mode(inner: Any) -> None:
    with pytest.raises(InvalidRequest, match="of mode auto or required"):
        job(tools=[WEATHER], tool_choice={"type": "allowed_tools", "allowed_tools": inner})


def deep(levels: int) -> Any:
    schema: Any = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": []}, "messages", "empty"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", "messages[0].content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages", "wizard"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [7]}]}, "messages", "messages[0].content[0]"),
        ({"temperature": "hot"}, "temperature", "hot"),
        ({"temperature": -1}, "temperature", "-1"),
        ({"temperature": 1e999}, None, "JSON"),
        ({"top_p": 1.5}, "top_p", "1.5"),
        ({"n": 9}, "n", "9"),
        ({"n": True}, "n", "True"),
        ({"depth": -1}, "depth", "-1"),
        ({"depth": "deep"}, "depth", "deep"),
        ({"max_tokens": 0}, "max_tokens", "0"),
        ({"seed": 2**64}, "seed", str(2**64)),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0] is of type 'web_search', and tools of a chat are"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0] has no function"),
        ({"tools": [WEATHER], "functions": []}, "functions", "send one of them"),
        ({"functions": [{"name": "a b"}]}, "functions", "functions[0].name"),
        ({"function_call": {"name": "weather"}}, "tool_choice", "tools declares none"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "messages", "messages[0].tool_calls[0]"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21"),
        ({"logit_bias": {"the": 1}}, "logit_bias", "the"),
        ({"logit_bias": {"3": 101}}, "logit_bias", "101"),
        ({"stop": ["a", ""]}, "stop", "''"),
        ({"stop": ["a"] * 17}, "stop", "17"),
        ({"tools": [WEATHER] * 257}, "tools", "257"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "a b"),
        ({"tools": [{"type": "function", "function": {"name": "a" * 129}}]}, "tools", "129"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": deep(65)}}]}, "tools", "64"),
        ({"messages": HI * 2049}, "messages", "2049"),
        ({"tool_choice": "required"}, "tool_choice", "none"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice", "'b'"),
        ({"tool_choice": "sometimes"}, "tool_choice", "sometimes"),
        ({"response_format": {"type": "xml"}}, "response_format", "xml"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": deep(65)}}}, "response_format", "64"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs", "1"),
    ],
)
def test_what_is_refused_names_field_and_value(fields: dict[str, Any], param: str | None, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        job(**fields)
    assert caught.value.param == param
    assert says in str(caught.value)
    assert isinstance(caught.value, RequestTooLarge) == (says in ("17", "257", "129", "64", "2049"))


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{", b'{"model": NaN}', b"\xff", b'"\\ud800"', b"[" * 100_000, b"9" * 10_000]
)
def test_bodies_that_are_no_json_object(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read(ChatRequest, raw)


def test_a_body_is_bounded_in_depth() -> None:
    with pytest.raises(RequestTooLarge, match="100"):
        request(metadata=deep(110))


def test_the_chunks_of_an_answer() -> None:
    events = answer(Reasoning("hm"), Content("So"), *call("weather", '{"city"', ':"Bonn"}'), reason="tool_calls")
    blocks = written(ChatStream(request(stream=True), ENVELOPE), events)
    chunks = [chunk for _, chunk in parsed(blocks)[:-1]]
    function = {"name": "weather", "arguments": ""}
    call_id = chunks[3]["choices"][0]["delta"]["tool_calls"][0]["id"]
    assert call_id.startswith("call_")
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "So"},
        {"tool_calls": [{"index": 0, "id": call_id, "type": "function", "function": function}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ':"Bonn"}'}}]},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 6 + ["tool_calls"]
    assert chunks[-1]["timings"]["tokens_per_cycle"] == TIMINGS.tokens_per_cycle
    assert "usage" not in chunks[-1]


def test_usage_comes_last_and_alone() -> None:
    wire = request(stream=True, n=2, stream_options={"include_usage": True})
    *chunks, last, end = [data for _, data in parsed(written(ChatStream(wire, ENVELOPE), [finished(0), finished(1)]))]
    assert end == "[DONE]"
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 11,  # two answers, one prompt
        "completion_tokens": 10,
        "total_tokens": 21,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 4},
    }
    assert all(chunk["usage"] is None for chunk in chunks)


def test_scores_of_text_that_is_held_back_are_told() -> None:
    stream = ChatStream(request(logprobs=True, top_logprobs=1), ENVELOPE)
    ((_, chunk),) = parsed(stream.event(Choice(0, [], [score("é")])))
    (entry,) = chunk["choices"][0]["logprobs"]["content"]
    assert entry["bytes"] == [0xC3, 0xA9]
    assert entry["top_logprobs"][1]["logprob"] == -9999.0  # JSON has no infinity


def test_timings_with_every_piece() -> None:
    stream = ChatStream(request(timings_per_token=True), ENVELOPE)
    ((_, chunk),) = parsed(stream.event(Choice(0, [Content("a")], timings=TIMINGS)))
    assert chunk["timings"]["cycles"] == TIMINGS.cycles


@pytest.mark.parametrize(
    ("reason", "expected"), [("stop", "tool_calls"), ("length", "length"), ("cancelled", "length")]
)
def test_finish_reasons(reason: str, expected: str) -> None:
    choice = collect(answer(*call("weather", "{}"), reason=reason), request(), ENVELOPE)["choices"][0]
    assert choice["finish_reason"] == expected
    assert choice["message"]["content"] is None


def test_a_call_that_is_cut_off_has_the_arguments_that_came() -> None:
    events = answer(*call("weather", '{"city": ', '"Bo', complete=False), reason="length")
    choice = collect(events, request(), ENVELOPE)["choices"][0]
    chunks = [chunk["choices"][0] for _, chunk in parsed(written(ChatStream(request(), ENVELOPE), events))[:-1]]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Bo'
    assert choice["finish_reason"] == chunks[-1]["finish_reason"] == "length"
    pieces = [call["function"].get("arguments") for c in chunks for call in c["delta"].get("tool_calls", ())]
    assert "".join(pieces) == '{"city": "Bo'


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('{"city": "Bonn"}', {"city": "Bonn"}),
        ({"city": "Bonn"}, {"city": "Bonn"}),
        (None, {}),
        (" ", {}),
        ('{"a": 1, "city": "Bo', {"a": 1}),
        ('{"city": NaN}', {"arguments": '{"city": NaN}'}),
        ("Bonn", {"arguments": "Bonn"}),
        ('["Bonn"]', {"arguments": ["Bonn"]}),
    ],
)
def test_any_arguments_that_a_model_wrote_come_back(given: Any, expected: dict[str, Any]) -> None:
    past = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": given}}
    made = job(messages=[*HI, {"role": "assistant", "tool_calls": [past]}, {"role": "tool", "content": "x"}])
    assert made.messages[1]["tool_calls"][0]["function"]["arguments"] == expected


def test_the_old_form_of_calls_and_results() -> None:
    messages = [
        *HI,
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"city": "Bonn"}'}},
        {"role": "function", "name": "weather", "content": "rain"},
    ]
    made = job(messages=messages, functions=[WEATHER["function"]], function_call={"name": "weather"})
    function = {"name": "weather", "arguments": {"city": "Bonn"}}
    assert made.messages[1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "weather", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "weather"},
    ]
    assert made.tools == [WEATHER]
    assert made.tool_choice == ToolChoice("required", "weather")
    assert not made.parallel_tool_calls
    assert job(functions=[WEATHER["function"]], function_call="none").tool_choice == ToolChoice("none")
    assert job(messages=[*HI, {"role": "function", "content": "x"}]).messages[1]["role"] == "tool"


def test_custom_tools_are_left_out_and_their_calls_stay(caplog: pytest.LogCaptureFixture) -> None:
    """As in responses; no other tool is ever left out silently."""
    caplog.set_level("INFO")
    custom = {"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}}
    past = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    allowed = {"mode": "auto", "tools": [custom, {"type": "function", **NAMED}]}
    made = job(
        messages=[*HI, {"role": "assistant", "tool_calls": [past]}, {"role": "tool", "tool_call_id": "c"}],
        tools=[custom, WEATHER],
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
    )
    assert made.tools == [WEATHER]
    function = {"name": "patch", "arguments": {"input": "*** Begin"}}
    assert made.messages[1]["tool_calls"] == [{"id": "c", "type": "function", "function": function}]
    assert "tools[0] of type custom is left out" in caplog.text


def test_results_stand_in_the_order_of_their_calls() -> None:
    function = {"name": "weather", "arguments": "{}"}
    past = [{"id": name, "type": "function", "function": function} for name in ("a", "b", "c")]
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in ("lost", "c", "a", "gone", "b")]
    made = job(messages=[*HI, {"role": "assistant", "tool_calls": past}, *results, *HI, *results[:2]])
    assert [m["content"] for m in made.messages if m["role"] == "tool"] == [*"abc", "lost", "gone", "lost", "c"]
