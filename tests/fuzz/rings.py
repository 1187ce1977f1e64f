"""Shared memory and the offers of it: protocol/ring.py.

The invariant. Whatever the other side writes into the words and the bytes, and whenever it does:

- no error is raised except FramingError, which ends the connection, and nothing outside of the ring is read or written;
- a side's own counter advances by the bytes that were really read or written, never goes back, and is the value that
  the memory shows after it has advanced;
- the bytes that are read are those in the ring. The bytes that are written are in the ring, as far as the other side's
  counter says that there is room; it may only be between its last value and the number of written bytes;
- an invalid offer is ignored, and a valid one, encoded again, is the same.
"""

import struct
from collections.abc import Iterator

from gpulease.protocol.codec import parse_body
from gpulease.protocol.errors import BodyError, FramingError
from gpulease.protocol.messages import Attach
from gpulease.protocol.ring import (
    DATA_AT,
    MAX_RING_BYTES,
    MIN_RING_BYTES,
    RingLayout,
    RingReader,
    RingWriter,
    SharedMemory,
    SharedMemoryGrant,
    SharedMemoryRequest,
    worker_ends,
)

from .draws import Draws
from .vector_seeds import said_by, streams

MAX_BYTES = 2048
LAYOUT = RingLayout(MIN_RING_BYTES, MIN_RING_BYTES)
BYTES = MIN_RING_BYTES
TAIL, HEAD, READER_SLEEPS, WRITER_SLEEPS, REPLY_TAIL, REPLY_HEAD = (8 * line for line in range(6))
WORDS = (TAIL, HEAD, READER_SLEEPS, WRITER_SLEEPS, REPLY_TAIL, REPLY_HEAD, 48, 56)
INSANE = (0, 1, BYTES, BYTES + 1, 1 << 40, 1 << 63, (1 << 64) - 1)
PACKED = struct.Struct(">I8s8s8sI")


class Barrier:
    """A barrier without effect, because there is only one thread."""

    def acquire(self, blocking: bool = True, /) -> bool:
        return True

    def release(self) -> None:
        pass


