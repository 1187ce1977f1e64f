"""The families of the daemon's metrics, and the containers for their values.

Names follow Prometheus's rules (prometheus.io/docs/practices/naming): base units, and the suffix `_total` for counters.
The exposition adds the suffix to the family's name (OpenMetrics 1.0, Counter), so `gpu_lease_acquired` is scraped as
`gpu_lease_acquired_total`.

Cards have the label `UUID`, in capitals as in dcgm-exporter, so that the metrics of both can be joined. No label names
a lease, because the number of leases has no limit. Families of sessions sum up all sessions of a tenant on a card.

`daemon/manual/metrics.md` is generated from this file. The model server's metrics are in
`client/serve/models/model_metrics.py`.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import field
from enum import Enum
from typing import Final

from gpulease.daemon.contract.control_page import SESSION_TOTALS
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.foreign_text import encodable


class FamilyKind(Enum):
    """A family's type, as the exposition names it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"


@dataclass(frozen=True, slots=True, eq=False)
class MetricFamily:
    """A family of series. Families are compared by identity, so that lookups by family are fast.

    Attributes:
        meaning: The help text.
        labels: The labels' names, in the order of their values.
        bounds: A histogram's upper bounds in seconds, ascending, without infinity.
    """

    name: str
    kind: FamilyKind
    meaning: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def series_names(self) -> tuple[str, ...]:
        """The names of the family's series in the exposition."""
        # The text format appends these suffixes (OpenMetrics 1.0, Suffixes).
        match self.kind:
            case FamilyKind.COUNTER:
                return (f"{self.name}_total",)
            case FamilyKind.HISTOGRAM:
                return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
            case FamilyKind.SUMMARY:
                return (f"{self.name}_sum", f"{self.name}_count")
        return (self.name,)


PAIR: Final = ("UUID", "tenant")
CARD: Final = ("UUID",)
DENIED: Final = ("operation", "reason")
FAILED: Final = ("UUID", "reason")

LATENCY_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Bounds of histograms of lease operations. A context's end takes about 100 ms on a card, and 1 or 2 ms in the embedded
driver. After 30 s a slice is fenced, unless the operator sets another time."""

FLIP_BOUNDS_S: Final = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01),
    *(0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)
"""Bounds of histograms of regions' ends. A session reads a region's changed word within 0.1 ms, or at its next launch.
To release a region's pages takes a few hundred microseconds after the launches in flight have ended."""

LATENESS_BOUNDS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


def _counter(name: str, help_text: str, labels: tuple[str, ...] = PAIR) -> MetricFamily:
    return MetricFamily(name, FamilyKind.COUNTER, help_text, labels)


def _gauge(name: str, help_text: str, labels: tuple[str, ...] = CARD) -> MetricFamily:
    return MetricFamily(name, FamilyKind.GAUGE, help_text, labels)


# --- sessions: counters on workers' control pages ---

SESSION_ALLOCATED_BYTES: Final = _gauge(
    "gpu_session_mem_alloc_bytes",
    "Bytes that all sessions of a tenant have allocated on a card; `gpulease leases` shows each session's.",
    PAIR,
)
SESSION_LAUNCHES: Final = _counter("gpu_session_launch", "Kernels queued, including those of graphs and submits.")
SESSION_SYNCS: Final = _counter("gpu_session_sync", "Completed waits for the card (syncs), including failed ones.")
SESSION_SYNC_ERRORS: Final = _counter("gpu_session_sync_errors", "Failed waits for the card (syncs).")
SESSION_COPIES: Final = _counter("gpu_session_copy", "Copies to and from the card.")
SESSION_COPIED_BYTES: Final = _counter("gpu_session_copied_bytes", "Bytes of these copies.")
AHEAD_DISCARDED: Final = _counter(
    "gpu_lease_park_ahead_discarded",
    "Copies ahead of a park that were discarded, because the session was used or ended before it was parked.",
    CARD,
)
AHEAD_DISCARDED_BYTES: Final = _counter(
    "gpu_lease_park_ahead_discarded_bytes", "Bytes that these copies had moved to the host's memory in vain.", CARD
)
SESSION_OPERATIONS: Final = _counter("gpu_session_operation", "Requests that sessions accepted, of every kind.")
SESSION_OPERATION_ERRORS: Final = _counter("gpu_session_operation_errors", "Failed requests of sessions.")
SESSION_FAULTS: Final = _counter("gpu_session_fault", "Contexts lost to a fault, including those of submits.")
SESSION_BUSY_SECONDS: Final = _counter(
    "gpu_session_busy_seconds",
    "Seconds in which sessions had work outstanding, as their workers report, summed over sessions.",
)
SESSION_GPU_SECONDS: Final = _counter(
    "gpu_session_gpu_seconds",
    "GPU time: busy seconds, where a second in which k sessions of a card are busy counts 1/k for each of them.",
)
SESSION_HELD_BACK_SECONDS: Final = _counter(
    "gpu_session_held_back_seconds",
    "Seconds in which sessions' launches waited because of weights, a cap or the latency class.",
)

