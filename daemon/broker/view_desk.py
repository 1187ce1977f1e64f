"""What there is to see: the node, leases, and what leases go through, of one control connection."""

import time
from typing import Any

from gpulease.daemon.broker.caller import Caller
from gpulease.daemon.broker.denials import failure_of
from gpulease.daemon.broker.drains import drain_left_ms
from gpulease.daemon.broker.refusal import Refusal
from gpulease.daemon.broker.reports import inventory, lease_report, orphan_report, submit_report
from gpulease.daemon.broker.telling import EVERY_LEASE, TellingDesk, seen_by
from gpulease.daemon.core import LeaseSnapshot
from gpulease.daemon.core.denials import not_found
from gpulease.protocol import messages
from gpulease.protocol.capabilities import ALL_PERMISSIONS
from gpulease.protocol.connection import Request


class ViewDesk:
    """Takes these requests: GET_INVENTORY, LEASE_QUERY, LEASE_LIST_ACTIVE and subscriptions. They may raise Refusal."""

    def __init__(self, caller: Caller, driver: str) -> None:
        self._caller = caller
        self._runtime = caller.runtime
        self._peer = caller.peer
        self._tokens = caller.tokens
        self._driver = driver
        self._telling = TellingDesk(caller.runtime.teller, caller.peer.tenant, caller.answerer.tell)

    def leave(self) -> None:
        """The client is gone: nothing is told it any more."""
        self._telling.leave()

    def get_inventory(self, request: Request, body: messages.Empty) -> None:
        """GET_INVENTORY."""
        table, sandbox = self._runtime.table, self._runtime.workers.findings()
        self._caller.answer(request, inventory(table.cards(), self._driver, sandbox, drain_left_ms(table)))

    def lease_query(self, request: Request, body: messages.LeaseRef) -> None:
        """LEASE_QUERY."""
        lease = self._runtime.table.get(body.lease_id)
        if lease is None:
            raise Refusal(failure_of(self._runtime.table.denial_for(body.lease_id, 0) or not_found(body.lease_id)))
        if not self._may_query(lease):
            raise Refusal(failure_of(not_found(body.lease_id)))
        if self._acts_for(lease) and not self._peer.is_reader:
            self._caller.hold(lease.lease_id)
        self._caller.answer(request, messages.Report(self._report(lease)))

    def _may_query(self, lease: LeaseSnapshot) -> bool:
        return self._peer.is_operator or self._acts_for(lease)

    def _acts_for(self, lease: LeaseSnapshot) -> bool:
        return lease.tenant == self._tokens.acting_tenant(lease.lease_id, ALL_PERMISSIONS)

    def lease_subscribe(self, request: Request, body: messages.LeaseSubscribe) -> None:
        """LEASE_SUBSCRIBE."""
        is_every = body.lease_id == EVERY_LEASE
        may_see = seen_by(self._may_see if is_every else self._may_query, self._runtime.table)
        if not is_every and not may_see(body.lease_id):
            raise Refusal(failure_of(not_found(body.lease_id)))
        self._telling.subscribe(request.request_id, body.lease_id, may_see)
        self._caller.answer(request, messages.Empty())
        self._telling.begin(request.request_id)

    def lease_unsubscribe(self, request: Request, body: messages.LeaseUnsubscribe) -> None:
        """LEASE_UNSUBSCRIBE."""
        self._telling.unsubscribe(body.subscription)
        self._caller.answer(request, messages.Empty())

    def lease_list_active(self, request: Request, body: messages.Empty) -> None:
        """LEASE_LIST_ACTIVE."""
        leases = [self._report(lease) for lease in self._runtime.table.snapshots() if self._may_see(lease)]
        self._caller.answer(request, messages.Report(leases))

    def _report(self, lease: LeaseSnapshot) -> dict[str, Any]:
        table, now_ns = self._runtime.table, time.monotonic_ns()
        standing = table.standing(lease.lease_id, now_ns)
        page_of, submit = self._runtime.workers.page, table.submits.of(lease.lease_id)
        report = lease_report(lease, page_of(lease.lease_id), now_ns, standing, table.drain_ns)
        report |= orphan_report(table.orphan_ms(lease.lease_id), table.orphan_due_ns(lease.lease_id), now_ns)
        page = None if submit is None else page_of(submit.submit_id)
        return report | submit_report(submit, table.submits.last_of(lease.lease_id), page)

    def _may_see(self, lease: LeaseSnapshot) -> bool:
        if self._peer.is_operator:
            return True
        if not self._peer.is_known:
            # Peers nobody vouches for share a tenant: a list of its leases would hand out other people's ids.
            return lease.lease_id in self._caller.acquired
        return lease.tenant == self._peer.tenant
