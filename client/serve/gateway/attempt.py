"""An attempt to serve a request on its own lease. The effect happens once, even if the request is sent repeatedly.

The order of the steps, and the reasons:

1. Reserve the request in the store. If it was served before, the store returns its outcome. If another attempt is in
   progress, wait for it; if it does not end in time, refuse.
2. Acquire the lease, issue a grant of exactly SUBMISSION, and validate it, all before any work on the card.
3. As the lease's owner, open the session and copy the input to the card. The grant permits no copies, so only the owner
   has access to the memory.
4. With the grant, load the module. Then record in the store, under the reservation's epoch, that the effect may begin.
   If another attempt has replaced this one, the store refuses, and this attempt stops. Then launch.
5. As the owner again, read the output, which waits for the kernel. (Steps 3 to 5 use one connection, and the grant is
   its second token: in step 4 the worker refuses operations that the grant does not permit. The lease is
   SESSION_EXCLUSIVE, so no other connection can come in between. With an older daemon, each of the three steps has its
   own connection.)
6. Record the outcome, free the lease with all of its memory, and reply.

A failure before the launch releases the reservation: nothing was done, and the request may be retried. A failure after
that is the outcome, which every later request with the same id gets. If this process dies, the daemon ends the lease at
its deadline. The claim expires CLAIM_MARGIN_S later, so when another attempt takes over the request, nothing of the
earlier one can still be running.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple, Protocol

from gpulease.client.core.spare_connections import SpareConnections
from gpulease.client.core.tokens import Grant, GrantPair
from gpulease.client.errors import Denied, GpuLeaseError, LeaseExpired
from gpulease.client.handles import Buffer, Module
from gpulease.client.kernel_args import KernelArgs
from gpulease.client.serve.gateway.gateway_errors import (
    CapabilityRefused,
    GatewayError,
    OperationFailed,
    OperationInProgress,
    OutcomeUnknown,
)
from gpulease.client.serve.gateway.inference import (
    InferenceKernel,
    InferenceRequest,
    InferenceResponse,
    failure_to_outcome,
    outcome_to_response,
    response_to_outcome,
)
from gpulease.client.serve.gateway.ledger import InFlight, OperationCompleted, Reservation, UnknownOutcome
from gpulease.client.serve.gateway.store import ReplicatedIdempotencyStore
from gpulease.client.sync.driver import drive, drive_with_clean_up
from gpulease.client.sync.lease import GpuBuilder, GpuLease
from gpulease.client.sync.session import GpuSession
from gpulease.protocol import Exclusivity, Opcode, Waiting
from gpulease.protocol.back_off import back_off_s
from gpulease.protocol.capabilities import Permission, names_of

SUBMISSION: Final = Permission.LEASE_QUERY | Permission.TASKLET_SUBMIT
"""The exact permissions of a request's grant. Its holder can load and launch, but can neither read the lease's memory
through the session nor renew, free or revoke the lease."""

MAX_TOKEN_S: Final = 300.0
"""Longest life of a token in seconds, a limit of the protocol."""


class Authority(Protocol):
    """Issues the grants of requests, and validates them before they are used."""

    def issue(self, lease: GpuLease, audience: bytes | None, ttl_s: float, nonce: int) -> Grant:
        """Issue a grant of SUBMISSION on a lease, for `audience`; None means this program's own user."""
        ...

    def check(self, grant: Grant, lease: GpuLease, now_unix_s: float) -> None:
        """Raise CapabilityRefused unless the grant permits SUBMISSION on this lease, and nothing else."""
        ...


