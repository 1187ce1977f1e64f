"""The client's end of one connection, without I/O.

A link has the protocol's state, the expected replies, and the reads whose data is received straight into the caller's
memory.

An operation of the blocking API may be interrupted at almost any point: Python runs a signal handler, which may raise,
at the start of a function, after a call into C, and at each turn of a loop. So none of these occurs between statements
that belong together, and a step that runs twice after an interrupt changes nothing the second time. A reply that brings
a new object stays here until its handle is made (`claim`). `forget` releases the objects that an interrupted caller
left here.
"""

import struct
from collections import deque
from typing import Any, Final

from gpulease.protocol import (
    Connection,
    Failure,
    Goodbye,
    Notification,
    Opcode,
    RegionNotification,
    Reply,
    Role,
    Status,
    StreamBroken,
)
from gpulease.protocol.errors import FramingError
from gpulease.protocol.fastpath import data_prefix
from gpulease.protocol.framing import HEADER_BYTES, MAGIC, parse_header
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import Body, ModuleLoaded
from gpulease.protocol.opcodes import Flag

DIRECT_READ_BYTES: Final = 16 << 10
"""From this size on, a read's reply is received in two pieces, header and data, so that the data is not copied. For a
smaller read, the second system call would cost more than the copy."""

NOT_FOLLOWED_HINT: Final = (
    "Do the versions of the daemon and of this client differ? Or is it not gpuleased that answers?"
)
"""Hint about a peer that does not follow the protocol."""

_LENGTH: Final = struct.Struct(">I")
_PREFIX_BYTES: Final = HEADER_BYTES + _LENGTH.size


