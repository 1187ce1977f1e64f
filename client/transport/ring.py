"""A session's channel through a ring: its frames go through memory shared with the worker (`protocol.ring`).

The socket stays open. A byte on it, a bell, wakes this side. If the peer closes it, the worker is gone.
"""

import contextlib
import errno
import mmap
import os
import platform
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Final, NamedTuple

from gpulease.client.errors import Disconnected
from gpulease.client.transport.arena import Arena
from gpulease.client.transport.channel import AskOutcome, Channel, FrameWriter, keep_rest
from gpulease.client.transport.coalescing_socket import CoalescingSocket
from gpulease.client.transport.credentials import SecuredAddress
from gpulease.client.transport.session_words import SessionWords
from gpulease.client.transport.spin_policy import SpinPolicy
from gpulease.protocol import Failure, Status
from gpulease.protocol.address import Address, UnixAddress
from gpulease.protocol.errors import FramingError
from gpulease.protocol.primitives import Tlv
from gpulease.protocol.ring import (
    NO_DATA,
    READS_PER_CLOCK,
    RingLayout,
    SharedMemoryGrant,
    SharedMemoryRequest,
    SyncWords,
    client_ends,
)

BELLS_BYTES: Final = 4096
"""Maximum number of bells received at a time."""

_NO_MEMORY: Final = "Raise this process's limits on open files and memory, or open the session with shared_memory=False"

ARENA_BYTES: Final = 1 << 30
"""Size of the arena that a session requests. Only the part in use takes physical memory."""


def shared_memory_request(address: Address) -> SharedMemoryRequest:
    """Return the request for memory to share with a worker, by this machine's abilities (`protocol.ring`)."""
    if not isinstance(address, UnixAddress):
        return SharedMemoryRequest()
    # The ring relies on x86-64's memory order (`protocol.ring`).
    return SharedMemoryRequest(ring=platform.machine() == "x86_64", arena_bytes=ARENA_BYTES, words=True)


class Shared(NamedTuple):
    """A session's channel, and the shared memory that the worker provides."""

    channel: Channel
    arena: Arena | None
    words: SessionWords | None


def share(channel: Channel, options: Iterable[Tlv], spin: SpinPolicy) -> Shared:
    """Make the session's channel and shared memory from the options of ATTACH's reply. Raises Disconnected."""
    # The reply's options show what the worker provides; the descriptors came with the reply's first byte.
    memory_grant = SharedMemoryGrant.from_options(options)
    descriptors = iter(channel.descriptors)
    # The descriptors come in a fixed order (ring, arena, words). Those that are not provided are left out.
    try:
        session_channel: Channel
        if memory_grant.ring is None:
            session_channel = _coalescing_socket(channel, spin)
        else:
            session_channel = RingChannel(channel, next(descriptors), memory_grant.ring, spin)
        arena = Arena(next(descriptors), memory_grant.arena_bytes) if memory_grant.arena_bytes else None
        return Shared(session_channel, arena, SessionWords(next(descriptors)) if memory_grant.words else None)
    except (StopIteration, OSError, ValueError) as error:
        channel.close()
        raise Disconnected(f"attach: the session's shared memory can't be used: {error}", _NO_MEMORY) from None
    finally:
        channel.drop_descriptors()


def _coalescing_socket(channel: Channel, spin: SpinPolicy) -> CoalescingSocket:
    if not isinstance(channel.address, SecuredAddress):
        return CoalescingSocket(channel, spin)
    # Import this only here, because ssl takes a third of this package's import time.
    from gpulease.client.transport.tls import TlsCoalescingSocket

    return TlsCoalescingSocket(channel, spin)


