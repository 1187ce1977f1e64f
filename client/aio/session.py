"""Leases and sessions of the asyncio face."""

import asyncio
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self, TypeVar, overload

from gpulease.client.aio.driver import Opening, drive, task_of, undisturbed
from gpulease.client.aio.events import LeaseEvents, WarningWatch
from gpulease.client.aio.graphs import Recorder
from gpulease.client.aio.submits import Submission
from gpulease.client.engine.exchange import CONTROL_REPLY_LIMIT_S, ask_once
from gpulease.client.engine.launch import KernelArguments
from gpulease.client.engine.lease import (
    LeaseReport,
    LeaseState,
    LeaseView,
    RenewalSchedule,
    acquire,
    by_environment,
    by_token,
    keep,
)
from gpulease.client.engine.request import LeaseRequest, address_of
from gpulease.client.engine.session import SessionCore, SessionView
from gpulease.client.engine.steps import Procedure
from gpulease.client.engine.streams import Streamed
from gpulease.client.engine.tokens import issue_request, token_of
from gpulease.client.forking import register
from gpulease.client.handles import StreamHandle
from gpulease.client.public import (
    Buffer,
    GpuLeaseError,
    Grant,
    HeldToken,
    Module,
    Permission,
)
from gpulease.client.sync.events import OnWarning
from gpulease.client.sync.session import TOKEN_S
from gpulease.client.sync.submits import Image
from gpulease.client.transport.ring import wanted_of
from gpulease.client.transport.spin_policy import spin_policy_of
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Body, CapabilityPresent, Empty
from gpulease.protocol.ring import Wanted

T = TypeVar("T")

SPIN_NS: Final = 20_000
"""How long an answer is looked for before the event loop gets a turn: no longer than a callback may take."""


class GpuBuilder(LeaseRequest):
    """Asks for a lease: `async with GpuBuilder().min_vram(64 << 20).lease_secs(120).acquire() as lease:`."""

    def acquire(self) -> "Opening[GpuLease]":
        """The lease, by `await` or by `async with`; see gpulease.client.GpuBuilder.acquire."""
        return Opening(self._acquired())

    async def _acquired(self) -> "GpuLease":
        return GpuLease(await drive(acquire(self._where(), self._request(), asyncio.Lock())))


class GpuLease(LeaseView):
    """So many bytes of a card for so many seconds; see gpulease.client.GpuLease."""

    def __init__(self, state: LeaseState) -> None:
        self._state = state
        self._free_when_dropped()

    async def renew(self, seconds: float) -> None:
        """Make it last at least `seconds` from now; see gpulease.client.GpuLease.renew."""
        await self._run(self._state.renew(seconds))

    async def free(self) -> None:
        """Give it back; see gpulease.client.GpuLease.free."""
        await self._run(self._state.free())

    async def query(self) -> LeaseReport:
        """What the daemon knows of it; see gpulease.client.GpuLease.query."""
        return await self._run(self._state.query())

    async def issue(
        self, permissions: Permission, audience: bytes | None = None, ttl_secs: float = TOKEN_S, nonce: int = 0
    ) -> Grant:
        """A token by which somebody else can use this lease; see gpulease.client.GpuLease.issue."""
        return await self._run(self._state.issue(issue_request(self.lease_id, permissions, audience, ttl_secs, nonce)))

    async def revoke_token(self, token: bytes | str | Grant) -> None:
        """End one token that was issued for this lease; see gpulease.client.GpuLease.revoke_token."""
        await self._run(self._state.revoke_token(token_of(token)))

    def submit(self, kernel: str, image: Image) -> Submission:
        """One kernel of an image, to be run in a context of its own; see gpulease.client.GpuLease.submit."""
        return Submission(kernel, image, lambda submission: submission._run_on(self._state))

    def keep_alive(self, on_loss: Callable[[GpuLeaseError], None] | None = None) -> "KeepAlive":
        """Renew it in a task until the returned object is stopped or its `async with` block is left."""
        return keep_alive(self, on_loss)

    def events(self) -> LeaseEvents:
        """What it goes through, from where it stands now to its end; see gpulease.client.GpuLease.events."""
        return LeaseEvents(self._state.event_stream())

    def on_warning(self, callback: OnWarning) -> WarningWatch:
        """Call back, from a task, whenever its end is near; see gpulease.client.GpuLease.on_warning."""
        return WarningWatch(self._state.event_stream(), callback)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        with suppress(*(() if kind is None else (GpuLeaseError,))):
            await self._run(self._state.leave())

    async def _run(self, procedure: Procedure[T]) -> T:
        return await undisturbed(self._drive(procedure))

    async def _drive(self, procedure: Procedure[T]) -> T:
        # A method, because a task that goes on must keep the lease from being dropped under it.
        return await drive(procedure)


