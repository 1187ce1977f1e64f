"""What is counted of the lease table's life: events and effects in, series that only grow out.

It holds what a duration needs and no single effect tells: when a request came, since when a lease is granted, since
when refused. All of it is bounded by open requests and live leases.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from gpulease.daemon.leases import (
    AcquireRequested,
    Cause,
    Denied,
    DrainCancelled,
    DrainRequested,
    DrainSet,
    Effect,
    Event,
    FenceCleared,
    FenceClearRequested,
    Freed,
    FreeRequested,
    Granted,
    LeaseEnded,
    LeaseRestored,
    LeaseSnapshot,
    LeaseState,
    RecycleWorker,
    RefuseWork,
    RenameWorker,
    Renewed,
    RenewRequested,
    RequesterGone,
    RevokeDone,
    RevokeRequested,
    SessionFaulted,
    SpawnSubmit,
    SubmitEnded,
    SubmitReady,
    SubmitRequested,
    WarmEnded,
    WorkerExited,
    WorkerKind,
    kind_of,
)
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

NS_PER_S: Final = 1_000_000_000

_OPERATIONS: Final[dict[type[Event], str]] = {
    AcquireRequested: Opcode.LEASE_ALLOC.name.lower(),
    SubmitRequested: Opcode.GPU_SUBMIT.name.lower(),
    RenewRequested: Opcode.LEASE_RENEW.name.lower(),
    FreeRequested: Opcode.LEASE_FREE.name.lower(),
    RevokeRequested: Opcode.LEASE_REVOKE.name.lower(),
    FenceClearRequested: Opcode.FENCE_CLEAR.name.lower(),
    DrainRequested: Opcode.DRAIN.name.lower(),
    DrainCancelled: Opcode.DRAIN_CANCEL.name.lower(),
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
    families.LOOP_LAG_SECONDS,
)


class LeaseCounters:
    """Counts.

    Args:
        lookup: The lease table's: a lease as it is after the event.
        cards: Their UUIDs.
        tenants: Labels for tenants.
        lease_of_submit: The lease of a submit by its number; 0 for what is none.

    Attributes:
        counters: The counters' values, by family.
        histograms: The distributions, by family.
        pairs: Every card and tenant that had a lease together, in the order in which they came.
    """

    def __init__(
        self,
        lookup: Callable[[int], LeaseSnapshot | None],
        cards: Sequence[str],
        tenants: TenantLabels | None = None,
        lease_of_submit: Callable[[int], int] = lambda _: 0,
    ) -> None:
        self.counters: dict[Family, Counts] = {family: counts() for family in _COUNTED}
        self.histograms: dict[Family, Histogram] = {family: Histogram(family) for family in _MEASURED}
        self.pairs: dict[Labels, None] = {}
        self._lookup = lookup
        self._lease_of_submit = lease_of_submit
        self._tenants = tenants or TenantLabels(max(1, min(MAX_TENANT_SERIES, MAX_PAIR_SERIES // max(1, len(cards)))))
        self._asked: dict[int, tuple[str, int]] = {}
        self._granted_ns: dict[int, int] = {}
        # When work was refused, and why.
        self._over: dict[int, tuple[int, Cause]] = {}
        # Leases and submits.
        self._faulted: set[int] = set()
        for uuid in cards:
            for family in (families.FENCES, families.WARM_TAKEN, families.WARM_LOST, families.WARM_RECYCLED):
                self.counters[family][(uuid,)] = 0.0
        self._takers: dict[type[Any], Callable[[Any, int], None]] = {
            Granted: self._granted,
            Renewed: self._renewed,
            Freed: self._answered,
            RevokeDone: self._answered,
            FenceCleared: self._answered,
            DrainSet: self._answered,
            SubmitReady: self._submitted,
            SubmitEnded: self._ended_submit,
            Denied: self._denied,
            RefuseWork: self._refused_work,
            LeaseEnded: self._ended,
            RenameWorker: self._renamed,
            SpawnSubmit: self._began_submit,
            WarmEnded: self._warm_ended,
            RecycleWorker: self._recycled,
        }

    # --- what the broker tells ---

    def saw(self, event: Event, effects: Sequence[Effect], now_ns: int) -> None:
        """What one event brought about, at monotonic time `now_ns`."""
        operation = _OPERATIONS.get(type(event))
        if operation is not None:
            request = event.request  # type: ignore[union-attr]  # those that are operations have one
            if request:
                self._asked[request] = (operation, now_ns)
        for effect in effects:
            taker = self._takers.get(type(effect))
            if taker is not None:
                taker(effect, now_ns)
        if operation is None:
            # Behind what it brought about: a worker's end may be what its lease's work is refused for.
            self._happened(event, now_ns)

    def refused(self, operation: str, reason: str) -> None:
        """A request was refused that never got to the lease table."""
        self.counters[families.DENIALS][operation, reason] += 1

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is kept of anybody: no request is open, and no lease is left."""
        return not (self._asked or self._granted_ns or self._over or self._faulted)

    def worked(self, pair: Labels, increments: Iterable[tuple[Family, float]]) -> None:
        """What sessions of a card and tenant did since that was told last."""
        for family, more in increments:
            self.counters[family][pair] += more

    def pair(self, lease: LeaseSnapshot) -> Labels:
        """The labels of what is told by card and tenant."""
        labels = (lease.card_uuid, self._tenants.of(lease.tenant))
        if labels not in self.pairs:
            self.pairs[labels] = None
            # A rate needs what was there before the first thing happened.
            for family in _OF_PAIRS:
                self.counters[family][labels] = 0.0
        return labels

    # --- events ---

    def _happened(self, event: Event, now_ns: int) -> None:
        match event:
            case WorkerExited(lease_id):
                if (over := self._over.get(lease_id)) is not None:
                    since_ns, cause = over
                    self._observe(families.REVOCATION_SECONDS, (cause.value,), now_ns - since_ns)
            case RequesterGone(request):
                self._asked.pop(request, None)
            case SessionFaulted(number):
                lease = self._lookup(self._lease_of_submit(number) or number)
                if lease is not None and lease.state is LeaseState.ACTIVE and number not in self._faulted:
                    self._faulted.add(number)
                    self._count(families.SESSION_FAULTS, self.pair(lease))
            case LeaseRestored(kept):
                lease = self._lookup(kept.lease_id)
                if lease is not None and lease.state in (LeaseState.ACTIVE, LeaseState.DRAINING):
                    self._granted_ns[kept.lease_id] = kept.created_ns
                    self._count(families.LEASES_ADOPTED, self.pair(lease))

    # --- effects ---

    def _granted(self, effect: Granted, now_ns: int) -> None:
        lease = effect.lease
        self._granted_ns[lease.lease_id] = now_ns
        self._count(families.LEASES_ACQUIRED, self.pair(lease))
        _, asked_ns = self._asked.pop(effect.request, ("", now_ns))
        self._observe(families.ACQUIRE_SECONDS, (lease.card_uuid,), now_ns - asked_ns)

    def _renewed(self, effect: Renewed, now_ns: int) -> None:
        self._asked.pop(effect.request, None)
        self._count(families.LEASES_RENEWED, self.pair(effect.lease))

    def _answered(self, effect: Freed | RevokeDone | FenceCleared | DrainSet, now_ns: int) -> None:
        self._asked.pop(effect.request, None)

    def _submitted(self, effect: SubmitReady, now_ns: int) -> None:
        self._asked.pop(effect.request, None)
        if (lease := self._lookup(effect.lease_id)) is not None:
            self._count(families.SUBMITS, self.pair(lease))

    def _ended_submit(self, effect: SubmitEnded, now_ns: int) -> None:
        self._faulted.discard(effect.submit_id)

    def _denied(self, effect: Denied, now_ns: int) -> None:
        operation, _ = self._asked.pop(effect.request, ("", now_ns))
        if operation:
            self.refused(operation, effect.denial.reason.value)

    def _refused_work(self, effect: RefuseWork, now_ns: int) -> None:
        lease = self._lookup(effect.worker_id)
        if lease is None:
            return
        self._over[effect.worker_id] = (now_ns, effect.cause)
        if effect.cause is Cause.EXPIRED and lease.deadline_ns is not None:
            self._observe(families.EXPIRY_LATENESS_SECONDS, (), now_ns - lease.deadline_ns)

    def _ended(self, effect: LeaseEnded, now_ns: int) -> None:
        lease = effect.lease
        over = self._over.pop(lease.lease_id, None)
        self._faulted.discard(lease.lease_id)
        if lease.state is LeaseState.FENCED:
            self._count(families.FENCES, (lease.card_uuid,))
        elif over is not None:
            self._observe(families.RECLAIM_SECONDS, (lease.card_uuid,), now_ns - over[0])
        granted_ns = self._granted_ns.pop(lease.lease_id, None)
        if granted_ns is not None:
            pair = self.pair(lease)
            self._count(families.LEASES_DROPPED, pair)
            self._observe(families.LEASE_SECONDS, pair, (over[0] if over else now_ns) - granted_ns)

    def _renamed(self, effect: RenameWorker, now_ns: int) -> None:
        lease = self._lookup(effect.to_id)
        if kind_of(effect.from_id) is not WorkerKind.LEASE and lease is not None:
            self._count(families.WARM_TAKEN, (lease.card_uuid,))

    def _began_submit(self, effect: SpawnSubmit, now_ns: int) -> None:
        if effect.is_warm:
            self._count(families.WARM_TAKEN, (effect.card_uuid,))

    def _recycled(self, effect: RecycleWorker, now_ns: int) -> None:
        lease = self._lookup(effect.lease_id)
        if lease is not None:
            self._count(families.WARM_RECYCLED, (lease.card_uuid,))

    def _warm_ended(self, effect: WarmEnded, now_ns: int) -> None:
        self._count(families.WARM_LOST, (effect.card_uuid,))
        if effect.is_fenced:
            self._count(families.FENCES, (effect.card_uuid,))

    def _count(self, family: Family, labels: Labels) -> None:
        self.counters[family][labels] += 1

    def _observe(self, family: Family, labels: Labels, ns: int) -> None:
        self.histograms[family].observe(labels, ns / NS_PER_S)
