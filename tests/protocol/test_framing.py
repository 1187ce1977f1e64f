import tracemalloc
from typing import Any

import construct as c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.protocol import FramingError, LocalProtocolError, Opcode, Status
from gpulease.protocol.framing import HEADER, HEADER_BYTES, Frame, FrameReader, build_frame, parse_header
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES, RETAINED_BUFFER_BYTES
from gpulease.protocol.opcodes import Flag

from . import strategies

HEADERS = st.fixed_dictionaries(
    {
        "flags": st.sampled_from([0, 1, 2]),
        "op": strategies.integers(16),
        "payload_length": strategies.integers(32),
        "request_id": strategies.integers(64),
        "session_id": strategies.SESSION_IDS,
    }
)


def header(**values: Any) -> bytes:
    defaults = {"flags": 0, "op": Opcode.PING, "status": 0, "payload_length": 0, "request_id": 1, "session_id": 0}
    return bytes(HEADER.build(defaults | values))


def frames_of(reader: FrameReader) -> list[tuple[Any, ...]]:
    """What the reader holds, payloads copied: a view is void once more bytes come."""
    taken = []
    while (frame := reader.next_frame()) is not None:
        taken.append((*frame[:5], bytes(frame.payload)))
    return taken


@settings(deadline=None)
@given(fields=HEADERS, status=st.sampled_from(Status))
def test_the_fast_header_equals_the_definition(fields: dict[str, int], status: Status) -> None:
    fields["status"] = status if fields["flags"] & Flag.REPLY else 0
    data = header(**fields)
    assert len(data) == HEADER_BYTES == 40
    parsed = HEADER.parse(data)
    assert parse_header(data) == (
        parsed.op,
        parsed.flags,
        parsed.status,
        parsed.payload_length,
        parsed.request_id,
        parsed.session_id.to_bytes(16, "big"),
    )


@settings(max_examples=400, deadline=None)
@given(data=st.binary(min_size=40, max_size=40) | st.binary(min_size=35, max_size=35).map(b"GPLS\x01".__add__))
def test_the_fast_header_refuses_what_the_definition_refuses(data: bytes) -> None:
    try:
        fast = parse_header(data)
    except FramingError:
        fast = None
    try:
        parsed = HEADER.parse(data)
    except c.ConstructError:
        assert fast is None
        return
    is_reply, is_quiet = parsed.flags & 1, parsed.flags & 2
    allowed = parsed.flags < 4 and not (is_reply and is_quiet) and parsed.status in (set(Status) if is_reply else {0})
    assert (fast is not None) == allowed


@settings(max_examples=100, deadline=None)
@given(fields=HEADERS, payload=st.binary(max_size=50))
def test_build_frame_equals_the_definition(fields: dict[str, int], payload: bytes) -> None:
    fields["payload_length"] = len(payload)
    op, rest = fields["op"], {name: fields[name] for name in ("flags", "request_id", "session_id")}
    assert build_frame(op, payload, **rest) == header(**fields) + payload


