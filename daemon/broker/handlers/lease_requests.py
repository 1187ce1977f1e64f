"""Submits as one control connection asks for them.

What a request says in its options and parameters, checked.

Leases of whoever asks: LEASE_ALLOC, LEASE_RENEW and LEASE_FREE, of one control connection.
"""

import secrets
import time
from collections.abc import Callable
from typing import Final

from gpulease.daemon.broker.caller import Caller
from gpulease.daemon.broker.handlers.query_requests import expires_at_unix_s, remaining_ms
from gpulease.daemon.broker.refusal import Refusal, failure_of
from gpulease.daemon.capabilities.claims import Demand
from gpulease.daemon.leases import (
    AcquireRequested,
    Denied,
    Freed,
    FreeRequested,
    Granted,
    GuestAttached,
    LeaseTerms,
    Outcome,
    Renewed,
    RenewRequested,
    RequesterGone,
    SubmitReady,
    SubmitRequested,
)
from gpulease.protocol import messages
from gpulease.protocol.capabilities import NODE_LEASE, AttachOption, Permission
from gpulease.protocol.connection import Request
from gpulease.protocol.failures import Failure
from gpulease.protocol.messages import GpuSubmit
from gpulease.protocol.opcodes import (
    EXCLUSIVITY_TAG,
    GPU_RESOURCE_TYPE,
    MAX_KERNEL_TAG,
    ORPHAN_TAG,
    SUBMIT_TAG,
    WAITING_TAG,
    Exclusivity,
    Status,
    Waiting,
)
from gpulease.protocol.primitives import LeaseParameter, Tlv


class SubmitHandler:
    """Takes GPU_SUBMIT; that this peer may ask was looked at before."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._runtime = caller.runtime
        self._open: dict[int, Request] = {}

    def ask(self, request: Request, on_ready: Callable[[SubmitReady | Failure], None]) -> None:
        """Have a submit made; told is which, or why not. Raises Refusal."""
        timeout_ms = request.body.timeout_ms if isinstance(request.body, GpuSubmit) else 0

        def on_outcome(outcome: Outcome) -> None:
            self._open.pop(number, None)
            if isinstance(outcome, SubmitReady):
                on_ready(outcome)
            elif isinstance(outcome, Denied):
                on_ready(failure_of(outcome.denial))

        if not self._runtime.headroom.is_enough():
            hint = "Leases go on, and can be renewed and freed: try again later."
            raise Refusal(Failure(Status.BUSY, "the daemon is out of memory", hint=hint))
        # Refused or not: whoever asks is alive.
        self._caller.hold(request.session_id)
        lease = self._runtime.table.get(request.session_id)
        number = self._caller.expect(on_outcome)
        self._open[number] = request
        # Whoever bears a token asks in the name of the lease's tenant.
        tenant = "" if lease is None else lease.tenant
        self._runtime.post(SubmitRequested(number, request.session_id, tenant, timeout_ms))

    def leave(self) -> None:
        """The client is gone: what it waits for is given up."""
        for number in list(self._open):
            self._runtime.post(RequesterGone(number))
            self._runtime.forget(number)
        self._open.clear()

    def give_up(self, failure: Failure) -> None:
        """What the client waits for will not come: tell it so."""
        for request in self._open.values():
            self._caller.answer(request, failure)


MAX_KERNEL_BYTES: Final = 4
"""Of the parameter's u32."""

SUBMIT_BYTES: Final = 8
"""Of the parameter's u64."""

ORPHAN_BYTES: Final = 4
"""Of the parameter's u32."""

_CLASSES: Final = {int(member): member for member in Exclusivity}


def token_of(options: tuple[Tlv, ...]) -> bytes | None:
    """The token among ATTACH's or GPU_SUBMIT's options, None if there is none. Raises Refusal if there are several."""
    values = [option.value for option in options if option.type == AttachOption.TOKEN]
    if len(values) > 1:
        raise Refusal(Failure(Status.INVALID_REQUEST, "one token at most is carried"))
    return values[0] if values else None


