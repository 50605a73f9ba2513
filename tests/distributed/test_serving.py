"""Guards serving by several ranks, as real processes: one that dies ends requests at once, and nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from selfdraft.distributed.channel import LOST
from tests.support.ranks import ROOT, shared_folder

COMMAND = [sys.executable, "-m", "selfdraft", "serve", "--dtype", "float32", "--port", "0"]
SOON = 30.0  # seconds, where machines are busy


@dataclass
class Group:
    """A server and its ranks."""

    process: subprocess.Popen[str]
    url: str
    said: list[str]

    @property
    def ranks(self) -> list[psutil.Process]:
        """Those that run, rank 0 first."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        ours = [each for each in below if "MLX_RANK" in each.environ()]
        return sorted(ours, key=lambda each: int(each.environ()["MLX_RANK"]))

    def ended(self, seconds: float) -> int:
        """The exit code of the whole."""
        return self.process.wait(seconds)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_folder(tmp_path_factory.mktemp("served") / "nano")


@contextmanager
def serving(folder: Path, home: Path, *arguments: str) -> Iterator[Group]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(home), "HOME": str(home)}
    process = subprocess.Popen(
        [*COMMAND, "--model", str(folder), *arguments], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    group = Group(process, "", [])
    listening = threading.Event()

    def read() -> None:
        for line in process.stderr or ():
            group.said.append(line)
            if found := re.search(r"listening on (http://\S+:\d+)", line):
                group.url = found[1]
                listening.set()
        listening.set()  # or it has ended

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    ranks: list[psutil.Process] = []
    try:
        assert listening.wait(90), group.said
        assert group.url, group.said
        deadline = time.monotonic() + 90
        while httpx.get(f"{group.url}/health", trust_env=False).json()["status"] != "ok":
            assert time.monotonic() < deadline, group.said
            time.sleep(0.2)
        ranks = group.ranks
        yield group
        left = psutil.wait_procs(ranks, timeout=SOON)[1]
        assert not left, "every rank ends with the server"
    finally:
        for each in [process, *ranks]:
            if each.pid and psutil.pid_exists(each.pid):
                each.kill()
        process.wait()
        reader.join(5)
        process.stderr.close()


def body(tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "default", "prompt": "The lighthouse", "max_tokens": tokens, "temperature": 0, **more}


def ask(group: Group, tokens: int) -> str:
    answer = httpx.post(f"{group.url}/v1/completions", json=body(tokens), timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def broken_stream(group: Group, number: int) -> tuple[str, float]:
    """Send rank 1 a signal while an answer streams: the stream's error, and after how many seconds it came."""
    with httpx.stream(
        "POST", f"{group.url}/v1/completions", json=body(3000, stream=True), timeout=120, trust_env=False
    ) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        next(lines)
        group.ranks[1].send_signal(number)
        begin = time.monotonic()
        for line in lines:
            if "error" in (event := json.loads(line.removeprefix("data: "))):
                return event["error"]["message"], time.monotonic() - begin
    raise AssertionError("the stream ended without an error")


def test_a_rank_that_is_killed_ends_answers_and_the_server(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path, "--ranks", "2") as group:
        message, seconds = broken_stream(group, signal.SIGKILL)
        assert "rank 1 ended" in message
        assert seconds < 5
        assert group.ended(SOON) == 1
    assert "rank 1 of the group was ended by signal 9" in group.said[-1]


def test_a_rank_that_is_stopped_is_noticed(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path, "--ranks", "2") as group:
        message, seconds = broken_stream(group, signal.SIGSTOP)
        assert f"has not answered for {LOST:g} s" in message
        assert seconds < LOST + 5
        assert group.ended(2 * SOON) == 1


def test_one_ctrl_c_ends_all_ranks_behind_the_answers_that_run(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path, "--ranks", "2") as group:
        first = ask(group, 6)
        with httpx.stream(
            "POST", f"{group.url}/v1/completions", json=body(3000, stream=True), timeout=120, trust_env=False
        ) as answer:
            next(answer.iter_lines())  # then the client goes away
        assert ask(group, 6) == first
        group.process.send_signal(signal.SIGINT)
        assert group.ended(SOON) == 0, group.said


def test_rank_0_that_is_killed_ends_the_others(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path, "--ranks", "2") as group:
        group.ranks[0].kill()
        assert group.ended(SOON) == 1
    assert any("rank 0" in line for line in group.said)


def test_a_host_file_starts_ranks_through_mlx_launch(folder: Path, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * 2))
    with serving(folder, tmp_path, "--hosts", str(hosts)) as group:
        assert ask(group, 4)
        group.process.send_signal(signal.SIGTERM)
        assert group.ended(4 * SOON) == 0, group.said