class LinkEnded(Exception):
    """The stream has ended. `failure` describes how, as far as this connection can find out."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Link:
    """Turns received bytes into results.

    Attributes:
        connection: The protocol's state.
        end: How the stream ended; None before its end.
        is_end_explained: True if `end` gives the reason: the peer sent a goodbye, or this side ended the stream. False
            if it only says that the stream has ended.
        notifications: Events of subscriptions, for the subscriber to read.
        received_goodbye: True if `end` is the peer's goodbye.
        received: Number of bytes received.
    """

    def __init__(self) -> None:
        self.connection = Connection(Role.CLIENT, max_payload_bytes=MAX_PAYLOAD_BYTES)
        self.end: Failure | None = None
        self.is_end_explained = False
        self.received_goodbye = False
        self.notifications: deque[Notification | RegionNotification] = deque()
        self.received = 0
        # Requests that await a reply; results that were not taken; and, for each reply with a new object, the operation
        # that frees the object.
        self._awaited: set[int] = set()
        self._results: dict[int, Body | Failure] = {}
        self._creates: dict[int, Opcode] = {}
        # Targets of reads, in the order of their requests; the read that is being received; and the rest of its target.
        self._targets: dict[int, memoryview] = {}
        self._target_id = 0
        self._target_rest: memoryview | None = None

    # --- asking ---

    def request(self, op: Opcode, body: Body, session_id: int = 0, *, creates: bool = False) -> tuple[int, bytes]:
        """Return (request id, frame) of a request; the caller will `take` its result. Raises LinkEnded after the end.

        Args:
            op: Its operation.
            body: Its body.
            session_id: The session that it is for.
            creates: Whether its reply brings a new object: then the reply stays here until `claim`.
        """
        if self.end is not None:
            raise LinkEnded(self.end)
        # Number the request before listing it: if it may not be sent now, nothing must be listed.
        request_id, frame = self.connection.send_request(op, body, session_id=session_id)
        if creates:
            self._creates[request_id] = op
        self._awaited.add(request_id)
        return request_id, frame

    def request_behind_hello(
        self, op: Opcode, body: Body, session_id: int = 0, *, creates: bool = False
    ) -> tuple[int, bytes]:
        """Return (request id, frame) of a request that is sent together with HELLO, before HELLO's reply.

        The arguments are as for `request`.
        """
        request_id, frame = self.connection.send_behind_hello(op, body, session_id=session_id)
        if creates:
            self._creates[request_id] = op
        self._awaited.add(request_id)
        return request_id, frame

    def expect(self, op: Opcode, target: memoryview | None = None, undo: Opcode | None = None) -> int:
        """Return the number for a session request, and expect its reply. The caller builds the frame.

        Args:
            op: Its operation.
            target: The target of a MEM_READ's data.
            undo: If the reply brings a handle, the operation that frees the new object; otherwise None.

        Raises LinkEnded if there can be no reply, because a goodbye may have followed directly after the last reply.
        """
        if self.end is not None:
            raise LinkEnded(self.end)
        request_id = self.connection.expect_reply(op)
        if undo is not None:
            self._creates[request_id] = undo
        self._awaited.add(request_id)
        if target is not None:
            self._targets[request_id] = target
        return request_id

    @property
    def is_at_rest(self) -> bool:
        """True if no reply is awaited and no frame is received in part."""
        reader = self.connection.reader
        return not (self._awaited or self._results or reader.start != reader.end or self._target_rest)

    @property
    def has_leftovers(self) -> bool:
        """True if a reply to an interrupted caller is here or still to come."""
        return bool(self._awaited or self._creates or self._results)

    @property
    def has_failure(self) -> bool:
        """True if a reply that was not taken reports a failure."""
        return any(isinstance(result, Failure) for result in self._results.values())

    def expect_late(
        self, op: Opcode, request_id: int, target: memoryview | None = None, undo: Opcode | None = None
    ) -> None:
        """Expect the reply to a request that the caller has already numbered and sent (see `expect`)."""
        self.connection.expect_reply_to(op, request_id)
        if undo is not None:
            self._creates[request_id] = undo
        self._awaited.add(request_id)
        if target is not None:
            self._targets[request_id] = target

    def take(self, request_id: int) -> Body | Failure | None:
        """Take the result of a request, once; None until it has come. Raises LinkEnded if it never will.

        A result that brings a new object stays here until `claim`.
        """
        results = self._results
        if request_id in results:
            result = results[request_id]
            if request_id not in self._creates:
                del results[request_id]
            return result
        if self.end is not None:
            raise LinkEnded(self.end)
        return None

    def leave(self, request_id: int, failure: Failure) -> None:
        """Put back a failure that was taken, for `forget`, as if the caller of its request had been interrupted."""
        self._results[request_id] = failure

    def take_region_refusal(self, request_id: int) -> Failure | None:
        """Take the result of a request if it has come and is a failure because of a region. Otherwise leave it."""
        result = self._results.get(request_id)
        if type(result) is not Failure or result.region is None:
            return None
        self.claim(request_id)
        return result

    def claim(self, request_id: int) -> None:
        """Drop the result of a request that makes an object, because its handle now exists or the request failed.

        The caller passes the handle on without a call in between, so that no interrupt can lose it.
        """
        if request_id in self._creates:
            del self._creates[request_id]
        if request_id in self._results:
            del self._results[request_id]

    def forget(self, frees: list[tuple[Opcode, int]]) -> Failure | None:
        """Drop replies to interrupted callers, both those here and those still to come.

        Args:
            frees: Receives the (operation, handle) pairs that free the objects in such replies.

        Returns:
            The failure of an earlier request, if one of these replies reported one.
        """
        results, creates = self._results, self._creates
        if not self._awaited and not results:
            return None
        # From now on no caller waits: `advance` drops later replies, except failures and replies that bring an object.
        self._awaited.clear()
        self._targets.clear()
        # A read's data was received in part. Receive the rest, but not into the caller's memory.
        if self._target_rest is not None:
            self._target_rest = memoryview(bytearray(len(self._target_rest)))
        failure: Failure | None = None
        for request_id in list(results):
            result = results[request_id]
            # Report only a failure that names an earlier request. All others concern callers that are gone.
            if isinstance(result, Failure):
                failure = result if result.failed_request_id is not None else failure
            elif request_id in creates:
                # Make no call from here to the end of the iteration, so that no interrupt can list the object twice.
                frees += [(creates[request_id], _handle_in(result))]
            del results[request_id]
            if request_id in creates:
                del creates[request_id]
        return failure

    def drop_unclaimed(self) -> None:
        """On a lease's connection, drop replies without a waiter. Replies that made an object stay until `claim`."""
        self._awaited.intersection_update(self._creates)
        for request_id in [*self._results]:
            if request_id not in self._creates:
                del self._results[request_id]

    def forget_unsent(self) -> None:
        """Forget requests without a reply. All sent requests have received replies, so these were never sent."""
        self._creates.clear()
        self.connection.forget_unsent()

    # --- receiving ---

    def get_buffer(self) -> memoryview:
        """Return the memory into which to receive the next bytes."""
        if self._target_rest is not None:
            if self._target_rest:
                return self._target_rest
            self.advance()  # an interrupt came before it was advanced
        reader = self.connection.reader
        room = reader.get_buffer()
        # A large read is next: receive only its header here, and then its data into its target.
        if self._targets and next(iter(self._targets.values())).nbytes >= DIRECT_READ_BYTES:
            missing = _PREFIX_BYTES - (reader.end - reader.start)
            if missing > 0:
                return room[:missing]
        return room

    def buffer_updated(self, count: int) -> None:
        """Count `count` bytes that were received into the last `get_buffer()`."""
        reader, target_rest = self.connection.reader, self._target_rest
        missing = 0 if target_rest is None else len(target_rest) - count
        # Make no call between these statements, so that an interrupt comes before or after all of them.
        self.received += count
        if target_rest is None:
            reader.end += count
        else:
            self._target_rest = target_rest[count:]
        if not missing:
            self.advance()

    def end_of_stream(self, reason: str) -> None:
        """End the stream with the message `reason`, because the peer sends no more. Complete frames still count."""
        # `advance` parses the remaining frames. If one reports an end, that end is kept.
        self.connection.receive_eof()
        self._target_rest = None
        self.advance()
        self.break_off(Failure(Status.DISCONNECTED, reason))

    def strange_bytes(self) -> bytes:
        """Return the bytes that were received last, if they can't be a frame's beginning; otherwise b"".

        A frame's header may still be incomplete.
        """
        reader = self.connection.reader
        begin = bytes(reader.view[reader.start : reader.end])
        return b"" if MAGIC.startswith(begin[: len(MAGIC)]) else begin

    def break_off(self, failure: Failure, *, is_explained: bool = False) -> None:
        """End the stream from this side. If it has already ended, that end is kept."""
        if self.end is None:
            self.end, self.is_end_explained = failure, is_explained

    def advance(self) -> None:
        """Parse the received bytes as far as possible. Calling it again is harmless."""
        # A read's data was received into its target. The connection now gets that reply, without data.
        if self._target_rest is not None:
            if self._target_rest:
                return
            self.connection.receive_data(data_prefix(0, request_id=self._target_id, session_id=0))
            self._target_rest = None
        # Take events until a frame is incomplete, or a read's data has to be received into its target.
        while self.end is None and not (self._targets and self._divert()):
            match self.connection.next_event():
                case None:
                    return
                case Reply(request_id=request_id, result=result):
                    # Store the result at once: the connection yields each reply only once.
                    if request_id in self._awaited or request_id in self._creates or type(result) is Failure:
                        self._results[request_id] = result
                    self._awaited.discard(request_id)
                    self._targets.pop(request_id, None)
                case Notification() | RegionNotification() as notification:
                    self.notifications.append(notification)
                case Goodbye(failure=failure):
                    self.is_end_explained = self.received_goodbye = True
                    self.end = failure
                case StreamBroken(failure=failure):
                    self._distrust(failure)
                case _:
                    return

    def _divert(self) -> bool:
        """Move a MEM_READ's data to its target. Returns True while part of the data is still to come.

        The connection then receives the reply without data, so that it still counts replies correctly.
        """
        reader = self.connection.reader
        # The header and the data's length must be here, or the next call finds them.
        if reader.end - reader.start < _PREFIX_BYTES:
            return False
        try:
            # Only a successful reply to a known read is diverted. A failure, or anything else, is parsed as usual.
            op, flags, status, length, request_id, _ = parse_header(reader.buffer, reader.start)
        except FramingError:
            return False  # the connection finds the same error, and describes it better
        if op != Opcode.MEM_READ or flags != Flag.REPLY or status or request_id not in self._targets:
            return False
        # Step 1: the data must have the size that was requested, because it goes to the caller's memory.
        target = self._targets.pop(request_id)
        (data_bytes,) = _LENGTH.unpack_from(reader.buffer, reader.start + HEADER_BYTES)
        if data_bytes != len(target) or length != _LENGTH.size + data_bytes:
            failure = Failure(Status.DISCONNECTED, f"{len(target)} bytes were requested, but {data_bytes} arrived")
            self._distrust(failure)
            return True
        # Step 2: move the part that has arrived.
        data_at = reader.start + _PREFIX_BYTES
        here_bytes = min(reader.end - data_at, data_bytes)
        target[:here_bytes] = reader.view[data_at : data_at + here_bytes]
        # Step 3: the rest is received straight into the target (get_buffer); the connection gets the reply afterwards.
        if here_bytes < data_bytes:
            reader.start = reader.end
            self._target_id, self._target_rest = request_id, target[here_bytes:]
            return True
        # All data has arrived, and its space in the buffer is free: write the header of a reply without data there.
        reader.start = data_at + here_bytes - _PREFIX_BYTES
        reader.buffer[reader.start : data_at + here_bytes] = data_prefix(0, request_id=request_id, session_id=0)
        return False

    def _distrust(self, failure: Failure) -> None:
        status = Status.UNSUPPORTED if failure.status is Status.UNSUPPORTED else Status.DISCONNECTED
        self.break_off(Failure(status, f"the daemon sent something invalid: {failure.message}", NOT_FOLLOWED_HINT))


def _handle_in(result: Any) -> int:
    """Return the handle in a reply; ModuleLoaded names it `module`."""
    return int(result.module if type(result) is ModuleLoaded else result.handle)
