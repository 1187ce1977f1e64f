"""Messages between the daemon's own processes: one msgpack map a datagram, with file descriptors beside it.

SOCK_SEQPACKET keeps message boundaries and reports the peer's death as end of stream (unix(7)). Both ends are ours,
but a worker computes for a tenant, so what comes from one is checked like any other input.
"""

import array
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgpack

MAX_MESSAGE_BYTES: Final = 124 << 10
"""Largest datagram. The largest honest one carries what a tenant sent behind its ATTACH, which is at
most a control connection's receive buffer, 64 KiB and a header. Room for 128 KiB would be mapped anew for each message,
in 70 us, by a process that overwrites what it frees (worker/heap.py)."""

PACKING_BYTES: Final = 4096
"""What a message is packed in; it grows. The library's own 256 KiB would be mapped anew in the same way."""

MAX_FDS: Final = 4
"""Most descriptors beside one message."""


class ChannelClosed(Exception):
    """The other process is gone, or sent what is not a message."""


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends, close-on-exec."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_message(sock: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Send one message; the descriptors stay open here. Raises ChannelClosed, or BlockingIOError if it would wait."""
    data = msgpack.Packer(buf_size=PACKING_BYTES).pack(message)
    if len(data) > MAX_MESSAGE_BYTES or len(fds) > MAX_FDS:
        raise ValueError(f"a message of {len(data)} bytes and {len(fds)} descriptors is too large")
    try:
        socket.send_fds(sock, [data], list(fds), socket.MSG_NOSIGNAL)
    except BlockingIOError:
        raise
    except OSError as error:
        raise ChannelClosed(f"the other process is gone: {error.strerror}") from None


class Outbox:
    """What is sent through a channel that may be full: what has no room waits, in its order, with its descriptors.

    Args:
        sock: One that does not block.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._waiting: deque[tuple[dict[str, Any], list[int], Callable[[], None]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = (), then: Callable[[], None] = lambda: None) -> None:
        """Send one message, now or in a later `flush`, and then do something; the descriptors stay open here.

        Raises ChannelClosed, or OSError if descriptors can't be kept meanwhile.
        """
        if not self._waiting:
            try:
                send_message(self._sock, message, fds)
            except BlockingIOError:
                pass
            else:
                then()
                return
        kept: list[int] = []
        try:
            for fd in fds:
                kept.append(os.dup(fd))
        except OSError:
            close_all(kept)
            raise
        self._waiting.append((message, kept, then))

    def flush(self) -> bool:
        """Send what there is room for; whether there was room for any. Raises ChannelClosed."""
        was = len(self._waiting)
        while self._waiting:
            message, fds, then = self._waiting[0]
            try:
                send_message(self._sock, message, tuple(fds))
            except BlockingIOError:
                break
            self._waiting.popleft()
            close_all(fds)
            then()
        return len(self._waiting) < was

    def close(self) -> None:
        """Forget what waits."""
        while self._waiting:
            close_all(self._waiting.popleft()[1])


def receive_message(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """One message and its descriptors, close-on-exec and now the caller's; none if not all of them got through.

    Raises ChannelClosed, or BlockingIOError if there is none yet.
    """
    space = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
    try:
        try:
            data, ancillary, flags, _ = sock.recvmsg(MAX_MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            # The peer died with messages it had not read. That is told once, before what it sent itself: that counts.
            data, ancillary, flags, _ = sock.recvmsg(MAX_MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        raise
    except OSError as error:
        raise ChannelClosed(f"the other process is gone: {error.strerror}") from None
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    message = None if flags & socket.MSG_TRUNC else _unpack(data)
    if message is None:
        close_all(fds)
        raise ChannelClosed("the other process closed the channel" if not data else "a malformed message")
    if flags & socket.MSG_CTRUNC:
        # More descriptors than are wanted, or than this process may open: a part of them is of no use.
        close_all(fds)
        return message, []
    return message, list(fds)


def close_all(fds: "array.array[int] | list[int]") -> None:
    """Close descriptors that came with a message nobody wants."""
    for fd in fds:
        socket.close(fd)


def _unpack(data: bytes) -> dict[str, Any] | None:
    try:
        message = msgpack.unpackb(data) if data else None
    except (ValueError, msgpack.UnpackException):
        return None
    return message if isinstance(message, dict) else None
