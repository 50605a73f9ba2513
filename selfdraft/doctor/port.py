"""The address that a server would listen on: whether it is free, and who has it."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

from .context import Context
from .finding import Finding
from .registry import check

__all__: list[str] = []


@check("port")
def _port(context: Context) -> Iterator[Finding]:
    from ..server import instance

    host, port = context.settings.host, context.settings.port
    running = instance.find()
    if running is not None and running.port == port:
        yield Finding(
            "port", "ok", f"{port}: a server of selfdraft has it, process {running.pid}, with {running.model}"
        )
        return
    error = _bind_error(host, port)
    if error is None:
        yield Finding("port", "ok", f"{port} on {host or 'every address'} is free" if port else "a free one is taken")
        return
    expected = "an address that can be listened on"
    if error.errno == errno.EADDRINUSE:
        fix = "end that program, or `selfdraft settings set port N`"
        yield Finding("port", "warn", f"{port} on {host} is taken by {_holder(port)}", expected, fix)
        return
    fix = "`selfdraft settings set port N`, above 1023, and `host`, an address of this machine"
    yield Finding("port", "warn", f"{port} on {host}: {error.strerror or error}", expected, fix)


def _bind_error(host: str, port: int) -> OSError | None:
    """Why the address cannot be had; it is let go again at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server does
            probe.bind(address)
            probe.listen()
    except OSError as error:
        return error
    return None


def _holder(port: int) -> str:
    """The program that listens there, as far as this user may know."""
    import psutil

    try:
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid:
                return f"{psutil.Process(each.pid).name()}, process {each.pid}"
    except (psutil.Error, OSError):
        pass
    return "another program"
