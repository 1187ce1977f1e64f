"""The blocking face: each call returns when it is done. Threads may share a lease and a session; they take turns."""

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self, TypeVar, overload

from gpulease.client.control import ask
from gpulease.client.engine.copies import PROMPT_READ_BYTES
from gpulease.client.engine.launch import KernelArguments
from gpulease.client.engine.lease import LeaseReport, LeaseState, LeaseView, acquire, by_environment, by_token
from gpulease.client.engine.request import LeaseRequest, address_of
from gpulease.client.engine.session import SessionCore, SessionView
from gpulease.client.engine.tokens import Grant, HeldToken, issue_request, token_of
from gpulease.client.errors import GpuLeaseError
from gpulease.client.forking import register
from gpulease.client.handles import Buffer, Module
from gpulease.client.sync.driver import drive
from gpulease.client.sync.events import KeepAlive, LeaseEvents, OnWarning, WarningWatch, keep_alive
from gpulease.client.sync.graphs import Recorder
from gpulease.client.sync.streams import Stream, fence
from gpulease.client.sync.submits import Image, Submission
from gpulease.client.transport.ring import wanted_of
from gpulease.client.transport.spin_policy import spin_policy_of
from gpulease.protocol import Opcode
from gpulease.protocol.capabilities import Permission
from gpulease.protocol.messages import CapabilityPresent, Empty
from gpulease.protocol.ring import Wanted

Into = TypeVar("Into")

SPIN_NS: Final = 200_000
"""How long an answer is looked for before its caller sleeps: most come within it, and waking up takes tens of
microseconds."""


TOKEN_S: Final = 60.0
"""Life of a token if its issuer does not say."""


class GpuBuilder(LeaseRequest):
    """Asks for a lease: `GpuBuilder().min_vram(64 << 20).lease_secs(120).acquire()`."""

    def acquire(self) -> "GpuLease":
        """The lease. Raises CapacityExceeded if there is no room in time, Disconnected if there is no daemon."""
        return GpuLease(drive(acquire(self._where(), self._request(), threading.RLock())))


class GpuLease(LeaseView):
    """So many bytes of a card for so many seconds; made by `GpuBuilder.acquire`.

    Leaving its `with` block gives it back. So does dropping the last reference or ending the program, but without an
    answer: whatever happens, the daemon takes it back at its deadline.
    """

    def __init__(self, state: LeaseState) -> None:
        self._state = state
        self._free_when_dropped()

    def renew(self, seconds: float) -> None:
        """Make it last at least `seconds` from now. Raises LeaseExpired, Revoked or Fenced if it is over."""
        drive(self._state.renew(seconds))

    def free(self) -> None:
        """Give it back: everything in its session is gone. Raises what it had ended of, if it had."""
        drive(self._state.free())

    def query(self) -> LeaseReport:
        """What the daemon knows of it, whether it lives or not: see `LeaseReport` for each member and its unit."""
        return drive(self._state.query())

    def issue(
        self, permissions: Permission, audience: bytes | None = None, ttl_secs: float = TOKEN_S, nonce: int = 0
    ) -> Grant:
        """A token by which somebody else can use this lease, for as long as it is not renewed.

        Args:
            permissions: What its holder may do: say, `Permission.MEM_READ | Permission.TASKLET_SUBMIT`.
            audience: The holder's `my_audience()` on this node; None for this program's own user.
            ttl_secs: For how long, at most 300 and never longer than the lease.
            nonce: A number of 128 bits that no token of the lease has had; 0: the daemon draws one.

        Raises Denied if the daemon lets only operators give that.
        """
        wanted = issue_request(self.lease_id, permissions, audience, ttl_secs, nonce)
        return drive(self._state.issue(wanted))

    def revoke_token(self, token: bytes | str | Grant) -> None:
        """End one token that was issued for this lease, and what was narrowed from it; others go on.

        What was opened with it is refused, `Denied`, from its next operation on. That it has ended is no error. Raises
        Denied for what is no token of this node's, Busy if 200 of the lease were revoked in the last 300 s.
        """
        drive(self._state.revoke_token(token_of(token)))

    def submit(self, kernel: str, image: Image) -> Submission:
        """One kernel of an image, to be run in a context of its own that ends with the call.

        `lease.submit("infer", image).grid([4]).block([256]).arg(data).out(4096).launch()` is its output. It has the
        lease's memory while no session was opened; for submits beside a session some is kept when the lease is
        acquired: `GpuBuilder().submits(bytes)`.
        """
        return Submission(kernel, image, lambda submission: submission._run_on(self._state))

    def keep_alive(self, on_loss: Callable[[GpuLeaseError], None] | None = None) -> KeepAlive:
        """Renew it in the background until the returned object is stopped or its `with` block is left."""
        return keep_alive(self, on_loss)

    def events(self) -> LeaseEvents:
        """What it goes through, from where it stands now to its end, on a connection of its own."""
        return LeaseEvents(self._state.event_stream())

    def on_warning(self, callback: OnWarning) -> WarningWatch:
        """Call back, from a thread, whenever its end is near or its node is drained: `event.left_s` says how near."""
        return WarningWatch(self._state.event_stream(), callback)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with suppress(*(() if kind is None else (GpuLeaseError,))):
            drive(self._state.leave())


