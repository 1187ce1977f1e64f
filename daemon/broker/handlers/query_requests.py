"""What the broker tells about leases and cards: the maps of LEASE_QUERY, LEASE_LIST_ACTIVE and GET_INVENTORY.

What an operator asks of the node as a whole: to be drained, or not any more.

What there is to see: the node, leases, and what leases go through, of one control connection.

What is asked of the node as a whole, for programs that watch it: METRICS and HEALTH, of one control connection.
"""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from gpulease.daemon.broker.caller import Caller
from gpulease.daemon.broker.health import Health
from gpulease.daemon.broker.node_metrics import NodeMetrics
from gpulease.daemon.broker.peer import Peer
from gpulease.daemon.broker.refusal import Refusal, failure_of
from gpulease.daemon.broker.subscriptions import EVERY_LEASE, SubscriptionHandler, seen_by
from gpulease.daemon.contract.control_page import BrokerPage, Counter
from gpulease.daemon.leases import (
    CardSnapshot,
    DrainSet,
    LeasePhase,
    LeaseSnapshot,
    LeaseTable,
    SubmitSnapshot,
    ends_ns,
)
from gpulease.daemon.leases.denials import not_found
from gpulease.protocol import messages
from gpulease.protocol.capabilities import ALL_PERMISSIONS
from gpulease.protocol.connection import Request
from gpulease.protocol.failures import Failure
from gpulease.protocol.messages import DrainStatus, Inventory, InventoryEntry, Metrics, Report
from gpulease.protocol.opcodes import GPU_RESOURCE_TYPE, InventoryFlag, Status

NS_PER_MS: Final = 1_000_000


