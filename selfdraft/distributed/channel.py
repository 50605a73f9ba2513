"""Lines between rank 0 and the others, beside what the device carries: what to run next, and signs of life.

JSON, one message a line. A rank that is silent for `LOST` seconds, or whose connection ends, is lost. Knows no model.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

from ..errors import SelfdraftError

__all__ = ["LOST", "Link", "Message", "accept", "call", "listen"]

log = logging.getLogger(__name__)

BEAT = 1.0  # seconds between signs of life
LOST = 10.0  # seconds of silence after which a rank is lost: a stopped process closes no connection
_MEETING = 60.0  # seconds in which the others must connect; they have met on the device already
_LONGEST = 2**20  # bytes of a line

Message = list[Any]


class Link:
    """One connection. Sending is for any thread, and never waits for the other side to act.

    Attributes:
        name: of the rank at the other end, for people.
        host: its machine.
        sent: bytes.
    """

    def __init__(self, connection: socket.socket, name: str) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(LOST)
        self._socket = connection
        self._lock = threading.RLock()  # collecting garbage may send, too, in the middle of a message
        self._received = b""
        self._closed = threading.Event()
        self._reader = threading.Thread()
        self.name, self.host = name, ""
        self.sent = 0

    def send(self, message: Message) -> None:
        """Write a message; a connection that is gone is noticed by whoever reads it."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            try:
                self._socket.sendall(line)
            except OSError as error:
                log.debug("nothing reaches %s any more: %s", self.name, error)
            self.sent += len(line)

    def receive(self) -> Message:
        """The next message but signs of life.

        Raises:
            SelfdraftError: the other side is lost.
        """
        while True:
            line, found, rest = self._received.partition(b"\n")
            if not found:
                self._received += self._more()
                continue
            self._received = rest
            message: Message = json.loads(line)
            if message != ["beat"]:
                return message

    def beat(self) -> None:
        """Give signs of life from now on."""
        threading.Thread(target=self._beat, name=f"beat-{self.name}", daemon=True).start()

    def close(self, *, patience: float = 0.0) -> None:
        """Hang up.

        Args:
            patience: seconds for the other side to do so first. A connection that is closed with something unread takes
                back what was just sent.
        """
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            if self._reader.ident is not None:
                self._reader.join(patience)
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes whoever reads
        self._socket.close()

    def watch(self, take: Callable[[Message], object], lost: Callable[[SelfdraftError], object]) -> None:
        """Read on a thread of its own until one side hangs up; `lost` is told if it was the other."""

        def read() -> None:
            try:
                while True:
                    take(self.receive())
            except (SelfdraftError, ValueError) as error:
                if not self._closed.is_set():
                    lost(error if isinstance(error, SelfdraftError) else SelfdraftError(f"{self.name} talks nonsense"))

        self._reader = threading.Thread(target=read, name=f"link-{self.name}", daemon=True)
        self._reader.start()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT):
            self.send(["beat"])

    def _more(self) -> bytes:
        try:
            data = self._socket.recv(65536)
        except TimeoutError as error:
            raise SelfdraftError(f"{self.name} has not answered for {LOST:g} s: it hangs, or was stopped") from error
        except OSError as error:
            raise SelfdraftError(f"the connection to {self.name} broke ({error.strerror or error})") from error
        if not data or len(self._received) > _LONGEST:
            raise SelfdraftError(f"{self.name} ended; its log says why")
        return data


def listen(address: str) -> tuple[socket.socket, str]:
    """Where rank 0 takes the others' connections, and what they must present.

    Raises:
        SelfdraftError: the address is not this machine's.
    """
    try:
        return socket.create_server((address, 0)), secrets.token_hex(16)
    except OSError as error:
        raise SelfdraftError(
            f"rank 0 cannot listen on {address} ({error.strerror or error}): the first address of the host file must "
            "be one of the machine that serves"
        ) from error


def accept(listener: socket.socket, secret: str, others: int) -> dict[int, tuple[Link, dict[str, Any]]]:
    """Connections of all other ranks, with what each says of itself, by rank.

    Raises:
        SelfdraftError: they do not come.
    """
    found: dict[int, tuple[Link, dict[str, Any]]] = {}
    listener.settimeout(_MEETING)
    while len(found) < others:
        try:
            connection, (host, *_) = listener.accept()
        except TimeoutError as error:
            raise SelfdraftError(
                f"{others - len(found)} of {others} ranks do not connect to rank 0 within {_MEETING:g} s: is a "
                "firewall between the machines?"
            ) from error
        link = Link(connection, host)
        try:
            presented, hello = link.receive()
        except (SelfdraftError, ValueError, TypeError, RecursionError):
            presented, hello = "", {}
        if not secrets.compare_digest(str(presented).encode("utf-8", "replace"), secret.encode()):
            link.close()  # whoever it was, it is none of the ranks
            continue
        link.name, link.host = f"rank {hello['rank']}", str(hello["host"])
        found[hello["rank"]] = link, hello
    return found


def call(address: str, port: int, secret: str, hello: dict[str, Any]) -> Link:
    """Connect to rank 0.

    Raises:
        SelfdraftError: it cannot be reached.
    """
    try:
        link = Link(socket.create_connection((address, port), timeout=_MEETING), "rank 0")
    except OSError as error:
        raise SelfdraftError(
            f"rank 0 cannot be reached at {address}:{port} ({error.strerror or error}): is a firewall between the "
            "machines?"
        ) from error
    link.send([secret, hello])
    return link
