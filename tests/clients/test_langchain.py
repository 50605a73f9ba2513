"""Guards chat and responses as langchain-openai speaks them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import Running

from .conftest import Client


@pytest.fixture(scope="module")
def found(reference: Running, server: Running, outside: Client) -> dict[str, Any]:
    return outside("scripts/with_langchain.py", reference.url, server.url)


def test_answers_streamed_and_whole(found: dict[str, Any]) -> None:
    plain = found["plain"]
    assert plain["text"] == plain["streamed"] == found["responses"] != ""
    assert plain["finish"] == "stop"
    assert plain["usage"] == plain["streamed_usage"]
    assert plain["usage"]["total_tokens"] == plain["usage"]["input_tokens"] + plain["usage"]["output_tokens"]


def test_calls_and_their_results(found: dict[str, Any]) -> None:
    called = found["called"]
    ((name, arguments),) = called["calls"]
    assert called["streamed_calls"] == called["calls"]
    assert called["invalid"] == []
    assert name == "get_weather"
    assert set(arguments) == {"city", "unit"}
    assert arguments["unit"] in ("c", "f")
    assert called["after_prompt"] > called["prompt"]


def test_structured_output(found: dict[str, Any]) -> None:
    for person in found["structured"]:
        assert set(person) == {"name", "mood"}
        assert person["mood"] in ("calm", "wild")
