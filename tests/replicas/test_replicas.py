"""Guards packaging/litellm/config.yaml: a conversation stays with its replica, and goes on without it if it must.

LiteLLM's real proxy stands in front of two real servers, which are told apart by its headers and by their own counts.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import within
from tests.support.needs import lacking

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "packaging/litellm/config.yaml"
LITELLM = ROOT / ".venv-proxy/bin/litellm"
KEY = "sk-0123456789abcdef0123456789abcdef"
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "1"}


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def program(command: list[str], log: Path, health: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server that answers."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **OFFLINE, **variables}, cwd=ROOT, stdout=output, stderr=output
        )
    try:
        assert within(180, lambda: process.poll() is not None or _answers(health)), log.read_text()[-3000:]
        assert process.poll() is None, log.read_text()[-3000:]
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    time.sleep(0.2)
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@dataclass
class Cluster:
    """The proxy, and its replicas by their ids."""

    url: str
    replicas: dict[str, tuple[subprocess.Popen[bytes], str]]

    def ask(self, messages: list[dict[str, str]], session: str) -> tuple[str, dict[str, Any]]:
        """An answer, and which replica gave it, as LiteLLM has it."""
        response = httpx.post(
            f"{self.url}/v1/chat/completions",
            json={"model": "selfdraft", "messages": messages, "max_tokens": 24, "temperature": 0},
            headers={"Authorization": f"Bearer {KEY}", **({"x-litellm-session-id": session} if session else {})},
            timeout=120,
            trust_env=False,
        )
        assert response.status_code == 200, response.text[:2000]
        return response.headers["x-litellm-model-id"], response.json()

    def answered(self) -> dict[str, int]:
        """How many chats each replica answered, as it counts itself; of one that is gone, none."""
        found = {}
        for name, (process, url) in self.replicas.items():
            text = httpx.get(f"{url}/metrics", trust_env=False).text if process.poll() is None else ""
            counted = re.search(r'requests_total\{path="/v1/chat/completions",status="200"\} (\d+)', text)
            found[name] = int(counted[1]) if counted else 0
        return found


class Conversation:
    """Turns that go on from each other."""

    def __init__(self, cluster: Cluster, question: str, session: str | None = None) -> None:
        self._cluster = cluster
        self.session = f"conversation-{uuid.uuid4()}" if session is None else session
        self._messages = [{"role": "user", "content": question}]

    def turn(self) -> tuple[str, int]:
        """Which replica answered, and how many tokens of the prompt were warm there."""
        replica, body = self._cluster.ask(self._messages, self.session)
        answer = body["choices"][0]["message"]["content"]
        following = "Give me five fruits as a numbered list."
        self._messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": following}]
        return replica, body["usage"]["prompt_tokens_details"]["cached_tokens"]

    def stream(self) -> AbstractContextManager[httpx.Response]:
        """A long answer, as it comes."""
        return httpx.stream(
            "POST",
            f"{self._cluster.url}/v1/chat/completions",
            json={
                "model": "selfdraft",
                "messages": self._messages,
                "max_tokens": 1000,
                "ignore_eos": True,
                "stream": True,
            },
            headers={"Authorization": f"Bearer {KEY}", "x-litellm-session-id": self.session},
            timeout=120,
            trust_env=False,
        )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if not LITELLM.exists():
        lacking("there is no .venv-proxy (sh scripts/setup_aside.sh proxy tests/replicas/requirements.txt)")
    folder = tmp_path_factory.mktemp("replicas")
    *ports, front = free_ports(3)
    text = CONFIG.read_text()
    for shipped, port in zip((8001, 8002), ports, strict=True):
        assert text.count(f"http://127.0.0.1:{shipped}/v1") == 1
        text = text.replace(f"http://127.0.0.1:{shipped}/v1", f"http://127.0.0.1:{port}/v1")
    (folder / "config.yaml").write_text(text)
    with ExitStack() as stack:
        replicas = {}
        for index, port in enumerate(ports, 1):
            url = f"http://127.0.0.1:{port}"
            command = [sys.executable, "-m", "selfdraft", "serve", "--port", str(port)]
            state = {"XDG_STATE_HOME": str(folder / str(index))}
            process = stack.enter_context(program(command, folder / f"{index}.log", f"{url}/health", **state))
            replicas[f"replica-{index}"] = (process, url)
        url = f"http://127.0.0.1:{front}"
        command = [str(LITELLM), "--config", str(folder / "config.yaml"), "--host", "127.0.0.1", "--port", str(front)]
        keys = {"SELFDRAFT_API_KEY": "none", "LITELLM_MASTER_KEY": KEY, "HOME": str(folder)}
        stack.enter_context(program(command, folder / "proxy.log", f"{url}/health/liveliness", **keys))
        yield Cluster(url, replicas)


def test_a_conversation_stays_where_it_is_warm(cluster: Cluster) -> None:
    """New ones go to either replica: sixteen on one alone would be a chance of 1 in 32,768."""
    before = cluster.answered()
    seen: dict[str, int] = dict.fromkeys(cluster.replicas, 0)
    for index in range(16):
        conversation = Conversation(cluster, f"What is {index} plus {index + 40}?")
        turns = [conversation.turn() for _ in range(3 if index < 6 else 1)]
        assert len({replica for replica, _ in turns}) == 1, turns
        assert len(turns) == 1 or turns[2][1] > 30, turns  # the second turn's prompt is warm in the third
        seen[turns[0][0]] += len(turns)
    assert min(seen.values()) > 0
    after = cluster.answered()
    assert {name: after[name] - before[name] for name in seen} == seen


def test_without_a_session_id_it_does_not_stay(cluster: Cluster) -> None:
    """What docs/replicas.md warns of; one replica sixteen times over would be a chance of 1 in 32,768."""
    conversation = Conversation(cluster, "Which city is the capital of Japan?", session="")
    assert len({conversation.turn()[0] for _ in range(16)}) == 2


def test_a_dead_replicas_conversations_go_on_elsewhere(cluster: Cluster) -> None:
    """Last: it ends a replica."""
    talks: dict[str, list[Conversation]] = {name: [] for name in cluster.replicas}
    for index in range(40):
        if min(map(len, talks.values())) >= 2:
            break
        conversation = Conversation(cluster, f"What is {index} times 3?")
        talks[conversation.turn()[0]].append(conversation)
    dead, alive = cluster.replicas
    moved = talks[dead][0]
    with moved.stream() as running:
        lines = running.iter_lines()
        next(lines)
        cluster.replicas[dead][0].send_signal(signal.SIGKILL)
        cluster.replicas[dead][0].wait()
        rest = "".join(lines)
    assert '{"error"' in rest
    assert '"finish_reason":"length"' not in rest.replace(" ", "")
    turns = [moved.turn() for _ in range(3)]
    assert {replica for replica, _ in turns} == {alive}
    assert turns[2][1] > 30  # warm there by now
    for conversation in (*talks[dead][1:2], *talks[alive][:2]):
        assert conversation.turn()[0] == alive
