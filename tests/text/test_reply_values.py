"""Guards values that a model writes without quotes: their type comes from the schema of the tool, whatever it holds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.replies import call, parse, qwen


@pytest.mark.parametrize(
    ("key", "raw", "expected"),
    [
        ("text", "12", '"12"'),
        ("text", "null", '"null"'),
        ("colour", "1", '"1"'),
        ("number", "12", "12"),
        ("number", " -1.50 ", "-1.50"),
        ("number", "a dozen", '"a dozen"'),
        ("number", "NaN", '"NaN"'),
        ("number", "9" * 5000, '"' + "9" * 5000 + '"'),
        ("flag", "True", "true"),
        ("flag", "False", "false"),
        ("list", "[1,\n 2]", "[1,\n 2]"),
        ("list", "[1", '"[1"'),
        ("list", "[" * 100_000, '"' + "[" * 100_000 + '"'),
        ("object", '{"a": "b\nc"}', '{"a": "b\\nc"}'),
        ("object", '{"a": 1} b', '"{\\"a\\": 1} b"'),
        ("maybe", "null", "null"),
        ("maybe", "None", "null"),
        ("maybe", "12", '"12"'),
        ("maybe", "", '""'),
        ("maybe", "  not", '"  not"'),
        ("undeclared", "12", "12"),
        ("undeclared", '"a"', '"\\"a\\""'),
        ("undeclared", '{"a": 1}', '{"a": 1}'),
        ("undeclared", "{a}", '"{a}"'),
        ("undeclared", "12 apples", '"12 apples"'),
    ],
)
def test_values_are_typed_by_the_schema(key: str, raw: str, expected: str) -> None:
    assert parse("qwen-xml", [qwen((key, raw))]) == call(f'{{"{key}": {expected}}}')


def test_a_circular_schema_says_nothing() -> None:
    parameters = {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}]}}}
    tools: list[dict[str, Any]] = [
        {"name": "f", "parameters": parameters},
        {"function": None},
        {"name": "g", "parameters": [1]},
    ]
    assert parse("qwen-xml", [qwen(("a", "1"))], tools=tools) == call('{"a": 1}')


def test_references_do_not_multiply() -> None:
    """Nine levels of twenty references each, and a long chain of them."""
    refs = [[{"$ref": f"#/$defs/{level}_{n}"} for n in range(20)] for level in range(9)]
    defs: dict[str, Any] = {f"{level}_{n}": {"anyOf": refs[level + 1]} for level in range(8) for n in range(20)}
    defs |= {f"8_{n}": {"$ref": "#/$defs/c0"} for n in range(20)}
    defs |= {f"c{n}": {"$ref": f"#/$defs/c{n + 1}"} for n in range(5000)} | {"c5000": {"type": "string"}}
    tools = [{"name": "f", "parameters": {"properties": {"a": {"anyOf": refs[0]}}, "$defs": defs}}]
    assert parse("qwen-xml", [qwen(("a", "1"))], tools=tools) == call('{"a": "1"}')
