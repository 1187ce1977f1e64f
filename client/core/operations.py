"""A session's operations, which are executed one at a time under the session's lock.

A quiet request has no reply of its own. The worker keeps its failure, and replies with it to the next request that has
a reply. It skips that request and all others after the failed one, so the client sends the frees among them again.

An object that an operation makes has an owner at every moment, so that it is not lost if the operation is interrupted
(`transport.link`). The owner is the request until its reply has come, the link until the object's handle is made and
has an owner, and then the handle. The next operation, or the poll of idle sessions, frees objects that an interrupted
operation has left. In the same way, a free that is due is listed in `dropped` until the channel has queued it.
"""

import time
from collections import deque
from collections.abc import Callable, Container
from contextlib import suppress
from typing import Any, Final, TypeVar

from gpulease.client.core.attachment import Attachment
from gpulease.client.core.exchange import operation_of, receive, send, wait_for_room
from gpulease.client.core.lease import LEASE_OVER, LeaseHandle
from gpulease.client.core.waits import Deadline, Locked, MaybePending, Procedure, is_held
from gpulease.client.errors import GpuLeaseError, InvalidHandle, TimedOut, error_of
from gpulease.client.handles import Handle
from gpulease.client.texts import quoted
from gpulease.client.transport.link import LinkEnded
from gpulease.protocol import Failure, Opcode, Status
from gpulease.protocol.codec import build_body
from gpulease.protocol.errors import FramingError
from gpulease.protocol.fastpath import HANDLE, mem_reuse_frame
from gpulease.protocol.framing import build_frame
from gpulease.protocol.messages import Body, Ping
from gpulease.protocol.opcodes import Flag
from gpulease.protocol.operations import Trait, having

T = TypeVar("T")
H = TypeVar("H", bound=Handle)

EXPIRY_MARGIN_S: Final = 5.0
"""How long after the lease's end an operation still waits for a reply, in seconds: time for the daemon's grace period,
the reclaim, and a slow host."""

FREES_PER_FLUSH: Final = 128
"""Maximum number of dropped handles that one operation frees, so that it is not slow after a program has dropped very
many. Their frames are sent in one piece (`coalescing_socket.FLUSH_BYTES`)."""

STREAMS_FENCES: Final = having(Trait.SETTLES)
"""Operations that wait for everything before them, even if the session has several streams."""

ONE_STREAM_FENCES: Final = STREAMS_FENCES | having(Trait.SETTLES_ALONE)
"""Operations that wait for everything before them while the session has only the default stream."""


class LeaseDeadline:
    """Bounds an operation by the lease's deadline.

    After the deadline, it asks the broker whether a renewal has moved it.
    """

    def __init__(self, lease: LeaseHandle) -> None:
        self._lease = lease

    def remaining_s(self) -> float:
        """Seconds left; negative after the deadline and its margin."""
        return self._lease.deadline + EXPIRY_MARGIN_S - time.monotonic()

    def raise_or_extend(self) -> Procedure[None]:
        """Raise LinkEnded, unless the broker reports that the lease was renewed elsewhere."""
        # The lease may have been renewed by another program, so this side's deadline may be too early.
        report = yield from self._lease.query()
        remaining_ms = report.get("remaining_ms")
        if report.get("cause") is None and isinstance(remaining_ms, int) and remaining_ms > 0:
            self._lease.deadline = time.monotonic() + remaining_ms / 1000
            return
        raise LinkEnded(Failure(Status.DISCONNECTED, "the session did not answer before the end of its lease"))


