"""A session's connection to its worker: opened by ATTACH, and ended permanently by `Attachment.finish`."""

import socket
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final, Protocol

from gpulease.client.core.clean_ups import CleanUp
from gpulease.client.core.exchange import CONNECT_LIMIT_S, First, FixedDeadline, dial_for, polls_for, receive
from gpulease.client.core.lease import LeaseHandle, find_end_reason
from gpulease.client.core.waits import Procedure
from gpulease.client.errors import GpuLeaseError, Unsupported, error_of
from gpulease.client.fork_guard import OWNED_BY_PARENT
from gpulease.client.handles import Buffer, HandleOwner
from gpulease.client.transport.arena import Arena
from gpulease.client.transport.channel import Channel, FrameWriter
from gpulease.client.transport.link import LinkEnded
from gpulease.client.transport.ring import share
from gpulease.client.transport.session_words import NO_WORD, SessionWords
from gpulease.client.transport.spin_policy import SpinPolicy
from gpulease.protocol import Connection, Failure, Opcode, Status
from gpulease.protocol.capabilities import AttachOption
from gpulease.protocol.limits import DATA_CHUNK_BYTES, MAX_DATA_BYTES
from gpulease.protocol.messages import Attach, AttachReply
from gpulease.protocol.opcodes import SessionOption
from gpulease.protocol.operations import SPECS
from gpulease.protocol.primitives import Tlv
from gpulease.protocol.ring import SharedMemoryRequest

ATTACH_LIMIT_S: Final = 30.0
"""Longest time for a session to open, in seconds. Starting a process and its context takes 0.6 s, or 3 s if sixteen
start at once."""

MEM_WRITE_FIXED_BYTES: Final = 20
"""Bytes of a MEM_WRITE's payload other than data: handle, offset and length."""

QUIET_WRITE_BYTES: Final = 64 << 10
"""Largest write that is queued without waiting; its bytes are copied when the call returns. A larger write waits for
its reply: the wait is short compared with the copy, and shows whether the write succeeded."""

_ABILITIES: Final = {spec.op: spec.ability for spec in SPECS.values() if spec.is_session}


@lru_cache(maxsize=64)
def _served(options: frozenset[int]) -> frozenset[Opcode]:
    """Return the operations that a worker with these abilities serves. Cached, because few different sets occur."""
    return frozenset(op for op, ability in _ABILITIES.items() if ability is None or ability in options)


_NOT_OPEN: Final = Failure(
    Status.INVALID_REQUEST, "the session is not open", "Open it first: `async with GpuSession(lease) as session`"
)
_CLOSED: Final = Failure(Status.INVALID_REQUEST, "the session was closed", "Open another one on the lease")


class ActiveRecording(Protocol):
    """The recording that replaces a session's launches and copies; see `recorder`."""

    def refusal(self, operation: str) -> GpuLeaseError:
        """Return the error for an operation that a graph can't contain."""


class LentArrays:
    """Arrays in the arena that the worker may still read or write.

    The arena must not reuse their memory, even if the program has dropped them.

    Attributes:
        is_used: False if no array is lent. A sync reads this field, because a call would take too long.
    """

    def __init__(self) -> None:
        self.is_used = False
        self._by_stream: dict[int, dict[tuple[int, int], memoryview]] = {}
        self._of_graphs: list[object] = []

    def lend(self, stream: int, place: int, view: memoryview) -> None:
        """Hold the array of a copy in a stream until that stream, or the session, has been waited for."""
        # Use the address and size as the key, so that an array that is lent twice is held once.
        self.is_used = True
        self._by_stream.setdefault(stream, {})[place, len(view)] = view

    def lend_to_graph(self, arrays: object) -> None:
        """Hold the arrays of a closed graph's queued launches until the session has been waited for."""
        self.is_used = True
        self._of_graphs.append(arrays)

    def take_back(self, stream: int | None = None) -> None:
        """Release the arrays of one stream, or of the whole session, after it has been waited for."""
        if stream is not None:
            self._by_stream.pop(stream, None)
        else:
            self._by_stream.clear()
            self._of_graphs.clear()
            self.is_used = False

    def __bool__(self) -> bool:
        return bool(self._by_stream or self._of_graphs)


MAX_HELD_BYTES: Final = 16 << 20
HELD_PART: Final = 16
"""Freed buffers may continue to occupy at most MAX_HELD_BYTES of a session, and at most 1/HELD_PART of its slice. This
is little enough to free all of them first whenever an allocation needs their bytes."""


MAX_HELD_BUFFERS: Final = 64
"""Maximum number of held buffers. One operation frees all of them (`operations.FREES_PER_FLUSH`), so that the next
allocation has their memory."""


