"""Connections that have not said enough yet: no process is made for them, and they wait for a bounded time."""

import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpulease.daemon.relay.crowd import first_of_the_largest, source_of
from gpulease.daemon.relay.opening import LOOK_BYTES, NOT_TLS_ALERT, first_record_bytes

MAX_STRANGERS: Final = 256
"""At a time. When there is one more, the oldest of where most come from is cut: see `crowd`."""

OPENING_S: Final = 5.0
"""From the connection to the whole of its first message."""

ACCEPTS_AT_A_TIME: Final = 64
"""Before the gate looks at all else."""

OnSpoken = Callable[["Stranger"], None]
OnGone = Callable[["Stranger", str], None]


@dataclass(slots=True, eq=False)
class Stranger:
    """One connection.

    Attributes:
        peer: Its address, for the log.
        source: Where it counts as coming from.
        since: When it came, as time.monotonic() has it.
    """

    sock: socket.socket
    peer: str
    source: str
    since: float


class Strangers:
    """Accepts, waits, and passes on those that have sent what begins a handshake, whole.

    Args:
        epoll: Tells `look` of a socket's bytes, by its descriptor.
        on_spoken: Gets a stranger, its socket, and what it sent still in the kernel.
        on_gone: Is told of one that was cut, and why.
    """

    def __init__(self, epoll: "select.epoll", on_spoken: OnSpoken, on_gone: OnGone) -> None:
        self._epoll = epoll
        self._on_spoken = on_spoken
        self._on_gone = on_gone
        # In the order they came.
        self._waiting: dict[int, Stranger] = {}

    def __contains__(self, fd: int) -> bool:
        return fd in self._waiting

    @property
    def next_end_s(self) -> float | None:
        """Seconds until the oldest has waited for too long; None if nobody waits."""
        oldest = next(iter(self._waiting.values()), None)
        return None if oldest is None else max(0.0, oldest.since + OPENING_S - time.monotonic())

    def accept(self, listener: socket.socket) -> None:
        """Take those who have connected. Raises OSError if this process, or the host, has no descriptor left."""
        for _ in range(ACCEPTS_AT_A_TIME):
            try:
                sock, address = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            self._welcome(sock, f"{address[0]} port {address[1]}", source_of(address[0]))

    def look(self, fd: int) -> None:
        """Something came from one of them."""
        stranger = self._waiting[fd]
        try:
            begin = stranger.sock.recv(LOOK_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError as error:
            self._cut(stranger, f"the connection broke: {error.strerror}")
            return
        if len(begin) < LOOK_BYTES:
            # Woken before there was as much as was waited for: no more will come.
            self._cut(stranger, "it closed the connection before it said anything")
            return
        needed = first_record_bytes(begin)
        if needed is None:
            self._turn_away(stranger)
        elif len(stranger.sock.recv(needed, socket.MSG_PEEK)) >= needed:
            self._let_go(stranger)
            self._on_spoken(stranger)
        elif stranger.sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) != needed:
            stranger.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, needed)
        else:
            self._cut(stranger, "it closed the connection inside its first message")

    def expire(self) -> None:
        """Cut those that have waited for too long."""
        while self._waiting and self.next_end_s == 0:
            self._cut(next(iter(self._waiting.values())), f"no handshake began within {OPENING_S:g} s")

    def make_room(self, why: str) -> None:
        """Cut one, if there is one."""
        one = first_of_the_largest(self._waiting.values())
        if one is not None:
            self._cut(one, why)

    def _welcome(self, sock: socket.socket, peer: str, source: str) -> None:
        try:
            sock.setblocking(False)
            # The kernel wakes the gate once there is enough to tell (socket(7)), not for each byte of a slow peer.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, LOOK_BYTES)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._epoll.register(sock, select.EPOLLIN)
        except OSError:
            sock.close()
            return
        self._waiting[sock.fileno()] = Stranger(sock, peer, source, time.monotonic())
        if len(self._waiting) > MAX_STRANGERS:
            self.make_room(f"more than {MAX_STRANGERS} wait")

    def _turn_away(self, stranger: Stranger) -> None:
        try:
            stranger.sock.send(NOT_TLS_ALERT)
            stranger.sock.shutdown(socket.SHUT_WR)
            # Unread bytes would turn the close into a reset, which takes the alert back.
            stranger.sock.recv(1 << 16)
        except OSError:
            pass  # it does without
        self._cut(stranger, "it does not speak TLS")

    def _cut(self, stranger: Stranger, why: str) -> None:
        self._let_go(stranger)
        stranger.sock.close()
        self._on_gone(stranger, why)

    def _let_go(self, stranger: Stranger) -> None:
        del self._waiting[stranger.sock.fileno()]
        self._epoll.unregister(stranger.sock)
