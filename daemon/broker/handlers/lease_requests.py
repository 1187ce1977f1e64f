"""LEASE_ALLOC, LEASE_RENEW, LEASE_FREE and LEASE_NOTE: tenants' requests about their leases and regions.

A client that repeats the request id of an open acquire takes the acquire over: the later connection gets the answer,
and nothing is requested twice. An acquire is open until its grant is durable, even if its client has disconnected by
then. If the grant was answered, by this daemon or an earlier one, the client gets the lease again.
"""

import secrets
import time
from collections.abc import Mapping
from dataclasses import replace

from gpulease.daemon.broker.caller import Caller, unix_s_after
from gpulease.daemon.broker.runtime import Result
from gpulease.daemon.capabilities.claims import Demand
from gpulease.daemon.leases import events
from gpulease.daemon.leases.denials import Denial, not_found
from gpulease.daemon.leases.model import LeaseSnapshot, LeaseTerms
from gpulease.daemon.leases.quotas import remaining_ms
from gpulease.protocol import messages
from gpulease.protocol.capabilities import NODE_LEASE
from gpulease.protocol.connection import Request
from gpulease.protocol.failures import Failure, Refused
from gpulease.protocol.lease_options import LABELS, read_options
from gpulease.protocol.opcodes import GPU_RESOURCE_TYPE, Opcode, Status
from gpulease.protocol.operations import SPECS
from gpulease.protocol.time_units import NS_PER_US


