"""An attempt at a request, on a lease of its own, with one effect however often the request is sent.

The order of the steps, and why:

1. Reserve the request in the store. The store answers a request that was done. If another attempt is under way, wait
   for it, then refuse.
2. Acquire the lease, issue a grant of exactly SUBMISSION, and validate it: all before any work on the card.
3. As the lease's owner, copy the input in. The grant permits no copies: the memory stays its owner's.
4. By the grant, load the module. Then record in the store, under the reservation's epoch, that the effect may begin.
   An attempt that was replaced by another learns it here, and stops. Then launch and wait.
5. As the owner again, read the output. (The lease is SESSION_EXCLUSIVE: one connection at a time. Owner and grant
   alternate, and no third connection can come between.)
6. Record the outcome, free the lease and with it all of its memory, answer.

Until the launch, any failure releases the reservation: nothing was done, and the request may be tried again. From the
launch on, a failure is the outcome, and every later request of that id gets it. If this process dies, the daemon
ends the lease at its deadline. The claim runs out CLAIM_MARGIN_S later, so the attempt that takes the request over
finds that nothing of the earlier one can still be running.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, Protocol

from gpulease.client.core.tokens import Grant
from gpulease.client.errors import Denied, GpuLeaseError, LeaseExpired
from gpulease.client.handles import Module
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
from gpulease.client.serve.gateway.ledger import Completed, InFlight, Reservation, Unknown
from gpulease.client.serve.gateway.store import ReplicatedIdempotencyStore
from gpulease.client.sync.lease import GpuBuilder, GpuLease
from gpulease.client.sync.session import GpuSession
from gpulease.protocol import Exclusivity, Waiting
from gpulease.protocol.back_off import back_off_s
from gpulease.protocol.capabilities import Permission, names_of

SUBMISSION: Final = Permission.LEASE_QUERY | Permission.TASKLET_SUBMIT
"""The permissions of a request's grant, no more and no less. Its holder can load and launch. It can neither read the
lease's memory through the session nor renew, free or revoke the lease."""

MAX_TOKEN_S: Final = 300.0
"""Longest life of a token in seconds, by the protocol."""


class Authority(Protocol):
    """Issues grants and validates them."""

    def issue(self, lease: GpuLease, audience: bytes | None, ttl_s: float, nonce: int) -> Grant:
        """Issue a grant of SUBMISSION on a lease."""
        ...

    def check(self, grant: Grant, lease: GpuLease, now_unix_s: float) -> None:
        """Raise CapabilityRefused unless this program may submit to the lease by the grant, and do nothing else."""
        ...


class NodeAuthority:
    """The lease's own node: it signs the grant, and validates it again before any work is done."""

    def issue(self, lease: GpuLease, audience: bytes | None, ttl_s: float, nonce: int) -> Grant:
        """Have the lease's node issue a grant of SUBMISSION."""
        return lease.issue(SUBMISSION, audience, min(ttl_s, MAX_TOKEN_S), nonce)

    def check(self, grant: Grant, lease: GpuLease, now_unix_s: float) -> None:
        """Have the lease's node say what the grant permits. Raises CapabilityRefused."""
        try:
            held = lease.inspect_token(grant)
        except Denied as error:
            raise CapabilityRefused(f"the grant is refused: {error.message}", error.hint) from None
        if held.lease_id != lease.lease_id:
            raise CapabilityRefused(f"the grant is of lease {held.lease_id}, not of {lease.lease_id}")
        if held.permissions != SUBMISSION:
            given, wanted = ", ".join(names_of(held.permissions)), ", ".join(names_of(SUBMISSION))
            raise CapabilityRefused(f"the grant permits {given}; it must permit {wanted}, no less and no more")
        # The node's date is in whole seconds, rounded down.
        if held.ttl_s <= 0 or held.expires_at_unix_secs < math.floor(now_unix_s):
            raise CapabilityRefused(
                f"the grant ends at {held.expires_at_unix_secs}, and by the request's date it is {now_unix_s:.0f}",
                "Compare the clocks of the caller and of the node",
            )


class Effects(Protocol):
    """Every effect of serving a request, behind one object, so that a test can fail each step.

    Attributes:
        store: Reserves and completes requests.
        wait_s: Seconds to wait in the daemon's queue for a lease.
        join_s: Seconds to wait for another attempt at the same request.
    """

    store: ReplicatedIdempotencyStore
    wait_s: float
    join_s: float

    def monotonic_s(self) -> float:
        """Return the time for waits, in seconds."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...

    def acquire(self, min_vram_bytes: int, ttl_s: float) -> GpuLease:
        """Acquire a SESSION_EXCLUSIVE lease. Raises CapacityExceeded if there is no room in time."""
        ...

    def open(self, lease: GpuLease) -> GpuSession:
        """Open the lease's session as its owner."""
        ...

    def attach(self, grant: Grant, lease: GpuLease) -> GpuSession:
        """Open the lease's session by a grant; the session's worker refuses operations outside the grant."""
        ...


