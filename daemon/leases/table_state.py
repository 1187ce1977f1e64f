"""The shared state of the lease table: live and ended leases and regions, the queue, revoked ids, and sums over them.

Every change takes constant time; `invariants.validate` recomputes all sums.
"""

from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Final, NamedTuple

from gpulease.daemon.leases import denials
from gpulease.daemon.leases.denials import Denial
from gpulease.daemon.leases.devices import Card, CardAccount, PlacementOrder
from gpulease.daemon.leases.epochs import HighestEpochs
from gpulease.daemon.leases.events import (
    Effect,
    MoveRequested,
    RegionRequested,
    ResizeRequested,
    Warned,
)
from gpulease.daemon.leases.model import (
    Lease,
    LeaseSnapshot,
    LeaseState,
    MembershipDeadline,
    Recycling,
    RegionState,
    Submit,
    SubmitRequested,
    SubmitState,
    TableRegion,
    Trigger,
    WarmContext,
)
from gpulease.daemon.leases.quotas import AcquireRates, CoreLimits, Drain, phase_of, region_phase_of
from gpulease.daemon.leases.wait_queue import WaitQueue
from gpulease.protocol.sizes import size_text

DeferrableRequest = RegionRequested | ResizeRequested | SubmitRequested | MoveRequested


class DeferredRequest(NamedTuple):
    """A request that waits for the return of its lease's session until `due_ns`, a monotonic time."""

    event: DeferrableRequest
    due_ns: int


class DeferredGroup(NamedTuple):
    """A lease's deferred moves, or its other deferred requests. Those of a group can be handled at the same time."""

    lease_id: int
    is_move: bool


