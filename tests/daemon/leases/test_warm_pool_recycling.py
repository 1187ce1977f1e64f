"""Recycled contexts, which serve their tenant's next lease: when, for how long, and when not."""

from collections.abc import Callable

import pytest

from gpulease.daemon.leases.denials import DenialReason
from gpulease.daemon.leases.events import (
    AcquireRequested,
    DrainRequested,
    Effect,
    FenceClearRequested,
    FreeDone,
    FreeRequested,
    GuestAttached,
    KillWorker,
    LeaseEnded,
    PoolTimerFired,
    ReclaimFailed,
    ReclaimProved,
    RecycleWorker,
    RenameWorker,
    RenewRequested,
    RevokeRequested,
    ScrubWorker,
    SessionCondemned,
    SessionFaulted,
    ShutdownRequested,
    SpawnSubmit,
    SubmitEnded,
    TenantRulesChanged,
    TimerKind,
    WarmUp,
    WorkerExited,
    WorkerReady,
    WorkerScrubbed,
)
from gpulease.daemon.leases.model import FIRST_SUBMIT_ID, Cause, LeaseState, LeaseTerms, Recycling, SubmitRequested
from gpulease.daemon.leases.quotas import CoreLimits, TenantRules
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.leases.teardown import SCRUB_TIMEOUT_MS
from gpulease.protocol.opcodes import Exclusivity

from .scenario import MS, OVERHEAD, S, armed, card, denied, kinds, one, placed
from .test_warm_pool import WARM, PoolScenario, killed

BOUNDS = Recycling(idle_s=5, max_leases=3, max_idle=2)
FIRST = WARM + 1
"""The number of the first context that comes back, where the pool is to have one."""


class RecyclingScenario(PoolScenario):
    def __init__(self, wanted: int = 1, *, capacity: int = 110) -> None:
        super().__init__(wanted, capacity=capacity)
        self.table = LeaseTable((card(0, capacity),), CoreLimits(), wanted, recycling=BOUNDS)
        self.made.clear()
        self.fill()

    def free(self, lease_id: int, tenant: str = "ann", *, is_operator: bool = False) -> list[Effect]:
        return self.do(FreeRequested(50, lease_id, tenant, is_operator))

    def served(self, lease_id: int, size: int = 20, tenant: str = "ann") -> int:
        """Acquire a lease, give it back, and return the id of the context it left."""
        self.active(lease_id, size, tenant=tenant)
        assert one(self.free(lease_id, tenant), ScrubWorker) == ScrubWorker(lease_id)
        return one(self.do(WorkerScrubbed(lease_id)), RecycleWorker).warm_id


def test_a_context_serves_its_tenants_next_lease() -> None:
    s = RecyclingScenario()
    s.active(1, 70)
    freed = s.free(1)
    assert kinds(freed)[1] is ScrubWorker
    assert killed(freed) == []
    assert armed(freed, TimerKind.GRACE).due_ns == s.now_ns + SCRUB_TIMEOUT_MS * MS
    assert s.card().held_bytes == 70 + OVERHEAD
    scrubbed = s.do(WorkerScrubbed(1))
    assert kinds(scrubbed)[:3] == [RecycleWorker, FreeDone, LeaseEnded]
    assert one(scrubbed, LeaseEnded).lease.state is LeaseState.TORNDOWN
    assert armed(scrubbed, TimerKind.IDLE).due_ns == s.now_ns + BOUNDS.idle_s * S
    number = one(scrubbed, RecycleWorker).warm_id
    assert (s.card().held_bytes, s.card().recycled_contexts, s.card().warm_bytes) == (0, 1, OVERHEAD)
    # The next lease has another size, and the pool's pause does not apply.
    taken = s.acquire(2, 30)
    assert one(taken, RenameWorker) == RenameWorker(number, 2)
    assert placed(taken) == [(2, "GPU-a")]
    assert s.card().recycled_contexts == 0


def test_nobody_else_gets_a_recycled_context() -> None:
    s = RecyclingScenario()
    number = s.served(1)
    assert RenameWorker not in kinds(s.acquire(2, 10, tenant="bob"))
    assert one(s.acquire(3, 10), RenameWorker).from_id == number
    # A tenant without a context of its own takes one that served nobody.
    s = RecyclingScenario(2)
    number = s.served(1)
    assert one(s.acquire(2, 10, tenant="bob"), RenameWorker).from_id == WARM + 1


