"""Serving: the socket, the web application and the models, from start to end. Knows signals and ports."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType

import uvicorn

from ..errors import SelfdraftError
from .app import create_app
from .config import ServerSettings
from .connection import Connection
from .retrieval import Retrieval, retrieval_of
from .served import ServedModel, ServedModels

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
    """A server from its socket to its models.

    Args:
        settings: how it runs.
        models: what it serves; the first is the default.
        listener: see `bind`.
        started: called once the address answers; the model may still be loading.

    Attributes:
        models: what is loaded of them.
        retrieval: embedding models and rerankers.
    """

    def __init__(
        self,
        settings: ServerSettings,
        models: Sequence[ServedModel],
        listener: socket.socket,
        started: Callable[[], None] = lambda: None,
    ) -> None:
        self.models = ServedModels(models, settings)
        self.retrieval = retrieval_of(settings, self.models)
        config = uvicorn.Config(
            create_app(self.models, self.retrieval, settings),
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(min(settings.drain, _FLUSH)),
            timeout_keep_alive=30,
            http=Connection,
            limit_concurrency=len(models) * (settings.rows + settings.queue) + _SPARE_CONNECTIONS,
            ws="none",
            h11_max_incomplete_event_size=64 * 1024,
        )
        self._web = _Web(config, started, self.models, self.retrieval, settings.drain)
        self._listener = listener

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT, or `stop`: what runs may finish, a second signal ends at once.

        Raises:
            SelfdraftError: the first model could not be loaded.
        """
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda number, frame: None)  # uvicorn raises it again when all is done
        try:
            self._web.run([self._listener])
        finally:
            for service in self.models.services:  # where the event loop broke off
                service.stop()
            self._listener.close()
        if self.models.failure is not None:
            raise self.models.failure

    def fail(self, error: SelfdraftError) -> None:
        """End now, with an error for everything that runs or waits; from any thread but an engine's, which hangs."""
        self.models.fail(error)
        self.stop()

    def stop(self) -> None:
        """Ask for the end, from any thread."""
        self._web.should_exit = True


class _Web(uvicorn.Server):
    """Says when it has started, and ends in two steps: first it turns new requests away, then it stops listening."""

    def __init__(
        self,
        config: uvicorn.Config,
        started: Callable[[], None],
        models: ServedModels,
        retrieval: Retrieval,
        patience: float,
    ) -> None:
        super().__init__(config)
        self._on_started = started
        self._models = models
        self._retrieval = retrieval
        self._patience = patience

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._models.start()
        self._retrieval.start()
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._models.drain()
        end = time.monotonic() + self._patience
        while (self._models.busy or self._retrieval.busy) and not self.force_exit and time.monotonic() < end:
            await asyncio.sleep(0.05)
        await super().shutdown(sockets)
        await self._retrieval.close()
        await self._models.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True  # the second signal, whichever it is
        super().handle_exit(sig, frame)
