"""Computes the gauges, which show the node's state at the moment of a scrape. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Final

from gpulease.daemon.leases.devices import CardSnapshot
from gpulease.daemon.leases.model import LeaseSnapshot, LeaseState, WarmSnapshot, WarmState
from gpulease.daemon.leases.parking import ParkPace
from gpulease.daemon.leases.wait_queue import WaiterSnapshot
from gpulease.daemon.record.metrics import families
from gpulease.daemon.record.metrics.families import Labels, MetricFamily
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.time_units import NS_PER_S

RECYCLED: Final = "recycled"
"""The state of a ready context that is kept for the tenant that it has served."""

Values = Mapping[Labels, float]


@dataclass(slots=True)
class TenantTotals:
    """Sums over live leases and open regions, by card and tenant.

    The leases may be added in several turns of the broker's loop, because ten thousand leases take tens of
    milliseconds. Each counts with its state when it is added.

    Attributes:
        fenced: Numbers of fenced leases, by card.
    """

    active: Counter[Labels] = field(default_factory=Counter)
    leased_bytes: Counter[Labels] = field(default_factory=Counter)
    held_bytes: Counter[Labels] = field(default_factory=Counter)
    open_regions: Counter[Labels] = field(default_factory=Counter)
    region_bytes: Counter[Labels] = field(default_factory=Counter)
    fenced: Counter[str] = field(default_factory=Counter)

    def add(self, pair: Labels, lease: LeaseSnapshot, held_bytes: int = 0) -> None:
        """Add a lease and the bytes that its sessions hold, or a region."""
        # A region's bytes are part of its lease's slice, so regions are summed up separately from leases.
        if lease.parent_id:
            self.open_regions[pair] += lease.state is LeaseState.ACTIVE
            self.region_bytes[pair] += lease.size_bytes
            return
        self.active[pair] += lease.state is LeaseState.ACTIVE
        # A pending lease already has its bytes, although it can't be used yet.
        if lease.state in (LeaseState.PENDING, LeaseState.ACTIVE):
            self.leased_bytes[pair] += lease.size_bytes
        self.held_bytes[pair] += held_bytes
        self.fenced[lease.card_uuid] += lease.state is LeaseState.FENCED


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The node at one moment.

    Attributes:
        tenants: Sums over leases and regions.
        pairs: Each pair of card and tenant that ever had a lease. Without a lease, its gauges are 0.
        booked_bytes: Bytes that the lease table has booked for live leases, by card, read at the same moment as
            `cards`.
        stray_bytes: Used bytes that belong to no process and are not booked, by card. Cards that did not answer are
            missing.
        busy_ratios: The fraction of the last second in which sessions used a card, by card. Cards without a session are
            missing.
        checks: The results of the readiness checks, by name.
        park_host_bytes: Host memory that parked sessions hold, and its limit.
        park_paces: The pace of parks, by card.
        audit: The audit log's figures; None if there is no audit log.
        fleet: The figures of the node's fleet; None if the node belongs to none.
    """

    now_ns: int
    tenants: TenantTotals
    cards: Sequence[CardSnapshot]
    warm: Sequence[WarmSnapshot]
    waiting: Sequence[WaiterSnapshot]
    pairs: Iterable[Labels]
    booked_bytes: Mapping[str, int]
    stray_bytes: Mapping[str, int]
    busy_ratios: Mapping[str, float]
    checks: Mapping[str, bool]
    is_draining: bool
    audit: "AuditFacts | None"
    version: str
    driver: str
    fleet: "FleetFacts | None" = None
    park_host_bytes: tuple[int, int] = (0, 0)
    park_paces: Mapping[str, ParkPace] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AuditFacts:
    """The audit log's figures: records that wait to be written, and records that were dropped for lack of room."""

    is_writable: bool
    waiting: int
    dropped: int


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """The figures of the node's fleet.

    Attributes:
        horizon_s: Seconds until claimed leases end, unless a heartbeat is acknowledged; negative after their end.
        beats: Number of acknowledged heartbeats.
        fenced: Number of times that the fleet declared this node dead.
        placements: Claims of names by result.
        quota_claims: Claims of quotas' bytes by result.
        unreadable: Values in etcd that could not be read.
        store_bytes: Size of the largest database of etcd's members; 0 if it is not known yet.
        store_quota_bytes: etcd's limit on this size.
    """

    horizon_s: float
    beats: int
    fenced: int
    placements: Mapping[str, int]
    quota_claims: Mapping[str, int]
    unreadable: int
    store_bytes: int
    store_quota_bytes: int


def gauges(facts: NodeFacts) -> dict[MetricFamily, Values]:
    """Return the values of every gauge, and of the counters of the audit log and the fleet.

    Families of parts that the node does not have are empty.
    """
    return _of_tenants(facts) | _of_cards(facts) | _of_pool_and_line(facts) | _of_daemon(facts) | _of_fleet(facts.fleet)


def _of_tenants(facts: NodeFacts) -> dict[MetricFamily, Values]:
    tenants = facts.tenants
    return {
        # Include each pair of card and tenant that ever had a lease, even if its value is 0 now.
        families.REGIONS_ACTIVE: {pair: tenants.open_regions[pair] for pair in facts.pairs},
        families.REGIONS_BYTES: {pair: tenants.region_bytes[pair] for pair in facts.pairs},
        families.LEASES_ACTIVE: {pair: tenants.active[pair] for pair in facts.pairs},
        families.LEASES_BYTES: {pair: tenants.leased_bytes[pair] for pair in facts.pairs},
        families.SESSION_ALLOCATED_BYTES: {pair: tenants.held_bytes[pair] for pair in facts.pairs},
    }