def remaining_ms(lease: LeaseSnapshot, now_ns: int, drain_ns: int | None = None) -> int:
    """Time left to a lease, rounded up, so that nobody takes it for over while it lives; 0 if it has none.

    `drain_ns`: when a drain ends it at the latest.
    """
    if lease.deadline_ns is None:
        return 0
    return -(-max(0, ends_ns(lease.deadline_ns, drain_ns) - now_ns) // NS_PER_MS)


def expires_at_unix_s(lease: LeaseSnapshot, now_ns: int, drain_ns: int | None = None) -> int:
    """The deadline on the wall clock, for people: the monotonic one is what counts."""
    return int(time.time() + remaining_ms(lease, now_ns, drain_ns) / 1000)


def lease_report(
    lease: LeaseSnapshot,
    page: BrokerPage | None,
    now_ns: int,
    standing: LeasePhase | None = None,
    drain_ns: int | None = None,
) -> dict[str, Any]:
    """One lease as a map; the counters are the worker's word."""
    report: dict[str, Any] = {
        "lease_id": f"{lease.lease_id:032x}",
        "tenant": lease.tenant,
        "state": lease.state.value,
        "cause": None if lease.cause is None else lease.cause.value,
        "reason": lease.reason or lease.fault,
        "fault": lease.fault,
        "generation": lease.generation,
        "size_bytes": lease.size_bytes,
        "card_uuid": lease.card_uuid,
        "exclusivity": lease.exclusivity.name.lower(),
        "remaining_ms": remaining_ms(lease, now_ns, drain_ns) if lease.ended_ns is None else 0,
        "ttl_ms": lease.ttl_ms,
        "age_ms": max(0, now_ns - lease.created_ns) // NS_PER_MS,
    }
    if standing is not None:
        report["phase"] = standing.phase.name.lower()
    if lease.ended_ns is not None and lease.deadline_ns is not None:
        report["ended_after_deadline_us"] = (lease.ended_ns - lease.deadline_ns) // 1000
    if page is not None:
        report |= {
            "allocated_bytes": page.counter(Counter.ALLOCATED_BYTES),
            "launches": page.counter(Counter.LAUNCHES),
            "syncs": page.counter(Counter.SYNCS),
            "operations": page.counter(Counter.OPS),
            "failed_operations": page.counter(Counter.FAILED_OPS),
            "sync_errors": page.counter(Counter.SYNC_ERRORS),
            "copies": page.counter(Counter.COPIES),
            "copied_bytes": page.counter(Counter.COPIED_BYTES),
        }
    return report


def orphan_report(orphan_ms: int, due_ns: int | None, now_ns: int) -> dict[str, Any]:
    """What a lease's report says of its connections: how long it may be without, and how long it still may be."""
    left_ms = None if due_ns is None else -(-max(0, due_ns - now_ns) // NS_PER_MS)
    return {"orphan_ms": orphan_ms, "orphaned_in_ms": left_ms}


def submit_report(
    submit: SubmitSnapshot | None, last: SubmitSnapshot | None, page: BrokerPage | None
) -> dict[str, Any]:
    """What a lease's report says of its submits: the one that is not proved gone, and the last one that is."""
    report: dict[str, Any] = {}
    if submit is not None:
        launches = 0 if page is None else page.counter(Counter.LAUNCHES)
        report["submit"] = _submit(submit) | {"state": submit.state.value, "launches": launches}
    if last is not None:
        report["last_submit"] = _submit(last)
    return report


def _submit(submit: SubmitSnapshot) -> dict[str, Any]:
    return {"number": submit.number, "reason": submit.reason, "timed_out": submit.is_timed_out}


def inventory(
    cards: Sequence[CardSnapshot], driver: str, sandbox: list[dict[str, Any]], drain_left_ms: int | None = None
) -> Inventory:
    """All cards, in the public 36-byte form and as maps, with the sandbox that workers there are in.

    A node that is drained can grant nothing of them.
    """
    if drain_left_ms is not None:
        cards = [replace(card, available_bytes=0) for card in cards]
    of_node = {"drain_left_ms": drain_left_ms, "sandbox": sandbox}
    return Inventory(tuple(_entry(card) for card in cards), [_details(card, driver) | of_node for card in cards])


def _entry(card: CardSnapshot) -> InventoryEntry:
    flags = InventoryFlag.FENCED if card.fenced_bytes else InventoryFlag(0)
    return InventoryEntry(
        _uuid_number(card.uuid), GPU_RESOURCE_TYPE, int(flags), card.capacity_bytes, card.available_bytes
    )


def _uuid_number(card_uuid: str) -> int:
    """The 128 bits of `GPU-xxxxxxxx-...`, or of a MIG device's `MIG-xxxxxxxx-...`."""
    return uuid.UUID(card_uuid.partition("-")[2]).int


def _details(card: CardSnapshot, driver: str) -> dict[str, Any]:
    return {
        "uuid": card.uuid,
        "index": card.index,
        "name": card.name,
        "driver": driver,
        "capacity_bytes": card.capacity_bytes,
        "held_bytes": card.held_bytes,
        "available_bytes": card.available_bytes,
        "fenced_bytes": card.fenced_bytes,
        "leases": card.leases,
        "exclusive": card.is_exclusive,
        "warm_contexts": card.warm_contexts,
        "warm_wanted": card.warm_wanted,
        "recycled_contexts": card.recycled_contexts,
        "warm_bytes": card.warm_bytes,
        "unowned_bytes": card.unowned_bytes,
        "outside_bytes": card.outside_bytes,
    }


def drain_left_ms(table: LeaseTable) -> int | None:
    """Time until a drain ends what is left, rounded up; None if there is no drain."""
    return _left_ms(table.drain_ns)


def status_of(outcome: DrainSet) -> DrainStatus:
    """The reply to DRAIN and DRAIN_CANCEL."""
    return DrainStatus(_left_ms(outcome.deadline_ns), outcome.active_leases)


def _left_ms(deadline_ns: int | None) -> int | None:
    return None if deadline_ns is None else -(-max(0, deadline_ns - time.monotonic_ns()) // NS_PER_MS)


class QueryHandler:
    """Takes these requests: GET_INVENTORY, LEASE_QUERY, LEASE_LIST_ACTIVE and subscriptions. They may raise Refusal."""

    def __init__(self, caller: Caller, driver: str) -> None:
        self._caller = caller
        self._runtime = caller.runtime
        self._peer = caller.peer
        self._tokens = caller.tokens
        self._driver = driver
        self._telling = SubscriptionHandler(caller.runtime.teller, caller.peer.tenant, caller.answerer.tell)

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
        standing = table.phase(lease.lease_id, now_ns)
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


class NodeHandler:
    """Takes these requests; whether somebody is an operator was looked at before."""

    def __init__(self, peer: Peer, metrics: NodeMetrics, health: Health) -> None:
        self._peer = peer
        self._metrics = metrics
        self._health = health
        self._is_scraped = False

    def scrape(self, answer: Callable[[Metrics | Failure], None]) -> None:
        """METRICS. Raises Refusal: one text at a time, so that who never reads has no more than one waiting."""
        if self._is_scraped:
            raise Refusal(Failure(Status.BUSY, "this connection's METRICS is being answered", hint="Ask one by one."))
        self._is_scraped = True

        def tell(result: Metrics | Failure) -> None:
            self._is_scraped = False
            answer(result)

        self._metrics.ask(tell)

    def health(self) -> Report:
        """HEALTH. Raises Refusal."""
        if self._peer.is_relayed:
            raise Refusal(Failure(Status.DENIED, "HEALTH is for peers on the daemon's host", hint="Ask there."))
        return Report(self._health.report())
