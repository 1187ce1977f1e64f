"""A channel: a nonblocking socket, and the link that parses its bytes. No function here waits."""

import array
import contextlib
import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import cache, partial
from typing import Any, Final, Protocol

from gpulease.client.fork_guard import OWNED_BY_PARENT, register
from gpulease.client.transport.link import Link
from gpulease.protocol import Failure, Status
from gpulease.protocol.address import Address, UnixAddress
from gpulease.protocol.ring import MAX_DESCRIPTORS, NO_DATA

MAX_PARTS_PER_SEND: Final = 16
"""Maximum number of pieces passed to one sendmsg(): far below IOV_MAX (1024), and more than any request has."""


class AskOutcome(Enum):
    """The outcome of a request that was sent by `Channel.ask`."""

    ANSWERED = "exactly the expected reply came"
    UNANSWERED = "the request was sent; the caller receives its reply as usual"
    REFUSED = "the request was sent, and has another reply than the expected one; the caller receives it as usual"
    NOT_SENT = "nothing was sent"


_INTERRUPTED: Final = Failure(
    Status.DISCONNECTED, "an earlier operation was interrupted in the middle of a request", "Open another connection"
)


def keep_rest(parts: deque[memoryview], all_parts: tuple[memoryview, ...], sent: int) -> None:
    """Set `parts` to `all_parts` without the first `sent` bytes. Calling this twice is harmless."""
    # Drop the parts that were sent completely, and cut the part that was sent partly.
    unsent = []
    for part in all_parts:
        if sent < len(part):
            unsent.append(part[sent:])
        sent = max(0, sent - len(part))
    parts.clear()
    parts.extend(unsent)


def _drop_sent(parts: deque[memoryview], all_parts: tuple[memoryview, ...], counts: list[int]) -> None:
    if counts:
        keep_rest(parts, all_parts, counts[0])


class FrameWriter(Protocol):
    """Queues whole frames for which no caller waits. `protocol.ring.RingWriter` is one.

    Both methods raise OSError if the peer is gone, and FramingError if it breaks the ring's rules.

    Attributes:
        tail: Number of bytes that have been queued: after an interrupt, it shows whether a frame was queued.
    """

    tail: int

    def put_whole(self, first: bytes | memoryview, second: bytes | memoryview = b"") -> bool:
        """Queue a frame, given in two parts. Returns False if it must be sent by `Channel.push`."""

    def put_packed(self, layout: struct.Struct, a: Any, b: Any, c: Any, d: Any, e: Any) -> bool:
        """Queue a frame of five packed fields, as `put_whole` does."""


class _NoWriter(FrameWriter):
    """The writer of a control connection, where every frame is sent by `Channel.push`."""

    tail = 0

    def put_whole(self, first: bytes | memoryview, second: bytes | memoryview = b"") -> bool:
        return False

    def put_packed(self, layout: struct.Struct, a: Any, b: Any, c: Any, d: Any, e: Any) -> bool:
        return False


_NO_WRITER: Final = _NoWriter()


