"""Random answers as jobs give them, and the official SDKs as readers of what the dialects make of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import anthropic
import httpx2 as httpx
import openai
from hypothesis import strategies as st

from selfdraft.results import Timings, TokenLogprob, Usage
from selfdraft.server.dialects.wire import Encoder, Envelope
from selfdraft.server.jobs import Choice, Finished, JobEvent
from selfdraft.text.reply.events import Content, Reasoning, ReplyEvent, ToolArguments, ToolEnd, ToolStart

ENVELOPE = Envelope("0123456789abcdef01234567", 1_700_000_000, "nano")

TIMINGS = Timings(
    prompt_ms=1.0,
    decode_ms=2.0,
    tokens_per_second=3.0,
    cycles=4,
    tokens_per_cycle=2.5,
    acceptance_per_position=[0.5],
    drafts_tried=[4],
    drafts_accepted=[2],
    emitted={"draft": 2},
    trunk_forwards=5,
    trunk_replays=0,
)


def body(value: object) -> bytes:
    """A request's body."""
    return json.dumps(value).encode()


def score(token: str, logprob: float = -0.5) -> TokenLogprob:
    """A scored token with one alternative."""
    raw = list(token.encode())
    return TokenLogprob(7, token, logprob, [(7, token, logprob, raw), (8, "other", float("-inf"), [])], raw)


def finished(index: int = 0, reason: str = "stop", **fields: Any) -> Finished:
    """The end of an answer of five tokens to a prompt of eleven."""
    known = {"stop": None, "usage": Usage(11, 5), "reasoning_tokens": 2, "timings": TIMINGS}
    return Finished(index=index, reason=reason, **{**known, **fields})  # type: ignore[arg-type]


def answer(*events: ReplyEvent, reason: str = "stop", index: int = 0) -> list[JobEvent]:
    """An answer that comes event by event."""
    return [*(Choice(index, [event]) for event in events), finished(index, reason)]


def call(name: str, *pieces: str, index: int = 0, complete: bool = True) -> list[ReplyEvent]:
    """A tool call."""
    return [ToolStart(index, name), *(ToolArguments(index, piece) for piece in pieces), ToolEnd(index, complete)]


# Few and short: what matters is the order of events, and characters that JSON or SSE could trip over.
texts = st.sampled_from(["a", " b", "\n\n", "é", "\u2028", "\r", "😀", '"', "\\", "}", "data: ", "\x00"])
objects = st.sampled_from([{}, {"q": 'a\n"b"'}, {"é": [1, None, {"x": True}], "n": -0.5}, {"q": "😀\u2028"}])


@st.composite
def replies(draw: st.DrawFn) -> list[ReplyEvent]:
    """Well-formed events of one answer: any order of channels, calls one after the other, some of them cut off."""
    events: list[ReplyEvent] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["reasoning", "content", "call"]), max_size=5)):
        if kind == "call":
            text = json.dumps(draw(objects))
            cut = draw(st.integers(0, len(text)))
            complete = draw(st.booleans())
            pieces = [piece for piece in (text[:cut], text[cut:] if complete else "") if piece]
            events += call(draw(st.sampled_from(["find", "weather"])), *pieces, index=calls, complete=complete)
            calls += 1
        else:
            piece = Reasoning if kind == "reasoning" else Content
            events += [piece(text) for text in draw(st.lists(texts, max_size=2))]
    return events


@st.composite
def streams(draw: st.DrawFn, *, scored: bool = False, n: int = 1) -> list[JobEvent]:
    """Events of n answers as they may arrive."""
    queues: list[list[JobEvent]] = []
    for index in range(n):
        events = draw(replies())
        calls = any(isinstance(event, ToolStart) for event in events)
        queue: list[JobEvent] = []
        while events:
            size = draw(st.integers(0, 3))
            scores = [score(text) for text in draw(st.lists(texts, max_size=2))] if scored else None
            queue.append(Choice(index, events[:size], scores))
            events = events[size:]
        reason = draw(st.sampled_from(["stop", "length", "cancelled", *(["tool_calls"] if calls else [])]))
        stop = draw(st.none() | texts) if reason == "stop" else None
        queues.append([*queue, finished(index, reason, stop=stop, usage=Usage(11, draw(st.integers(0, 9))))])
    merged: list[JobEvent] = []
    while any(queues):
        merged.append(draw(st.sampled_from([queue for queue in queues if queue])).pop(0))
    return merged


def written(encoder: Encoder, events: Iterable[Any]) -> list[str]:
    """All blocks of a stream, keep-alives between them."""
    blocks = [encoder.keepalive(), *encoder.start()]
    for event in events:
        blocks += [encoder.keepalive(), *encoder.event(event)]
    return blocks + encoder.done()


def parsed(blocks: Sequence[str]) -> list[tuple[str | None, Any]]:
    """(event name, data) of every block that is not a comment."""
    found = []
    for block in blocks:
        assert block.endswith("\n\n"), block
        assert block.isascii(), block
        lines = block[:-2].split("\n")
        if lines[0].startswith(":"):
            continue
        name = lines.pop(0).removeprefix("event: ") if lines[0].startswith("event: ") else None
        (line,) = lines
        data = line.removeprefix("data: ")
        found.append((name, data if data == "[DONE]" else json.loads(data)))
    return found


class Reader:
    """The official clients, reading what a test hands them instead of a socket."""

    def __init__(self) -> None:
        self._blocks: list[str] = []
        transport = httpx.MockTransport(self._respond)
        self.openai = openai.OpenAI(
            api_key="none", base_url="http://test/v1", http_client=httpx.Client(transport=transport), max_retries=0
        )
        self.anthropic = anthropic.Anthropic(
            api_key="none", base_url="http://test", http_client=httpx.Client(transport=transport), max_retries=0
        )

    def hand(self, blocks: list[str]) -> Reader:
        """Let the next request be answered with these blocks."""
        self._blocks = blocks
        return self

    def _respond(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, text="".join(self._blocks))


READER = Reader()
