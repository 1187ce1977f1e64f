"""What a tenant repeats at will is bounded, counted, and costs others nothing; nothing is kept of leases that ended."""

import asyncio
import logging
from collections import Counter
from typing import Any

import pytest

from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.events import (
    AcquireRequested,
    Effect,
    Event,
    FreeRequested,
    KillWorker,
    ReclaimProved,
    RequesterGone,
    SessionCondemned,
    TimerFired,
    TimerKind,
    WarmEnded,
    WorkerExited,
    WorkerReady,
    WorkerScrubbed,
)
from gpulease.daemon.leases.model import FIRST_WARM_ID, Cause, LeaseSnapshot, LeaseState, LeaseTerms
from gpulease.daemon.leases.quotas import CoreLimits
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.log.writer import ATTRIBUTE
from gpulease.daemon.record import lease_log
from gpulease.daemon.record.audit import recorder
from gpulease.daemon.record.audit.recorder import BURST_RECORDS, FactRecorder
from gpulease.daemon.record.lease_history import LeaseHistory
from gpulease.daemon.record.lease_log import MAX_COUNTS, LeaseLog
from gpulease.protocol.opcodes import Exclusivity, Status
from helpers.waiting import wait_until

SIZE = 1 << 20


class Scene:
    """A lease table whose life is logged."""

    def __init__(self) -> None:
        self.table = LeaseTable([Card("GPU-0", 0, "card", 10 * SIZE, 0)], CoreLimits())
        self.history = LeaseHistory(self.table.get)
        self.log = LeaseLog(FactRecorder(), self.table.get, lambda lease_id: lease_id + 1000)
        self.now_ns = 0

    def post(self, event: Event) -> None:
        self.now_ns += 1_000_000
        self.follow(event, self.table.handle(event, self.now_ns))

    def follow(self, event: Event, effects: list[Effect]) -> None:
        self.log.on_facts(self.history.on_event(event, effects, self.now_ns))
        self.log.log_facts()


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    return [getattr(record, ATTRIBUTE) for record in caplog.records]


@pytest.fixture
def scene(caplog: pytest.LogCaptureFixture) -> Scene:
    caplog.set_level(logging.INFO)
    return Scene()