# --- leases ---

LEASES_ACQUIRED: Final = _counter("gpu_lease_acquired", "Leases granted.")
LEASES_ADOPTED: Final = _counter("gpu_lease_adopted", "Leases of an earlier daemon that this one took over.")
LEASES_RENEWED: Final = _counter("gpu_lease_renewed", "Renewals.")
SUBMITS: Final = _counter("gpu_lease_submits", "Submits that got a context.")
LEASES_DROPPED: Final = _counter("gpu_lease_dropped", "Leases that ended, whatever the cause.")
LEASES_ACTIVE: Final = _gauge("gpu_lease_active", "Leases that are usable now.", PAIR)
LEASES_BYTES: Final = _gauge("gpu_lease_slice_bytes", "Bytes leased: the slices of leases that have not ended.", PAIR)
LEASE_SECONDS: Final = MetricFamily(
    "gpu_lease_lifetime_seconds",
    FamilyKind.SUMMARY,
    "Lifetimes of ended leases, from the grant until work was refused.",
    PAIR,
)
DENIALS: Final = _counter("gpu_lease_denied", "Requests that were refused.", DENIED)
ACQUIRE_SECONDS: Final = MetricFamily(
    "gpu_lease_acquire_seconds",
    FamilyKind.HISTOGRAM,
    "Time from the request to the grant, including waiting in the queue.",
    CARD,
    (*LATENCY_BOUNDS_S, 60.0, 300.0),
)
REVOCATION_SECONDS: Final = MetricFamily(
    "gpu_lease_revocation_seconds",
    FamilyKind.HISTOGRAM,
    "Time from the refusal of work to the end of the worker's process, by the cause of the lease's end.",
    ("cause",),
    LATENCY_BOUNDS_S,
)
RECLAIM_SECONDS: Final = MetricFamily(
    "gpu_lease_reclaim_seconds",
    FamilyKind.HISTOGRAM,
    "Time from the refusal of work to the proof that the memory is free.",
    CARD,
    LATENCY_BOUNDS_S,
)
EXPIRY_LATENESS_SECONDS: Final = MetricFamily(
    "gpu_lease_expiry_lateness_seconds",
    FamilyKind.HISTOGRAM,
    "Time from the deadline of an expired lease until the broker refused its work.",
    (),
    LATENESS_BOUNDS_S,
)
LEASES_PARKED: Final = _counter("gpu_lease_parked", "Sessions that were moved to the host's memory.", CARD)
LEASES_RETURNED: Final = _counter("gpu_lease_returned", "Parked sessions that returned to their card.", CARD)
PARKS_FAILED: Final = _counter(
    "gpu_lease_park_failed", "Parks and returns that failed; the session stayed where it was.", CARD
)
PARK_FAILURES: Final = _counter(
    "gpu_lease_park_failure",
    "Failures of parks, returns and moves: `park`, `leave` (the process), `return`, `no_room`, `worker` (it ended or"
    " was late), `misfit` (a worker could not continue the session exactly), `mismatch` (none could), `direct_move`.",
    FAILED,
)
LEASES_COLD: Final = _counter("gpu_lease_cold", "Parked sessions whose worker process was ended (parked cold).", CARD)
LEASES_MOVED: Final = _counter("gpu_lease_moved", "Sessions that were moved to this card.", CARD)
LEASES_MOVED_DIRECTLY: Final = _counter(
    "gpu_lease_moved_directly", "Sessions whose bytes were moved to this card directly from another card.", CARD
)
IMAGE_MISMATCHES: Final = _counter(
    "gpu_lease_image_mismatch", "Leases that ended because their session could not be restored exactly.", CARD
)
PARKED_AHEAD: Final = _counter(
    "gpu_lease_parked_ahead",
    "Parks of which some or all bytes had been copied ahead, while the session was idle.",
    CARD,
)
PARKED_AHEAD_BYTES: Final = _counter("gpu_lease_parked_ahead_bytes", "Bytes of parks that had been copied ahead.", CARD)
PARKED_BYTES: Final = _gauge(
    "gpu_lease_parked_bytes", "Bytes of parked sessions' slices, which other leases may use meanwhile."
)
PARK_HOST_BYTES: Final = _gauge("gpu_lease_park_host_bytes", "Host memory that is held for parked sessions.", ())
PARK_HOST_LIMIT_BYTES: Final = _gauge("gpu_lease_park_host_limit_bytes", "The setting `park_memory`.", ())
PARK_WAIT_SECONDS: Final = _gauge(
    "gpu_lease_park_wait_seconds",
    "Time until the card's next park may begin, because of the setting `parks_per_minute`, by who requests it: `need`"
    " for other leases' need and operators, `tenant` for tenants and idleness; 0: at once.",
    ("UUID", "by"),
)
PARK_SECONDS: Final = MetricFamily(
    "gpu_lease_park_seconds",
    FamilyKind.HISTOGRAM,
    "Time from the order to park a session to the proof that its memory is free.",
    (),
    LATENCY_BOUNDS_S,
)
RETURN_SECONDS: Final = MetricFamily(
    "gpu_lease_return_seconds",
    FamilyKind.HISTOGRAM,
    "Time from the order to return a session to its card until the session is usable; excludes the wait for room.",
    (),
    LATENCY_BOUNDS_S,
)
REGIONS_OPENED: Final = _counter("gpu_region_opened", "Regions granted.")
REGIONS_ADOPTED: Final = _counter("gpu_region_adopted", "Regions of an earlier daemon that this one took over.")
REGIONS_RENEWED: Final = _counter("gpu_region_renewed", "Renewals of regions.")
REGIONS_ENDED: Final = _counter("gpu_region_ended", "Regions that have ended: their memory was returned or fenced.")
REGIONS_ACTIVE: Final = _gauge("gpu_region_active", "Regions in which launches may begin now.", PAIR)
REGIONS_BYTES: Final = _gauge(
    "gpu_region_bytes", "Bytes of regions that are not returned yet: parts of the slices of their leases.", PAIR
)
REGION_OPEN_SECONDS: Final = MetricFamily(
    "gpu_region_open_seconds",
    FamilyKind.HISTOGRAM,
    "Time from the request for a region to its grant.",
    CARD,
    FLIP_BOUNDS_S,
)
REGION_RETURN_SECONDS: Final = MetricFamily(
    "gpu_region_return_seconds",
    FamilyKind.HISTOGRAM,
    "Time from the refusal of a region's launches to the proof that its memory is free, by the cause of its end.",
    ("cause",),
    FLIP_BOUNDS_S,
)
FORWARD_REVOKED_SECONDS: Final = MetricFamily(
    "gpu_region_forward_revoked_seconds",
    FamilyKind.HISTOGRAM,
    "Time from the change of a region's state word to the first launch that was refused because of it, as sessions"
    " report.",
    ("status",),
    FLIP_BOUNDS_S,
)
FORWARD_TOLD_SECONDS: Final = MetricFamily(
    "gpu_region_forward_told_seconds",
    FamilyKind.HISTOGRAM,
    "Time from the change of a region's state word to the reply that reports the first refused launch to its tenant.",
    ("status",),
    FLIP_BOUNDS_S,
)
LEAKED_BYTES: Final = _gauge(
    "gpu_lease_leaked_bytes",
    "Used bytes that no process holds and nothing accounts for, and differences between accounts; must be 0.",
)
FENCED_SLICES: Final = _gauge(
    "gpu_lease_fenced_slices", "Slices that are fenced because they could not be proved free."
)
FENCED_BYTES: Final = _gauge("gpu_lease_fenced_bytes", "Bytes of fenced slices.")
FENCES: Final = _counter("gpu_lease_fenced", "Slices that were fenced, including those cleared since.", CARD)