def exclusivity_of(parameters: tuple[LeaseParameter, ...]) -> Exclusivity:
    """The exclusivity class among a request's lease parameters, SESSION_EXCLUSIVE if there is none.

    Raises Refusal for classes that are unknown (4-254) or never valid (255), or if it is given twice.
    """
    values = [parameter.value for parameter in parameters if parameter.tag == EXCLUSIVITY_TAG]
    if not values:
        return Exclusivity.SESSION_EXCLUSIVE
    if len(values) > 1 or len(values[0]) != 1:
        raise Refusal(Failure(Status.INVALID_REQUEST, "the exclusivity class is one byte, given once"))
    number = values[0][0]
    if number == 255:
        raise Refusal(Failure(Status.INVALID_REQUEST, "exclusivity class 255 is never valid"))
    if number not in _CLASSES:
        raise Refusal(
            Failure(Status.UNSUPPORTED, f"exclusivity class {number} is not known here", hint="Use 0, 1 or 2.")
        )
    return _CLASSES[number]


def max_kernel_ms_of(parameters: tuple[LeaseParameter, ...]) -> int:
    """How long one kernel may run, 0 for no bound but the lease's own. Raises Refusal if it makes no sense."""
    values = [parameter.value for parameter in parameters if parameter.tag == MAX_KERNEL_TAG]
    if not values:
        return 0
    if len(values) > 1 or len(values[0]) != MAX_KERNEL_BYTES or not any(values[0]):
        raise Refusal(
            Failure(Status.INVALID_REQUEST, "a kernel's longest time is a u32 of milliseconds, at least 1, given once")
        )
    return int.from_bytes(values[0], "big")


def submit_bytes_of(parameters: tuple[LeaseParameter, ...]) -> int:
    """How much of the lease is for submits, 0 if nothing is. Raises Refusal if it makes no sense."""
    values = [parameter.value for parameter in parameters if parameter.tag == SUBMIT_TAG]
    if not values:
        return 0
    if len(values) > 1 or len(values[0]) != SUBMIT_BYTES or not any(values[0]):
        raise Refusal(
            Failure(Status.INVALID_REQUEST, "what is kept for submits is a u64 of bytes, at least 1, given once")
        )
    return int.from_bytes(values[0], "big")


def orphan_ms_of(parameters: tuple[LeaseParameter, ...]) -> int | None:
    """How long the lease may be without a connection, 0 for as long as it lasts; None if its tenant does not say.

    Raises Refusal if it makes no sense.
    """
    values = [parameter.value for parameter in parameters if parameter.tag == ORPHAN_TAG]
    if not values:
        return None
    if len(values) > 1 or len(values[0]) != ORPHAN_BYTES:
        why = "how long a lease may be without a connection is a u32 of milliseconds, given once"
        raise Refusal(Failure(Status.INVALID_REQUEST, why))
    return int.from_bytes(values[0], "big")


def waiting_of(parameters: tuple[LeaseParameter, ...]) -> Waiting | None:
    """How the session's ends wait, None if the tenant leaves it to the daemon. Raises Refusal if it makes no sense."""
    values = [parameter.value for parameter in parameters if parameter.tag == WAITING_TAG]
    if not values:
        return None
    if len(values) > 1 or len(values[0]) != 1:
        raise Refusal(Failure(Status.INVALID_REQUEST, "the way of waiting is one byte, given once"))
    try:
        return Waiting(values[0][0])
    except ValueError:
        known = ", ".join(f"{item.value} ({item.name.lower()})" for item in Waiting)
        failure = Failure(Status.UNSUPPORTED, f"way of waiting {values[0][0]} is not known here", hint=f"Use {known}.")
        raise Refusal(failure) from None


