"""A session: what is known of it, and its operations.

Failures of quiet requests are kept by the worker and come back as the reply of the next request that has one. That
request was not done, and nothing behind the failed one was, so frees that were under way are sent again.
"""

import socket
import struct
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

from gpulease.client.core import copies
from gpulease.client.core.arena import Arena
from gpulease.client.core.channel import Channel
from gpulease.client.core.exchange import CONNECT_LIMIT_S, TimeLimit, answer_to, dial, receive, send
from gpulease.client.core.fate import find_fate
from gpulease.client.core.launching import KernelArguments, launch_frame
from gpulease.client.core.lease import LEASE_OVER, LeaseState
from gpulease.client.core.link import LinkEnded
from gpulease.client.core.prompt import Prompter
from gpulease.client.core.ring_channel import share
from gpulease.client.core.steps import Limit, Locked, Procedure
from gpulease.client.core.wish import MAX_WIRE_BYTES, whole
from gpulease.client.errors import GpuLeaseError, InvalidHandle, InvalidRequest, error_of
from gpulease.client.handles import Buffer, Handle, Module
from gpulease.protocol import Failure, Opcode, Status
from gpulease.protocol.codec import build_body
from gpulease.protocol.errors import FramingError
from gpulease.protocol.fastpath import ARENA_COPY, HANDLE, fixed_struct
from gpulease.protocol.framing import build_frame
from gpulease.protocol.limits import DATA_CHUNK_BYTES, MAX_DATA_BYTES
from gpulease.protocol.messages import Attach, AttachReply, Body, MemAlloc, ModuleLoad
from gpulease.protocol.opcodes import Flag
from gpulease.protocol.sharing import Wanted

T = TypeVar("T")

EXPIRY_MARGIN_S: Final = 5.0
"""How long past the lease's end an operation still waits to be told: the daemon's grace, the reclaim, a slow host."""

ATTACH_LIMIT_S: Final = 30.0
"""Longest a session may take to open. A process and its context take 0.6 s, sixteen at once 3 s."""

MEM_WRITE_FIXED_BYTES: Final = 20
"""Of a MEM_WRITE's payload, what is not data: handle, offset and length."""

MODULE_LOAD_FIXED_BYTES: Final = 4
"""Of a MODULE_LOAD's payload, what is not the image: its length."""

FREES_PER_FLUSH: Final = 256
"""Dropped handles freed by one operation at most, so that it is not held up by a list that was thrown away."""