class NodeAuthority:
    """Uses the lease's node as the authority: the node signs the grant, and validates it before any work is done."""

    def issue(self, lease: GpuLease, audience: bytes | None, ttl_s: float, nonce: int) -> Grant:
        return lease.issue(SUBMISSION, audience, min(ttl_s, MAX_TOKEN_S), nonce)

    def check(self, grant: Grant, lease: GpuLease, now_unix_s: float) -> None:
        """Let the lease's node read the grant, and compare its permissions. Raises CapabilityRefused."""
        try:
            # The node checks the token's signature and expiry, and returns the permissions that it really has.
            report = lease.inspect_token(grant)
        except Denied as error:
            raise CapabilityRefused(f"the grant was refused: {error.message}", error.hint) from None
        if report.lease_id != lease.lease_id:
            raise CapabilityRefused(f"the grant is of lease {report.lease_id}, not of {lease.lease_id}")
        # Require equality: a grant with more rights than needed is refused, too.
        if report.permissions != SUBMISSION:
            granted, required = ", ".join(names_of(report.permissions)), ", ".join(names_of(SUBMISSION))
            raise CapabilityRefused(f"the grant permits {granted}; it must permit exactly {required}")
        # The node's date is in whole seconds, rounded down, so compare with the floor.
        if report.ttl_s <= 0 or report.expires_at_unix_secs < math.floor(now_unix_s):
            raise CapabilityRefused(
                f"the grant ended at {report.expires_at_unix_secs}, and the request's date is {now_unix_s:.0f}",
                "Compare the clocks of the caller and of the node",
            )


class Effects(Protocol):
    """Every external effect of serving a request, behind one interface, so that tests can make each step fail.

    Attributes:
        store: Reserves and completes requests.
        wait_s: Seconds to wait in the daemon's queue for a lease.
        join_s: Seconds to wait for another attempt at the same request.
    """

    store: ReplicatedIdempotencyStore
    wait_s: float
    join_s: float

    def monotonic_s(self) -> float:
        """Return the time of the clock that measures waits, in seconds."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait between two reads of another attempt's state."""
        ...

    def acquire(self, min_vram_bytes: int, ttl_s: float) -> GpuLease:
        """Acquire a SESSION_EXCLUSIVE lease. Raises CapacityExceeded if no room becomes free in time."""
        ...

    def open(self, lease: GpuLease, grant: Grant | None = None) -> GpuSession:
        """Open the lease's session as the lease's owner, which may copy, and which may use the grant later."""
        ...

    def use_grant(self, owner: GpuSession) -> GpuSession | None:
        """Return the session, which from now on does only operations that its grant permits.

        Returns None, and changes nothing, if the daemon is too old for a session with a grant to use later.
        """
        ...

    def use_own(self, owner: GpuSession) -> None:
        """End `use_grant`: the session may do everything that its owner may do."""
        ...

    def attach(self, grant: Grant, lease: GpuLease) -> GpuSession:
        """Open the lease's session with a grant. The worker refuses operations that the grant does not permit."""
        ...


COPYING: Final = Permission.MEM_READ | Permission.MEM_WRITE
"""Permissions of the owner's own sessions if the daemon requires a token: copy in and out, but not launch."""


