"""Counters and distributions of leases' lives, from the facts of their history."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from gpulease.daemon.leases.model import Cause, LeaseSnapshot
from gpulease.daemon.leases.park_state import ParkFailure
from gpulease.daemon.leases.time_account import LeaseTimeUse
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.record.lease_facts import REQUESTS, Fact, FactKind
from gpulease.daemon.record.metrics import families
from gpulease.daemon.record.metrics.families import (
    MAX_PAIR_SERIES,
    MAX_TENANT_SERIES,
    Counts,
    Histogram,
    Labels,
    MetricFamily,
    TenantLabels,
    counts,
)
from gpulease.protocol.time_units import NS_PER_S

_OF_SESSIONS: Final = {family for added_to in families.SESSION_FAMILIES for family in added_to} | {
    families.SESSION_BUSY_SECONDS,
    families.SESSION_GPU_SECONDS,
    families.SESSION_HELD_BACK_SECONDS,
}
"""The families that `LeaseCounters.worked` increases."""

_OF_FACTS: Final = {family for kind in FactKind for family in kind.row.families} | {
    families.IMAGE_MISMATCHES,
    families.LEASES_MOVED_DIRECTLY,
    families.PARKED_AHEAD,
    families.PARKED_AHEAD_BYTES,
}
"""The families that count facts. Those named here depend on more than a fact's kind."""

_COUNTED: Final = tuple(family for family in families.FAMILIES if family in _OF_FACTS or family in _OF_SESSIONS)
_OF_PAIRS: Final = tuple(family for family in _COUNTED if family.labels == families.PAIR)
_OF_CARDS: Final = tuple(family for family in _COUNTED if family.labels == families.CARD)

_LABELS: Final = (families.PAIR, families.CARD, families.DENIED, families.FAILED)
if unknown := [family.name for family in _COUNTED if family.labels not in _LABELS]:
    raise TypeError(f"{unknown} must have labels that a fact has: a card and a tenant, a card, or a failure's")

_MEASURED: Final = (
    families.LEASE_SECONDS,
    families.ACQUIRE_SECONDS,
    families.REVOCATION_SECONDS,
    families.RECLAIM_SECONDS,
    families.EXPIRY_LATENESS_SECONDS,
    families.PARK_SECONDS,
    families.RETURN_SECONDS,
    families.REGION_OPEN_SECONDS,
    families.REGION_RETURN_SECONDS,
    families.FORWARD_REVOKED_SECONDS,
    families.FORWARD_TOLD_SECONDS,
    families.LOOP_LAG_SECONDS,
)


