"""The real coding agents, one turn each: opt-in, `make test-clients` installs them and sets TESTS_AGENTS.

With the reference model the turn is what a user sees, though slow on a CPU: their prompts are ten thousand tokens and
more. A scripted model takes each through its tools as well: calls out, results in, the last word shown.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import running, within

from .agents import AGENTS, NOTES, PINNED, Agent
from .scripted import SAID, load_scripted, playing, quick_checkpoint

pytestmark = pytest.mark.skipif(not os.environ.get("TESTS_AGENTS"), reason="opt-in: make test-clients")

PATHS = {"claude-code": "/v1/messages", "codex": "/v1/responses", "opencode": "/v1/chat/completions"}

names = pytest.mark.parametrize("name", AGENTS)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`selfdraft serve` with the bundled model, as its own process and with the fastest BLAS there is."""
    home = tmp_path_factory.mktemp("server")
    with (home / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "selfdraft", "serve", "--model", "reference", "--port", "0"],
            env={**os.environ, "SELFDRAFT_BLAS": "auto", "XDG_STATE_HOME": str(home)},
            stderr=log,
        )
    try:
        assert within(120, lambda: "http://" in (home / "log").read_text())
        (url,) = re.findall(r"http://\S+:\d+", (home / "log").read_text())
        assert within(120, lambda: httpx.get(f"{url}/health", trust_env=False, timeout=60).status_code == 200)
        yield url
    finally:
        process.terminate()
        process.wait(120)


def requests(url: str) -> dict[tuple[str, str], int]:
    """How often each path was answered with each status, from the server's own counters."""
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    found = re.findall(r'requests_total\{path="([^"]+)",status="(\d+)"\} (\d+)', text)
    return {(path, status): int(count) for path, status, count in found}


def said(agent: Agent, run: subprocess.CompletedProcess[str]) -> str:
    """What it printed, of a turn that went well."""
    shown = run.stdout + run.stderr
    assert run.returncode == 0, shown
    assert "API Error" not in shown, shown
    return run.stdout.strip()


def test_their_versions_are_the_pinned_ones() -> None:
    assert {agent.package: agent.version for agent in AGENTS.values()} == PINNED


@names
def test_a_turn_with_the_reference_model(name: str, reference: str, tmp_path: Path) -> None:
    before = requests(reference)
    run = AGENTS[name].ask(reference, tmp_path, timeout=3000, think=False)
    assert said(AGENTS[name], run), run.stderr
    new = {key for key, count in requests(reference).items() if count > before.get(key, 0)}
    assert (PATHS[name], "200") in new
    assert all(status == "200" for path, status in new if path.startswith("/v1/")), new


@names
def test_a_turn_through_their_tools(name: str, tmp_path: Path) -> None:
    prompts: list[str] = []
    play = playing(AGENTS[name].calls)

    def script(prompt: str) -> str:
        prompts.append(prompt)
        return play(prompt)

    folder = quick_checkpoint(tmp_path / "model")
    (tmp_path / "agent").mkdir()
    with running(lambda: load_scripted(folder, script)) as server:
        run = AGENTS[name].ask(server.url, tmp_path / "agent", timeout=600)
        counts = requests(server.url)
    assert SAID in said(AGENTS[name], run)
    assert (PATHS[name], "200") in counts
    assert {status for _, status in counts} == {"200"}, counts
    assert NOTES.strip() in prompts[-1]  # a tool ran, and its result came back