class LeaseHandler:
    """Serves one caller's requests about its leases. Every method may raise Refused."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._runtime = caller.runtime
        self._peer = caller.peer
        self._tokens = caller.tokens
        self._open_acquires: dict[int, Request] = {}

    def leave(self) -> None:
        """Abandon the acquires that wait, because the client has disconnected."""
        open_acquires, self._open_acquires = self._open_acquires, {}
        for number in open_acquires:
            self._runtime.abandon(number)

    def give_up(self, failure: Failure) -> None:
        """Answer all acquires with a failure; they stay open until `leave`."""
        for request in self._open_acquires.values():
            self._caller.answer(request, failure)

    def lease_alloc(self, request: Request, body: messages.LeaseAlloc) -> None:
        if body.resource_type != GPU_RESOURCE_TYPE:
            raise Refused(
                Failure(
                    Status.UNSUPPORTED,
                    f"resource type {body.resource_type:#06x} is not leased here",
                    hint=f"GPUs are resource type {GPU_RESOURCE_TYPE:#06x}.",
                )
            )
        self._tokens.check_demand(Demand.ALLOC, NODE_LEASE, SPECS[request.op].needs.permissions)
        event = self._acquire_event(body)
        number = 0

        def on_answer(answer: Result) -> None:
            self._open_acquires.pop(number, None)
            if isinstance(answer, events.Granted):
                self._answer_granted(request, answer.lease)
            else:
                self._caller.answer_denied(request, answer)

        # Look for the request id before anything is refused: a client that asks again takes a refusal to mean that no
        # lease has its request id.
        key = (event.tenant, event.terms.request_id) if event.terms.request_id else None
        if key is not None:
            if number := self._runtime.take_over(key, on_answer):
                self._open_acquires[number] = request
                return
            if (lease := self._runtime.table.lease_of_request(*key)) is not None:
                # The acquire was answered, so the journal and the audit log have the grant.
                self._answer_granted(request, lease)
                return
        self._check_alloc(body)
        # Register the acquire under its request id before it is posted: the client may ask again on another connection.
        number = self._runtime.expect(on_answer, key)
        self._open_acquires[number] = request
        event = replace(event, request=number)
        # Only an acquire with a claim makes the fleet write; all others go straight to the table.
        if event.terms.name or self._runtime.table.counts_in_fleet(event.tenant):
            self._runtime.claimed_acquires.begin(event)
        else:
            self._runtime.post(event)

    def _check_alloc(self, body: messages.LeaseAlloc) -> None:
        """Raise Refused if the node grants nothing now, or lacks a label that the request asks for."""
        self._caller.need_memory()
        if (denial := self._runtime.journal.denial() or self._runtime.recorder.denial()) is not None:
            raise Refused(denial.failure)
        claims = self._runtime.claims
        if claims is not None and (refusal := claims.refusal()) is not None:
            raise Refused(refusal)
        # Only a node of a fleet has labels.
        check_labels(LABELS.read(body.parameters), {} if claims is None else claims.labels)

    def lease_renew(self, request: Request, body: messages.LeaseRenew) -> None:
        """Serve LEASE_RENEW: of a lease by its tenant, of a region by its tenant or its lease's tenant.

        Operators may renew both, and so may the bearer of a token of the lease that permits it.
        """

        def on_outcome(outcome: Result) -> None:
            if not isinstance(outcome, events.Renewed):
                self._caller.answer_denied(request, outcome)
                return
            self._caller.hold(outcome.lease.lease_id)
            lease = outcome.lease
            left_ms = remaining_ms(lease, time.monotonic_ns(), self._runtime.table.drain_ns_of(lease.card_uuid))
            self._caller.answer(request, messages.LeaseRenewed(lease.generation, left_ms, unix_s_after(left_ms)))

        lease_id, permission = body.lease_id, SPECS[request.op].needs.permissions
        region = self._runtime.table.get(lease_id)
        if region is not None and region.parent_id and not self._tokens.permits(lease_id, permission):
            # A token that permits renewing the region's lease, or opening regions in it, is enough.
            lease_id, permission = region.parent_id, permission | SPECS[Opcode.REGION_OPEN].needs.permissions
        self._tokens.check_demand(Demand.RENEW, lease_id, permission)
        tenant = self._tokens.acting_tenant(lease_id, permission)
        # A renewal that the journal can't keep would be lost in a restart, so it is refused before it happens.
        if (denial := self._runtime.journal.denial()) is not None:
            raise Refused(denial.failure)
        number = self._caller.expect(on_outcome)
        self._runtime.post(events.RenewRequested(number, body.lease_id, tenant, body.ttl_ms, self._peer.is_operator))

    def lease_free(self, request: Request, body: messages.LeaseRef) -> None:
        def on_outcome(outcome: Result) -> None:
            if isinstance(outcome, events.FreeDone):
                self._caller.answer(request, messages.Empty())
            else:
                self._caller.answer_denied(request, outcome)

        tenant = self._tokens.acting_tenant(body.lease_id, SPECS[request.op].needs.permissions)
        if tenant != self._peer.tenant:
            # The peer is the bearer of a token. Only the tenant itself can promise that its session holds nothing more.
            self._runtime.post(events.GuestAttached(body.lease_id))
        number = self._caller.expect(on_outcome)
        self._runtime.post(events.FreeRequested(number, body.lease_id, tenant, self._peer.is_operator))

    def lease_park(self, request: Request, body: messages.LeaseRef) -> None:
        """Serve LEASE_PARK of the tenant, an operator, or the bearer of a token that may free the lease."""

        def on_outcome(outcome: Result) -> None:
            if isinstance(outcome, events.SessionParkDone):
                self._caller.answer(request, messages.ParkedSession(outcome.lease.lease_id, outcome.moved_bytes))
            else:
                self._caller.answer_denied(request, outcome)

        tenant = self._tokens.acting_tenant(body.lease_id, SPECS[request.op].needs.permissions)
        number = self._caller.expect(on_outcome)
        self._runtime.post(events.ParkRequested(number, body.lease_id, tenant, self._peer.is_operator))

    def lease_move(self, request: Request, body: messages.LeaseMove) -> None:
        """Serve LEASE_MOVE; whoever may send LEASE_PARK may send it."""

        def on_outcome(outcome: Result) -> None:
            if isinstance(outcome, events.SessionMoved):
                lease, took_us = outcome.lease, outcome.took_ns // NS_PER_US
                reply = messages.MovedSession(lease.lease_id, lease.card_uuid, outcome.moved_bytes, took_us)
                self._caller.answer(request, reply)
            else:
                self._caller.answer_denied(request, outcome)

        tenant = self._tokens.acting_tenant(body.lease_id, SPECS[request.op].needs.permissions)
        number = self._caller.expect(on_outcome)
        from_version = self._runtime.workers.earlier_version(body.lease_id)
        self._runtime.post(
            events.MoveRequested(number, body.lease_id, tenant, body.device, self._peer.is_operator, from_version)
        )

    def lease_note(self, request: Request, body: messages.LeaseNote) -> None:
        """Serve LEASE_NOTE, for a lease from its tenant, for a region also from the tenant of its lease."""

        def on_noted(denial: Denial | None) -> None:
            self._caller.answer(request, messages.Empty() if denial is None else denial.failure)

        table = self._runtime.table
        denial = table.denial_for(body.lease_id, time.monotonic_ns())
        if table.get(body.lease_id) is None or self._peer.tenant not in table.tenants_with_access(body.lease_id):
            denial = not_found(body.lease_id)
        if denial is not None:
            raise Refused(denial.failure)
        self._runtime.recorder.note(body.lease_id, self._peer.tenant, body.note, on_noted)

    def _acquire_event(self, body: messages.LeaseAlloc) -> events.AcquireRequested:
        """Return the event of an acquire; its request number and the epoch of its name are filled in later."""
        terms = LeaseTerms(body.size_bytes, body.ttl_ms, **read_options(body.parameters))
        return events.AcquireRequested(
            request=0,
            tenant=self._peer.tenant,
            lease_id=secrets.randbits(128) or 1,
            terms=terms,
            selector=body.device,
            wait_ms=body.wait_ms,
        )

    def _answer_granted(self, request: Request, lease: LeaseSnapshot) -> None:
        if not self._caller.connection.is_open:
            # The client has not received this lease's id, so it would hold its bytes unused until it expires.
            self._runtime.post(events.FreeRequested(0, lease.lease_id, lease.tenant))
            return
        # From here on the lease counts as connected by this connection.
        self._caller.note_acquired(lease.lease_id)
        self._caller.hold(lease.lease_id)
        left_ms = remaining_ms(lease, time.monotonic_ns())
        grant = messages.LeaseGrant(
            lease_id=lease.lease_id,
            generation=lease.generation,
            size_bytes=lease.size_bytes,
            ttl_ms=left_ms,
            expires_at_unix_s=unix_s_after(left_ms),
            exclusivity=int(lease.exclusivity),
            card_uuid=lease.card_uuid,
        )
        self._caller.answer(request, grant)


def check_labels(required: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Raise Refused if the node lacks a label that a lease asks for."""
    for key, value in required.items():
        if own.get(key) != value:
            has = f"it has {key}={own[key]}" if key in own else "it has no such label"
            hint = "Ask a directory of the fleet for nodes with that label, or leave the label out."
            raise Refused(
                Failure(Status.UNSUPPORTED, f"this node does not have the label {key}={value}: {has}", hint=hint)
            )
