"""How an attached connection's bytes come and go: its socket, or a ring beside it.

A ring replaces the socket's stream in both directions; the socket stays as bell and as the sign of life. A byte on it
says "look", whatever it is, and its end ends the connection, once what is left in the ring has been served.
"""

import contextlib
import mmap
import os
import platform
import select
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from gpulease.daemon.native.addresses import address_of
from gpulease.daemon.worker.native.layout import Outcome, RingEnds
from gpulease.daemon.worker.patience import SPIN_NS, Patience
from gpulease.daemon.worker.sealed import sealed_memory
from gpulease.protocol.errors import FramingError
from gpulease.protocol.ring import DATA_AT, LOOKS_PER_CLOCK, RingLayout, worker_ends
from gpulease.protocol.sharing import Wanted

RING_LAYOUT: Final = RingLayout(request_bytes=512 << 10, reply_bytes=512 << 10)
"""A few thousand launches, and a few pieces of a copy on their way. Also the most of the host's memory that a
connection's ring can hold: its pages are made when they are first used."""

BELLS_BYTES: Final = 4096
"""Bells taken at a time: a peer that rings without end costs a system call for so many."""

TURN_NS: Final = 1_000_000
"""How long native code serves one connection at most before the others, the broker and the clock of the broker's health
watch get a look."""

NS_PER_MS: Final = 1_000_000

_REPLY_WORDS_AT: Final = 256


class Receiver(Protocol):
    """What bytes that arrive are put into."""

    def get_buffer(self) -> memoryview:
        """Where the next ones go; never empty."""

    def buffer_updated(self, count: int) -> None:
        """So many were put there."""


class ConnectionLost(Exception):
    """The peer is gone, or what it sends can't be followed."""


def can_share(sock: socket.socket) -> bool:
    """Whether the peer of a socket is on this host and memory's descriptors can be sent to it."""
    return sock.family == socket.AF_UNIX


def can_ring(sock: socket.socket) -> bool:
    """The same for a ring, by what it needs of this machine; see `protocol.ring`."""
    return can_share(sock) and platform.machine() == "x86_64"