class BlockEndDeadline(LeaseDeadline):
    """Bounds the wait at the end of a `with` block by the time that the lease had left at that moment.

    A renewal does not extend it, because a lease that is kept alive may have no end.
    """

    def __init__(self, lease: LeaseHandle) -> None:
        super().__init__(lease)
        self._end = lease.deadline + EXPIRY_MARGIN_S

    def remaining_s(self) -> float:
        """Seconds left; negative after the deadline."""
        return self._end - time.monotonic()

    def raise_or_extend(self) -> Procedure[None]:
        """Raise TimedOut, or LinkEnded if the lease has ended."""
        yield from super().raise_or_extend()
        raise self.error()

    def error(self) -> TimedOut:
        """The error to raise if the lease continues and its last work has not ended."""
        return TimedOut(
            "leaving the `with` block: the session's last work did not end before its lease did",
            "Does a kernel run forever? The session is closed, but its lease continues. To wait longer, call sync()",
        )


class RequestPipeline:
    """Sends requests, receives replies, and frees dropped handles.

    Attributes:
        attachment: The session's connection.
        deadline: Bounds the time of an operation.
        freed: (request id, operation, handle) of frees and reuses in flight; the next reply shows whether they were
            executed.
        acknowledged_id: Every request up to this one is known to have succeeded, or its failure was raised.
        fences: Operations whose reply acknowledges everything before them.
    """

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self.deadline: Deadline = LeaseDeadline(attachment.lease)
        self.freed: deque[tuple[int, Opcode, int]] = deque()
        self.acknowledged_id = 0
        # Every request up to this one is known to have been served; kernels that it launched may still run.
        self._served_id = 0
        self.fences = ONE_STREAM_FENCES

    def begin(self) -> None:
        """Start counting requests: the session has just been attached."""
        self.acknowledged_id = self.attachment.connection.last_request_id

    # --- whole operations ---

    def check_recording(self, operation: str) -> None:
        """Raise InvalidRequest while the session records a launch graph.

        Called before an operation's procedure is made: asyncio drives the procedure in a task other than the caller's.
        """
        if self.attachment.recording is not None:
            raise self.attachment.recording.refusal(operation)

    def do(self, operation: str, procedure: Procedure[T]) -> Procedure[T]:
        """Execute an operation under the session's lock. Raises if the session has ended."""
        result: T = yield Locked(self.attachment.lock, self.guarded(operation, procedure))
        return result

    def guarded(self, operation: str, procedure: Procedure[T]) -> Procedure[T]:
        """Execute an operation; the caller holds the lock.

        Raises if the session has ended; otherwise frees dropped handles, then continues with the operation.
        """
        attachment = self.attachment
        attachment.check_open(operation)
        return (yield from self.go_on(operation, self._prepared(procedure)))

    def go_on(self, operation: str, procedure: Procedure[T]) -> Procedure[T]:
        """Run the rest of an operation. If the connection ends, raise the error that says how the lease ended."""
        try:
            return (yield from procedure)
        except LinkEnded as ended:
            failure = ended.failure
        # Raise it outside the except block, so that the tenant's traceback shows one error and not two.
        raise (yield from self.attachment.end_error(failure, operation))

    def _prepared(self, procedure: Procedure[T]) -> Procedure[T]:
        # Step 1: take replies that interrupted operations have left. Step 2: send frees that are due, so that this
        # operation can use their memory. Step 3: run the operation.
        self.attachment.channel.finish()
        link = self.attachment.channel.link
        if link.has_leftovers:
            yield from self._clear_up()
        if link.end is not None:
            # The daemon's goodbye followed the last reply directly.
            raise LinkEnded(link.end)
        self.drop_held()
        if self.attachment.dropped and not self.attachment.uses_second:
            yield from self.send_frees()
        return (yield from procedure)

    def _clear_up(self) -> Procedure[None]:
        """Take the replies to interrupted operations. Raise an earlier failure that one of them reports."""
        link, dropped = self.attachment.channel.link, self.attachment.dropped
        # Step 1: take replies that have come. List the objects in them in `dropped`, so that the next operation frees
        # them.
        failure = link.forget(dropped)
        if failure is not None:
            self.settle(failure, "")
        # Step 2: wait for replies that are still to come. After a round trip they are all here.
        if link.has_leftovers:
            # The worker answers in order, so once this is answered, everything sent before it is answered as well.
            yield from self.ask(Opcode.PING, build_body(Ping(0)))
            link.forget(dropped)
            link.forget_unsent()

    @property
    def has_leftovers(self) -> bool:
        """True if `free_leftovers` may find something to free."""
        attachment = self.attachment
        channel = attachment.channel
        return bool(not channel.is_finished or attachment.dropped or attachment.held or channel.link.has_leftovers)

    def free_leftovers(self) -> None:
        """Free the handles that the program has dropped, without waiting, under the lock of an idle session.

        If this finds a failure, the session's next operation reports it.
        """
        # After the end, or while recording, nothing may be sent. The second token may not permit a free, and a quiet
        # request that is not permitted ends the connection.
        attachment = self.attachment
        if attachment.end_failure is not None or attachment.recording is not None or attachment.uses_second:
            return
        channel = attachment.channel
        channel.finish()
        # Receive without waiting: replies to interrupted operations bring handles to free.
        while channel.link.end is None and channel.pump():
            pass
        if not channel.link.has_failure:
            channel.link.forget(attachment.dropped)
        self.drop_held()
        while attachment.dropped and channel.link.end is None and self.try_queue_frees():
            pass

    def close(self) -> None:
        """Free the handles that the program has dropped, then end the session from this side."""
        self.free_leftovers()
        self.attachment.close()

    def finish_sent(self) -> Procedure[None]:
        """Wait until the worker has served everything that was sent to it, and freed what the tenant has freed.

        The broker's orders reach the worker over another connection, so without this a request to the broker could
        overtake operations that the program called before. It does not wait for operations of other threads and tasks,
        which have no defined order. Failures of earlier operations, and the session's end, are left to its next
        operation.
        """
        attachment = self.attachment
        if attachment.end_failure is not None:
            return
        has_unserved = not (self._is_served or is_held(attachment.lock))
        if has_unserved or attachment.held or attachment.dropped:
            yield Locked(attachment.lock, self._finish_sent())

    @property
    def _is_served(self) -> bool:
        return self.attachment.connection.last_request_id in (self.acknowledged_id, self._served_id)

    def _finish_sent(self) -> Procedure[None]:
        attachment, link = self.attachment, self.attachment.channel.link
        attachment.channel.finish()
        self.drop_held()
        with suppress(LinkEnded):
            while attachment.dropped and not attachment.uses_second:
                yield from self.send_frees()
            if self._is_served:
                return
            # The worker serves in order: its reply to a PING follows everything that was sent before.
            request_id = link.expect(Opcode.PING)
            payload, session_id = build_body(Ping(0)), attachment.session_id
            frame = build_frame(Opcode.PING, payload, request_id=request_id, session_id=session_id)
            yield from send(attachment.channel, (frame,), self.deadline)
            result = yield from receive(attachment.channel, request_id, self.deadline)
            self._served_id = request_id
            if isinstance(result, Failure):
                link.leave(request_id, result)
            else:
                self.settle(result, "")

    # --- requests that are answered ---

    def ask(
        self,
        op: Opcode,
        payload: bytes = b"",
        deadline: Deadline | None = None,
        operation: str = "",
        own_requests: Container[int] = (),
    ) -> Procedure[Any]:
        """Send a request and wait for its reply's body.

        Args:
            op: The request's operation.
            payload: Its payload.
            deadline: Bounds the wait; the lease's deadline if None.
            operation: The operation that the request is a part of, for messages.
            own_requests: Ids of the quiet requests that are parts of this operation (`error_of`).
        """
        attachment, deadline = self.attachment, deadline or self.deadline
        # Register the expected reply before the request is sent, so that the reply can't come first.
        request_id = attachment.channel.link.expect(op)
        frame = build_frame(op, payload, request_id=request_id, session_id=attachment.session_id)
        yield from send(attachment.channel, (frame,), deadline)
        result: Body | Failure = yield from receive(attachment.channel, request_id, deadline)
        self.settle(result, operation or operation_of(op), own_requests)
        self.acknowledge(op, request_id)
        return result

    def make(self, op: Opcode, payload: bytes, free_op: Opcode, handle_of: Callable[[Any], H]) -> Procedure[H]:
        """`ask` for a new object, and return its handle.

        Args:
            op: The request's operation.
            payload: Its payload.
            free_op: The operation that frees the object.
            handle_of: Makes the handle, without an owner, from the reply's body.
        """
        attachment = self.attachment
        request_id = attachment.channel.link.expect(op, undo=free_op)
        frame = build_frame(op, payload, request_id=request_id, session_id=attachment.session_id)
        yield from send(attachment.channel, (frame,), self.deadline)
        return (yield from self.made(op, request_id, handle_of))

    def made(self, op: Opcode, request_id: int, handle_of: Callable[[Any], H]) -> Procedure[H]:
        """Wait for the reply to a request that was sent, and make the handle of its object (see `make`)."""
        attachment = self.attachment
        link = attachment.channel.link
        result = yield from receive(attachment.channel, request_id, self.deadline)
        if isinstance(result, Failure):
            link.claim(request_id)
        self.settle(result, operation_of(op))
        self.acknowledge(op, request_id)
        # Pass the object from the link to its handle. After an interrupt before the claim, the link still has it, and
        # `forget` finds it there. No call comes between the claim and the owner.
        handle = handle_of(result)
        link.claim(request_id)
        handle.owner = attachment
        return handle

    def acknowledge(self, op: Opcode, last_id: int, first_id: int = 0) -> None:
        """Record that the requests `first_id` to `last_id` (by default `last_id` alone) were answered."""
        # The reply acknowledges everything before it only if its operation waits for that, or if nothing else was
        # outstanding.
        if op in self.fences or self.acknowledged_id >= (first_id or last_id) - 1:
            self.acknowledged_id = last_id

    def settle(self, result: Body | Failure | None, operation: str, own_requests: Container[int] = ()) -> None:
        """Process a reply: every quiet request before it has been executed, has failed, or was skipped.

        Raises the reply's failure, or LinkEnded if the broker has to be asked for the reason.
        """
        if not self.freed and not isinstance(result, Failure):
            return
        # Take out the frees in flight first, because the reply settles all of them.
        freed, self.freed = self.freed, deque()
        if not isinstance(result, Failure):
            return
        # The worker skipped all requests after the failed one, so frees among these are still due.
        failed_at = result.failed_request_id
        if failed_at is not None:
            resent = [(op, handle) for request_id, op, handle in freed if request_id > failed_at]
            self.attachment.dropped.extend(resent)
        # The worker is lost. The broker has the reason, and `go_on` asks for it.
        if result.status is Status.SESSION_FAILED:
            raise LinkEnded(result)
        self.attachment.last_raised = result
        result = self.attachment.lease.note_failure(result)
        if result.status in LEASE_OVER and result.region is None:
            self.attachment.finish(result)
        raise error_of(result, operation, own_requests)

    def block_end_deadline(self) -> BlockEndDeadline | None:
        """Return the deadline of the wait at the end of a `with` block; None if there is nothing to wait for."""
        # There is nothing to wait for if the session has ended, or if its last request is known to have succeeded.
        attachment = self.attachment
        is_settled = attachment.end is not None or self.acknowledged_id == attachment.connection.last_request_id
        lease_end = attachment.lease.end_failure
        is_freed = lease_end is not None and lease_end.status is Status.LEASE_FREED
        if is_settled or is_freed or attachment.recording is not None:
            return None
        return BlockEndDeadline(attachment.lease)

    # --- quiet requests ---

    def put(self, first: bytes, second: bytes | memoryview = b"") -> bool:
        """Queue a quiet frame immediately, in two parts. Returns False if it has to be sent by `send`."""
        # Read the writer's counter before this frame: after an interrupt, the counter shows what was queued.
        channel = self.attachment.channel
        if channel.unfinished is not None or channel.sending is not None:
            channel.finish()
        return self._put(first, second)

    def _put(self, first: bytes, second: bytes | memoryview = b"") -> bool:
        try:
            return self.attachment.writer.put_whole(first, second)
        except (OSError, FramingError):
            return False  # the peer is gone: `send` reports it

    def send_frames(self, frames: bytes) -> Procedure[None]:
        """Queue quiet frames, or wait for room for them."""
        if not self.put(frames):
            yield from send(self.attachment.channel, (frames,), self.deadline)

    def put_noting(self, frames: bytes, note: Callable[[], None]) -> bool:
        """Do `put`, and call `note` if the frames were queued.

        If this is interrupted, the next user of the channel calls `note`. A second call must be harmless.
        """
        channel, writer = self.attachment.channel, self.attachment.writer
        # The writer's counter shows whether the frames were queued, even if put() was interrupted before it returned.
        before = writer.tail

        def finish() -> None:
            if writer.tail != before:
                note()

        channel.unfinished = finish
        is_put = self._put(frames)
        finish()
        channel.unfinished = None
        return is_put

    def send_noting(self, frames: bytes, note: Callable[[], None]) -> Procedure[None]:
        """Do `put_noting`, or wait for room. The frames are queued completely or not at all. Raises LinkEnded."""
        channel = self.attachment.channel
        while not self.put_noting(frames, note):
            # The channel accepts nothing more, which a `send` of nothing would not notice.
            if channel.link.end is not None:
                raise LinkEnded(channel.link.end)
            # The outbox or ring is full: send its contents, then wait until it may accept all the frames.
            yield from send(channel, (), self.deadline)
            yield from wait_for_room(channel, self.deadline)

    def quiet_frame(self, op: Opcode, payload: bytes) -> bytes:
        """Build the frame of a quiet request with the next request id."""
        attachment = self.attachment
        request_id = attachment.connection.next_request_id()
        return build_frame(op, payload, request_id=request_id, session_id=attachment.session_id, flags=Flag.QUIET)

    def use_grant(self, *, is_second: bool) -> Procedure[None]:
        """Have the worker serve later requests by the session's second token, or again as the session was opened.

        Handles that are dropped while the second token is used are freed after that. Raises Unsupported without a
        second token, or if the session's daemon is too old.
        """
        self.check_recording("use_grant")
        self.attachment.require(Opcode.USE_TOKEN, "use_grant")
        yield from self.do("use_grant", self._use_grant(is_second=is_second))

    def _use_grant(self, *, is_second: bool) -> Procedure[None]:
        attachment = self.attachment
        # After an interrupt, assume that the worker uses the second token, which may not permit a free.
        attachment.uses_second = True
        frame = self.quiet_frame(Opcode.USE_TOKEN, HANDLE.pack(is_second))
        try:
            is_put = attachment.channel.put_with_next(frame)
        except (OSError, FramingError):
            is_put = False  # the peer is gone: `send` reports it
        if not is_put:
            yield from send(attachment.channel, (frame,), self.deadline)
        attachment.uses_second = is_second
        # There is nothing to wait for: it is no work, and the next reply reports whether it failed.
        number = attachment.connection.last_request_id
        self.acknowledge(Opcode.USE_TOKEN, number)

    # --- frees ---

    def drop_held(self) -> None:
        """Make the next operation free the buffers that are held for reuse."""
        if self.attachment.held:
            self.attachment.held.give_back(self.attachment.dropped)

    def give_back_at_once(self) -> None:
        """Free the held buffers before the next launch or, if the channel has no room, after it."""
        self.drop_held()
        self.try_queue_frees()

    def reuse(self, handle: int) -> MaybePending[None]:
        """Free an allocation and allocate it again in place, under the session's lock."""
        attachment = self.attachment
        if not attachment.channel.is_finished:
            attachment.channel.finish()
        request_id = attachment.connection.next_request_id()
        frame = mem_reuse_frame(handle, request_id=request_id, session_id=attachment.session_id)
        # List it before it is sent: if an earlier request failed, the worker skips this reuse, and the memory must be
        # freed.
        self.freed.append((request_id, Opcode.MEM_REUSE, handle))
        return None if self.put(frame) else self.go_on("mem_alloc", send(attachment.channel, (frame,), self.deadline))

    def try_queue_frees(self) -> bool:
        """Queue quiet frees of dropped handles; False if the channel has no room for them."""
        frames, note = self._frees()
        return self.put_noting(frames, note)

    def send_frees(self) -> Procedure[None]:
        """Queue quiet frees of dropped handles, or wait for room for them."""
        yield from self.send_noting(*self._frees())

    def _frees(self) -> tuple[bytes, Callable[[], None]]:
        # An interrupted call may have queued frees that it did not take from `dropped`.
        self.attachment.channel.finish()
        dropped, freed = self.attachment.dropped, []
        frames = []
        # Number the frames now, but do not change `dropped` until they are queued: `note` removes exactly these.
        for op, handle in dropped[:FREES_PER_FLUSH]:
            frames.append(self.quiet_frame(op, HANDLE.pack(handle)))
            freed.append((self.attachment.connection.last_request_id, op, handle))
        count = len(freed)

        def note() -> None:
            # A second call must be harmless: remove these frees, and no later ones. Their ids are above all earlier
            # ones, so one comparison with the last id decides.
            if freed and not (self.freed and self.freed[-1][0] >= freed[-1][0]):
                del dropped[:count]
                self.freed += freed

        return b"".join(frames), note

    def free(self, handle: Handle, kind: type[Handle], operation: str) -> Procedure[None]:
        """Free one handle now, and wait for the reply."""
        self.attachment.check_open(operation)
        self.check(handle, kind, operation)
        yield from self.do(operation, self._free(handle))

    def free_unless_ended(self, handle: Handle, kind: type[Handle]) -> Procedure[None]:
        """Do `free`, unless the handle is freed already, or its session or lease has ended, which freed it."""
        if handle.owner is not None and self.attachment.end_failure is None:
            yield from self.free(handle, kind, "close")

    def _free(self, handle: Handle) -> Procedure[None]:
        attachment = self.attachment
        op, number = handle._free_op, handle.handle
        request_id = attachment.channel.link.expect(op)
        frame = build_frame(op, HANDLE.pack(number), request_id=request_id, session_id=attachment.session_id)

        def note() -> None:
            handle.owner = None
            # If the handle was dropped after an interrupt, before this ran, its free is in `dropped` already.
            if (op, number) in attachment.dropped:
                attachment.dropped.remove((op, number))

        # Once the frame is queued, the handle has no owner, so that its destructor does not free it again. If the free
        # was not executed, the handle gets its owner back.
        try:
            yield from self.send_noting(frame, note)
            yield from send(attachment.channel, (), self.deadline)
            result = yield from receive(attachment.channel, request_id, self.deadline)
        except (LinkEnded, GpuLeaseError):
            handle.owner = attachment  # the session's end frees it
            raise
        except BaseException:
            # If the reply reports an earlier failure, this free was not executed: list it, so that it is sent again.
            self.freed += [(request_id, op, number)]
            raise
        if isinstance(result, Failure):
            handle.owner = attachment  # not executed: an earlier operation failed, or the lease has ended
        self.settle(result, operation_of(op))
        self.acknowledge(op, request_id)

    def check(self, handle: Handle, kind: type[Handle], operation: str) -> None:
        """Raise InvalidHandle unless this is a handle of that kind in this session."""
        if not isinstance(handle, kind):
            # Check the kind first, because any other object has no owner to compare.
            raise InvalidHandle(f"{operation}: the argument must be a {kind.__name__}, not {quoted(handle)}")
        handle.check(self.attachment, operation)
