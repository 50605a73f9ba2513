"""Guards that a request cannot make the server ask anything of the network it stands in: only public addresses are
connected to, each the very one that was looked at, on two ports, without a redirect, in bounded time and size.

The resolver is a dict, and connections go to a server of the test, whatever public address they were meant for."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from selfdraft.errors import ImageTooLarge, InvalidRequest
from selfdraft.server import remote_images
from selfdraft.server.remote_images import Fetcher, is_public

PUBLIC = "93.184.216.34"
OTHER = "2606:2800:220:1:248:1893:25c8:1946"
FILE = b"\x89PNG and so on"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(FILE), FILE)

Answer = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


class Network:
    """A world of names and of one server.

    Attributes:
        names: addresses of names.
        answer: what the server says to anything, or does.
        down: addresses that take no connection.
        asked: requests as they came.
        connected: where connections went: address, port, name of the certificate.
    """

    def __init__(self, **names: Sequence[str]) -> None:
        self.names = {"pictures.example": [PUBLIC], **{name.replace("_", "."): found for name, found in names.items()}}
        self.answer: Answer = OK
        self.down: set[str] = set()
        self.asked: list[bytes] = []
        self.resolved: list[str] = []
        self.connected: list[tuple[str, int, str | None]] = []

    def resolve(self, host: str, port: int) -> Sequence[str]:
        self.resolved.append(host)
        if host not in self.names:
            raise OSError(-2, "Name or service not known")
        return self.names[host]

    async def connect(
        self, host: str, port: int, *, ssl: ssl.SSLContext | None = None, server_hostname: str | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.connected.append((host, port, server_hostname))
        assert (ssl is not None) == (server_hostname is not None)
        if host in self.down:
            raise ConnectionRefusedError(111, "Connection refused")
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append(await reader.readuntil(b"\r\n\r\n"))
        try:
            if isinstance(self.answer, bytes):
                writer.write(self.answer)
                await writer.drain()
            else:
                await self.answer(writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    def fetch(self, *urls: str, most: int = 1000, seconds: float = 5) -> list[Any]:
        """What comes of each URL, asked at once: a file, or an exception."""

        async def run() -> list[Any]:
            async with await asyncio.start_server(self.serve, "127.0.0.1", 0) as server:
                self.port = server.sockets[0].getsockname()[1]
                fetcher = Fetcher(most, resolve=self.resolve, connect=self.connect, seconds=seconds)
                async with asyncio.timeout(30):  # a test ends, whatever it finds
                    return await asyncio.gather(*map(fetcher.fetch, urls), return_exceptions=True)

        return asyncio.run(run())

    def refusal(self, url: str, **given: Any) -> InvalidRequest:
        (refused,) = self.fetch(url, **given)
        assert isinstance(refused, InvalidRequest), refused
        return refused


# What is fetched


def test_a_file() -> None:
    network = Network()
    assert network.fetch("https://pictures.example/a%20b.png?size=1&x=#top") == [FILE]
    assert network.connected == [(PUBLIC, 443, "pictures.example")]  # the address; its certificate is the name's
    request = network.asked[0].decode().split("\r\n")
    assert request[0] == "GET /a%20b.png?size=1&x= HTTP/1.1"
    headers = dict(line.lower().split(": ") for line in request[1:] if line)
    assert headers["host"] == "pictures.example"
    assert headers.keys() == {
        "host",
        "user-agent",
        "accept",
        "accept-encoding",
        "connection",
    }  # and nothing of a client


def test_a_name_is_resolved_once() -> None:
    """Or it could be another address by the time it is connected to (DNS rebinding)."""
    network = Network()
    answers = iter([[PUBLIC], ["127.0.0.1"]])
    network.resolve = lambda host, port: next(answers)  # type: ignore[method-assign]
    assert network.fetch("http://pictures.example/") == [FILE]
    assert [where for where, _, _ in network.connected] == [PUBLIC]


@pytest.mark.parametrize(
    ("url", "port", "host"),
    [
        ("http://pictures.example", 80, "pictures.example"),
        ("http://pictures.example:80/", 80, "pictures.example"),
        ("https://pictures.example:443/", 443, "pictures.example"),
        ("http://pictures.example:443/", 443, "pictures.example:443"),
        ("http://PICTURES.example/", 80, "pictures.example"),
        (f"http://[{OTHER}]/", 80, f"[{OTHER}]"),
    ],
)
def test_ports_and_hosts(url: str, port: int, host: str) -> None:
    network = Network()
    network.names[OTHER] = [OTHER]
    assert network.fetch(url) == [FILE]
    assert network.connected[0][1] == port
    assert f"\r\nHost: {host}\r\n".encode() in network.asked[0]


def test_the_next_address_is_tried() -> None:
    network = Network(pictures_example=[OTHER, PUBLIC])
    network.down = {OTHER}
    assert network.fetch("http://pictures.example/") == [FILE]
    assert [where for where, _, _ in network.connected] == [OTHER, PUBLIC]


def test_a_body_in_chunks_or_up_to_the_end() -> None:
    network = Network()
    network.answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    assert network.fetch("http://pictures.example/") == [b"abcde"]
    network.answer = b"HTTP/1.0 200 OK\r\n\r\nabcde"
    assert network.fetch("http://pictures.example/") == [b"abcde"]


# Addresses


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "10.0.0.1",
        "100.64.0.1",
        "127.0.0.1",
        "127.255.255.254",
        "169.254.169.254",  # where clouds keep credentials
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.1",
        "192.0.2.1",
        "192.168.1.1",
        "198.18.0.1",
        "198.51.100.1",
        "203.0.113.1",
        "224.0.0.1",
        "239.255.255.250",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::127.0.0.1",
        "::ffff:127.0.0.1",
        "::ffff:93.184.216.34",  # mapped: its IPv4 address would be asked for by name
        "::ffff:0:10.0.0.1",
        "64:ff9b::10.0.0.1",  # NAT64
        "64:ff9b::5db8:d822",
        "64:ff9b:1::1",
        "100::1",
        "2001::1",  # Teredo
        "2001:db8::1",
        "2002:7f00:1::1",  # 6to4 of 127.0.0.1
        "fc00::1",
        "fd12:3456::1",
        "fe80::1",
        "fe80::1%eth0",
        "fec0::1",
        "ff02::1",
        "ff0e::1",
        "localhost",
        "",
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)
    network = Network(pictures_example=[address])
    says = str(network.refusal("https://pictures.example/a.png"))
    assert "its address is not a public one" in says
    assert not address or address not in says  # nobody learns what the name means in here
    assert network.connected == []


@pytest.mark.parametrize("address", [PUBLIC, OTHER, "1.1.1.1", "172.32.0.1", "2a00:1450:4001:800::200e"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("found", [[PUBLIC, "10.0.0.1"], ["10.0.0.1", PUBLIC], [OTHER, "::1"], []])
def test_every_address_must_be_public(found: list[str]) -> None:
    network = Network(pictures_example=found)
    assert "not a public one" in str(network.refusal("http://pictures.example/"))
    assert network.connected == []


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.1", "0x7f.1", "2130706433", "0177.0.0.1", "localhost", "[::1]", "[::ffff:7f00:1]"]
)
def test_other_ways_to_write_loopback(host: str) -> None:
    """With the system's own resolver, which knows them all."""
    asked: list[str] = []

    async def connect(host: str, port: int, **options: Any) -> Any:
        asked.append(host)
        raise ConnectionRefusedError

    async def run() -> None:
        await Fetcher(1000, connect=connect, seconds=5).fetch(f"http://{host}/")

    with pytest.raises(InvalidRequest):
        asyncio.run(run())
    assert asked == []