class LeaseCounters:
    """Counts facts.

    Args:
        cards: UUIDs of the cards.
        tenants: Labels of tenants.

    Attributes:
        counters: The counters' values, by family.
        histograms: The distributions, by family.
        pairs: Each pair of card and tenant that had a lease, in the order of their first leases.
    """

    def __init__(self, cards: Sequence[str], tenants: TenantLabels | None = None) -> None:
        self.counters: dict[MetricFamily, Counts] = {family: counts() for family in _COUNTED}
        self.histograms: dict[MetricFamily, Histogram] = {family: Histogram(family) for family in _MEASURED}
        self.pairs: dict[Labels, None] = {}
        # The number of combinations of cards and tenants is limited.
        self._tenants = tenants or TenantLabels(max(1, min(MAX_TENANT_SERIES, MAX_PAIR_SERIES // max(1, len(cards)))))
        # Counters of cards exist from the start, because their labels are known.
        for uuid in cards:
            for family in _OF_CARDS:
                self.counters[family][(uuid,)] = 0.0
        self._measures: dict[FactKind, Callable[[Fact, bool], None]] = {
            FactKind.GRANTED: self._measure_acquire,
            FactKind.ENDING: self._measure_lateness,
            FactKind.CANCELLED: self._measure_lateness,
            FactKind.WORKER_EXITED: self._measure_revocation,
            FactKind.ENDED: self._measure_end,
            FactKind.FENCED: self._measure_end,
            FactKind.PARKED: self._measure_park,
            FactKind.UNPARKED: self._measure_park,
            FactKind.PARK_FAILED: self._count_mismatch,
            FactKind.MOVED: self._count_direct_move,
        }

    def on_facts(self, facts: Sequence[Fact]) -> None:
        """Count the facts of one event, and measure the durations that they end. Logs errors instead of raising."""
        try:
            for fact in facts:
                row = fact.kind.row
                # Regions have counters of their own.
                is_region = fact.lease is not None and fact.lease.parent_id != 0
                for family in row.of_regions if is_region else row.counts:
                    self._count(family, fact)
                # `began_ns` is set if the lease had been granted.
                if fact.times.began_ns is not None:
                    for family in row.lives_of_regions if is_region else row.counts_lives:
                        self._count(family, fact)
                if (measure := self._measures.get(fact.kind)) is not None:
                    measure(fact, is_region)
        except Exception:
            # Log a bug instead of raising, because the event's effects must still be executed.
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=f"counting {[fact.kind.name for fact in facts]}")

    def refused(self, operation: str, reason: str) -> None:
        """Count a request that was refused before it got to the lease table."""
        self.counters[families.DENIALS][operation, reason] += 1

    def forward_revoked(self, status: str, seen_after_ns: int, told_after_ns: int | None) -> None:
        """Count a launch that a session refused because a region was revoked."""
        self._observe(families.FORWARD_REVOKED_SECONDS, (status,), seen_after_ns)
        if told_after_ns is not None:
            self._observe(families.FORWARD_TOLD_SECONDS, (status,), told_after_ns)

    def worked(self, pair: Labels, increments: Iterable[tuple[MetricFamily, float]]) -> None:
        """Add the work since the last call of a tenant's sessions on a card."""
        for family, increment in increments:
            # A family with only the card as its label counts all tenants together.
            self.counters[family][pair[: len(family.labels)]] += increment

    def pair(self, lease: LeaseSnapshot) -> Labels:
        """Return the labels of a lease's card and tenant."""
        return self._pair(lease.card_uuid, lease.tenant)

    def used(self, card_uuid: str, tenant: str, use: LeaseTimeUse) -> None:
        spent = (
            (families.SESSION_BUSY_SECONDS, use.busy_ns / NS_PER_S),
            (families.SESSION_GPU_SECONDS, use.gpu_ns / NS_PER_S),
            (families.SESSION_HELD_BACK_SECONDS, use.held_ns / NS_PER_S),
        )
        self.worked(self._pair(card_uuid, tenant), spent)

    def _pair(self, card_uuid: str, tenant: str) -> Labels:
        labels = (card_uuid, self._tenants.of(tenant))
        if labels not in self.pairs:
            self.pairs[labels] = None
            # Start each series at 0, because a rate needs a value before the first event.
            for family in _OF_PAIRS:
                self.counters[family][labels] = 0.0
        return labels

    # --- facts ---

    def _count(self, family: MetricFamily, fact: Fact, increment: float = 1) -> None:
        """Add to the family's series for the fact, if the fact has the family's labels."""
        if family.labels == families.DENIED:
            request = None if fact.request is None else REQUESTS.get(type(fact.request.event))
            # Denials of the daemon's own requests have no operation for the label, so they are not counted.
            if request is not None:
                self.refused(request.opcode.name.lower(), fact.source.denial.reason.value)
        elif family.labels == families.CARD:
            # A fact about the pool has no lease, but names its card.
            card = fact.card if fact.lease is None else fact.lease.card_uuid
            self.counters[family][(card,)] += increment
        elif fact.lease is None:
            return
        elif family.labels == families.FAILED:
            self.counters[family][fact.lease.card_uuid, fact.source.failure.value] += increment
        else:
            self.counters[family][self.pair(fact.lease)] += increment

    def _measure_acquire(self, fact: Fact, is_region: bool) -> None:
        if fact.lease is not None and fact.request is not None:
            family = families.REGION_OPEN_SECONDS if is_region else families.ACQUIRE_SECONDS
            self._observe(family, (fact.lease.card_uuid,), fact.now_ns - fact.request.at_ns)

    def _measure_lateness(self, fact: Fact, is_region: bool) -> None:
        lease = fact.lease
        if fact.times.cause is Cause.EXPIRED and lease is not None and lease.deadline_ns is not None:
            self._observe(families.EXPIRY_LATENESS_SECONDS, (), fact.now_ns - lease.deadline_ns)

    def _measure_revocation(self, fact: Fact, is_region: bool) -> None:
        over_ns, cause = fact.times.over_ns, fact.times.cause
        if over_ns is not None and cause is not None:
            self._observe(families.REVOCATION_SECONDS, (cause.value,), fact.now_ns - over_ns)

    def _measure_park(self, fact: Fact, is_region: bool) -> None:
        family = families.PARK_SECONDS if fact.kind is FactKind.PARKED else families.RETURN_SECONDS
        self._observe(family, (), fact.source.took_ns)
        if fact.kind is FactKind.PARKED and fact.source.ahead_bytes:
            self._count(families.PARKED_AHEAD, fact)
            self._count(families.PARKED_AHEAD_BYTES, fact, fact.source.ahead_bytes)

    def _count_mismatch(self, fact: Fact, is_region: bool) -> None:
        if fact.source.failure is ParkFailure.MISMATCH:
            self._count(families.IMAGE_MISMATCHES, fact)

    def _count_direct_move(self, fact: Fact, is_region: bool) -> None:
        if not fact.source.why_through_host:
            self._count(families.LEASES_MOVED_DIRECTLY, fact)

    def _measure_end(self, fact: Fact, is_region: bool) -> None:
        lease, times = fact.lease, fact.times
        if lease is None:
            return
        # A fenced lease has a lifetime. It has no reclaim time, because its bytes were not proved free.
        is_proved = fact.kind is FactKind.ENDED and times.over_ns is not None
        if is_region:
            if is_proved and times.began_ns is not None and times.cause is not None:
                self._observe(families.REGION_RETURN_SECONDS, (times.cause.value,), fact.now_ns - (times.over_ns or 0))
            return
        if is_proved:
            self._observe(families.RECLAIM_SECONDS, (lease.card_uuid,), fact.now_ns - (times.over_ns or 0))
        if times.began_ns is not None:
            # If the time of the refusal is unknown, as for a lease of an earlier daemon, the lease lasted until this
            # fact.
            over_ns = fact.now_ns if times.over_ns is None else times.over_ns
            self._observe(families.LEASE_SECONDS, self.pair(lease), over_ns - times.began_ns)

    def _observe(self, family: MetricFamily, labels: Labels, ns: int) -> None:
        self.histograms[family].observe(labels, ns / NS_PER_S)
