"""An attached connection: opening and closing it, and how an operation on it is done.

Failures of quiet requests are kept by the worker and come back as the reply of the next request that has one. That
request was not done, and nothing behind the failed one was, so frees that were under way are sent again.
"""

import socket
from collections import deque
from collections.abc import Container
from contextlib import suppress
from typing import Any, Final, TypeVar

from gpulease.client.engine.exchange import CONNECT_LIMIT_S, TimeLimit, answer_to, dial, receive, send
from gpulease.client.engine.fast_request import FastRequest, SmallRead
from gpulease.client.engine.lease import LEASE_OVER, LeaseState, find_end_reason
from gpulease.client.engine.staging import Staging
from gpulease.client.engine.steps import Limit, Locked, Procedure
from gpulease.client.errors import GpuLeaseError, InvalidHandle, TimedOut, error_of
from gpulease.client.forking import OF_PARENT
from gpulease.client.handles import Handle
from gpulease.client.texts import quoted
from gpulease.client.transport.arena import Arena
from gpulease.client.transport.channel import Channel
from gpulease.client.transport.link import LinkEnded
from gpulease.client.transport.ring import share
from gpulease.client.transport.spin_policy import SpinPolicy
from gpulease.protocol import Connection, Failure, Opcode, Status
from gpulease.protocol.capabilities import AttachOption
from gpulease.protocol.errors import FramingError
from gpulease.protocol.fastpath import ARENA_COPY, HANDLE, MEM_ALLOC
from gpulease.protocol.framing import build_frame
from gpulease.protocol.limits import DATA_CHUNK_BYTES, MAX_DATA_BYTES
from gpulease.protocol.messages import Attach, AttachReply, Body
from gpulease.protocol.opcodes import Flag
from gpulease.protocol.primitives import Tlv
from gpulease.protocol.ring import Wanted

T = TypeVar("T")

EXPIRY_MARGIN_S: Final = 5.0
"""How long past the lease's end an operation still waits to be told: the daemon's grace, the reclaim, a slow host."""

ATTACH_LIMIT_S: Final = 30.0
"""Longest a session may take to open. A process and its context take 0.6 s, sixteen at once 3 s."""

MEM_WRITE_FIXED_BYTES: Final = 20
"""Of a MEM_WRITE's payload, what is not data: handle, offset and length."""

QUIET_WRITE_BYTES: Final = 64 << 10
"""Up to this size a write is handed over and not waited for: its bytes are taken when the call returns. Waiting for a
larger one costs little beside the copy, and says at once whether it was done."""

FREES_PER_FLUSH: Final = 256
"""Dropped handles freed by one operation at most, so that it is not held up by a list that was thrown away."""

ONE_STREAM_FENCES: Final = frozenset({Opcode.SYNC, Opcode.MEM_READ, Opcode.ARENA_READ})
"""Operations that wait for everything before them while the session has no stream but the default one."""

_NOT_OPEN: Final = Failure(
    Status.INVALID_REQUEST, "the session is not open", "Open it first: `async with GpuSession(lease) as session`"
)
_CLOSED: Final = Failure(Status.INVALID_REQUEST, "the session was closed", "Open another one on the lease")


class LeaseLimit:
    """A session operation may take as long as the lease lives, which a renewal moves; then the broker is asked."""

    def __init__(self, lease: LeaseState) -> None:
        self._lease = lease

    def remaining_s(self) -> float:
        """Seconds left."""
        return self._lease.deadline + EXPIRY_MARGIN_S - self._lease.clock()

    def over(self) -> Procedure[None]:
        """Raises LinkEnded, unless the broker says that the lease was renewed elsewhere."""
        report = yield from self._lease.query()
        remaining_ms = report.get("remaining_ms")
        if report.get("cause") is None and isinstance(remaining_ms, int) and remaining_ms > 0:
            self._lease.deadline = self._lease.clock() + remaining_ms / 1000
            return
        raise LinkEnded(Failure(Status.DISCONNECTED, "the session did not answer until the end of its lease"))


