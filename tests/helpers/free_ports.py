"""Loopback ports on which no program listens."""

import socket
from contextlib import ExitStack
from typing import Final

LOOPBACK: Final = "127.0.0.1"

HELD: Final[set[int]] = set()
"""Descriptors of held ports. Servers that several tests share keep their ports after a test, which is not a leak."""


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        # All sockets are open at the same time, so that their ports differ.
        sockets = [stack.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(count)]
        return [int(each.getsockname()[1]) for each in sockets]


def free_port() -> int:
    (port,) = free_ports(1)
    return port


class HeldPorts:
    """Ports for servers that are restarted. Until `close`, no other program gets one of them by chance.

    Each port is held by a bound socket that has SO_REUSEADDR and does not listen (socket(7)). The kernel gives the port
    to no program that connects or binds port 0. But a server that binds this port with SO_REUSEADDR may listen on it.
    """

    def __init__(self, count: int) -> None:
        self._sockets = [socket.socket() for _ in range(count)]
        for each in self._sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind((LOOPBACK, 0))
            HELD.add(each.fileno())

    @property
    def ports(self) -> list[int]:
        return [int(each.getsockname()[1]) for each in self._sockets]

    def close(self) -> None:
        for each in self._sockets:
            HELD.discard(each.fileno())
            each.close()