class RingChannel(Channel):
    """A session's channel through a ring. It takes over the socket and the link of the channel that attached."""

    waits_for_room = False

    def __init__(self, channel: Channel, fd: int, layout: RingLayout, spin: SpinPolicy) -> None:
        """Map the ring. If that fails, raises OSError or ValueError, and `channel` is unchanged."""
        super().__init__(channel.sock, channel.address, channel.link)
        self._peer = select.poll()
        self._peer.register(self.sock, select.POLLRDHUP)
        # Both sides of the ring make their own views of the mapping, which `release` releases before the mapping is
        # closed.
        self._map = mmap.mmap(fd, layout.total_bytes)
        with memoryview(self._map) as memory:
            barriers = (threading.Lock(), threading.Lock())
            wake, check_worker = partial(_send_bell, self.sock), partial(_check_worker, self._peer)
            self._replies, self._requests = client_ends(memory, layout, barriers, wake, check_worker)
            self._sync_words = SyncWords(memory, barriers[1])
        self._spin_ns, self._yields = spin.spin_ns, spin.yields
        self._is_dozing = False
        self._is_closed = False
        self._end_of_socket = ""
        self._head_before = 0

    @property
    def writer(self) -> FrameWriter:
        """The ring's own writer. A method around it would cost a tenth of a launch."""
        return self._requests

    def announce(self) -> None:
        """Send a bell without a request, so that the worker polls for the daemon's order (`ORDER_POLL_NS`)."""
        if self._spin_ns and not self._is_closed:
            with contextlib.suppress(OSError):
                _send_bell(self.sock)

    def spin(self) -> bool:
        """Poll the ring for bytes, for a bounded time."""
        return self._spin(1) and self.pump()

    def _spin(self, least: int, more_ns: int = 0) -> bool:
        """Poll for `least` bytes. Returns False if they do not come in time.

        Args:
            least: Number of bytes to wait for.
            more_ns: As in `Channel.ask`.
        """
        clock, yields, poll = time.monotonic_ns, self._yields, self._replies.poll
        # A session that never spins polls once, because `deadline_ns` is now.
        deadline_ns = clock() + (self._spin_ns and self._spin_ns + more_ns)
        while not poll(1 if yields else READS_PER_CLOCK, least):
            if clock() >= deadline_ns:
                return False
            if yields:
                os.sched_yield()
        return True

    def ask(
        self,
        request: bytes,
        reply: tuple[bytes, bytes, bytes],
        into: memoryview = NO_DATA,
        more_ns: int = 0,
    ) -> AskOutcome:
        """Send a small request and spin for its reply in the ring."""
        # Put the request into the ring, completely or not at all, then poll for exactly the reply's bytes.
        requests, replies = self._requests, self._replies
        try:
            # If there are already bytes, they belong to another reply, so use the general path.
            if replies.has_bytes or not requests.put_whole(request):
                return AskOutcome.NOT_SENT
            # Prepare the rest only now, while the worker serves the request.
            expected = b"".join(reply)
            if self._spin(len(expected) + len(into), more_ns):
                return AskOutcome.ANSWERED if replies.take_if(expected, into) else AskOutcome.REFUSED
        except (OSError, FramingError):
            pass  # the peer is gone: the wait for the reply reports it
        return AskOutcome.UNANSWERED

    def await_work(self, number: int) -> bool:
        """Wait, using the ring's words, for the work of all sent requests. Returns False if a SYNC is needed."""
        words, replies, clock = self._sync_words, self._replies, time.monotonic_ns
        # The worker answers the word only while it polls the ring; if it sleeps, a SYNC wakes it.
        if not self._spin_ns or replies.has_bytes or not words.ask(number):
            return False
        # Poll the word and the ring: a reply in the ring must be received first.
        deadline_ns = clock() + self._spin_ns
        times = 1 if self._yields else READS_PER_CLOCK
        while (answer := words.poll(number, times)) is None:
            if replies.has_bytes or clock() >= deadline_ns:
                return False
            if self._yields:
                os.sched_yield()
        return answer

    def doze(self, *, for_room: bool) -> bool:
        """Ask the worker for a bell. Returns False if there is already something to do."""
        try:
            # Set the sleep words, then check again (`protocol.ring`); otherwise a wake-up could be lost.
            sleeps = self._replies.doze() and not (for_room and not self._requests.doze())
        except FramingError as error:
            self._distrust(error)
            return False
        self._is_dozing = True
        return sleeps

    def pump(self) -> bool:
        """Receive what has arrived in the ring. Returns False if nothing has."""
        # The sleep is over, and no bells are needed until the next sleep, so take the bells that have arrived.
        if self._is_dozing:
            self._is_dozing = False
            self._replies.rise()
            self._requests.rise()
            self._take_bells()
        # Take the bytes in the ring before the end of the socket: they include the worker's last replies.
        if self._take():
            return True
        if not self._end_of_socket:
            return False
        self.link.end_of_stream(self._end_of_socket)
        return True

    def push(self, parts: deque[memoryview]) -> bool:
        """Put as much of `parts` as fits into the ring, and drop those bytes.

        Returns True if any bytes were put.
        """
        # Work on copies, because `parts` changes only at the end, by the ring's counter.
        writer, all_parts, unsent = self._requests, tuple(parts), deque(parts)
        before = writer.tail
        # A part may be put in piece by piece. The ring's counter shows how much was put, even after an interrupt.
        self.unfinished = lambda: keep_rest(parts, all_parts, writer.tail - before)
        try:
            while unsent and (sent := writer.put(unsent[0])):
                if sent == len(unsent[0]):
                    unsent.popleft()
                else:
                    unsent[0] = unsent[0][sent:]
        except FramingError as error:
            self.finish_step()
            self._distrust(error)
        except OSError as error:
            self.finish_step()
            self._take_bells()
            self.drain(error)
        self.finish_step()
        return writer.tail != before

    def disown(self) -> None:
        """Leave the ring to the parent process. The mapping stays: a thread of the parent's may have been using it."""
        super().disown()
        self._is_closed = True

    def close(self) -> None:
        """Close the socket, and unmap the ring. Calling this twice is harmless."""
        # Close the socket first, which shows the worker that this side is gone.
        super().close()
        if not self._is_closed:
            self._is_closed = True
            self._replies.release()
            self._requests.release()
            self._sync_words.release()
            self._map.close()

    def _take(self) -> bool:
        self.finish_step()
        link, replies = self.link, self._replies
        buffer = link.get_buffer()
        # An interrupt may come after the ring has passed on bytes and before they are counted. Then they exist only in
        # the link's buffer.
        self._received_before, self._head_before = link.received, replies.head
        self.unfinished = self._count
        try:
            count = replies.take(buffer)
        except FramingError as error:
            self.unfinished = None
            self._distrust(error)
            return True
        self._count()
        self.unfinished = None
        return count > 0

    def _count(self) -> None:
        count = self._replies.head - self._head_before
        if count:
            self._pass_on(count)

    def _take_bells(self) -> None:
        try:
            # A bell only wakes this side. The end of the stream means that the worker is gone.
            if not self.sock.recv(BELLS_BYTES):
                self._end_of_socket = f"the daemon at {self.address} closed the connection"
        except BlockingIOError:
            return
        except OSError as error:
            self._end_of_socket = self._broke(error)

    def _broke(self, error: OSError) -> str:
        return f"the connection to {self.address} broke: {error.strerror or error}"

    def _distrust(self, error: FramingError) -> None:
        self.link.break_off(Failure(Status.DISCONNECTED, f"the daemon sent something invalid: {error}"))


def _send_bell(sock: socket.socket) -> None:
    # If the socket is full, the worker has not yet received earlier bells, and another bell would change nothing.
    with contextlib.suppress(BlockingIOError):
        sock.send(b"\0", socket.MSG_NOSIGNAL)


def _check_worker(peer: select.poll) -> None:
    """Raise OSError if the worker has closed its end, even if its bells are still unread."""
    if peer.poll(0):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
