"""Who may talk to the server: Host, Origin, API key, size and pace of a body. ASGI; knows paths, but no endpoint.

A server on loopback is reachable from every web page the user opens. So Host is always checked (DNS rebinding), Origin
whenever a browser sends one, and no page of another origin is answered unless it was allowed by name.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import InvalidRequest
from ..prompts import LOCAL
from .errors import HttpError

__all__ = ["BODY_SECONDS", "Access", "Gate", "allowed_hosts", "host_name", "is_loopback", "owner_of"]

BODY_SECONDS = 60.0  # from the headers of a request to the end of its body

# What a browser needs before it can have a key, or shows without one (all read-only, nothing of the model or of the
# settings in it), and what a supervisor asks.
OPEN_PATHS = ("/", "/docs", "/openapi.json", "/health", "/favicon.ico")
OPEN_PREFIX = "/page/"
METRICS = "/metrics"  # where one key could watch another's requests

_HOST = re.compile(r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?$")


@dataclass(frozen=True)
class Access:
    """The rules.

    Attributes:
        hosts: names and addresses under which the server may be called, besides loopback's.
        any_address: any address (not: any name) may call it, for a server that listens on all of them.
        origins: other origins whose pages may call it ("https://app.example"), none by default.
        keys: what callers must present one of; none ask for none.
        max_body: most bytes of a request body.
    """

    hosts: frozenset[str]
    any_address: bool
    origins: frozenset[str]
    keys: tuple[str, ...]
    max_body: int

    def key_of(self, headers: Headers) -> str | None:
        """The key a request came with, if it is one of ours. Takes as long whichever it is."""
        found = None
        for given in _given_keys(headers):
            for key in self.keys:
                if hmac.compare_digest(given.encode(), key.encode()):
                    found = key
        return found


def owner_of(key: str | None) -> str:
    """Whose requests those with a key are; without one, of whoever uses this machine. It says nothing of the key."""
    return LOCAL if key is None else hashlib.sha256(b"selfdraft owner " + key.encode()).hexdigest()[:16]


def _given_keys(headers: Headers) -> tuple[str, str]:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")


class Gate:
    """ASGI middleware that turns away what `Access` does not allow.

    Args:
        refuse: makes the response of a refusal of a request, in the form that its client reads.
    """

    def __init__(self, app: ASGIApp, access: Access, refuse: Callable[[Scope, HttpError], Response]) -> None:
        self._app = app
        self._access = access
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        allowed = origin if origin in self._access.origins else None
        if allowed:
            send = _with_cors(send, allowed)  # of refusals too: the page should be able to say why
        key = self._access.key_of(headers)
        scope.setdefault("state", {})["owner"] = owner_of(key)
        refusal = self._refusal(scope, headers, key)
        if refusal is not None:
            await self._refuse(scope, refusal)(scope, receive, send)
            return
        if allowed and scope["method"] == "OPTIONS":
            await _preflight(allowed, headers)(scope, receive, send)
            return
        body = _Body(receive, self._access.max_body)
        try:
            await self._app(scope, body, send)
        except _Refused as refused:
            await self._refuse(scope, refused.error)(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers, key: str | None) -> HttpError | None:
        if len(headers.getlist("host")) != 1 or (name := host_name(headers["host"])) is None:
            return HttpError("the Host header is missing or malformed", status=400, code="bad_host")
        if not self._known(name):
            return HttpError(
                f"this server does not answer to the name {name!r}; allow it with --allowed-host {name}",
                status=403,
                code="bad_host",
            )
        origin = headers.get("origin")
        if origin is not None and origin not in self._access.origins and not _same_origin(origin, headers["host"]):
            return HttpError(
                f"pages of {origin!r} may not use this server; allow them with --cors-origin {origin}",
                status=403,
                code="bad_origin",
            )
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._access.max_body:
            return _too_large(self._access.max_body)
        preflight = scope["method"] == "OPTIONS" and origin in self._access.origins
        if self._access.keys and key is None and not preflight and not _is_open(scope):
            what = "the API key is wrong" if any(_given_keys(headers)) else "an API key is needed"
            return HttpError(
                f"{what}: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
                status=401,
                code="invalid_api_key",
            )
        if scope["path"] == METRICS and key is not None and key != self._access.keys[0]:
            return HttpError(
                "these figures are about everybody's requests: only the first of the API keys may read them",
                status=403,
                code="not_permitted",
            )
        return None

    def _known(self, name: str) -> bool:
        return is_loopback(name) or name in self._access.hosts or (self._access.any_address and _is_address(name))


def host_name(host: str) -> str | None:
    """The name in a Host header, lower case, without port and brackets; None if malformed."""
    found = _HOST.match(host)
    if found is None or (found[2] and not 0 < int(found[2]) < 65536):
        return None
    return found[1].strip("[]").lower().rstrip(".")


def is_loopback(name: str) -> bool:
    """Whether a name or address means this machine, without asking a name server."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    return _is_address(name) and ipaddress.ip_address(name).is_loopback


