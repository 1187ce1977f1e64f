"""The grant a request is submitted by: who issues it, and who says what it permits.

All that serving a request does to the world goes through one object, so that each step's failure can be had.

One request on a lease of its own, with one effect however often it is asked.

The order, and why it is this one:

1. Reserve the request in the store. A request that was done is answered from there; one that another attempt is at
   is waited for, then refused.
2. Acquire the lease, have a grant of exactly SUBMISSION issued, and have it validated: all before any work on the card.
3. As the lease's owner, copy the input in. The grant permits no copies: the memory stays its owner's.
4. By the grant, load the module. Then write down in the store that the effect may begin, under the reservation's
   epoch: an attempt whose place was taken learns it here, and stops. Then launch and wait.
5. As the owner again, read the output and free the memory. (The lease is SESSION_EXCLUSIVE: one connection at a time,
   so owner and grant take turns, and nobody else can be in between.)
6. Write down what came of it, free the lease, answer.

Until the launch, any failure gives the reservation back: nothing was done, and the request may be tried again. From
then on a failure is the outcome, and is told to whoever asks again. If this process dies, the daemon ends the lease at
its deadline; the claim runs out CLAIM_MARGIN_S after that, so whoever takes the request over finds that nothing of the
earlier attempt can still be running.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, Protocol

from gpulease.client.engine.tokens import Grant
from gpulease.client.errors import Denied, GpuLeaseError, LeaseExpired
from gpulease.client.handles import Module
from gpulease.client.kernel_args import KernelArgs
from gpulease.client.serve.gateway.errors import (
    CapabilityRefused,
    GatewayError,
    OperationFailed,
    OperationInProgress,
    OutcomeUnknown,
)
from gpulease.client.serve.gateway.ledger import Completed, InFlight, Reservation, Unknown
from gpulease.client.serve.gateway.settings import (
    InferenceKernel,
    InferenceRequest,
    InferenceResponse,
    failure_to_outcome,
    outcome_to_response,
    response_to_outcome,
)
from gpulease.client.serve.gateway.store import ReplicatedIdempotencyStore
from gpulease.client.sync.lease import GpuBuilder, GpuLease, inspect_token
from gpulease.client.sync.session import GpuSession
from gpulease.protocol import Exclusivity
from gpulease.protocol.capabilities import Permission, names_of

SUBMISSION: Final = Permission.LEASE_QUERY | Permission.TASKLET_SUBMIT
"""What a request's grant permits: exactly this. Whoever has it can load and launch, and neither read the lease's
memory through the session nor renew, free or revoke the lease."""

MAX_TOKEN_S: Final = 300.0
"""Longest life of a token, by the protocol."""


class Authority(Protocol):
    """Issues grants and says what they are worth."""

    def issue(self, lease: GpuLease, audience: bytes | None, ttl_s: float, nonce: int) -> Grant:
        """A grant of SUBMISSION on a lease."""
        ...

    def check(self, grant: Grant, lease: GpuLease, now_unix_s: float) -> None:
        """Raises CapabilityRefused unless this program may submit to the lease by it, and do nothing else."""
        ...


class NodeAuthority:
    """The lease's own node. It signs the grant, and its word on it is asked for anew before anything is done."""

    def issue(self, lease: GpuLease, audience: bytes | None, ttl_s: float, nonce: int) -> Grant:
        """See Authority."""
        return lease.issue(SUBMISSION, audience, min(ttl_s, MAX_TOKEN_S), nonce)

    def check(self, grant: Grant, lease: GpuLease, now_unix_s: float) -> None:
        """See Authority."""
        try:
            held = inspect_token(grant, lease.address)
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
    """What serving a request needs.

    Attributes:
        store: Where requests are reserved and completed.
        wait_s: How long to wait in the daemon's line for a lease.
        join_s: How long to wait for another attempt at the same request.
    """

    store: ReplicatedIdempotencyStore
    wait_s: float
    join_s: float

    def monotonic_s(self) -> float:
        """The time, for waits."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...

    def acquire(self, min_vram_bytes: int, ttl_s: float) -> GpuLease:
        """A lease of its own, SESSION_EXCLUSIVE. Raises CapacityExceeded if there is no room in time."""
        ...

    def open(self, lease: GpuLease) -> GpuSession:
        """The lease's session, as its owner."""
        ...

    def attach(self, grant: Grant, lease: GpuLease) -> GpuSession:
        """The same by a grant: what it does not permit is refused by the session's worker."""
        ...


COPYING: Final = Permission.MEM_READ | Permission.MEM_WRITE
"""What the owner's own sessions need, where a token is demanded of them: they copy in and out, and launch nothing."""


class DaemonEffects:
    """The real ones: a store, and the daemon at `address` (None: the one `GpuBuilder` finds).

    With `by_token` the owner's own sessions are opened by a grant of COPYING that it issues to itself, a new one for
    each, because a token opens one session: for daemons with `require_token = ["attach"]`.
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
        """See Effects."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """See Effects."""
        time.sleep(seconds)

    def acquire(self, min_vram_bytes: int, ttl_s: float) -> GpuLease:
        """See Effects."""
        wish = GpuBuilder(self._address).min_vram(min_vram_bytes).lease_secs(ttl_s).timeout(self.wait_s)
        return wish.exclusivity(Exclusivity.SESSION_EXCLUSIVE).acquire()

    def open(self, lease: GpuLease) -> GpuSession:
        """See Effects."""
        if self._by_token:
            return GpuSession.attach(lease.issue(COPYING, ttl_secs=MAX_TOKEN_S), lease.address)
        return GpuSession(lease)

    def attach(self, grant: Grant, lease: GpuLease) -> GpuSession:
        """See Effects."""
        return GpuSession.attach(grant, lease.address)


CLAIM_MARGIN_S: Final = 15.0
"""How long after the end of its lease an attempt may still take to write down what came of it."""

END_MARGIN_S: Final = 0.5
"""How long before its lease a grant may end for the lease to be its reason: the two clocks' steps, and a slow host."""

