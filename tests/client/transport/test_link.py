import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.client.transport.link import DIRECT_READ_BYTES, Link, LinkEnded
from gpulease.protocol import Connection, Failure, Opcode, Request, Role, Status
from gpulease.protocol.codec import build_body
from gpulease.protocol.framing import build_frame
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import Attach, AttachReply, Body, Data, Empty, Hello, HelloReply, MemRead


def feed(link: Link, data: bytes, piece: int) -> None:
    """Give a link bytes as a socket would: never more than it has room for."""
    view = memoryview(data)
    while view:
        room = link.get_buffer()
        assert len(room) > 0
        count = min(len(room), piece, len(view))
        room[:count] = view[:count]
        link.buffer_updated(count)
        view = view[count:]


def attached() -> tuple[Link, Connection]:
    """Both ends of a session."""
    link, server = Link(), Connection(Role.SERVER, max_payload_bytes=MAX_PAYLOAD_BYTES)
    steps: list[tuple[Opcode, Body, Body]] = [
        (Opcode.HELLO, Hello(0, "a", ()), HelloReply(0, "b", 1 << 20, ())),
        (Opcode.ATTACH, Attach(()), AttachReply(1, "d", "c", ())),
    ]
    for op, body, reply in steps:
        number, frame = link.request(op, body)
        feed(link, server.send_reply(_received(server, frame), reply), 1 << 20)
        assert link.take(number) == reply
    return link, server


def _received(server: Connection, frame: bytes) -> Request:
    server.receive_data(frame)
    event = server.next_event()
    assert isinstance(event, Request)
    return event


def _ask_read(link: Link, server: Connection, target: memoryview | None, length: int) -> tuple[int, Request]:
    """Expect a read's reply into `target` at the client, and have the server hear the request."""
    number = link.expect(Opcode.MEM_READ, target)
    frame = build_frame(Opcode.MEM_READ, build_body(MemRead(1, 0, length)), request_id=number)
    return number, _received(server, frame)


SIZES = [0, 1, 39, 44, 45, 1000, DIRECT_READ_BYTES - 1, DIRECT_READ_BYTES, 70_000]


@given(st.lists(st.sampled_from(SIZES), max_size=5), st.sampled_from([1, 7, 43, 44, 45, 4096, 1 << 20]))
def test_reads_land_where_they_belong_however_the_bytes_arrive(sizes: list[int], piece: int) -> None:
    piece = max(piece, sum(sizes) // 2000)
    link, server = attached()
    targets, replies, numbers = [], [], []
    for at, size in enumerate(sizes):
        targets.append(bytearray(size))
        number, request = _ask_read(link, server, memoryview(targets[-1]), size)
        numbers.append(number)
        replies.append(server.send_reply(request, Data(bytes([at + 1]) * size)))
    sync, frame = link.request(Opcode.SYNC, Empty())
    replies.append(server.send_reply(_received(server, frame), Empty()))
    feed(link, b"".join(replies), piece)
    for at, (size, number) in enumerate(zip(sizes, numbers, strict=True)):
        assert link.take(number) == Data(b"")
        assert targets[at] == bytes([at + 1]) * size
    assert link.take(sync) == Empty()


@pytest.mark.parametrize("size", [10, DIRECT_READ_BYTES * 4])
@pytest.mark.parametrize("arrived", [0, 20, 60])
def test_what_is_forgotten_is_dropped_and_its_target_left_alone(size: int, arrived: int) -> None:
    link, server = attached()
    target = bytearray(size)
    number, request = _ask_read(link, server, memoryview(target), size)
    reply = server.send_reply(request, Data(b"\xff" * size))
    arrived = min(arrived, len(reply) - 1)
    feed(link, reply[:arrived], 1 << 20)
    before = bytes(target)
    assert link.forget([]) is None
    feed(link, reply[arrived:], 1 << 20)
    assert target == before
    assert link.take(number) is None
    sync, frame = link.request(Opcode.SYNC, Empty())
    feed(link, server.send_reply(_received(server, frame), Empty()), 1 << 20)
    assert link.take(sync) == Empty()


def test_a_failed_read_is_no_data() -> None:
    link, server = attached()
    number, request = _ask_read(link, server, memoryview(bytearray(100_000)), 100_000)
    feed(link, server.send_failure(request, Failure(Status.INVALID_HANDLE, "no")), 10)
    result = link.take(number)
    assert isinstance(result, Failure)
    assert result.status is Status.INVALID_HANDLE


def test_nothing_is_asked_of_a_stream_that_is_over() -> None:
    link, server = Link(), Connection(Role.SERVER, max_payload_bytes=MAX_PAYLOAD_BYTES)
    number, frame = link.request(Opcode.HELLO, Hello(0, "a", ()))
    feed(link, server.send_reply(_received(server, frame), HelloReply(0, "b", 1 << 20, ())), 1 << 20)
    link.end_of_stream("closed")
    link.take(number)
    with pytest.raises(LinkEnded, match="closed"):
        link.request(Opcode.GET_INVENTORY, Empty())


def test_the_first_end_counts_and_results_come_before_it() -> None:
    link, server = attached()
    number, frame = link.request(Opcode.SYNC, Empty())
    later, _ = link.request(Opcode.SYNC, Empty())
    feed(link, server.send_reply(_received(server, frame), Empty()), 1 << 20)
    feed(link, server.send_goodbye(Failure(Status.REVOKED, "mine now")), 3)
    link.end_of_stream("closed")
    assert link.is_end_explained
    assert link.take(number) == Empty()
    with pytest.raises(LinkEnded, match="mine now"):
        link.take(later)


def test_nothing_is_expected_behind_a_goodbye_that_came_with_the_last_reply() -> None:
    link, server = attached()
    number, request = _ask_read(link, server, None, 4)
    wire = server.send_reply(request, Data(b"data")) + server.send_goodbye(Failure(Status.REVOKED, "revoked"))
    feed(link, wire, len(wire))
    assert link.take(number) == Data(b"data")
    with pytest.raises(LinkEnded, match="revoked"):
        link.expect(Opcode.MODULE_PARAMETERS)
