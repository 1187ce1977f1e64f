import pytest

from gpulease.daemon.worker.guests import Guest
from gpulease.daemon.worker.page import BrokerPage, WorkerPage
from gpulease.protocol.capabilities import SESSION_PERMISSIONS, Permission
from gpulease.protocol.errors import FramingError
from gpulease.protocol.framing import Frame
from gpulease.protocol.opcodes import Flag, Opcode, Status

FAR = 1 << 62


def frame(op: int, flags: int = 0, request_id: int = 1) -> Frame:
    return Frame(op, flags, 0, request_id, 5, memoryview(b""))


@pytest.mark.parametrize("permissions", [Permission.MEM_READ, SESSION_PERMISSIONS, Permission(0)])
def test_it_travels(permissions: Permission) -> None:
    guest = Guest(permissions, FAR, 3)
    assert Guest.from_message(guest.to_message()) == guest
    assert Guest.from_message(None) is None


def test_what_is_refused() -> None:
    reader = Guest(Permission.MEM_READ, FAR, 1)
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
    page = WorkerPage(broker.fd)
    try:
        broker.set_deadline(FAR, 4)
        assert page.refusal() is None
        for guest, answer in (
            (Guest(SESSION_PERMISSIONS, FAR, 4), None),
            (Guest(SESSION_PERMISSIONS, FAR, 3), Status.DENIED),
            (Guest(SESSION_PERMISSIONS, 1, 4), Status.DENIED),
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
