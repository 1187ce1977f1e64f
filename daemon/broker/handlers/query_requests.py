"""Read-only requests: PING, GET_INVENTORY, LEASE_QUERY, LEASE_LIST_ACTIVE, subscriptions, METRICS and HEALTH."""

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from gpulease.daemon.broker.caller import Caller
from gpulease.daemon.broker.reports import MAX_LISTED_REGIONS, drain_left_ms, full_report, inventory
from gpulease.daemon.broker.subscriptions import EVERY_LEASE, ConnectionSubscriptions, by_lease_id
from gpulease.daemon.leases.denials import not_found
from gpulease.daemon.leases.model import LeaseSnapshot, LeaseState
from gpulease.protocol import messages
from gpulease.protocol.connection import Request
from gpulease.protocol.failures import Failure, Refused
from gpulease.protocol.opcodes import Opcode, Status
from gpulease.protocol.operations import SPECS

_TO_QUERY: Final = SPECS[Opcode.LEASE_QUERY].needs.permissions
"""A token must permit one of these for LEASE_QUERY, and for a subscription, which reports changes of the same facts."""

LEASES_PER_STEP: Final = 32
"""Number of leases that a list reports before other connections are served: about a millisecond. Stops a list of a
node's thousands of leases from delaying the end of a lease."""


class QueryHandler:
    """Serves one caller's requests about leases and cards. Every method may raise Refused."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._runtime = caller.runtime
        self._peer = caller.peer
        self._tokens = caller.tokens
        connection = caller.connection
        self._subscriptions = ConnectionSubscriptions(
            caller.runtime.publisher, caller.peer.tenant, connection.send_event
        )

    def leave(self) -> None:
        self._subscriptions.end_all()

    def ping(self, request: Request, body: messages.Ping) -> None:
        self._caller.answer(request, body)

    def get_inventory(self, request: Request, body: messages.Empty) -> None:
        table, sandbox = self._runtime.table, self._runtime.workers.findings()
        cards = inventory(table.cards(), self._caller.driver, sandbox, table.parking, drain_left_ms(table))
        self._caller.answer(request, cards)

    def lease_query(self, request: Request, body: messages.LeaseRef) -> None:
        """Serve LEASE_QUERY. If the lease's tenant asks, the lease counts as connected."""
        lease = self._runtime.table.get(body.lease_id)
        if lease is None:
            # The table may have dropped an ended lease, but still have the record that it was revoked.
            raise Refused((self._runtime.table.denial_for(body.lease_id, 0) or not_found(body.lease_id)).failure)
        if not self._may_query(lease):
            # The same answer as for an unknown id: a stranger must not find out which ids exist.
            raise Refused(not_found(body.lease_id).failure)
        # A query shows that the tenant is alive, so the lease does not count as orphaned while this connection lives.
        if self._acts_for(lease) and not self._peer.is_reader:
            self._caller.hold(lease.lease_id)
        self._caller.answer(request, messages.Report(self._report(lease)))

    def lease_list_active(self, request: Request, body: messages.Empty) -> None:
        """Serve LEASE_LIST_ACTIVE: each lease, followed by its regions.

        A long list is made in steps, so each lease is reported as it is at that moment.
        """
        table, peer = self._runtime.table, self._peer
        lease_ids = deque(table.regions.lease_ids_of(None if peer.is_operator else peer.tenant))
        reports: list[dict[str, Any]] = []
        room = MAX_LISTED_REGIONS

        def list_more() -> bool:
            nonlocal room
            for _ in range(min(LEASES_PER_STEP, len(lease_ids))):
                lease = table.get(lease_ids.popleft())
                # It may have ended since the list was begun.
                if lease is None or lease.state is LeaseState.TORNDOWN:
                    continue
                # Leases are always listed; the regions of all leases together are bounded.
                regions = [region for region in table.regions.of(lease.lease_id) if self._may_see(region)][:room]
                room -= len(regions)
                # A region and its lease may belong to different tenants, so each is checked on its own.
                own = (lease,) if self._may_see(lease) else ()
                reports.extend(self._report(snapshot) for snapshot in (*own, *regions))
            if lease_ids:
                return False
            self._caller.answer(request, messages.Report(reports))
            return True

        if not list_more():
            self._caller.connection.serve_in_steps(request, list_more)

    def _report(self, lease: LeaseSnapshot) -> dict[str, Any]:
        use = self._runtime.card_times.use_of(lease.lease_id, lease.card_uuid)
        return full_report(lease, self._runtime.table, self._runtime.workers, use)

    def lease_subscribe(self, request: Request, body: messages.LeaseSubscribe) -> None:
        """Serve LEASE_SUBSCRIBE. The first event follows the reply."""
        # A subscription to every lease shows the same leases as a list. A subscription to a single lease shows the same
        # as a query, even to a caller with the lease's token.
        is_every = body.lease_id == EVERY_LEASE
        may_see = by_lease_id(self._may_see if is_every else self._may_query, self._runtime.table)
        if not is_every and not may_see(body.lease_id):
            raise Refused(not_found(body.lease_id).failure)
        # The subscription is made before the reply and begins after it. So no change in between is lost, and no event
        # precedes the reply.
        self._subscriptions.subscribe(request.request_id, body.lease_id, may_see)
        self._caller.answer(request, messages.Empty())
        self._subscriptions.begin(request.request_id)

    def region_watch(self, request: Request, body: messages.LeaseRef) -> None:
        """Serve REGION_WATCH of a region, or of all regions of a lease. Events follow the reply."""
        may_see = by_lease_id(self._may_query, self._runtime.table)
        if not may_see(body.lease_id):
            raise Refused(not_found(body.lease_id).failure)
        self._subscriptions.watch(request.request_id, body.lease_id, may_see)
        self._caller.answer(request, messages.Empty())

    def lease_unsubscribe(self, request: Request, body: messages.LeaseUnsubscribe) -> None:
        self._subscriptions.unsubscribe(body.subscription)
        self._caller.answer(request, messages.Empty())

    def _may_query(self, lease: LeaseSnapshot) -> bool:
        return self._peer.is_operator or self._acts_for(lease) or self._is_of(lease, self._acts_for)

    def _is_of(self, region: LeaseSnapshot, check: Callable[[LeaseSnapshot], bool]) -> bool:
        """Return whether the lease that contains a region passes a check; False for anything but a region."""
        parent = self._runtime.table.get(region.parent_id) if region.parent_id else None
        return parent is not None and check(parent)

    def _acts_for(self, lease: LeaseSnapshot) -> bool:
        return lease.tenant == self._tokens.acting_tenant(lease.lease_id, _TO_QUERY)

    def _may_see(self, lease: LeaseSnapshot) -> bool:
        if self._peer.is_operator:
            return True
        return self._is_own(lease) or self._is_of(lease, self._is_own)

    def _is_own(self, lease: LeaseSnapshot) -> bool:
        if not self._peer.is_known:
            # Peers without a proven identity share a tenant: a list of its leases would disclose other people's ids.
            return lease.lease_id in self._caller.acquired
        return lease.tenant == self._peer.tenant


