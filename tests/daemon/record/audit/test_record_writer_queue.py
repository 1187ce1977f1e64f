import pytest

from gpulease.daemon.record.audit.record_writer import RecordQueue
from gpulease.daemon.record.audit.records import Draft, RecordKind

from .chains import draft

GRANT, END, DENY = (draft(kind, at) for at, kind in enumerate((RecordKind.GRANT, RecordKind.END, RecordKind.DENY), 1))


@pytest.fixture
def inbox(monkeypatch: pytest.MonkeyPatch) -> RecordQueue:
    monkeypatch.setattr("gpulease.daemon.record.audit.record_writer.MAX_QUEUED", 6)
    monkeypatch.setattr("gpulease.daemon.record.audit.record_writer.MAX_QUEUED_MINOR", 3)
    return RecordQueue()


def told(drafts: list[Draft]) -> list[object]:
    return [one.data["dropped"] if one.kind is RecordKind.GAP else one.kind.value for one in drafts]


def test_first_in_first_out(inbox: RecordQueue) -> None:
    assert [inbox.put(one) for one in (GRANT, DENY, END)] == [1, 2, 3]
    assert inbox.take(2, 0) == [GRANT, DENY]
    assert inbox.take(9, 0) == [END]
    assert inbox.take(9, 0) == []


def test_what_is_minor_leaves_room_for_the_rest(inbox: RecordQueue) -> None:
    assert [inbox.put(one) for one in (DENY, DENY, DENY, DENY, DENY)] == [1, 2, 3, 0, 0]
    assert inbox.put(GRANT) == 5
    assert inbox.put(DENY) == 0
    assert told(inbox.take(9, 0)) == ["deny", "deny", "deny", {"deny": 3}, "grant"]
    assert inbox.dropped == 3


def test_a_missing_end_is_told_of_behind_what_came_before(inbox: RecordQueue) -> None:
    for one in (DENY, DENY, DENY, DENY, GRANT, GRANT, END, END, DENY):
        inbox.put(one)
    assert told(inbox.take(9, 0)) == ["deny", "deny", "deny", {"deny": 1}, "grant", "grant", {"end": 2, "deny": 1}]


def test_a_new_gap_begins_once_the_last_was_taken(inbox: RecordQueue) -> None:
    for _ in range(7):
        inbox.put(GRANT)
    assert told(inbox.take(9, 0))[6:] == [{"grant": 1}]
    for _ in range(8):
        inbox.put(GRANT)
    gap = inbox.take(9, 0)[6]
    assert (gap.data["dropped"], gap.data["since_us"]) == ({"grant": 2}, GRANT.mono_us)
    assert inbox.accepted == 14


def test_a_closed_one_makes_nobody_wait(inbox: RecordQueue) -> None:
    inbox.put(GRANT)
    inbox.close()
    inbox.wait_for_close(60)
    assert inbox.take(9, 60) == [GRANT]
    assert inbox.take(9, 60) == []
