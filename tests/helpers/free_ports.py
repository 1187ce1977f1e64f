"""Ports of loopback that nobody listens on."""

import socket
from contextlib import ExitStack
from typing import Final

LOOPBACK: Final = "127.0.0.1"

HELD: Final[set[int]] = set()
"""Descriptors of held ports. Servers of several tests keep theirs after the test that started them: that is no leak."""


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        # All are open at once, so that they are different ones.
        sockets = [stack.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(count)]
        return [int(each.getsockname()[1]) for each in sockets]


def free_port() -> int:
    (port,) = free_ports(1)
    return port


class HeldPorts:
    """Ports for servers that are started again: until `close`, no program gets one of them by chance.

    A bound socket with SO_REUSEADDR that does not listen does that (socket(7)): the kernel gives its port to no program
    that connects or binds port 0, but a server with SO_REUSEADDR, which names the port, may listen there.
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
