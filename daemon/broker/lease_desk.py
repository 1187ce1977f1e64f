"""Leases of whoever asks: LEASE_ALLOC, LEASE_RENEW and LEASE_FREE, of one control connection."""

import secrets
import time

from gpulease.daemon.broker.caller import Caller
from gpulease.daemon.broker.denials import failure_of
from gpulease.daemon.broker.parameters import (
    exclusivity_of,
    max_kernel_ms_of,
    orphan_ms_of,
    submit_bytes_of,
    waiting_of,
)
from gpulease.daemon.broker.refusal import Refusal
from gpulease.daemon.broker.reports import expires_at_unix_s, remaining_ms
from gpulease.daemon.capabilities.demands import Demand
from gpulease.daemon.core import (
    AcquireRequested,
    Freed,
    FreeRequested,
    Granted,
    GuestAttached,
    Outcome,
    Renewed,
    RenewRequested,
    RequesterGone,
)
from gpulease.protocol import messages
from gpulease.protocol.capabilities import NODE_LEASE, Permission
from gpulease.protocol.connection import Request
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import GPU_RESOURCE_TYPE, Status


class LeaseDesk:
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
        exclusivity = exclusivity_of(body.parameters)
        max_kernel_ms = max_kernel_ms_of(body.parameters)
        waiting, submit_bytes = waiting_of(body.parameters), submit_bytes_of(body.parameters)
        orphan_ms = orphan_ms_of(body.parameters)

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
                size_bytes=body.size_bytes,
                ttl_ms=body.ttl_ms,
                exclusivity=exclusivity,
                selector=body.device,
                wait_ms=body.wait_ms,
                max_kernel_ms=max_kernel_ms,
                waiting=waiting,
                submit_bytes=submit_bytes,
                orphan_ms=orphan_ms,
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
