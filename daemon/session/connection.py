"""A session's connection: the wire that moves its bytes, what it has received, and what it still has to send.

The file defines, in this order: `WorkerSpinPolicy`, how long the worker polls for more requests before it sleeps;
`ReceiveBuffer`, where received bytes go; `SocketWire` and `RingWire`, which move the bytes; `SendBuffer`, the rest of a
reply that the peer has not read; and `AttachedConnection`, which holds one of each.

Large writes. A large MEM_WRITE is received into pinned memory. The card copies from there, while the next MEM_WRITE is
received into the next pinned buffer. The host's only copy is the kernel's in recv(2). A session has few pinned buffers,
all of one size. If no pinned buffer is free, or if a frame does not fit into one, the frame goes through the frame
reader.

Rings. A ring in shared memory replaces the socket's stream in both directions. The socket remains, for two purposes.
First, it is the bell: a byte on it, of any value, means that the ring has changed. Second, it shows that the peer is
alive: when the peer closes it, the worker serves the requests that are left in the ring, and the connection ends.

Slow readers. If the ring has no room for a reply, the worker waits for a short time: an honest peer on this host reads
within microseconds. After that time the worker copies the rest into a send buffer and pauses the connection: it serves
no request of that peer until the peer has read the rest. So a peer that does not read takes the memory of one reply
from its session, for a bounded time, and delays no other peer for longer than that wait.
"""

import contextlib
import ctypes
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

from gpulease.daemon.contract.control_page import sealed_memory
from gpulease.daemon.contract.guests import Guest
from gpulease.daemon.contract.session_image import RingState
from gpulease.daemon.drivers.interface import Context, Ticket
from gpulease.daemon.host.processes import has_cores_to_poll
from gpulease.daemon.native.addresses import address_of
from gpulease.daemon.session.holders import Holder
from gpulease.daemon.session.native.layout import Outcome, RingEnds
from gpulease.daemon.session.stream_operations import ConnectionStreams
from gpulease.protocol.errors import FramingError
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.framing import HEADER_BYTES, Frame, FrameReader, build_header, parse_header
from gpulease.protocol.limits import DATA_CHUNK_BYTES, MAX_PAYLOAD_BYTES
from gpulease.protocol.opcodes import Opcode, Waiting
from gpulease.protocol.ring import AWAITED, DATA_AT, READS_PER_CLOCK, RingLayout, SharedMemoryRequest, worker_ends
from gpulease.protocol.time_units import NS_PER_MS

# --- spinning ---

SPIN_NS: Final = 150_000
"""Time for which the worker polls a connection that it has just served before it sleeps. After a sleep the next
request costs a wake-up, tens of microseconds on a virtual machine, and a tenant that waits for replies soon sends
again."""

LATENCY_SPIN_NS: Final = 5_000_000
"""SPIN_NS for a session of the latency class, where a wake-up would take a quarter of the time that a launch may take.
A message from the broker also waits for at most this time until the worker reads it."""

SPINS_PER_REPLY: Final = 2
"""Number of spins (each of SPIN_NS) after a reply. If a tenant only launches, there are no replies: the worker sleeps
while requests gather, and then receives many at once."""


@dataclass(frozen=True, slots=True)
class WorkerSpinPolicy:
    """How a session's worker waits, as the lease's tenant chose.

    Attributes:
        spins_per_reply: How often to spin for requests after a reply.
        spins_when_quiet: Whether to spin also after a request that has no reply.
        spins_at_all: Whether to spin on the card, and on a peer that does not read.
        yields: Whether to let other processes run between two polls.
    """

    spins_per_reply: int = SPINS_PER_REPLY
    spins_when_quiet: bool = has_cores_to_poll()
    spins_at_all: bool = True
    yields: bool = False


_POLICIES: Final = {
    None: WorkerSpinPolicy(),
    Waiting.SPIN: WorkerSpinPolicy(spins_when_quiet=True),
    # One more spin, because native code does not yield: it uses one spin for a single poll.
    Waiting.YIELD: WorkerSpinPolicy(SPINS_PER_REPLY + 1, spins_when_quiet=False, yields=True),
    Waiting.BLOCK: WorkerSpinPolicy(0, spins_when_quiet=False, spins_at_all=False),
}


