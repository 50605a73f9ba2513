"""Who may talk to the server: Host, Origin, API key, body size. ASGI; knows no endpoint but by its path.

A server on loopback is reachable from every web page the user opens. So Host is always checked (DNS rebinding), Origin
whenever a browser sends one, and no page of another origin is answered unless it was allowed by name.
"""

from __future__ import annotations

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
from .errors import HttpError

__all__ = ["Access", "Gate", "allowed_hosts", "host_name", "is_loopback"]

# What a browser needs before it can have a key, or shows without one (all read-only, nothing of the model or of the
# settings in it), and what a supervisor asks.
OPEN_PATHS = ("/", "/docs", "/openapi.json", "/health", "/favicon.ico")
OPEN_PREFIX = "/page/"

_HOST = re.compile(r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?$")


@dataclass(frozen=True)
class Access:
    """The rules.

    Attributes:
        hosts: names and addresses under which the server may be called, besides loopback's.
        any_address: any address (not: any name) may call it, for a server that listens on all of them.
        origins: other origins whose pages may call it ("https://app.example"), none by default.
        key: what callers must present; None asks for none.
        max_body: most bytes of a request body.
    """

    hosts: frozenset[str]
    any_address: bool
    origins: frozenset[str]
    key: str | None
    max_body: int


class Gate:
    """ASGI middleware that turns away what `Access` does not allow.

    Args:
        refuse: makes the response of a refusal, in the form that the path's clients read.
    """

    def __init__(self, app: ASGIApp, access: Access, refuse: Callable[[str, HttpError], Response]) -> None:
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
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await self._refuse(scope["path"], refusal)(scope, receive, send)
            return
        if allowed and scope["method"] == "OPTIONS":
            await _preflight(allowed, headers)(scope, receive, send)
            return
        body = _Body(receive, self._access.max_body)
        try:
            await self._app(scope, body, send)
        except _TooLarge:
            refusal = _too_large(self._access.max_body)
            await self._refuse(scope["path"], refusal)(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> HttpError | None:
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
        if self._access.key is not None and not preflight and not _is_open(scope):
            return self._key_refusal(headers)
        return None

    def _key_refusal(self, headers: Headers) -> HttpError | None:
        assert self._access.key is not None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [token.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        right = [hmac.compare_digest(each.encode(), self._access.key.encode()) for each in given]
        if any(right):
            return None
        what = "the API key is wrong" if any(given) else "an API key is needed"
        return HttpError(
            f"{what}: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`", status=401, code="invalid_api_key"
        )

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


class _TooLarge(Exception):
    pass


def _too_large(most: int) -> HttpError:
    return HttpError(f"the body is larger than {most} bytes", status=413, code="request_too_large")


class _Body:
    """Counts a body whose length was not announced, or was announced wrongly."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive = receive
        self._left = most

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                raise _TooLarge
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
