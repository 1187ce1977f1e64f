"""Descriptors whose last close takes as long as a test needs."""

import contextlib
import socket
import struct
from collections.abc import Iterator
from typing import Final

LINGER_S: Final = 40

_LINGER: Final = struct.Struct("2i")


@contextlib.contextmanager
def slow_to_close() -> Iterator[socket.socket]:
    """Yield a TCP connection with more unsent data than its peer accepts: close waits (SO_LINGER in socket(7))."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        sock = stack.enter_context(socket.create_connection(listener.getsockname()))
        # Close the peer first, so that the other end's close has nothing to wait for.
        stack.enter_context(listener.accept()[0])
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sock.send(bytes(1 << 20))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.pack(1, LINGER_S))
        yield sock
