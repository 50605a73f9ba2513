"""Whatever a body holds, it becomes a job or an InvalidRequest; nothing else comes out."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfdraft.errors import InvalidRequest
from selfdraft.server.dialects import anthropic_messages, openai_chat, openai_completions, openai_responses
from selfdraft.server.dialects.wire import WireModel, read

from .test_anthropic_messages import TOOL
from .test_openai_chat import WEATHER
from .test_openai_responses import CODEX

Dialect = tuple[type[WireModel], Callable[[Any], Any], dict[str, Any]]

DIALECTS: dict[str, Dialect] = {
    "chat": (
        openai_chat.ChatRequest,
        openai_chat.to_job,
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "c", "content": "x"},
            ],
            "tools": [WEATHER],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
            "logit_bias": {"1": 2},
            "stop": ["a"],
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"enable_thinking": True},
        },
    ),
    "completions": (
        openai_completions.CompletionRequest,
        openai_completions.to_job,
        {"model": "m", "prompt": [[1, 2], [3]], "logprobs": 1, "echo": True, "n": 1, "best_of": 1},
    ),
    "responses": (openai_responses.ResponsesRequest, openai_responses.to_job, {"model": "m", **CODEX}),
    "anthropic": (
        anthropic_messages.MessagesRequest,
        anthropic_messages.to_job,
        {
            "model": "m",
            "max_tokens": 5,
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": "s"},
                        {"type": "tool_use", "id": "t1", "name": "weather", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a"}]},
                        {"type": "document", "source": {"type": "text", "data": "d"}},
                    ],
                },
            ],
            "tools": [TOOL],
            "tool_choice": {"type": "tool", "name": "weather"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
        },
    ),
}

ODD: list[Any] = [
    *[None, True, 0, -1, 1.5, 10**30, 1e300, "", "a", "auto", "{", "[1]", "é" * 300],
    *[[], [None], [[]], ["a"], [0, "a"], {}, {"type": "text"}, {"type": []}, {"type": "text", "text": 5}],
    *[{"name": "a b"}, {"type": "function"}, {"type": "function", "name": {}}, {"a": {"b": [{"c": None}]}}],
]


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, entry in entries for found in paths(entry, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    """A copy with another value at a place."""
    if not path:
        return odd
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], odd)
    return copy


def translate(dialect: Dialect, raw: bytes) -> None:
    model, to_job, _ = dialect
    with contextlib.suppress(InvalidRequest):
        to_job(read(model, raw))


@pytest.mark.parametrize("name", DIALECTS)
def test_an_odd_value_anywhere(name: str) -> None:
    """All places of a full request times all odd values: the whole product, as it is cheap."""
    dialect = DIALECTS[name]
    model, to_job, valid = dialect
    assert to_job(read(model, json.dumps(valid).encode()))
    for path in paths(valid):
        for odd in ODD:
            translate(dialect, json.dumps(replaced(valid, path, odd)).encode())


@pytest.mark.parametrize("name", DIALECTS)
def test_an_odd_value_in_any_field(name: str) -> None:
    """Fields that the full request leaves out."""
    dialect = DIALECTS[name]
    for field in dialect[0].model_fields:
        for odd in ODD:
            translate(dialect, json.dumps({**dialect[2], field: odd}).encode())


KEYS = st.sampled_from(["type", "role", "content", "text", "name", "messages", "input", "tools", "model", "prompt"])
ANY = st.recursive(
    st.sampled_from([entry for entry in ODD if not isinstance(entry, list | dict)]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(sorted(DIALECTS)), ANY)
def test_any_json(name: str, value: Any) -> None:
    dialect = DIALECTS[name]
    translate(dialect, json.dumps(value).encode())
    if isinstance(value, dict):
        translate(dialect, json.dumps({**dialect[2], **value}).encode())


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(sorted(DIALECTS)), st.binary(max_size=30))
def test_any_bytes(name: str, raw: bytes) -> None:
    translate(DIALECTS[name], raw)
