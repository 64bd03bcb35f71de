"""Sockets that our servers listen on: the stack's, and the training server of each session."""

from __future__ import annotations

import socket

UNREAD_SECONDS = 60
_BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Port 0 takes any free one.

    Raises:
        OSError: something else has the port, or the host is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Not by protocol 0, the default: asyncio turns Nagle's algorithm off only for sockets that say they are TCP, and
    # with it each answer on a kept connection would wait 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Else a reader that takes nothing keeps its connection for ever: closing waits for what is still to be sent.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_SECONDS * 1000)
    try:
        listener.bind((host, port))
        # Bound alone does not keep another process out: two may bind with SO_REUSEADDR, only one may listen.
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