class LeaseStore:
    """State that the core's modules share. A lease is in `live` from its placement until it is torn down.

    Attributes:
        pending: The lease that each open, placed acquire waits for.
        live_by_tenant: Number of live leases of each tenant; tenants without leases are absent.
        bytes_by_tenant: Sum of their sizes; tenants without any are absent.
        fenced: Live leases that are fenced.
        ended: The leases that were torn down most recently, oldest first.
        regions: Regions of live leases, by id.
        region_requests: The region of each unanswered request for one, by request.
        ended_regions: The regions that were returned most recently, oldest first. They are separate from `ended`, so
            that a tenant that opens regions in a loop displaces no lease.
        revoked: Every lease ever revoked, even after its tombstone was dropped.
        cleared: Every lease with a fence that an operator cleared, even after its tombstone was dropped. Its memory was
          never proved free.
        warm: Contexts of the pool, by id.
        left_by_lease: The workers that the session of a lease has left and that are in the pool, by lease and id.
        renamed: Tenant names that may have belonged to other people. No lease may reuse the contexts that these people
            left.
        recycling: Bounds within which contexts serve their tenant again; None if they never do.
        order: The order in which leases prefer cards.
        submits: Submits with bytes that are not yet proved free, by id.
        parkable: Live parkable leases, by id.
        deferred: Requests that wait for the return of a session, by group and number, oldest first. Every event checks
          each group, and not each request: a tenant may have very many.
        parked_host_bytes: Host memory that is held for parkable leases.
        rates: Each tenant's rate of acquires.
        claimed: Live leases with a name, by name.
        by_request: Live leases with a `request_id`, by tenant and `request_id`.
        epochs: The highest epoch that each name has had on this node.
        with_claims: Live leases that are claimed, by name or for their bytes, by id.
        membership_deadline: The time until which claimed leases may be granted; None before the first heartbeat, and
          once the claims are lost.
        drain_ns: Time at which the node's drain ends the remaining leases; None while there is none. A card's own drain
            is in its account.
        under_earlier_rules: Tenants that had a lease, or waited for one, when their bounds last changed; they keep
            those leases.
        has_freed_room: Whether bytes were released, or the queue became shorter, since the queue was last served.
    """

    def __init__(
        self,
        cards: Iterable[Card],
        limits: CoreLimits,
        warm_contexts: int,
        recycling: Recycling | None = None,
        order: PlacementOrder = PlacementOrder.SPREAD,
    ) -> None:
        # Bounds and cards. Only a reload and other programs' memory change these.
        self.limits = limits
        self.recycling = recycling
        self.order = order
        by_index = sorted(cards, key=lambda card: card.index)
        self.accounts = tuple(CardAccount(card, warm_contexts, limits.overcommit) for card in by_index)
        self.account_by_uuid = {account.card.uuid: account for account in self.accounts}
        # Leases: live ones by id, and sums over them by tenant.
        self.live: dict[int, Lease] = {}
        self.pending: dict[int, int] = {}
        self.live_by_tenant: Counter[str] = Counter()
        self.bytes_by_tenant: Counter[str] = Counter()
        self.fenced: dict[int, Lease] = {}
        # Ended leases and regions, for late calls.
        self.ended: OrderedDict[int, LeaseSnapshot] = OrderedDict()
        self.regions: dict[int, TableRegion] = {}
        self.region_requests: dict[int, int] = {}
        self.ended_regions: OrderedDict[int, LeaseSnapshot] = OrderedDict()
        # Ids that are never forgotten.
        self.revoked = RevokedIds()
        self.cleared = RevokedIds()
        # The pool, the submits, and the claims in the fleet.
        self.warm: dict[int, WarmContext] = {}
        self.left_by_lease: dict[int, dict[int, WarmContext]] = {}
        self.submits: dict[int, Submit] = {}
        self.parkable: dict[int, Lease] = {}
        self.deferred: dict[DeferredGroup, dict[int, DeferredRequest]] = {}
        self.parked_host_bytes = 0
        self.rates = AcquireRates()
        self.claimed: dict[str, Lease] = {}
        self.with_claims: dict[int, Lease] = {}
        self.by_request: dict[tuple[str, str], Lease] = {}
        self.epochs = HighestEpochs()
        self.membership_deadline: MembershipDeadline | None = None
        # The state of the node as a whole: the queue, a drain, the shutdown.
        self.queue = WaitQueue(limits, order)
        self.under_earlier_rules: set[str] = set()
        self.renamed: set[str] = set()
        self.has_freed_room = False
        self.is_shutting_down = False
        self.drain_ns: int | None = None
        # A selector must name one card: by uuid, ignoring prefix and case, or by index.
        selectors = {account.card.uuid.lower().removeprefix("gpu-") for account in self.accounts}
        indexes = {account.card.index for account in self.accounts}
        if len(selectors) < len(self.accounts) or len(indexes) < len(self.accounts):
            raise ValueError("Two cards have the same uuid or the same index.")

    def is_isolated(self, now_ns: int) -> bool:
        """Return whether no claimed lease may be granted now."""
        # No membership deadline: the node has not joined its fleet yet, or is in none.
        return self.membership_deadline is None or now_ns >= self.membership_deadline.at_ns

    def may_keep_warm(self, account: CardAccount) -> bool:
        """Return whether contexts may wait for leases on a card."""
        # A context that waits would hold bytes of a card that is to become empty, or that a tenant has alone.
        is_closed = self.is_shutting_down or self.drain_ns is not None
        return not (is_closed or account.exclusive_leases or account.drain_ns is not None)

    def may_recycle(self, lease: Lease) -> bool:
        """Return whether the context of a lease that its tenant freed may serve that tenant again.

        A lease is torn down completely if it has a submit that runs, waits, or has bytes that are not proved free,
        because lease and submit share their bytes. The same is true of a lease that had a region, because its addresses
        must not be used again, and of one with a resized slice.
        """
        # A parkable session's pages and host memory end with its process.
        if lease.park is not None:
            return False
        # Nothing may be in doubt: who used the session, what is left in it, and who the tenant is.
        is_clean = not (lease.submit_id or lease.next_submit is not None or lease.is_in_doubt or lease.fault)
        is_clean = is_clean and not lease.is_reshaped
        is_clean = is_clean and lease.tenant not in self.renamed
        if self.recycling is None or lease.is_restored or not lease.warm_id or not is_clean:
            return False
        # Check whether the context has served too often, and whether the card may keep one more context of this tenant.
        account = self.account_by_uuid[lease.card_uuid]
        is_worn = lease.served + 1 >= self.recycling.max_leases
        has_place = account.contexts_to_drop(lease.tenant, self.recycling.max_idle) is not None
        return not is_worn and self.may_keep_warm(account) and has_place

    def get(self, lease_id: int) -> LeaseSnapshot | None:
        """Return a live lease or region, or an ended one; None if it is unknown or forgotten."""
        # Search the live leases and regions first. An id is never used twice, so it is in at most one of the four maps.
        entry = self.live.get(lease_id) or self.regions.get(lease_id)
        return entry.snapshot() if entry is not None else self.get_ended(lease_id)

    def get_ended(self, lease_id: int) -> LeaseSnapshot | None:
        """Return an ended lease or region; None if it is unknown or forgotten."""
        return self.ended.get(lease_id) or self.ended_regions.get(lease_id)

    def denial_for(self, lease_id: int, now_ns: int) -> Denial | None:
        """Return the denial for work under a lease or region now; None if it is active and in time."""
        # Check in this order: unknown or ended, not granted yet, ending, overdue.
        entry = self.live.get(lease_id) or self.regions.get(lease_id)
        # Most are active and in time, and need no snapshot.
        if isinstance(entry, Lease) and entry.serves(now_ns):
            return None
        if entry is None:
            ended = self.get_ended(lease_id)
            return self.unknown(lease_id) if ended is None else denials.lease_ended(ended)
        lease = entry.snapshot()
        if lease.state is LeaseState.PENDING:
            return denials.lease_pending(lease)
        if lease.state is not LeaseState.ACTIVE:
            return denials.lease_ended(lease)
        # The entry's timer may be late, so compare the time itself.
        if entry.is_expired(now_ns):
            return denials.lease_expired(lease)
        is_isolated = isinstance(entry, Lease) and entry.is_isolated(now_ns)
        return denials.lease_isolated(lease) if is_isolated else None

    def unknown(self, lease_id: int) -> Denial:
        """Return the denial for a lease that is neither live nor remembered, so that its tenant is unknown."""
        return denials.revoked_long_ago(lease_id) if lease_id in self.revoked else denials.not_found(lease_id)

    def denial_unless_owner(self, lease_id: int, tenant: str, is_operator: bool) -> Denial | None:
        """Return the denial for a caller that is neither the tenant of a lease or region nor an operator, else None.

        To other callers, a foreign lease and an unknown one look the same. The tenant of a region's lease has access to
        the region.
        """
        # Most callers are the tenant of a live lease, which needs no snapshot.
        if (live := self.live.get(lease_id)) is not None and live.tenant == tenant:
            return None
        lease = self.get(lease_id)
        if lease is None:
            return self.unknown(lease_id)
        if is_operator or lease.tenant == tenant:
            return None
        return (
            denials.not_its_tenant(lease_id)
            if tenant in self.tenants_with_access(lease)
            else denials.not_found(lease_id)
        )

    def denial_without_access(self, lease_id: int, tenant: str, is_operator: bool) -> Denial | None:
        """Return the denial for a caller that is neither an operator nor one of `tenants_with_access`, else None."""
        lease = self.get(lease_id)
        if lease is None:
            return self.unknown(lease_id)
        return None if is_operator or tenant in self.tenants_with_access(lease) else denials.not_found(lease_id)

    def tenants_with_access(self, lease: LeaseSnapshot) -> frozenset[str]:
        """Return the tenants with access to a lease or region: its own, and for a region that of its lease."""
        parent = self.get(lease.parent_id) if lease.parent_id else None
        return frozenset({lease.tenant} if parent is None else {lease.tenant, parent.tenant})

    def check_drains(self, account: CardAccount) -> Denial | None:
        """Return the denial for more memory of a live lease's card if the node or the card is drained."""
        if self.drain_ns is not None:
            return denials.node_is_drained()
        return None if account.drain_ns is None else denials.card_is_drained(account.card.uuid)

    def drain_of(self, card_uuid: str) -> Drain | None:
        """Return the drain that ends the leases on a card first: the node's or the card's own; None without one."""
        account = self.account_by_uuid.get(card_uuid)
        card_ns = None if account is None else account.drain_ns
        if card_ns is not None and (self.drain_ns is None or card_ns < self.drain_ns):
            return Drain(card_ns, is_of_card=True)
        return None if self.drain_ns is None else Drain(self.drain_ns)

    def drain_ns_of(self, card_uuid: str) -> int | None:
        """Return when a drain, the node's or the card's own, ends the leases on a card; None if neither is drained."""
        drain = self.drain_of(card_uuid)
        return None if drain is None else drain.due_ns

    def warn(self, lease: Lease, now_ns: int, effects: list[Effect]) -> None:
        """Notify a live lease's subscribers, and those of its regions, of its phase."""
        drain = self.drain_of(lease.card_uuid)
        phase = phase_of(lease, drain, now_ns)
        effects.append(Warned(lease.lease_id, phase.phase, phase.left_ms(now_ns)))
        for region in lease.regions.values():
            if region.state is RegionState.ACTIVE:
                phase = region_phase_of(region, lease, drain, now_ns)
                effects.append(Warned(region.region_id, phase.phase, phase.left_ms(now_ns)))

    def check_bytes(self, tenant: str, more_bytes: int) -> Denial | None:
        """Return the denial if a tenant's leases and queued acquires, plus `more_bytes`, exceed its bound."""
        # Queued acquires count too, or a tenant could exceed its bound by waiting.
        bound = self.limits.tenants.of(tenant).max_vram_bytes
        tenant_bytes = self.bytes_by_tenant.get(tenant, 0) + self.queue.bytes_of(tenant)
        if bound is None or tenant_bytes + more_bytes <= bound:
            return None
        return denials.over_tenant_limit(
            tenant,
            "max_vram",
            f"{size_text(more_bytes)} was requested; this tenant has or awaits {size_text(tenant_bytes)} and may have "
            f"{size_text(bound)}",
            "Request less, or free a lease you no longer need.",
        )

    def charge_bytes(self, number: int) -> int:
        """Return the bytes that the worker of a session, submit or warm context may hold on its card; 0 if unknown."""
        # A lease's charge includes its submit, which runs in a separate process with its own part of the bytes.
        lease, other = self.live.get(number), self.submits.get(number) or self.warm.get(number)
        if other is not None:
            return other.charge_bytes
        return 0 if lease is None else lease.charge_bytes - lease.submit_charge_bytes

    def card_of(self, number: int) -> str | None:
        """Return the card of an active lease, a running submit or a context reserved for a tenant; otherwise None."""
        lease, submit, context = self.live.get(number), self.submits.get(number), self.warm.get(number)
        if submit is not None:
            return submit.card_uuid if submit.state is SubmitState.RUNNING else None
        if context is not None:
            return context.card_uuid if context.waits_for_tenant else None
        return None if lease is None or lease.state is not LeaseState.ACTIVE else lease.card_uuid

    def is_used(self, lease_id: int) -> bool:
        """Return whether the id was used before, is in use, or is reserved by a queued acquire."""
        # Forgotten ids count as well: a revoked or cleared id must never mean another lease.
        is_known = self.get(lease_id) is not None or lease_id in self.revoked
        return is_known or lease_id in self.cleared or self.queue.has_lease_id(lease_id)

    def open(self, lease: Lease) -> None:
        """Enter a new lease, charge its card, and note that its acquire waits for the worker."""
        self._enter(lease)
        self.pending[lease.request] = lease.lease_id
        self.account_by_uuid[lease.card_uuid].take(lease)

    def restore(self, lease: Lease) -> None:
        """Enter an earlier table's lease and charge its card."""
        self._enter(lease)
        account = self.account_by_uuid[lease.card_uuid]
        account.restore(lease)
        # A restored fence keeps its bytes charged, like one that this table made.
        if lease.state is LeaseState.FENCED:
            self.fenced[lease.lease_id] = lease
            account.fenced_bytes += lease.charge_bytes

    def leave_pending(self, lease: Lease) -> None:
        """Remove the lease from those that wait for their worker."""
        del self.pending[lease.request]
        self.account_by_uuid[lease.card_uuid].leave_pending(lease)

    def add_warm(self, context: WarmContext) -> None:
        """Enter a context in the pool and charge its card."""
        self.warm[context.warm_id] = context
        if context.left_by:
            self.left_by_lease.setdefault(context.left_by, {})[context.warm_id] = context
        self.account_by_uuid[context.card_uuid].warm[context.warm_id] = context

    def remove_warm(self, context: WarmContext) -> None:
        """Remove a context that a lease took over, or that is proved gone."""
        # The context's bytes leave the pool's sum here. A lease or a submit that took the context over has charged them
        # already.
        del self.warm[context.warm_id]
        del self.account_by_uuid[context.card_uuid].warm[context.warm_id]
        if context.left_by:
            del self.left_by_lease[context.left_by][context.warm_id]
            if not self.left_by_lease[context.left_by]:
                del self.left_by_lease[context.left_by]

    def left_workers(self, lease: Lease) -> tuple[int, ...]:
        """Return the ids of the workers that the session of a lease has left and that may still live."""
        left = self.left_by_lease.get(lease.lease_id, {})
        return tuple(context.warm_id for context in left.values() if not context.is_worker_gone)

    def fence(self, lease: Lease, now_ns: int) -> None:
        """Mark a lease FENCED: its bytes could not be proved free, so they stay charged."""
        # The bytes stay charged, and the lease stays live, until an operator clears the fence.
        lease.move(Trigger.RECLAIM_FAILED, now_ns)
        lease.ended_ns = now_ns
        self.fenced[lease.lease_id] = lease
        self.account_by_uuid[lease.card_uuid].fenced_bytes += lease.charge_bytes

    def close(self, lease: Lease, trigger: Trigger, now_ns: int) -> LeaseSnapshot:
        """Release a lease's bytes and remember it as ended. Returns its last state."""
        # A fenced lease ended when it was fenced; that time stays.
        was_fenced = lease.state is LeaseState.FENCED
        lease.move(trigger, now_ns)
        account = self.account_by_uuid[lease.card_uuid]
        if was_fenced:
            del self.fenced[lease.lease_id]
            account.fenced_bytes -= lease.charge_bytes
        else:
            lease.ended_ns = now_ns
        # The worker has exited, or an operator has vouched for that, so the host memory that it held is free as well.
        self.hold_host(lease, 0)
        self.parkable.pop(lease.lease_id, None)
        # Update bytes and indexes together, because a waiter may be placed right after this.
        account.give_back(lease)
        del self.live[lease.lease_id]
        self._forget_claim(lease)
        self.live_by_tenant[lease.tenant] -= 1
        self.bytes_by_tenant[lease.tenant] -= lease.terms.size_bytes
        # Drop the entry of a tenant without a lease, so that the number of entries does not grow with every tenant ever
        # seen.
        if not self.live_by_tenant[lease.tenant]:
            del self.live_by_tenant[lease.tenant]
            del self.bytes_by_tenant[lease.tenant]
        ended = lease.snapshot()
        # A worker that belonged to no lease was held under a lease without a tenant, which leaves no record.
        if lease.tenant:
            self.remember(ended)
        # The caller serves the queue once per event, after everything that the event frees.
        self.has_freed_room = True
        return ended

    def remember(self, ended: LeaseSnapshot) -> None:
        """Remember an ended lease or region. The oldest is forgotten when there are too many."""
        # Dicts keep their order, so the first entry is the oldest.
        tombstones = self.ended_regions if ended.parent_id else self.ended
        tombstones[ended.lease_id] = ended
        if len(tombstones) > self.limits.max_tombstones:
            tombstones.popitem(last=False)

    def change_size(self, lease: Lease, size_bytes: int) -> None:
        """Change the size of an active lease, and charge its card accordingly."""
        more_bytes = size_bytes - lease.terms.size_bytes
        account = self.account_by_uuid[lease.card_uuid]
        terms = replace(lease.terms, size_bytes=size_bytes)
        more_charge_bytes = account.charge_bytes(terms) - account.charge_bytes(lease.terms)
        lease.terms = terms
        lease.charge_bytes += more_charge_bytes
        account.held_bytes += more_charge_bytes
        account.parkable_bytes += more_bytes if lease.terms.is_parkable else 0
        self.bytes_by_tenant[lease.tenant] += more_bytes
        # The queue must be served again only if bytes became free.
        self.has_freed_room = self.has_freed_room or more_bytes < 0

    def hold_host(self, lease: Lease, host_bytes: int) -> None:
        """Change the host memory that is held for a parkable lease."""
        if lease.park is not None:
            self.parked_host_bytes += host_bytes - lease.park.host_bytes
            lease.park.host_bytes = host_bytes

    def enter_region(self, lease: Lease, region: TableRegion) -> None:
        """Enter a region, and charge its lease's slice."""
        self.regions[region.region_id] = lease.regions[region.region_id] = region
        lease.region_bytes += region.charge_bytes
        lease.region_number = max(lease.region_number, region.number)
        lease.is_reshaped = lease.has_session = True
        # A returned region only keeps bytes at its addresses. Its slot may belong to another region by now.
        if region.state is not RegionState.RETURNED:
            lease.slots[region.slot] = region

    def return_region(self, lease: Lease, region: TableRegion, trigger: Trigger, now_ns: int) -> None:
        """Return a region's slot and the bytes that it no longer keeps to its lease, and remember the region."""
        # The bytes that the region holds before and after: kept bytes stay charged.
        before_bytes = region.charge_bytes
        region.move(trigger, now_ns)
        region.ended_ns = region.ended_ns or now_ns
        region.end_due_ns = None
        lease.region_bytes += region.charge_bytes - before_bytes
        del lease.slots[region.slot]
        self.remember(region.snapshot())
        # With kept bytes the region stays charged until the session releases its address.
        if not region.kept_bytes:
            self.forget_region(lease, region)

    def forget_region(self, lease: Lease, region: TableRegion) -> None:
        """Forget a returned region, and return the bytes that still occupied its addresses to its lease."""
        lease.region_bytes -= region.charge_bytes
        del self.regions[region.region_id], lease.regions[region.region_id]

    def _enter(self, lease: Lease) -> None:
        # Restored fences are entered as well: a fenced lease stays live until an operator clears it.
        self.live[lease.lease_id] = lease
        self.live_by_tenant[lease.tenant] += 1
        self.bytes_by_tenant[lease.tenant] += lease.terms.size_bytes
        if lease.park is not None:
            self.parkable[lease.lease_id] = lease
        # Indexes for claims, for the membership deadline, and for a client that repeats its request.
        if lease.terms.name:
            self.claimed[lease.terms.name] = lease
        if lease.terms.is_claimed:
            self.with_claims[lease.lease_id] = lease
        if lease.terms.request_id:
            self.by_request[lease.tenant, lease.terms.request_id] = lease

    def _forget_claim(self, lease: Lease) -> None:
        # The name may already belong to a restored lease that was entered later.
        if self.claimed.get(lease.terms.name) is lease:
            del self.claimed[lease.terms.name]
        self.with_claims.pop(lease.lease_id, None)
        key = lease.tenant, lease.terms.request_id
        if self.by_request.get(key) is lease:
            del self.by_request[key]


