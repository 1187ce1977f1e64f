"""The pool of warm contexts: filled, taken, dropped for leases, and replaced."""

from gpulease.daemon.leases.denials import DenialReason
from gpulease.daemon.leases.events import (
    AcquireRequested,
    Effect,
    FenceClearRequested,
    KillWorker,
    PoolTimerFired,
    ProveReclaimed,
    ReclaimFailed,
    ReclaimProved,
    RenameWorker,
    RequesterGone,
    SessionCondemned,
    ShutdownRequested,
    SlicesCleared,
    SpawnWorker,
    TimerFired,
    TimerKind,
    WarmEnded,
    WarmUp,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
)
from gpulease.daemon.leases.model import FIRST_WARM_ID, Cause, LeaseState, LeaseTerms
from gpulease.daemon.leases.quotas import CoreLimits
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.leases.warm_pool import FIRST_BACK_OFF_S, MAX_BACK_OFF_S, REFILL_PAUSE_MS
from gpulease.protocol.opcodes import Exclusivity, Waiting

from .scenario import MS, OVERHEAD, S, Scenario, armed, card, denied, end, kinds, one, placed

WARM = FIRST_WARM_ID


class PoolScenario(Scenario):
    """A card of 110 bytes with contexts of 10, and a pool."""

    def __init__(self, wanted: int = 1, *, capacity: int = 110) -> None:
        super().__init__(card(0, capacity))
        self.table = LeaseTable((card(0, capacity),), CoreLimits(), wanted)
        self.made: list[int] = []
        self.fill()

    def fill(self) -> None:
        """Let the pool make its contexts, now and after its pause."""
        effects = self.do(PoolTimerFired())
        while wanted := [effect.warm_id for effect in effects if isinstance(effect, WarmUp)]:
            self.made += wanted
            effects = self.do(WorkerReady(wanted[0]))

    def gone_warm(self, warm_id: int) -> list[Effect]:
        return self.do(WorkerExited(warm_id, "it was killed")) + self.do(ReclaimProved(warm_id))


def killed(effects: list[Effect]) -> list[int]:
    return [effect.worker_id for effect in effects if isinstance(effect, KillWorker)]


def test_the_pool_is_filled_one_at_a_time() -> None:
    s = PoolScenario(3)
    assert s.made == [WARM, WARM + 1, WARM + 2]
    assert (s.card().warm_contexts, s.card().warm_bytes) == (3, 3 * OVERHEAD)
    assert s.card().available_bytes == 100


def test_a_pool_of_size_zero_makes_none() -> None:
    assert PoolScenario(0).made == []


def test_a_lease_takes_a_context_that_is_replaced_after_a_pause() -> None:
    s = PoolScenario()
    effects = s.acquire(1)
    assert kinds(effects)[:2] == [RenameWorker, SpawnWorker]
    assert one(effects, RenameWorker) == RenameWorker(WARM, 1)
    assert (s.card().warm_contexts, s.card().warm_bytes, s.card().held_bytes) == (0, 0, 20 + OVERHEAD)
    ready = s.do(WorkerReady(1))
    assert armed(ready, PoolTimerFired).due_ns == s.now_ns + REFILL_PAUSE_MS * MS
    assert not [effect for effect in ready if isinstance(effect, WarmUp)]
    assert one(s.at(REFILL_PAUSE_MS / 1000).do(PoolTimerFired()), WarmUp).warm_id == WARM + 1


def test_the_leases_terms_go_to_the_context_it_takes() -> None:
    for s in (PoolScenario(), PoolScenario(0)):
        terms = LeaseTerms(20, 10_000, max_kernel_ms=5, waiting=Waiting.BLOCK, orphan_ms=0)
        effects = s.do(AcquireRequested(1001, "ann", 1, terms))
        assert one(effects, SpawnWorker) == SpawnWorker(1, "GPU-a", terms)


def test_no_context_is_made_during_an_acquire() -> None:
    s = PoolScenario()
    s.acquire(1)
    assert s.at(10).do(PoolTimerFired()) == []
    assert one(s.do(WorkerReady(1)), WarmUp).warm_id == WARM + 1


def test_a_lease_without_a_warm_context_gets_a_new_worker() -> None:
    s = PoolScenario()
    s.active(1)
    effects = s.acquire(2)
    assert placed(effects) == [(2, "GPU-a")]
    assert RenameWorker not in kinds(effects)


def test_a_context_serves_one_lease_and_is_killed() -> None:
    s = PoolScenario()
    s.active(1)
    assert end(s, 1)
    assert WARM not in {context.warm_id for context in s.table.warming()}
    assert s.card().held_bytes == 0


