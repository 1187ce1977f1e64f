"""A lease table with a clock, and short methods for common events."""

from typing import Any, Self, TypeVar

from gpulease.daemon.leases.denials import Denial
from gpulease.daemon.leases.devices import Card, CardSnapshot, PlacementOrder
from gpulease.daemon.leases.events import (
    AcquireRequested,
    ArmTimer,
    Effect,
    Event,
    FreeRequested,
    Granted,
    LeaseRestored,
    ReclaimProved,
    RegionGranted,
    RegionOpened,
    RegionRequested,
    RegionRestored,
    RequestDenied,
    SpawnWorker,
    SubmitFound,
    TimerEvent,
    TimerFired,
    TimerKind,
    WorkerExited,
    WorkerFound,
    WorkerReady,
)
from gpulease.daemon.leases.model import LeaseSnapshot, LeaseTerms
from gpulease.daemon.leases.quotas import CoreLimits
from gpulease.daemon.leases.table import LeaseTable
from gpulease.protocol.opcodes import Exclusivity

MS = 1_000_000
S = 1_000_000_000
OVERHEAD = 10

AnyEffect = TypeVar("AnyEffect", bound=Effect)


def card(index: int = 0, capacity: int = 110, *, is_partition: bool = False) -> Card:
    return Card(f"GPU-{chr(97 + index)}", index, "Test Card", capacity, OVERHEAD, is_partition)


class Scenario:
    """A lease table that validates itself after every event, so that passing through a bad state fails."""

    def __init__(
        self, *cards: Card, limits: CoreLimits | None = None, order: PlacementOrder = PlacementOrder.SPREAD
    ) -> None:
        self.table = LeaseTable(cards or (card(),), limits, order=order)
        self.now_ns = 1000 * S
        self.requests = 0

    def at(self, seconds: float) -> Self:
        self.now_ns += int(seconds * S)
        return self

    def do(self, event: Event) -> list[Effect]:
        before = self.table.charges()
        effects = self.table.handle(event, self.now_ns)
        self.table.validate()
        if not isinstance(event, LeaseRestored | RegionRestored | WorkerFound | SubmitFound):
            self.table.validate_charges(before)
        return effects

    def acquire(
        self,
        lease_id: int,
        size: int = 20,
        *,
        tenant: str = "ann",
        ttl_ms: int = 10_000,
        exclusivity: Exclusivity = Exclusivity.SHARED,
        selector: str | None = None,
        wait_ms: int = 0,
        **options: Any,
    ) -> list[Effect]:
        """Request a lease.

        The request's number is the lease's id plus 1000. `options` are further options of the lease.
        """
        terms = LeaseTerms(size, ttl_ms, exclusivity=exclusivity, **options)
        return self.do(AcquireRequested(lease_id + 1000, tenant, lease_id, terms, selector, wait_ms))

    def active(self, lease_id: int, size: int = 20, **more: object) -> LeaseSnapshot:
        self.acquire(lease_id, size, **more)  # type: ignore[arg-type]
        return one(self.do(WorkerReady(lease_id)), Granted).lease

    def region(
        self, region_id: int, size: int = 4, *, lease_id: int = 1, owner: str = "bob", ttl_ms: int = 5000
    ) -> LeaseSnapshot:
        """Open a region and return it. The request's number is the region's id plus 2000."""
        self.do(RegionRequested(region_id + 2000, lease_id, region_id, "ann", owner, size, ttl_ms, 1))
        return one(self.do(RegionOpened(region_id, region_id << 20)), RegionGranted).lease

    def reaped(self, lease_id: int) -> list[Effect]:
        return self.do(WorkerExited(lease_id, "it was killed"))

    def gone(self, lease_id: int) -> list[Effect]:
        """Reap a draining lease's worker and prove its bytes back."""
        return self.reaped(lease_id) + self.do(ReclaimProved(lease_id))

    def fire(self, lease_id: int, kind: TimerKind, generation: int = 1) -> list[Effect]:
        return self.do(TimerFired(lease_id, generation, kind))

    def lease(self, lease_id: int) -> LeaseSnapshot:
        snapshot = self.table.get(lease_id)
        assert snapshot is not None
        return snapshot

    def card(self, index: int = 0) -> CardSnapshot:
        return self.table.cards()[index]


def one(effects: list[Effect], kind: type[AnyEffect]) -> AnyEffect:
    found = [effect for effect in effects if isinstance(effect, kind)]
    assert len(found) == 1, effects
    return found[0]


def placed(effects: list[Effect]) -> list[tuple[int, str]]:
    """Return the leases that were placed, with their cards."""
    return [(effect.lease_id, effect.card_uuid) for effect in effects if isinstance(effect, SpawnWorker)]


def end(s: Scenario, lease_id: int) -> list[Effect]:
    """Free the lease as its tenant, and prove its bytes back."""
    s.do(FreeRequested(50, lease_id, s.lease(lease_id).tenant))
    return s.gone(lease_id)


def kinds(effects: list[Effect]) -> list[type]:
    """Return the effects' types; for an armed timer, the type of the event it will send."""
    return [type(effect.event if isinstance(effect, ArmTimer) else effect) for effect in effects]


def denied(effects: list[Effect]) -> Denial:
    denial = one(effects, RequestDenied).denial
    for text in (denial.message, denial.hint):
        assert text[0].isupper() or text[0].isdigit(), text
        assert text.endswith("."), text
        assert not text.endswith(".."), text
    return denial


def armed(effects: list[Effect], kind: TimerKind | type[TimerEvent]) -> ArmTimer:
    """Return the only timer of that kind, or the only one that will send that type of event."""
    timers = [effect for effect in effects if isinstance(effect, ArmTimer)]
    found = [timer for timer in timers if kind in (type(timer.event), getattr(timer.event, "kind", None))]
    assert len(found) == 1, effects
    return found[0]