# --- cards, the pool, the line ---

CARD_INFO: Final = _gauge("gpulease_card_info", "1 for each card, with its index and name.", ("UUID", "index", "name"))
CARD_CAPACITY_BYTES: Final = _gauge("gpulease_card_capacity_bytes", "Bytes that can be leased.")
CARD_HELD_BYTES: Final = _gauge("gpulease_card_held_bytes", "Bytes that leases hold, including their contexts.")
CARD_AVAILABLE_BYTES: Final = _gauge("gpulease_card_available_bytes", "The largest lease that could be granted now.")
CARD_OTHERS_BYTES: Final = _gauge(
    "gpulease_card_others_bytes",
    "Bytes that the driver (`unowned`) or other programs (`outside`) have taken since the capacity was measured.",
    ("UUID", "holder"),
)
CARD_BUSY_RATIO: Final = _gauge(
    "gpu_card_busy_ratio", "The part of the last second in which sessions had work outstanding on the card, 0 to 1."
)
WARM_CONTEXTS: Final = _gauge(
    "gpulease_warm_contexts", "Pre-created contexts, and recycled ones that wait for their tenant.", ("UUID", "state")
)
WARM_WANTED: Final = _gauge("gpulease_warm_contexts_wanted", "Contexts that the daemon keeps ready.")
WARM_TAKEN: Final = _counter(
    "gpulease_warm_contexts_taken", "Pre-created contexts that a lease or a submit took.", CARD
)
WARM_LOST: Final = _counter("gpulease_warm_contexts_lost", "Contexts that ended while they waited for a lease.", CARD)
WARM_RECYCLED: Final = _counter(
    "gpulease_warm_contexts_recycled", "Times that a context was kept for its tenant's next lease.", CARD
)
QUEUE_LENGTH: Final = _gauge("gpulease_queue_length", "Acquires that wait for room.", ())
QUEUE_OLDEST_SECONDS: Final = _gauge(
    "gpulease_queue_oldest_seconds", "How long the first acquire in the queue has waited.", ()
)

