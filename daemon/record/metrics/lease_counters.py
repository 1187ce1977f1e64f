"""Counters and distributions of leases' lives, from the facts of their history."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from gpulease.daemon.leases import (
    AcquireRequested,
    Cause,
    DrainCancelled,
    DrainRequested,
    FenceClearRequested,
    FreeRequested,
    LeaseSnapshot,
    RegionCancelRequested,
    RegionRequested,
    RenewRequested,
    ResizeRequested,
    RevokeRequested,
    SubmitRequested,
)
from gpulease.daemon.record.lease_facts import Fact, FactKind
from gpulease.daemon.record.metrics import families
from gpulease.daemon.record.metrics.families import (
    MAX_PAIR_SERIES,
    MAX_TENANT_SERIES,
    Counts,
    Family,
    Histogram,
    Labels,
    TenantLabels,
    counts,
)
from gpulease.protocol.opcodes import Opcode
from gpulease.protocol.time_units import NS_PER_S

_OPERATIONS: Final[dict[type, str]] = {
    AcquireRequested: Opcode.LEASE_ALLOC.name.lower(),
    SubmitRequested: Opcode.GPU_SUBMIT.name.lower(),
    RenewRequested: Opcode.LEASE_RENEW.name.lower(),
    FreeRequested: Opcode.LEASE_FREE.name.lower(),
    RevokeRequested: Opcode.LEASE_REVOKE.name.lower(),
    FenceClearRequested: Opcode.FENCE_CLEAR.name.lower(),
    DrainRequested: Opcode.DRAIN.name.lower(),
    DrainCancelled: Opcode.DRAIN_CANCEL.name.lower(),
    RegionRequested: Opcode.REGION_OPEN.name.lower(),
    RegionCancelRequested: Opcode.REGION_CANCEL.name.lower(),
    ResizeRequested: Opcode.LEASE_RESIZE.name.lower(),
}

_COUNTED: Final = (
    families.SESSION_LAUNCHES,
    families.SESSION_SYNCS,
    families.SESSION_SYNC_ERRORS,
    families.SESSION_COPIES,
    families.SESSION_COPIED_BYTES,
    families.SESSION_OPERATIONS,
    families.SESSION_OPERATION_ERRORS,
    families.SESSION_FAULTS,
    families.LEASES_ACQUIRED,
    families.LEASES_ADOPTED,
    families.LEASES_RENEWED,
    families.SUBMITS,
    families.LEASES_DROPPED,
    families.REGIONS_OPENED,
    families.REGIONS_ADOPTED,
    families.REGIONS_RENEWED,
    families.REGIONS_ENDED,
    families.DENIALS,
    families.FENCES,
    families.WARM_TAKEN,
    families.WARM_LOST,
    families.WARM_RECYCLED,
)
_OF_PAIRS: Final = tuple(family for family in _COUNTED if family.labels == families.PAIR)
_MEASURED: Final = (
    families.LEASE_SECONDS,
    families.ACQUIRE_SECONDS,
    families.REVOCATION_SECONDS,
    families.RECLAIM_SECONDS,
    families.EXPIRY_LATENESS_SECONDS,
    families.REGION_OPEN_SECONDS,
    families.REGION_RETURN_SECONDS,
    families.FORWARD_REVOKED_SECONDS,
    families.LOOP_LAG_SECONDS,
)


class LeaseCounters:
    """Counts facts.

    Args:
        cards: UUIDs of the GPUs.
        tenants: Labels of tenants.

    Attributes:
        counters: The counters' values, by family.
        histograms: The distributions, by family.
        pairs: Every GPU and tenant that had a lease together, in the order in which they came.
    """

    def __init__(self, cards: Sequence[str], tenants: TenantLabels | None = None) -> None:
        self.counters: dict[Family, Counts] = {family: counts() for family in _COUNTED}
        self.histograms: dict[Family, Histogram] = {family: Histogram(family) for family in _MEASURED}
        self.pairs: dict[Labels, None] = {}
        self._tenants = tenants or TenantLabels(max(1, min(MAX_TENANT_SERIES, MAX_PAIR_SERIES // max(1, len(cards)))))
        for uuid in cards:
            for family in (families.FENCES, families.WARM_TAKEN, families.WARM_LOST, families.WARM_RECYCLED):
                self.counters[family][(uuid,)] = 0.0
        self._handlers: dict[FactKind, Callable[[Fact], None]] = {
            FactKind.GRANTED: self._granted,
            FactKind.DENIED: self._denied,
            FactKind.RENEWED: self._counts_pair(families.LEASES_RENEWED),
            FactKind.SUBMIT_READY: self._counts_pair(families.SUBMITS),
            FactKind.ADOPTED: self._counts_pair(families.LEASES_ADOPTED),
            FactKind.ADOPTED_ENDING: self._counts_pair(families.LEASES_ADOPTED),
            FactKind.FAULTED: self._counts_pair(families.SESSION_FAULTS),
            FactKind.SUBMIT_FAULTED: self._counts_pair(families.SESSION_FAULTS),
            FactKind.ENDING: self._refused_work,
            FactKind.CANCELLED: self._refused_work,
            FactKind.WORKER_EXITED: self._worker_exited,
            FactKind.ENDED: self._ended,
            FactKind.FENCED: self._ended,
            FactKind.WARM_TAKEN: self._counts_card(families.WARM_TAKEN),
            FactKind.WARM_RECYCLED: self._counts_card(families.WARM_RECYCLED),
            FactKind.WARM_LOST: self._counts_card(families.WARM_LOST),
            FactKind.WARM_FENCED: self._counts_card(families.WARM_LOST, families.FENCES),
        }

        # A region's bytes are its lease's: what counts leases counts no regions.
        self._of_regions: dict[FactKind, Callable[[Fact], None]] = {
            FactKind.GRANTED: self._region_granted,
            FactKind.RENEWED: self._counts_pair(families.REGIONS_RENEWED),
            FactKind.ADOPTED: self._counts_pair(families.REGIONS_ADOPTED),
            FactKind.ADOPTED_ENDING: self._counts_pair(families.REGIONS_ADOPTED),
            FactKind.ENDING: self._refused_work,
            FactKind.ENDED: self._region_ended,
            FactKind.FENCED: self._region_ended,
        }

    def on_facts(self, facts: Sequence[Fact]) -> None:
        """Count what an event brought about."""
        for fact in facts:
            is_region = fact.lease is not None and fact.lease.parent_id
            handler = (self._of_regions if is_region else self._handlers).get(fact.kind)
            if handler is not None:
                handler(fact)

    def refused(self, operation: str, reason: str) -> None:
        """Count a request that was refused before it got to the lease table."""
        self.counters[families.DENIALS][operation, reason] += 1

    def forward_revoked(self, status: str, seen_after_ns: int) -> None:
        """Count a launch that a session refused because of a region."""
        self._observe(families.FORWARD_REVOKED_SECONDS, (status,), seen_after_ns)

    def worked(self, pair: Labels, increments: Iterable[tuple[Family, float]]) -> None:
        """Add what sessions of a GPU and tenant did since the last call."""
        for family, more in increments:
            self.counters[family][pair] += more

    def pair(self, lease: LeaseSnapshot) -> Labels:
        """Return the labels of a lease's GPU and tenant."""
        labels = (lease.card_uuid, self._tenants.of(lease.tenant))
        if labels not in self.pairs:
            self.pairs[labels] = None
            # A rate needs a value from before the first thing happened.
            for family in _OF_PAIRS:
                self.counters[family][labels] = 0.0
        return labels

    # --- facts ---

    def _counts_pair(self, family: Family) -> Callable[[Fact], None]:
        def count(fact: Fact) -> None:
            if fact.lease is not None:
                self._count(family, self.pair(fact.lease))

        return count

    def _counts_card(self, *counted: Family) -> Callable[[Fact], None]:
        def count(fact: Fact) -> None:
            for family in counted:
                self._count(family, (fact.card,))

        return count

    def _granted(self, fact: Fact) -> None:
        if fact.lease is None or fact.asked is None:
            return
        self._count(families.LEASES_ACQUIRED, self.pair(fact.lease))
        self._observe(families.ACQUIRE_SECONDS, (fact.lease.card_uuid,), fact.now_ns - fact.asked.at_ns)

    def _region_granted(self, fact: Fact) -> None:
        if fact.lease is None or fact.asked is None:
            return
        self._count(families.REGIONS_OPENED, self.pair(fact.lease))
        self._observe(families.REGION_OPEN_SECONDS, (fact.lease.card_uuid,), fact.now_ns - fact.asked.at_ns)

    def _region_ended(self, fact: Fact) -> None:
        region, times = fact.lease, fact.times
        if region is None or times.began_ns is None:
            return
        self._count(families.REGIONS_ENDED, self.pair(region))
        if fact.kind is FactKind.ENDED and times.over_ns is not None and times.cause is not None:
            self._observe(families.REGION_RETURN_SECONDS, (times.cause.value,), fact.now_ns - times.over_ns)

    def _denied(self, fact: Fact) -> None:
        operation = "" if fact.asked is None else _OPERATIONS.get(type(fact.asked.request), "")
        if operation:
            self.refused(operation, fact.source.denial.reason.value)

    def _refused_work(self, fact: Fact) -> None:
        lease = fact.lease
        if fact.times.cause is Cause.EXPIRED and lease is not None and lease.deadline_ns is not None:
            self._observe(families.EXPIRY_LATENESS_SECONDS, (), fact.now_ns - lease.deadline_ns)

    def _worker_exited(self, fact: Fact) -> None:
        over_ns, cause = fact.times.over_ns, fact.times.cause
        if over_ns is not None and cause is not None:
            self._observe(families.REVOCATION_SECONDS, (cause.value,), fact.now_ns - over_ns)

    def _ended(self, fact: Fact) -> None:
        lease, times = fact.lease, fact.times
        if lease is None:
            return
        if fact.kind is FactKind.FENCED:
            self._count(families.FENCES, (lease.card_uuid,))
        elif times.over_ns is not None:
            self._observe(families.RECLAIM_SECONDS, (lease.card_uuid,), fact.now_ns - times.over_ns)
        if times.began_ns is not None:
            pair = self.pair(lease)
            over_ns = fact.now_ns if times.over_ns is None else times.over_ns
            self._count(families.LEASES_DROPPED, pair)
            self._observe(families.LEASE_SECONDS, pair, over_ns - times.began_ns)

    def _count(self, family: Family, labels: Labels) -> None:
        self.counters[family][labels] += 1

    def _observe(self, family: Family, labels: Labels, ns: int) -> None:
        self.histograms[family].observe(labels, ns / NS_PER_S)
