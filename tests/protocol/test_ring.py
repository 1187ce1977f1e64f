"""The rings as pure functions of the memory: every byte arrives, nobody sleeps through one, no counter is believed."""

import struct
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.protocol.errors import FramingError
from gpulease.protocol.ring import (
    CHECK_BYTES,
    DATA_AT,
    MIN_RING_BYTES,
    RingLayout,
    RingReader,
    RingWriter,
    SyncWords,
    client_ends,
    worker_ends,
)

LAYOUT = RingLayout(MIN_RING_BYTES, 2 * MIN_RING_BYTES)
U64 = st.integers(0, 2**64 - 1)
TAIL, HEAD, READER_SLEEPS, WRITER_SLEEPS = 0, 8, 16, 24


class Ring:
    """The ring of requests, both its ends, and who was woken."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(LAYOUT.total_bytes))
        self.words = self.memory[:DATA_AT].cast("Q")
        self.woken: list[str] = []
        self.writer = client_ends(self.memory, LAYOUT, barriers(), self.wake("reader"))[1]
        self.reader = worker_ends(self.memory, LAYOUT, barriers(), self.wake("writer"))[0]

    def wake(self, who: str) -> Callable[[], None]:
        return lambda: self.woken.append(who)

    def take(self, size: int) -> bytes:
        into = bytearray(size)
        return bytes(into[: self.reader.take(memoryview(into))])


def barriers() -> tuple[threading.Lock, threading.Lock]:
    return threading.Lock(), threading.Lock()


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3 * MIN_RING_BYTES)), max_size=40))
def test_what_goes_in_comes_out_in_any_interleaving(moves: list[tuple[bool, int]]) -> None:
    ring, sent, received = Ring(), bytearray(), bytearray()
    for is_put, size in moves:
        if is_put:
            room = ring.writer.room()
            data = bytes((len(sent) + at) % 251 for at in range(size))
            count = ring.writer.put(data)
            assert 0 < count <= min(size, room, MIN_RING_BYTES // 4) or count == room == 0
            sent += data[:count]
        else:
            got = ring.take(size)
            assert len(got) == min(size, len(sent) - len(received))
            received += got
    while got := ring.take(100):
        received += got
    assert received == sent
    assert not ring.reader.has_bytes


def test_the_two_rings_do_not_meet() -> None:
    memory = memoryview(bytearray(LAYOUT.total_bytes))
    client = client_ends(memory, LAYOUT, barriers(), list)
    worker = worker_ends(memory, LAYOUT, barriers(), list)
    while client[1].put(b"q" * 1000):
        pass
    while worker[1].put(b"r" * 1000):
        pass
    for (reader, _), letter, size in ((worker, b"q", LAYOUT.request_bytes), (client, b"r", LAYOUT.reply_bytes)):
        into = bytearray(size + 1)
        assert reader.take(memoryview(into)) == size
        assert into[:size] == letter * size


@given(U64, st.integers(0, 3))
def test_a_tail_that_makes_no_sense_is_refused(tail: int, taken: int) -> None:
    ring = Ring()
    ring.writer.put(bytes(taken))
    ring.take(10)
    ring.words[TAIL] = tail
    if 0 <= tail - taken <= MIN_RING_BYTES:
        assert len(ring.take(2 * MIN_RING_BYTES)) == tail - taken
    else:
        with pytest.raises(FramingError, match="writer claims"):
            ring.take(10)


@given(U64, st.integers(1, 3))
def test_a_head_that_makes_no_sense_is_refused(head: int, put: int) -> None:
    ring = Ring()
    ring.writer.put(bytes(put))
    ring.words[HEAD] = head
    if head <= put:
        assert ring.writer.room() == MIN_RING_BYTES - put + head
        ring.words[HEAD] = head - 1 if head else put + 1
    for ask in (ring.writer.room, ring.writer.doze):
        with pytest.raises(FramingError, match="reader claims"):
            ask()


def test_a_reader_that_sleeps_is_woken_once() -> None:
    ring = Ring()
    assert ring.reader.doze()
    ring.writer.put(b"a")
    ring.writer.put(b"b")
    assert ring.woken == ["reader"]
    assert not ring.reader.doze()
    assert ring.words[READER_SLEEPS] == 0
    assert ring.take(5) == b"ab"
    assert ring.reader.doze()
    ring.reader.rise()
    ring.writer.put(b"c")
    assert ring.woken == ["reader"]


def test_a_writer_that_sleeps_is_woken_when_half_is_free() -> None:
    ring = Ring()
    assert not ring.writer.doze()
    assert ring.words[WRITER_SLEEPS] == 0
    while ring.writer.put(bytes(MIN_RING_BYTES)):
        pass
    assert ring.writer.doze()
    ring.take(MIN_RING_BYTES // 2 - 1)
    assert ring.woken == []
    ring.take(1)
    ring.take(1)
    assert ring.woken == ["writer"]
    assert not ring.writer.doze()


def test_a_reader_that_is_gone_is_found_out_by_every_write() -> None:
    ring = Ring()

    def gone() -> None:
        raise BrokenPipeError

    writer = client_ends(ring.memory, LAYOUT, barriers(), gone)[1]
    ring.reader.leave()
    for _ in range(2):
        with pytest.raises(BrokenPipeError):
            writer.put(b"x")


def test_a_reader_that_was_killed_while_awake_is_found_out_before_the_ring_is_full() -> None:
    layout = RingLayout(8 * CHECK_BYTES, MIN_RING_BYTES)
    is_gone = False

    def poll() -> None:
        if is_gone:
            raise BrokenPipeError

    writer = client_ends(memoryview(bytearray(layout.total_bytes)), layout, barriers(), list, poll)[1]
    frame = bytes(100)
    writer.put_whole(frame)
    is_gone, before = True, writer.tail

    def fill() -> None:
        while True:
            writer.put_whole(frame)

    with pytest.raises(BrokenPipeError):
        fill()
    assert writer.tail - before <= CHECK_BYTES
    for put in (writer.put, writer.put_whole):
        with pytest.raises(BrokenPipeError):
            put(bytes(CHECK_BYTES))


def test_a_writer_that_is_gone_leaves_what_it_wrote() -> None:
    ring = Ring()
    ring.writer.put(b"last")
    ring.words[WRITER_SLEEPS] = 1

    def gone() -> None:
        raise BrokenPipeError

    reader = worker_ends(ring.memory, LAYOUT, barriers(), gone)[0]
    into = bytearray(4)
    assert reader.take(memoryview(into)) == 4
    assert into == b"last"


def test_two_threads_that_sleep_whenever_they_can() -> None:
    """A wake-up that goes missing leaves one of them waiting until its limit."""
    memory = memoryview(bytearray(LAYOUT.total_bytes))
    has_bytes, has_room = threading.Semaphore(0), threading.Semaphore(0)
    writer = client_ends(memory, LAYOUT, barriers(), has_bytes.release)[1]
    reader = worker_ends(memory, LAYOUT, barriers(), has_room.release)[0]
    data = bytes(range(256)) * 2000
    received = bytearray()
    late: list[str] = []
    thread = threading.Thread(target=send_all, args=(writer, data, has_room, late))
    thread.start()
    receive_all(reader, received, len(data), has_bytes, late)
    thread.join()
    assert not late
    assert received == data


def send_all(writer: RingWriter, data: bytes, has_room: threading.Semaphore, late: list[str]) -> None:
    at = 0
    while at < len(data) and not late:
        sent = writer.put(data[at : at + 700])
        at += sent
        if not sent and writer.doze() and not has_room.acquire(timeout=60):
            late.append("writer")


def receive_all(
    reader: RingReader, received: bytearray, size: int, has_bytes: threading.Semaphore, late: list[str]
) -> None:
    into = bytearray(900)
    while len(received) < size and not late:
        count = reader.take(memoryview(into))
        received += into[:count]
        if not count and reader.doze() and not has_bytes.acquire(timeout=60):
            late.append("reader")


@given(st.integers(12, 24), st.integers(12, 24))
def test_a_layout_is_told(requests: int, replies: int) -> None:
    layout = RingLayout(1 << requests, 1 << replies)
    assert RingLayout.from_bytes(layout.to_bytes()) == layout
    assert layout.total_bytes == DATA_AT + (1 << requests) + (1 << replies)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01" + bytes(8),
        LAYOUT.to_bytes()[:-1],
        LAYOUT.to_bytes() + b"\0",
        b"\x02" + LAYOUT.to_bytes()[1:],
        RingLayout(MIN_RING_BYTES + 8, MIN_RING_BYTES).to_bytes(),
        RingLayout(MIN_RING_BYTES, MIN_RING_BYTES // 2).to_bytes(),
        RingLayout(MIN_RING_BYTES, 1 << 31).to_bytes(),
    ],
)
def test_a_layout_that_makes_no_sense(data: bytes) -> None:
    assert RingLayout.from_bytes(data) is None


@given(st.integers(0, MIN_RING_BYTES - 1), st.integers(0, 600))
def test_a_whole_frame_goes_in_or_none_of_it(filled: int, free: int) -> None:
    ring, frame = Ring(), bytes(range(200)) * 2
    assert ring.writer.put_whole(bytes(filled))
    assert len(ring.take(filled)) == filled
    assert ring.writer.put_whole(bytes(MIN_RING_BYTES - free))
    assert ring.writer.put_whole(frame) == (free >= len(frame))
    ring.take(MIN_RING_BYTES - free)
    assert ring.take(MIN_RING_BYTES) == (frame if free >= len(frame) else b"")


@given(st.integers(0, MIN_RING_BYTES - 1), st.integers(0, 2000), st.integers(0, 2000))
def test_a_frame_in_two_parts_is_announced_at_once(before: int, first: int, second: int) -> None:
    ring = Ring()
    ring.writer.put_whole(bytes(before))
    ring.take(MIN_RING_BYTES)
    tail = ring.words[TAIL]
    assert ring.writer.put_whole(b"a" * first, memoryview(b"b" * second))
    assert ring.words[TAIL] == tail + first + second
    assert ring.take(MIN_RING_BYTES) == b"a" * first + b"b" * second


@given(st.integers(0, MIN_RING_BYTES - 1))
def test_a_packed_frame_goes_in_where_there_is_a_piece(before: int) -> None:
    ring, layout = Ring(), struct.Struct(">4sQ3s300s2s")
    fields = (b"head", 7, b"mid", b"d" * 300, b"en")
    ring.writer.put_whole(bytes(before))
    ring.take(MIN_RING_BYTES)
    went = ring.writer.put_packed(layout, *fields)
    assert went == (MIN_RING_BYTES - before >= layout.size)
    assert ring.take(MIN_RING_BYTES) == (layout.pack(*fields) if went else b"")


@given(st.integers(0, MIN_RING_BYTES - 1), st.sampled_from([b"head", b"heads", b"nope"]), st.integers(0, 3))
def test_expected_data(before: int, head: bytes, surplus: int) -> None:
    ring, data, into = Ring(), bytes(range(1, 101)), bytearray(100)
    ring.writer.put_whole(bytes(before))
    ring.take(MIN_RING_BYTES)
    ring.writer.put_whole(head, data + bytes(surplus))
    size = len(head) + 100 + surplus
    assert ring.reader.poll(3, size)
    assert not ring.reader.poll(3, size + 1)
    taken = ring.reader.take_if(b"head", memoryview(into))
    is_whole = before + 4 <= MIN_RING_BYTES
    assert taken == (head == b"head" and not surplus and is_whole)
    assert into == (data if taken else bytes(100))
    assert len(ring.take(MIN_RING_BYTES)) == (0 if taken else size)


def test_a_writer_that_is_interrupted_wakes_its_reader_all_the_same() -> None:
    ring = Ring()

    class Interrupting:
        def acquire(self, blocking: bool = True, /) -> bool:
            raise KeyboardInterrupt

        def release(self) -> None:
            pass

    writer = client_ends(ring.memory, LAYOUT, (threading.Lock(), Interrupting()), ring.wake("reader"))[1]
    ring.reader.doze()
    with pytest.raises(KeyboardInterrupt):
        writer.put_whole(b"one")
    with pytest.raises(KeyboardInterrupt):
        writer.put_packed(struct.Struct("ssscc"), b"a", b"b", b"c", b"d", b"e")
    assert ring.woken == ["reader"] * 2
    assert ring.take(10) == b"oneabcde"


def test_one_expected_frame() -> None:
    ring = Ring()
    for data in (b"reply", b"repli", b"replyx", b"repl"):
        ring.writer.put(data)
        assert ring.reader.take_if(b"reply") == (data == b"reply")
        assert ring.take(9) == (b"" if data == b"reply" else data)


def test_what_is_behind_a_known_front_is_taken_only_if_that_is_all() -> None:
    ring = Ring()
    for data in (b"frontabc", b"frontab", b"frontabcd", b"fr0ntabc"):
        ring.writer.put(data)
        into = bytearray(3)
        assert ring.reader.take_if(b"front", memoryview(into)) == (data == b"frontabc")
        assert into == (b"abc" if data == b"frontabc" else bytes(3))
        assert ring.take(9) == (b"" if data == b"frontabc" else data)


def test_a_known_front_that_wraps_is_left_to_the_general_way() -> None:
    ring = Ring()
    is_taken = True
    while is_taken:
        into = bytearray(4)
        assert ring.writer.put_whole(b"frontabc!")
        is_taken = ring.reader.take_if(b"front", memoryview(into))
        assert into == (b"abc!" if is_taken else bytes(4))
    assert ring.take(9) == b"frontabc!"


def test_a_sync_s_words() -> None:
    memory = memoryview(bytearray(LAYOUT.total_bytes))
    page = memory[:DATA_AT].cast("Q")
    words = SyncWords(memory, threading.Lock())
    assert words.ask(7)
    assert page[1] == 7
    assert words.poll(7, 3) is None
    for answer, said in ((15, True), (14, False), (13, None), (17, None)):
        page[33] = answer
        assert words.poll(7, 3) is said
    page[READER_SLEEPS] = 1
    assert not words.ask(8)
    words.release()
