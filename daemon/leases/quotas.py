"""Limits of the node and of each tenant, and the phases of a lease.

Each limit is listed with the mistake or attack that it stops. A phase shows which actions a tenant still has time for.
WARNING: finish and free the lease, or renew it if that helps. GRACE: work in flight may finish, but no new work starts.
TEARDOWN: only the proof that the memory is free is outstanding.
"""

from collections.abc import Mapping
from dataclasses import field, replace
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple

from gpulease.daemon.leases import denials
from gpulease.daemon.leases.denials import Denial, too_fast
from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.model import (
    ENDED_REGIONS,
    Cause,
    Lease,
    LeaseSnapshot,
    LeaseState,
    RegionState,
    TableRegion,
)
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.lease_options import WEIGHT
from gpulease.protocol.limits import USUAL_MAX_WAIT_S
from gpulease.protocol.opcodes import Phase
from gpulease.protocol.settings_reader import (
    BadSetting,
    Declared,
    Setting,
    check_bounds,
    must_be,
    read_size,
    read_values,
)
from gpulease.protocol.time_units import NS_PER_MINUTE, NS_PER_MS, NS_PER_S

MAX_RATES: Final = 65_536
"""Maximum number of tenants for which rates are kept at one time: as many as a host has ordinary users."""


def _read_devices(value: Any) -> tuple[str, ...]:
    """Return cards' uuids and indexes as texts."""
    if not isinstance(value, list) or not all(type(item) in (int, str) for item in value):
        raise must_be("a list of cards' uuids or indexes", value)
    if not value:
        raise BadSetting("{} must name a card, or be left out")
    return tuple(map(str, value))


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of one tenant; None: only the node's own limit applies.

    Raises:
        ValueError: A limit is outside its setting's bounds, or the list of cards is empty.
    """

    max_vram_bytes: Annotated[
        int | None,
        Setting(
            "Maximum memory of all the tenant's leases and queued acquires together, not counting the "
            "memory of contexts.",
            key="max_vram",
            what="a size",
            read=read_size,
            least=1,
            unit="byte",
            example='"40GiB"',
        ),
    ] = None
    max_leases: Annotated[
        int | None,
        Setting(
            "Maximum number of leases that the tenant may have or wait for; replaces the node's max_leases_per_tenant.",
            least=1,
            example="8",
        ),
    ] = None
    max_ttl_s: Annotated[
        int | None,
        Setting(
            "Longest time in seconds that one grant or renewal may give; never more than the node's limit.",
            least=1,
            example="3600",
        ),
    ] = None
    acquires_per_minute: Annotated[
        int | None,
        Setting(
            "Maximum number of acquires and submits per minute on average, including refused ones.",
            least=1,
            example="60",
        ),
    ] = None
    acquire_burst: Annotated[int, Setting("Maximum number of acquires and submits that may come at once.", least=1)] = (
        10
    )
    devices: Annotated[
        tuple[str, ...] | None,
        Setting(
            "The cards that the tenant may use, by uuid or index.",
            what="a list of cards' uuids or indexes",
            read=_read_devices,
            example="[0, 1]",
        ),
    ] = None
    max_parked_bytes: Annotated[
        int | None,
        Setting(
            "Maximum number of bytes of the tenant's leases that may be parked in host memory at the same time.",
            key="parked_bytes",
            what="a size",
            read=read_size,
            least=0,
            unit="bytes",
            example='"64GiB"',
            added_later=True,
        ),
    ] = None
    fleet_quota: Annotated[
        bool,
        Setting(
            "Whether the tenant's leases count against its quota in the fleet, which `gpulease fleet quota` sets."
            " Set the same value on all nodes.",
            added_later=True,
        ),
    ] = False
    max_weight: Annotated[
        int,
        Setting(
            "The largest weight that the tenant's leases may have when the time of a card is shared. A request for"
            " more is refused; after a reload, an active lease with a larger weight counts as having this one.",
            least=1,
            most=WEIGHT.most,
            added_later=True,
        ),
    ] = 1
    max_share: Annotated[
        int | None,
        Setting(
            "Maximum percentage of each card's time that the tenant's leases may use together, even if "
            "no other tenant wants it.",
            least=1,
            most=100,
            example="30",
            added_later=True,
        ),
    ] = None
    may_latency: Annotated[
        bool,
        Setting(
            "Whether the tenant may have leases of the latency class: while such a lease has work outstanding, the"
            " other sessions of its card hold back.",
            added_later=True,
        ),
    ] = False

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.devices is not None and not self.devices:
            raise ValueError("devices must name a card, or be left out")

    def with_settings(self, settings: Mapping[str, Any]) -> "TenantLimits":
        return replace(self, **settings)

    def may_use(self, card: Card) -> bool:
        """Return whether the tenant may have leases on a card."""
        return self.devices is None or any(card.answers_to(device) for device in self.devices)


@dataclass(frozen=True, slots=True)
class TenantRules:
    """Limits of every tenant.

    Attributes:
        default: Limits of tenants that have none of their own.
        by_name: Limits of the other tenants, by their names.
    """

    default: TenantLimits = field(default_factory=TenantLimits)
    by_name: Mapping[str, TenantLimits] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, tenant: str) -> TenantLimits:
        return self.by_name.get(tenant, self.default)


class Rates:
    """Rates of events by a key: token buckets, each stored as the time at which it will be full again.

    An event moves that time forward by one interval. The event is allowed if the new time is at most a burst of
    intervals ahead. This is the generic cell rate algorithm (ITU-T I.371) as a virtual schedule.
    """

    def __init__(self) -> None:
        self.full_at_ns: dict[str, int] = {}

    def early_ns(self, key: str, interval_ns: int, burst: int, now_ns: int, events: int = 1) -> int:
        """Return by how much this number of events now would be too early; 0 if they are allowed."""
        # The bucket may be at most a burst of intervals away from full.
        full_at_ns = max(self.full_at_ns.get(key, 0), now_ns)
        return max(0, full_at_ns + events * interval_ns - (now_ns + burst * interval_ns))

    def count(self, key: str, interval_ns: int, now_ns: int) -> None:
        self.full_at_ns[key] = max(self.full_at_ns.get(key, 0), now_ns) + interval_ns


class AcquireRates(Rates):
    """Each tenant's rate of acquires: a bucket of `acquire_burst`, refilled `acquires_per_minute`."""

    def wait_ns(self, tenant: str, limits: TenantLimits, now_ns: int) -> int:
        """Return how long the tenant must wait before its request.

        If it may ask now, count the request and return 0.
        """
        if limits.acquires_per_minute is None:
            return 0
        interval_ns = NS_PER_MINUTE // limits.acquires_per_minute
        if early_ns := self.early_ns(tenant, interval_ns, limits.acquire_burst, now_ns):
            return early_ns
        # If the table is full, forget the tenants with a full bucket, who lose nothing by that. If no bucket is full,
        # refuse the new tenant for one interval, so that no other tenant's count is lost.
        if tenant not in self.full_at_ns and len(self.full_at_ns) >= MAX_RATES:
            self.full_at_ns = {name: due_ns for name, due_ns in self.full_at_ns.items() if due_ns > now_ns}
            if len(self.full_at_ns) >= MAX_RATES:
                return interval_ns
        self.count(tenant, interval_ns, now_ns)
        return 0

    def denial(self, tenant: str, limits: TenantLimits, now_ns: int) -> Denial | None:
        """Return the denial for a tenant that asks too often. If it may ask, count the request and return None."""
        wait_ns = self.wait_ns(tenant, limits, now_ns)
        if not wait_ns or limits.acquires_per_minute is None:
            return None
        return too_fast(tenant, limits.acquires_per_minute, -(-wait_ns // NS_PER_MS))


DEFAULT_GRACE_MS: Final = MappingProxyType({cause: cause.row.grace_ms for cause in Cause if cause.row.grace_ms})


MAX_GRACE_MS: Final = 10_000
"""Longest grace period of an ended lease, during which its kernels run and its memory stays unavailable. A larger
number is probably a mistake in the unit. A stopping daemon also waits for at most this time."""


GRACES: Final = MappingProxyType(
    {
        cause.value: Declared(
            cause.value,
            cause.value,
            int,
            cause.row.grace_ms,
            Setting("Milliseconds after a lease ended for this cause.", least=0, most=MAX_GRACE_MS),
        )
        for cause in Cause
        if cause.row.grace_ms is not None
    }
)
"""The settings of `[limits.grace_ms]`."""


def _read_graces(table: Any) -> Mapping[Cause, int]:
    graces = {Cause(cause): grace_ms for cause, grace_ms in read_values(GRACES, table).items()}
    return {**DEFAULT_GRACE_MS, **graces}


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """Bounds of one node; a request over a bound gets a denial that names it.

    Raises:
        ValueError: A bound is negative, or zero where nothing could ever be granted, or a grace is too long.
    """

    max_ttl_s: Annotated[
        int,
        Setting(
            "Longest time in seconds that one grant or renewal may give. Without a limit, a tenant that "
            "confused seconds and milliseconds would hold the card for weeks.",
            least=1,
        ),
    ] = 86_400
    min_size_bytes: Annotated[
        int, Setting("The smallest lease in bytes. Even an empty lease costs a process and a context.", least=1)
    ] = 1
    # Bounds process ids, file descriptors and the broker's memory.
    max_leases: Annotated[int, Setting("Maximum number of active leases. Each has a process.", least=1)] = 4096
    # Stops one tenant in a loop from using up max_leases for all others.
    max_leases_per_tenant: Annotated[
        int, Setting("Maximum number of active leases of a tenant whose table does not set max_leases.", least=1)
    ] = 256
    # Bounds the memory of the queue.
    max_waiting: Annotated[int, Setting("Maximum number of requests that wait for room.", least=1)] = 256
    # Stops one tenant from filling the queue for all others.
    max_waiting_per_tenant: Annotated[
        int, Setting("Maximum number of requests of one tenant that wait for room.", least=1)
    ] = 64
    # Stops a tenant that waits for a whole card, and queues again after each refusal, from keeping others off free
    # bytes.
    max_hold_back_s: Annotated[
        int,
        Setting(
            "Maximum number of seconds that a tenant's waiting requests may together keep other tenants "
            "from free memory, within any period ten times as long.",
            least=1,
        ),
    ] = 10
    # Stops an endless wait from occupying a connection and a place in the queue for a client that no longer needs them.
    max_wait_s: Annotated[int, Setting("Longest time in seconds that a request may wait for room.", least=1)] = (
        USUAL_MAX_WAIT_S
    )
    # Limits that the operator sets per tenant.
    tenants: TenantRules = field(default_factory=TenantRules)
    # Stops a killed client from holding its slice until its time ends.
    orphan_s: Annotated[
        int,
        Setting(
            "A lease without a connection, for example because its client was killed, ends after this many seconds,"
            " unless its tenant chose another time; 0: it lasts until its deadline.",
            least=0,
        ),
    ] = 0
    # Ended leases are kept so that a late call is answered with the reason. Stops a tenant in a loop of leases from
    # filling memory.
    max_tombstones: Annotated[int, Setting("How many ended leases the daemon remembers.", least=0)] = 65_536
    # Otherwise a lease that is renewed every second for a day would have 86,400 history entries.
    max_story_entries: Annotated[int, Setting("How many events of each lease the daemon remembers.", least=1)] = 64
    # Stops a driver that hangs in cuInit from keeping its bytes and its requester forever.
    spawn_timeout_s: Annotated[int, Setting("Seconds within which a new worker must be ready.", least=1)] = 60
    # Longest time for which a hung warm context delays the lease that takes it over. Then the lease gets a new one.
    adopt_timeout_s: Annotated[
        int, Setting("Seconds within which a pre-created context must take over its lease.", least=1)
    ] = 2
    # After this time a process that can't be reaped, or bytes that are not released, become visible as a fence.
    reclaim_timeout_s: Annotated[
        int, Setting("Seconds within which a lease's memory must be proved free; after that it is fenced.", least=1)
    ] = 30
    # Stops a session that never answers from blocking the requests for a region or for another size.
    session_timeout_s: Annotated[
        int,
        Setting("Seconds within which a session must open a region or resize its lease.", least=1, added_later=True),
    ] = 10
    # After this time the whole session ends, and the other tenants lose their regions. So it is longer than a lease's
    # grace period.
    region_grace_ms: Annotated[
        int,
        Setting(
            "Milliseconds that a launch may outlive a region that it named; after that the whole lease ends.",
            least=1,
            most=MAX_GRACE_MS,
            added_later=True,
        ),
    ] = 1000
    # Otherwise a tenant with many leases would get many shares of a card's time.
    shares_time: Annotated[
        bool,
        Setting(
            "Share each card's time between tenants by the weights of their leases even if every weight is 1. Without"
            " it, the time of a card is shared while one of its leases has another weight.",
            added_later=True,
        ),
    ] = False
    # Everything on the host shares its memory, so none is used unless the operator sets an amount.
    park_memory_bytes: Annotated[
        int,
        Setting(
            "Host memory that holds the bytes of parked sessions; 0: no session is parked. The daemon does not start if"
            " its control group allows less memory. If the host has less, the daemon logs a warning.",
            key="park_memory",
            what="a size",
            read=lambda value: 0 if value == 0 and value is not False else read_size(value),
            least=0,
            unit="bytes",
            added_later=True,
        ),
    ] = 0
    overcommit: Annotated[
        float,
        Setting(
            "Maximum bytes of parkable leases on a card, as a multiple of the card's capacity. Slices of other leases"
            " are never overcommitted.",
            least=1,
            most=64,
            added_later=True,
        ),
    ] = 1.0
    # Stops a session that has just returned from being parked again before its tenant has used it.
    park_stay_ms: Annotated[
        int,
        Setting(
            "Milliseconds that a session stays on the card after it returned, and after each use, before it may be"
            " parked to make room for another lease.",
            least=0,
            added_later=True,
        ),
    ] = 1000
    # A parked session without a context takes no memory of the card, but its return takes about 0.3 s longer.
    cold_park_s: Annotated[
        int,
        Setting(
            "Seconds after which the worker process of a parked session ends, too; 0: it never does.",
            key="cold_park_secs",
            least=0,
            added_later=True,
        ),
    ] = 0
    # Each park and return copies the whole session over the link that all sessions of the card share.
    parks_per_minute: Annotated[
        int,
        Setting(
            "Maximum number of parks per minute on one card; further parks are refused until later.",
            least=1,
            added_later=True,
        ),
    ] = 240
    # A move costs a park and a return at once. A park costs a return only if the session is used again.
    moves_for_need: Annotated[
        bool,
        Setting(
            "Whether idle parkable sessions are moved to other cards of the host when an acquire fits on no card but"
            " would fit then. Otherwise they are parked.",
            added_later=True,
        ),
    ] = False
    # A direct move needs NVLink. Without NVLink, or if this setting is off, the bytes go through the host's memory.
    direct_moves: Annotated[
        bool,
        Setting(
            "Whether sessions move directly between cards that are joined by NVLink. Otherwise all moves go through the"
            " host's memory.",
            added_later=True,
        ),
    ] = True
    # Longest time by which a kernel that never ends may outlive its lease.
    grace_ms: Annotated[
        Mapping[Cause, int],
        Setting(
            "Milliseconds that work in flight may continue after its lease has ended, by the cause of the end.",
            what="a table",
            read=_read_graces,
        ),
    ] = field(default_factory=lambda: DEFAULT_GRACE_MS)

    def __post_init__(self) -> None:
        check_bounds(self)
        for cause, grace_ms in self.grace_ms.items():
            if not 0 <= grace_ms <= MAX_GRACE_MS:
                raise ValueError(f"grace_ms.{cause.value} must be from 0 to {MAX_GRACE_MS}, not {grace_ms}")

    def max_leases_of(self, tenant: str) -> int:
        """Return the maximum number of leases that a tenant may have or wait for."""
        own = self.tenants.of(tenant).max_leases
        return self.max_leases_per_tenant if own is None else own

    def grace_ns(self, cause: Cause) -> int:
        """Return how long work in flight may continue after a lease has ended for `cause`, in nanoseconds."""
        return self.grace_ms.get(cause, 0) * NS_PER_MS


def check_ttl(ttl_ms: int, limits: CoreLimits, tenant: str) -> Denial | None:
    """Return the denial for a time to live that exceeds the node's or the tenant's limit; None if it is allowed."""
    if ttl_ms < 1:
        return denials.invalid(f"A lease can't last {ttl_ms} ms.", "Request a duration of at least 1 ms.")
    # Check the node's limit before the tenant's, so that the denial names the limit that would remain.
    if ttl_ms > limits.max_ttl_s * 1000:
        return denials.over_limit(
            "max_ttl_s",
            f"A duration of {denials.duration_text(ttl_ms)} was requested, but this node grants at most "
            f"{limits.max_ttl_s} s at a time",
            "Request less, and renew the lease while you need it.",
        )
    own_s = limits.tenants.of(tenant).max_ttl_s
    if own_s is not None and ttl_ms > own_s * 1000:
        return denials.over_tenant_limit(
            tenant,
            "max_ttl_s",
            f"A duration of {denials.duration_text(ttl_ms)} was requested, but this tenant gets at most "
            f"{own_s} s at a time",
            "Request less, and renew the lease while you need it.",
        )
    return None


RENEWAL_SLACK_MS: Final = 1000
"""Maximum time by which a renewed deadline may exceed the drain's. Normally the drain ends the lease and reports that.
If the drain's end does not reach the worker, the worker still stops on its own at this deadline."""


def renewed_until(now_ns: int, ttl_ms: int, drain_ns: int | None) -> int:
    """Return the deadline of a renewal, limited by the drain's."""
    deadline_ns = now_ns + ttl_ms * NS_PER_MS
    return deadline_ns if drain_ns is None else min(deadline_ns, drain_ns + RENEWAL_SLACK_MS * NS_PER_MS)


WARNING_PART: Final = 10
"""The last tenth of a lease's time is its warning. To keep the lease, a tenant renews it earlier."""

MAX_WARNING_S: Final = 30
"""Longest warning before a lease's deadline."""

ENDS_SOON: Final = "the lease ends unless it is renewed"
UNCONNECTED: Final = "no client is connected to the lease: it is orphaned unless one connects"
DRAINS: Final = "the node is being drained: the lease can't be renewed for longer"
CARD_DRAINS: Final = "its card is being drained: the lease can't be renewed there for longer"


class Drain(NamedTuple):
    """The drain that ends the leases of a card at `due_ns`: the card's own, or that of the whole node."""

    due_ns: int
    is_of_card: bool = False


@dataclass(frozen=True, slots=True)
class LeasePhase:
    """Phase of a lease; times are monotonic nanoseconds.

    Attributes:
        until_ns: Latest beginning of the next phase; None if unknown, or if there is none.
        next_check_ns: Time at which the phase changes without an event; None if it does not.
        reason: The reason as a clause; "" without one.
    """

    phase: Phase
    until_ns: int | None
    next_check_ns: int | None
    cause: str
    reason: str
    generation: int

    def left_ms(self, now_ns: int) -> int:
        """Return the time until the next phase in milliseconds, rounded up; 0 if unknown."""
        return 0 if self.until_ns is None else ms_until(self.until_ns, now_ns)

    @property
    def key(self) -> tuple[Phase, str, int | None]:
        """The part of the phase whose change causes a notice.

        It does not include the remaining time of an active lease.
        """
        return self.phase, self.reason, self.until_ns if self.reason in (DRAINS, CARD_DRAINS, UNCONNECTED) else None


def ends_ns(deadline_ns: int, drain_ns: int | None) -> int:
    """Return when a lease with that deadline ends, unless it is ended sooner."""
    return deadline_ns if drain_ns is None else min(deadline_ns, drain_ns)


def ms_until(deadline_ns: int, now_ns: int) -> int:
    """Return the milliseconds until a time, rounded up; 0 after it."""
    return -(-max(0, deadline_ns - now_ns) // NS_PER_MS)


def remaining_ms(lease: LeaseSnapshot, now_ns: int, drain_ns: int | None = None) -> int:
    """Return the milliseconds that a lease has left; 0 after its end. Rounded up, so that a live lease never shows 0.

    A drain ends the lease at `drain_ns` at the latest.
    """
    return 0 if lease.deadline_ns is None else ms_until(ends_ns(lease.deadline_ns, drain_ns), now_ns)


def phase_of(lease: Lease, drain: Drain | None, now_ns: int) -> LeasePhase:
    """Return the phase of a live lease; `drain` is that of its card, None without a drain."""
    generation = lease.generation
    if lease.state is LeaseState.DRAINING:
        # After the kill nothing runs any more; only the proof of the memory is outstanding.
        is_over = lease.is_kill_sent or lease.is_worker_gone
        phase, until_ns = (Phase.TEARDOWN, lease.reclaim_due_ns) if is_over else (Phase.GRACE, lease.grace_due_ns)
        cause = "" if lease.cause is None else lease.cause.value
        return LeasePhase(phase, until_ns, None, cause, lease.reason, generation)
    if lease.state is not LeaseState.ACTIVE or lease.deadline_ns is None:
        return ended_phase(lease.snapshot())
    # If the wait for a connection would end the lease first, warn about that rather than about the deadline.
    orphan_ns = lease.orphan_due_ns
    if orphan_ns is not None and orphan_ns < ends_ns(lease.deadline_ns, None if drain is None else drain.due_ns):
        return LeasePhase(Phase.WARNING, orphan_ns, None, "", UNCONNECTED, generation)
    return _phase_until(lease.deadline_ns, lease.terms.ttl_ms, drain, now_ns, generation)


def region_phase_of(region: TableRegion, lease: Lease, drain: Drain | None, now_ns: int) -> LeasePhase:
    """Return the phase of a region of a live lease.

    While the lease itself is ending, the region's phase is the lease's, with the region's own cause and reason.
    """
    if region.state is RegionState.ACTIVE and region.deadline_ns is not None:
        return _phase_until(region.deadline_ns, region.ttl_ms, drain, now_ns, region.generation)
    cause = "" if region.cause is None else region.cause.value
    if region.lease_state is not LeaseState.DRAINING:
        return ended_phase(region.snapshot())
    if lease.state is LeaseState.DRAINING:
        return replace(phase_of(lease, drain, now_ns), cause=cause, reason=region.reason, generation=region.generation)
    kind = Phase.GRACE if region.state in ENDED_REGIONS else Phase.TEARDOWN
    return LeasePhase(kind, region.end_due_ns, None, cause, region.reason, region.generation)


def _phase_until(deadline_ns: int, ttl_ms: int, drain: Drain | None, now_ns: int, generation: int) -> LeasePhase:
    """Return the phase of a lease or region that lasts until its deadline, or the drain's."""
    # During a drain the phase is always WARNING, because no renewal can prevent the end.
    if drain is not None:
        reason = CARD_DRAINS if drain.is_of_card else DRAINS
        return LeasePhase(Phase.WARNING, drain.due_ns, None, "", reason, generation)
    # Warn for a tenth of the lease's time at most, so that a short lease is not in the phase WARNING all the time.
    warning_ns = min(ttl_ms * NS_PER_MS // WARNING_PART, MAX_WARNING_S * NS_PER_S)
    due_ns = deadline_ns - warning_ns
    if now_ns >= due_ns:
        return LeasePhase(Phase.WARNING, deadline_ns, None, "", ENDS_SOON, generation)
    return LeasePhase(Phase.ACTIVE, due_ns, due_ns, "", "", generation)


def ended_phase(lease: LeaseSnapshot) -> LeasePhase:
    cause = "" if lease.cause is None else lease.cause.value
    return LeasePhase(Phase.ENDED, None, None, cause, lease.reason, lease.generation)
