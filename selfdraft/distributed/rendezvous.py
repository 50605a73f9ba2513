"""How the ranks of a group come to have a connection each to rank 0: its address is told on the device."""

from __future__ import annotations

import json
import socket
from typing import Any

import mlx.core as mx

from ..errors import SelfdraftError
from .channel import Link, accept, call, listen
from .environment import leader_address
from .group import Group

__all__ = ["meet_followers", "meet_leader"]

_PACKET = 512  # bytes


def meet_followers(group: Group) -> dict[int, tuple[Link, dict[str, Any]]]:
    """On rank 0: a link to each other rank, and what it says of itself.

    Raises:
        SelfdraftError: they do not come.
    """
    address = leader_address(group.backend)
    listener, secret = listen(address)
    with listener:
        _shared(group, json.dumps([address, listener.getsockname()[1], secret]).encode())
        return accept(listener, secret, group.size - 1)


def meet_leader(group: Group, hello: dict[str, Any]) -> Link:
    """On the others: the link to rank 0.

    Args:
        hello: what this rank says of itself.

    Raises:
        SelfdraftError: it cannot be reached.
    """
    address, port, secret = json.loads(_shared(group, b""))
    return call(address, port, secret, {"rank": group.rank, "host": socket.gethostname(), **hello})


def _shared(group: Group, text: bytes) -> bytes:
    """Text of rank 0, on every rank."""
    try:
        packet = group.share(mx.array(list(text.ljust(_PACKET)), dtype=mx.int32))
        mx.eval(packet)
    except RuntimeError as error:
        raise SelfdraftError(f"the ranks cannot talk over {group.backend} ({error})") from error
    return bytes(packet.tolist()).strip()  # type: ignore[arg-type]
