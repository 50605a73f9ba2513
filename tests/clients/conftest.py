"""Servers for real clients, over a real socket: one of random weights, one of the reference checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

import selfdraft
from tests.server.conftest import Running, load_nano, nano_folder, running, server
from tests.support.needs import lacking

__all__ = ["load_nano", "nano_folder", "server"]  # fixtures, for the tests here

PYTHON = Path(__file__).parents[2] / ".venv-clients" / "bin" / "python"

# Nothing may leave the machine; what a client would fetch, it must do without.
OFFLINE = {
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "NO_PROXY": "127.0.0.1",
    "TOKENIZERS_PARALLELISM": "false",
}

Client = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def reference() -> Iterator[Running]:
    """A server of the bundled checkpoint, for what only a trained model writes."""
    with running(lambda: selfdraft.load("reference")) as found:
        yield found


def openai_client(server: Running, **options: Any) -> openai.OpenAI:
    """The client as a program makes it, but without retries and proxies."""
    given = {"api_key": "none", "max_retries": 0, "timeout": 60, **options}
    http = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(base_url=f"{server.url}/v1", http_client=http, **given)


def anthropic_client(server: Running, **options: Any) -> anthropic.Anthropic:
    """Likewise."""
    given = {"api_key": "none", "max_retries": 0, "timeout": 60, **options}
    return anthropic.Anthropic(base_url=server.url, http_client=anthropic.DefaultHttpxClient(trust_env=False), **given)


@pytest.fixture(scope="session")
def oai(server: Running) -> Iterator[openai.OpenAI]:
    """OpenAI's client of the nano server."""
    with openai_client(server) as client:
        yield client


@pytest.fixture(scope="session")
def trained(reference: Running) -> Iterator[openai.OpenAI]:
    """OpenAI's client of the reference server."""
    with openai_client(reference) as client:
        yield client


@pytest.fixture(scope="session")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Client:
    """Runs a script of this folder with the interpreter of .venv-clients, and returns the JSON that it writes.

    The script gets the path of its result as its first argument, then those given here.
    """
    if not PYTHON.exists():
        lacking("there is no .venv-clients (sh scripts/setup_aside.sh clients tests/clients/requirements.txt)")

    def run(script: str, *arguments: str, timeout: float = 240) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(Path(script).stem)
        result = folder / "result.json"
        command = [PYTHON, Path(__file__).parent / script, result, *arguments]
        environment = {**os.environ, **OFFLINE, "HOME": str(folder), "HF_HOME": str(folder / "hf")}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return found

    return run