def test_a_recycled_context_gives_way_to_other_leases() -> None:
    s = RecyclingScenario()
    number = s.served(1)
    assert killed(s.acquire(2, 100, tenant="bob")) == [number]
    assert placed(s.gone_warm(number)) == [(2, "GPU-a")]


def test_a_recycled_context_waits_for_a_bounded_time() -> None:
    s = RecyclingScenario()
    number = s.served(1)
    assert killed(s.at(BOUNDS.idle_s - 1).fire(number, TimerKind.IDLE, 0)) == []
    assert killed(s.at(1).fire(number, TimerKind.IDLE, 0)) == [number]
    s.gone_warm(number)
    # A context that served nobody has no idle timeout.
    s = RecyclingScenario()
    assert killed(s.at(10 * BOUNDS.idle_s).fire(WARM, TimerKind.IDLE, 0)) == []


def test_a_context_serves_a_bounded_number_of_leases() -> None:
    s = RecyclingScenario()
    s.served(1)
    s.served(2)
    s.active(3)
    assert killed(s.free(3)) == [3]


def test_a_bounded_number_of_contexts_waits_at_a_time() -> None:
    s = RecyclingScenario(1, capacity=1000)
    for lease_id in range(1, BOUNDS.max_idle + 2):
        s.active(lease_id)
        s.at(1)
        s.fill()
    for lease_id in range(1, BOUNDS.max_idle + 1):
        s.free(lease_id)
        assert RecycleWorker in kinds(s.do(WorkerScrubbed(lease_id)))
    assert killed(s.free(BOUNDS.max_idle + 1)) == [BOUNDS.max_idle + 1]


def test_the_pool_is_filled_beside_recycled_contexts() -> None:
    s = RecyclingScenario()
    s.served(1)
    made = s.at(1).do(PoolTimerFired())
    assert one(made, WarmUp).warm_id == FIRST + 1


BEFORE: dict[str, Callable[[RecyclingScenario], object]] = {
    "a fault": lambda s: s.do(SessionFaulted(1, "illegal address")),
    "a guest": lambda s: s.do(GuestAttached(1)),
    "a worker that was not made ahead": lambda s: None,
    "a card of its own": lambda s: None,
    "a drain": lambda s: s.do(DrainRequested(60, 60_000)),
    "an operator's free": lambda s: None,
}


@pytest.mark.parametrize("what", BEFORE)
def test_what_keeps_a_context_from_being_scrubbed(what: str) -> None:
    s = RecyclingScenario(0 if "made ahead" in what else 1)
    s.active(1, exclusivity=Exclusivity.DEVICE_EXCLUSIVE if "its own" in what else Exclusivity.SHARED)
    BEFORE[what](s)
    effects = s.free(1, "root", is_operator=True) if "operator" in what else s.free(1)
    assert killed(effects) == [1]
    assert s.do(WorkerScrubbed(1)) == []
    assert one(s.gone(1), FreeDone).lease.lease_id == 1


SUBMIT = FIRST_SUBMIT_ID


def with_submits(*, running: bool = False) -> RecyclingScenario:
    """Return an active lease that keeps 5 of its 20 bytes for submits; one may be under way."""
    s = RecyclingScenario()
    s.do(AcquireRequested(1001, "ann", 1, LeaseTerms(20, 10_000, submit_bytes=5)))
    s.do(WorkerReady(1))
    if running:
        s.do(SubmitRequested(60, 1, "ann", 1000))
        s.do(WorkerReady(SUBMIT))
    return s


def end_submit(s: RecyclingScenario) -> list[Effect]:
    return s.do(WorkerExited(SUBMIT, "it is done")) + s.do(ReclaimProved(SUBMIT))


