import pytest

from gpulease.daemon.contract.control_page import MAX_REVOKED_TOKENS, BrokerPage, WorkerPage
from gpulease.daemon.contract.guests import Guest, mark_of
from gpulease.protocol.capabilities import SESSION_PERMISSIONS, Permission
from gpulease.protocol.errors import FramingError
from gpulease.protocol.framing import Frame
from gpulease.protocol.opcodes import Flag, Opcode, Status

FAR = 1 << 62


def frame(op: int, flags: int = 0, request_id: int = 1) -> Frame:
    return Frame(op, flags, 0, request_id, 5, memoryview(b""))


@pytest.mark.parametrize("permissions", [Permission.MEM_READ, SESSION_PERMISSIONS, Permission(0)])
def test_it_travels(permissions: Permission) -> None:
    guest = Guest(permissions, FAR, 3, 9)
    assert Guest.from_message(guest.to_message()) == guest
    assert Guest.from_message(None) is None


def test_what_is_refused() -> None:
    reader = Guest(Permission.MEM_READ, FAR, 1, 9)
    assert reader.refuse(frame(Opcode.MEM_READ)) is None
    assert reader.refuse(frame(Opcode.PING)) is None
    for op in (Opcode.LAUNCH, Opcode.MEM_FREE, 0x0699, Opcode.LEASE_FREE):
        assert reader.refuse(frame(op)) is not None
        with pytest.raises(FramingError) as caught:
            reader.refuse(frame(op, Flag.QUIET))
        assert caught.value.status is Status.DENIED
    # What breaks the stream is the session's to say.
    assert reader.refuse(frame(Opcode.LAUNCH, request_id=0)) is None
    assert reader.refuse(frame(Opcode.LAUNCH, Flag.REPLY)) is None


def test_the_page_looks_at_the_guest_behind_the_lease() -> None:
    broker = BrokerPage()
    page = WorkerPage(broker.fds)
    try:
        broker.set_deadline(FAR, 4)
        assert page.refusal() is None
        for guest, answer in (
            (Guest(SESSION_PERMISSIONS, FAR, 4, 9), None),
            (Guest(SESSION_PERMISSIONS, FAR, 3, 9), Status.DENIED),
            (Guest(SESSION_PERMISSIONS, 1, 4, 9), Status.DENIED),
        ):
            page.guest = guest
            assert page.refusal() is answer
            assert page.is_held_by(guest) is (answer is None)
        broker.set_deadline(1, 4)
        assert page.refusal() is Status.LEASE_EXPIRED
        broker.refuse(Status.REVOKED)
        assert page.refusal() is Status.REVOKED
    finally:
        page.close()
        broker.close()


def test_revoked_tokens_are_refused_for_as_long_as_they_could_be_valid() -> None:
    broker = BrokerPage()
    page = WorkerPage(broker.fds)
    try:
        broker.set_deadline(FAR, 1)
        marks = [mark_of(number.to_bytes(16, "big")) for number in range(MAX_REVOKED_TOKENS + 1)]
        assert len(set(marks)) == len(marks)

        def refused() -> list[int]:
            return [mark for mark in marks if not page.is_held_by(Guest(SESSION_PERMISSIONS, FAR, 1, mark))]

        assert refused() == []
        assert broker.revoke_token(marks[3], 1000, now_ms=0)
        assert broker.revoke_token(marks[3], 1000, now_ms=0), "twice is no mistake, and takes no second place"
        assert refused() == [marks[3]]
        for mark in marks[:MAX_REVOKED_TOKENS]:
            assert broker.revoke_token(mark, 2000, now_ms=10)
        assert refused() == marks[:MAX_REVOKED_TOKENS]
        assert not broker.revoke_token(marks[-1], 3000, now_ms=2000), "there is no room before one has expired"
        assert refused() == marks[:MAX_REVOKED_TOKENS]
        assert broker.revoke_token(marks[-1], 3000, now_ms=2001)
        assert refused() == [mark for mark in marks if mark != marks[3]], (
            "the one whose place it got could not be valid any more"
        )
    finally:
        page.close()
        broker.close()