# What else is refused


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://pictures.example:8080/", "port 8080 of 'pictures.example' is not asked: only 80 and 443 are"),
        ("http://pictures.example:22/", "port 22"),
        ("http://pictures.example:0/", "port 0"),
        ("http://pictures.example:99999/", "is no address"),
        ("http://user:secret@pictures.example/", "holds a name or a password"),
        ("http://@pictures.example/", "holds a name or a password"),
        ("http://pictures.example@10.0.0.1/", "holds a name or a password"),
        ("http:///a.png", "is no http or https address"),
        ("http:pictures.example", "is no http or https address"),
        ("ftp://pictures.example/", "is no http or https address"),
        ("http://[::1/", "is no address"),
        ("http://pictures.example\\@10.0.0.1/", "is no address"),
        ("http://pictures.example/a b", "is no address"),
        ("http://pictures.example/\r\nHost: other", "is no address"),
        ("http://pictures.example/\n", "is no address"),
        ("http://bücher.example/", "is no address"),
        ("http://pictures.example/" + "a" * 9000, "characters; at most 8,192 are accepted"),
        ("http://nowhere.example/", "nothing can be fetched from 'nowhere.example' (Name or service not known)"),
    ],
)
def test_addresses_that_are_not_asked(url: str, says: str) -> None:
    network = Network()
    refused = str(network.refusal(url))
    assert says in refused
    assert "secret" not in refused
    assert network.connected == []


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: http://10.0.0.1/\r\n\r\n", "redirects (HTTP 302), and no redirect is"),
        (b"HTTP/1.1 301 Moved\r\nLocation: https://pictures.example/b\r\n\r\n", "redirects (HTTP 301)"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "answers HTTP 404: check the address"),
        (b"HTTP/1.1 206 Partial\r\nContent-Length: 0\r\n\r\n", "answers HTTP 206"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "nothing can be fetched"),
        (b"", "nothing can be fetched"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc", "nothing can be fetched"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000, "nothing can be fetched"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "nothing can be fetched"),
    ],
)
def test_answers_that_are_no_file(answer: bytes, says: str) -> None:
    network = Network()
    network.answer = answer
    assert says in str(network.refusal("http://pictures.example/"))
    assert len(network.connected) == 1


