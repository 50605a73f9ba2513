"""Serving: the socket, the web application and the engine's thread, from start to end. Knows signals and ports."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from ..errors import SelfdraftError
from ..llm import LLM
from .app import create_app
from .config import ServerSettings
from .connection import Connection
from .metrics import Metrics
from .registry import Registry
from .service import EngineService

__all__ = ["Server", "bind"]

_FLUSH = 5  # seconds in which clients may read the end of what was written for them
_SPARE_CONNECTIONS = 128  # beside those whose answers run or wait: idle ones, the chat page, /health


def bind(host: str, port: int) -> socket.socket:
    """A listening address, taken before a model is loaded for nothing.

    Raises:
        SelfdraftError: the port is taken, or the address is not this machine's, with the remedy.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise SelfdraftError(
                f"port {port} on {host} is in use: stop what runs there (`selfdraft status` shows a server of ours), "
                "or choose another with --port"
            ) from error
        if error.errno == errno.EACCES:
            raise SelfdraftError(
                f"port {port} needs more rights than you have: choose one above 1023 with --port"
            ) from error
        raise SelfdraftError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


class Server:
    """A server from its socket to its model.

    Args:
        settings: how it runs.
        name: what the model is loaded as.
        load: makes the model, on the engine's thread.
        listener: see `bind`.
        started: called once the address answers; the model may still be loading.

    Attributes:
        service: the engine's side.
    """

    def __init__(
        self,
        settings: ServerSettings,
        name: str,
        load: Callable[[], LLM],
        listener: socket.socket,
        started: Callable[[], None] = lambda: None,
    ) -> None:
        self.service = EngineService(
            load,
            rows=settings.rows,
            waiting=settings.queue,
            metrics=Metrics(),
            owners=max(1, len(settings.keys())),
        )
        registry = Registry(name, settings.alias, lenient=settings.loopback and not settings.strict_model)
        config = uvicorn.Config(
            create_app(self.service, registry, settings),
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(min(settings.drain, _FLUSH)),
            timeout_keep_alive=30,
            http=Connection,
            limit_concurrency=settings.rows + settings.queue + _SPARE_CONNECTIONS,
            ws="none",
            h11_max_incomplete_event_size=64 * 1024,
        )
        self._web = _Web(config, started, self.service, settings.drain)
        self._listener = listener

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT, or `stop`: what runs may finish, a second signal ends at once.

        Raises:
            SelfdraftError: the model could not be loaded.
        """
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda number, frame: None)  # uvicorn raises it again when all is done
        self.service.start()
        try:
            self._web.run([self._listener])
        finally:
            self.service.stop()
            self._listener.close()

    def fail(self, error: SelfdraftError) -> None:
        """End now, with an error for everything that runs or waits; from any thread but the engine's, which hangs."""
        self.service.fail(error)
        self.stop()

    def stop(self) -> None:
        """Ask for the end, from any thread."""
        self._web.should_exit = True


class _Web(uvicorn.Server):
    """Says when it has started, and ends in two steps: first it turns new requests away, then it stops listening."""

    def __init__(
        self, config: uvicorn.Config, started: Callable[[], None], service: EngineService, patience: float
    ) -> None:
        super().__init__(config)
        self._on_started = started
        self._service = service
        self._patience = patience

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.drain()
        end = time.monotonic() + self._patience
        while self._service.busy and not self.force_exit and time.monotonic() < end:
            await asyncio.sleep(0.05)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True  # the second signal, whichever it is
        super().handle_exit(sig, frame)
