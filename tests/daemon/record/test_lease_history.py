"""Facts that no record, line or count shows by itself."""

from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.events import (
    AcquireRequested,
    Effect,
    Event,
    PoolTimerFired,
    ReclaimProved,
    RenameWorker,
    RequesterGone,
    SpawnWorker,
    WorkerExited,
    WorkerReady,
)
from gpulease.daemon.leases.model import FIRST_WARM_ID, LeaseTerms
from gpulease.daemon.leases.quotas import CoreLimits
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.record.lease_facts import FactKind
from gpulease.daemon.record.lease_history import LeaseHistory

WARM = FIRST_WARM_ID
SPAWN = SpawnWorker(5, "GPU-a", LeaseTerms(100, 60_000))


def placed(history: LeaseHistory, *effects: Effect) -> list[bool]:
    facts = history.on_event(PoolTimerFired(), effects, 1)
    return [fact.is_warm for fact in facts if fact.kind is FactKind.PLACED]


def test_a_lease_is_placed_warm_only_if_the_same_event_gave_it_a_warm_context() -> None:
    history = LeaseHistory(lambda _: None)
    assert placed(history, RenameWorker(WARM, 5), SPAWN) == [True]
    assert placed(history, SPAWN) == [False]
    assert placed(history, RenameWorker(WARM, 6), SPAWN) == [False]
    assert placed(history, RenameWorker(WARM, 5)) == []
    assert placed(history, SPAWN) == [False]


def test_a_workers_end_comes_first_and_knows_what_it_brought_about() -> None:
    table = LeaseTable([Card("GPU-a", 0, "a", 1000, 10)], CoreLimits(grace_ms={}))
    history = LeaseHistory(table.get)
    life: list[Event] = [AcquireRequested(1, "t", 5, LeaseTerms(100, 60_000)), WorkerReady(5), WorkerExited(5, "died")]
    for now_ns, event in enumerate(life):
        facts = history.on_event(event, table.handle(event, now_ns), now_ns)
    assert [fact.kind for fact in facts[:2]] == [FactKind.WORKER_EXITED, FactKind.ENDING]
    assert facts[0].times == facts[1].times
    assert (facts[0].times.asked_ns, facts[0].times.granted_ns, facts[0].times.over_ns) == (0, 1, 2)


def test_a_request_that_waits_and_is_given_up_leaves_nothing() -> None:
    table = LeaseTable([Card("GPU-a", 0, "a", 1000, 10)], CoreLimits())
    history = LeaseHistory(table.get)
    life: list[Event] = [
        AcquireRequested(1, "t", 5, LeaseTerms(900, 60_000)),
        AcquireRequested(2, "t", 6, LeaseTerms(900, 60_000), wait_ms=1000),
        RequesterGone(2),
        RequesterGone(1),
        WorkerExited(5, "killed"),
        ReclaimProved(5),
    ]
    for event in life:
        history.on_event(event, table.handle(event, 1), 1)
    assert history.is_at_rest