def spin_policy_of(waiting: Waiting | None) -> WorkerSpinPolicy:
    """Return the policy for a tenant's choice; None selects the default, which depends on the number of cores."""
    return _POLICIES[waiting]


# --- receiving ---

MAX_PINNED_BUFFERS: Final = 4
"""Maximum number of a session's pinned buffers: one into which data is received, one from which the card copies, and
two in reserve. Together with PINNED_BUFFER_BYTES it bounds the pinned memory that half-sent frames can hold."""

PINNED_BUFFER_BYTES: Final = DATA_CHUNK_BYTES + 4096
"""Size of a pinned buffer: room for the payload of a MEM_WRITE that carries DATA_CHUNK_BYTES."""

MIN_PINNED_WRITE_BYTES: Final = 64 << 10
"""Payloads of this size or more are received into a pinned buffer. For smaller ones, the buffer costs more than the
copy that it saves."""

PREFIX_BYTES: Final = HEADER_BYTES + 20
"""Bytes of a MEM_WRITE before its data."""

_MEM_WRITE: Final = int(Opcode.MEM_WRITE)


class PinnedBuffer:
    """Pinned memory for one payload.

    Attributes:
        memory: The mapping.
        view: All of its bytes.
        ticket: The ticket of the card's copy from it; None if nothing was copied since it was acquired.
        is_held: Whether a connection receives into it, or its payload is being handled.
    """

    def __init__(self, context: Context) -> None:
        self.memory = mmap.mmap(-1, PINNED_BUFFER_BYTES)
        self.view = memoryview(self.memory)
        context.pin(self.view)
        self.ticket: Ticket | None = None
        self.is_held = False

    @property
    def is_free(self) -> bool:
        """Return whether no connection holds it and the card has finished its copy."""
        return not self.is_held and (self.ticket is None or self.ticket.is_done())


