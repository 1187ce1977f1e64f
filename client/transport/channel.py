"""A nonblocking socket and the link that makes sense of its bytes. Nothing here waits."""

import array
import contextlib
import errno
import os
import socket
import struct
from collections import deque
from typing import Any, Final

from gpulease.client.forking import OF_PARENT, register
from gpulease.client.transport.link import Link
from gpulease.protocol import Failure, Status
from gpulease.protocol.address import Address, UnixAddress
from gpulease.protocol.ring import MAX_DESCRIPTORS, NO_DATA

MAX_PARTS_PER_SEND: Final = 16
"""Most pieces given to one sendmsg; far below IOV_MAX (1024), and more than any request has."""


class Channel:
    """One connection to the daemon.

    Attributes:
        sock: The nonblocking socket.
        link: What was said on it.
        address: Where it leads, for messages.
        waiter: What the face keeps to wait on the socket.
        waits_for_room: Whether the socket itself tells when there is room to send.
        is_torn: Whether a send was interrupted before it was noted how much of it went.
        has_unsent: Whether frames that were taken over wait here for room; `push` sends them.
        takes_descriptors: Whether what comes beside the bytes is wanted; else the kernel drops it.
        descriptors: What came.
    """

    waits_for_room = True
    has_unsent = False

    def __init__(self, sock: socket.socket, address: Address, link: Link | None = None) -> None:
        self.sock = sock
        self.link = link or Link()
        self.address = address
        self.waiter: Any = None
        self.is_torn = False
        self.takes_descriptors = False
        self.descriptors: list[int] = []
        register(self)

    def put(self, first: bytes | memoryview, second: bytes | memoryview = b"") -> bool:
        """Take over a frame, given in two parts, that nobody waits for; False if it has to be sent the long way.

        Raises OSError or FramingError if there is no peer, or none that can be followed.
        """
        return False

    def put_packed(self, layout: struct.Struct, a: Any, b: Any, c: Any, d: Any, e: Any) -> bool:
        """The same for a frame that is packed of five fields."""
        return False

    def ask(self, request: bytes, reply: bytes, into: memoryview = NO_DATA, more_ns: int = 0) -> bool | None:
        """Send a small request and look for its reply: whether exactly that came; None if nothing was sent.

        The reply is `reply`, and behind it data for all of `into`. If another came, or none in time, `feed` is to be
        called once the link expects it. `more_ns`: how long the work itself takes.
        """
        return None

    def feed(self) -> None:
        """Give the link what `ask` received and could not use."""

    def send_rest(self) -> None:
        """Send what was taken over and is still here, waiting for a bounded time: the channel is about to be closed."""

    def spin(self) -> bool:
        """Look again and again for a bounded time, where that is worth it, and take what comes; False if nothing."""
        return False

    def doze(self, *, for_room: bool) -> bool:
        """Get ready for a sleep on the socket; False if there is no need for one."""
        return True

    def pump(self) -> bool:
        """Take what has arrived; False if nothing has."""
        try:
            count = self._receive_into(self.link.get_buffer())
        except BlockingIOError:
            return False
        except OSError as error:
            self.link.end_of_stream(f"the connection to {self.address} broke: {error.strerror or error}")
            return True
        if count:
            self.link.buffer_updated(count)
        else:
            self.link.end_of_stream(f"the daemon at {self.address} closed the connection")
        return True

    def _receive_into(self, buffer: memoryview) -> int:
        if not self.takes_descriptors:
            return self.sock.recv_into(buffer)
        space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
        count, ancillary, _, _ = self.sock.recvmsg_into([buffer], space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.descriptors += array.array("i", payload)
        return count

    def drop_descriptors(self) -> None:
        """Take no more of them, and close those nobody took."""
        self.takes_descriptors = False
        for fd in self.descriptors:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.descriptors.clear()

    def push(self, parts: deque[memoryview]) -> bool:
        """Send what the socket takes and drop it from `parts`; True if any of it went, or of what is `has_unsent`."""
        pieces = [parts[at] for at in range(min(len(parts), MAX_PARTS_PER_SEND))]
        self.is_torn = True
        try:
            sent = self.sock.sendmsg(pieces)
        except BlockingIOError:
            self.is_torn = False
            return False
        except OSError as error:
            self.is_torn = False
            self.drain(error)
            return False
        left = sent
        while parts and left >= len(parts[0]):
            left -= len(parts.popleft())
        if left:
            parts[0] = parts[0][left:]
        self.is_torn = False
        return sent > 0

    def drain(self, error: OSError) -> None:
        """Sending failed: the peer is gone. Read what it said last, which may be why."""
        while self.link.end is None and self.pump():
            pass
        self.link.break_off(Failure(Status.DISCONNECTED, f"the connection to {self.address} broke: {error.strerror}"))

    def disown(self) -> None:
        """See Inherited. The connection goes on: the parent has its own descriptor of it."""
        self.link.break_off(OF_PARENT, is_explained=True)
        self.link.told.clear()
        self.drop_descriptors()
        self.sock.close()

    def close(self) -> None:
        """Close the socket; again is harmless."""
        self.link.break_off(Failure(Status.DISCONNECTED, "the connection was closed here"))
        self.drop_descriptors()
        self.sock.close()


def resolve(address: Address) -> list[tuple[int, Any]]:
    """(family, what connect takes) of every way to an address. Raises OSError if a name has none."""
    if isinstance(address, UnixAddress):
        return [(socket.AF_UNIX, address.path)]
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return [(int(family), where) for family, _, _, _, where in found]


def start_connecting(family: int, where: Any, address: Address) -> tuple[Channel, int]:
    """(channel, errno of connect): 0 when it is connected, EINPROGRESS or EAGAIN when it is not yet."""
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.setblocking(False)
    if family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        code = sock.connect_ex(where)
    except OSError as error:
        code = error.errno or errno.EINVAL
    return Channel(sock, address), code


def connect_error(channel: Channel) -> int:
    """The errno a connect that was in progress came to."""
    return channel.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
