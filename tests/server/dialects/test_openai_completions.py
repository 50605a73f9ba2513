"""OpenAI's completions: prompts in every form, echo and scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from selfdraft.errors import InvalidRequest
from selfdraft.results import Usage
from selfdraft.server.dialects.openai_completions import (
    CompletionJob,
    CompletionRequest,
    CompletionStream,
    Echo,
    collect,
    to_job,
)
from selfdraft.server.dialects.wire import read
from selfdraft.server.jobs import Choice
from selfdraft.text.reply.events import Content

from .support import ENVELOPE, body, finished, parsed, score, written


def request(**fields: Any) -> CompletionRequest:
    return read(CompletionRequest, body({"model": "nano", "prompt": "a", **fields}))


def job(**fields: Any) -> CompletionJob:
    return to_job(request(**fields))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_prompts(prompt: Any, expected: Any) -> None:
    assert job(prompt=prompt).prompts == expected


def test_fields() -> None:
    made = job(echo=True, logprobs=0, n=2, max_tokens=1, response_format={"type": "regex", "regex": "a"})
    assert (made.echo, made.params.logprobs, made.n, made.params.max_tokens) == (True, 0, 2, 1)
    assert made.output is not None
    assert job().params.logprobs is None


def test_no_tokens_behind_an_echo() -> None:
    made = job(echo=True, max_tokens=0)
    assert (made.echo, made.only_prompt) == (True, True)
    assert not job(echo=True, max_tokens=1).only_prompt


def test_figures_with_every_piece_are_for_streams() -> None:
    assert job(stream=True, timings_per_token=True).timed
    assert not job(timings_per_token=True).timed
    assert not job(stream=True).timed


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": False}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        job(**fields)
    assert caught.value.param == param


def test_echo_with_scores() -> None:
    """What a scorer reads: the prompt's own log-probabilities, the first of them missing."""
    wire = request(echo=True, logprobs=1, max_tokens=1)
    echo = Echo(0, "ab c", ["ab", " c"], [None, replace(score(" c", -1.5), offset=2)])
    whole = collect([echo, Choice(0, [Content("d")], [score("d", -2.0)]), finished()], wire, ENVELOPE)
    (choice,) = whole["choices"]
    assert choice["text"] == "ab cd"
    assert choice["logprobs"] == {
        "tokens": ["ab", " c", "d"],
        "token_logprobs": [None, -1.5, -2.0],
        "top_logprobs": [None, {" c": -1.5, "other": -9999.0}, {"d": -2.0, "other": -9999.0}],
        "text_offset": [0, 2, 4],
    }


def test_prompts_are_counted_once() -> None:
    events = [finished(index, usage=Usage(10 * (index // 2 + 1), 1)) for index in range(4)]
    whole = collect(events, request(prompt=["a", "b"], n=2), ENVELOPE)
    assert whole["usage"]["prompt_tokens"] == 30
    assert whole["usage"]["completion_tokens"] == 4


def test_the_stream_ends_with_usage() -> None:
    wire = request(stream=True, stream_options={"include_usage": True})
    *chunks, last, end = [data for _, data in parsed(written(CompletionStream(wire, ENVELOPE), [finished()]))]
    assert (last["choices"], last["usage"]["total_tokens"], end) == ([], 16, "[DONE]")
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