def _of_cards(facts: NodeFacts) -> dict[MetricFamily, Values]:
    # Use a copy, because a second call with the same facts must not count the contexts again.
    fenced = facts.tenants.fenced.copy()
    for context in facts.warm:
        fenced[context.card_uuid] += context.state is WarmState.FENCED
    cards = facts.cards
    return {
        families.CARD_INFO: {(card.uuid, str(card.index), card.name): 1 for card in cards},
        families.CARD_CAPACITY_BYTES: {(card.uuid,): card.capacity_bytes for card in cards},
        families.CARD_HELD_BYTES: {(card.uuid,): card.held_bytes for card in cards},
        # On a drained node nothing can be granted. A drained card already reports 0.
        families.CARD_AVAILABLE_BYTES: {
            (card.uuid,): 0 if facts.is_draining else card.available_bytes for card in cards
        },
        families.CARD_OTHERS_BYTES: {
            (card.uuid, holder): used_bytes
            for card in cards
            for holder, used_bytes in (("unowned", card.unowned_bytes), ("outside", card.outside_bytes))
        },
        families.FENCED_SLICES: {(card.uuid,): fenced[card.uuid] for card in cards},
        families.FENCED_BYTES: {(card.uuid,): card.fenced_bytes for card in cards},
        # Bytes are leaked if the card's sum differs from the table's, or if used bytes belong to no process. Leave out
        # cards that did not answer, for which 0 would be wrong.
        families.LEAKED_BYTES: {
            (card.uuid,): abs(card.held_bytes - facts.booked_bytes.get(card.uuid, 0)) + facts.stray_bytes[card.uuid]
            for card in cards
            if card.uuid in facts.stray_bytes
        },
        families.CARD_DRAINING: {(card.uuid,): facts.is_draining or card.drain_ns is not None for card in cards},
        families.CARD_BUSY_RATIO: {(card.uuid,): facts.busy_ratios.get(card.uuid, 0.0) for card in cards},
        families.PARKED_BYTES: {(card.uuid,): card.parked_bytes for card in cards},
        families.PARK_WAIT_SECONDS: {
            (uuid, requester): wait_ns / NS_PER_S
            for uuid, pace in facts.park_paces.items()
            for requester, wait_ns in (("need", pace.need_wait_ns), ("tenant", pace.tenant_wait_ns))
        },
        families.WARM_WANTED: {(card.uuid,): card.warm_wanted for card in cards},
    }


POOL_STATES: Final = tuple(state.value for state in WarmState if state is not WarmState.HELD)
"""The states of contexts with a series in the metrics; there is one for RECYCLED as well."""


def _state_of(context: WarmSnapshot) -> str:
    # A held worker counts as one that is leaving its session.
    state = WarmState.DROPPING if context.state is WarmState.HELD else context.state
    return RECYCLED if context.is_recycled and state is WarmState.READY else state.value


def _of_pool_and_line(facts: NodeFacts) -> dict[MetricFamily, Values]:
    # A recycled context has a state of its own, because only one tenant can use it.
    contexts = Counter((context.card_uuid, _state_of(context)) for context in facts.warm)
    # Include every state of every card, even if it is 0, because alerts need series that do not disappear.
    states = [(card.uuid, state) for card in facts.cards for state in (*POOL_STATES, RECYCLED)]
    # If no acquire waits, the longest wait is 0.
    oldest_ns = min((waiter.since_ns for waiter in facts.waiting), default=facts.now_ns)
    return {
        families.WARM_CONTEXTS: {labels: contexts[labels] for labels in states},
        families.QUEUE_LENGTH: {(): len(facts.waiting)},
        families.QUEUE_OLDEST_SECONDS: {(): max(0, facts.now_ns - oldest_ns) / NS_PER_S},
    }


def _of_daemon(facts: NodeFacts) -> dict[MetricFamily, Values]:
    audit = facts.audit
    return {
        families.READY: {(): all(facts.checks.values())},
        families.CHECK: {(name,): holds for name, holds in facts.checks.items()},
        families.DRAINING: {(): facts.is_draining},
        families.PARK_HOST_BYTES: {(): facts.park_host_bytes[0]},
        families.PARK_HOST_LIMIT_BYTES: {(): facts.park_host_bytes[1]},
        families.AUDIT_WRITABLE: {} if audit is None else {(): audit.is_writable},
        families.AUDIT_WAITING: {} if audit is None else {(): audit.waiting},
        families.AUDIT_DROPPED: {} if audit is None else {(): audit.dropped},
        families.BUILD_INFO: {(facts.version, facts.driver): 1},
    }


def _of_fleet(fleet: FleetFacts | None) -> dict[MetricFamily, Values]:
    return {
        families.FLEET_HORIZON_SECONDS: {} if fleet is None else {(): fleet.horizon_s},
        families.FLEET_BEATS: {} if fleet is None else {(): fleet.beats},
        families.FLEET_FENCED: {} if fleet is None else {(): fleet.fenced},
        families.FLEET_UNREADABLE: {} if fleet is None else {(): fleet.unreadable},
        families.FLEET_PLACEMENTS: {} if fleet is None else {(key,): n for key, n in fleet.placements.items()},
        families.FLEET_QUOTA_CLAIMS: {} if fleet is None else {(key,): n for key, n in fleet.quota_claims.items()},
        families.FLEET_STORE_BYTES: {} if fleet is None else {(): fleet.store_bytes},
        families.FLEET_STORE_QUOTA_BYTES: {} if fleet is None else {(): fleet.store_quota_bytes},
    }