def test_the_pool_gives_way_and_the_lease_starts_once_it_has_room() -> None:
    s = PoolScenario(3)
    effects = s.acquire(1, 100)
    # The lease takes one of the three contexts, and its slice is all the rest.
    assert one(effects, RenameWorker).to_id == 1
    assert killed(effects) == [WARM + 2, WARM + 1]
    assert placed(effects) == []
    assert s.do(WorkerReady(1)) == []
    assert placed(s.gone_warm(WARM + 1)) == []
    assert s.do(WorkerExited(WARM + 2, "it was killed")) == [ProveReclaimed(WARM + 2, "GPU-a")]
    last = s.do(ReclaimProved(WARM + 2))
    assert placed(last) == [(1, "GPU-a")]
    assert one(last, WarmEnded) == WarmEnded(WARM + 2, "GPU-a", "a lease needs its room", is_fenced=False)
    s.do(WorkerReady(1))
    assert s.lease(1).state is LeaseState.ACTIVE
    assert s.at(100).do(PoolTimerFired()) == []


def test_no_more_contexts_than_needed_give_way() -> None:
    s = PoolScenario(3)
    effects = s.acquire(1, 85)
    assert killed(effects) == [WARM + 2]
    assert s.card().warm_bytes == 2 * OVERHEAD


def test_contexts_being_made_give_way_first() -> None:
    s = PoolScenario(2)
    s.active(1, 10)
    s.at(1).do(PoolTimerFired())
    effects = s.acquire(2, 75)
    assert one(effects, RenameWorker).from_id == WARM + 1
    assert killed(effects) == [WARM + 2]


def test_later_leases_are_not_started_before_the_first() -> None:
    s = PoolScenario(3)
    s.acquire(1, 85)
    assert placed(s.acquire(2, 5)) == []
    assert placed(s.gone_warm(WARM + 2)) == [(1, "GPU-a"), (2, "GPU-a")]


def test_waiters_are_served_as_if_there_were_no_pool() -> None:
    s = PoolScenario(3)
    s.active(1, 60)
    s.acquire(2, 95, tenant="bob", wait_ms=60_000)
    effects = end(s, 1)
    assert (killed(effects), placed(effects)) == ([WARM + 2], [])
    assert placed(s.gone_warm(WARM + 2)) == [(2, "GPU-a")]


def test_a_lease_whose_client_leaves_while_it_waits_for_room() -> None:
    s = PoolScenario(2)
    s.acquire(1, 100)
    assert killed(s.do(RequesterGone(1001))) == [1]
    s.gone(1)
    assert s.card().held_bytes == 0
    s.gone_warm(WARM + 1)
    s.at(1)
    s.fill()
    assert s.card().warm_contexts == 2