class GpuSharedLease(LeaseView):
    """Somebody else's lease, as a token shows it; see gpulease.client.GpuSharedLease."""

    def __init__(self, state: LeaseState) -> None:
        self._state = state
        weakref.finalize(self, state.channel.close)

    async def query(self) -> LeaseReport:
        """What the daemon knows of it; see gpulease.client.GpuLease.query."""
        return await drive(self._state.query())

    def events(self) -> LeaseEvents:
        """What it goes through, for as long as the token is good; see gpulease.client.GpuLease.events."""
        return LeaseEvents(self._state.event_stream())


class GpuSession(SessionView):
    """A lease's isolated context on its card; see gpulease.client.GpuSession.

    `async with GpuSession(lease) as session:` or `session = await GpuSession(lease)` opens it. Tasks may share it; they
    take turns.
    """

    def __init__(self, lease: GpuLease | GpuSharedLease, *, shared_memory: bool = True) -> None:
        """Without `shared_memory` all goes through the socket, as it does over TCP anyway."""
        self.lease = lease
        self._lock = asyncio.Lock()
        wanted = wanted_of(lease._state.address) if shared_memory else Wanted()
        patience = spin_policy_of(lease._state.waiting, SPIN_NS)
        self._state = SessionCore(lease._state, self._lock, wanted=wanted, patience=patience)
        self._closing: Callable[[], object] | None = None
        register(self)

    @classmethod
    def attach(
        cls, token: bytes | str | Grant | None = None, address: str | None = None, *, shared_memory: bool = True
    ) -> Opening[Self]:
        """Another tenant's session, by a token, or `gpulease run`'s; see gpulease.client.GpuSession.attach."""
        return Opening(cls._attached(token, address, shared_memory))

    @classmethod
    async def _attached(cls, token: bytes | str | Grant | None, address: str | None, shared_memory: bool) -> Self:
        where, lock = address_of(address), asyncio.Lock()
        state = await drive(by_environment(where, lock) if token is None else by_token(where, token_of(token), lock))
        try:
            return await cls(GpuSharedLease(state), shared_memory=shared_memory)
        except BaseException:
            state.channel.close()
            raise

    def __await__(self) -> Generator[Any, Any, Self]:
        return self.__aenter__().__await__()

    async def mem_alloc(self, size_bytes: int) -> Buffer:
        """Device memory, zeroed; see gpulease.client.GpuSession.mem_alloc."""
        return await self._run(self._state.mem_alloc(size_bytes))

    async def mem_free(self, buffer: Buffer) -> None:
        """Give a buffer back now; see gpulease.client.GpuSession.mem_free."""
        await self._begin(lambda: self._state.mem_free(buffer))

    def stream(self) -> "Opening[Stream]":
        """A stream of its own for launches and copies; see gpulease.client.GpuSession.stream."""
        return Opening(self._run(self._state.stream_create(Stream)))

    @property
    def default_stream(self) -> "Stream":
        """What goes where no stream is named; see gpulease.client.GpuSession.default_stream."""
        return self._state.default_stream(Stream)

    async def mem_write(self, buffer: Buffer, offset: int, data: Any, stream: "Stream | None" = None) -> None:
        """Copy any buffer's bytes to byte `offset`; see gpulease.client.GpuSession.mem_write."""
        await self._begin(lambda: self._state.mem_write(buffer, offset, data, stream))

    @overload
    async def mem_read(
        self, buffer: Buffer, offset: int, nbytes: int, into: None = None, stream: "Stream | None" = None
    ) -> bytes: ...

    @overload
    async def mem_read(
        self, buffer: Buffer, offset: int, nbytes: int, into: T, stream: "Stream | None" = None
    ) -> T: ...

    async def mem_read(
        self, buffer: Buffer, offset: int, nbytes: int, into: Any = None, stream: "Stream | None" = None
    ) -> Any:
        """`nbytes` from byte `offset`, as bytes or in `into`; see gpulease.client.GpuSession.mem_read."""
        return await self._run(self._state.mem_read(buffer, offset, nbytes, into, stream))

    async def module_load(self, image: bytes | bytearray | memoryview | str) -> Module:
        """Load PTX text or a cubin; see gpulease.client.GpuSession.module_load."""
        return await self._run(self._state.module_load(image))

    async def module_unload(self, module: Module) -> None:
        """Unload a module now; see gpulease.client.GpuSession.module_unload."""
        await self._run(self._state.module_unload(module))

    async def launch(
        self,
        module: Module,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: KernelArguments,
        arg_sizes: Iterable[int] | None = None,
        shared_bytes: int = 0,
        stream: "Stream | None" = None,
    ) -> int:
        """Start a kernel; do not wait for it. See gpulease.client.GpuSession.launch."""
        await self._lock.acquire()
        number: int | Procedure[int] = 0
        try:
            number = self._state.launch(module, kernel, grid, block, args, arg_sizes, shared_bytes, stream)
        finally:
            if isinstance(number, int):
                self._lock.release()
        return number if isinstance(number, int) else await undisturbed(self._finish(number))

    def record(self) -> Recorder:
        """Record a launch graph: `async with session.record() as graph:`, then `await graph.launch()`.

        See gpulease.client.GpuSession.record. While a session records, other tasks can't use it.
        """
        return Recorder(self)

    async def sync(self) -> None:
        """Wait until all streams have ended what they hold; see gpulease.client.GpuSession.sync."""
        await self._run(self._state.sync())

    async def close(self) -> None:
        """End the session; an operation that waits in another task fails. The lease goes on."""
        if self._closing is None:
            return
        self._state.wake()
        async with self._lock:
            self._closing()

    async def __aenter__(self) -> Self:
        if self._closing is None:
            await drive(self._state.attach())
            self._closing = weakref.finalize(self, self._state.close)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                await fence(self._state)
        finally:
            await self.close()

    async def _run(self, procedure: Procedure[T]) -> T:
        return await undisturbed(self._drive(procedure))

    async def _drive(self, procedure: Procedure[T]) -> T:
        # A method, because a task that goes on must keep the session from being dropped under it.
        return await drive(procedure)

    async def _begin(self, operation: Callable[[], Procedure[None] | None]) -> None:
        await self._lock.acquire()
        rest = None
        try:
            rest = operation()
        except GpuLeaseError as error:
            raise error.with_traceback(None)  # noqa: B904  # as `drive` does
        finally:
            if rest is None:
                self._lock.release()
        if rest is not None:
            await undisturbed(self._finish(rest))

    async def _finish(self, rest: Procedure[T]) -> T:
        # It took over the lock from its caller, so that nothing gets between.
        try:
            return await drive(rest)
        finally:
            self._lock.release()