class FenceLimit(LeaseLimit):
    """How long leaving a `with` block waits for the session's last work.

    As long as the lease had left then. A renewal does not extend it: a lease that is kept alive may have no end.
    """

    def __init__(self, lease: LeaseState) -> None:
        super().__init__(lease)
        self._end = lease.deadline + EXPIRY_MARGIN_S

    def remaining_s(self) -> float:
        """Seconds left."""
        return self._end - self._lease.clock()

    def over(self) -> Procedure[None]:
        """Raises TimedOut, or LinkEnded if the lease has ended."""
        yield from super().over()
        raise self.error()

    def error(self) -> TimedOut:
        """What is raised where the lease goes on and its last work has not ended."""
        return TimedOut(
            "leaving the `with` block: the session's last work has not ended in the time that its lease had left",
            "Does a kernel run for ever? The session is closed, its lease goes on. Call sync() to wait longer",
        )


class Attached:
    """A session's connection and what is known of both.

    Attributes:
        lease: Its lease.
        channel: Its connection.
        connection: What was said on it; the channel's link's.
        session_id: Its lease's number.
        attached: What the worker said of it.
        end: How it ended; None while it lives.
        dropped: Handles whose last reference went, to be freed by the next operation.
        freed: Those whose free is under way, with its number: done once any later request is answered.
        limit: How long an operation may take.
        chunk_bytes: Into what pieces copies are cut.
        quiet_bytes: How large a write is not waited for.
        recorder: What records instead of it, None while nothing does.
        lent: Arrays of graphs that are gone, which queued copies may still use; until a SYNC is answered.
        settled_id: Up to this request everything is known to have ended well, or its failure was raised.
        fences: Operations whose answer settles everything before them.
        has_loaded: Whether a module was loaded, so that kernels of its own may run.
    """

    def __init__(self, lease: LeaseState, lock: Any, *, wanted: Wanted, patience: SpinPolicy) -> None:
        """Args: wanted: What to share with the worker. patience: How long to look for an answer before sleeping."""
        self.lease = lease
        self.lock = lock
        self._wanted = wanted
        self._patience = patience
        self.session_id = lease.grant.lease_id
        self.end: Failure | None = _NOT_OPEN
        self.dropped: deque[tuple[Opcode, int]] = deque()
        self.limit: Limit = LeaseLimit(lease)
        self.channel: Channel
        self.connection: Connection
        self.attached: AttachReply
        self.chunk_bytes = DATA_CHUNK_BYTES
        self.quiet_bytes = 0
        self._max_payload_bytes = 0
        self.freed: deque[tuple[int, Opcode, int]] = deque()
        self._sync = FastRequest(Opcode.SYNC, 0, self.session_id)
        self._alloc = FastRequest(Opcode.MEM_ALLOC, MEM_ALLOC.size, self.session_id, HANDLE.size)
        self.recorder: object = None
        self.lent: list[object] = []
        self.arena: Arena | None = None
        self.staging: Staging | None = None
        self.arena_write = FastRequest(Opcode.ARENA_WRITE, ARENA_COPY.size, self.session_id)
        self.small_read = SmallRead()
        self.arena_read = FastRequest(Opcode.ARENA_READ, ARENA_COPY.size, self.session_id)
        self.settled_id = 0
        self.fences = ONE_STREAM_FENCES
        self.has_loaded = False
        self._raised: Failure | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it is open and its lease not over, as far as is known here."""
        return self.end is None and self.lease.remaining_s > 0

    # --- opening and closing ---

    def attach(self) -> Procedure[None]:
        """Open a connection and make it this session. Raises why it can't be."""
        lease = self.lease
        if lease.over is not None:
            raise error_of(lease.over, "attach")
        self.channel, hello = yield from dial(lease.address, TimeLimit(CONNECT_LIMIT_S, "connect", lease.address))
        self._max_payload_bytes = hello.max_payload_bytes
        self.chunk_bytes = max(
            1, min(DATA_CHUNK_BYTES, MAX_DATA_BYTES, hello.max_payload_bytes - MEM_WRITE_FIXED_BYTES)
        )
        self.quiet_bytes = min(QUIET_WRITE_BYTES, self.chunk_bytes)
        try:
            limit = TimeLimit(ATTACH_LIMIT_S, "attach", lease.address)
            self.channel.takes_descriptors = self._wanted != Wanted()
            answer = yield from answer_to(self.channel, Opcode.ATTACH, Attach(self._options()), limit, self.session_id)
        except LinkEnded as ended:
            failure = ended.failure
        except BaseException:
            self.channel.close()
            raise
        else:
            if isinstance(answer, Failure):
                self.channel.close()
                raise error_of(lease.heed(answer), "attach")
            self.attached = answer
            self.channel, self.arena = share(self.channel, answer.options, self._patience)
            self.staging = None if self.arena is None else Staging(self.arena)
            self.end = None
            self.connection = self.channel.link.connection
            self.settled_id = self.connection.last_request_id
            return
        raise (yield from self._find_out(failure, "attach"))

    def _options(self) -> tuple[Tlv, ...]:
        token = self.lease.token
        return self._wanted.to_options() + ((Tlv(AttachOption.TOKEN, token),) if token else ())

    def disown(self) -> Any:
        """See Inherited. Another lock, which is returned, takes the lock's place: a parent's thread may hold that."""
        if self.end is None:
            self.end = OF_PARENT
        # The parent gives its memory out.
        self.arena = None
        self.lock = type(self.lock)()
        return self.lock

    def wake(self) -> None:
        """Begin to close: whoever waits on the stream stops waiting and lets go of the lock."""
        if self.end is None:
            self.end = _CLOSED
            self.channel.send_rest()
            with suppress(OSError):
                self.channel.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the session from this side; its lease goes on."""
        self.finish(_CLOSED)
        if self.lease.token:
            # The connection that showed the token is of no use to anybody else.
            self.lease.channel.close()

    def finish(self, failure: Failure) -> None:
        """Nothing more can be done here, and why. A reason known already stays."""
        if self.end is None or self.end is _NOT_OPEN:
            self.end = failure
        self.channel.close()
        self.arena = None
        if self.staging is not None:
            self.staging.close()
            self.staging = None
        self.lent.clear()

    # --- how they are done ---

    def _operation(self, doing: str, procedure: Procedure[T]) -> Procedure[T]:
        result: T = yield Locked(self.lock, self._guarded(doing, procedure))
        return result

    @property
    def is_at_rest(self) -> bool:
        """Whether it is alive, with nothing to be freed and nothing under way."""
        link = self.channel.link
        return (
            self.end is None and self.lease.over is None and not self.dropped and link.end is None and link.is_at_rest
        )

    def _go_on(self, doing: str, procedure: Procedure[T]) -> Procedure[T]:
        """What is left of an operation that has begun, still under the session's lock."""
        try:
            return (yield from procedure)
        except LinkEnded as ended:
            failure = ended.failure
        raise (yield from self._find_out(failure, doing))

    def _guarded(self, doing: str, procedure: Procedure[T]) -> Procedure[T]:
        """Refuse if it is over, free what was dropped, and find out what happened if the connection ends."""
        over = self.end or self.lease.over
        if over is not None:
            raise error_of(over, doing)
        try:
            self.channel.link.forget()
            if self.channel.link.end is not None:
                # The daemon's goodbye came right behind the last reply.
                raise LinkEnded(self.channel.link.end)
            if self.dropped:
                yield from self._send_frees()
            return (yield from procedure)
        except LinkEnded as ended:
            failure = ended.failure
        # Not inside the except block: the tenant's traceback shows one error, not two.
        raise (yield from self._find_out(failure, doing))

    def ask(self, op: Opcode, payload: bytes = b"", limit: Limit | None = None, doing: str = "") -> Procedure[Any]:
        """A request, under the session's lock; its reply's body. `doing`: of what operation it is a part."""
        limit = limit or self.limit
        request_id = self.channel.link.expect(op)
        frame = build_frame(op, payload, request_id=request_id, session_id=self.session_id)
        yield from send(self.channel, (frame,), limit)
        result: Body | Failure = yield from receive(self.channel, request_id, limit)
        self.settle(result, doing or op.name.lower())
        self.acknowledge(op, request_id)
        return result

    def acknowledge(self, op: Opcode, last_id: int, first_id: int = 0) -> None:
        """An operation was answered that was the requests `first_id` to `last_id`, or `last_id` alone."""
        if op in self.fences or self.settled_id >= (first_id or last_id) - 1:
            self.settled_id = last_id

    def unsettled(self) -> "FenceLimit | None":
        """How long a `with` block that is left waits for what was not waited for yet; None if there is nothing."""
        is_settled = self.end is not None or self.settled_id == self.connection.last_request_id
        is_given_back = self.lease.over is not None and self.lease.over.status is Status.LEASE_FREED
        return None if is_settled or is_given_back or self.recorder is not None else FenceLimit(self.lease)

    def settle(self, result: Body | Failure | None, doing: str, own_requests: Container[int] = ()) -> None:
        """A reply came: every quiet request before it is done, or failed, or was skipped.

        Raises its failure, LinkEnded where why it failed is still to be found out.
        """
        if not self.freed and not isinstance(result, Failure):
            return
        freed, self.freed = self.freed, deque()
        if not isinstance(result, Failure):
            return
        failed_at = result.failed_request_id
        if failed_at is not None:
            self.dropped.extend((op, handle) for request_id, op, handle in freed if request_id > failed_at)
        if result.status is Status.SESSION_FAILED:
            raise LinkEnded(result)
        self._raised = result
        result = self.lease.heed(result)
        if result.status in LEASE_OVER:
            self.finish(result)
        raise error_of(result, doing, own_requests)

    def frees(self) -> bytes:
        """Quiet frees of handles that were dropped."""
        frames = []
        for _ in range(min(len(self.dropped), FREES_PER_FLUSH)):
            op, handle = self.dropped.popleft()
            request_id = self.connection.next_request_id()
            self.freed.append((request_id, op, handle))
            payload = HANDLE.pack(handle)
            frames.append(build_frame(op, payload, request_id=request_id, session_id=self.session_id, flags=Flag.QUIET))
        return b"".join(frames)

    def _send_frees(self) -> Procedure[None]:
        frees = self.frees()
        if not self.put(frees):
            yield from send(self.channel, (frees,), self.limit)

    def put(self, first: bytes, second: bytes | memoryview = b"") -> bool:
        """Hand over a quiet frame at once, in two parts; False if it has to be sent the long way."""
        try:
            return self.channel.put(first, second)
        except (OSError, FramingError):
            return False  # no peer: sending again finds out

    def _free(self, handle: Handle, kind: type[Handle], doing: str) -> Procedure[None]:
        self._check(handle, kind, doing)
        try:
            yield from self._operation(doing, self.ask(handle._free_op, HANDLE.pack(handle.handle)))
        except InvalidHandle as error:
            if error.failure.failed_request_id is None:
                handle.owner = None
            raise
        handle.owner = None

    def _check(self, handle: Handle, kind: type[Handle], doing: str) -> None:
        if not isinstance(handle, kind):
            raise InvalidHandle(f"{doing}: {quoted(handle)} is not a {kind.__name__}")
        handle.check(self, doing)

    def _find_out(self, failure: Failure, doing: str) -> Procedure[GpuLeaseError]:
        """The connection ended as `failure` says: the error that tells what became of the lease."""
        if self.end is not None and self.end is not _NOT_OPEN:
            failure = self.end
        elif self.lease.over is not None:
            failure = self.lease.over
        elif failure.status is Status.SESSION_FAILED:
            # The worker was told that it is over, not why.
            fate = yield from find_end_reason(self.lease, failure)
            failure = failure if fate.status is Status.DISCONNECTED else fate
        elif not self.channel.link.is_end_explained:
            failure = yield from find_end_reason(self.lease, failure)
        elif self.channel.link.said_goodbye:
            failure = self.lease.heed(failure)
        self.finish(failure)
        return error_of(failure, doing)
