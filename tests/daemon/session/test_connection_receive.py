"""A receive buffer gives the frames of a reader, however their bytes arrive; pinned buffers are few and come back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.daemon.drivers.interface import Context
from gpulease.daemon.ptx.driver import CpuDriver
from gpulease.daemon.session.connection import (
    MAX_PINNED_BUFFERS,
    MIN_PINNED_WRITE_BYTES,
    PINNED_BUFFER_BYTES,
    PinnedBuffers,
    ReceiveBuffer,
)
from gpulease.protocol.errors import FramingError
from gpulease.protocol.framing import FrameReader, build_frame
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.opcodes import Flag, Opcode

EDGES = (
    0,
    1,
    MIN_PINNED_WRITE_BYTES - 1,
    MIN_PINNED_WRITE_BYTES,
    MIN_PINNED_WRITE_BYTES + 1,
    300_000,
    PINNED_BUFFER_BYTES,
    PINNED_BUFFER_BYTES + 1,
)


@pytest.fixture(scope="module")
def context() -> Context:
    return CpuDriver().open_context("", 1 << 20)


def write_frame(payload: bytes, number: int, *, op: int = Opcode.MEM_WRITE) -> bytes:
    return build_frame(op, payload, request_id=number, session_id=5, flags=Flag.QUIET)


def feed(receive_buffer: ReceiveBuffer, stream: bytes, pieces: list[int]) -> list[tuple[int, int, bytes]]:
    """The frames that come out when the stream arrives in pieces of these sizes, again and again."""
    frames, at, turn = [], 0, 0
    while at < len(stream):
        room = receive_buffer.get_buffer()
        count = min(len(room), pieces[turn % len(pieces)], len(stream) - at)
        room[:count] = stream[at : at + count]
        receive_buffer.buffer_updated(count)
        at, turn = at + count, turn + 1
        while (frame := receive_buffer.next_frame()) is not None:
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
    buffers = PinnedBuffers(context)
    receive_buffer = ReceiveBuffer(FrameReader(MAX_PAYLOAD_BYTES), buffers)
    assert feed(receive_buffer, stream, pieces) == sent
    assert not receive_buffer.is_mid_frame
    receive_buffer.close()
    assert all(buffer.is_free for buffer in buffers._buffers)


def test_peers_that_hold_all_pinned_buffers_block_nobody(context: Context) -> None:
    buffers = PinnedBuffers(context)
    frame = write_frame(bytes(100_000), 1)
    holders = [ReceiveBuffer(FrameReader(MAX_PAYLOAD_BYTES), buffers) for _ in range(MAX_PINNED_BUFFERS + 2)]
    for holder in holders:
        assert feed(holder, frame[:5000], [5000]) == []
        assert holder.is_mid_frame
    assert len(buffers._buffers) == MAX_PINNED_BUFFERS
    assert all(len(feed(holder, frame[5000:], [1 << 20])) == 1 for holder in holders)
    again = ReceiveBuffer(FrameReader(MAX_PAYLOAD_BYTES), buffers)
    for gone in (holders[0], again):
        feed(gone, frame[:5000], [5000])
        gone.close()
    assert buffers.acquire() is not None


def test_bytes_that_are_no_frame_are_refused(context: Context) -> None:
    receive_buffer = ReceiveBuffer(FrameReader(MAX_PAYLOAD_BYTES), PinnedBuffers(context))
    with pytest.raises(FramingError):
        feed(receive_buffer, write_frame(bytes(100_000), 1) + b"X" * 100, [1 << 20])
