"""Guards both dialects as litellm speaks them: it rewrites requests and reads answers by its own rules."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import Running

from .conftest import Client
from .test_openai_sdk import is_weather


@pytest.fixture(scope="module")
def found(server: Running, outside: Client) -> dict[str, Any]:
    return outside("scripts/with_litellm.py", server.url)


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_answers_streamed_and_whole(found: dict[str, Any], provider: str) -> None:
    answer = found[provider]
    assert answer["text"] == answer["streamed"] == found["openai"]["text"] != ""
    assert answer["finish"] == "length"
    assert answer["usage"] == answer["streamed_usage"] == found["openai"]["usage"]


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_calls_and_their_results(found: dict[str, Any], provider: str) -> None:
    answer = found[provider]
    assert answer["calls"] == answer["streamed_calls"] != []
    assert answer["call_finish"] == "tool_calls"
    for name, arguments in answer["calls"]:
        assert name == "get_weather"
        assert is_weather(arguments)
    assert answer["after_prompt"] > answer["call_prompt"]


def test_an_overlong_prompt_is_known_as_such(found: dict[str, Any]) -> None:
    assert found["refusal"] == "ContextWindowExceededError"