def test_a_tenant_that_is_denied_in_a_loop(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    async def flood() -> None:
        for number in range(1, 2 * BURST_RECORDS + 1):
            scene.post(AcquireRequested(number, "mallory", number, LeaseTerms(11 * SIZE, 1000)))
        scene.post(AcquireRequested(1 << 20, "ann", 1 << 20, LeaseTerms(11 * SIZE, 1000)))
        await scene.log.stop()

    asyncio.run(flood())
    events = Counter((event, fields.get("tenant")) for event, fields in told(caplog))
    left_out = {fields["of_event"]: fields["count"] for event, fields in told(caplog) if event == "log.suppressed"}
    for event in ("lease.requested", "request.denied"):
        assert BURST_RECORDS <= events[event, "mallory"] <= BURST_RECORDS + 60
        assert events[event, "mallory"] + left_out[event] == 2 * BURST_RECORDS
        assert events[event, "ann"] == 1


def test_a_tenant_whose_contexts_are_refused_or_left_in_a_loop(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    async def flood() -> None:
        scene.post(AcquireRequested(1, "mallory", 7, LeaseTerms(SIZE, 60_000)))
        scene.post(WorkerReady(7))
        for number in range(2 * BURST_RECORDS):
            scene.post(WorkerScrubbed(7, "the card shows more"))
            gone = WarmEnded(
                FIRST_WARM_ID + number, "GPU-0", "its tenant did not acquire another lease in time", is_fenced=False
            )
            scene.follow(WorkerScrubbed(7), [gone])
        await scene.log.stop()

    asyncio.run(flood())
    events = Counter(event for event, _ in told(caplog))
    for event in ("warm.refused", "warm.gone"):
        assert BURST_RECORDS <= events[event] <= BURST_RECORDS + 60


def test_the_log_says_that_a_scrub_took_too_long(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    async def end() -> None:
        scene.post(AcquireRequested(1, "ann", 7, LeaseTerms(SIZE, 60_000)))
        for doubt in ("", "it took too long"):
            scene.follow(TimerFired(7, 0, TimerKind.GRACE), [KillWorker(7, doubt=doubt)])
        await scene.log.stop()

    asyncio.run(end())
    reasons = [(fields["lease_id"], fields["reason"]) for event, fields in told(caplog) if event == "warm.refused"]
    assert reasons == [(f"{7:032x}", "it took too long")]


def test_counts_are_told_while_it_goes_on(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_log, "COUNT_EVERY_S", 0.01)
    monkeypatch.setattr(recorder, "BURST_RECORDS", 2)
    tenants = MAX_COUNTS + 5

    async def flood() -> None:
        for tenant in range(tenants):
            for _ in range(5):
                scene.log.refused("LEASE_ALLOC", f"t{tenant}", 0, "no")

        def is_reported() -> bool:
            return "log.suppressed" in [event for event, _ in told(caplog)]

        await asyncio.to_thread(wait_until, is_reported, "it is told")
        await scene.log.stop()

    asyncio.run(flood())
    counts = [fields["count"] for event, fields in told(caplog) if event == "log.suppressed"]
    assert len(counts) == MAX_COUNTS + 1
    assert sum(counts) == 3 * tenants


def test_a_denial_is_found_by_the_lease_that_was_asked_for(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.post(AcquireRequested(1, "ann", 7, LeaseTerms(11 * SIZE, 1000)))
    assert [(event, fields["lease_id"]) for event, fields in told(caplog)] == [
        ("lease.requested", f"{7:032x}"),
        ("request.denied", f"{7:032x}"),
    ]


@pytest.mark.parametrize("cause", [Cause.KERNEL_TIMEOUT, Cause.OVER_SLICE], ids=lambda cause: cause.value)
@pytest.mark.parametrize("least", [logging.INFO, logging.WARNING])
def test_the_end_of_a_session_that_still_ran_is_a_warning_unless_another_line_has_warned(
    scene: Scene, caplog: pytest.LogCaptureFixture, cause: Cause, least: int
) -> None:
    caplog.set_level(least)
    scene.post(AcquireRequested(1, "ann", 1, LeaseTerms(SIZE, 60_000)))
    scene.post(WorkerReady(1))
    scene.post(SessionCondemned(1, cause, "2 s"))
    level = logging.WARNING if cause.row.is_warned else logging.INFO
    assert cause.row.is_warned is (cause is Cause.KERNEL_TIMEOUT)
    ends = [record for record in caplog.records if getattr(record, ATTRIBUTE)[0] == "lease.ending"]
    assert [record.levelno for record in ends] == [level] * (level >= least)


def test_a_launch_that_a_region_refused_is_told_with_the_region_and_its_lease(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        region = LeaseSnapshot(
            *(
                50,
                "bob",
                "GPU-0",
                SIZE,
                Exclusivity.SHARED,
                1,
                LeaseState.DRAINING,
                Cause.REVOKED,
                "",
                "",
                1,
                2,
                None,
                3,
            ),
            parent_id=5,
        )
        scene.log.forward_revoked(region, Status.REVOKED, "decode", 3, 77, 20_500, 90_500)

    asyncio.run(story())
    ((event, fields),) = told(caplog)
    assert event == "region.forward_revoked"
    assert fields == {
        "lease_id": f"{50:032x}",
        "tenant": "bob",
        "parent": f"{5:032x}",
        "status": "revoked",
        "kernel": "decode",
        "site": 3,
        "position": 77,
        "seen_after_us": 20,
        "told_after_us": 90,
    }


def test_nothing_is_kept_of_what_is_over(scene: Scene) -> None:
    for lease_id in range(1, 20):
        scene.post(AcquireRequested(lease_id, "ann", lease_id, LeaseTerms(SIZE, 60_000), wait_ms=1000))
        if lease_id == 19:
            scene.post(AcquireRequested(100, "ann", 100, LeaseTerms(10 * SIZE, 60_000), wait_ms=1000))
            scene.post(RequesterGone(100))
        scene.post(WorkerReady(lease_id))
        scene.post(FreeRequested(lease_id + 1000, lease_id, "ann"))
        scene.post(WorkerExited(lease_id, "killed"))
        scene.post(ReclaimProved(lease_id))
    assert scene.history.is_at_rest
    assert scene.log._pids == {}


def test_nothing_the_audit_log_is_told_ends_here() -> None:
    told = {name for name, member in vars(FactRecorder).items() if callable(member) and not name.startswith("_")}
    assert told <= vars(LeaseLog).keys()