def _is_address(name: str) -> bool:
    """Whether it is an IP address: unlike a name, it cannot be pointed elsewhere."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _same_origin(origin: str, host: str) -> bool:
    try:
        parts = urlsplit(origin)
        port = parts.port
    except ValueError:
        return False
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return False
    default = 443 if parts.scheme == "https" else 80
    found = _HOST.match(host)
    return found is not None and parts.hostname == host_name(host) and (port or default) == int(found[2] or default)


def _is_open(scope: Scope) -> bool:
    path: str = scope["path"]
    return scope["method"] in ("GET", "HEAD") and (path in OPEN_PATHS or path.startswith(OPEN_PREFIX))


class _Refused(Exception):
    """What is wrong with a body shows while it is being read."""

    def __init__(self, error: HttpError) -> None:
        super().__init__(error)
        self.error = error


def _too_large(most: int) -> HttpError:
    return HttpError(f"the body is larger than {most} bytes", status=413, code="request_too_large")


class _Body:
    """Counts a body whose length was not announced, or was announced wrongly, and waits for its end only so long."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive = receive
        self._most = most
        self._size = 0
        self._deadline: float | None = asyncio.get_running_loop().time() + BODY_SECONDS

    async def __call__(self) -> Message:
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            late = HttpError(f"the body took longer than {BODY_SECONDS:g} s", status=408, code="request_timeout")
            raise _Refused(late) from None
        if not message.get("more_body"):
            self._deadline = None  # there is nothing left to hear but that the client is gone
        self._size += len(message.get("body", b""))
        if self._size > self._most:
            raise _Refused(_too_large(self._most))
        return message


def _preflight(origin: str, headers: Headers) -> Response:
    wanted = headers.get("access-control-request-headers", "")
    return Response(
        status_code=204,
        headers={
            "access-control-allow-origin": origin,
            "access-control-allow-methods": "GET, POST, OPTIONS",
            "access-control-allow-headers": wanted,
            "access-control-max-age": "600",
            "vary": "Origin",
        },
    )


def _with_cors(send: Send, origin: str) -> Send:
    async def sender(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["access-control-allow-origin"] = origin
            headers["access-control-expose-headers"] = "Retry-After"
            headers.add_vary_header("Origin")
        await send(message)

    return sender


def allowed_hosts(names: Iterable[str]) -> frozenset[str]:
    """Names as they are compared: lower case, no port, no brackets.

    Raises:
        InvalidRequest: one that is no name.
    """
    found = {name: host_name(f"[{name}]" if name.count(":") > 1 and "[" not in name else name) for name in names}
    if wrong := [name for name, host in found.items() if host is None]:
        raise InvalidRequest(f"{wrong[0]!r} is no name or address of a host", param="allowed_host")
    return frozenset(host for host in found.values() if host is not None)