def test_a_lease_whose_submits_are_proved_gone_leaves_its_context() -> None:
    for runs in (False, True):
        s = with_submits(running=runs)
        assert not runs or SubmitEnded in kinds(end_submit(s))
        s.free(1)
        assert one(s.do(WorkerScrubbed(1)), RecycleWorker).lease_id == 1
        # The submits' bytes came back with the lease's.
        assert (s.card().held_bytes, s.card().warm_bytes) == (0, OVERHEAD)


SUBMITS: dict[str, Callable[[RecyclingScenario], object]] = {
    "runs": lambda s: None,
    "waits": lambda s: s.do(SubmitRequested(61, 1, "ann", 1000)),
    "begins": lambda s: [s.do(SubmitRequested(61, 1, "ann", 1000)), end_submit(s)],
    "is being ended": lambda s: s.do(SessionCondemned(SUBMIT, Cause.OVER_SLICE, "too much")),
    "is reaped": lambda s: s.do(WorkerExited(SUBMIT, "it is done")),
    "is fenced": lambda s: s.do(WorkerExited(SUBMIT, "it is done")) + s.do(ReclaimFailed(SUBMIT, "NVML gave an error")),
}


@pytest.mark.parametrize("what", SUBMITS)
def test_a_lease_with_a_submit_that_is_not_proved_gone_is_torn_down_whole(what: str) -> None:
    s = with_submits(running=True)
    SUBMITS[what](s)
    assert ScrubWorker not in kinds(s.free(1))
    assert s.do(WorkerScrubbed(1)) == []


def test_a_context_beside_a_fenced_submit_is_not_used_again() -> None:
    s = with_submits(running=True)
    SUBMITS["is fenced"](s)
    s.do(FenceClearRequested(70, None))
    assert killed(s.free(1)) == [1]


def test_no_submit_takes_a_context_that_served_anybody() -> None:
    """Not even the tenant's own submit may, because the bearer of a token submits too."""
    s = RecyclingScenario(1, capacity=200)
    s.do(AcquireRequested(1001, "ann", 1, LeaseTerms(20, 10_000, submit_bytes=5)))
    s.do(WorkerReady(1))
    s.at(1)
    s.fill()
    s.served(2)
    assert not one(s.do(SubmitRequested(60, 1, "ann", 1000)), SpawnSubmit).is_warm
    assert (s.card().recycled_contexts, s.card().warm_contexts) == (1, 0)


def test_no_submit_begins_while_its_lease_is_scrubbed() -> None:
    s = with_submits()
    s.free(1)
    assert denied(s.do(SubmitRequested(60, 1, "ann", 1000))).reason is DenialReason.FREED
    assert RecycleWorker in kinds(s.do(WorkerScrubbed(1)))


@pytest.mark.parametrize("cause", [Cause.EXPIRED, Cause.REVOKED, Cause.OVER_SLICE])
def test_only_a_free_by_the_tenant_recycles(cause: Cause) -> None:
    s = RecyclingScenario()
    s.active(1)
    if cause is Cause.EXPIRED:
        s.at(11)
        effects = s.free(1)
    elif cause is Cause.REVOKED:
        effects = s.do(RevokeRequested(60, 1, "because"))
    else:
        effects = s.do(SessionCondemned(1, cause, "too much"))
    assert ScrubWorker not in kinds(effects)
    assert s.do(WorkerScrubbed(1)) == []


MEANWHILE: dict[str, Callable[[RecyclingScenario], list[Effect]]] = {
    "the worker's doubt": lambda s: s.do(WorkerScrubbed(1, "2 bytes are left")),
    "a fault": lambda s: s.do(SessionFaulted(1, "illegal address")),
    "a verdict": lambda s: s.do(SessionCondemned(1, Cause.UNRESPONSIVE, "silence")),
    "a revocation": lambda s: s.do(RevokeRequested(60, 1, "because")),
    "a guest": lambda s: s.do(GuestAttached(1)),
    "time": lambda s: s.at(0.5).fire(1, TimerKind.GRACE),
    "a drain": lambda s: s.do(DrainRequested(60, 60_000)) + s.do(WorkerScrubbed(1)),
    "a shutdown": lambda s: s.do(ShutdownRequested()) + s.do(WorkerScrubbed(1)),
}