class PinnedBuffers:
    """A session's pinned buffers, each made when it is first needed."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._buffers: list[PinnedBuffer] = []

    def acquire(self) -> PinnedBuffer | None:
        """Return a free buffer, held from now on; None if all are in use."""
        for buffer in self._buffers:
            if buffer.is_free:
                break
        else:
            # All existing buffers are in use: make another one, up to the bound.
            if len(self._buffers) == MAX_PINNED_BUFFERS:
                return None
            buffer = PinnedBuffer(self._context)
            self._buffers.append(buffer)
        buffer.ticket, buffer.is_held = None, True
        return buffer

    def buffer_of(self, data: memoryview) -> PinnedBuffer | None:
        """Return the buffer that contains these bytes; None if they are not in a pinned buffer."""
        # `obj` of a memoryview is the whole mapping that it was made from, even when it shows only a part.
        memory = data.obj
        for buffer in self._buffers:
            if buffer.memory is memory:
                return buffer
        return None

    def close(self) -> None:
        """Return the memory to the host. The driver must have unpinned it before."""
        for buffer in self._buffers:
            buffer.view.release()
            buffer.memory.close()
        self._buffers.clear()


class ReceiveBuffer:
    """The bytes that a connection has received; used like a FrameReader.

    The payload of a large write goes to a pinned buffer, and everything else to the reader.

    Attributes:
        reader: The frame reader.
    """

    def __init__(self, reader: FrameReader, pinned_buffers: PinnedBuffers) -> None:
        self.reader = reader
        self._pinned_buffers = pinned_buffers
        # The pinned buffer that receives a large write at present, and the part of it that is still to be filled.
        self._pinned: PinnedBuffer | None = None
        self._rest: memoryview | None = None
        self._header: tuple[int, int, int, int, int, bytes] = (0, 0, 0, 0, 0, b"")
        # Whether the last frame was a large write: then another one is likely to follow.
        self._expects_write = False
        # The pinned buffer of the frame that `next_frame` returned last.
        self._returned: PinnedBuffer | None = None

    @property
    def has_write(self) -> bool:
        """Return whether a large write has arrived completely."""
        return self._pinned is not None and not self._rest

    @property
    def is_mid_frame(self) -> bool:
        """Return whether part of a frame has arrived."""
        return self._pinned is not None or self.reader.is_mid_frame

    def get_buffer(self) -> memoryview:
        """Return room for the next bytes, never empty. The call invalidates the views of earlier frames."""
        self._release_returned()
        # State 1: within a large write, receive directly into its pinned buffer. State 2: otherwise, into the reader.
        if self._rest:
            return self._rest
        room = self.reader.get_buffer()
        if self._expects_write:
            # Receive only the next write's prefix, so that its data need not be moved afterwards.
            missing = PREFIX_BYTES - (self.reader.end - self.reader.start)
            return room[:missing] if missing > 0 else room
        return room

    def buffer_updated(self, count: int) -> None:
        """Record that `count` bytes were put into the last `get_buffer()`."""
        if self._rest:
            self._rest = self._rest[count:]
        else:
            self.reader.buffer_updated(count)

    def next_frame(self) -> Frame | None:
        """Return the next complete frame, or None until more arrives.

        Raises FramingError; this object is unusable then.
        """
        self._release_returned()
        # Frames are returned in order: while a large write is incomplete, no later frame can be returned.
        if self._pinned is not None:
            return None if self._rest else self._take_write(self._pinned)
        frame = self.reader.next_frame()
        if frame is None:
            self._divert_write()
        else:
            self._expects_write = False
        return frame

    def unread(self) -> bytes:
        """Return the bytes that were received and not yet returned as frames, in the order of arrival."""
        rest = bytes(self.reader.view[self.reader.start : self.reader.end])
        if self._pinned is None:
            return rest
        # Within a large write, the part of its payload that has arrived is in the pinned buffer.
        op, flags, status, length, request_id, session_id = self._header
        session = int.from_bytes(session_id, "big")
        header = build_header(op, length, request_id=request_id, session_id=session, flags=flags, status=status)
        return header + bytes(self._pinned.view[: length - len(self._rest or b"")]) + rest

    def close(self) -> None:
        """Release the pinned buffers: nothing more is received."""
        self._release_returned()
        if self._pinned is not None:
            self._pinned.is_held = False
            self._pinned = self._rest = None

    def _take_write(self, pinned: PinnedBuffer) -> Frame:
        op, flags, status, length, request_id, session_id = self._header
        # The buffer stays held until the next call, because the frame's payload is in it.
        self._pinned, self._rest, self._returned = None, None, pinned
        payload = pinned.view[:length]
        return Frame(op, flags, status, request_id, int.from_bytes(session_id, "big"), payload)

    def _release_returned(self) -> None:
        if self._returned is not None:
            self._returned.is_held = False
            self._returned = None

    def _divert_write(self) -> None:
        """If the reader holds the beginning of a large write, receive the rest of it into a pinned buffer."""
        reader = self.reader
        if reader.end - reader.start < HEADER_BYTES:
            return
        # The header alone decides: a MEM_WRITE is diverted if it is large enough for pinned memory and fits into a
        # buffer.
        header = parse_header(reader.buffer, reader.start)
        op, _, _, length, _, _ = header
        is_large = op == _MEM_WRITE and MIN_PINNED_WRITE_BYTES <= length <= PINNED_BUFFER_BYTES
        self._expects_write = is_large
        pinned = self._pinned_buffers.acquire() if is_large else None
        if pinned is None:
            return
        # Move the part of the payload that has already arrived, and let the reader continue after it.
        begin = reader.start + HEADER_BYTES
        received = reader.end - begin
        pinned.view[:received] = reader.view[begin : reader.end]
        reader.start = reader.end
        self._pinned, self._rest, self._header = pinned, pinned.view[received:length], header


# --- wires ---

RING_LAYOUT: Final = RingLayout(request_bytes=512 << 10, reply_bytes=512 << 10)
"""Room for a few thousand launches, or for a few pieces of a copy. Also bounds the host memory of a connection's ring,
which the kernel allocates at first use."""

BELLS_BYTES: Final = 4096
"""Maximum number of bells that one recv(2) takes, so that a peer that rings without end costs one system call per this
many bells."""

QUANTUM_NS: Final = 1_000_000
"""Longest time for which native code serves one connection before the worker attends to other connections and the
broker.
"""

ALONE_QUANTUM_NS: Final = 4_000_000
"""QUANTUM_NS for a session's only connection, while the session has no regions (orders about regions are urgent). A
request that arrives while the worker's loop does other work waits for about 20 us. With QUANTUM_NS, this happened so
often that it determined the 99th percentile of the launches' times."""

