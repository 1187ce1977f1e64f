"""What each control operation means: a request in, an event for the lease table or a report out."""

import secrets
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from gpulease.daemon.audit.records import clean_text
from gpulease.daemon.broker.denials import failure_of
from gpulease.daemon.broker.drains import drain_left_ms, status_of
from gpulease.daemon.broker.node_desk import NodeDesk
from gpulease.daemon.broker.parameters import exclusivity_of, max_kernel_ms_of, token_of, waiting_of
from gpulease.daemon.broker.peers import Peer
from gpulease.daemon.broker.refusal import Refusal
from gpulease.daemon.broker.reports import expires_at_unix_s, inventory, lease_report, remaining_ms
from gpulease.daemon.broker.runtime import Runtime
from gpulease.daemon.broker.telling import EVERY_LEASE, TellingDesk, seen_by
from gpulease.daemon.broker.tokens import TokenDesk
from gpulease.daemon.capabilities.demands import Demand
from gpulease.daemon.core import (
    AcquireRequested,
    Denied,
    DrainCancelled,
    DrainRequested,
    DrainSet,
    Event,
    FenceCleared,
    FenceClearRequested,
    Freed,
    FreeRequested,
    Granted,
    LeaseSnapshot,
    Outcome,
    Renewed,
    RenewRequested,
    RequesterGone,
    RevokeDone,
    RevokeRequested,
)
from gpulease.daemon.core.denials import not_found
from gpulease.daemon.worker.guests import Guest
from gpulease.protocol import messages
from gpulease.protocol.capabilities import ALL_PERMISSIONS, NODE_LEASE, Permission
from gpulease.protocol.connection import Request
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import (
    GPU_RESOURCE_TYPE,
    Opcode,
    Status,
)

BEGINS_SOMETHING: Final = frozenset({Opcode.LEASE_ALLOC, Opcode.LEASE_SUBSCRIBE})
"""What the broker does not take on when it is out of memory: something that it has to keep, and that can wait."""

LOOKS: Final = frozenset(
    {
        Opcode.PING,
        Opcode.GET_INVENTORY,
        Opcode.LEASE_QUERY,
        Opcode.LEASE_LIST_ACTIVE,
        Opcode.LEASE_SUBSCRIBE,
        Opcode.LEASE_UNSUBSCRIBE,
        Opcode.METRICS,
        Opcode.HEALTH,
    }
)
"""What a peer may ask that may look and do nothing else."""


class Answerer(Protocol):
    """Where answers go: a control connection."""

    @property
    def peer(self) -> Peer:
        """Who asks."""

    def answer(self, request: Request, result: messages.Body | Failure) -> None:
        """Answer a request; does nothing once the connection is gone."""

    def tell(self, subscription: int, event: messages.LeaseEvent) -> bool:
        """Tell a subscriber something; whether there was room for it."""

    @property
    def is_open(self) -> bool:
        """Whether anybody is there to read an answer."""


