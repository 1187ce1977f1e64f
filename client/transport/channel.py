"""A channel: a nonblocking socket, and the link that parses its bytes. Nothing here waits."""

import array
import contextlib
import errno
import os
import socket
import struct
from collections import deque
from enum import Enum
from typing import Any, Final, Protocol

from gpulease.client.fork_guard import OF_PARENT, register
from gpulease.client.transport.link import Link
from gpulease.protocol import Failure, Status
from gpulease.protocol.address import Address, UnixAddress
from gpulease.protocol.ring import MAX_DESCRIPTORS, NO_DATA

MAX_PARTS_PER_SEND: Final = 16
"""Most pieces given to one sendmsg; far below IOV_MAX (1024), and more than any request has."""


class Asked(Enum):
    """Outcome of `Channel.ask`."""

    ANSWERED = "exactly the expected reply came"
    UNANSWERED = "the request was sent; the general way receives its reply"
    NOT_SENT = "nothing was sent"


def keep_rest(parts: deque[memoryview], whole: tuple[memoryview, ...], sent: int) -> None:
    """Set `parts` to `whole` without its first `sent` bytes. Again is harmless."""
    rest = []
    for part in whole:
        if sent < len(part):
            rest.append(part[sent:])
        sent = max(0, sent - len(part))
    parts.clear()
    parts.extend(rest)


class FrameWriter(Protocol):
    """Takes over whole frames that nobody waits for. `protocol.ring.RingWriter` is one.

    Both methods raise OSError or FramingError if there is no peer, or none that can be followed.

    Attributes:
        tail: The number of bytes taken over: after an interrupt it says whether a frame was.
    """

    tail: int

    def put_whole(self, first: bytes | memoryview, second: bytes | memoryview = b"") -> bool:
        """Take over a frame, given in two parts; False if it has to be sent the general way."""

    def put_packed(self, layout: struct.Struct, a: Any, b: Any, c: Any, d: Any, e: Any) -> bool:
        """`put_whole` for a frame that is packed of five fields."""


class _NoWriter(FrameWriter):
    """A control connection's: every frame is sent the general way."""

    tail = 0

    def put_whole(self, first: bytes | memoryview, second: bytes | memoryview = b"") -> bool:
        """Take nothing."""
        return False

    def put_packed(self, layout: struct.Struct, a: Any, b: Any, c: Any, d: Any, e: Any) -> bool:
        """Take nothing."""
        return False


_NO_WRITER: Final = _NoWriter()


class Channel:
    """A connection to the daemon.

    A session's kinds of channel (`coalescing_socket`, `ring`, `tls`) replace the methods of the first group. A control
    connection keeps them as they are here.

    Attributes:
        sock: The nonblocking socket.
        link: Parses what arrives, and knows which replies are awaited.
        address: Where the connection leads, for messages.
        waiter: The face's own object for waiting on the socket.
        waits_for_room: True if the socket itself tells when there is room to send.
        is_torn: True after a send that was interrupted before it was noted how much of it went.
        has_unsent: True while frames that were taken over wait here for room; `push` sends them.
        takes_descriptors: True if descriptors that come beside the bytes are wanted; else the kernel drops them.
        descriptors: The descriptors that came.
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

    # --- kinds of channel replace these ---

    @property
    def writer(self) -> FrameWriter:
        """The writer of frames that nobody waits for."""
        return _NO_WRITER

    def ask(self, request: bytes, reply: bytes, into: memoryview = NO_DATA, more_ns: int = 0) -> Asked:
        """Send a small request and spin for its reply: `reply`, and behind it data for all of `into`.

        Where this is UNANSWERED, the caller has the link expect the reply, and then calls `feed`.

        Args:
            request: The request's frame.
            reply: The expected bytes of the reply.
            into: Target of the data behind them.
            more_ns: Time that the work itself takes.
        """
        return Asked.NOT_SENT

    def await_work(self, number: int) -> bool:
        """Wait without a frame, where the session gives SYNC_WORD, until the work of all requests sent has ended.

        Args:
            number: A request number of the wait's own.

        Returns:
            Whether all ended well, by the worker's word. If not, a SYNC finds out what there is.
        """
        return False

    def feed(self) -> None:
        """Give the link the bytes that `ask` received and could not use."""

    def send_rest(self) -> None:
        """Send frames that were taken over, waiting for a bounded time: the channel is about to be closed."""

    def spin(self) -> bool:
        """Look for bytes again and again for a bounded time, where that pays; False if none came."""
        return False

    def doze(self, *, for_room: bool) -> bool:
        """Get ready for a sleep on the socket; False if there is no need for one."""
        return True

    # --- receiving and sending ---

    def pump(self) -> bool:
        """Receive what has arrived; False if nothing has."""
        link, counts = self.link, list[int]()
        before = link.received
        try:
            self._receive_into(link.get_buffer(), counts)
            if counts[0]:
                link.buffer_updated(counts[0])
            else:
                link.end_of_stream(f"the daemon at {self.address} closed the connection")
        except BlockingIOError:
            return False
        except OSError as error:
            link.end_of_stream(f"the connection to {self.address} broke: {error.strerror or error}")
        except BaseException:
            if counts and counts[0] > 0 and link.received == before:
                link.buffer_updated(counts[0])  # interrupted behind the call that received
            raise
        return True

    def _receive_into(self, buffer: memoryview, counts: list[int]) -> None:
        """Receive once. `counts` gets the number of bytes from the very call that receives, as in `_Outbox`."""
        if not self.takes_descriptors:
            counts.extend(map(self.sock.recv_into, (buffer,)))
            return
        space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
        found: list[Any] = []
        try:
            found.extend(map(self.sock.recvmsg_into, ([buffer],), (space,), (socket.MSG_CMSG_CLOEXEC,)))
        finally:
            for count, ancillary, _, _ in found:
                for level, kind, payload in ancillary:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        self.descriptors += array.array("i", payload)
                counts.append(count)

    def drop_descriptors(self) -> None:
        """Take no more descriptors, and close those that nobody took."""
        self.takes_descriptors = False
        for fd in self.descriptors:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.descriptors.clear()

    def push(self, parts: deque[memoryview]) -> bool:
        """Send as much of `parts` as the socket takes, and drop that; True if any went, or any that is `has_unsent`."""
        counts: list[int] = []
        sending = map(self.sock.sendmsg, ([parts[at] for at in range(min(len(parts), MAX_PARTS_PER_SEND))],))
        whole = tuple(parts)
        self.is_torn = True
        try:
            counts.extend(sending)  # by the very call that sends, as in `_Outbox`
        except BlockingIOError:
            self.is_torn = False
            return False
        except OSError as error:
            self.is_torn = False
            self.drain(error)
            return False
        finally:
            if counts:
                try:
                    keep_rest(parts, whole, counts[0])
                except BaseException:
                    keep_rest(parts, whole, counts[0])
                    raise
                finally:
                    self.is_torn = False
        return counts[0] > 0

    def drain(self, error: OSError) -> None:
        """Read what the peer, which is gone, sent last: it may say why."""
        while self.link.end is None and self.pump():
            pass
        self.link.break_off(Failure(Status.DISCONNECTED, f"the connection to {self.address} broke: {error.strerror}"))

    def disown(self) -> None:
        """Leave the connection to the parent process, which has its own descriptor of it (`fork_guard.Inherited`)."""
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
    """(family, address for connect) of every way to an address. Raises OSError if a name has none."""
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
    """The errno of a connect that was in progress."""
    return channel.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
