"""Frames come out of an intake as out of a reader, however their bytes arrive; slots are few and come back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.daemon.drivers.interface import Context
from gpulease.daemon.drivers.ptx.driver import CpuDriver
from gpulease.daemon.session.connection import DIVERTED_FROM_BYTES, SLOT_BYTES, SLOTS, PinnedBuffers, ReceiveBuffer
from gpulease.protocol.errors import FramingError
from gpulease.protocol.framing import FrameReader, build_frame
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.opcodes import Flag, Opcode

EDGES = (
    0,
    1,
    DIVERTED_FROM_BYTES - 1,
    DIVERTED_FROM_BYTES,
    DIVERTED_FROM_BYTES + 1,
    300_000,
    SLOT_BYTES,
    SLOT_BYTES + 1,
)


@pytest.fixture(scope="module")
def context() -> Context:
    return CpuDriver().open_context("", 1 << 20)


def write_frame(payload: bytes, number: int, *, op: int = Opcode.MEM_WRITE) -> bytes:
    return build_frame(op, payload, request_id=number, session_id=5, flags=Flag.QUIET)


def feed(intake: ReceiveBuffer, stream: bytes, pieces: list[int]) -> list[tuple[int, int, bytes]]:
    """What comes out, when the stream arrives in pieces of these sizes, again and again."""
    frames, at, turn = [], 0, 0
    while at < len(stream):
        room = intake.get_buffer()
        count = min(len(room), pieces[turn % len(pieces)], len(stream) - at)
        room[:count] = stream[at : at + count]
        intake.buffer_updated(count)
        at, turn = at + count, turn + 1
        while (frame := intake.next_frame()) is not None:
            frames.append((frame.op, frame.request_id, bytes(frame.payload)))
    return frames


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(EDGES), st.sampled_from([Opcode.MEM_WRITE, Opcode.MODULE_LOAD])), max_size=5),
    st.lists(st.sampled_from([1, 39, 60, 61, 4096, 70_000, 1 << 20]), min_size=1, max_size=6),
)
def test_frames_are_those_of_a_reader(context: Context, shapes: list[tuple[int, Opcode]], pieces: list[int]) -> None:
    if max(pieces) < 4096:
        pieces = [*pieces, 1 << 20]
    sent = [(int(op), number, bytes([number]) * size) for number, (size, op) in enumerate(shapes, 1)]
    stream = b"".join(write_frame(payload, number, op=op) for op, number, payload in sent)
    slots = PinnedBuffers(context)
    intake = ReceiveBuffer(FrameReader(MAX_PAYLOAD_BYTES), slots)
    assert feed(intake, stream, pieces) == sent
    assert not intake.is_mid_frame
    intake.close()
    assert all(slot.is_free for slot in slots._slots)


def test_peers_that_hold_all_slots_stand_in_nobodys_way(context: Context) -> None:
    slots = PinnedBuffers(context)
    frame = write_frame(bytes(100_000), 1)
    holders = [ReceiveBuffer(FrameReader(MAX_PAYLOAD_BYTES), slots) for _ in range(SLOTS + 2)]
    for holder in holders:
        assert feed(holder, frame[:5000], [5000]) == []
        assert holder.is_mid_frame
    assert len(slots._slots) == SLOTS
    assert all(len(feed(holder, frame[5000:], [1 << 20])) == 1 for holder in holders)
    again = ReceiveBuffer(FrameReader(MAX_PAYLOAD_BYTES), slots)
    for gone in (holders[0], again):
        feed(gone, frame[:5000], [5000])
        gone.close()
    assert slots.take() is not None


def test_bytes_that_are_no_frame(context: Context) -> None:
    intake = ReceiveBuffer(FrameReader(MAX_PAYLOAD_BYTES), PinnedBuffers(context))
    with pytest.raises(FramingError):
        feed(intake, write_frame(bytes(100_000), 1) + b"X" * 100, [1 << 20])