_JOIN_PAUSE_S: Final = 0.02
_LONGEST_JOIN_PAUSE_S: Final = 0.25


def serve_inference_request(
    effects: Effects,
    authority: Authority,
    request: InferenceRequest,
    module_bytes: bytes,
    kernel: InferenceKernel,
) -> InferenceResponse:
    """Do the request once, or tell what came of it when it was done.

    Raises:
        InvalidRequest: It makes no sense, or its input or output is too large.
        OperationConflict: Its id stands for another operation.
        OperationInProgress: Another attempt at it has not ended within `effects.join_s`.
        CapabilityRefused: The grant does not permit it. Nothing was done on the card.
        OperationFailed: It was attempted and failed, now or earlier. It is not done again.
        OutcomeUnknown: The same, and nobody knows whether it was done.
        StaleEpoch: This attempt was taken for dead, and another has its place.
        StoreUnavailable: The store does not answer.
        CapacityExceeded, LoadFailed and other GpuLeaseErrors: Nothing was launched; it may be tried again.
    """
    request.check()
    held = _reserve(effects, request)
    if isinstance(held, InferenceResponse):
        return held
    try:
        lease = effects.acquire(request.min_vram, request.lease_ttl_secs)
        try:
            return _on_lease(effects, authority, request, module_bytes, kernel, held, lease)
        finally:
            # What came of it is known already, and the daemon takes the lease back at its deadline anyway.
            with suppress(GpuLeaseError), lease:
                pass
    except BaseException:
        # Refused once the effect may have begun. Where the store is away, the claim runs out by itself.
        with suppress(GatewayError):
            effects.store.release(held)
        raise


def _reserve(effects: Effects, request: InferenceRequest) -> Reservation | InferenceResponse:
    key, operation = request.key(), request.operation()
    claim_ttl_s = effects.wait_s + request.lease_ttl_secs + CLAIM_MARGIN_S
    until = effects.monotonic_s() + effects.join_s
    pause_s = _JOIN_PAUSE_S
    while True:
        match effects.store.reserve(key, operation, claim_ttl_s):
            case Reservation() as held:
                return held
            case Completed(outcome=outcome):
                return outcome_to_response(request.request_id, outcome)
            case Unknown():
                raise OutcomeUnknown(f"{key}: an attempt at it ended after it may have been done: unknown, not retried")
            case InFlight(remaining_s=remaining_s):
                left_s = until - effects.monotonic_s()
                if left_s <= 0:
                    raise OperationInProgress(f"{key}: another attempt is at it", remaining_s)
                effects.sleep(min(pause_s, left_s))
                pause_s = min(2 * pause_s, _LONGEST_JOIN_PAUSE_S)


def _on_lease(
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
        output = _copy_out(effects, request, kernel, lease, into, out_of)
        return _complete(effects, request, held, lease, grant, output)


def _input_bytes(request: InferenceRequest, kernel: InferenceKernel) -> int:
    """How large the input's memory is; a kernel is given an address for an empty input, too."""
    return max(1, len(request.input), request.output_len if kernel.is_in_place else 0)


def _copy_in(effects: Effects, request: InferenceRequest, kernel: InferenceKernel, lease: GpuLease) -> tuple[int, int]:
    """Device addresses of the input, and of the output, which is zero, or the input's own."""
    with effects.open(lease) as owner:
        into = owner.mem_alloc(_input_bytes(request, kernel))
        out_of = into if kernel.is_in_place else owner.mem_alloc(request.output_len)
        if request.input:
            owner.mem_write(into, 0, request.input)
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
        guest.module_unload(module)
    except Denied as error:
        # The grant ends with its lease, and which of the two is noticed first is chance.
        if lease.remaining_s > END_MARGIN_S:
            raise
        raise LeaseExpired(f"the lease ended, and with it the grant, before the kernel did: {error.message}") from error


def _copy_out(
    effects: Effects, request: InferenceRequest, kernel: InferenceKernel, lease: GpuLease, into: int, out_of: int
) -> bytes:
    with effects.open(lease) as owner:
        result = owner.buffer(out_of, request.output_len)
        output = bytes(owner.mem_read(result, 0, request.output_len))
        if not kernel.is_in_place:
            owner.mem_free(result)
        owner.mem_free(owner.buffer(into, _input_bytes(request, kernel)))
        owner.sync()
        return output


def _complete(
    effects: Effects, request: InferenceRequest, held: Reservation, lease: GpuLease, grant: Grant, output: bytes
) -> InferenceResponse:
    response = InferenceResponse(request.request_id, lease.lease_id, grant.expires_at_unix_secs, output)
    effects.store.complete(held, response_to_outcome(response))
    return response


@contextmanager
def _recorded_on_failure(effects: Effects, held: Reservation) -> Iterator[None]:
    """From the launch on, how an attempt failed is its outcome. What the store itself says of it is not."""
    try:
        yield
    except GatewayError:
        raise
    except GpuLeaseError as error:
        effects.store.complete(held, failure_to_outcome(error))
        raise OperationFailed(str(error), type(error).__name__) from error