class DaemonEffects:
    """The real effects, with a store and the daemon at `address` (None: the daemon that `GpuBuilder` finds).

    With `by_token`, the owner opens each of its sessions with a new grant of COPYING to itself, because a token opens
    only one session. Daemons with `require_token = ["attach"]` require such grants. With `spare`, a request's lease
    uses the control connection of an earlier lease that was freed.
    """

    def __init__(
        self,
        store: ReplicatedIdempotencyStore,
        address: str | None = None,
        *,
        wait_s: float = 0.0,
        join_s: float = 0.0,
        by_token: bool = False,
        spare: SpareConnections | None = None,
    ) -> None:
        self.store, self.wait_s, self.join_s = store, wait_s, join_s
        self._address, self._by_token, self._spare = address, by_token, spare

    def monotonic_s(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def acquire(self, min_vram_bytes: int, ttl_s: float) -> GpuLease:
        # `timeout` limits the time in the daemon's queue: the part of the request's waiting time that is left.
        builder = GpuBuilder(self._address).min_vram(min_vram_bytes).lease_secs(ttl_s).timeout(self.wait_s)
        # Block instead of spinning: all requests share one interpreter, and a spinning thread would delay other
        # threads.
        builder = builder.exclusivity(Exclusivity.SESSION_EXCLUSIVE).waiting(Waiting.BLOCK)
        pending, request = builder._acquisition(self._spare)
        return drive_with_clean_up(pending, request, GpuLease)

    def open(self, lease: GpuLease, grant: Grant | None = None) -> GpuSession:
        # Issue a new grant for each session, because a token opens only one session.
        own = lease.issue(COPYING, ttl_secs=MAX_TOKEN_S) if self._by_token else None
        return self._session(lease, own if grant is None else GrantPair(own, grant))

    def use_grant(self, owner: GpuSession) -> GpuSession | None:
        operations = owner._session.operations
        if Opcode.USE_TOKEN not in operations.attachment.served:
            return None
        drive(operations.use_grant(is_second=True))
        return owner

    def use_own(self, owner: GpuSession) -> None:
        drive(owner._session.operations.use_grant(is_second=False))

    def attach(self, grant: Grant, lease: GpuLease) -> GpuSession:
        return self._session(lease, grant)

    def _session(self, lease: GpuLease, grant: Grant | GrantPair | None) -> GpuSession:
        # Use no shared memory: a request has a few operations. Making and mapping shared memory would cost both sides
        # more time than it saves, for inputs and outputs of any size.
        return GpuSession(lease, grant=grant, shared_memory=False)


CLAIM_MARGIN_S: Final = 15.0
"""Seconds from the end of an attempt's lease until its claim expires. During this time the attempt may still record its
outcome."""

END_MARGIN_S: Final = 0.5
"""If a grant expires at most this many seconds before its lease, the lease's end counts as the cause: clocks are
adjusted, and a host may be slow."""

_JOIN_PAUSE_S: Final = 0.02
_LONGEST_JOIN_PAUSE_S: Final = 0.25


def serve_inference_request(
    effects: Effects,
    authority: Authority,
    request: InferenceRequest,
    module_bytes: bytes,
    kernel: InferenceKernel,
) -> InferenceResponse:
    """Serve the request, or return its outcome if it was served before.

    Raises:
        InvalidRequest: The request is invalid, or its input or output is too large.
        OperationConflict: The request's id was used for another operation.
        OperationInProgress: Another attempt did not end within `effects.join_s`.
        CapabilityRefused: The grant does not permit the submission. Nothing was done on the card.
        OperationFailed: The request was attempted and failed, now or earlier. It is not executed again.
        OutcomeUnknown: An earlier attempt may have executed the request. It is not executed again.
        StaleEpoch: This attempt was presumed dead, and another one replaced it.
        StoreUnavailable: The store does not answer.
        CapacityExceeded, LoadFailed and other GpuLeaseErrors: Nothing was launched; the request may be retried.
    """
    # Refuse a request that no model could serve before the store makes an entry for it.
    request.check()
    # Step 1 of the module's docstring. If the request was served before, it needs no lease.
    reservation = _reserve(effects, request)
    if isinstance(reservation, InferenceResponse):
        return reservation
    try:
        lease = effects.acquire(request.min_vram, request.lease_ttl_secs)
        try:
            return _serve_on_lease(effects, authority, request, module_bytes, kernel, reservation, lease)
        finally:
            # Step 6. A failure here is ignored: the outcome is recorded, and the daemon ends the lease at its deadline.
            with suppress(GpuLeaseError), lease:
                pass
    except BaseException:
        # Allow a retry. Once the effect may have begun, the store refuses the release. If the store does not answer,
        # the claim expires by itself.
        with suppress(GatewayError):
            effects.store.release(reservation)
        raise


def _reserve(effects: Effects, request: InferenceRequest) -> Reservation | InferenceResponse:
    key, operation = request.key(), request.operation()
    # The claim must outlive everything that this attempt can still do: its wait, its lease, and recording the outcome.
    claim_ttl_s = effects.wait_s + request.lease_ttl_secs + CLAIM_MARGIN_S
    deadline_s = effects.monotonic_s() + effects.join_s
    attempts = 0
    while True:
        match effects.store.reserve(key, operation, claim_ttl_s):
            case Reservation() as reservation:
                return reservation
            # `outcome_to_response` raises a recorded failure again, so that every repetition gets the same reply.
            case OperationCompleted(outcome=outcome):
                return outcome_to_response(request.request_id, outcome)
            case UnknownOutcome():
                raise OutcomeUnknown(
                    f"{key}: an attempt ended after it may have been executed: the outcome is unknown, so it is not "
                    "retried"
                )
            case InFlight(remaining_s=remaining_s):
                # Poll, because the other attempt may be in another gateway.
                left_s = deadline_s - effects.monotonic_s()
                if left_s <= 0:
                    raise OperationInProgress(f"{key}: another attempt is in progress", remaining_s)
                effects.sleep(min(back_off_s(attempts, _JOIN_PAUSE_S, _LONGEST_JOIN_PAUSE_S), left_s))
                # Pauses grow, because each read is a transaction of the store.
                attempts += 1


def _serve_on_lease(
    effects: Effects,
    authority: Authority,
    request: InferenceRequest,
    module_bytes: bytes,
    kernel: InferenceKernel,
    reservation: Reservation,
    lease: GpuLease,
) -> InferenceResponse:
    # Step 2.
    grant = authority.issue(lease, request.audience, request.lease_ttl_secs, request.token_nonce)
    authority.check(grant, lease, request.now_secs)
    # Step 3.
    with effects.open(lease, grant) as owner:
        memory = _copy_in(owner, request, kernel)
        # Step 4. Everything that can fail without an effect, such as loading, comes before `start`.
        guest = effects.use_grant(owner)
        if guest is not None:
            # A module that can't be loaded is not an effect, so the request may be retried with the same id. Hold the
            # module until the end, because the owner's token may not permit unloading it.
            module = guest.module_load(module_bytes)
            args = _arguments(kernel, request, memory)
            # The point of no return is durable in the store before the launch. From here on any failure is the outcome.
            effects.store.start(reservation)
            with _recorded_on_failure(effects, reservation):
                _launch(guest, module, kernel, args, request.output_len)
                # Step 5, and the recording of step 6. The output's read waits for the kernel and reports its failure.
                effects.use_own(owner)
                with _lease_end_first(lease):
                    output = _copy_out(owner, request, memory)
                return _complete(effects, request, reservation, lease, grant, output)
        # Memory ends with its session unless it is kept, and the grant's session needs it next.
        if owner.owns_memory:
            owner.keep(memory.buffer, "request")
        # The next session reads the copied bytes, so wait for the copies before this session ends.
        owner.sync()
    return _serve_by_connections(effects, authority, request, module_bytes, kernel, reservation, lease, memory)


def _serve_by_connections(
    effects: Effects,
    authority: Authority,
    request: InferenceRequest,
    module_bytes: bytes,
    kernel: InferenceKernel,
    reservation: Reservation,
    lease: GpuLease,
    memory: "_Memory",
) -> InferenceResponse:
    """Do steps 4 to 6 for an older daemon, whose sessions can't use two grants: the grant gets its own session."""
    # The daemon may have counted the first grant as used although the session's worker is older and has ignored it.
    grant = authority.issue(lease, request.audience, request.lease_ttl_secs, request.token_nonce)
    authority.check(grant, lease, request.now_secs)
    with effects.attach(grant, lease) as guest:
        module = guest.module_load(module_bytes)
        args = _arguments(kernel, request, memory)
        effects.store.start(reservation)
        with _recorded_on_failure(effects, reservation):
            _launch(guest, module, kernel, args, request.output_len)
            # A launch is asynchronous, and this session reads nothing, so `sync` reports whether the kernel succeeded.
            with _lease_end_first(lease):
                guest.sync()
    with _recorded_on_failure(effects, reservation):
        with effects.open(lease) as owner:
            output = _copy_out(owner, request, memory)
        return _complete(effects, request, reservation, lease, grant, output)


_ALIGNMENT_BYTES: Final = 256
"""The alignment of the output in the buffer, the same as of every allocation (CUDA C++ Programming Guide, "Device
Memory Accesses")."""


class _Memory(NamedTuple):
    """A request's memory, one buffer: the input, then the output, unless the kernel works in place.

    Attributes:
        buffer: The buffer, in the session that allocated it.
        output_at: The offset of the output in the buffer.
    """

    buffer: Buffer
    output_at: int


def _copy_in(owner: GpuSession, request: InferenceRequest, kernel: InferenceKernel) -> _Memory:
    """Allocate a request's memory, and copy the input in."""
    # Allocate at least 1 byte for the input, because a kernel gets an address even for an empty input.
    input_bytes = max(1, len(request.input))
    output_at = 0 if kernel.is_in_place else -(-input_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    size_bytes = max(input_bytes, output_at + request.output_len)
    # The daemon zeroes new memory, so the output never shows another tenant's bytes. Use one buffer for input and
    # output, because each allocation takes a round trip.
    buffer = owner.mem_alloc(size_bytes)
    if request.input:
        owner.mem_write(buffer, 0, request.input)
    return _Memory(buffer, output_at)


def _arguments(kernel: InferenceKernel, request: InferenceRequest, memory: _Memory) -> KernelArgs:
    # The settings list a kernel's arguments by these names.
    at = memory.buffer.handle
    values = {"in": at, "out": at + memory.output_at, "inout": at}
    values |= {"input_len": len(request.input), "output_len": request.output_len}
    args = KernelArgs()
    for argument in kernel.arguments:
        name, _, kind = argument.partition(":")
        args = args.push_u32(values[name]) if kind == "u32" else args.push_u64(values[name])
    return args


def _launch(guest: GpuSession, module: Module, kernel: InferenceKernel, args: KernelArgs, output_bytes: int) -> None:
    guest.launch(module, kernel.name, [kernel.blocks(output_bytes)], [kernel.threads_per_block], args)


@contextmanager
def _lease_end_first(lease: GpuLease) -> Iterator[None]:
    """Report the lease's end if the grant, which expires together with it, was found expired first."""
    try:
        yield
    except Denied as error:
        if lease.remaining_s > END_MARGIN_S:
            raise
        raise LeaseExpired(
            f"the lease ended, and with it the grant, before the kernel ended: {error.message}"
        ) from error


def _copy_out(owner: GpuSession, request: InferenceRequest, memory: _Memory) -> bytes:
    # Refer to the buffer by its address, because another session may have allocated it.
    buffer = owner.buffer(memory.buffer.handle, memory.buffer.size_bytes)
    return bytes(owner.mem_read(buffer, memory.output_at, request.output_len))


def _complete(
    effects: Effects, request: InferenceRequest, reservation: Reservation, lease: GpuLease, grant: Grant, output: bytes
) -> InferenceResponse:
    # This request gets the same bytes as every repetition, which gets them from the store.
    response = InferenceResponse(request.request_id, lease.lease_id, grant.expires_at_unix_secs, output)
    effects.store.complete(reservation, response_to_outcome(response))
    return response


@contextmanager
def _recorded_on_failure(effects: Effects, reservation: Reservation) -> Iterator[None]:
    """Record a failure after `start` as the request's outcome. Errors of the store itself are raised unchanged."""
    try:
        yield
    except GatewayError:
        raise
    except GpuLeaseError as error:
        effects.store.complete(reservation, failure_to_outcome(error))
        raise OperationFailed(str(error), type(error).__name__) from error