class NodeHandler:
    """Serves one caller's requests about the node as a whole. Every method may raise Refused."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._metrics = caller.runtime.metrics
        self._health = caller.runtime.health
        self._is_scraping = False

    def metrics(self, request: Request, body: messages.Empty) -> None:
        """Serve METRICS, one text at a time: a peer that never reads has only one waiting text."""
        if self._is_scraping:
            raise Refused(
                Failure(
                    Status.BUSY,
                    "this connection already has a METRICS request in progress",
                    hint="Wait for its reply first.",
                )
            )
        self._is_scraping = True

        def on_text(result: messages.Metrics | Failure) -> None:
            self._is_scraping = False
            self._caller.answer(request, result)

        self._metrics.scrape(on_text)

    def health(self, request: Request, body: messages.Empty) -> None:
        if self._caller.peer.is_relayed:
            raise Refused(Failure(Status.DENIED, "HEALTH is only for clients on the daemon's host", hint="Ask there."))
        self._caller.answer(request, messages.Report(self._health.report()))

    def refuse_as_node(self, request: Request, body: messages.Place | messages.Empty) -> None:
        """Refuse PLACE and FLEET_LIST, which only a fleet's directory serves."""
        raise Refused(
            Failure(
                Status.UNSUPPORTED,
                f"{request.op.name}: this must be sent to a directory of a fleet, not to a node",
                hint="Use the address of a directory (`gpulease serve directory`); for a single node, write "
                "its address without fleet:.",
            )
        )
