"""A server for tests: a nano model with the reference tokenizer and template, behind a real socket in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

import selfdraft
from selfdraft.errors import SelfdraftError
from selfdraft.llm import LLM
from selfdraft.server.config import load_server_settings
from selfdraft.server.registry import Given
from selfdraft.server.run import Server, bind
from selfdraft.server.served import ServedModel, ServedModels
from selfdraft.server.service import EngineService
from tests.support.checkpoints import add_text_side
from tests.support.nano import nano_model, write_checkpoint

VOCABULARY = 8192


@pytest.fixture(scope="session")
def nano_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that `selfdraft.load` takes: random weights, real text side."""
    folder = tmp_path_factory.mktemp("models") / "nano"
    model = nano_model(vocab_size=VOCABULARY, sharpness=3.0)
    return add_text_side(write_checkpoint(folder, model, config={"vocab_size": VOCABULARY}))


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    url: str
    models: ServedModels
    stop: Callable[[], None] = lambda: None

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def service(self) -> EngineService:
        """The engine of the first model, as soon as it is loaded."""
        assert within(20, lambda: self.models.first is not None)
        assert self.models.first is not None
        return self.models.first

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, **options)

    def idle(self, seconds: float = 10) -> bool:
        """Whether no answer runs or waits, within so many seconds."""
        return within(seconds, lambda: self.models.figures == {"running": 0, "waiting": 0})


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    """Whether something comes to hold."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


@contextmanager
def running(*models: Callable[[], LLM] | ServedModel, ready: bool = True, **given: Any) -> Iterator[Running]:
    """A server on a free port. What only loads is called nano; `given` are its settings."""
    settings = load_server_settings(**{"port": 0, "drain": 0.2, **given})
    listener = bind(settings.host, settings.port)
    started = threading.Event()
    server = Server(settings, [_served(model) for model in models], listener, started.set)
    thread = threading.Thread(target=lambda: _run(server))
    thread.start()
    try:
        assert started.wait(20)
        if ready:
            assert within(60, lambda: server.models.ready or server.models.failure is not None)
        yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", server.models, server.stop)
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()


def _served(model: Callable[[], LLM] | ServedModel) -> ServedModel:
    if isinstance(model, ServedModel):
        return model
    return ServedModel(Given("nano", "nano"), lambda: 0, lambda beside: model())


def _run(server: Server) -> None:
    with suppress(SelfdraftError):  # a test that wants it looks at the models' failure
        server.run()


@pytest.fixture(scope="session")
def load_nano(nano_folder: Path) -> Callable[[], LLM]:
    return lambda: selfdraft.load(str(nano_folder))


@pytest.fixture(scope="session")
def server(load_nano: Callable[[], LLM]) -> Iterator[Running]:
    """One with default settings, shared by the tests that leave nothing behind."""
    with running(load_nano) as found:
        yield found