class Stream(StreamHandle):
    """An order of launches and copies; see gpulease.client.Stream. Made by `session.stream()`."""

    __slots__ = ()

    async def sync(self) -> None:
        """Wait until all that it holds has ended; see gpulease.client.Stream.sync."""
        await undisturbed(drive(self.session("sync").stream_sync(self)))

    async def wait_for(self, other: StreamHandle | None) -> None:
        """Put what comes next behind all that `other` holds now; see gpulease.client.Stream.wait_for."""
        await undisturbed(drive(self.session("wait_for").stream_wait(self, other)))

    async def close(self) -> None:
        """Let go of it now; see gpulease.client.Stream.close."""
        if self.owner is not None:
            await undisturbed(drive(self.session("close").stream_destroy(self)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if kind is None and self.owner is not None:
                await fence(self.session("sync"), self)
        finally:
            self.drop()


async def fence(state: Streamed, stream: Stream | None = None) -> None:
    """Wait for a session's last work, or a stream's, and raise what failed in it; see GpuSession."""
    limit = state.unsettled()
    if limit is None:
        return
    try:
        async with asyncio.timeout(limit.remaining_s()):
            await state.lock.acquire()
    except TimeoutError:
        raise limit.error() from None
    await undisturbed(_unlocking(state, state.fence(limit, stream)))


async def _unlocking(state: Streamed, procedure: Procedure[T]) -> T:
    try:
        return await drive(procedure)
    finally:
        state.lock.release()


class KeepAlive:
    """Renews a lease from a task; see gpulease.client.KeepAlive.

    Attributes:
        loss: Why the lease was lost; None while it is not.
    """

    def __init__(
        self, lease: GpuLease, on_loss: Callable[[GpuLeaseError], None] | None, schedule: RenewalSchedule
    ) -> None:
        self.loss: GpuLeaseError | None = None
        self._on_loss = on_loss
        self._task = task_of(self._keep(weakref.ref(lease), schedule))

    async def stop(self) -> None:
        """Renew no more; the lease then ends at its deadline unless it is freed or renewed by hand."""
        self._task.cancel()
        await asyncio.wait((self._task,))
        if not self._task.cancelled():
            self._task.result()  # raises what `on_loss` raised

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.stop()

    async def _keep(self, lease: "weakref.ref[GpuLease]", schedule: RenewalSchedule) -> None:
        self.loss = await drive(keep(lease, schedule))
        if self.loss is not None and self._on_loss is not None:
            self._on_loss(self.loss)


def keep_alive(
    lease: GpuLease, on_loss: Callable[[GpuLeaseError], None] | None = None, schedule: RenewalSchedule | None = None
) -> KeepAlive:
    """Start renewing a lease, from a task; see gpulease.client.keep_alive."""
    return KeepAlive(lease, on_loss, schedule or RenewalSchedule())


async def my_audience(address: str | None = None) -> bytes:
    """Tell who this program's user is to a node; see gpulease.client.my_audience."""
    return bytes((await _ask(Opcode.CAPABILITY_AUDIENCE, Empty(), address)).audience)


async def inspect_token(token: bytes | str | Grant, address: str | None = None) -> HeldToken:
    """Ask the node what a token lets this program do; see gpulease.client.inspect_token."""
    return HeldToken.of(await _ask(Opcode.CAPABILITY_PRESENT, CapabilityPresent(token_of(token)), address))


async def _ask(op: Opcode, body: Body, address: str | None) -> Any:
    return await drive(ask_once(address_of(address), op, body, CONTROL_REPLY_LIMIT_S))