class HeldBuffers:
    """Buffers that the tenant has freed but the worker has not: the next allocation of the same size takes one.

    So a loop that allocates and frees does not wait (MEM_REUSE). Before any request that may need their memory, they
    are freed.
    """

    def __init__(self) -> None:
        self._most_bytes = self._held_bytes = self._count = 0
        self._by_size: dict[int, list[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_size)

    def allow(self, slice_bytes: int) -> None:
        """From now on hold buffers, up to a part of the slice."""
        self._most_bytes = min(MAX_HELD_BYTES, slice_bytes // HELD_PART)

    def hold(self, buffer: Buffer) -> bool:
        """Hold a buffer, which counts as freed for its program. Returns False if it does not fit."""
        size_bytes = buffer.size_bytes
        # Limit the bytes, so that other allocations have room, and the number, so that one flush frees all buffers.
        if self._held_bytes + size_bytes > self._most_bytes or self._count >= MAX_HELD_BUFFERS:
            return False
        by_size, handle = self._by_size, buffer.handle
        # No call may follow, as in `take`: after an interrupt the buffer is either the program's or held.
        self._count += 1
        self._held_bytes += size_bytes
        if size_bytes in by_size:
            by_size[size_bytes] += [handle]
        else:
            by_size[size_bytes] = [handle]
        buffer.owner = None
        return True

    def take(self, size_bytes: int, owner: HandleOwner) -> Buffer | None:
        """Return a new handle for the held buffer of exactly that size that was freed last; None if there is none."""
        by_size = self._by_size
        if size_bytes not in by_size:
            return None
        buffer, handles = Buffer(None, 0, size_bytes), by_size[size_bytes]
        # No call may follow until the owner is set: after an interrupt the memory is either still held, or the
        # buffer's.
        self._count -= 1
        self._held_bytes -= size_bytes
        buffer.handle = handles[-1]
        buffer.owner = owner
        del handles[-1]
        if not handles:
            del by_size[size_bytes]
        return buffer

    def give_back(self, dropped: list[tuple[Opcode, int]]) -> None:
        """Stop holding buffers. Appends the (operation, handle) pairs that free them to `dropped`."""
        # No call may follow after the list is made: after an interrupt the buffers are either still held, or their
        # frees are in `dropped`.
        frees = [(Opcode.MEM_FREE, handle) for handles in self._by_size.values() for handle in handles]
        empty: dict[int, list[int]] = {}
        self._held_bytes = self._count = 0
        self._by_size = empty
        dropped += frees


class Attachment:
    """A session's connection, its lease, and how it ended.

    Attributes:
        lease: The session's lease.
        token: The token with which the session was opened; empty if the lease's own tenant opened it.
        uses_second: Whether the worker serves requests by the second token.
        lock: The API's lock, which every operation holds.
        session_id: The lease's id.
        channel: The connection.
        connection: The protocol's state of that connection.
        writer: The channel's writer, for frames that no caller waits for.
        reply: The worker's reply to ATTACH.
        served: The operations that the worker serves, according to the abilities in that reply.
        lease_bytes: The lease's size when the worker replied.
        end: How the session ended; None before its end.
        arena: Memory shared with the worker; None if there is none.
        lease_word: A word that the broker writes; not 0 once the lease has ended.
        words: The session's words, by which the client refuses launches that name an ended region; None if the worker
            provides none, or is too old to accept a report of such a refusal.
        regions_epoch: The epoch in these words, which is raised after each change of a region's word.
        last_raised: The last failure of a reply, or end of the session, that was raised.
        dropped: Handles without references; the next operation frees them.
        held: Buffers that were freed; the next allocation of their size reuses them.
        lent: Arrays that the worker may still use.
        chunk_bytes: Size of the pieces into which copies are cut.
        quiet_bytes: Largest write that is queued without waiting.
        max_payload_bytes: Largest payload that the daemon accepts.
        recording: The recording in progress; None while the session does not record.
        has_sync_word: Whether a sync needs no frame: the session has SYNC_WORD.
        has_loaded: Whether a module was loaded, so that kernels of this connection may run.
        at_end: Functions to call once, when the session ends.
    """

    def __init__(
        self,
        lease: LeaseHandle,
        lock: Any,
        *,
        tokens: tuple[bytes, bytes],
        memory_request: SharedMemoryRequest,
        spin: SpinPolicy,
    ) -> None:
        """Prepare a connection, which `attach` opens.

        Args:
            lease: The session's lease.
            lock: The API's kind of lock.
            tokens: The token with which to open it, empty for its own tenant; and its second token, empty for none.
            memory_request: Memory to share with the worker.
            spin: How long to poll for a reply before sleeping.
        """
        self.lease = lease
        self.token, self._second_token = tokens
        self.uses_second = False
        self.lock = lock
        self.session_id = lease.grant.lease_id
        self._memory_request = memory_request
        self._spin = spin
        self.channel: Channel
        self.connection: Connection
        self.writer: FrameWriter
        self.reply: AttachReply
        self.served: frozenset[Opcode] = frozenset()
        self.end: Failure | None = _NOT_OPEN
        self.arena: Arena | None = None
        self.lease_word = self.regions_epoch = NO_WORD
        self.words: SessionWords | None = None
        self.last_raised: Failure | None = None
        self.dropped: list[tuple[Opcode, int]] = []
        self.held = HeldBuffers()
        self.lent = LentArrays()
        self.chunk_bytes = DATA_CHUNK_BYTES
        self.quiet_bytes = 0
        self.max_payload_bytes = 0
        self.recording: ActiveRecording | None = None
        self.has_sync_word = False
        self.has_loaded = False
        self.at_end: list[Callable[[], None]] = []

    @property
    def end_failure(self) -> Failure | None:
        """Return the end of the session, or else of its lease; None while neither has ended."""
        # Read the lease's word first: the broker writes it before the client can be notified of the end in another way.
        if self.end is None and self.lease_word[0]:
            self.lease.poll_words()
        return self.end or self.lease.end_failure

    def check_open(self, operation: str) -> None:
        """Raise the end of the session or of its lease, if there is one.

        The session's `with` block does not raise it again.
        """
        if (error := self.end_error_now(operation)) is not None:
            raise error

    def end_error_now(self, operation: str) -> GpuLeaseError | None:
        """Return the error that `check_open` raises; None while neither the session nor its lease has ended."""
        if (end := self.end_failure) is None:
            return None
        self.last_raised = end
        return error_of(end, operation)

    @property
    def is_alive(self) -> bool:
        """True until the session or its lease is known here to have ended."""
        return self.end is None and self.lease.remaining_s > 0

    @property
    def is_closed(self) -> bool:
        """True once this program has closed the session."""
        return self.end is _CLOSED

    @property
    def is_at_rest(self) -> bool:
        """True if the session is open, has nothing to free, records nothing, and awaits no reply."""
        link = self.channel.link
        return (
            self.end is None
            and self.lease.end_failure is None
            and not self.dropped
            and self.recording is None
            and link.end is None
            and self.channel.is_finished
            and link.is_at_rest
        )

    # --- opening ---

    def attach(self) -> Procedure[None]:
        """Open a connection and make it this session's. Raises the reason if that fails."""
        lease = self.lease
        # If the session is known to have ended, open no connection.
        if lease.end_failure is not None:
            raise error_of(lease.end_failure, "attach")
        # Step 1: connect, and send HELLO and ATTACH in one flight.
        deadline = FixedDeadline(CONNECT_LIMIT_S, "connect", lease.address)
        body, takes_descriptors = Attach(self._options()), self._memory_request != SharedMemoryRequest()
        # If the session's context is ready, the worker replies within a millisecond.
        is_polled = polls_for(lease.address, lease.waiting)
        first = First(Opcode.ATTACH, body, self.session_id, takes_descriptors, is_polled=is_polled)
        self.channel, hello, number = yield from dial_for(lease.address, deadline, first)
        # Step 2: HELLO's reply bounds the size of frames, hence of copies.
        self.max_payload_bytes = hello.max_payload_bytes
        self.chunk_bytes = max(
            1, min(DATA_CHUNK_BYTES, MAX_DATA_BYTES, hello.max_payload_bytes - MEM_WRITE_FIXED_BYTES)
        )
        self.quiet_bytes = min(QUIET_WRITE_BYTES, self.chunk_bytes)
        # Step 3: the worker makes a context before it replies to ATTACH, so the reply has a deadline of its own.
        try:
            deadline = FixedDeadline(ATTACH_LIMIT_S, "attach", lease.address)
            answer: Any = yield from receive(self.channel, number, deadline)
        except LinkEnded as ended:
            failure = ended.failure
        except BaseException:
            self.channel.close()
            raise
        else:
            if isinstance(answer, Failure):
                self.channel.close()
                raise error_of(lease.note_failure(answer), "attach")
            self._begin(answer)
            return
        raise (yield from self.end_error(failure, "attach"))

    def option_value(self, option: SessionOption) -> bytes | None:
        """The value of an option in ATTACH's reply; None if the worker did not send it."""
        return next((reply_option.value for reply_option in self.reply.options if reply_option.type == option), None)

    def require(self, op: Opcode, operation: str) -> None:
        """Raise Unsupported, naming the caller's `operation`, if the worker is too old to serve a request."""
        if op not in self.served:
            raise Unsupported(
                f"{operation}: the session's daemon is too old for it", "Ask its operator for a newer one"
            )

    def _begin(self, reply: AttachReply) -> None:
        self.reply = reply
        # The reply's options are the worker's abilities; an older worker has fewer.
        self.served = _served(frozenset([option.type for option in reply.options]))
        self.lease_bytes = self.lease.grant.size_bytes
        # Replace the channel by one of the session's kind: a ring, or a socket that gathers frames.
        self.channel, self.arena, words = share(self.channel, reply.options, self._spin)
        if words is not None:
            self.lease.words, self.lease_word = words, words.lease
            if Opcode.REGION_REFUSED in self.served:
                self.words, self.regions_epoch = words, words.epoch
        self.connection, self.writer = self.channel.link.connection, self.channel.writer
        self.has_sync_word = self.option_value(SessionOption.SYNC_WORD) is not None
        if self.has_sync_word and Opcode.MEM_REUSE in self.served:
            # This is the only connection that allocates in the session, so buffers may be held.
            self.held.allow(reply.slice_bytes)
        self.end = None

    def _options(self) -> tuple[Tlv, ...]:
        token = (Tlv(AttachOption.TOKEN, self.token),) if self.token else ()
        second = (Tlv(AttachOption.SECOND_TOKEN, self._second_token),) if self._second_token else ()
        return (*self._memory_request.to_options(), *token, *second, Tlv(AttachOption.OWN_MEMORY, b""))

    # --- ending ---

    def disown(self) -> Any:
        """Leave the session to the parent process (`fork_guard.Inherited`).

        Returns:
            A new lock. In this process the old one may never be released: a thread of the parent may have held it.
        """
        if self.end is None:
            self.end = OWNED_BY_PARENT
        # The child must not write to the arena: the parent allocates its memory, and the parent's worker reads it.
        self.arena = None
        self.lock = type(self.lock)()
        return self.lock

    def wake(self) -> None:
        """Begin to close: make a thread or task that waits on the connection stop waiting and release the lock."""
        # Set the end first: the thread that wakes up finds it, and starts no other operation.
        if self.end is None:
            self.end = _CLOSED
            self.channel.send_rest()
            with suppress(OSError):
                self.channel.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the session from this side; its lease continues."""
        self.finish(_CLOSED)
        if self.lease.token:
            # The control connection presented the token, so it is of no further use.
            self.lease.channel.close()

    def give_up(self) -> None:
        """Close everything that a failed or interrupted attach has opened."""
        if getattr(self, "channel", None) is not None:
            self.finish(_CLOSED)

    def finish(self, failure: Failure) -> None:
        """End the session permanently. The first recorded reason is kept."""
        if self.end is None or self.end is _NOT_OPEN:
            self.end = failure
        self.channel.close()
        # Read the word again before the page is unmapped, because it may contain the reason for the lease's end.
        if self.lease.words is not None and self.lease.words.lease is self.lease_word:
            self.lease.poll_words()
            self.lease.words = None
        self.lease_word = self.regions_epoch = NO_WORD
        self.words = None
        # Without the arena, nothing can reuse the lent arrays' memory.
        self.arena = None
        self.lent.take_back()
        while self.at_end:
            self.at_end.pop()()

    def end_error(self, failure: Failure, operation: str) -> Procedure[GpuLeaseError]:
        """Return the error to raise after the connection ended with `failure`. Asks the daemon how the lease ended."""
        # Use an end that is known already, else the lease's end, and only then ask the broker.
        if self.end is not None and self.end is not _NOT_OPEN:
            failure = self.end
        elif self.lease.end_failure is not None:
            failure = self.lease.end_failure
        elif failure.status is Status.SESSION_FAILED:
            # The worker reports that the session has ended, but not why.
            reason = yield from find_end_reason(self.lease, failure)
            failure = failure if reason.status is Status.DISCONNECTED else reason
        elif not self.channel.link.is_end_explained:
            failure = yield from find_end_reason(self.lease, failure)
        elif self.channel.link.received_goodbye:
            # A goodbye contains the reason for the lease's end.
            failure = self.lease.note_failure(failure)
        self.finish(failure)
        return error_of(failure, operation)


class AttachmentCleanUp(CleanUp):
    """The connection of a session that an interrupted call was opening. Giving it back closes it."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment

    def _give_back(self) -> Procedure[None]:
        self._attachment.give_up()
        return
        yield  # makes this a procedure
