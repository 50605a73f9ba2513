"""Images that lie elsewhere: fetched from public addresses only. Knows HTTP; neither formats nor requests.

A request must not make the server ask something of the network it stands in. So a name is resolved once, every address
it has must be public, and the connection goes to that very address, with no proxy and no redirect in between.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

import h11

from .. import __version__
from ..errors import ImageTooLarge, InvalidRequest

__all__ = ["Fetcher", "is_public"]

SECONDS = 10.0  # for one image, from its name to its last byte
AT_ONCE = 8  # of all requests
_MAX_URL = 8192
_CHUNK = 64 * 1024
_PORTS = {"http": 80, "https": 443}
_PRINTABLE = re.compile(r"[!-\[\]-~]+")  # a backslash means different things to different readers

# Of IPv6 only what is given out to hosts: all else maps, translates or scopes other addresses. Two ranges in it are
# tunnels, whose addresses hold one of IPv4.
_IPV6_HOSTS = ipaddress.ip_network("2000::/3")
_IPV6_TUNNELS = (ipaddress.ip_network("2001::/32"), ipaddress.ip_network("2002::/16"))

Resolve = Callable[[str, int], Sequence[str]]
Connect = Callable[..., Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@dataclass(frozen=True)
class _Place:
    """Where an image lies.

    Attributes:
        host: a name or an address, without brackets.
        target: path and query.
    """

    scheme: str
    host: str
    port: int
    target: str

    @classmethod
    def of(cls, url: str) -> _Place:
        if len(url) > _MAX_URL:
            raise InvalidRequest(f"its address has {len(url):,} characters; at most {_MAX_URL:,} are accepted")
        if not _PRINTABLE.fullmatch(url):
            raise InvalidRequest(f"{url[:120]!r} is no address: percent-encode what is not plain ASCII")
        try:
            parts = urlsplit(url)
            port, host = parts.port, parts.hostname
        except ValueError as error:
            raise InvalidRequest(f"{url[:120]!r} is no address ({error})") from error
        if parts.scheme not in _PORTS or not host:
            raise InvalidRequest(f"{url[:120]!r} is no http or https address")
        if "@" in parts.netloc:
            raise InvalidRequest(f"the address at {host[:120]!r} holds a name or a password: leave them out")
        port = _PORTS[parts.scheme] if port is None else port
        if port not in _PORTS.values():
            raise InvalidRequest(f"port {port} of {host[:120]!r} is not asked: only 80 and 443 are")
        return cls(parts.scheme, host, port, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))

    @property
    def authority(self) -> str:
        """What the Host header says."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == _PORTS[self.scheme] else f"{name}:{self.port}"


def is_public(address: str) -> bool:
    """Whether it is the address of a host on the public network."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if found.version == 6 and (found not in _IPV6_HOSTS or any(found in tunnel for tunnel in _IPV6_TUNNELS)):
        return False
    return found.is_global and not found.is_multicast and not found.is_reserved


def _resolve(host: str, port: int) -> Sequence[str]:
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class Fetcher:
    """Fetches files, a few at a time. It sends nothing of the request's own and keeps nothing.

    Args:
        most: most bytes of a file.
        resolve: the addresses of a name; called on a thread.
        connect: as `asyncio.open_connection`.
        seconds: that one file may take.
    """

    def __init__(
        self,
        most: int,
        *,
        resolve: Resolve = _resolve,
        connect: Connect = asyncio.open_connection,
        seconds: float = SECONDS,
    ) -> None:
        self._most = most
        self._resolve = resolve
        self._connect = connect
        self._seconds = seconds
        self._places = asyncio.Semaphore(AT_ONCE)
        # Threads of its own: a name server that does not answer must not hold up those that tokenise.
        self._threads = ThreadPoolExecutor(AT_ONCE, "resolve")
        self._tls = ssl.create_default_context()

    async def fetch(self, url: str) -> bytes:
        """The file at an address.

        Raises:
            InvalidRequest: an address that is not asked, or no whole file from it in time.
            ImageTooLarge: a file over the limit.
        """
        place = _Place.of(url)
        async with self._places:
            try:
                async with asyncio.timeout(self._seconds):
                    reader, writer = await self._connected(place)
                    try:
                        return await self._read(place, reader, writer)
                    finally:
                        writer.close()
            except TimeoutError as error:
                raise InvalidRequest(
                    f"{place.host!r} took longer than {self._seconds:g} s: send the image itself"
                ) from error
            except (OSError, UnicodeError, h11.RemoteProtocolError) as error:
                why = getattr(error, "strerror", None) or str(error) or type(error).__name__
                raise InvalidRequest(
                    f"nothing can be fetched from {place.host!r} ({why}): send the image itself"
                ) from error

    async def _connected(self, place: _Place) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the first address that takes one."""
        loop = asyncio.get_running_loop()
        addresses = await loop.run_in_executor(self._threads, self._resolve, place.host, place.port)
        if not addresses or not all(map(is_public, addresses)):
            raise InvalidRequest(
                f"{place.host!r} is not asked, for its address is not a public one: send the image itself"
            )
        secure = {"ssl": self._tls, "server_hostname": place.host} if place.scheme == "https" else {}
        failure: OSError | None = None
        for address in dict.fromkeys(addresses):
            try:
                return await self._connect(address, place.port, **secure)
            except OSError as error:
                failure = error
        assert failure is not None
        raise failure

    async def _read(self, place: _Place, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        wire = h11.Connection(h11.CLIENT)
        headers = {
            "Host": place.authority,
            "User-Agent": f"selfdraft/{__version__}",
            "Accept": "image/*",
            "Accept-Encoding": "identity",
            "Connection": "close",
        }
        asked = h11.Request(method="GET", target=place.target, headers=list(headers.items()))
        writer.write((wire.send(asked) or b"") + (wire.send(h11.EndOfMessage()) or b""))
        await writer.drain()
        body = bytearray()
        while not isinstance(event := wire.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                wire.receive_data(await reader.read(_CHUNK))
            elif isinstance(event, h11.Response):
                self._check(place, event)
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > self._most:
                    raise self._too_large(place)
        return bytes(body)

    def _check(self, place: _Place, response: h11.Response) -> None:
        """Refuse by status and announced length."""
        if 300 <= response.status_code < 400:
            raise InvalidRequest(
                f"{place.host!r} redirects (HTTP {response.status_code}), and no redirect is followed: name "
                "the image itself"
            )
        if response.status_code != 200:
            raise InvalidRequest(f"{place.host!r} answers HTTP {response.status_code}: check the address")
        for name, value in response.headers:
            if name == b"content-length" and int(value) > self._most:
                raise self._too_large(place)

    def _too_large(self, place: _Place) -> ImageTooLarge:
        return ImageTooLarge(f"the image at {place.host!r} has over {self._most:,} bytes: make it smaller")