REFUSED = {
    "magic": (b"HTTP" + header()[4:], "another protocol", Status.INVALID_REQUEST),
    "version 0": (b"GPLS\0" + header()[5:], "version 0", Status.UNSUPPORTED),
    "version 2": (b"GPLS\2" + header()[5:], "version 2", Status.UNSUPPORTED),
    "flag 0x04": (header(flags=4), "flags 0x04", Status.UNSUPPORTED),
    "flag 0x80": (header(flags=0x81), "flags 0x80", Status.UNSUPPORTED),
    "quiet reply": (header(flags=3), "can't be quiet", Status.INVALID_REQUEST),
    "status in a request": (header(status=-1), "carries a status", Status.INVALID_REQUEST),
    "positive status": (header(flags=1, status=1), "status 1; no status is positive", Status.INVALID_REQUEST),
    "reserved": (header()[:10] + b"\0\1" + header()[12:], "reserved", Status.INVALID_REQUEST),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_header_that_can_not_be_trusted_is_a_framing_error(case: str) -> None:
    data, words, status = REFUSED[case]
    with pytest.raises(FramingError, match=words) as caught:
        parse_header(data)
    assert caught.value.status is status


@pytest.mark.parametrize(
    "wrong",
    [
        {"flags": 4},
        {"flags": 0x100},
        {"flags": -1},
        {"flags": 3},
        {"status": -1},
        {"flags": 1, "status": 7},
        {"op": 0x1_0001},
        {"op": -1},
        {"request_id": -1},
        {"request_id": 1 << 64},
        {"session_id": -1},
        {"session_id": 1 << 128},
        {"payload": memoryview(bytes(MAX_PAYLOAD_BYTES + 1))},
    ],
    ids=lambda wrong: ",".join(wrong),
)
def test_what_a_receiver_must_refuse_is_not_built(wrong: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError):
        build_frame(**({"op": Opcode.PING, "request_id": 1} | wrong))


def test_the_frame_says_what_its_flags_say() -> None:
    assert not Frame(1, 0, 0, 1, 0, b"").is_reply
    assert Frame(1, Flag.REPLY, 0, 1, 0, b"").is_reply
    assert Frame(1, Flag.QUIET, 0, 1, 0, b"").is_quiet


PAYLOADS = st.lists(st.binary(max_size=300), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(payloads=PAYLOADS, tail=st.binary(max_size=39), room=st.integers(1, 64), data=st.data())
def test_any_chunking_gives_the_same_frames(payloads: list[bytes], tail: bytes, room: int, data: st.DataObject) -> None:
    frames = [build_frame(Opcode.PING, payload, request_id=at + 1) for at, payload in enumerate(payloads)]
    expected = [(Opcode.PING, 0, 0, at + 1, 0, payload) for at, payload in enumerate(payloads)]
    reader = FrameReader(300, buffer_bytes=room)
    taken = []
    for chunk in data.draw(strategies.chunks(b"".join(frames) + tail)):
        reader.receive_data(chunk)
        if data.draw(st.booleans()):
            taken += frames_of(reader)
    # A tail that is not the start of a header must not be looked at before it is one.
    taken += frames_of(reader)
    assert taken == expected
    assert reader.is_mid_frame == bool(tail)
    assert reader.take_rest() == tail
    assert not reader.is_mid_frame


@pytest.mark.parametrize("size", [0, 1, 30, 300])
def test_reading_into_the_buffer_one_byte_at_a_time(size: int) -> None:
    wire = build_frame(Opcode.PING, bytes(range(256)) * 2 if size > 256 else bytes(size), request_id=7)
    reader = FrameReader(1000, buffer_bytes=16)
    taken = []
    for byte in wire + wire:
        reader.get_buffer()[0] = byte
        reader.buffer_updated(1)
        taken += frames_of(reader)
    assert [frame[3:] for frame in taken] == [(7, 0, wire[40:])] * 2


def test_many_frames_in_one_piece_larger_than_the_buffer() -> None:
    wire = build_frame(Opcode.PING, bytes(8), request_id=1)
    reader = FrameReader(64, buffer_bytes=32)
    reader.receive_data(wire[:30])
    reader.receive_data(wire[30:] + wire * 99)
    assert len(frames_of(reader)) == 100
    assert len(reader.get_buffer()) > 0


@settings(max_examples=50, deadline=None)
@given(limit=st.integers(0, 2000), room=st.integers(1, 100), pieces=st.lists(st.integers(1, 300), max_size=30))
def test_the_buffer_never_outgrows_its_limit(limit: int, room: int, pieces: list[int]) -> None:
    reader = FrameReader(limit, buffer_bytes=room)
    stream = build_frame(Opcode.PING, bytes(limit), request_id=1) * 3
    for piece in pieces:
        into = reader.get_buffer()
        assert len(into) > 0
        count = min(piece, len(into), len(stream))
        into[:count], stream = stream[:count], stream[count:]
        reader.buffer_updated(count)
        frames_of(reader)
        assert len(reader.buffer) <= max(room, limit + HEADER_BYTES)


def test_an_announced_length_reserves_nothing() -> None:
    announced = header(payload_length=MAX_PAYLOAD_BYTES)
    tracemalloc.start()
    try:
        reader = FrameReader(MAX_PAYLOAD_BYTES, buffer_bytes=1024)
        reader.receive_data(announced + bytes(2000))
        assert reader.next_frame() is None
        assert tracemalloc.get_traced_memory()[1] < 16_384
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [101, 1 << 20, 0xFFFF_FFFF])
def test_a_length_over_the_limit_is_refused_by_the_header_alone(length: int) -> None:
    reader = FrameReader(100)
    reader.receive_data(header(payload_length=length))
    with pytest.raises(FramingError, match=f"{length} bytes is announced; this side accepts at most 100"):
        reader.next_frame()


def test_a_view_holds_until_the_next_get_buffer() -> None:
    reader = FrameReader(1000, buffer_bytes=200)
    reader.receive_data(b"".join(build_frame(Opcode.PING, bytes([at]) * 50, request_id=at) for at in (1, 2)))
    first, second = reader.next_frame(), reader.next_frame()
    assert first is not None
    assert second is not None
    assert (bytes(first.payload), bytes(second.payload)) == (b"\1" * 50, b"\2" * 50)
    # A view kept past its time does not stop the reader from growing, and is not torn by it.
    reader.receive_data(build_frame(Opcode.PING, bytes(900), request_id=3))
    assert len(first.payload) == 50
    assert [frame[3] for frame in frames_of(reader)] == [3]


def test_a_very_large_frame_leaves_a_small_buffer() -> None:
    reader = FrameReader(MAX_PAYLOAD_BYTES, buffer_bytes=4096)
    reader.receive_data(build_frame(Opcode.PING, bytes(RETAINED_BUFFER_BYTES), request_id=1))
    assert len(frames_of(reader)) == 1
    reader.get_buffer()
    assert len(reader.buffer) == 4096


def test_growing_copies_little() -> None:
    """Doubling, not one growth per piece: else a 64 MiB frame in 64 KiB pieces would be copied a thousand times."""
    reader = FrameReader(1 << 20, buffer_bytes=1024)
    sizes = set()
    wire = build_frame(Opcode.PING, bytes(1 << 20), request_id=1)
    for at in range(0, len(wire), 1000):
        reader.receive_data(wire[at : at + 1000])
        sizes.add(len(reader.buffer))
    assert len(sizes) < 16
    assert len(frames_of(reader)) == 1


def test_the_next_frames_operation_before_all_of_it_has_come() -> None:
    reader = FrameReader(MAX_PAYLOAD_BYTES)
    stream = build_frame(Opcode.LAUNCH, b"x", request_id=1) + build_frame(Opcode.SYNC, request_id=2)
    for at in range(len(stream)):
        assert reader.peek_op() == (Opcode.LAUNCH if at >= 8 else 0)
        reader.receive_data(stream[at : at + 1])
    reader.next_frame()
    assert reader.peek_op() == Opcode.SYNC
    reader.next_frame()
    assert reader.peek_op() == 0