_SIZE: Final = fixed_struct(MemAlloc, "size_bytes")
_NOT_OPEN: Final = Failure(
    Status.INVALID_REQUEST, "the session is not open", "Open it first: `async with AsyncGpuSession(lease) as session`"
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


class SessionState:
    """An open session.

    Attributes:
        lease: Its lease.
        channel: Its connection.
        session_id: Its lease's number.
        attached: What the worker said of it.
        end: How it ended; None while it lives.
        dropped: Handles whose last reference went, to be freed by the next operation.
        limit: How long an operation may take.
        chunk_bytes: Into what pieces copies are cut.
    """

    def __init__(self, lease: LeaseState, lock: Any, *, wanted: Wanted, spin_ns: int) -> None:
        """Args: wanted: What to share with the worker. spin_ns: How long to look for an answer before sleeping."""
        self.lease = lease
        self.lock = lock
        self._wanted = wanted
        self._spin_ns = spin_ns
        self.session_id = lease.grant.lease_id
        self.end: Failure | None = _NOT_OPEN
        self.dropped: deque[tuple[Opcode, int]] = deque()
        self.limit: Limit = LeaseLimit(lease)
        self.channel: Channel
        self.attached: AttachReply
        self.chunk_bytes = DATA_CHUNK_BYTES
        self._max_payload_bytes = 0
        self._freed: deque[tuple[int, Opcode, int]] = deque()
        self._send: Callable[[bytes], int]
        self._sync = Prompter(Opcode.SYNC, 0, self.session_id)
        self.arena: Arena | None = None
        self.arena_write = Prompter(Opcode.ARENA_WRITE, ARENA_COPY.size, self.session_id)
        self.arena_read = Prompter(Opcode.ARENA_READ, ARENA_COPY.size, self.session_id)

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
        try:
            limit = TimeLimit(ATTACH_LIMIT_S, "attach", lease.address)
            self.channel.takes_descriptors = self._wanted != Wanted()
            answer = yield from answer_to(
                self.channel, Opcode.ATTACH, Attach(self._wanted.to_options()), limit, self.session_id
            )
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
            self.channel, self.arena = share(self.channel, answer.options, self._spin_ns)
            self.end = None
            self._send = self.channel.put
            return
        raise (yield from self._find_out(failure, "attach"))

    def wake(self) -> None:
        """Begin to close: whoever waits on the stream stops waiting and lets go of the lock."""
        if self.end is None:
            self.end = _CLOSED
            with suppress(OSError):
                self.channel.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the session from this side; its lease goes on."""
        self.finish(_CLOSED)

    def finish(self, failure: Failure) -> None:
        """Nothing more can be done here, and why. A reason known already stays."""
        if self.end is None or self.end is _NOT_OPEN:
            self.end = failure
        self.channel.close()
        self.arena = None

    # --- operations ---

    def mem_alloc(self, size_bytes: int) -> Procedure[Buffer]:
        """Device memory."""
        size = whole(size_bytes, "mem_alloc", least=1, most=MAX_WIRE_BYTES)
        reply = yield from self._operation("mem_alloc", self.ask(Opcode.MEM_ALLOC, _SIZE.pack(size)))
        return Buffer(self, reply.handle, size)

    def mem_free(self, buffer: Buffer) -> Procedure[None]:
        """Give a buffer back now."""
        yield from self._free(buffer, Buffer, "mem_free")

    def mem_write(self, buffer: Buffer, offset: int, data: Any) -> Procedure[None]:
        """Copy bytes to the device."""
        self._check(buffer, Buffer, "mem_write")
        view = copies.readable_bytes(data, "mem_write")
        copies.check_total(buffer, offset, len(view), "mem_write")
        if view:
            yield from self._operation("mem_write", copies.write(self, buffer, offset, view))

    def mem_read(self, buffer: Buffer, offset: int, nbytes: int, into: Any = None) -> Procedure[Any]:
        """Copy bytes from the device."""
        self._check(buffer, Buffer, "mem_read")
        copies.check_total(buffer, offset, nbytes, "mem_read")
        owned = bytearray(nbytes) if into is None else None
        target = copies.writable_bytes(into if owned is None else owned, nbytes, "mem_read")
        if nbytes:
            yield from self._operation("mem_read", copies.read(self, buffer, offset, target))
        return into if owned is None else bytes(owned)

    def write_promptly(self, buffer: Buffer, offset: int, data: Any) -> Procedure[None] | None:
        """mem_write at once, under the session's lock: None if it is done, else what has still to be driven."""
        copy = self._arena_copy(buffer, offset, data, None)
        is_done = None if copy is None else self.arena_write.ask(self, copy)
        if is_done is None:
            return self.mem_write(buffer, offset, data)
        return None if is_done else self._go_on("mem_write", self.arena_write.rest(self))

    def read_promptly(self, buffer: Buffer, offset: int, nbytes: int, into: Any) -> Procedure[Any] | None:
        """mem_read likewise; if it is done, the bytes are in `into`."""
        copy = self._arena_copy(buffer, offset, into, nbytes)
        is_done = None if copy is None else self.arena_read.ask(self, copy)
        if is_done is None:
            return self.mem_read(buffer, offset, nbytes, into)
        return None if is_done else self._go_on("mem_read", self.arena_read.rest(self))

    def _arena_copy(self, buffer: Buffer, offset: int, data: Any, nbytes: int | None) -> bytes | None:
        """The request that copies from or to an array of the arena; None if it is none, or anything is wrong."""
        if self.arena is None or data is None or type(buffer) is not Buffer or buffer.owner is not self:
            return None
        try:
            view = memoryview(data)
            place = self.arena.offset_of(view)
            size = view.nbytes if nbytes is None else nbytes
            if place is None or not 0 < size <= view.nbytes or not 0 <= offset <= buffer.size_bytes - size:
                return None
            return ARENA_COPY.pack(buffer.handle, offset, place, size)
        except (TypeError, ValueError, struct.error):
            return None

    def module_load(self, image: Any) -> Procedure[Module]:
        """Compile and load PTX, or load a cubin."""
        code = image.encode() if isinstance(image, str) else bytes(copies.readable_bytes(image, "module_load"))
        most = self._max_payload_bytes - MODULE_LOAD_FIXED_BYTES
        if not 0 < len(code) <= most:
            raise InvalidRequest(f"module_load: an image of {len(code)} bytes; 1 to {most} are taken")
        reply = yield from self._operation("module_load", self.ask(Opcode.MODULE_LOAD, build_body(ModuleLoad(code))))
        return Module(self, reply.module, reply.kernels)

    def module_unload(self, module: Module) -> Procedure[None]:
        """Unload a module now."""
        yield from self._free(module, Module, "module_unload")

    def sync(self) -> Procedure[None]:
        """Wait until all that was launched has ended."""
        yield from self._operation("sync", self.ask(Opcode.SYNC))

    def sync_promptly(self) -> Procedure[None] | None:
        """The same at once, under the session's lock: None if it is done, else what has still to be driven."""
        is_done = self._sync.ask(self)
        if is_done is None:
            return self.sync()
        return None if is_done else self._go_on("sync", self._sync.rest(self))

    def launch(
        self,
        module: Module,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: KernelArguments,
        arg_sizes: Iterable[int] | None,
        shared_bytes: int,
    ) -> tuple[int, bytes, int]:
        """Send a launch at once, under the session's lock: (its number, its frame, how many bytes of it went).

        Not a procedure, because a generator would cost as much as all the rest of this.
        """
        over = self.end or self.lease.over
        if over is not None:
            raise error_of(over, "launch")
        number, frame = launch_frame(self, module, kernel, grid, block, args, arg_sizes, shared_bytes)
        if self.dropped:
            frame += self.frees()
        try:
            return number, frame, self._send(frame)
        except (OSError, FramingError):
            return number, frame, 0  # no room, or no peer: sending again waits, or finds out

    def finish_launch(self, frame: bytes, sent: int) -> Procedure[None]:
        """Send what the socket did not take at once; under the session's lock."""
        try:
            yield from send(self.channel, (memoryview(frame)[sent:],), self.limit, has_begun=sent > 0)
            return
        except LinkEnded as ended:
            failure = ended.failure
        raise (yield from self._find_out(failure, "launch"))

    # --- how they are done ---

    def _operation(self, doing: str, procedure: Procedure[T]) -> Procedure[T]:
        result: T = yield Locked(self.lock, self._guarded(doing, procedure))
        return result

    @property
    def is_at_rest(self) -> bool:
        """Whether it is alive, with nothing to be freed and nothing under way."""
        return self.end is None and self.lease.over is None and not self.dropped and self.channel.link.is_at_rest

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
            if self.dropped:
                yield from send(self.channel, (self.frees(),), self.limit)
            return (yield from procedure)
        except LinkEnded as ended:
            failure = ended.failure
        # Not inside the except block: the tenant's traceback shows one error, not two.
        raise (yield from self._find_out(failure, doing))

    def ask(self, op: Opcode, payload: bytes = b"") -> Procedure[Any]:
        """A request, under the session's lock; its reply's body."""
        request_id = self.channel.link.expect(op)
        frame = build_frame(op, payload, request_id=request_id, session_id=self.session_id)
        yield from send(self.channel, (frame,), self.limit)
        result: Body | Failure = yield from receive(self.channel, request_id, self.limit)
        self.settle(result, op.name.lower())
        return result

    def settle(self, result: Body | Failure | None, doing: str, own_requests: Container[int] = ()) -> None:
        """A reply came: every quiet request before it is done, or failed, or was skipped. Raises its failure."""
        if not self._freed and not isinstance(result, Failure):
            return
        freed, self._freed = self._freed, deque()
        if not isinstance(result, Failure):
            return
        failed_at = result.failed_request_id
        if failed_at is not None:
            self.dropped.extend((op, handle) for request_id, op, handle in freed if request_id > failed_at)
        result = self.lease.heed(result)
        if result.status in LEASE_OVER:
            self.finish(result)
        raise error_of(result, doing, own_requests)

    def frees(self) -> bytes:
        """Quiet frees of handles that were dropped."""
        frames = []
        for _ in range(min(len(self.dropped), FREES_PER_FLUSH)):
            op, handle = self.dropped.popleft()
            request_id = self.channel.link.connection.next_request_id()
            self._freed.append((request_id, op, handle))
            payload = HANDLE.pack(handle)
            frames.append(build_frame(op, payload, request_id=request_id, session_id=self.session_id, flags=Flag.QUIET))
        return b"".join(frames)

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
            raise InvalidHandle(f"{doing}: {handle!r} is not a {kind.__name__}")
        handle.check(self, doing)

    def _find_out(self, failure: Failure, doing: str) -> Procedure[GpuLeaseError]:
        """The connection ended as `failure` says: the error that tells what became of the lease."""
        if self.end is not None and self.end is not _NOT_OPEN:
            failure = self.end
        elif self.lease.over is not None:
            failure = self.lease.over
        elif not self.channel.link.is_end_explained:
            failure = yield from find_fate(self.lease, failure)
        elif failure.status is Status.SESSION_FAILED:
            # The worker was told that it is over, not why.
            fate = yield from find_fate(self.lease, failure)
            failure = failure if fate.status is Status.DISCONNECTED else fate
        elif self.channel.link.said_goodbye:
            failure = self.lease.heed(failure)
        self.finish(failure)
        return error_of(failure, doing)