class Channel:
    """A connection to the daemon.

    The channels of sessions (`coalescing_socket`, `ring`, `tls`) override the first group of methods. A control
    connection uses the methods of this class.

    Attributes:
        sock: The nonblocking socket.
        link: Parses received bytes, and records which replies are expected.
        address: The daemon's address, for messages.
        waiter: The driver's object for waiting on the socket.
        waits_for_room: True if poll(2) on the socket reports room to send.
        has_unsent: True while queued frames wait here for room. `push` sends them.
        takes_descriptors: Whether to accept descriptors that come with the bytes. If not, the kernel drops them.
        descriptors: The descriptors that were received, until somebody claims them.
        unfinished: Completes a step that may have been interrupted; None if there is none. The channel's next user
            calls it (`finish`). Calling it twice is harmless.
        sending: The rest of the buffers that an operation is sending, and their total size; None if no operation sends.
        is_polled: Whether the synchronous API polls the socket for a reply before it sleeps. Used only for requests
            that a local daemon answers in about a millisecond.
    """

    waits_for_room = True
    has_unsent = False

    def __init__(self, sock: socket.socket, address: Address, link: Link | None = None) -> None:
        self.sock = sock
        self.link = link or Link()
        self.address = address
        self.waiter: Any = None
        self.takes_descriptors = False
        self.descriptors: list[int] = []
        self.unfinished: Callable[[], None] | None = None
        self.sending: tuple[deque[memoryview], int] | None = None
        self.is_polled = False
        self._counts: list[int] = []
        self._received_before = 0
        register(self)

    def finish(self) -> None:
        """Complete whatever an interrupted operation left unfinished. Every operation begins with this."""
        self.finish_step()
        if self.sending is not None:
            unsent, whole_bytes = self.sending
            # Part of a frame was sent, so the peer would take anything sent next for the rest of the frame.
            if 0 < sum(map(len, unsent)) < whole_bytes:
                self.link.break_off(_INTERRUPTED, is_explained=True)
            self.sending = None

    def finish_step(self) -> None:
        """Complete the interrupted step, if there is one. Unlike `finish`, it may be called within an operation."""
        if self.unfinished is not None:
            self.unfinished()
            self.unfinished = None

    @property
    def is_finished(self) -> bool:
        """True if no interrupted operation has left anything to `finish`."""
        return self.unfinished is None and self.sending is None

    # --- overridden by the channels of sessions ---

    @property
    def writer(self) -> FrameWriter:
        """The writer for frames that no caller waits for."""
        return _NO_WRITER

    def put_with_next(self, frame: bytes) -> bool:
        """Queue a frame that is of use only to later ones, as the writer does. Raises the errors of the writer."""
        return self.writer.put_whole(frame)

    def ask(
        self,
        request: bytes,
        reply: tuple[bytes, bytes, bytes],
        into: memoryview = NO_DATA,
        more_ns: int = 0,
    ) -> AskOutcome:
        """Send a small request and spin for its reply: exactly `reply`, followed by data for all of `into`.

        If this returns UNANSWERED, the caller makes the link expect the reply, and then calls `feed`.

        Args:
            request: The request's frame.
            reply: The expected bytes of the reply, in parts.
            into: The target of the data that follows.
            more_ns: How many nanoseconds longer than usual to spin: the time that the operation itself takes.
        """
        return AskOutcome.NOT_SENT

    def await_work(self, number: int) -> bool:
        """Wait, without a frame, until the work of all sent requests has ended. Only for a session with SYNC_WORD.

        Args:
            number: A request id for this wait.

        Returns:
            Whether the worker's word reports that all succeeded. If not, a SYNC must determine the result.
        """
        return False

    def feed(self) -> None:
        """Give the link the bytes that `ask` received and did not use."""

    def send_rest(self) -> None:
        """Send queued frames before the channel is closed, waiting for a bounded time."""

    def announce(self) -> None:
        """Wake the worker, if that is worthwhile, because the daemon is about to send it an order."""

    def spin(self) -> bool:
        """Poll for bytes without sleeping, for a bounded time, if that is worthwhile. Returns False if none came."""
        return False

    def doze(self, *, for_room: bool) -> bool:
        """Prepare to sleep on the socket. Returns False if there is already something to do."""
        return True

    # --- receiving and sending ---

    def pump(self) -> bool:
        """Receive what has arrived. Returns False if nothing has."""
        link, counts = self.link, self._counts
        self.finish_step()
        # Prepare for an interrupt after bytes were received and before they were counted.
        counts.clear()
        self._received_before, self.unfinished = link.received, self._count
        try:
            # The link offers its own buffer, or the memory of the read that is being received.
            self._receive_into(link.get_buffer(), counts)
            if counts[0]:
                self._count()
            else:
                link.end_of_stream(f"the daemon at {self.address} closed the connection")
        # Nothing has arrived. The stream has not ended: the peer may just be slow.
        except BlockingIOError:
            self.unfinished = None
            return False
        except OSError as error:
            link.end_of_stream(f"the connection to {self.address} broke: {error.strerror or error}")
        self.unfinished = None
        return True

    def _count(self) -> None:
        """Give the link the received bytes, unless it has them. Calling this twice is harmless."""
        counts = self._counts
        if counts and counts[0] > 0:
            self._pass_on(counts[0])

    def _pass_on(self, count: int) -> None:
        if self.link.received == self._received_before:
            self.link.buffer_updated(count)
        else:
            self.link.advance()  # it was counted, but perhaps not processed

    def _receive_into(self, buffer: memoryview, counts: list[int]) -> None:
        """Receive once. The call that receives also stores the number of bytes in `counts`, as in `_Outbox`."""
        if not self.takes_descriptors:
            counts.extend(map(self.sock.recv_into, (buffer,)))
            return
        # Descriptors come as ancillary data of the reply's first byte (unix(7), SCM_RIGHTS).
        space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
        fds: list[Any] = []
        try:
            # Ask for no more room than a reply's descriptors take; the kernel closes any that do not fit.
            fds.extend(map(self.sock.recvmsg_into, ([buffer],), (space,), (socket.MSG_CMSG_CLOEXEC,)))
        finally:
            for count, ancillary, _, _ in fds:
                for level, kind, payload in ancillary:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        self.descriptors += array.array("i", payload)
                counts.append(count)

    def drop_descriptors(self) -> None:
        """Accept no more descriptors, and close those that were not claimed."""
        self.takes_descriptors = False
        for fd in self.descriptors:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.descriptors.clear()

    def push(self, parts: deque[memoryview]) -> bool:
        """Send as much of `parts` as the socket accepts, and drop the sent bytes. Returns True if there were any."""
        # Prepare the call before setting `unfinished`, so that only the call itself follows.
        counts: list[int] = []
        sending = map(self.sock.sendmsg, ([parts[at] for at in range(min(len(parts), MAX_PARTS_PER_SEND))],))
        # If an interrupt comes after bytes were sent and before they are dropped from `parts`, they must not be sent
        # twice.
        self.unfinished = partial(_drop_sent, parts, tuple(parts), counts)
        try:
            counts.extend(sending)  # stored by the call that sends, as in `_Outbox`
        except BlockingIOError:
            self.unfinished = None
            return False
        except OSError as error:
            self.unfinished = None
            self.drain(error)
            return False
        self.finish_step()
        return counts[0] > 0

    def drain(self, error: OSError) -> None:
        """Read the last bytes of a peer that is gone, which may contain the reason."""
        # Sending failed, but the receive buffer may contain a goodbye with the reason.
        while self.link.end is None and self.pump():
            pass
        self.link.break_off(Failure(Status.DISCONNECTED, f"the connection to {self.address} broke: {error.strerror}"))

    @property
    def can_detach(self) -> bool:
        """True if `detach` may be called: the connection is plain and at rest, and no operation was interrupted."""
        link = self.link
        return (
            type(self) is Channel
            and self.is_finished
            and link.end is None
            and link.is_at_rest
            and not (link.has_leftovers or link.notifications or self.descriptors)
        )

    def detach(self) -> "Channel":
        """Close this channel, and return a new channel that continues its connection."""
        sock, link = self.sock, self.link
        # From now on, an operation of another thread finds that this channel has ended.
        self.link, self.sock = _ended_link()
        return Channel(sock, self.address, link)

    def disown(self) -> None:
        """Leave the connection to the parent process, which has its own descriptor for it (`fork_guard.Inherited`)."""
        # Never shut the socket down here: that would end the parent's connection, too.
        self.link.break_off(OWNED_BY_PARENT, is_explained=True)
        self.link.notifications.clear()
        self.drop_descriptors()
        self.sock.close()

    def close(self) -> None:
        """Close the socket. Calling this twice is harmless."""
        # Use this order, so that a waiting thread finds the end before its socket is closed.
        self.link.break_off(Failure(Status.DISCONNECTED, "this program closed the connection"))
        self.drop_descriptors()
        self.sock.close()


