"""Guards: what a client may send reaches the template in one shape; a refusal names place and value."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from selfdraft.errors import InvalidRequest
from selfdraft.text.messages import prepare_messages, prepare_tools

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": "ü"}'}}


def test_nothing_of_the_callers_changes() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ]
    before = copy.deepcopy(messages)
    prepared = prepare_messages(messages)
    assert messages == before
    assert prepared[0] == {"role": "system", "content": "x"}
    arguments = prepared[1]["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"b": 1, "a": "ü"}
    assert list(arguments) == ["b", "a"]


@pytest.mark.parametrize("content", ["", "text", None])
def test_content_is_kept(content: str | None) -> None:
    assert prepare_messages([{"role": "user", "content": content}]) == [{"role": "user", "content": content}]


def test_missing_content_stays_missing() -> None:
    assert prepare_messages([{"role": "assistant"}]) == [{"role": "assistant"}]


def test_text_parts_are_joined_and_others_kept() -> None:
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    assert prepare_messages([{"role": "user", "content": texts}])[0]["content"] == "ab"
    assert prepare_messages([{"role": "user", "content": []}])[0]["content"] == ""
    assert prepare_messages([{"role": "user", "content": [*texts, image]}])[0]["content"] == [*texts, image]


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        ("", {}),
        (" ", {}),
        (None, {}),
        ("{}", {}),
        ({"a": 1}, {"a": 1}),
        ('{"a": 1, "b": "cut o', {"a": 1}),
        ("{'a': 1}", {"arguments": "{'a': 1}"}),
        ("[1]", {"arguments": [1]}),
        ("[" * 10_000, {"arguments": "[" * 10_000}),
    ],
)
def test_arguments(arguments: object, parsed: object) -> None:
    enveloped = {"function": {"name": "f", "arguments": arguments}}
    bare = {"name": "f", "arguments": arguments}
    prepared = prepare_messages([{"role": "assistant", "tool_calls": [enveloped, bare]}])[0]["tool_calls"]
    assert prepared == [{"function": {"name": "f", "arguments": parsed}}, {"name": "f", "arguments": parsed}]


def assistant(*calls: object) -> dict[str, object]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages is empty"),
        ("hi", "messages must be a list, not 'hi'"),
        ({"role": "user"}, "messages must be a list"),
        (["hi"], r"messages\[0\] must be an object with a role, not 'hi'"),
        ([{"role": "user", "content": "x"}, {"content": "x"}], r"messages\[1\]\.role must be .* not None"),
        ([{"role": 7, "content": "x"}], r"messages\[0\]\.role must be a non-empty string, not 7"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content must be .* not 5"),
        ([{"role": "user", "content": {"type": "text"}}], r"messages\[0\]\.content must be"),
        (
            [{"role": "user", "content": ["x"]}],
            r"messages\[0\]\.content\[0\] must be an object with a type, not 'x'",
        ),
        ([{"role": "user", "content": [{"text": "x"}]}], r"content\[0\]\.type must be a string, not None"),
        (
            [{"role": "user", "content": [{"type": "text", "text": 1}]}],
            r"content\[0\]\.text must be a string, not 1",
        ),
        ([{"role": "assistant", "tool_calls": "f"}], r"messages\[0\]\.tool_calls must be a list, not 'f'"),
        ([assistant(1)], r"tool_calls\[0\] must be an object, not 1"),
        ([assistant({"function": "f"})], r"tool_calls\[0\]\.function must be an object, not 'f'"),
        (
            [assistant(CALL, {"function": {"arguments": [1]}})],
            r"tool_calls\[1\]\.function\.arguments must be an object or a JSON string of one, not \[1\]",
        ),
        (
            [assistant({"name": "f", "arguments": 3})],
            r"tool_calls\[0\]\.arguments must be an object or .* not 3",
        ),
    ],
)
def test_refused(messages: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        prepare_messages(messages)
    assert caught.value.param == "messages"


def test_long_values_are_cut_in_messages() -> None:
    with pytest.raises(InvalidRequest) as caught:
        prepare_messages([{"role": "user", "content": {"x": "y" * 10_000}}])
    assert len(str(caught.value)) < 250


def test_tools() -> None:
    assert prepare_tools(None) is None
    assert prepare_tools([]) is None
    assert prepare_tools([{"type": "function"}]) == [{"type": "function"}]


@pytest.mark.parametrize("tools", [{"a": 1}, ["f"], "f"])
def test_tools_refused(tools: Any) -> None:
    with pytest.raises(InvalidRequest, match="tools") as caught:
        prepare_tools(tools)
    assert caught.value.param == "tools"
