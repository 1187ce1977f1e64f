"""How long a worker looks for what it waits for before it sleeps, as its lease's tenant chose.

Where a connection's bytes go: a frame reader, or, for the data of large writes, pinned memory.

A MEM_WRITE that is received into pinned memory is copied by the card from there, with no copy by the host but the
kernel's, and while the next one is received into the next slot. `PinnedBuffers` are few, of one size, and a session's;
a frame for which there is none, or that is larger, goes through the reader as all others do.

What a peer has yet to read of its last reply, while the worker goes on with others.

A reply that finds no room is waited for shortly, where it stands: an honest peer on this host reads in microseconds.
Then what is left of it is copied and the connection left aside: nothing of what it asks is done before it has read on.
So it costs its session one reply's memory, for a bounded time, and nobody's turn.

How an attached connection's bytes come and go: its socket, or a ring beside it.

A ring replaces the socket's stream in both directions; the socket stays as bell and as the sign of life. A byte on it
says "look", whatever it is, and its end ends the connection, once what is left in the ring has been served.

One connection of a session as the worker has it: what it goes by, what came by it, what its peer has to read.
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
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from gpulease.daemon.contract.control_page import sealed_memory
from gpulease.daemon.contract.guests import Guest
from gpulease.daemon.drivers.interface import Context, Ticket
from gpulease.daemon.native.addresses import address_of
from gpulease.daemon.session.native.layout import Outcome, RingEnds
from gpulease.daemon.session.streams import Place
from gpulease.protocol.errors import FramingError
from gpulease.protocol.framing import HEADER_BYTES, Frame, FrameReader, parse_header
from gpulease.protocol.limits import DATA_CHUNK_BYTES, MAX_PAYLOAD_BYTES
from gpulease.protocol.opcodes import Opcode, Waiting
from gpulease.protocol.ring import DATA_AT, LOOKS_PER_CLOCK, RingLayout, Wanted, worker_ends

SPIN_NS: Final = 150_000
"""How long a served connection is looked at again and again before the worker sleeps. A sleep costs the next request a
wake-up, tens of microseconds on a virtual machine; a tenant that waits for replies is soon back."""

SPINS_PER_REPLY: Final = 2
"""Looks of that kind without a reply in between. A tenant that only launches does not wait for anything: the worker
sleeps while requests gather, and takes many at once."""

MIN_SPIN_CORES: Final = 4
"""Cores this process must have for it to spin while a tenant only launches, or does not read: on fewer it would take
the tenant's."""

_HAS_CORES: Final = len(os.sched_getaffinity(0)) >= MIN_SPIN_CORES


@dataclass(frozen=True, slots=True)
class SpinPolicy:
    """One session's.

    Attributes:
        spins_per_reply: How often to look for a while for requests after a reply.
        spins_when_quiet: Whether requests without a reply, too, are worth a while.
        spins_at_all: Whether the card and a peer that does not read are looked at for a while before sleeping.
        yields: Whether others may run between two looks.
    """

    spins_per_reply: int = SPINS_PER_REPLY
    spins_when_quiet: bool = _HAS_CORES
    spins_at_all: bool = True
    yields: bool = False


_BY_CHOICE: Final = {
    None: SpinPolicy(),
    Waiting.SPIN: SpinPolicy(spins_when_quiet=True),
    # One more: native code, which does not yield, only looks once.
    Waiting.YIELD: SpinPolicy(SPINS_PER_REPLY + 1, spins_when_quiet=False, yields=True),
    Waiting.BLOCK: SpinPolicy(0, spins_when_quiet=False, spins_at_all=False),
}


def spin_policy_of(waiting: Waiting | None) -> SpinPolicy:
    """As chosen; None leaves it to the host's number of cores."""
    return _BY_CHOICE[waiting]


SLOTS: Final = 4
"""Of a session: one that is received into, one that the card copies, and as many in reserve. Bounds, with `SLOT_BYTES`,
what half-sent frames can hold of them."""

SLOT_BYTES: Final = DATA_CHUNK_BYTES + 4096
"""Room for the payload of a MEM_WRITE of the advised size."""

DIVERTED_FROM_BYTES: Final = 64 << 10
"""Payloads from this size on are received into a slot: below, the copy saved costs less than what is done for it."""

PREFIX_BYTES: Final = HEADER_BYTES + 20
"""Of a MEM_WRITE, what is not data."""

_MEM_WRITE: Final = int(Opcode.MEM_WRITE)