@pytest.mark.parametrize("what", MEANWHILE)
def test_what_ends_a_scrub(what: str) -> None:
    s = RecyclingScenario()
    s.active(1)
    s.free(1)
    kill = one(MEANWHILE[what](s), KillWorker)
    assert kill.worker_id == 1
    # The log gives the reason; of these ends, no event does.
    assert bool(kill.doubt) is (what == "time")
    assert s.do(WorkerScrubbed(1)) == []
    assert one(s.gone(1), FreeDone).lease.cause is Cause.FREED
    assert s.card().recycled_contexts == 0


def test_a_proof_counts_until_the_worker_is_killed() -> None:
    s = RecyclingScenario()
    s.active(1)
    s.free(1)
    assert one(s.at(0.5).do(WorkerScrubbed(1)), RecycleWorker).lease_id == 1
    assert s.fire(1, TimerKind.GRACE) == []


def renamed(s: RecyclingScenario, *tenants: str) -> list[Effect]:
    return s.do(TenantRulesChanged(TenantRules(), frozenset(tenants)))


def test_a_renamed_tenant_gets_no_earlier_context() -> None:
    s = RecyclingScenario()
    number = s.served(1)
    assert killed(renamed(s, "bob")) == []
    assert killed(renamed(s, "ann")) == [number]
    # A lease from before the change leaves no context to whoever has the name now; other leases do.
    s = RecyclingScenario(2)
    s.active(1)
    renamed(s, "ann")
    assert killed(s.free(1)) == [1]
    s.active(2, tenant="bob")
    assert one(s.free(2, "bob"), ScrubWorker).lease_id == 2
    assert killed(renamed(s, "bob") + s.do(WorkerScrubbed(2))) == [2]


def test_a_worker_that_dies_while_it_is_scrubbed() -> None:
    s = RecyclingScenario()
    s.active(1)
    s.free(1)
    assert killed(s.do(WorkerExited(1, "signal 11"))) == []
    assert s.do(WorkerScrubbed(1)) == []
    assert FreeDone in kinds(s.gone(1))


def test_a_context_that_dies_while_it_waits_or_is_taken() -> None:
    s = RecyclingScenario()
    number = s.served(1)
    s.do(WorkerExited(number, "signal 11"))
    assert s.card().recycled_contexts == 0
    s = RecyclingScenario()
    number = s.served(1)
    s.acquire(2)
    effects = s.do(WorkerExited(2, "signal 11"))
    assert one(effects, RenameWorker) == RenameWorker(2, number)
    assert placed(effects) == [(2, "GPU-a")]


LOSSES: dict[str, Callable[[RecyclingScenario, int], object]] = {
    "it dies": lambda s, number: s.do(WorkerExited(number, "signal 11")),
    "it takes memory": lambda s, number: s.do(SessionCondemned(number, Cause.OVER_SLICE, "it took memory")),
    "it dies when it is taken": lambda s, _: [s.acquire(2), s.do(WorkerExited(2, "signal 11")), s.do(WorkerReady(2))],
}


@pytest.mark.parametrize("what", LOSSES)
def test_the_loss_of_a_recycled_context_does_not_postpone_the_pool(what: str) -> None:
    """A tenant that keeps ending its own contexts would otherwise leave the card without any."""
    s = RecyclingScenario()
    LOSSES[what](s, s.served(1))
    s.at(0.2)
    s.fill()
    assert s.card().warm_contexts == 1


def test_a_waiting_context_may_hold_its_overhead_and_no_more() -> None:
    s = RecyclingScenario()
    assert s.table.submits.may_hold(WARM) is None
    number = s.served(1)
    assert s.table.submits.may_hold(number) == ("GPU-a", OVERHEAD)
    s.do(SessionCondemned(number, Cause.OVER_SLICE, "it took memory"))
    assert s.table.submits.may_hold(number) is None


def test_a_lease_of_a_recycled_context_is_renewed_as_any() -> None:
    s = RecyclingScenario()
    s.served(1)
    s.active(2)
    s.do(RenewRequested(60, 2, "ann", 20_000))
    assert one(s.free(2), ScrubWorker).lease_id == 2


@pytest.mark.parametrize("name", ["idle_s", "max_leases", "max_idle"])
def test_bounds(name: str) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Recycling(**{name: 0})
