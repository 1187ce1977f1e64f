"""What a journal keeps of regions, and what the next daemon reads of them."""

import pytest

from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.events import (
    AcquireRequested,
    Event,
    FreeRequested,
    LeaseRestored,
    ReclaimProved,
    RegionEnded,
    RegionOpened,
    RegionReleased,
    RegionRequested,
    RegionRestored,
    RevokeRequested,
    WorkerExited,
    WorkerReady,
)
from gpulease.daemon.leases.model import Cause, LeaseState, LeaseTerms, RegionState
from gpulease.daemon.leases.quotas import CoreLimits
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.record.journal import journal
from gpulease.daemon.record.journal.journal import JournalProjector
from gpulease.daemon.record.journal.rows import Change, Contents, RowKind
from gpulease.protocol.limits import MAX_REGIONS

GRANULE, SIZE = 2, 8

KEPT_HERE = 8
"""Tombstones of regions that are kept, in one test."""


CARD = Card("GPU-a", 0, "a", 110, 10)
NOW_NS = 1000 * 1_000_000_000


class Kept:
    """A lease table, and the rows that its journal would have."""

    def __init__(self) -> None:
        self.table = LeaseTable([CARD], CoreLimits(grace_ms={}))
        self.projector = JournalProjector()
        self.rows: dict[tuple[RowKind, bytes], bytes] = {}
        self.changes: list[Change] = []

    def do(self, event: Event) -> None:
        self.changes = self.projector.changes(event, self.table.handle(event, NOW_NS), self.table, lambda _: 77)
        self.table.validate()
        for change in self.changes:
            if (value := change.value()) is None:
                self.rows.pop((change.kind, change.key), None)
            else:
                self.rows[change.kind, change.key] = value

    def active(self, lease_id: int, size_bytes: int) -> None:
        self.do(AcquireRequested(lease_id, "ann", lease_id, LeaseTerms(size_bytes, 10_000)))
        self.do(WorkerReady(lease_id))

    def gone(self, lease_id: int) -> None:
        self.do(WorkerExited(lease_id, "it was killed"))
        self.do(ReclaimProved(lease_id))

    def open(self, region_id: int = 50) -> None:
        self.do(RegionRequested(region_id, 1, region_id, "ann", "bob", SIZE, 5000, GRANULE))
        self.do(RegionOpened(region_id, 1 << 40))

    def read(self) -> Contents:
        contents = Contents()
        for (kind, key), value in sorted(self.rows.items()):
            contents.take(kind, key, value)
        return contents

    def restarted(self, *, has_worker: bool = True) -> LeaseTable:
        """The next daemon's table."""
        contents = self.read()
        table = LeaseTable([CARD], CoreLimits(grace_ms={}), recovered=contents.recovered())
        for kept in contents.leases:
            table.handle(LeaseRestored(kept, has_worker=has_worker), NOW_NS)
        for region in contents.regions:
            table.handle(RegionRestored(region), NOW_NS)
        table.validate()
        return table


def begun() -> Kept:
    s = Kept()
    s.active(1, 100)
    s.open()
    return s


def test_an_open_region_goes_on() -> None:
    s = begun()
    assert s.restarted().get(50) == s.table.get(50) is not None


def test_the_next_region_of_the_next_daemon_has_another_number() -> None:
    s = begun()
    s.do(FreeRequested(2, 50, "bob"))
    s.do(RegionEnded(50, SIZE, 0, True))
    table = s.restarted()
    table.handle(RegionRequested(3, 1, 51, "ann", "bob", SIZE, 5000, GRANULE), NOW_NS)
    again = table.regions.get(51)
    assert again is not None
    assert (again.slot, again.number) == (0, 2 + MAX_REGIONS)


def test_a_region_that_ends_is_ended_by_the_next_daemon() -> None:
    s = begun()
    s.do(RevokeRequested(2, 50, "because"))
    kept = s.restarted().regions.get(50)
    assert kept is not None
    assert (kept.state, kept.cause) == (RegionState.REVOKED, Cause.REVOKED)


def test_a_region_that_was_returned_is_remembered_and_has_no_row() -> None:
    s = begun()
    s.do(RevokeRequested(2, 50, "because"))
    s.do(RegionEnded(50, SIZE, 0, True))
    contents = s.read()
    assert contents.regions == []
    assert [region.lease_id for region in contents.region_tombstones] == [50]
    assert s.restarted().get(50) == s.table.get(50)


def test_bytes_that_are_kept_in_a_region_s_place_stay_charged_until_they_are_let_go() -> None:
    s = begun()
    s.do(FreeRequested(2, 50, "bob"))
    s.do(RegionEnded(50, SIZE - 2, 2, True))
    assert s.restarted().regions.held_bytes(1) == 2
    s.do(RegionReleased(50))
    assert s.read().regions == []
    assert s.restarted().regions.held_bytes(1) == 0


def test_the_lease_s_end_leaves_no_row_of_a_region() -> None:
    s = begun()
    s.open(51)
    s.do(FreeRequested(2, 50, "bob"))
    s.do(RegionEnded(50, SIZE - 2, 2, True))
    s.do(FreeRequested(3, 1, "ann"))
    s.gone(1)
    contents = s.read()
    assert not contents.regions
    assert not contents.leases
    ended = {region.lease_id: region.cause for region in contents.region_tombstones}
    assert ended == {50: Cause.FREED, 51: Cause.FREED}


def test_regions_end_with_a_worker_that_died_while_nobody_was_there() -> None:
    s = begun()
    table = s.restarted(has_worker=False)
    table.handle(WorkerExited(1, "died"), NOW_NS)
    region = table.get(50)
    assert region is not None
    assert region.state is not LeaseState.ACTIVE


def test_regions_displace_no_lease_s_tombstone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "KEPT_REGION_TOMBSTONES", KEPT_HERE)
    s = Kept()
    s.active(9, 2)
    s.do(FreeRequested(2, 9, "ann"))
    s.gone(9)
    s.active(1, 50)
    for number in range(KEPT_HERE + 5):
        s.open(1000 + number)
        s.do(FreeRequested(2, 1000 + number, "bob"))
        s.do(RegionEnded(1000 + number, SIZE, 0, True))
    contents = s.read()
    assert [lease.lease_id for lease in contents.tombstones] == [9]
    assert len(contents.region_tombstones) == KEPT_HERE
    assert contents.region_tombstones[-1].lease_id == 1000 + KEPT_HERE + 4


def test_a_restart_of_the_host_ends_them() -> None:
    s = begun()
    contents = s.read()
    changes = contents.cross_boot()
    assert contents.regions == []
    (tombstone,) = contents.region_tombstones
    assert (tombstone.lease_id, tombstone.parent_id, tombstone.cause) == (50, 1, Cause.WORKER_DIED)
    assert {change.kind for change in changes if change.content is None} == {RowKind.REGION, RowKind.LEASE}


def test_an_event_about_no_region_changes_no_row() -> None:
    s = begun()
    s.do(RegionReleased(77))
    assert s.changes == []