class PinnedBuffer:
    """Pinned memory for one payload."""

    def __init__(self, context: Context) -> None:
        self.memory = mmap.mmap(-1, SLOT_BYTES)
        self.view = memoryview(self.memory)
        context.pin(self.view)
        self.ticket: Ticket | None = None
        self.is_held = False

    @property
    def is_free(self) -> bool:
        """Whether nobody fills it and the card is done with it."""
        return not self.is_held and (self.ticket is None or self.ticket.is_done())


class PinnedBuffers:
    """A session's, made as they are needed."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._slots: list[PinnedBuffer] = []

    def take(self) -> PinnedBuffer | None:
        """A free one, held from now on; None if there is none."""
        for slot in self._slots:
            if slot.is_free:
                break
        else:
            if len(self._slots) == SLOTS:
                return None
            slot = PinnedBuffer(self._context)
            self._slots.append(slot)
        slot.ticket, slot.is_held = None, True
        return slot

    def close(self) -> None:
        """Give all back to the host; none is pinned any more."""
        for slot in self._slots:
            slot.view.release()
            slot.memory.close()
        self._slots.clear()

    def holding(self, data: memoryview) -> PinnedBuffer | None:
        """The slot that these bytes lie in."""
        memory = data.obj
        for slot in self._slots:
            if slot.memory is memory:
                return slot
        return None


class ReceiveBuffer:
    """One connection's; used as a FrameReader is.

    Attributes:
        reader: Where all else goes.
    """

    def __init__(self, reader: FrameReader, slots: PinnedBuffers) -> None:
        self.reader = reader
        self._slots = slots
        self._slot: PinnedBuffer | None = None
        self._rest: memoryview | None = None
        self._header: tuple[int, int, int, int, int, bytes] = (0, 0, 0, 0, 0, b"")
        # The last frame was a large write, so another may follow.
        self._expects_more = False
        self._given: PinnedBuffer | None = None

    @property
    def has_whole(self) -> bool:
        """Whether there is a frame that did not come through the reader."""
        return self._slot is not None and not self._rest

    @property
    def is_mid_frame(self) -> bool:
        """Whether part of a frame has arrived."""
        return self._slot is not None or self.reader.is_mid_frame

    def get_buffer(self) -> memoryview:
        """Where the next bytes go; never empty. Views of earlier frames are void from here on."""
        self._let_go()
        if self._rest:
            return self._rest
        room = self.reader.get_buffer()
        if self._expects_more:
            # Its header alone, so that its data need not be moved.
            missing = PREFIX_BYTES - (self.reader.end - self.reader.start)
            return room[:missing] if missing > 0 else room
        return room

    def buffer_updated(self, count: int) -> None:
        """`count` bytes were put into the last `get_buffer()`."""
        if self._rest:
            self._rest = self._rest[count:]
        else:
            self.reader.buffer_updated(count)

    def next_frame(self) -> Frame | None:
        """The next whole frame, or None until more arrives. Raises FramingError; the intake is useless then."""
        self._let_go()
        if self._slot is not None:
            return None if self._rest else self._whole(self._slot)
        frame = self.reader.next_frame()
        if frame is None:
            self._divert()
        else:
            self._expects_more = False
        return frame

    def close(self) -> None:
        """Nothing more comes."""
        self._let_go()
        if self._slot is not None:
            self._slot.is_held = False
            self._slot = self._rest = None

    def _whole(self, slot: PinnedBuffer) -> Frame:
        op, flags, status, length, request_id, session_id = self._header
        self._slot, self._rest, self._given = None, None, slot
        payload = slot.view[:length]
        return Frame(op, flags, status, request_id, int.from_bytes(session_id, "big"), payload)

    def _let_go(self) -> None:
        if self._given is not None:
            self._given.is_held = False
            self._given = None

    def _divert(self) -> None:
        """What has arrived is the beginning of a frame: have the rest of a large write go to a slot."""
        reader = self.reader
        if reader.end - reader.start < HEADER_BYTES:
            return
        header = parse_header(reader.buffer, reader.start)
        op, _, _, length, _, _ = header
        self._expects_more = is_large = op == _MEM_WRITE and DIVERTED_FROM_BYTES <= length <= SLOT_BYTES
        slot = self._slots.take() if is_large else None
        if slot is None:
            return
        begin = reader.start + HEADER_BYTES
        here = reader.end - begin
        slot.view[:here] = reader.view[begin : reader.end]
        reader.start = reader.end
        self._slot, self._rest, self._header = slot, slot.view[here:length], header


ALONE_WAIT_NS: Final = 20_000_000
"""How long a reply waits for room in a session's only connection: nobody but the broker wants the thread meanwhile."""

SHARED_WAIT_NS: Final = 2_000_000
"""The same where there are other connections."""

DISTRUST_S: Final = 10.0
"""For so long after it was left aside a connection of several is not waited for at all. Stops a peer that reads each
reply only when it was left aside from taking SHARED_WAIT_NS of the others' time for each of its requests."""