# --- the daemon ---

READY: Final = _gauge("gpulease_ready", "Whether the daemon can grant leases: all of its checks pass.", ())
CHECK: Final = _gauge("gpulease_check", "Whether the check passes.", ("check",))
DRAINING: Final = _gauge("gpulease_draining", "Whether the node is drained.", ())
CARD_DRAINING: Final = _gauge("gpulease_card_draining", "Whether the card is drained, with the node or alone.")
AUDIT_WRITABLE: Final = _gauge("gpulease_audit_writable", "Whether the audit log can be written, if one is kept.", ())
AUDIT_WAITING: Final = _gauge("gpulease_audit_records_waiting", "Records that are not on disk yet.", ())
AUDIT_DROPPED: Final = _counter("gpulease_audit_records_dropped", "Records that were dropped: gaps in the log.", ())
FLEET_HORIZON_SECONDS: Final = _gauge(
    "gpu_fleet_horizon_seconds", "Seconds until leases with a name end, if etcd acknowledges no further heartbeat.", ()
)
FLEET_BEATS: Final = _counter("gpu_fleet_beats", "Heartbeats that etcd acknowledged.", ())
FLEET_FENCED: Final = _counter("gpu_fleet_fenced", "How often the fleet declared this node dead.", ())
FLEET_UNREADABLE: Final = _counter("gpu_fleet_unreadable_values", "Values in etcd that could not be read.", ())
FLEET_PLACEMENTS: Final = _counter("gpu_fleet_placements", "Claims of names, by their result.", ("result",))
FLEET_QUOTA_CLAIMS: Final = _counter(
    "gpu_fleet_quota_claims", "Claims on tenants' byte quotas in the fleet, by result.", ("result",)
)
FLEET_STORE_BYTES: Final = _gauge(
    "gpu_fleet_store_bytes", "Size of etcd's database, on the member where it is largest.", ()
)
FLEET_STORE_QUOTA_BYTES: Final = _gauge(
    "gpu_fleet_store_quota_bytes", "etcd's limit on this size, above which it accepts no heartbeat.", ()
)
LOOP_LAG_SECONDS: Final = MetricFamily(
    "gpulease_loop_lag_seconds",
    FamilyKind.HISTOGRAM,
    "How late the broker's loop ran due work, sampled once a second.",
    (),
    (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0),
)
BUILD_INFO: Final = _gauge("gpulease_build_info", "1, with the running version and driver.", ("version", "driver"))