class Desk:
    """Takes the control requests of one connection.

    Attributes:
        acquired: The leases granted on this connection.
    """

    def __init__(self, runtime: Runtime, answerer: Answerer, driver: str) -> None:
        self.acquired: set[int] = set()
        self._runtime = runtime
        self._answerer = answerer
        self._peer = answerer.peer
        self._driver = driver
        self._tokens = TokenDesk(runtime.tokens, self._peer)
        self._telling = TellingDesk(runtime.teller, self._peer.tenant, answerer.tell)
        self._node = NodeDesk(self._peer, runtime.metrics, runtime.health)
        self._open_acquires: dict[int, Request] = {}
        self._operations: dict[Opcode, Callable[[Request, Any], None]] = {
            Opcode.PING: lambda request, body: answerer.answer(request, body),
            Opcode.GET_INVENTORY: self._get_inventory,
            Opcode.LEASE_ALLOC: self._lease_alloc,
            Opcode.LEASE_RENEW: self._lease_renew,
            Opcode.LEASE_FREE: self._lease_free,
            Opcode.LEASE_QUERY: self._lease_query,
            Opcode.LEASE_LIST_ACTIVE: self._lease_list_active,
            Opcode.LEASE_SUBSCRIBE: self._lease_subscribe,
            Opcode.LEASE_UNSUBSCRIBE: self._lease_unsubscribe,
            Opcode.LEASE_REVOKE: self._lease_revoke,
            Opcode.FENCE_CLEAR: self._fence_clear,
            Opcode.DRAIN: lambda request, body: self._drain(request, lambda n: DrainRequested(n, body.within_ms)),
            Opcode.DRAIN_CANCEL: lambda request, _: self._drain(request, DrainCancelled),
            Opcode.METRICS: self._scrape,
            Opcode.HEALTH: lambda request, _: answerer.answer(request, self._node.health()),
            Opcode.CAPABILITY_ISSUE: lambda request, body: answerer.answer(
                request, self._tokens.issue(body, runtime.recorder)
            ),
            Opcode.CAPABILITY_PRESENT: lambda request, body: answerer.answer(request, self._tokens.present(body)),
            Opcode.CAPABILITY_REVOKE: self._capability_revoke,
            Opcode.CAPABILITY_AUDIENCE: lambda request, body: answerer.answer(request, self._tokens.audience()),
        }

    def take(self, request: Request) -> None:
        """Serve one request, now or when the table has an outcome."""
        try:
            self._check_reader(request.op)
            self._check_memory(request.op)
            self._operations[request.op](request, request.body)
        except Refusal as refusal:
            lease_id = getattr(request.body, "lease_id", 0)
            self._runtime.recorder.refused(request.op.name, self._peer.tenant, lease_id, refusal.failure.message)
            self._runtime.metrics.refused(request.op.name, refusal.failure.status)
            self._answerer.answer(request, refusal.failure)

    def _check_memory(self, op: Opcode) -> None:
        if op in BEGINS_SOMETHING and not self._runtime.headroom.is_enough():
            hint = "Leases go on, and can be renewed and freed: try again later."
            raise Refusal(Failure(Status.BUSY, "the daemon is out of memory", hint=hint))

    def _check_reader(self, op: Opcode) -> None:
        if self._peer.is_reader and op not in LOOKS:
            raise Refusal(Failure(Status.DENIED, f"{op.name} is not for {self._peer}, which may look and no more"))

    def leave(self) -> None:
        """The client is gone: what it waits for is given up."""
        for number in list(self._open_acquires):
            self._runtime.post(RequesterGone(number))
            self._runtime.forget(number)
        self._open_acquires.clear()
        self._telling.leave()

    def give_up(self, failure: Failure) -> None:
        """What the client waits for will not come: tell it so."""
        for request in self._open_acquires.values():
            self._answerer.answer(request, failure)
        self.leave()

    def check_attach(self, request: Request) -> Guest | None:
        """Raises Refusal unless this peer may attach to that lease's session now; what its connection is bound to."""
        self._check_reader(request.op)
        body = request.body
        token = token_of(body.options) if isinstance(body, messages.Attach) else None
        if token is None:
            self._check_own(request.session_id)
            return None
        return self._tokens.guest(request.session_id, token)

    def spend_token(self, on_done: Callable[[bool], None]) -> None:
        """Use up the token that the peer attaches with, if any; told is whether that is written down."""
        self._tokens.spend(self._runtime.journal, on_done)

    def attached(self, lease_id: int) -> None:
        """The connection was handed over."""
        self._tokens.attached()
        self._runtime.recorder.attached(lease_id, self._peer.tenant)

    def not_attached(self, lease_id: int) -> Failure:
        """The connection could not be handed over: what to say."""
        self._tokens.not_attached()
        denial = self._runtime.table.denial_for(lease_id, time.monotonic_ns())
        if denial is not None:
            return failure_of(denial)
        return Failure(Status.BUSY, "the session can't take another connection now", hint="Try again.")

    def _check_own(self, lease_id: int) -> None:
        lease = self._runtime.table.get(lease_id)
        if lease is not None and lease.tenant != self._peer.tenant:
            raise Refusal(failure_of(not_found(lease_id)))
        denial = self._runtime.table.denial_for(lease_id, time.monotonic_ns())
        if denial is not None:
            raise Refusal(failure_of(denial))
        self._tokens.check_attach_demand()

    # --- leases ---

    def _lease_alloc(self, request: Request, body: messages.LeaseAlloc) -> None:
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
        waiting = waiting_of(body.parameters)

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
            )
        )

    def _granted(self, request: Request, outcome: Outcome) -> None:
        if not isinstance(outcome, Granted):
            self._answer_denied(request, outcome)
            return
        lease = outcome.lease
        if not self._answerer.is_open:
            # Nobody will ever know this lease's id: it would hold its bytes, unused, to the end of its time.
            self._runtime.post(FreeRequested(0, lease.lease_id, lease.tenant))
            return
        self.acquired.add(lease.lease_id)
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
        self._answerer.answer(request, grant)

    def _lease_renew(self, request: Request, body: messages.LeaseRenew) -> None:
        def on_outcome(outcome: Outcome) -> None:
            if not isinstance(outcome, Renewed):
                self._answer_denied(request, outcome)
                return
            now_ns = time.monotonic_ns()
            lease, drain_ns = outcome.lease, self._runtime.table.drain_ns
            renewed = messages.LeaseRenewed(
                lease.generation, remaining_ms(lease, now_ns, drain_ns), expires_at_unix_s(lease, now_ns, drain_ns)
            )
            self._answerer.answer(request, renewed)

        self._tokens.check_demand(Demand.RENEW, body.lease_id, Permission.LEASE_RENEW)
        tenant = self._tokens.acting_tenant(body.lease_id, Permission.LEASE_RENEW)
        if (denial := self._runtime.journal.denial()) is not None:
            raise Refusal(failure_of(denial))
        number = self._runtime.expect(on_outcome)
        self._runtime.recorder.asked_by(number, self._peer.tenant)
        self._runtime.post(RenewRequested(number, body.lease_id, tenant, body.ttl_ms, self._peer.is_operator))

    def _lease_free(self, request: Request, body: messages.LeaseRef) -> None:
        def on_outcome(outcome: Outcome) -> None:
            if isinstance(outcome, Freed):
                self._answerer.answer(request, messages.Empty())
            else:
                self._answer_denied(request, outcome)

        tenant = self._tokens.acting_tenant(body.lease_id, Permission.LEASE_FREE)
        number = self._runtime.expect(on_outcome)
        self._runtime.recorder.asked_by(number, self._peer.tenant)
        self._runtime.post(FreeRequested(number, body.lease_id, tenant, self._peer.is_operator))

    def _lease_revoke(self, request: Request, body: messages.LeaseRevoke) -> None:
        if not self._tokens.may_revoke(body.lease_id):
            self._need_operator("LEASE_REVOKE")

        def on_outcome(outcome: Outcome) -> None:
            if isinstance(outcome, RevokeDone):
                self._answerer.answer(request, messages.LeaseRevoked(int(outcome.outcome)))
            else:
                self._answer_denied(request, outcome)

        number = self._runtime.expect(on_outcome)
        self._runtime.recorder.asked_by(number, self._peer.tenant)
        self._runtime.post(RevokeRequested(number, body.lease_id, clean_text(body.reason)))

    def _capability_revoke(self, request: Request, body: messages.CapabilityRevoke) -> None:
        lease_id, nonce = self._tokens.to_revoke(body)
        lease, page = self._runtime.table.get(lease_id), self._runtime.workers.page(lease_id)

        def on_done(is_kept: bool) -> None:
            why = "the token has ended, but that can't be written down now: a restart of the daemon may forget it"
            failure = Failure(Status.BUSY, why, hint="Ask again, or renew the lease, which ends all of its tokens.")
            self._answerer.answer(request, messages.Empty() if is_kept else failure)

        self._tokens.revoke(lease_id, nonce, page, self._runtime.journal, on_done)
        tenant = self._peer.tenant if lease is None else lease.tenant
        self._runtime.recorder.token_revoked(tenant, self._peer.tenant, lease_id, nonce)

    def _fence_clear(self, request: Request, body: messages.FenceClear) -> None:
        self._need_operator("FENCE_CLEAR")

        def on_outcome(outcome: Outcome) -> None:
            if isinstance(outcome, FenceCleared):
                self._answerer.answer(request, messages.FenceCleared(outcome.count))
            else:
                self._answer_denied(request, outcome)

        number = self._runtime.expect(on_outcome)
        self._runtime.recorder.asked_by(number, self._peer.tenant)
        self._runtime.post(FenceClearRequested(number, body.device))

    def _drain(self, request: Request, event_for: Callable[[int], Event]) -> None:
        self._need_operator(request.op.name)

        def on_outcome(outcome: Outcome) -> None:
            if isinstance(outcome, DrainSet):
                self._answerer.answer(request, status_of(outcome))

        number = self._runtime.expect(on_outcome)
        self._runtime.recorder.asked_by(number, self._peer.tenant)
        self._runtime.post(event_for(number))

    def _scrape(self, request: Request, body: messages.Empty) -> None:
        self._need_operator("METRICS")
        self._node.scrape(lambda result: self._answerer.answer(request, result))

    # --- reports ---

    def _get_inventory(self, request: Request, body: messages.Empty) -> None:
        table, sandbox = self._runtime.table, self._runtime.workers.findings()
        self._answerer.answer(request, inventory(table.cards(), self._driver, sandbox, drain_left_ms(table)))

    def _lease_query(self, request: Request, body: messages.LeaseRef) -> None:
        lease = self._runtime.table.get(body.lease_id)
        if lease is None:
            raise Refusal(failure_of(self._runtime.table.denial_for(body.lease_id, 0) or not_found(body.lease_id)))
        if not self._may_query(lease):
            raise Refusal(failure_of(not_found(body.lease_id)))
        self._answerer.answer(request, messages.Report(self._report(lease)))

    def _may_query(self, lease: LeaseSnapshot) -> bool:
        return self._peer.is_operator or lease.tenant == self._tokens.acting_tenant(lease.lease_id, ALL_PERMISSIONS)

    def _lease_subscribe(self, request: Request, body: messages.LeaseSubscribe) -> None:
        is_every = body.lease_id == EVERY_LEASE
        may_see = seen_by(self._may_see if is_every else self._may_query, self._runtime.table)
        if not is_every and not may_see(body.lease_id):
            raise Refusal(failure_of(not_found(body.lease_id)))
        self._telling.subscribe(request.request_id, body.lease_id, may_see)
        self._answerer.answer(request, messages.Empty())
        self._telling.begin(request.request_id)

    def _lease_unsubscribe(self, request: Request, body: messages.LeaseUnsubscribe) -> None:
        self._telling.unsubscribe(body.subscription)
        self._answerer.answer(request, messages.Empty())

    def _lease_list_active(self, request: Request, body: messages.Empty) -> None:
        leases = [self._report(lease) for lease in self._runtime.table.snapshots() if self._may_see(lease)]
        self._answerer.answer(request, messages.Report(leases))

    def _report(self, lease: LeaseSnapshot) -> dict[str, Any]:
        table, now_ns = self._runtime.table, time.monotonic_ns()
        standing = table.standing(lease.lease_id, now_ns)
        return lease_report(lease, self._runtime.workers.page(lease.lease_id), now_ns, standing, table.drain_ns)

    def _may_see(self, lease: LeaseSnapshot) -> bool:
        if self._peer.is_operator:
            return True
        if not self._peer.is_known:
            # Peers nobody vouches for share a tenant: a list of its leases would hand out other people's ids.
            return lease.lease_id in self.acquired
        return lease.tenant == self._peer.tenant

    # --- shared by several ---

    def _answer_denied(self, request: Request, outcome: Outcome) -> None:
        if isinstance(outcome, Denied):
            self._answerer.answer(request, failure_of(outcome.denial))

    def _need_operator(self, operation: str) -> None:
        if not self._peer.is_operator:
            raise Refusal(
                Failure(
                    Status.DENIED,
                    f"{operation} is for operators; this connection is {self._peer}",
                    hint="Run it as root or as the daemon's user, over its Unix socket; or be one of [tls] operators.",
                )
            )