@cache
def _ended_link() -> tuple[Link, socket.socket]:
    """Return the link and socket of a channel after `detach`. They are shared, because an ended link never changes."""
    link, sock = Link(), socket.socket(socket.AF_UNIX)
    link.break_off(Failure(Status.DISCONNECTED, "the connection was passed to another process"))
    sock.close()
    return link, sock


def resolve(address: Address) -> list[tuple[int, Any]]:
    """Return (family, address for connect) of each address that a name resolves to. Raises OSError without any."""
    if isinstance(address, UnixAddress):
        return [(socket.AF_UNIX, address.path)]
    infos = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return [(int(family), sockaddr) for family, _, _, _, sockaddr in infos]


def start_connecting(family: int, sockaddr: Any, address: Address) -> tuple[Channel, int]:
    """Return (channel, errno of connect). The errno is 0 if it is connected, EINPROGRESS or EAGAIN if not yet."""
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.setblocking(False)
    # Disable Nagle's algorithm, which would delay each small frame by a round trip.
    if family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A nonblocking connect returns at once. The errno says whether it succeeded, failed, or continues.
    try:
        code = sock.connect_ex(sockaddr)
    except OSError as error:
        code = error.errno or errno.EINVAL
    return Channel(sock, address), code


def connect_error(channel: Channel) -> int:
    """Return the errno of a connect that was in progress; 0 if it succeeded."""
    return channel.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