class Shared:
    """A ring in memory. One thread has both ends."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(LAYOUT.total_bytes + 64))
        # The memory after the ring belongs to nobody. A write there would mean that a check is missing.
        self.words = self.memory[:DATA_AT].cast("Q")
        ring, barriers = self.memory[: LAYOUT.total_bytes], (Barrier(), Barrier())
        self.requests, self.replies = worker_ends(ring, LAYOUT, barriers, self.wake)
        self.data = self.memory[DATA_AT : DATA_AT + BYTES]
        self.reply_data = self.memory[DATA_AT + BYTES : DATA_AT + 2 * BYTES]
        self.is_gone = False

    def wake(self) -> None:
        if self.is_gone:
            raise BrokenPipeError


def check(data: bytes) -> None:
    draws = Draws(data)
    if draws.below(4) == 0:
        check_offers(draws.rest())
        return
    shared = Shared()
    try:
        while not draws.is_over:
            step(shared, draws)
            assert not any(shared.memory[LAYOUT.total_bytes :])
    except FramingError:
        pass
    except BrokenPipeError:
        assert shared.is_gone


def step(shared: Shared, draws: Draws) -> None:
    """Let one of the two sides do one thing."""
    match draws.below(10):
        case 0:
            shared.words[draws.pick(WORDS)] = draws.pick(INSANE)
        case 1:
            # Write as a correct client does, except for the place.
            tail, some = shared.words[TAIL], draws.sized(64)
            for at, byte in enumerate(some):
                shared.data[(tail + at) % BYTES] = byte
            shared.words[TAIL] = (tail + draws.pick((len(some), len(some) * 60))) & (1 << 64) - 1
        case 2:
            shared.words[REPLY_HEAD] = shared.words[draws.pick((REPLY_TAIL, REPLY_HEAD))]
        case 3:
            word = draws.pick((TAIL, REPLY_HEAD))
            shared.words[word] = (shared.words[word] + draws.number(2)) & (1 << 64) - 1
        case 4:
            shared.is_gone = draws.chance(8)
        case 5 | 6:
            take(shared, shared.requests, draws)
        case _:
            put(shared, shared.replies, draws)


def take(shared: Shared, requests: RingReader, draws: Draws) -> None:
    head, tail = requests.head, shared.words[TAIL]
    there = tail - head

    def bytes_at(size: int) -> bytes:
        return bytes(shared.data[(head + at) % BYTES] for at in range(size))

    match draws.below(6):
        case 0 | 1 | 2:
            into = bytearray(draws.pick((1, 40, 100, BYTES, 2 * BYTES)))
            count = requests.take(memoryview(into))
            assert 0 <= there <= BYTES
            assert count == min(there, len(into))
            assert into[:count] == bytes_at(count)
            assert not any(into[count:])
        case 3:
            expected = bytes_at(there) if draws.chance(2) and 0 < there <= BYTES else draws.sized(60)
            count = len(expected) if requests.take_if(expected) else 0
            assert not count or (there == count and bytes_at(count) == expected)
        case 4:
            prefix = bytes_at(min(40, there)) if 0 < there <= BYTES else draws.sized(40)
            into = bytearray(draws.pick((max(0, there - len(prefix)) % BYTES, 0, 10)))
            count = len(prefix) + len(into) if requests.take_if(prefix, memoryview(into)) else 0
            assert not count or (there == count and bytes_at(count) == prefix + into)
        case _:
            count = 0
            assert requests.poll(2, draws.number(2)) in (False, True)
            assert requests.has_bytes == (there != 0)
            assert requests.poll(2) == (there > 0)
            assert requests.doze() == (there == 0)
            requests.rise()
    assert requests.head == head + count
    if count:
        assert shared.words[HEAD] == head + count


def put(shared: Shared, replies: RingWriter, draws: Draws) -> None:
    tail, known = replies.tail, replies.head
    claimed = shared.words[REPLY_HEAD]
    data = draws.sized(64) * draws.pick((1, 1, 20, 70))
    room = BYTES - tail + known
    try:
        match draws.below(4):
            case 0 | 1:
                count = replies.put(data)
                assert count <= len(data)
            case 2:
                count = len(data) if replies.put_whole(data[: len(data) // 2], data[len(data) // 2 :]) else 0
            case _:
                data = PACKED.pack(1, *(data[at : at + 8] for at in (0, 8, 16)), 7)
                count = PACKED.size if replies.put_packed(PACKED, 1, data[4:12], data[12:20], data[20:28], 7) else 0
    except FramingError:
        assert not known <= claimed <= tail
        raise
    # The writer used a valid value of the counter, from now or from an earlier check.
    most = max(room, BYTES - tail + claimed if known <= claimed <= tail else room)
    assert replies.tail == tail + count == shared.words[REPLY_TAIL] or not count
    assert count <= most <= BYTES
    assert bytes(shared.reply_data[(tail + at) % BYTES] for at in range(count)) == data[:count]
    assert known <= replies.head <= tail


def check_offers(data: bytes) -> None:
    layout = RingLayout.from_bytes(data)
    if layout is not None:
        assert layout.to_bytes() == data
        for size in (layout.request_bytes, layout.reply_bytes):
            assert MIN_RING_BYTES <= size <= MAX_RING_BYTES
            assert size & size - 1 == 0
    try:
        options = parse_body(Attach, data).options
    except BodyError:
        return
    wanted, given = SharedMemoryRequest.from_options(options), SharedMemoryGrant.from_options(options)
    assert SharedMemoryRequest.from_options(wanted.to_options()) == wanted
    assert SharedMemoryGrant.from_options(given.to_options()) == given
    assert 0 <= wanted.arena_bytes < 1 << 64
    assert {option.type for option in given.to_options()} <= set(SharedMemory)


def seeds() -> Iterator[bytes]:
    """Yield offers from the vectors, and a client that is first correct and then faulty."""
    for wire in dict.fromkeys([*streams(), *said_by("client"), *said_by("daemon")]):
        if wire[6:8] == b"\0\2":
            yield b"\0" + wire[40:]
    yield b"\0" + LAYOUT.to_bytes()
    frame = streams()[0][:40]
    honest = (bytes([1, len(frame)]) + frame + bytes([0, 5, 0, 1, 7, 0, 20, *range(20), 0, 2, 0])) * 28
    yield b"\1" + honest
    for word in range(len(WORDS)):
        for value in range(len(INSANE)):
            yield b"\1" + honest[:800] + bytes([0, word, value]) + honest[:400]
    yield b"\1" + bytes([7, 64, *range(64), 3, 0]) * 20 + bytes([2, 0]) + bytes([7, 64, *range(64), 3, 0]) * 8
