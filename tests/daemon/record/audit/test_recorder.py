"""Which ends the broker's side of the audit log makes up for, by what the log and the journal have."""

import asyncio

import pytest

from gpulease.daemon.leases.model import Cause, LeaseSnapshot, LeaseState
from gpulease.daemon.record.audit.files import LastRecords
from gpulease.daemon.record.audit.recorder import LogRecorder
from gpulease.daemon.record.audit.records import RecordKind
from gpulease.protocol.lease_ids import lease_text
from gpulease.protocol.opcodes import Exclusivity

US = 1000
CUT_US = 100


def tombstone(lease_id: int, created_us: int, ended_us: int) -> LeaseSnapshot:
    return LeaseSnapshot(
        lease_id, "ann", "GPU-a", 10, Exclusivity.SHARED, 1, LeaseState.TORNDOWN, Cause.FREED, "", "",
        created_us * US, None, ended_us * US, 1000,
    )  # fmt: skip


def find_without_end_record(told: LastRecords, *tombstones: LeaseSnapshot) -> list[int]:
    async def ask() -> list[int]:
        return [
            lease.lease_id for lease in LogRecorder(is_required=False, last=told).find_without_end_record(tombstones)
        ]

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("kind", "lacks"),
    [(RecordKind.GRANT, True), (RecordKind.OVER, True), (RecordKind.FENCE, False), (RecordKind.END, False)],
)
@pytest.mark.parametrize("ended_us", [CUT_US - 1, CUT_US, CUT_US + 1])
def test_a_lease_of_which_the_last_records_tell(kind: RecordKind, lacks: bool, ended_us: int) -> None:
    told = LastRecords({lease_text(7): kind}, CUT_US)
    assert find_without_end_record(told, tombstone(7, 50, ended_us)) == [7] * lacks


def test_a_lease_of_which_they_do_not_tell_lacks_its_end_if_that_came_behind_them() -> None:
    told = LastRecords({}, CUT_US)
    before, at, after = tombstone(1, 5, CUT_US - 1), tombstone(2, 5, CUT_US), tombstone(3, 5, CUT_US + 1)
    assert find_without_end_record(told, before, at, after) == [2, 3]
    # Stopped in good order, or of another boot: all was recorded.
    assert find_without_end_record(LastRecords(), before, at, after) == []


def test_ends_of_an_earlier_boot_and_leases_that_the_log_never_knew_are_not_made_up() -> None:
    told = LastRecords({}, CUT_US)
    assert find_without_end_record(told, tombstone(1, 5, 900), tombstone(2, 5, CUT_US - 1), tombstone(3, 5, 200)) == [3]
    assert find_without_end_record(told, tombstone(4, CUT_US + 1, 200)) == []