COPYING: Final = Permission.MEM_READ | Permission.MEM_WRITE
"""Permissions of the owner's own sessions where the daemon demands a token: copy in and out, launch nothing."""


class DaemonEffects:
    """Effects on a store and on the daemon at `address` (None: the one that `GpuBuilder` finds).

    With `by_token`, a grant of COPYING that the owner issues to itself opens each of the owner's sessions: a token
    opens one session. Daemons with `require_token = ["attach"]` need that.
    """

    def __init__(
        self,
        store: ReplicatedIdempotencyStore,
        address: str | None = None,
        *,
        wait_s: float = 0.0,
        join_s: float = 0.0,
        by_token: bool = False,
    ) -> None:
        self.store, self.wait_s, self.join_s = store, wait_s, join_s
        self._address, self._by_token = address, by_token

    def monotonic_s(self) -> float:
        """Return the time for waits, in seconds."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def acquire(self, min_vram_bytes: int, ttl_s: float) -> GpuLease:
        """Acquire a SESSION_EXCLUSIVE lease from the daemon."""
        builder = GpuBuilder(self._address).min_vram(min_vram_bytes).lease_secs(ttl_s).timeout(self.wait_s)
        # All requests share one interpreter: a thread that spins for its reply keeps the others from theirs.
        builder = builder.exclusivity(Exclusivity.SESSION_EXCLUSIVE).waiting(Waiting.BLOCK)
        return builder.acquire()

    def open(self, lease: GpuLease) -> GpuSession:
        """Open the lease's session as its owner."""
        if self._by_token:
            return GpuSession(lease, grant=lease.issue(COPYING, ttl_secs=MAX_TOKEN_S))
        return GpuSession(lease)

    def attach(self, grant: Grant, lease: GpuLease) -> GpuSession:
        """Open the lease's session by a grant."""
        return GpuSession(lease, grant=grant)


CLAIM_MARGIN_S: Final = 15.0
"""Seconds after the end of its lease in which an attempt may still record its outcome."""

END_MARGIN_S: Final = 0.5
"""Seconds. A grant that ends so shortly before its lease ended because of it: the clocks step, and a host may be
slow."""

_JOIN_PAUSE_S: Final = 0.02
_LONGEST_JOIN_PAUSE_S: Final = 0.25


def serve_inference_request(
    effects: Effects,
    authority: Authority,
    request: InferenceRequest,
    module_bytes: bytes,
    kernel: InferenceKernel,
) -> InferenceResponse:
    """Serve the request once, or return the outcome of the time it was served.

    Raises:
        InvalidRequest: The request makes no sense, or its input or output is too large.
        OperationConflict: Its id stands for another operation.
        OperationInProgress: Another attempt has not ended within `effects.join_s`.
        CapabilityRefused: The grant does not permit the submission. Nothing was done on the card.
        OperationFailed: The request was attempted and failed, now or earlier. It is not done again.
        OutcomeUnknown: An earlier attempt may have done the request. It is not done again.
        StaleEpoch: This attempt was taken for dead, and another has its place.
        StoreUnavailable: The store does not answer.
        CapacityExceeded, LoadFailed and other GpuLeaseErrors: Nothing was launched; the request may be tried again.
    """
    request.check()
    held = _reserve(effects, request)
    if isinstance(held, InferenceResponse):
        return held
    try:
        lease = effects.acquire(request.min_vram, request.lease_ttl_secs)
        try:
            return _serve_on_lease(effects, authority, request, module_bytes, kernel, held, lease)
        finally:
            # The outcome is known already, and the daemon ends the lease at its deadline anyway.
            with suppress(GpuLeaseError), lease:
                pass
    except BaseException:
        # The store refuses this once the effect may have begun. If the store is away, the claim runs out by itself.
        with suppress(GatewayError):
            effects.store.release(held)
        raise


