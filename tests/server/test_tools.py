"""Guards tools and structured output through the server: forced, free and cut-off calls, results, schemas with drafts.

What the nano model says is scripted by a grammar of one sentence; what it is forced to say it chooses itself.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from selfdraft.server.chat import Chats
from selfdraft.server.config import load_server_settings
from selfdraft.server.dialects import anthropic_messages, openai_chat, openai_responses
from selfdraft.server.dialects.wire import Envelope, read
from selfdraft.server.jobs import ChatJob, JobEvent, OutputFormat, ToolChoice
from selfdraft.server.pictures import Pictures

from .conftest import Running
from .test_server import chat, streamed

ENVELOPE = Envelope("0123456789abcdef01234567", 1_700_000_000, "nano")
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTIONS: list[dict[str, Any]] = [
    {"name": "weather", "description": "Weather of a city.", "parameters": SCHEMA},
    {"name": "note", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}},
]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
WEATHER = "<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
WEATHER += "</function>\n</tool_call>"
NOTE = '<tool_call>\n<function=note>\n<parameter=text>\nIt "rains"\n</parameter>\n</function>\n</tool_call>'


def bodies(**given: Any) -> dict[str, tuple[Any, Any, dict[str, Any]]]:
    """The same request in each dialect: module, request model, body."""
    single = given.pop("single", False)
    tools = [{"name": f["name"], "input_schema": f["parameters"]} for f in FUNCTIONS]
    common = {"model": "nano", "temperature": 0, **given}
    choice = {"type": "auto", "disable_parallel_tool_use": single}
    return {
        "chat": (
            openai_chat,
            openai_chat.ChatRequest,
            {**common, "messages": HI, "tools": TOOLS, "max_tokens": 200, "parallel_tool_calls": not single},
        ),
        "anthropic": (
            anthropic_messages,
            anthropic_messages.MessagesRequest,
            {**common, "messages": HI, "tools": tools, "max_tokens": 200, "tool_choice": choice},
        ),
        "responses": (
            openai_responses,
            openai_responses.ResponsesRequest,
            {
                **common,
                "input": "hi",
                "tools": [{"type": "function", **function} for function in FUNCTIONS],
                "max_output_tokens": 200,
                "parallel_tool_calls": not single,
            },
        ),
    }


def scripted(job: ChatJob, text: str) -> ChatJob:
    """The same job, and the answer it will get."""
    return replace(job, output=OutputFormat("grammar", grammar=f"start: {json.dumps(text, ensure_ascii=False)}"))


def answered(server: Running, job: ChatJob) -> list[JobEvent]:
    async def run() -> list[JobEvent]:
        answers = await Chats(server.service, Pictures(load_server_settings())).start(job)
        try:
            return [event async for events in answers.events() for event in events]
        finally:
            answers.close()

    return asyncio.run(run())


def said(server: Running, dialect: str, text: str, *, most: int = 200, depth: int = 0, **given: Any) -> dict[str, Any]:
    """The whole response in a dialect to an answer that says `text`, of at most so many tokens."""
    module, model, body = bodies(depth=depth, **given)[dialect]
    request = read(model, json.dumps(body).encode())
    job = scripted(module.to_job(request), text)
    job = replace(job, params=replace(job.params, max_tokens=most))
    whole: dict[str, Any] = module.collect(answered(server, job), request, ENVELOPE)
    return whole


def shown(whole: dict[str, Any]) -> tuple[str, list[tuple[str, Any]], str, int]:
    """(text, calls with their arguments as they came, how it ended, tokens) of a response in any dialect."""
    if "choices" in whole:
        (choice,) = whole["choices"]
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        told = [(call["name"], call["arguments"]) for call in calls]
        return message["content"] or "", told, choice["finish_reason"], whole["usage"]["completion_tokens"]
    tokens = whole["usage"]["output_tokens"]
    if "output" in whole:
        text = "".join(item["content"][0]["text"] for item in whole["output"] if item["type"] == "message")
        calls = [(item["name"], item["arguments"]) for item in whole["output"] if item["type"] == "function_call"]
        return text, calls, whole["status"], tokens
    text = "".join(block["text"] for block in whole["content"] if block["type"] == "text")
    calls = [(block["name"], block["input"]) for block in whole["content"] if block["type"] == "tool_use"]
    return text, calls, whole["stop_reason"], tokens


DIALECTS = ["chat", "anthropic", "responses"]
ENDS = {
    "chat": ("tool_calls", "length"),
    "anthropic": ("tool_use", "max_tokens"),
    "responses": ("completed", "incomplete"),
}


def arguments(dialect: str, value: dict[str, Any]) -> Any:
    return value if dialect == "anthropic" else json.dumps(value)


# --- free calls


@pytest.mark.parametrize("dialect", DIALECTS)
def test_text_and_several_calls(server: Running, dialect: str) -> None:
    text, calls, end, _ = shown(said(server, dialect, f"Look:\n\n{WEATHER}\n{NOTE}", depth=2))
    assert text == "Look:"
    assert calls == [
        ("weather", arguments(dialect, {"city": "Bonn", "days": 3})),
        ("note", arguments(dialect, {"text": 'It "rains"'})),
    ]
    assert end == ENDS[dialect][0]


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_one_call_at_a_time_ends_the_answer_behind_it(server: Running, dialect: str, depth: int) -> None:
    """At the very token that completes it, whatever was drafted beyond."""
    begun = f"Look:\n\n{WEATHER}"
    whole = said(server, dialect, f"{begun}\n{NOTE}\n\nDone.", single=True, depth=depth)
    tokens = len(server.service.llm.tokenizer.encode(begun, special=False))
    expected = [("weather", arguments(dialect, {"city": "Bonn", "days": 3}))]
    assert shown(whole) == ("Look:", expected, ENDS[dialect][0], tokens)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_call_that_max_tokens_cuts_off(server: Running, dialect: str) -> None:
    begun = f"Look:\n\n{WEATHER}\n{NOTE.partition('ains')[0]}"
    tokens = len(server.service.llm.tokenizer.encode(begun, special=False))
    text, calls, end, used = shown(said(server, dialect, f"Look:\n\n{WEATHER}\n{NOTE}", most=tokens))
    assert (text, end, used) == ("Look:", ENDS[dialect][1], tokens)
    partial: Any = {} if dialect == "anthropic" else calls[1][1]
    assert calls == [("weather", arguments(dialect, {"city": "Bonn", "days": 3})), ("note", partial)]
    if dialect != "anthropic":
        assert partial.startswith('{"text": "It \\"')
        assert not partial.endswith('"}')


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_call_that_the_model_breaks_off(server: Running, dialect: str) -> None:
    """No client may take it for a call, though the model ended of itself."""
    _, calls, end, _ = shown(said(server, dialect, WEATHER.partition("<parameter=days>")[0]))
    assert [name for name, _ in calls] == ["weather"]
    assert end == ENDS[dialect][1]


def test_without_tools_calls_are_text(server: Running) -> None:
    request = read(openai_chat.ChatRequest, json.dumps({**bodies()["chat"][2], "tool_choice": "none"}).encode())
    job = openai_chat.to_job(request)
    whole = openai_chat.collect(answered(server, scripted(job, f"So: {WEATHER}")), request, ENVELOPE)
    assert shown(whole)[:3] == (f"So: {WEATHER}", [], "stop")
    assert "weather" not in prompt(server, job)
    assert "Weather of a city." in prompt(server, replace(job, tool_choice=ToolChoice()))


@pytest.mark.parametrize("single", [False, True])
def test_a_stream_is_the_whole(server: Running, single: bool) -> None:
    grammar = f"start: {json.dumps(f'Look: {WEATHER} {NOTE} Done.')}"
    given = {
        "tools": TOOLS,
        "parallel_tool_calls": not single,
        "response_format": {"type": "grammar", "grammar": grammar},
        "max_tokens": 200,
        "stream_options": {"include_usage": True},
    }
    with server.client() as client:
        whole = chat(client, **given)
        *chunks, last = streamed(client, **given)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = whole["choices"][0]["message"]["tool_calls"]
    assert len(calls) == (1 if single else 2)
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["choices"][0]["message"]["content"]
    assert whole["choices"][0]["message"]["content"] == ("Look:" if single else "Look:Done.")
    for index, call in enumerate(calls):
        pieces = [entry for delta in deltas for entry in delta.get("tool_calls", ()) if entry["index"] == index]
        assert pieces[0]["function"]["name"] == call["function"]["name"]
        assert "".join(piece["function"]["arguments"] for piece in pieces) == call["function"]["arguments"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "tool_calls"
    for usage in (last["usage"], whole["usage"]):
        usage.pop("prompt_tokens_details")  # the second finds its prompt known
    assert last["usage"] == whole["usage"]


# --- forced calls


def valid_call(message: dict[str, Any], *names: str) -> None:
    schemas = {function["name"]: function["parameters"] for function in FUNCTIONS}
    assert not message["content"]
    for call in message["tool_calls"]:
        assert call["function"]["name"] in names
        jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])


def one_tool(server: Running, **given: Any) -> dict[str, Any]:
    with server.client() as client:
        body = chat(client, tools=TOOLS[:1], max_tokens=120, parallel_tool_calls=False, **given)
        return body


def test_a_forced_call_at_every_depth(server: Running) -> None:
    answers = [one_tool(server, tool_choice="required", depth=depth) for depth in range(4)]
    for body in answers:
        (choice,) = body["choices"]
        valid_call(choice["message"], "weather")
        assert len(choice["message"]["tool_calls"]) == 1
        assert choice["finish_reason"] == "tool_calls"
        told = choice["message"]["tool_calls"][0]["function"]
        assert told == answers[0]["choices"][0]["message"]["tool_calls"][0]["function"]


def test_a_named_tool_is_called_once(server: Running) -> None:
    """However much the model would like to go on."""
    named = {"type": "function", "function": {"name": "weather"}}
    bias = {str(id): -100 for id in server.service.llm.tokenizer.eos_ids}
    with server.client() as client:
        body = chat(client, tools=TOOLS[::-1], max_tokens=160, tool_choice=named, logit_bias=bias)
    valid_call(body["choices"][0]["message"], "weather")
    assert len(body["choices"][0]["message"]["tool_calls"]) == 1


def test_forced_calls_with_several_answers_scores_and_samples(server: Running) -> None:
    body = one_tool(server, tool_choice="required", n=3, temperature=1.0, seed=3, logprobs=True, top_logprobs=2)
    for choice in body["choices"]:
        valid_call(choice["message"], "weather")
        assert choice["logprobs"]["content"]


def test_reasoning_comes_before_a_forced_call(server: Running) -> None:
    """The bias ends the reasoning after a while."""
    marker = server.service.llm.tokenizer.token_id("</think>")
    bias = {"logit_bias": {str(marker): 9}}
    for depth in (0, 3):
        body = one_tool(
            server, tool_choice="required", enable_thinking=True, temperature=1.0, seed=2, depth=depth, **bias
        )
        valid_call(body["choices"][0]["message"], "weather")
        assert body["choices"][0]["message"]["reasoning_content"]
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    with server.client() as client:
        given = {"response_format": format, "enable_thinking": True, "temperature": 1.0, "seed": 2, "max_tokens": 120}
        message = chat(client, **given, **bias)["choices"][0]["message"]
    jsonschema.validate(json.loads(message["content"]), SCHEMA)
    assert message["reasoning_content"]


@pytest.mark.parametrize(
    ("parameters", "feature"),
    [
        ({"type": "object", "minProperties": 1}, "minProperties"),
        ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "(?!x)"}}}, "look-ahead"),
    ],
)
def test_a_schema_that_cannot_be_forced_is_refused_by_name(
    server: Running, parameters: dict[str, Any], feature: str
) -> None:
    bad = {"type": "function", "function": {"name": "bad", "parameters": parameters}}
    with server.client() as client:
        asked = {"model": "nano", "messages": HI, "max_tokens": 5, "tools": [TOOLS[0], bad]}
        refused = client.post("/v1/chat/completions", json={**asked, "tool_choice": "required"})
        assert refused.status_code == 400
        assert feature in refused.json()["error"]["message"]
        assert "'bad'" in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"] == "tools"
        assert client.post("/v1/chat/completions", json=asked).status_code == 200


# --- structured output

FORMATS: dict[str, dict[str, Any]] = {
    "schema": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    "grammar": {"type": "grammar", "grammar": 'start: "yes" | "no, " REASON\nREASON: /[a-z]{1,5}/'},
    "regex": {"type": "regex", "regex": "[0-9]{3}-[ab]{2}"},
}


def valid(kind: str, text: str) -> bool:
    if kind == "schema":
        jsonschema.validate(json.loads(text), SCHEMA)
        return True
    return text == "yes" or text[:4] == "no, " if kind == "grammar" else text[3] == "-" and len(text) == 6


@pytest.mark.parametrize("kind", FORMATS)
def test_a_format_holds_at_every_depth(server: Running, kind: str) -> None:
    with server.client() as client:
        texts = []
        for depth in range(4):
            body = chat(client, response_format=FORMATS[kind], depth=depth, max_tokens=120)
            assert body["choices"][0]["finish_reason"] == "stop"
            texts.append(body["choices"][0]["message"]["content"])
            assert valid(kind, texts[-1])
        assert len(set(texts)) == 1
        several = chat(client, response_format=FORMATS[kind], n=3, temperature=1.5, logprobs=True, max_tokens=120)
        for choice in several["choices"]:
            assert valid(kind, choice["message"]["content"])
            assert (
                "".join(score["token"] for score in choice["logprobs"]["content"][:-1]) == choice["message"]["content"]
            )


def test_any_json_object(server: Running) -> None:
    """The bias closes it: left alone, noise never does."""
    tokenizer = server.service.llm.tokenizer
    bias = {str(tokenizer.encode(text, special=False)[0]): 60 for text in ("}", '"}', "{}")}
    with server.client() as client:
        for depth in (0, 3):
            given = {"response_format": {"type": "json_object"}, "logit_bias": bias, "depth": depth, "max_tokens": 60}
            assert isinstance(json.loads(chat(client, **given)["choices"][0]["message"]["content"]), dict)


def test_a_stop_string_ends_a_format(server: Running) -> None:
    with server.client() as client:
        body = chat(client, response_format=FORMATS["schema"], stop='"days', depth=3, max_tokens=120)
    text = body["choices"][0]["message"]["content"]
    assert "days" not in text
    assert "city" in text
    assert body["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("bias", [100, -100])
def test_with_tools_a_format_holds_for_answers_without_calls(server: Running, bias: int, depth: int) -> None:
    """Either a call or the format, and nothing else."""
    marker = server.service.llm.tokenizer.token_id("<tool_call>")
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [TOOLS[0], {"type": "function", "function": {"name": "odd", "parameters": odd}}]
    given = {"response_format": FORMATS["schema"], "parallel_tool_calls": False, "depth": depth}
    with server.client() as client:
        body = chat(client, tools=tools, max_tokens=200, logit_bias={str(marker): bias}, **given)
    message = body["choices"][0]["message"]
    if bias > 0:
        assert len(message["tool_calls"]) == 1
        assert not message["content"]
    else:
        assert "tool_calls" not in message
        assert valid("schema", message["content"])


# --- what the model is shown


def prompt(server: Running, job: ChatJob) -> str:
    llm = server.service.llm
    return llm.tokenizer.decode(
        Chats(server.service, Pictures(load_server_settings())).prompt(job).tokens, skip_special=False
    )


def job_of(dialect: str, **fields: Any) -> ChatJob:
    module, model, body = bodies()[dialect]
    job: ChatJob = module.to_job(read(model, json.dumps({**body, **fields}).encode()))
    return job


CALLS = [("a", {"city": "Bonn", "days": 3}), ("b", {"city": "Rome", "days": 1})]
TEXTS: Sequence[Any] = ["rain", "sun"]


def chat_messages(*contents: Any) -> dict[str, Any]:
    calls = [
        {"id": id, "type": "function", "function": {"name": "weather", "arguments": json.dumps(given)}}
        for id, given in CALLS
    ]
    results = [
        {"role": "tool", "tool_call_id": id, "content": content}
        for (id, _), content in zip(CALLS, contents, strict=True)
    ]
    return {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": calls}, *results]}


def anthropic_blocks(*contents: Any) -> dict[str, Any]:
    calls = [{"type": "tool_use", "id": id, "name": "weather", "input": given} for id, given in CALLS]
    results = [
        {"type": "tool_result", "tool_use_id": id, **content} for (id, _), content in zip(CALLS, contents, strict=True)
    ]
    return {"messages": [*HI, {"role": "assistant", "content": calls}, {"role": "user", "content": results}]}


def response_items(*outputs: Any) -> dict[str, Any]:
    calls = [
        {"type": "function_call", "call_id": id, "name": "weather", "arguments": json.dumps(given)}
        for id, given in CALLS
    ]
    results = [
        {"type": "function_call_output", "call_id": id, "output": output}
        for (id, _), output in zip(CALLS, outputs, strict=True)
    ]
    return {"input": [{"role": "user", "content": "hi"}, *calls, *results]}


def part(text: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": text}


def backwards(fields: dict[str, Any]) -> dict[str, Any]:
    """The results in the other order."""
    (key,) = fields
    return {key: [*fields[key][:-2], fields[key][-1], fields[key][-2]]}


@pytest.mark.parametrize(
    ("dialect", "fields", "results"),
    [
        ("chat", chat_messages("rain", "sun"), ("rain", "sun")),
        ("chat", chat_messages([part("ra"), part("in")], [part("sun")]), ("rain", "sun")),
        ("chat", chat_messages(None, ""), ("", "")),
        ("chat", backwards(chat_messages("rain", "sun")), ("rain", "sun")),
        ("anthropic", anthropic_blocks({"content": "rain"}, {"content": [part("s"), part("un")]}), ("rain", "s\nun")),
        ("anthropic", anthropic_blocks({"content": "no net", "is_error": True}, {}), ("Error: no net", "")),
        ("responses", response_items("rain", [part("sun", "input_text")]), ("rain", "sun")),
        ("responses", backwards(response_items("rain", "sun")), ("rain", "sun")),
    ],
)  # fmt: skip
def test_results_are_shown_in_the_order_of_the_calls(
    server: Running, dialect: str, fields: dict[str, Any], results: tuple[str, str]
) -> None:
    text = prompt(server, job_of(dialect, **fields))
    shown = [f"<tool_response>\n{result}\n</tool_response>" for result in results]
    assert f"<|im_end|>\n<|im_start|>user\n{shown[0]}\n{shown[1]}<|im_end|>\n<|im_start|>assistant\n" in text
    assert WEATHER in text  # the arguments came as a JSON string, or as an object


def test_a_result_without_its_call_is_shown(server: Running) -> None:
    messages = [
        *HI,
        {"role": "assistant", "content": "ok"},
        {"role": "tool", "tool_call_id": "gone", "content": "rain"},
    ]
    assert "<tool_response>\nrain\n</tool_response>" in prompt(server, job_of("chat", messages=messages))
    items = [{"role": "user", "content": "hi"}, {"type": "function_call_output", "call_id": "gone", "output": "rain"}]
    assert "<tool_response>\nrain\n</tool_response>" in prompt(server, job_of("responses", input=items))


def test_images_in_results_are_refused_by_name(server: Running) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with server.client() as client:
        body = {**bodies()["anthropic"][2], **anthropic_blocks({"content": [image]}, {})}
        refused = client.post("/v1/messages", json=body)
        assert refused.status_code == 400
        assert "messages[2].content[0].content[0] is an image, and this model" in refused.json()["error"]["message"]


def test_before_templating(server: Running) -> None:
    """Developer is system, arguments are objects (see above), and an assistant's last message is continued."""
    messages = [{"role": "developer", "content": "Be brief."}, *HI]
    assert "Be brief.<|im_end|>" in prompt(server, job_of("chat", messages=messages))
    assert prompt(server, job_of("chat", messages=messages)).startswith("<|im_start|>system\n")
    items = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert prompt(server, job_of("responses", input=items)) == prompt(server, job_of("chat", messages=messages))
    begun = [*HI, {"role": "assistant", "content": "Once upon"}]
    for dialect in ("chat", "anthropic"):
        assert prompt(server, job_of(dialect, messages=begun)).endswith("</think>\n\nOnce upon")