FAMILIES: Final = tuple(value for value in dict(globals()).values() if isinstance(value, MetricFamily))
"""Every family, in the order of this file."""

_BY_NAME: Final = {family.name: family for family in FAMILIES}

SESSION_FAMILIES: Final = tuple(tuple(_BY_NAME[name] for name in counter.metrics) for counter in SESSION_TOTALS)
"""For each counter of SESSION_TOTALS, the families to which it is added."""


Labels = tuple[str, ...]

OTHERS: Final = "other"
"""The common label of tenants beyond the maximum number."""

MAX_TENANT_SERIES: Final = 64
"""Maximum number of tenants with a label of their own. Without a maximum, the daemon, its scrapes and Prometheus would
grow with every new name. A tenant keeps its label, because a counter must not decrease."""

MAX_PAIR_SERIES: Final = 512
"""Maximum number of combinations of cards and tenants. On a host with more than 8 cards, it allows fewer tenants with a
label. A scrape with all combinations in all families has 1 MB."""

MAX_LABEL_CHARS: Final = 112
"""Maximum number of characters of a tenant's name in a label."""


@dataclass(slots=True)
class Distribution:
    """The numbers of observations, by the lowest bound that is not below them, and their sum."""

    counts: list[int]
    total: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)


class Histogram:
    """The distributions of a histogram, or of a summary, by labels. A summary has no bounds."""

    def __init__(self, family: MetricFamily) -> None:
        self.family = family
        self.of: dict[Labels, Distribution] = {}

    def __bool__(self) -> bool:
        return bool(self.of)

    def observe(self, labels: Labels, value: float) -> None:
        """Add one observation. A negative value counts as 0: it comes from clocks that were read in another order."""
        distribution = self.of.get(labels)
        if distribution is None:
            distribution = self.of[labels] = Distribution([0] * (len(self.family.bounds) + 1))
        distribution.total += max(0.0, value)
        # Count it at the first bound that is not below the value. The last cell counts values above all bounds.
        distribution.counts[bisect_left(self.family.bounds, value)] += 1


@dataclass(slots=True)
class TenantLabels:
    """Labels of tenants: the first `most` tenants have their names as labels, and all others share one label."""

    most: int
    _known: dict[str, str] = field(default_factory=dict)

    def of(self, tenant: str) -> str:
        """Return a tenant's label, which never changes."""
        label = self._known.get(tenant)
        # A tenant that has a label keeps it.
        if label is None:
            if len(self._known) >= self.most:
                return OTHERS
            # A name may come from a certificate and have no UTF-8 encoding, which the exposition needs.
            label = encodable(tenant)[:MAX_LABEL_CHARS]
            self._known[tenant] = label
        return label


Counts = defaultdict[Labels, float]


def counts() -> Counts:
    """Return empty values of a counter's series, each 0 until something is counted."""
    return defaultdict(float)


CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus's text format (prometheus.io/docs/instrumenting/exposition_formats)."""

Content = Mapping[MetricFamily, Mapping[Labels, float] | Histogram]
"""The values of each family. A family without values is left out of the text."""
