"""What is told is on the disk, whenever the daemon is killed."""

import asyncio
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.events import (
    AcquireRequested,
    Event,
    FenceClearRequested,
    FreeRequested,
    LeaseRestored,
    Outcome,
    ReclaimFailed,
    RenewRequested,
    RequestDenied,
    RevokeRequested,
    WorkerExited,
    WorkerReady,
)
from gpulease.daemon.leases.model import LeaseState, LeaseTerms
from gpulease.daemon.leases.persisted import CardRow, LeaseRow
from gpulease.daemon.leases.quotas import CoreLimits
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.leases.table_state import mark_of
from gpulease.daemon.record.journal import FileJournal, open_journal
from helpers.daemon import python_environment
from helpers.waiting import wait_until

from .scenes import BOOT, opened

CHILD = Path(__file__).with_name("keeping_child.py")
KILLS = 5


class Broker:
    """A lease table with a journal; `told` has every outcome once it may be told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = open_journal(folder, BOOT)
        self.table = LeaseTable([Card("GPU-a", 0, "a", 1000, 10)], CoreLimits(grace_ms={}), 0, self.journal.recovered)
        self.told: list[Outcome] = []
        self._is_told = asyncio.Event()
        self.journal.observe(self.table, lambda lease_id: 9000 + lease_id, lambda event: self.post(event))

    def post(self, event: Event) -> None:
        effects = self.table.handle(event, time.monotonic_ns())
        self.journal.on_event(event, effects)
        for effect in effects:
            if isinstance(effect, Outcome):
                self.journal.answer(effect, self.on_outcome)

    async def tell(self, event: Event) -> Outcome:
        """The outcome of an event that has one."""
        self._is_told.clear()
        self.post(event)
        assert self.journal.denial() or not self._is_told.is_set(), "it was told before it could be on the disk"
        await asyncio.wait_for(self._is_told.wait(), 60)
        return self.told[-1]

    def on_outcome(self, outcome: Outcome) -> None:
        self.told.append(outcome)
        self._is_told.set()

    def as_if_killed(self, copy: Path) -> dict[int, LeaseRow]:
        """The leases that a daemon would find that comes back now."""
        shutil.copytree(self.folder, copy)
        store, contents = opened(copy)
        store.close()
        shutil.rmtree(copy)
        return {lease.lease_id: lease for lease in contents.leases}


def test_nothing_is_told_before_it_is_on_the_disk(tmp_path: Path) -> None:
    async def live() -> None:
        broker = Broker(tmp_path / "state")
        copy = tmp_path / "copy"
        for lease_id in range(1, 8):
            broker.post(AcquireRequested(lease_id, "ann", lease_id, LeaseTerms(100, 60_000)))
            await broker.tell(WorkerReady(lease_id))
            row = broker.as_if_killed(copy)[lease_id]
            assert (row.state, row.generation, row.worker_pid) == (LeaseState.ACTIVE, 1, 9000 + lease_id)
            await broker.tell(RenewRequested(50, lease_id, "ann", 70_000))
            assert broker.as_if_killed(copy)[lease_id].generation == 2
        broker.post(RevokeRequested(60, 1, "because"))
        broker.post(WorkerExited(1, "killed"))
        await broker.tell(ReclaimFailed(1, "NVML gave an error"))
        assert broker.as_if_killed(copy)[1].state is LeaseState.FENCED
        # A refusal that says for ever what a lease is, is one of these too.
        broker.post(FreeRequested(62, 2, "ann"))
        broker.post(WorkerExited(2, "killed"))
        assert isinstance(await broker.tell(ReclaimFailed(2, "NVML gave an error")), RequestDenied)
        assert broker.as_if_killed(copy)[2].state is LeaseState.FENCED
        await broker.tell(FenceClearRequested(61, None))
        assert not broker.as_if_killed(copy).keys() & {1, 2}
        await broker.journal.stop()
        again = open_journal(tmp_path / "state", BOOT)
        assert list(again.recovered.revoked) == [mark_of(1)]
        assert list(again.recovered.cleared) == [mark_of(1), mark_of(2)]
        assert [tombstone.lease_id for tombstone in again.recovered.tombstones] == [1, 2]
        again._committer.stop()
        os.close(again._lock_fd)

    asyncio.run(live())


def test_what_waits_for_a_record_happens_once_it_is_on_the_disk_or_can_not_be(tmp_path: Path) -> None:
    async def live() -> None:
        broker = Broker(tmp_path / "state")
        problems: asyncio.Queue[str] = asyncio.Queue()
        broker.post(AcquireRequested(1, "ann", 1, LeaseTerms(100, 60_000)))
        broker.post(WorkerReady(1))
        broker.journal.once_decided(problems.put_nowait)
        assert problems.empty(), "it happened before the record could be on the disk"
        assert await asyncio.wait_for(problems.get(), 60) == ""
        assert broker.as_if_killed(tmp_path / "copy")[1].state is LeaseState.ACTIVE
        # Nothing can be recorded after a fault of the daemon, but what waits must not wait for ever.
        broker.journal.on_event(LeaseRestored(None, has_worker=True), [])  # type: ignore[arg-type]
        broker.journal.once_decided(problems.put_nowait)
        assert problems.get_nowait()
        await broker.journal.stop()

    asyncio.run(live())


def test_a_used_token_and_what_was_measured_come_back(tmp_path: Path) -> None:
    async def live() -> None:
        broker = Broker(tmp_path / "state")
        done: list[bool] = []
        now_ms = time.monotonic_ns() // 1_000_000
        for nonce, expires_ms in ((b"old", now_ms - 1), (b"new", now_ms + 9000)):
            broker.journal.spend(5, nonce, expires_ms, done.append)
        broker.journal.remember_cards([CardRow("GPU-a", 1000, 10, 5)])
        await broker.journal.stop()
        await asyncio.sleep(0)
        assert done == [True, True]
        again = open_journal(tmp_path / "state", BOOT)
        assert again.spent == ((5, b"new", now_ms + 9000),), "one that is over takes room for ever"
        assert (again.cards["GPU-a"].capacity_bytes, again.cards["GPU-a"].overhead_bytes) == (1000, 10)
        again._committer.stop()
        os.close(again._lock_fd)

    asyncio.run(live())


def test_a_daemon_that_did_not_come_to_be_owes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = open_journal(tmp_path / "state", BOOT)
    journal.remember_cards([CardRow("GPU-a", 1000, 10, 5)])
    asyncio.run(journal.stop())
    assert not caplog.records


def test_what_the_daemon_can_not_follow_stops_grants_and_not_ends(tmp_path: Path) -> None:
    """A fault of its own: here, an event that says nothing."""

    async def live() -> None:
        broker = Broker(tmp_path / "state")
        broker.post(AcquireRequested(1, "ann", 1, LeaseTerms(100, 60_000)))
        assert broker.journal.denial() is None
        broker.journal.on_event(LeaseRestored(None, has_worker=True), [])  # type: ignore[arg-type]
        assert broker.journal.denial() is not None
        assert isinstance(await broker.tell(WorkerReady(1)), RequestDenied)
        snapshot = broker.table.get(1)
        assert snapshot is not None
        assert snapshot.state is LeaseState.DRAINING
        await broker.journal.stop()

    asyncio.run(live())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.mark.exhaustive
def test_a_kill_at_any_moment_loses_nothing_that_was_told(folder: Path) -> None:
    granted: dict[int, tuple[int, str]] = {}
    freed: set[int] = set()
    for _ in range(KILLS):
        lines = told_until_killed(folder, random.uniform(0.01, 0.4))
        assert lines, "it was killed before it told anything"
        for kind, lease, generation, deadline in lines:
            lease_id = int(lease, 16)
            if kind == "Freed":
                freed.add(lease_id)
            else:
                granted[lease_id] = (int(generation), deadline)
        journal = open_journal(folder, BOOT)
        check(journal, granted, freed)
        journal._committer.stop()
        os.close(journal._lock_fd)


def told_until_killed(folder: Path, after_s: float) -> list[list[str]]:
    """What a child was told from its first outcome until it is killed, so much later."""
    command = [sys.executable, "-P", str(CHILD), str(folder)]
    output = folder.with_name("told")
    with output.open("wb") as file, subprocess.Popen(command, stdout=file, env=python_environment()) as child:
        wait_until(lambda: output.stat().st_size > 0 or child.poll() is not None, "it was told something")
        time.sleep(after_s)
        child.kill()
    return [line.split() for line in output.read_text().splitlines(keepends=True) if line.endswith("\n")]


def check(journal: FileJournal, granted: dict[int, tuple[int, str]], freed: set[int]) -> None:
    rows = {lease.lease_id: lease for lease in journal.kept}
    ended = {tombstone.lease_id for tombstone in journal.recovered.tombstones}
    for lease_id in freed:
        assert lease_id not in rows, "a lease that was given back is there again"
    for lease_id, (generation, deadline) in granted.items():
        assert lease_id in rows or lease_id in ended, "a lease that was told is not there"
        if lease_id in rows and rows[lease_id].state is LeaseState.ACTIVE:
            row = rows[lease_id]
            assert row.generation >= generation
            assert row.deadline_ns is not None
            assert row.deadline_ns >= int(deadline), "time that was promised is not there"