def _reserve(effects: Effects, request: InferenceRequest) -> Reservation | InferenceResponse:
    key, operation = request.key(), request.operation()
    claim_ttl_s = effects.wait_s + request.lease_ttl_secs + CLAIM_MARGIN_S
    until = effects.monotonic_s() + effects.join_s
    looks = 0
    while True:
        match effects.store.reserve(key, operation, claim_ttl_s):
            case Reservation() as held:
                return held
            case Completed(outcome=outcome):
                return outcome_to_response(request.request_id, outcome)
            case Unknown():
                raise OutcomeUnknown(
                    f"{key}: an attempt ended after it may have been executed: the outcome is unknown, so it is not "
                    "retried"
                )
            case InFlight(remaining_s=remaining_s):
                left_s = until - effects.monotonic_s()
                if left_s <= 0:
                    raise OperationInProgress(f"{key}: another attempt is at it", remaining_s)
                effects.sleep(min(back_off_s(looks, _JOIN_PAUSE_S, _LONGEST_JOIN_PAUSE_S), left_s))
                looks += 1


def _serve_on_lease(
    effects: Effects,
    authority: Authority,
    request: InferenceRequest,
    module_bytes: bytes,
    kernel: InferenceKernel,
    held: Reservation,
    lease: GpuLease,
) -> InferenceResponse:
    grant = authority.issue(lease, request.audience, request.lease_ttl_secs, request.token_nonce)
    authority.check(grant, lease, request.now_secs)
    into, out_of = _copy_in(effects, request, kernel, lease)
    with effects.attach(grant, lease) as guest:
        module = guest.module_load(module_bytes)
        args = _arguments(kernel, request, into, out_of)
        effects.store.start(held)
        with _recorded_on_failure(effects, held):
            _run(guest, lease, module, kernel, args, request.output_len)
    with _recorded_on_failure(effects, held):
        output = _copy_out(effects, request, lease, out_of)
        return _complete(effects, request, held, lease, grant, output)


def _input_bytes(request: InferenceRequest, kernel: InferenceKernel) -> int:
    """Size of the input's memory; at least 1, because a kernel gets an address for an empty input, too."""
    return max(1, len(request.input), request.output_len if kernel.is_in_place else 0)


def _copy_in(effects: Effects, request: InferenceRequest, kernel: InferenceKernel, lease: GpuLease) -> tuple[int, int]:
    """Return the device addresses of the input and of the output, which is zeroed or is the input's own memory."""
    with effects.open(lease) as owner:
        into = owner.mem_alloc(_input_bytes(request, kernel))
        out_of = into if kernel.is_in_place else owner.mem_alloc(request.output_len)
        if request.input:
            owner.mem_write(into, 0, request.input)
        if owner.owns_memory:
            # The guest needs them after this session's end.
            owner.keep(into, "in")
            if out_of is not into:
                owner.keep(out_of, "out")
        owner.sync()
        return into.handle, out_of.handle


def _arguments(kernel: InferenceKernel, request: InferenceRequest, into: int, out_of: int) -> KernelArgs:
    values = {"in": into, "out": out_of, "inout": into}
    values |= {"input_len": len(request.input), "output_len": request.output_len}
    args = KernelArgs()
    for argument in kernel.arguments:
        name, _, kind = argument.partition(":")
        args = args.push_u32(values[name]) if kind == "u32" else args.push_u64(values[name])
    return args


def _run(
    guest: GpuSession, lease: GpuLease, module: Module, kernel: InferenceKernel, args: KernelArgs, output_bytes: int
) -> None:
    guest.launch(module, kernel.name, [kernel.blocks(output_bytes)], [kernel.threads_per_block], args)
    try:
        guest.sync()
    except Denied as error:
        # The grant ends with its lease, and chance decides which end is noticed first.
        if lease.remaining_s > END_MARGIN_S:
            raise
        raise LeaseExpired(f"the lease ended, and with it the grant, before the kernel did: {error.message}") from error


def _copy_out(effects: Effects, request: InferenceRequest, lease: GpuLease, out_of: int) -> bytes:
    with effects.open(lease) as owner:
        result = owner.buffer(out_of, request.output_len)
        return bytes(owner.mem_read(result, 0, request.output_len))


def _complete(
    effects: Effects, request: InferenceRequest, held: Reservation, lease: GpuLease, grant: Grant, output: bytes
) -> InferenceResponse:
    response = InferenceResponse(request.request_id, lease.lease_id, grant.expires_at_unix_secs, output)
    effects.store.complete(held, response_to_outcome(response))
    return response


@contextmanager
def _recorded_on_failure(effects: Effects, held: Reservation) -> Iterator[None]:
    """Record a failure after the launch as the outcome; errors of the store itself are passed on."""
    try:
        yield
    except GatewayError:
        raise
    except GpuLeaseError as error:
        effects.store.complete(held, failure_to_outcome(error))
        raise OperationFailed(str(error), type(error).__name__) from error
