"""REGION_OPEN, REGION_CANCEL and LEASE_RESIZE: requests about a running lease's memory.

LEASE_RENEW, LEASE_FREE, LEASE_REVOKE, LEASE_QUERY and LEASE_SUBSCRIBE accept a region's id like a lease's.
"""

import secrets
import time

from gpulease.daemon.broker.caller import Caller, unix_s_after
from gpulease.daemon.broker.runtime import Result
from gpulease.daemon.capabilities.claims import Demand
from gpulease.daemon.contract.regions_page import REGION_GRANULE_BYTES
from gpulease.daemon.leases.events import (
    FreeRequested,
    RegionCancelRequested,
    RegionCancelSet,
    RegionGranted,
    RegionRequested,
    Resized,
    ResizeRequested,
)
from gpulease.daemon.leases.quotas import remaining_ms
from gpulease.daemon.record.audit.records import clean_text
from gpulease.protocol import messages
from gpulease.protocol.capabilities import NODE_LEASE
from gpulease.protocol.connection import Request
from gpulease.protocol.failures import Failure, Refused
from gpulease.protocol.opcodes import Status
from gpulease.protocol.operations import SPECS


class RegionHandler:
    """Serves one caller's requests about regions and the sizes of leases. Every method may raise Refused."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._runtime = caller.runtime
        self._peer = caller.peer
        self._tokens = caller.tokens

    def region_open(self, request: Request, body: messages.RegionOpen) -> None:
        """Serve REGION_OPEN of the lease's tenant, an operator, or a peer with a token that permits it."""

        def on_outcome(outcome: Result) -> None:
            if isinstance(outcome, RegionGranted):
                self._answer_granted(request, outcome)
            else:
                self._caller.answer_denied(request, outcome)

        # The name goes to logs and terminals, so it must survive cleaning unchanged.
        if body.tenant != clean_text(body.tenant):
            raise Refused(
                Failure(
                    Status.INVALID_REQUEST,
                    "the region's tenant must be the name of a tenant, without control characters",
                )
            )
        # A grant that can't be recorded would be revoked before its client receives it.
        if (denial := self._runtime.journal.denial() or self._runtime.recorder.denial()) is not None:
            raise Refused(denial.failure)
        # With a token, the region is requested in the name of the lease's tenant. Its owner is the peer, unless the
        # request names another tenant.
        tenant = self._tokens.acting_tenant(body.lease_id, SPECS[request.op].needs.permissions)
        owner = body.tenant or self._peer.tenant
        number = self._caller.expect(on_outcome)
        self._runtime.post(
            RegionRequested(
                number,
                body.lease_id,
                # The region's id is random and never 0, which means "none".
                secrets.randbits(128) or 1,
                tenant,
                owner,
                body.size_bytes,
                body.ttl_ms,
                REGION_GRANULE_BYTES,
                self._peer.is_operator,
            )
        )

    def region_cancel(self, request: Request, body: messages.RegionCancel) -> None:
        """Serve REGION_CANCEL of the tenant of the region or of its lease, an operator, or a token's bearer."""

        def on_outcome(outcome: Result) -> None:
            if isinstance(outcome, RegionCancelSet):
                self._caller.answer(request, messages.Empty())
            else:
                self._caller.answer_denied(request, outcome)

        if body.is_cancelled not in (0, 1):
            raise Refused(
                Failure(Status.INVALID_REQUEST, "is_cancelled must be 1 to cancel the region or 0 to resume it")
            )
        permission = SPECS[request.op].needs.permissions
        tenant = self._tokens.acting_tenant(body.lease_id, permission)
        # A token for the region's lease is as good as one for the region.
        region = self._runtime.table.get(body.lease_id)
        if tenant == self._peer.tenant and region is not None and region.parent_id:
            tenant = self._tokens.acting_tenant(region.parent_id, permission)
        number = self._caller.expect(on_outcome)
        event = RegionCancelRequested(number, body.lease_id, tenant, bool(body.is_cancelled), self._peer.is_operator)
        self._runtime.post(event)

    def lease_resize(self, request: Request, body: messages.LeaseResize) -> None:
        """Serve LEASE_RESIZE of the tenant or an operator. More memory needs the same permission as a new lease."""

        def on_outcome(outcome: Result) -> None:
            if isinstance(outcome, Resized):
                self._caller.answer(request, messages.LeaseResize(outcome.lease.lease_id, outcome.lease.size_bytes))
            else:
                self._caller.answer_denied(request, outcome)

        lease = self._runtime.table.get(body.lease_id)
        # To grow a lease, the peer needs the permission to acquire one; a lease may be reduced at any time.
        if lease is None or body.size_bytes > lease.size_bytes:
            self._tokens.check_demand(Demand.ALLOC, NODE_LEASE, SPECS[request.op].needs.permissions)
            if (denial := self._runtime.journal.denial() or self._runtime.recorder.denial()) is not None:
                raise Refused(denial.failure)
        number = self._caller.expect(on_outcome)
        event = ResizeRequested(number, body.lease_id, self._peer.tenant, body.size_bytes, self._peer.is_operator)
        self._runtime.post(event)

    def _answer_granted(self, request: Request, granted: RegionGranted) -> None:
        region = granted.lease
        # The client has not received this region's id, so it would hold its bytes unused until it expires.
        if not self._caller.connection.is_open:
            self._runtime.post(FreeRequested(0, region.lease_id, region.tenant))
            return
        self._caller.note_acquired(region.lease_id)
        left_ms = remaining_ms(region, time.monotonic_ns(), self._runtime.table.drain_ns_of(region.card_uuid))
        grant = messages.RegionGrant(
            lease_id=region.lease_id,
            generation=region.generation,
            size_bytes=region.size_bytes,
            ttl_ms=left_ms,
            expires_at_unix_s=unix_s_after(left_ms),
            address=granted.address,
            slot=granted.slot,
            number=granted.number,
        )
        self._caller.answer(request, grant)