_MARK_MASK: Final = (1 << 64) - 1


def mark_of(lease_id: int) -> int:
    """Return the remembered part of an id: its low 64 bits.

    Ids are random. With a million revoked ids, the chance is 5e-14 that an id that was never revoked is mistaken for
    one, and then can't be used.
    """
    return lease_id & _MARK_MASK


class RevokedIds:
    """A set of ids at 8 bytes each, as a sorted array. Adding to a million moves 8 MB, in 0.5 ms.

    Revoked ids are kept forever, so that a revoked lease is never reported as "not found".

    Args:
        marks: Marks of the ids in the set from the start, in ascending order.

    Raises:
        ValueError: The marks are not in ascending order.
    """

    def __init__(self, marks: Iterable[int] = ()) -> None:
        # Require strictly ascending marks: a repeated mark would show that the journal is damaged.
        self._marks = array("Q", marks)
        if any(low >= high for low, high in pairwise(self._marks)):
            raise ValueError("The marks of revoked ids are not in ascending order.")

    def __len__(self) -> int:
        return len(self._marks)

    def __contains__(self, lease_id: int) -> bool:
        mark = mark_of(lease_id)
        place = bisect_left(self._marks, mark)
        return place < len(self._marks) and self._marks[place] == mark

    def add(self, lease_id: int) -> None:
        if lease_id not in self:
            mark = mark_of(lease_id)
            self._marks.insert(bisect_left(self._marks, mark), mark)
