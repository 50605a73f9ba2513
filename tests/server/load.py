"""A load of many clients on a server elsewhere: what they ask, how they err and leave, and what came of it."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
from pydantic_core import from_json

WORDS = ("rain", "bread", "the", "sea", "ink", "stone", "light", "river", "paper", "horse", "window", "garden", "story")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL = {"name": "get_weather", "description": "The weather", "parameters": TOOL_SCHEMA}
DEPTHS = (0, 1, 2, 3, 4, 5, "auto")


@dataclass(frozen=True)
class Case:
    """A request whose answer is always the same."""

    path: str
    body: dict[str, Any]

    def streamed(self, stream: bool) -> dict[str, Any]:
        """Its body, to be answered piece by piece or whole."""
        extra = {"stream_options": {"include_usage": True}} if stream and "completions" in self.path else {}
        return {**self.body, "stream": stream, **extra}


def cases(count: int, seed: int = 0) -> list[Case]:
    """So many requests, greedy or seeded, of many lengths and options; 28 have every dialect at every depth."""
    dice = random.Random(seed)
    kinds = (_chat, _completion, _messages, _response)
    return [kinds[n % len(kinds)](dice, _sampling(dice, DEPTHS[n % len(DEPTHS)])) for n in range(count)]


def _sampling(dice: random.Random, depth: int | str) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": "any", "depth": depth, "ignore_eos": dice.random() < 0.5}
    if dice.random() < 0.5:
        fields["temperature"] = 0
    else:
        fields |= {"temperature": dice.choice((0.5, 1.0, 1.4)), "seed": dice.randrange(2**31)}
        fields |= dice.choice(({}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}))
    if dice.random() < 0.3:
        fields |= {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    if dice.random() < 0.2:
        fields["logit_bias"] = {str(dice.randrange(4000)): 5.0}
    return fields


def _words(dice: random.Random) -> str:
    return " ".join(dice.choices(WORDS, k=dice.choice((1, 3, 8, 20, 60, 200))))


def _length(dice: random.Random) -> int:
    return dice.choice((1, 2, 4, 8, 16))


def _stops(dice: random.Random) -> list[str]:
    return dice.choice(([], [], ["e"], ["th", "an"], [" the"]))


def _chat(dice: random.Random, fields: dict[str, Any]) -> Case:
    fields |= {"max_tokens": _length(dice), "stop": _stops(dice), "n": dice.choice((1, 1, 1, 2))}
    fields |= dice.choice(({}, {}, {"min_tokens": fields["max_tokens"] // 2}))
    tools = [{"type": "function", "function": TOOL}]
    fields |= dice.choice(
        (
            {},
            {"tools": tools},
            {"tools": tools, "tool_choice": "required"},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            {"response_format": {"type": "json_object"}},
            {"enable_thinking": True},
            {"logprobs": True, "top_logprobs": 3},
        )
    )
    return Case("/v1/chat/completions", {**fields, "messages": [{"role": "user", "content": _words(dice)}]})


def _completion(dice: random.Random, fields: dict[str, Any]) -> Case:
    fields |= {"max_tokens": _length(dice), "stop": _stops(dice), "n": dice.choice((1, 1, 2))}
    fields |= dice.choice(({}, {}, {"logprobs": 2}, {"echo": True}, {"response_format": {"type": "json_object"}}))
    return Case("/v1/completions", {**fields, "prompt": dice.choice((_words(dice), [5, 6, 7, 300], ["a b", "c"]))})


def _messages(dice: random.Random, fields: dict[str, Any]) -> Case:
    fields |= {"max_tokens": _length(dice), "stop_sequences": _stops(dice)}
    tools = [{"name": TOOL["name"], "input_schema": TOOL_SCHEMA}]
    fields |= dice.choice(
        ({}, {"tools": tools}, {"tools": tools, "tool_choice": {"type": "any"}}, {"thinking": {"type": "adaptive"}})
    )
    return Case("/v1/messages", {**fields, "messages": [{"role": "user", "content": _words(dice)}]})


def _response(dice: random.Random, fields: dict[str, Any]) -> Case:
    fields |= {"max_output_tokens": _length(dice)}
    fields |= dice.choice(
        (
            {},
            {"tools": [{"type": "function", **TOOL}], "tool_choice": "required"},
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
            {"reasoning": {"effort": "low"}},
        )
    )
    return Case("/v1/responses", {**fields, "input": _words(dice)})


# What a client may get wrong: method, path, and what httpx sends. Each is answered with a 4xx.
MALFORMED: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/v1/chat/completions", {"content": b"{"}),
    ("POST", "/v1/chat/completions", {"content": b"\xff\xfe\x00"}),
    ("POST", "/v1/chat/completions", {"content": b"[" * 5000}),
    ("POST", "/v1/chat/completions", {"json": {"model": "x"}}),
    ("POST", "/v1/chat/completions", {"json": {"model": "x", "messages": []}}),
    ("POST", "/v1/chat/completions", {"json": {"model": "x", "messages": [{"role": "wizard", "content": "x"}]}}),
    ("POST", "/v1/chat/completions", {"content": b'{"model":"x","messages":[],"temperature":NaN}'}),
    ("POST", "/v1/completions", {"json": {"model": "x", "prompt": "x", "max_tokens": -1}}),
    ("POST", "/v1/completions", {"json": {"model": "x", "prompt": [10**9]}}),
    ("POST", "/v1/completions", {"json": {"model": "x", "prompt": "x", "depth": 63}}),
    ("POST", "/v1/completions", {"json": {"model": "x", "prompt": "word " * 9000}}),
    ("POST", "/v1/messages", {"json": {"model": "x", "messages": [{"role": "user", "content": 5}], "max_tokens": 2}}),
    ("POST", "/v1/messages", {"json": {"model": "x", "messages": [{"role": "user", "content": "x"}]}}),
    ("POST", "/v1/responses", {"json": {"model": "x", "input": "x", "previous_response_id": "r"}}),
    ("POST", "/v1/responses", {"json": {"model": "x", "input": "x", "text": {"format": {"type": "json_schema"}}}}),
    ("POST", "/tokenize", {"json": {}}),
    ("GET", "/v1/chat/completions", {}),
    ("GET", "/v1/nothing", {}),
    ("POST", "/v1/completions", {"json": {"model": "x", "prompt": "x"}, "headers": {"Host": "evil.example"}}),
    ("POST", "/v1/completions", {"json": {"model": "x", "prompt": "x"}, "headers": {"Origin": "http://evil.example"}}),
]

Said = dict[int, dict[str, Any]]
"""What each answer of a response, or each block, says; `-1` holds what is said of the whole."""


def said_whole(path: str, body: dict[str, Any]) -> Said:
    """What a response says, without the ids that differ each time."""
    if path == "/v1/messages":
        blocks = [_block(block, block.get("input")) for block in body["content"]]
        end = {"reason": body["stop_reason"], "tokens": body["usage"]["output_tokens"]}
        return {-1: end, **dict(enumerate(blocks))}
    if path == "/v1/responses":
        end = {"status": body["status"], "tokens": body["usage"]["output_tokens"]}
        text = re.sub(r'"(id|call_id)": "\w+"', "", json.dumps(body["output"]))
        return {-1: end, 0: {"output": text}}
    said: Said = {-1: {"tokens": body["usage"]["completion_tokens"]}}
    for choice in body["choices"]:
        message = choice.get("message", {})
        said[choice["index"]] = {
            "text": choice["text"] if "text" in choice else message["content"] or "",
            "reasoning": message.get("reasoning_content", ""),
            "calls": [
                (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
            ],
            "reason": choice["finish_reason"],
        }
    return said


def said_streamed(path: str, events: list[dict[str, Any]]) -> Said:
    """The same from the events of a stream."""
    if path == "/v1/responses":
        return said_whole(path, events[-1]["response"])
    return _said_messages(events) if path == "/v1/messages" else _said_chunks(events)


def _said_messages(events: list[dict[str, Any]]) -> Said:
    blocks: Said = {}
    pieces: dict[int, str] = {}
    for event in events:
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                blocks[index], pieces[index] = block, ""
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                pieces[index] += delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                blocks[-1] = {"reason": delta["stop_reason"], "tokens": usage["output_tokens"]}
    for index, text in pieces.items():
        kind = blocks[index]["type"]
        given = from_json(text or "{}", allow_partial=True) if kind == "tool_use" else None
        blocks[index] = _block({**blocks[index], kind: text}, given)
    return blocks


def _block(block: dict[str, Any], given: Any) -> dict[str, Any]:
    kind = block["type"]
    return {"type": kind, "name": block.get("name"), "text": block[kind] if kind != "tool_use" else given}


def _said_chunks(events: list[dict[str, Any]]) -> Said:
    said: Said = {-1: {"tokens": events[-1]["usage"]["completion_tokens"]}}
    calls: dict[int, dict[int, list[str]]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        index = choice["index"]
        mine = said.setdefault(index, {"text": "", "reasoning": "", "calls": [], "reason": None})
        delta = choice.get("delta", {})
        mine["text"] += choice.get("text", "") + (delta.get("content") or "")
        mine["reasoning"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            entry = calls.setdefault(index, {}).setdefault(call["index"], ["", ""])
            entry[0] += call["function"].get("name", "")
            entry[1] += call["function"].get("arguments", "")
        mine["reason"] = choice["finish_reason"] or mine["reason"]
    for index, made in calls.items():
        said[index]["calls"] = [(name, arguments) for name, arguments in made.values()]
    return said


@dataclass
class State:
    """The server at a moment: rows, and megabytes of its process and of its arrays."""

    running: int
    waiting: int
    resident: float
    arrays: float


@dataclass
class Load:
    """Clients that ask, err and leave at random for a while.

    Args:
        url, pid: the server.
        plan: what they ask.
        clients: how many at once.
        seconds: how long.

    Attributes:
        counts: requests by what became of them.
        statuses: responses by status.
        wrong: answers unlike those given alone, and refusals that were not.
        states: the server meanwhile.
        idle: the server before and after.
        resident: seconds since the begin, and megabytes of its process.
    """

    url: str
    pid: int
    plan: list[Case]
    clients: int
    seconds: float
    counts: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    idle: list[State] = field(default_factory=list)
    resident: list[tuple[float, float]] = field(default_factory=list)
    alone: list[Said] = field(default_factory=list)

    async def run(self) -> None:
        """Ask everything once alone, then all at once, and wait for the server to be idle.

        Raises:
            TimeoutError: it does not become idle.
        """
        async with self._client() as client:
            self.alone = [await self._ask(client, case, n % 2 == 0) for n, case in enumerate(self.plan)]
            self.wrong = [f"{self.plan[n]}, alone: {said}" for n, said in enumerate(self.alone) if -2 in said]
            self.idle.append(await self._state(client))
            begin = time.monotonic()
            watching = [asyncio.ensure_future(self._watch(client)), asyncio.ensure_future(self._weigh(begin))]
            await asyncio.gather(
                *[self._be_client(random.Random(n), begin + self.seconds) for n in range(self.clients)]
            )
            for task in watching:
                task.cancel()
            async with asyncio.timeout(30):
                while (state := await self._state(client)).running or state.waiting:
                    await asyncio.sleep(0.05)
            self.idle.append(state)

    def most(self, third: int) -> float:
        """The most megabytes of its process in a third of the time: 0, 1 or 2."""
        return max(size for at, size in self.resident if third <= 3 * at / self.seconds < third + 1)

    def report(self) -> str:
        """Figures for a reader."""
        lines = [f"{dict(self.counts)}, statuses {dict(sorted(self.statuses.items()))}, wrong {len(self.wrong)}"]
        peak = max(state.running for state in self.states), max(state.waiting for state in self.states)
        lines.append(f"most running {peak[0]}, waiting {peak[1]}")
        lines += [f"idle {when}: {state}" for when, state in zip(("before", "after"), self.idle, strict=True)]
        lines.append(f"most MB of the process by thirds: {[round(self.most(third), 1) for third in range(3)]}")
        return "\n".join(lines)

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=300, trust_env=False)

    async def _be_client(self, dice: random.Random, end: float) -> None:
        async with self._client() as client:
            while time.monotonic() < end:
                what = dice.random()
                if what < 0.15:
                    await self._err(client, dice)
                elif what < 0.35:
                    await self._leave(client, dice)
                else:
                    await self._compare(client, dice)

    async def _compare(self, client: httpx.AsyncClient, dice: random.Random) -> None:
        n = dice.randrange(len(self.plan))
        stream = dice.random() < 0.75
        said = await self._ask(client, self.plan[n], stream)
        self.counts["completed"] += 1
        if said != self.alone[n]:
            self.wrong.append(f"{self.plan[n]}, stream {stream}: {said}, alone {self.alone[n]}")

    async def _ask(self, client: httpx.AsyncClient, case: Case, stream: bool) -> Said:
        if not stream:
            response = await client.post(case.path, json=case.streamed(False))
            self.statuses[response.status_code] += 1
            return said_whole(case.path, response.json()) if response.status_code == 200 else {-2: response.json()}
        async with client.stream("POST", case.path, json=case.streamed(True)) as response:
            self.statuses[response.status_code] += 1
            if response.status_code != 200:
                return {-2: json.loads(await response.aread())}
            events = [line.removeprefix("data: ") async for line in response.aiter_lines() if line.startswith("data: ")]
        said = [json.loads(event) for event in events if event != "[DONE]"]
        return {-2: said[-1]} if "error" in said[-1] else said_streamed(case.path, said)

    async def _err(self, client: httpx.AsyncClient, dice: random.Random) -> None:
        method, path, given = dice.choice(MALFORMED)
        response = await client.request(method, path, **given)
        self.counts["malformed"] += 1
        self.statuses[response.status_code] += 1
        if not 400 <= response.status_code < 500:
            self.wrong.append(f"{method} {path} {str(given)[:200]}: {response.status_code} {response.text[:200]}")

    async def _leave(self, client: httpx.AsyncClient, dice: random.Random) -> None:
        """Ask for far more than is waited for, and go: while it streams, before it answers, or in mid-request."""
        self.counts["disconnects"] += 1
        case = dice.choice(self.plan)
        limit = "max_output_tokens" if case.path == "/v1/responses" else "max_tokens"
        body = {**case.streamed(dice.random() < 0.7), limit: 1500, "ignore_eos": True, "stop": []}
        if dice.random() < 0.5 and body["stream"]:
            async with client.stream("POST", case.path, json=body) as response:
                self.statuses[response.status_code] += 1
                lines = response.aiter_lines()
                for _ in range(dice.choice((0, 1, 5, 20))):
                    await anext(lines, None)
            return
        content = json.dumps(body).encode()
        head = f"POST {case.path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head + content[: dice.choice((len(content), len(content), len(content) // 2))])
        await writer.drain()
        await asyncio.sleep(dice.choice((0, 0.002, 0.02)))
        writer.close()

    async def _watch(self, client: httpx.AsyncClient) -> None:
        while True:
            self.states.append(await self._state(client))
            await asyncio.sleep(0.2)

    async def _weigh(self, begin: float) -> None:
        while True:
            self.resident.append((time.monotonic() - begin, self._resident()))
            await asyncio.sleep(0.05)

    async def _state(self, client: httpx.AsyncClient) -> State:
        health, metrics = (await client.get("/health")).json(), (await client.get("/metrics")).text
        (arrays,) = re.findall(r'^selfdraft_memory_bytes\{kind="arrays"\} (\S+)$', metrics, re.MULTILINE)
        return State(health["running"], health["waiting"], self._resident(), float(arrays) / 1e6)

    def _resident(self) -> float:
        return float(psutil.Process(self.pid).memory_info().rss / 1e6)