def test_no_address_takes_a_connection() -> None:
    network = Network()
    network.down = {PUBLIC}
    assert "nothing can be fetched from 'pictures.example'" in str(network.refusal("http://pictures.example/"))


# Bounds


@pytest.mark.parametrize("announced", [True, False])
def test_a_file_that_is_too_large(announced: bool) -> None:
    """It is not read to its end to find out."""
    network = Network()
    sent = 0

    async def answer(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        length = b"Content-Length: 100000000\r\n" if announced else b""
        writer.write(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n")
        while sent < 10**8:
            writer.write(bytes(10_000))
            await writer.drain()
            sent += 10_000

    network.answer = answer
    refused = network.refusal("http://pictures.example/")
    assert isinstance(refused, ImageTooLarge)
    assert "has over 1,000 bytes: make it smaller" in str(refused)
    assert sent < 10**8


def test_a_file_of_just_the_size() -> None:
    assert Network().fetch("http://pictures.example/", most=len(FILE)) == [FILE]


@pytest.mark.parametrize("where", ["name", "connection", "headers", "body"])
def test_whatever_takes_too_long(where: str) -> None:
    """A byte at a time, too: the whole of it has one time limit."""
    network = Network()
    slow = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n" + (b"\r\n" if where == "body" else b"X: ")

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(slow)
        while not writer.is_closing():
            writer.write(b"a")
            await writer.drain()
            await asyncio.sleep(0.02)

    async def connect(*where: Any, **options: Any) -> Any:
        await asyncio.sleep(60)

    network.answer = answer
    if where == "connection":
        network.connect = connect  # type: ignore[method-assign]
    if where == "name":
        network.resolve = lambda host, port: time.sleep(1) or [PUBLIC]  # type: ignore[method-assign]
    begin = time.monotonic()
    assert "took longer than 0.3 s: send the image itself" in str(
        network.refusal("http://pictures.example/", seconds=0.3)
    )
    assert time.monotonic() - begin < 3


def test_few_at_once() -> None:
    network = Network()
    running = most = 0

    async def answer(writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        writer.write(OK)
        await writer.drain()

    network.answer = answer
    assert network.fetch(*["http://pictures.example/"] * 20) == [FILE] * 20
    assert most == remote_images.AT_ONCE


def test_a_certificate_is_checked() -> None:
    fetcher = Fetcher(1000)
    assert fetcher._tls.verify_mode == ssl.CERT_REQUIRED
    assert fetcher._tls.check_hostname