_REPLY_WORDS_AT: Final = 256


class Receiver(Protocol):
    def get_buffer(self) -> memoryview:
        """Return room for the next bytes, never empty."""

    def buffer_updated(self, count: int) -> None:
        """Record that `count` bytes were put into the last `get_buffer()`."""


class ConnectionLost(Exception):
    """The peer is gone, or has sent invalid bytes."""


class Wire(Protocol):
    """Moves one connection's bytes.

    Attributes:
        spins_when_quiet: Whether to spin for requests after a request without a reply, too.
    """

    spins_when_quiet: bool

    @property
    def is_empty(self) -> bool:
        """Return whether nothing has arrived, as far as that is known without a system call."""

    def set_quantum(self, quantum_ns: int) -> None:
        """Set for how long native code may serve the connection in one call."""

    def prepare_sleep(self, *, for_room: bool) -> bool:
        """Prepare to sleep in poll(2); False if there is something to receive, or (`for_room`) room to send."""

    def end_sleep(self, has_event: bool) -> None:
        """Record that the sleep has ended; `has_event` says whether poll(2) reported an event of the socket."""

    def events(self, *, for_room: bool) -> int:
        """Return the events of the socket that poll(2) must report."""

    def receive(self, receiver: Receiver) -> bool:
        """Receive what has arrived; False if nothing has. Raises ConnectionLost or FramingError."""

    def spin(self, receiver: Receiver) -> bool:
        """Receive, polling repeatedly for SPIN_NS. Raises ConnectionLost or FramingError."""

    def send(self, data: bytes | memoryview, wait_ns: int) -> bytes | memoryview | None:
        """Send, waiting for room for at most `wait_ns`. Returns the unsent rest, None if everything was sent.

        Raises ConnectionLost, and FramingError if the peer's part of a ring is invalid.
        """

    def send_final(self, frame: bytes) -> None:
        """Send what fits without waiting. If not all of it fits, the peer notices only that the connection closes."""

    def close(self) -> None:
        """Close the socket, which ends the connection."""