UNREAD_BYTES: Final = 64 << 20
"""What a session may keep of replies together: four of the largest. A well-behaved client asks for 1 MiB at a time."""

UNREAD_TIMEOUT_S: Final = 60.0
"""For a peer to read on by STEP_BYTES, or to the end. Stops one that never does from keeping memory and a place."""

STEP_BYTES: Final = 64 << 10


class Backlog:
    """The rest of one reply.

    Attributes:
        rest: What has not gone.
    """

    def __init__(self, rest: bytes | memoryview) -> None:
        # A reply may lie in memory that the session uses again at once.
        self.rest = memoryview(bytes(rest))
        self._marked_bytes = len(self.rest)
        self._marked_s = time.monotonic()

    def keep(self, rest: bytes | memoryview) -> None:
        """So much is left of it now."""
        self.rest = memoryview(rest)
        if self._marked_bytes - len(self.rest) >= STEP_BYTES:
            self._marked_bytes, self._marked_s = len(self.rest), time.monotonic()

    def is_stale(self, now_s: float) -> bool:
        """Whether its peer has had its time."""
        return now_s - self._marked_s > UNREAD_TIMEOUT_S


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

    def __init__(self, sock: socket.socket, patience: SpinPolicy) -> None:
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

    def __init__(self, sock: socket.socket, patience: SpinPolicy) -> None:
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


def ring_for(sock: socket.socket, wanted: Wanted, patience: SpinPolicy) -> RingWire | None:
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


FRAME_TIMEOUT_S: Final = 60.0
"""From the last byte that came of a frame to the next. Stops a peer that keeps half a frame in the worker's memory;
one that is only slow never pauses for so long."""

ServeRing = Callable[[FrameReader, RingEnds], Outcome | None]
"""Has native code serve a ring, behind what its reader has; None if it can't now."""


class Connection:
    """One attached socket and what has arrived on it.

    Attributes:
        guest: Whose token it is bound to; None if it is the lease's own.
        wire: What its bytes go by: the socket, or a ring beside it.
        has_arena: Whether the session's arena is this connection's.
        place: Where its requests stand among the session's streams.
        spins_left: How often it is looked for more before the worker sleeps.
        heard_at_s: When something of a frame came that has not ended.
        backlog: What its peer has not read; None unless it is left aside for that.
        wait_ns: How long it is waited for when it does not read.
        distrusted_until_s: Until when it is not waited for at all; 0 if it is.
    """

    def __init__(
        self, sock: socket.socket, rest: bytes, slots: PinnedBuffers, patience: SpinPolicy, guest: Guest | None = None
    ) -> None:
        self.sock = sock
        self.guest = guest
        self.fd = sock.fileno()
        self.wire: SocketWire | RingWire = SocketWire(sock, patience)
        self.reader = FrameReader(MAX_PAYLOAD_BYTES)
        self.reader.receive_data(rest)
        self.intake = ReceiveBuffer(self.reader, slots)
        self.has_arena = False
        self.place = Place()
        self.spins_left = patience.spins_per_reply
        self.heard_at_s = time.monotonic()
        self.backlog: Backlog | None = None
        self.wait_ns = 0
        self.distrusted_until_s = 0.0

    def overdue(self, now_s: float) -> ConnectionLost | FramingError | None:
        """Why it has to go, if it has kept something here for too long."""
        if self.backlog is not None:
            return ConnectionLost("the peer does not read") if self.backlog.is_stale(now_s) else None
        if self.intake.is_mid_frame and now_s - self.heard_at_s > FRAME_TIMEOUT_S:
            return FramingError(f"a frame did not go on within {FRAME_TIMEOUT_S:g} s")
        return None

    def serve_ring(self, serve: ServeRing) -> Outcome | None:
        """Let native code serve the ring, if there is one and nothing has been taken from it that is not served.

        Not a guest's: native code knows of no tokens. Raises ConnectionLost or FramingError.
        """
        wire = self.wire
        if self.guest is not None or self.intake.is_mid_frame or not isinstance(wire, RingWire):
            return None
        outcome, self.spins_left = wire.serve(partial(serve, self.reader), self.spins_left)
        return outcome

    def receive(self) -> bool:
        """Take what has come; False if there is nothing, and no use in looking again at once.

        Raises ConnectionLost or FramingError.
        """
        wire, intake = self.wire, self.intake
        if not wire.receive(intake):
            if not self.spins_left:
                return False
            self.spins_left -= 1
            if not wire.spin(intake):
                return False
        if wire.spins_when_quiet:
            self.spins_left = 1
        return True