def test_a_dead_context_is_replaced_later_and_later() -> None:
    s = PoolScenario()
    waits = []
    for _ in range(9):
        warm_id = s.made[-1]
        timer = armed(s.gone_warm(warm_id), PoolTimerFired)
        waits.append((timer.due_ns - s.now_ns) // S)
        s.now_ns = timer.due_ns
        s.made.append(one(s.do(PoolTimerFired()), WarmUp).warm_id)
    assert waits == [FIRST_BACK_OFF_S << n for n in range(7)] + [MAX_BACK_OFF_S] * 2
    s.do(WorkerReady(s.made[-1]))
    assert armed(s.gone_warm(s.made[-1]), PoolTimerFired).due_ns == s.now_ns + FIRST_BACK_OFF_S * S


def test_a_context_that_fails_or_hangs_is_killed() -> None:
    s = PoolScenario()
    assert killed(s.do(SessionCondemned(WARM, Cause.UNRESPONSIVE, "it showed no sign of life"))) == [WARM]
    s.gone_warm(WARM)
    s.at(2).do(PoolTimerFired())
    assert killed(s.do(WorkerFailed(WARM + 1, "no context"))) == [WARM + 1]
    s.gone_warm(WARM + 1)
    s.at(70).do(PoolTimerFired())
    s.at(CoreLimits().spawn_timeout_s)
    assert killed(s.do(TimerFired(WARM + 2, 0, TimerKind.SPAWN))) == [WARM + 2]


def test_a_lease_whose_context_dies_before_it_is_ready_gets_a_new_one() -> None:
    s = PoolScenario()
    s.acquire(1)
    effects = s.do(WorkerExited(1, "was killed by SIGKILL"))
    assert kinds(effects)[:2] == [RenameWorker, ProveReclaimed]
    assert one(effects, RenameWorker) == RenameWorker(1, WARM)
    # There is room beside the dead context, so the lease need not wait for the proof.
    assert placed(effects) == [(1, "GPU-a")]
    assert s.card().warm_bytes == OVERHEAD
    s.do(WorkerReady(1))
    assert s.lease(1).state is LeaseState.ACTIVE


def test_a_lease_whose_context_hangs_gets_a_new_one_once_there_is_room() -> None:
    s = PoolScenario()
    s.acquire(1, 100)
    assert placed(s.fire(1, TimerKind.SPAWN)) == []
    effects = s.at(CoreLimits().adopt_timeout_s).fire(1, TimerKind.SPAWN)
    assert killed(effects) == [WARM]
    assert placed(effects) == []
    assert placed(s.gone_warm(WARM)) == [(1, "GPU-a")]
    s.do(WorkerReady(1))
    assert s.lease(1).state is LeaseState.ACTIVE


def test_a_lease_that_is_to_be_alone_leaves_no_other_context() -> None:
    s = PoolScenario(3)
    effects = s.acquire(1, 10, exclusivity=Exclusivity.DEVICE_EXCLUSIVE)
    assert sorted(killed(effects)) == [WARM + 1, WARM + 2]
    assert placed(effects) == [(1, "GPU-a")]
    s.do(WorkerReady(1))
    assert s.at(10).do(PoolTimerFired()) == []


def test_a_fenced_lease_leaves_the_pool_what_room_there_is_besides() -> None:
    s = PoolScenario(2)
    s.active(1, 80)
    s.at(1)
    s.fill()
    s.do(WorkerExited(1, "it died"))
    assert killed(s.do(ReclaimFailed(1, "NVML gave an error"))) == []
    assert s.card().warm_contexts == 2
    s.do(WorkerExited(WARM + 1, "it died"))
    s.do(ReclaimProved(WARM + 1))
    s.at(FIRST_BACK_OFF_S)
    s.fill()
    assert s.card().warm_contexts == 2, "it is full again, beside the fence"


def test_a_fenced_context_makes_the_pool_smaller_by_one() -> None:
    s = PoolScenario(2)
    s.do(WorkerExited(WARM, "it died"))
    assert killed(s.do(ReclaimFailed(WARM, "NVML gave an error"))) == []
    assert s.card().warm_contexts == 1, "the other one stays"
    assert s.at(100).do(PoolTimerFired()) == []
    s.gone_warm(WARM + 1)
    s.at(100).fill()
    assert s.card().warm_contexts == 1, "it is made again, beside the fence"
    assert WarmUp in kinds(s.do(FenceClearRequested(9, None)))


def test_a_driver_that_loses_every_context_fences_no_more_than_are_wanted() -> None:
    s = PoolScenario(3)
    for _ in range(6):
        for context in s.table.warming():
            s.do(WorkerExited(context.warm_id, "it died"))
        s.at(MAX_BACK_OFF_S).do(PoolTimerFired())
        for context in s.table.warming():
            s.do(ReclaimFailed(context.warm_id, "NVML gave an error"))
        s.at(MAX_BACK_OFF_S).do(PoolTimerFired())
    assert s.card().fenced_bytes == 3 * OVERHEAD
    assert WarmUp in kinds(s.do(FenceClearRequested(9, None)))


def test_a_context_that_is_not_proved_gone_is_fenced() -> None:
    s = PoolScenario(2)
    s.do(WorkerExited(WARM, "it died"))
    ended = one(s.at(CoreLimits().reclaim_timeout_s).do(TimerFired(WARM, 0, TimerKind.RECLAIM)), WarmEnded)
    assert ended.is_fenced
    assert (s.card().fenced_bytes, s.card().available_bytes) == (OVERHEAD, 90)
    assert denied(s.acquire(1, 95)).reason is DenialReason.CAPACITY_EXCEEDED
    cleared = one(s.do(FenceClearRequested(9, "0")), SlicesCleared)
    assert (cleared.count, cleared.lease_ids, cleared.warm_ids) == (1, (), (WARM,))
    assert s.card().fenced_bytes == 0


def test_a_lease_that_waits_for_a_fenced_contexts_room_is_refused() -> None:
    s = PoolScenario(2)
    s.acquire(1, 100)
    effects = s.do(ReclaimFailed(WARM + 1, "NVML gave an error"))
    assert denied(effects).reason is DenialReason.SESSION_FAILED
    assert killed(effects) == [1]
    s.gone(1)
    assert s.card().available_bytes == 90


def test_a_shutdown_ends_the_pools_contexts() -> None:
    s = PoolScenario(2)
    assert sorted(killed(s.do(ShutdownRequested()))) == [WARM, WARM + 1]
    s.gone_warm(WARM)
    s.gone_warm(WARM + 1)
    assert s.table.warming() == ()
    assert s.at(100).do(PoolTimerFired()) == []


def test_a_card_without_room_for_a_context_has_none() -> None:
    s = PoolScenario(2, capacity=15)
    assert s.made == [WARM]
    s.active(1, 5)
    assert s.at(1).do(PoolTimerFired()) == []


def test_a_lease_id_can_not_be_a_warm_contexts() -> None:
    s = PoolScenario()
    assert denied(s.acquire(WARM)).reason is DenialReason.INVALID_REQUEST