class SocketWire:
    spins_when_quiet = False
    is_empty = False

    def __init__(self, sock: socket.socket, spin_policy: WorkerSpinPolicy) -> None:
        self._sock = sock
        self._yields = spin_policy.yields

    def set_quantum(self, quantum_ns: int) -> None:
        """Do nothing: native code serves only rings."""

    def prepare_sleep(self, *, for_room: bool) -> bool:
        """Return True: poll(2) notices everything that happens on a socket."""
        return True

    def end_sleep(self, has_event: bool) -> None: ...

    def events(self, *, for_room: bool) -> int:
        """Return only POLLOUT with `for_room`, else only POLLIN."""
        return select.POLLOUT if for_room else select.POLLIN

    def receive(self, receiver: Receiver) -> bool:
        try:
            count = self._sock.recv_into(receiver.get_buffer())
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConnectionLost(error.strerror) from None
        if count == 0:
            raise ConnectionLost("the peer closed the connection")
        receiver.buffer_updated(count)
        return True

    def spin(self, receiver: Receiver) -> bool:
        deadline_ns = time.monotonic_ns() + SPIN_NS
        while time.monotonic_ns() < deadline_ns:
            if self.receive(receiver):
                return True
            if self._yields:
                os.sched_yield()
        return False

    def send(self, data: bytes | memoryview, wait_ns: int) -> bytes | memoryview | None:
        """Send through the socket, sleeping in poll(2) while its buffer is full."""
        until_ns = 0
        while True:
            try:
                sent = self._sock.send(data, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise ConnectionLost(error.strerror) from None
            # If a part is left, wait for room until the deadline, which is counted from the first full buffer.
            if sent == len(data):
                return None
            now_ns = time.monotonic_ns()
            until_ns = until_ns or now_ns + wait_ns
            data = memoryview(data)[sent:]
            if now_ns >= until_ns or not _wait(self._sock, select.POLLOUT, until_ns):
                return data

    def send_final(self, frame: bytes) -> None:
        with contextlib.suppress(OSError):
            self._sock.send(frame, socket.MSG_NOSIGNAL)

    def close(self) -> None:
        self._sock.close()


class RingWire:
    """A ring in sealed memory. This process makes the memory, so no peer can shorten it and thereby make a read fault.

    Attributes:
        layout: The ring's layout.
        fd: The memory's descriptor; -1 once the peer has it, if no other process may need it.
    """

    def __init__(
        self, sock: socket.socket, spin_policy: WorkerSpinPolicy, fd: int = -1, state: RingState | None = None
    ) -> None:
        """Make a ring, or take one that another process has left.

        Args:
            sock: The connection's socket.
            spin_policy: How the worker waits.
            fd: The memory of a ring that another process has left; it belongs to this object. -1 for a new ring.
            state: That process's counters.

        Raises:
            OSError: It would need more descriptors or memory than are left.
            ValueError: The memory is too small.
        """
        self._sock = sock
        self._spin_policy = spin_policy
        self.spins_when_quiet = spin_policy.spins_when_quiet
        self.layout = RING_LAYOUT
        # The seal keeps the peer from shortening the memory, so no access here can fault.
        self.fd = sealed_memory("gpulease-ring", self.layout.total_bytes) if fd < 0 else fd
        try:
            self._map = mmap.mmap(self.fd, self.layout.total_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        # Both directions share this memory with the peer; each counter has only one writer.
        with memoryview(self._map) as memory:
            barriers = (threading.Lock(), threading.Lock())
            self._requests, self._replies = worker_ends(memory, self.layout, barriers, partial(_ring_bell, sock))
        self._has_ended = False
        self._waits_for_room = False
        self._ends = self._native_ends()
        if state is not None:
            self._requests.head, self._ends.answered = state.requests_head, state.answered
            self._replies.tail, self._replies.head = state.replies_tail, state.replies_head

    def _native_ends(self) -> RingEnds:
        address, layout, policy = address_of(self._map), self.layout, self._spin_policy
        return RingEnds(
            words=address,
            data=address + DATA_AT,
            capacity=layout.request_bytes,
            reply_words=address + _REPLY_WORDS_AT,
            reply_data=address + DATA_AT + layout.request_bytes,
            reply_capacity=layout.reply_bytes,
            spins_per_byte=int(self.spins_when_quiet),
            spins_per_reply=policy.spins_per_reply,
            # Native code does not yield: it polls once, and leaves the rest to `spin`.
            spin_ns=0 if policy.yields else SPIN_NS,
            quantum_ns=QUANTUM_NS,
        )

    @property
    def is_empty(self) -> bool:
        return not self._requests.has_bytes

    def set_quantum(self, quantum_ns: int) -> None:
        self._ends.quantum_ns = quantum_ns

    def spin_longer(self) -> None:
        """Poll for LATENCY_SPIN_NS before each sleep, if this host has enough cores."""
        if self.spins_when_quiet and not self._spin_policy.yields:
            self._ends.spin_ns = LATENCY_SPIN_NS

    def offered(self, *, keeps_fd: bool) -> None:
        """Record that the peer has the memory. Set `keeps_fd` if another process may have to serve the ring later."""
        if not keeps_fd:
            os.close(self.fd)
            self.fd = -1

    def state(self) -> RingState:
        """Return the counters, for the process that serves this ring from now on."""
        requests, replies = self._requests, self._replies
        return RingState(requests.head, replies.tail, replies.head, self._ends.answered)

    def prepare_sleep(self, *, for_room: bool) -> bool:
        """Mark in the ring that the worker sleeps, so that the peer rings."""
        if not for_room:
            return self._requests.doze()
        # While the worker is awake, the peer's counter shows the worker that there is room. The worker needs a bell
        # only while this flag is set.
        self._waits_for_room = True
        try:
            return self._replies.doze()
        except FramingError:
            return False  # The next send finds the same fault, and reports it.

    def end_sleep(self, has_event: bool) -> None:
        """Mark in the ring that the worker is awake, and receive the bells."""
        self._requests.rise()
        if self._waits_for_room:
            self._waits_for_room = False
            self._replies.rise()
        if has_event:
            self._receive_bells()

    def events(self, *, for_room: bool) -> int:
        """Return POLLIN: a bell announces both requests and room."""
        return select.POLLIN

    def receive(self, receiver: Receiver) -> bool:
        """Take bytes from the ring. Raises ConnectionLost only once the ring is empty."""
        # The peer writes the tail, so it is untrusted: `take` checks it before it copies.
        count = self._requests.take(receiver.get_buffer()) if self._requests.has_bytes else 0
        if count:
            receiver.buffer_updated(count)
            return True
        # The socket's end counts only after everything in the ring was served.
        if self._has_ended:
            raise ConnectionLost("the peer closed the connection")
        return False

    def spin(self, receiver: Receiver) -> bool:
        requests, clock, yields = self._requests, time.monotonic_ns, self._spin_policy.yields
        deadline_ns = clock() + SPIN_NS
        while not requests.poll(1 if yields else READS_PER_CLOCK):
            if clock() > deadline_ns:
                return False
            if yields:
                os.sched_yield()
        return self.receive(receiver)

    def serve(self, serve_ring: Callable[[RingEnds], Outcome | None], spins_left: int) -> tuple[Outcome | None, int]:
        """Have native code serve the ring for a while. Returns why it stopped, and the number of spins left.

        Native code moves the worker's counters in the ring, and then this method wakes the peer.
        """
        # Native code works on copies of the counters, which are loaded here and stored afterwards.
        ends, requests, replies = self._ends, self._requests, self._replies
        ends.head, ends.spins_left = requests.head, spins_left
        ends.reply_tail, ends.reply_head = replies.tail, replies.head
        outcome = serve_ring(ends)
        requests.head, replies.tail, replies.head = ends.head, ends.reply_tail, ends.reply_head
        if outcome is None:
            self.decline_awaited()
        # The peer sleeps. Advance a counter by 0, which rings the bell and changes nothing else.
        if outcome is Outcome.WAKE_WRITER:
            requests.advance(0, 0)
        elif outcome is Outcome.WAKE_READER:
            try:
                replies.put(b"")
            except OSError as error:
                raise ConnectionLost(error.strerror) from None
        return outcome, ends.spins_left

    def decline_awaited(self) -> None:
        """Make a client that waits with the ring's words (protocol.ring.SyncWords) send a SYNC instead.

        Native code answers these words, but it does not run while the session keeps a failure for the tenant. Without
        an answer the client would poll for its whole spin time before it asked for the failure. By then the worker
        would be removing a revoked region's memory, which delays its answer to the SYNC by a millisecond.
        """
        ends, word_bytes = self._ends, AWAITED * ctypes.sizeof(ctypes.c_uint64)
        awaited = ctypes.c_uint64.from_address(ends.words + word_bytes).value
        if awaited != ends.answered:
            ends.answered = awaited
            # The client's number, doubled, may exceed 64 bits: ctypes drops the upper bits, as native code does.
            ctypes.c_uint64.from_address(ends.reply_words + word_bytes).value = 2 * awaited

    def send(self, data: bytes | memoryview, wait_ns: int) -> bytes | memoryview | None:
        """Put the data into the ring. Also raises FramingError, because this reads a counter that the peer writes."""
        replies = self._replies
        until_ns = 0
        # Put what fits, wait for room, repeat. Each turn begins by reading the peer's current counter.
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

    def send_final(self, frame: bytes) -> None:
        """Put the frame into the ring, completely or not at all."""
        with contextlib.suppress(OSError, FramingError):
            self._replies.put_whole(frame)

    def close(self) -> None:
        """Close the socket, which ends the connection, and unmap the memory."""
        # First mark the ring as closed on this side, so that a peer that polls it notices.
        self._requests.leave()
        self._sock.close()
        self._requests.release()
        self._replies.release()
        self._map.close()
        if self.fd >= 0:
            os.close(self.fd)

    def _await_room(self, until_ns: int) -> bool:
        """Wait for room. Returns False if there is none at `until_ns`. Raises ConnectionLost."""
        replies = self._replies
        # Spin first, if there are enough cores: an honest peer reads within microseconds.
        if self._spin_policy.spins_when_quiet:
            spin_until_ns = min(until_ns, time.monotonic_ns() + SPIN_NS)
            while time.monotonic_ns() < spin_until_ns:
                if replies.room():
                    return True
        # Then sleep. `doze` announces the sleep in the ring and checks again, so no bell is missed.
        while replies.doze():
            # Check the clock as well: a peer that rings without end would cut every wait short, and so extend the loop.
            is_in_time = _wait(self._sock, select.POLLIN, until_ns) and time.monotonic_ns() < until_ns
            self._receive_bells()
            if self._has_ended:
                raise ConnectionLost("the peer is gone")
            if not is_in_time:
                replies.rise()
                return False
        return True

    def _receive_bells(self) -> None:
        try:
            # An empty read means that the peer has closed the socket; any byte is a bell.
            self._has_ended = not self._sock.recv(BELLS_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._has_ended = True


def can_share(sock: socket.socket) -> bool:
    """Return whether a socket's peer is on this host, so that descriptors of shared memory can be sent to it."""
    return sock.family == socket.AF_UNIX


def ring_for(
    sock: socket.socket, memory_request: SharedMemoryRequest, spin_policy: WorkerSpinPolicy
) -> RingWire | None:
    """Return a ring for a connection that asks for one, if it can have one, else None.

    Rings need a peer on this host and the memory order of x86-64; see `protocol.ring`.
    """
    if not memory_request.ring or not can_share(sock) or platform.machine() != "x86_64":
        return None
    try:
        return RingWire(sock, spin_policy)
    except OSError:
        return None  # No descriptor or no memory is left: the socket's stream does the same, only slower.


def _wait(sock: socket.socket, event: int, until_ns: int) -> bool:
    """Sleep until an event on a socket or a time; return whether the event came."""
    poll = select.poll()
    poll.register(sock, event)
    # Rounded up: poll(2) must not return just before the time.
    return bool(poll.poll(max(0, -(-(until_ns - time.monotonic_ns()) // NS_PER_MS))))


def _ring_bell(sock: socket.socket) -> None:
    # A full socket is not a failure: it contains bells that the peer has not received yet, and one bell is enough.
    with contextlib.suppress(BlockingIOError):
        sock.send(b"\0", socket.MSG_NOSIGNAL)


# --- sending ---

ALONE_WAIT_NS: Final = 20_000_000
"""Longest wait for room for a reply in a session's only connection, where only the broker could need the thread during
the wait."""

SHARED_WAIT_NS: Final = 2_000_000
"""Longest wait for room for a reply, in one of several connections."""

NO_WAIT_S: Final = 10.0
"""Time after a pause during which replies to the paused connection do not wait for room, if the session has other
connections. Otherwise a peer that reads each reply only after its connection was paused would take SHARED_WAIT_NS of
the other connections' time per request."""

UNSENT_BYTES: Final = 64 << 20
"""Maximum number of unsent bytes that a session keeps for all its peers: four of the largest replies. A well-behaved
client asks for 1 MiB at a time."""

UNSENT_TIMEOUT_S: Final = 60.0
"""Time within which a peer must read at least STEP_BYTES, or the whole rest. Stops a peer that never reads from keeping
the memory and the place of a connection."""

STEP_BYTES: Final = 64 << 10


class SendBuffer:
    """The rest of one reply that a paused connection still has to send.

    Attributes:
        unsent: The bytes.
    """

    def __init__(self, unsent: bytes | memoryview) -> None:
        # Copy it, because the session may overwrite the reply's memory with the next reply.
        self.unsent = memoryview(bytes(unsent))
        # Number of unsent bytes when the peer last completed a step of STEP_BYTES, and the time of that.
        self._step_bytes = len(self.unsent)
        self._step_s = time.monotonic()

    def update(self, unsent: bytes | memoryview) -> None:
        """Set the unsent bytes to `unsent`, after the peer has read some."""
        self.unsent = memoryview(unsent)
        # Less than a step does not count as progress: otherwise a peer could keep the memory by reading a byte a
        # minute.
        if self._step_bytes - len(self.unsent) >= STEP_BYTES:
            self._step_bytes, self._step_s = len(self.unsent), time.monotonic()

    def is_stale(self, now_s: float) -> bool:
        """Return whether the peer has not completed a step for UNSENT_TIMEOUT_S."""
        return now_s - self._step_s > UNSENT_TIMEOUT_S


# --- the connection ---

FRAME_TIMEOUT_S: Final = 60.0
"""Longest pause between two bytes of a frame. Stops a peer from keeping half a frame in the worker's memory; an honest
peer, however slow, does not pause for so long."""

ServeRing = Callable[[FrameReader, RingEnds], Outcome | None]
"""Makes native code serve a ring, beginning with the frames in the reader. Returns None if it can't serve now."""


class AttachedConnection:
    """An attached socket.

    Attributes:
        guest: The bearer of the token with which the connection was attached; None for a connection of the lease's
            owner.
        second: The bearer of its second token; None without one.
        has_token: Whether it has one of the two, so that each request is checked.
        client_pid: The client's process; 0 if it is not known.
        owns: Whether the objects that the connection creates end with it.
        wire: Moves its bytes: the socket, or a ring in addition to it.
        reader: Its received frames, except large writes.
        receive_buffer: Everything that it has received.
        has_arena: Whether the session's arena belongs to this connection.
        streams: Its streams.
        holder: The holder of the objects that the connection creates; set once it is attached.
        spins_left: How often to spin for more requests before the worker sleeps.
        received_at_s: When bytes of an incomplete frame last arrived.
        send_buffer: The rest of a reply that the peer has not read; None unless the connection is paused.
        wait_ns: How long a reply to it waits for room.
        no_wait_until_s: Time until which replies to it do not wait for room; 0 if they do wait.
    """

    def __init__(
        self,
        sock: socket.socket,
        rest: bytes,
        pinned_buffers: PinnedBuffers,
        spin_policy: WorkerSpinPolicy,
        guest: Guest | None = None,
        second: Guest | None = None,
    ) -> None:
        self.sock = sock
        self.guest, self.second = guest, second
        self.has_token = guest is not None or second is not None
        self.client_pid, self.owns = 0, False
        self.fd = sock.fileno()
        # Every connection begins with its socket alone; ATTACH's reply may put a ring in its place.
        self.wire: Wire = SocketWire(sock, spin_policy)
        self.reader = FrameReader(MAX_PAYLOAD_BYTES)
        self.reader.receive_data(rest)
        self.receive_buffer = ReceiveBuffer(self.reader, pinned_buffers)
        self.has_arena = False
        self.streams = ConnectionStreams()
        self.streams.has_second_token = second is not None
        self.holder = Holder()
        self.spins_left = spin_policy.spins_per_reply
        self.received_at_s = time.monotonic()
        self.send_buffer: SendBuffer | None = None
        self.wait_ns = 0
        self.no_wait_until_s = 0.0

    @property
    def is_paused(self) -> bool:
        """Return whether the peer has to read the rest of a reply before any of its requests is served."""
        return self.send_buffer is not None

    def overdue(self, now_s: float) -> ConnectionLost | FramingError | None:
        """Return the error with which to drop a connection that has kept memory here for too long; otherwise None."""
        # The idle time of a paused connection counts from its last read, that of any other from its last bytes.
        if self.send_buffer is not None:
            return ConnectionLost("the peer does not read its replies") if self.send_buffer.is_stale(now_s) else None
        if self.receive_buffer.is_mid_frame and now_s - self.received_at_s > FRAME_TIMEOUT_S:
            return FramingError(f"the rest of a frame did not arrive within {FRAME_TIMEOUT_S:g} s")
        return None

    def serve_ring(self, serve: ServeRing) -> Outcome | None:
        """Let native code serve the ring; None without a ring, or if part of a frame has been received.

        Not called with a token, because native code does not check tokens. Raises ConnectionLost or FramingError.
        """
        wire = self.wire
        if self.has_token or self.receive_buffer.is_mid_frame or not isinstance(wire, RingWire):
            return None
        outcome, self.spins_left = wire.serve(partial(serve, self.reader), self.spins_left)
        return outcome

    def decline_awaited(self) -> None:
        """Make a client that waits by the ring's words send a SYNC instead."""
        if isinstance(self.wire, RingWire):
            self.wire.decline_awaited()

    def receive(self) -> bool:
        """Receive what has arrived. Returns False if nothing has arrived and more spinning is not worthwhile.

        Raises ConnectionLost or FramingError.
        """
        wire, receive_buffer = self.wire, self.receive_buffer
        if not wire.receive(receive_buffer):
            # Nothing has arrived: spin if this connection has spins left, otherwise let the worker sleep.
            if not self.spins_left:
                return False
            self.spins_left -= 1
            if not wire.spin(receive_buffer):
                return False
        # With cores to spare, spin also after a request that has no reply.
        if wire.spins_when_quiet:
            self.spins_left = 1
        return True