class GpuSharedLease(LeaseView):
    """A lease that others hold, a token's or `gpulease run`'s: until when it can be used. It is not freed here."""

    def __init__(self, state: LeaseState) -> None:
        self._state = state
        weakref.finalize(self, state.channel.close)

    def query(self) -> LeaseReport:
        """What the daemon knows of it; see GpuLease.query."""
        return drive(self._state.query())

    def events(self) -> LeaseEvents:
        """What it goes through, for as long as the token is good; see GpuLease.events."""
        return LeaseEvents(self._state.event_stream())


class GpuSession(SessionView):
    """A lease's isolated context on its card. `GpuSession(lease)` opens it; it ends when closed, or with its lease.

    An operation is done when it returns, except those that are only handed over: `launch`, `mem_free`, and `mem_write`
    of up to 64 KiB. They are done in their order, and if one fails, those behind it are skipped; the next operation
    that waits reports it, and is not done itself. A session keeps its lease from being dropped.

    Leaving its `with` block waits for the last of them, if nothing has yet, and raises what failed. It waits as `sync`
    does, but no longer than the lease had left when the block was left: TimedOut if the lease goes on even so. A block
    that is left by an exception, and `close`, wait for nothing. A session by token that loaded no module asks only what
    became of its own requests: it waits for nobody's kernels, and leaves others' failures to them.
    """

    def __init__(self, lease: "GpuLease | GpuSharedLease", *, shared_memory: bool = True) -> None:
        """Without `shared_memory` all goes through the socket, as it does over TCP anyway."""
        self.lease = lease
        self._lock = threading.RLock()
        wanted = wanted_of(lease._state.address) if shared_memory else Wanted()
        patience = spin_policy_of(lease._state.waiting, SPIN_NS)
        self._state = SessionCore(lease._state, self._lock, wanted=wanted, patience=patience)
        register(self)
        drive(self._state.attach())
        self._closing = weakref.finalize(self, self._state.close)

    @classmethod
    def attach(
        cls, token: bytes | str | Grant | None = None, address: str | None = None, *, shared_memory: bool = True
    ) -> Self:
        """Another tenant's session, by a token of theirs: it does what the token permits, until that expires.

        A token opens one session. Raises Denied with the check it failed. Without a token, the session of the lease
        that `gpulease run` took for this program: GPULEASE_LEASE_ID names it. Raises InvalidRequest if nothing does.
        """
        where, lock = address_of(address), threading.RLock()
        state = drive(by_environment(where, lock) if token is None else by_token(where, token_of(token), lock))
        try:
            return cls(GpuSharedLease(state), shared_memory=shared_memory)
        except BaseException:
            # The error keeps its frames, and they the connection, for as long as somebody keeps the error.
            state.channel.close()
            raise

    def mem_alloc(self, size_bytes: int) -> Buffer:
        """Device memory, zeroed. Raises AllocFailed if the slice has no room."""
        with self._lock:
            buffer = self._state.alloc_promptly(size_bytes)
            return buffer if isinstance(buffer, Buffer) else drive(buffer)

    def mem_free(self, buffer: Buffer) -> None:
        """Give a buffer back now rather than when its last reference goes; nothing is waited for."""
        with self._lock:
            rest = self._state.mem_free(buffer)
            if rest is not None:
                drive(rest)

    def stream(self) -> Stream:
        """A stream of its own for launches and copies, beside the default one. Raises Busy beyond MAX_STREAMS."""
        return drive(self._state.stream_create(Stream))

    @property
    def default_stream(self) -> Stream:
        """What goes where no stream is named: a stream like the others, but that copies in it are always done."""
        return self._state.default_stream(Stream)

    def mem_write(self, buffer: Buffer, offset: int, data: Any, stream: Stream | None = None) -> None:
        """Copy any buffer's bytes (bytes, memoryview, numpy array) to byte `offset`. Raises InvalidHandle.

        `data` may be changed when it returns; but an array of `empty` that is copied in a stream is to be left alone
        until that is waited for: see Stream. Up to 64 KiB are handed over and not waited for: what then hinders the
        copy, a kernel's fault before it say, is reported by the next operation that waits, as for a launch.
        """
        with self._lock:
            rest = self._state.mem_write(buffer, offset, data, stream)
            if rest is not None:
                drive(rest)
        return None

    @overload
    def mem_read(
        self, buffer: Buffer, offset: int, nbytes: int, into: None = None, stream: Stream | None = None
    ) -> bytes: ...

    @overload
    def mem_read(self, buffer: Buffer, offset: int, nbytes: int, into: Into, stream: Stream | None = None) -> Into: ...

    def mem_read(self, buffer: Buffer, offset: int, nbytes: int, into: Any = None, stream: Stream | None = None) -> Any:
        """`nbytes` from byte `offset`, as bytes, or in the writable buffer `into`, which is returned then.

        `into` is anything C-contiguous that can be written: an array of any type, a bytearray, a memoryview.

        In a stream, an array of `empty` has them once that was waited for: see Stream.
        """
        if stream is not None:
            return drive(self._state.mem_read(buffer, offset, nbytes, into, stream))
        target = bytearray(nbytes) if into is None and type(nbytes) is int and 0 < nbytes <= PROMPT_READ_BYTES else into
        with self._lock:
            rest = self._state.read_promptly(buffer, offset, nbytes, target)
            result = None if rest is None else drive(rest)
        return into if into is not None else bytes(target if result is None else result)

    def module_load(self, image: bytes | bytearray | memoryview | str) -> Module:
        """Load PTX text or a cubin. Raises LoadFailed with the compiler's log."""
        return drive(self._state.module_load(image))

    def module_unload(self, module: Module) -> None:
        """Unload a module now rather than when its last reference goes."""
        drive(self._state.module_unload(module))

    def launch(
        self,
        module: Module,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: KernelArguments,
        arg_sizes: Iterable[int] | None = None,
        shared_bytes: int = 0,
        stream: Stream | None = None,
    ) -> int:
        """Start a kernel; do not wait for it.

        Args:
            module: Where the kernel is.
            kernel: Its name.
            grid: One to three numbers of blocks.
            block: One to three numbers of threads.
            args: KernelArgs, or a list of buffers and numpy scalars: `[buffer, np.uint32(n), np.float32(2)]`, and of
                Python numbers where the image's PTX tells the parameters' types, an int for a float, too; or the packed
                bytes.
            arg_sizes: Each argument's size in bytes, if `args` are bytes.
            shared_bytes: Dynamic shared memory per block.
            stream: What to put it in; the default stream if None.

        Returns:
            The launch's number, which a later error's `failure.failed_request_id` names.

        Raises:
            LaunchFailed: It can't be started, as far as can be told here: a float is given where the PTX declares an
                integer, say.
        """
        with self._lock:
            number = self._state.launch(module, kernel, grid, block, args, arg_sizes, shared_bytes, stream)
            return number if isinstance(number, int) else drive(number)

    def record(self) -> Recorder:
        """Record a launch graph: `with session.record() as graph:`, then `graph.launch()` as often as wanted.

        In the block `launch`, `mem_write` and `mem_read` are checked and written down, not done. A copy names the
        memory of an array of `empty`, whose bytes are read or written at each launch of the graph; `mem_write` of bytes
        that can't change, such as `bytes`, records them. Anything else raises InvalidRequest, and so does `stream`:
        all of a graph runs in the stream that its launch names. Leaving the block by an
        error discards what was recorded; leaving it otherwise makes the graph, and raises what is wrong with it.

        Between a launch of the graph and the next `sync`, of the session or of the launch's stream, its arrays are the
        graph's. Arguments pushed with `KernelArgs.push_parameter` can be given anew at each launch. While a session
        records, other threads can't use it.
        """
        return Recorder(self)

    def sync(self) -> None:
        """Wait until all streams have ended what they hold. Raises SyncFailed or LaunchFailed, naming the kernel."""
        with self._lock:
            rest = self._state.sync_promptly()
            if rest is not None:
                drive(rest)

    def close(self) -> None:
        """End the session; an operation that waits in another thread fails. The lease goes on."""
        self._state.wake()
        with self._lock:
            self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                fence(self._state)
        finally:
            self.close()


def my_audience(address: str | None = None) -> bytes:
    """Who this program's user is to a node: what to tell those who are to issue tokens for it."""
    return bytes(ask(Opcode.CAPABILITY_AUDIENCE, Empty(), address).audience)


def inspect_token(token: bytes | str | Grant, address: str | None = None) -> HeldToken:
    """What the node says of a token: what it lets this program do, and until when. Uses nothing of it up.

    Raises Denied with the check it failed.
    """
    return HeldToken.of(ask(Opcode.CAPABILITY_PRESENT, CapabilityPresent(token_of(token)), address))