class LeaseHandler:
    """Takes these requests; each raises Refusal for what never gets to the lease table."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._runtime = caller.runtime
        self._peer = caller.peer
        self._tokens = caller.tokens
        self._open_acquires: dict[int, Request] = {}

    def leave(self) -> None:
        """The client is gone: what it waits for is given up."""
        for number in list(self._open_acquires):
            self._runtime.post(RequesterGone(number))
            self._runtime.forget(number)
        self._open_acquires.clear()

    def give_up(self, failure: Failure) -> None:
        """What the client waits for will not come: tell it so."""
        for request in self._open_acquires.values():
            self._caller.answer(request, failure)

    def alloc(self, request: Request, body: messages.LeaseAlloc) -> None:
        """LEASE_ALLOC."""
        if body.resource_type != GPU_RESOURCE_TYPE:
            raise Refusal(
                Failure(
                    Status.UNSUPPORTED,
                    f"resource type {body.resource_type:#06x} is not leased here",
                    hint=f"GPUs are resource type {GPU_RESOURCE_TYPE:#06x}.",
                )
            )
        self._tokens.check_demand(Demand.ALLOC, NODE_LEASE, Permission.LEASE_ALLOC)
        if (denial := self._runtime.journal.denial() or self._runtime.recorder.denial()) is not None:
            raise Refusal(failure_of(denial))
        terms = LeaseTerms(
            body.size_bytes,
            body.ttl_ms,
            exclusivity_of(body.parameters),
            max_kernel_ms_of(body.parameters),
            waiting_of(body.parameters),
            submit_bytes_of(body.parameters),
            orphan_ms_of(body.parameters),
        )

        def on_outcome(outcome: Outcome) -> None:
            self._open_acquires.pop(number, None)
            self._granted(request, outcome)

        number = self._runtime.expect(on_outcome)
        self._open_acquires[number] = request
        self._runtime.post(
            AcquireRequested(
                request=number,
                tenant=self._peer.tenant,
                lease_id=secrets.randbits(128) or 1,
                terms=terms,
                selector=body.device,
                wait_ms=body.wait_ms,
            )
        )

    def _granted(self, request: Request, outcome: Outcome) -> None:
        if not isinstance(outcome, Granted):
            self._caller.answer_denied(request, outcome)
            return
        lease = outcome.lease
        if not self._caller.answerer.is_open:
            # Nobody will ever know this lease's id: it would hold its bytes, unused, to the end of its time.
            self._runtime.post(FreeRequested(0, lease.lease_id, lease.tenant))
            return
        self._caller.acquired.add(lease.lease_id)
        self._caller.hold(lease.lease_id)
        now_ns = time.monotonic_ns()
        grant = messages.LeaseGrant(
            lease_id=lease.lease_id,
            generation=lease.generation,
            size_bytes=lease.size_bytes,
            ttl_ms=remaining_ms(lease, now_ns),
            expires_at_unix_s=expires_at_unix_s(lease, now_ns),
            exclusivity=int(lease.exclusivity),
            card_uuid=lease.card_uuid,
        )
        self._caller.answer(request, grant)

    def renew(self, request: Request, body: messages.LeaseRenew) -> None:
        """LEASE_RENEW."""

        def on_outcome(outcome: Outcome) -> None:
            if not isinstance(outcome, Renewed):
                self._caller.answer_denied(request, outcome)
                return
            self._caller.hold(outcome.lease.lease_id)
            now_ns = time.monotonic_ns()
            lease, drain_ns = outcome.lease, self._runtime.table.drain_ns
            renewed = messages.LeaseRenewed(
                lease.generation, remaining_ms(lease, now_ns, drain_ns), expires_at_unix_s(lease, now_ns, drain_ns)
            )
            self._caller.answer(request, renewed)

        self._tokens.check_demand(Demand.RENEW, body.lease_id, Permission.LEASE_RENEW)
        tenant = self._tokens.acting_tenant(body.lease_id, Permission.LEASE_RENEW)
        if (denial := self._runtime.journal.denial()) is not None:
            raise Refusal(failure_of(denial))
        number = self._caller.expect(on_outcome)
        self._runtime.post(RenewRequested(number, body.lease_id, tenant, body.ttl_ms, self._peer.is_operator))

    def free(self, request: Request, body: messages.LeaseRef) -> None:
        """LEASE_FREE."""

        def on_outcome(outcome: Outcome) -> None:
            if isinstance(outcome, Freed):
                self._caller.answer(request, messages.Empty())
            else:
                self._caller.answer_denied(request, outcome)

        tenant = self._tokens.acting_tenant(body.lease_id, Permission.LEASE_FREE)
        if tenant != self._peer.tenant:
            # Whoever bears a token: it is for the tenant itself to say that it is done.
            self._runtime.post(GuestAttached(body.lease_id))
        number = self._caller.expect(on_outcome)
        self._runtime.post(FreeRequested(number, body.lease_id, tenant, self._peer.is_operator))
