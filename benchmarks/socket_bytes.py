"""Bytes that this process sent and received over TCP so far, by what the kernel says of its sockets. Linux alone."""

from __future__ import annotations

import os
import socket
import struct

__all__ = ["tcp_bytes"]

# struct tcp_info of linux/tcp.h: tcpi_bytes_acked and tcpi_bytes_received, each u64.
_ACKED, _RECEIVED, _SIZE = 120, 128, 136


def tcp_bytes() -> tuple[int, int]:
    """Acknowledged and received bytes of all TCP connections that are open."""
    sent = received = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            duplicate = os.dup(int(name))
        except OSError:
            continue
        try:
            with socket.socket(fileno=duplicate) as connection:
                connection.getpeername()
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # no socket, or none that is connected over TCP
            _close(duplicate)
            continue
        if len(info) >= _SIZE:
            sent += struct.unpack_from("Q", info, _ACKED)[0]
            received += struct.unpack_from("Q", info, _RECEIVED)[0]
    return sent, received


def _close(descriptor: int) -> None:
    try:
        os.close(descriptor)
    except OSError:  # the socket object closed it
        return