class SocketWire:
    """The socket's own stream.

    Attributes:
        spins_when_quiet: Whether requests without a reply, too, are worth a spin.
    """

    spins_when_quiet = False

    def __init__(self, sock: socket.socket, patience: Patience) -> None:
        self._sock = sock
        self._yields = patience.yields

    def doze(self, *, for_room: bool) -> bool:
        """Get ready for a sleep in poll(2); False if there is something to serve, or (`for_room`) room to send."""
        return True

    def rise(self, has_event: bool) -> None:
        """The sleep is over; `has_event` says that poll(2) named the socket."""

    def events(self, *, for_room: bool) -> int:
        """What poll(2) is to look for on the socket."""
        return select.POLLOUT if for_room else select.POLLIN

    def receive(self, reader: Receiver) -> bool:
        """Take what has arrived; False if nothing has. Raises ConnectionLost or FramingError."""
        try:
            count = self._sock.recv_into(reader.get_buffer())
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConnectionLost(error.strerror) from None
        if count == 0:
            raise ConnectionLost("the peer closed the connection")
        reader.buffer_updated(count)
        return True

    def spin(self, reader: Receiver) -> bool:
        """The same, looking again and again for a bounded time."""
        until = time.monotonic_ns() + SPIN_NS
        while time.monotonic_ns() < until:
            if self.receive(reader):
                return True
            if self._yields:
                os.sched_yield()
        return False

    def send(self, data: bytes | memoryview, wait_ns: int) -> bytes | memoryview | None:
        """Send it, waiting for room for so long at most; what is left, None if all went. Raises ConnectionLost."""
        until_ns = 0
        while True:
            try:
                sent = self._sock.send(data, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise ConnectionLost(error.strerror) from None
            if sent == len(data):
                return None
            now_ns = time.monotonic_ns()
            until_ns = until_ns or now_ns + wait_ns
            data = memoryview(data)[sent:]
            if now_ns >= until_ns or not _wait(self._sock, select.POLLOUT, until_ns):
                return data

    def say_last(self, frame: bytes) -> None:
        """Send what can be sent at once. A peer that can't be told will notice that the connection is closed."""
        with contextlib.suppress(OSError):
            self._sock.send(frame, socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


class RingWire:
    """A ring in sealed memory of this process's making: no peer can cut it short and make a read of it fault."""

    def __init__(self, sock: socket.socket, patience: Patience) -> None:
        """Raises OSError if the memory can't be had."""
        self._sock = sock
        self._patience = patience
        self.spins_when_quiet = patience.spins_when_quiet
        self.layout = RING_LAYOUT
        self.fd = sealed_memory("gpulease-ring", self.layout.total_bytes)
        try:
            self._map = mmap.mmap(self.fd, self.layout.total_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        with memoryview(self._map) as memory:
            barriers = (threading.Lock(), threading.Lock())
            self._requests, self._replies = worker_ends(memory, self.layout, barriers, partial(_ring, sock))
        self._has_ended = False
        self._waits_for_room = False
        memory_at = address_of(self._map)
        self._ends = RingEnds(
            words=memory_at,
            data=memory_at + DATA_AT,
            capacity=self.layout.request_bytes,
            reply_words=memory_at + _REPLY_WORDS_AT,
            reply_data=memory_at + DATA_AT + self.layout.request_bytes,
            reply_capacity=self.layout.reply_bytes,
            spins_per_byte=int(self.spins_when_quiet),
            spins_per_reply=patience.spins_per_reply,
            # Native code does not yield: it looks once, and leaves the rest to `spin`.
            spin_ns=0 if patience.yields else SPIN_NS,
            turn_ns=TURN_NS,
        )

    def offered(self) -> None:
        """The descriptor was sent: it is not needed here any more."""
        os.close(self.fd)
        self.fd = -1

    def doze(self, *, for_room: bool) -> bool:
        """See SocketWire."""
        if not for_room:
            return self._requests.doze()
        self._waits_for_room = True
        try:
            return self._replies.doze()
        except FramingError:
            return False  # what is wrong, the next send finds too

    def rise(self, has_event: bool) -> None:
        """See SocketWire."""
        self._requests.rise()
        if self._waits_for_room:
            self._waits_for_room = False
            self._replies.rise()
        if has_event:
            self._take_bells()

    def events(self, *, for_room: bool) -> int:
        """See SocketWire: a bell says both."""
        return select.POLLIN

    def receive(self, reader: Receiver) -> bool:
        """See SocketWire."""
        count = self._requests.take(reader.get_buffer()) if self._requests.has_bytes else 0
        if count:
            reader.buffer_updated(count)
            return True
        if self._has_ended:
            raise ConnectionLost("the peer closed the connection")
        return False

    def spin(self, reader: Receiver) -> bool:
        """See SocketWire."""
        requests, clock, yields = self._requests, time.monotonic_ns, self._patience.yields
        until = clock() + SPIN_NS
        while not requests.look(1 if yields else LOOKS_PER_CLOCK):
            if clock() > until:
                return False
            if yields:
                os.sched_yield()
        return self.receive(reader)

    def serve(self, serve_ring: Callable[[RingEnds], Outcome | None], spins_left: int) -> tuple[Outcome | None, int]:
        """Have native code serve the ring for a while; why it stopped, and how many spins it left.

        It moves this side's counters, and wakes nobody: that is done here.
        """
        ends, requests, replies = self._ends, self._requests, self._replies
        ends.head, ends.spins_left = requests.head, spins_left
        ends.tail, ends.reply_head = replies.tail, replies.head
        outcome = serve_ring(ends)
        requests.head, replies.tail, replies.head = ends.head, ends.tail, ends.reply_head
        if outcome is Outcome.WAKE_WRITER:
            requests.advance(0, 0)
        elif outcome is Outcome.WAKE_READER:
            try:
                replies.put(b"")
            except OSError as error:
                raise ConnectionLost(error.strerror) from None
        return outcome, ends.spins_left

    def send(self, data: bytes | memoryview, wait_ns: int) -> bytes | memoryview | None:
        """See SocketWire. Raises FramingError too: the peer's counter is part of what it says."""
        replies = self._replies
        until_ns = 0
        try:
            sent = replies.put(data)
            while sent != len(data):
                data = memoryview(data)[sent:]
                now_ns = time.monotonic_ns()
                until_ns = until_ns or now_ns + wait_ns
                if now_ns > until_ns or (not replies.room() and not self._await_room(until_ns)):
                    return data
                sent = replies.put(data)
        except OSError as error:
            raise ConnectionLost(error.strerror) from None
        return None

    def say_last(self, frame: bytes) -> None:
        """See SocketWire."""
        with contextlib.suppress(OSError, FramingError):
            self._replies.put_whole(frame)

    def close(self) -> None:
        """Close the socket, which ends the connection, and let go of the memory."""
        self._requests.leave()
        self._sock.close()
        self._requests.release()
        self._replies.release()
        self._map.close()
        if self.fd >= 0:
            os.close(self.fd)

    def _await_room(self, until_ns: int) -> bool:
        """Whether there is some by then."""
        replies = self._replies
        if self._patience.spins_when_quiet:
            spin_until_ns = min(until_ns, time.monotonic_ns() + SPIN_NS)
            while time.monotonic_ns() < spin_until_ns:
                if replies.room():
                    return True
        while replies.doze():
            # The clock as well: a peer that rings without end keeps every wait short.
            is_in_time = _wait(self._sock, select.POLLIN, until_ns) and time.monotonic_ns() < until_ns
            self._take_bells()
            if self._has_ended:
                raise ConnectionLost("the peer is gone")
            if not is_in_time:
                replies.rise()
                return False
        return True

    def _take_bells(self) -> None:
        try:
            self._has_ended = not self._sock.recv(BELLS_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._has_ended = True


def ring_for(sock: socket.socket, wanted: Wanted, patience: Patience) -> RingWire | None:
    """A ring for a connection that wants one and can have one."""
    if not wanted.ring or not can_ring(sock):
        return None
    try:
        return RingWire(sock, patience)
    except OSError:
        return None  # no descriptor or no memory for one: the socket does as well


def _wait(sock: socket.socket, event: int, until_ns: int) -> bool:
    """Whether it comes by then."""
    waiting = select.poll()
    waiting.register(sock, event)
    return bool(waiting.poll(max(0, -(-(until_ns - time.monotonic_ns()) // NS_PER_MS))))


def _ring(sock: socket.socket) -> None:
    # No room for one more: the peer has bells it has not heard yet.
    with contextlib.suppress(BlockingIOError):
        sock.send(b"\0", socket.MSG_NOSIGNAL)
