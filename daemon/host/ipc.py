"""Channels between the daemon's own processes: each datagram is one msgpack map, with optional file descriptors.

SOCK_SEQPACKET keeps message boundaries and reports the peer's death as end of stream (unix(7)). Both ends are ours, but
a tenant may have compromised its worker, so a worker's messages are checked like any other input.
"""

import array
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgpack

from gpulease.daemon.host.unix_place import bound_to_path

MAX_MESSAGE_BYTES: Final = 124 << 10
"""Size of the largest datagram. The largest honest datagram carries bytes that a tenant sent after its ATTACH: at most
a control connection's receive buffer, 64 KiB and a header. With 128 KiB, a process that overwrites memory that it frees
(host/heap_wipe.py) would map the memory again for each message, which takes 70 us."""

PACKING_BYTES: Final = 4096
"""Initial size of the buffer in which a message is packed. The library's default, 256 KiB, would be mapped again each
time, too."""

MAX_FDS: Final = 4
"""Maximum number of descriptors in one message."""


class _Incoming(threading.local):
    """The memory into which a thread receives: allocated once, because most messages are a thousandth of its size."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(MAX_MESSAGE_BYTES))


_INCOMING: Final = _Incoming()

# Use plain integers, because an operation on an IntFlag costs as much as the system call.
_TRUNCATED: Final = int(socket.MSG_TRUNC)
_LACKS_FDS: Final = int(socket.MSG_CTRUNC)

_FDS_SPACE: Final = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)


class ChannelClosed(Exception):
    """The other process is gone, or has sent something other than a message."""


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets, close-on-exec."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def channel_listener(path: str) -> socket.socket:
    """Return a socket that listens at a path for ends of channels, only from this user. Raises OSError."""
    return bound_to_path(path, 0o600, socket.SOCK_SEQPACKET, takes_descriptors=True)


def send_message(sock: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Send one message; the descriptors stay open here. Raises ChannelClosed, or BlockingIOError if it would block."""
    data = msgpack.Packer(buf_size=PACKING_BYTES).pack(message)
    if len(data) > MAX_MESSAGE_BYTES or len(fds) > MAX_FDS:
        raise ValueError(f"a message of {len(data)} bytes and {len(fds)} descriptors is too large")
    try:
        if fds:
            socket.send_fds(sock, [data], list(fds), socket.MSG_NOSIGNAL)
        else:
            sock.send(data, socket.MSG_NOSIGNAL)
    except BlockingIOError:
        raise
    except OSError as error:
        raise ChannelClosed(f"the other process is gone: {error.strerror}") from None


class Outbox:
    """Sends messages through a channel that may be full. They wait in order, with their descriptors.

    Args:
        sock: The channel's socket, which must not block.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._waiting: deque[tuple[dict[str, Any], list[int], Callable[[], None]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def send(
        self, message: dict[str, Any], fds: tuple[int, ...] = (), on_sent: Callable[[], None] = lambda: None
    ) -> None:
        """Send one message, now or in a later `flush`, and then call `on_sent`. The descriptors stay open here.

        Raises ChannelClosed, or OSError if descriptors can't be duplicated for a message that has to wait.
        """
        # Send it directly only if no message waits, so that messages stay in order.
        if not self._waiting:
            try:
                send_message(self._sock, message, fds)
            except BlockingIOError:
                pass
            else:
                on_sent()
                return
        # A message that waits needs duplicates, because the caller may close its descriptors at once.
        duplicates: list[int] = []
        try:
            for fd in fds:
                duplicates.append(os.dup(fd))
        except OSError:
            close_all(duplicates)
            raise
        self._waiting.append((message, duplicates, on_sent))

    def flush(self) -> bool:
        """Send the messages that fit. Returns whether it sent any. Raises ChannelClosed."""
        # Count before the loop, because `on_sent` may send more messages.
        waiting_before = len(self._waiting)
        while self._waiting:
            # Remove it only after it was sent.
            message, fds, on_sent = self._waiting[0]
            try:
                send_message(self._sock, message, tuple(fds))
            except BlockingIOError:
                break
            self._waiting.popleft()
            close_all(fds)
            on_sent()
        return len(self._waiting) < waiting_before

    def close(self) -> None:
        while self._waiting:
            close_all(self._waiting.popleft()[1])


def receive_message(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive one message and its descriptors, which are close-on-exec and belong to the caller.

    Returns an empty list of descriptors if one of them was lost. Raises ChannelClosed, or BlockingIOError if no message
    has arrived.
    """
    view = _INCOMING.view
    try:
        try:
            size_bytes, ancillary, flags, _ = sock.recvmsg_into([view], _FDS_SPACE, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            # The peer died with unread messages. The kernel reports this once, before the peer's own last messages.
            size_bytes, ancillary, flags, _ = sock.recvmsg_into([view], _FDS_SPACE, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        raise
    except OSError as error:
        raise ChannelClosed(f"the other process is gone: {error.strerror}") from None
    fds = array.array("i")
    # A truncated control message may end within an integer: take only whole descriptors.
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    # A message that is too long arrives truncated. No process of ours sends one.
    message = None if flags & _TRUNCATED else _unpack(view[:size_bytes])
    # Overwrite the bytes: they may be a tenant's, and the next lease may be another tenant's.
    view[:size_bytes] = bytes(size_bytes)
    if message is None:
        close_all(fds)
        raise ChannelClosed("a malformed message" if size_bytes else "the other process closed the channel")
    if flags & _LACKS_FDS:
        # There were more than MAX_FDS descriptors, or more than this process may open, so some are missing.
        close_all(fds)
        return message, []
    return message, list(fds)


def fd_groups(fds: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield descriptors in groups of at most MAX_FDS."""
    for start in range(0, len(fds), MAX_FDS):
        yield tuple(fds[start : start + MAX_FDS])


def close_all(fds: "array.array[int] | list[int]") -> None:
    """Close the descriptors of a message that the receiver does not need."""
    for fd in fds:
        socket.close(fd)


def _unpack(data: memoryview) -> dict[str, Any] | None:
    try:
        message = msgpack.unpackb(data) if data else None
    except (ValueError, msgpack.UnpackException):
        return None
    return message if isinstance(message, dict) else None
