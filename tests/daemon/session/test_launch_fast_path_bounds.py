"""daemon/session/native/serve.ll between guard pages: a byte read or written outside of its memory ends the process."""

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.daemon.contract.control_page import Counter
from gpulease.daemon.native.addresses import address_of
from gpulease.daemon.session.native.allocation_records import AllocationRecords
from gpulease.daemon.session.native.graph_records import GraphRecord
from gpulease.daemon.session.native.launch_fast_path import COPIED_BYTES, serving_code
from gpulease.daemon.session.native.layout import (
    Move,
    Outcome,
    PacingState,
    PlanRecord,
    RegionCheckRecord,
    RingEnds,
    ServingState,
)
from gpulease.daemon.session.native.region_refusals import kernel_part, record_of, refusal_front
from gpulease.daemon.session.replies import SyncPattern
from gpulease.protocol.codec import build_body
from gpulease.protocol.failures import Failure
from gpulease.protocol.failures import region_refusal as refusal_of_region
from gpulease.protocol.fastpath import ARENA_FRONTS, SMALL_FRONTS, LaunchPattern, split_launch
from gpulease.protocol.framing import HEADER_BYTES, FrameReader, build_frame
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import ArenaCopy, Body, GraphLaunch, Handle, Launch, MemRead, MemWrite
from gpulease.protocol.opcodes import Flag, Opcode
from gpulease.protocol.session_words import RegionWord, word_of

LEASE = 0x55
RING_BYTES = mmap.PAGESIZE
BUFFER_BYTES = mmap.PAGESIZE
PARAM_BYTES = 24
BODY = build_body(Launch(1, "k", 1, 1, 1, 32, 1, 1, 0, bytes(range(13)), (4, 8, 1)))
REGION_SET = (0x123456789).to_bytes(8, "big")
TRAILER = REGION_SET + bytes(range(8))
EPOCH = 41
REGIONS = 3
MOVES = ((0, 0, 4), (4, 8, 8), (12, 16, 1))
LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64
)
QUERY = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)
COPY = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64)
ZERO = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)
REPLAY = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)
DEVICE_BYTES = 100
ARENA_BYTES = 150
GRAPH = 127
_LIBC = ctypes.CDLL(None)


class Guarded:
    """Memory between two guard pages; it ends where the second begins."""

    def __init__(self, size: int, content: bytes = b"") -> None:
        pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, pages + 2 * mmap.PAGESIZE)
        start = address_of(self._map)
        for guard in (start, start + mmap.PAGESIZE + pages):
            assert _LIBC.mprotect(ctypes.c_void_p(guard), mmap.PAGESIZE, 0) == 0
        self.at = start + mmap.PAGESIZE + pages - size
        self.bytes = (ctypes.c_ubyte * size).from_address(self.at)
        ctypes.memmove(self.at, content, len(content))

    def close(self) -> None:
        self._map.close()


@dataclass
class Bench:
    desk: ServingState
    ends: RingEnds
    words: "ctypes.Array[ctypes.c_uint64]"
    reply_words: "ctypes.Array[ctypes.c_uint64]"
    data: Guarded
    replies: Guarded
    launches: list[tuple[int, bytes]] = field(default_factory=list)
    replays: list[int] = field(default_factory=list)
    progress: int = 0
    on_query: Callable[[], object] = int
    device: Guarded = field(kw_only=True)
    arena: Guarded = field(kw_only=True)
    records: AllocationRecords = field(kw_only=True)
    refusal: RegionCheckRecord = field(kw_only=True)

    def flip(self, slot: int, word: int, *, raises: bool = True) -> None:
        ctypes.c_uint64.from_address(self.refusal.words + 8 * slot).value = word
        if raises:
            ctypes.c_uint64.from_address(self.desk.epoch).value += 1

    def serve(self) -> Outcome:
        code = serving_code()
        assert code is not None
        return Outcome(code.serve_ring(ctypes.addressof(self.desk), ctypes.addressof(self.ends)))

    def put(self, stream: bytes) -> None:
        tail = self.words[0]
        for number, byte in enumerate(stream):
            self.data.bytes[(tail + number) % RING_BYTES] = byte
        self.words[0] = (tail + len(stream)) & 2**64 - 1


def plan_record(text: Callable[[bytes], int], op: Opcode) -> PlanRecord:
    pattern = LaunchPattern(BODY + TRAILER * (op is Opcode.LAUNCH_IN), LEASE, op)
    moves = (Move * len(MOVES))(*(Move(*move) for move in MOVES))
    plan = PlanRecord(
        front=text(pattern.front),
        middle=text(pattern.middle),
        middle_bytes=len(pattern.middle),
        tail=text(pattern.tail),
        tail_bytes=len(pattern.tail),
        args_bytes=pattern.args_end - pattern.args_at,
        frame_bytes=pattern.frame_bytes,
        launch=text(bytes(8)),
        moves=ctypes.addressof(moves),
        moves_count=len(moves),
        param_bytes=PARAM_BYTES,
        trailer_bytes=pattern.trailer_bytes,
        tail_at=pattern.args_end,
    )
    plan.kept = moves
    plan.follower = ctypes.addressof(plan)
    return plan


def region_refusal(guarded: Callable[[int, bytes], Guarded], plan: PlanRecord) -> RegionCheckRecord:
    """A set of REGIONS regions, the last of which has the page's last slot; a reply has no byte to spare."""
    kernel = kernel_part("k")
    plan.refusal, plan.refusal_bytes = guarded(len(kernel), kernel).at, len(kernel)
    records = [record_of(0x77 + slot, slot, 1) for slot in range(REGIONS)]
    words = b"".join(int(record.active).to_bytes(8, sys.byteorder) for record in records)
    for record in records:
        record.front = guarded(record.front_bytes, ctypes.string_at(record.front, record.front_bytes)).at
        record.back = guarded(48, ctypes.string_at(record.back, 48)).at
    members = b"".join(ctypes.addressof(record).to_bytes(8, sys.byteorder) for record in records)
    refusal = RegionCheckRecord(
        words=guarded(8 * REGIONS, words).at,
        flipped=guarded(8 * REGIONS, bytes(8 * REGIONS)).at,
        deadlines=guarded(8 * REGIONS, b"\xff" * 8 * REGIONS).at,
        members=guarded(8 * REGIONS, members).at,
        count=REGIONS,
        front=guarded(12, refusal_front()).at,
        reply=guarded(HEADER_BYTES + records[0].front_bytes + len(kernel) + 48, b"").at,
    )
    refusal.kept = records
    return refusal


def copying() -> dict[str, Any]:
    """A driver's copies, whose device is this process."""

    def copy_in(_driver: int, address: int, host: int, size: int) -> int:
        ctypes.memmove(address, host, size)
        return 0

    def copy_out(_driver: int, address: int, host: int, size: int) -> int:
        ctypes.memmove(host, address, size)
        return 0

    def zero(_driver: int, address: int, size: int) -> int:
        ctypes.memset(address, 0, size)
        return 0

    return {"copy_in": COPY(copy_in), "copy_out": COPY(copy_out), "zero": ZERO(zero)}


def ring_ends(words: Guarded, data: Guarded, reply_words: Guarded, replies: Guarded) -> RingEnds:
    return RingEnds(
        words=words.at,
        data=data.at,
        capacity=RING_BYTES,
        reply_words=reply_words.at,
        reply_data=replies.at,
        reply_capacity=RING_BYTES,
        buffer_bytes=BUFFER_BYTES,
        spins_per_byte=1,
        spins_per_reply=2,
        spin_ns=1000,
        quantum_ns=1_000_000,
    )


@contextmanager
def bench(op: Opcode = Opcode.LAUNCH) -> Iterator[Bench]:
    syncs = SyncPattern(LEASE)
    made: list[Guarded] = []

    def guarded(size: int, content: bytes = b"") -> Guarded:
        made.append(Guarded(size, content))
        return made[-1]

    def text(content: bytes) -> int:
        return guarded(len(content), content).at

    def launch(_driver: int, _record: int, params: int, size: int, tag: int) -> int:
        it.launches.append((tag, ctypes.string_at(params, size)))
        return tag % 64 == 63

    def query(_driver: int) -> int:
        it.on_query()
        return it.progress

    def replay(_driver: int, _graph: int, tag: int) -> int:
        it.replays.append(tag)
        return tag % 64 == 63

    launched, asked, replayed = LAUNCH(launch), QUERY(query), REPLAY(replay)
    copies = copying()
    fronts = map(text, SMALL_FRONTS)
    records = AllocationRecords()
    plan = plan_record(text, op)
    refusal = region_refusal(guarded, plan)
    sync_front, sync_tail, reply_front, reply_tail = map(text, syncs.texts)
    page, counters = guarded(mmap.PAGESIZE, bytes(8) + b"\xff" * 8), guarded(8 * len(Counter))
    data, replies = guarded(4096), guarded(4096)
    words, reply_words, buffer, arena = guarded(256), guarded(256), guarded(BUFFER_BYTES), guarded(ARENA_BYTES)
    query_at = ctypes.cast(asked, ctypes.c_void_p).value or 0
    # Without limits: no mark is put, and no latency word read.
    pacing = PacingState(page=page.at, counters=counters.at, idle=query_at, own_word=guarded(8).at)
    desk = ServingState(
        page=page.at,
        counters=counters.at,
        launch=ctypes.cast(launched, ctypes.c_void_p).value or 0,
        query=query_at,
        pacing=ctypes.addressof(pacing),
        scratch=guarded(PARAM_BYTES).at,
        sync_front=sync_front,
        sync_tail=sync_tail,
        reply_front=reply_front,
        reply_tail=reply_tail,
        buffer=buffer.at,
        expected=ctypes.addressof(plan),
        region_set=int.from_bytes(REGION_SET, sys.byteorder),
        set_epoch=EPOCH,
        seen_epoch=EPOCH,
        set_deadline=2**64 - 1,
        epoch=guarded(8, EPOCH.to_bytes(8, sys.byteorder)).at,
        **dict(zip(("write_front", "read_front", "data_front", "reuse_front"), fronts, strict=True)),
        allocations=records.address,
        copied=guarded(COPIED_BYTES).at,
        refusal=ctypes.addressof(refusal),
        graphs=text(graph_record(text)),
        replay_graph=ctypes.cast(replayed, ctypes.c_void_p).value or 0,
        replays=guarded(8 * (1 + 2048)).at,
        arena_fronts=text(b"".join(ARENA_FRONTS)),
        arena=arena.at,
        arena_bytes=ARENA_BYTES,
        extents=guarded(8, ARENA_BYTES.to_bytes(8, sys.byteorder)).at,
        **{name: ctypes.cast(function, ctypes.c_void_p).value or 0 for name, function in copies.items()},
    )
    ends = ring_ends(words, data, reply_words, replies)
    of_requests, of_replies = ((ctypes.c_uint64 * 32).from_address(memory.at) for memory in (words, reply_words))
    it = Bench(
        desk,
        ends,
        of_requests,
        of_replies,
        data,
        replies,
        device=guarded(DEVICE_BYTES),
        arena=arena,
        records=records,
        refusal=refusal,
    )
    records.show(it.device.at, DEVICE_BYTES, is_reusable=True)
    try:
        yield it
    finally:
        for memory in made:
            memory.close()


def quiet(number: int, args: bytes, op: Opcode = Opcode.LAUNCH, trailer: bytes = b"") -> bytes:
    frame = build_frame(op, BODY + trailer, request_id=number, session_id=LEASE, flags=Flag.QUIET)
    _, usual = split_launch(memoryview(BODY))
    assert len(args) == len(usual)
    return frame.replace(usual, args)


def laid_out(args: bytes) -> bytes:
    return args[:4] + bytes(4) + args[4:12] + args[12:] + bytes(PARAM_BYTES - 17)


def memory_frame(op: Opcode, number: int, offset: int, length: int) -> Callable[[int], bytes]:
    """A frame for the allocation of an address."""

    def build(handle: int) -> bytes:
        flags = 0 if op is Opcode.MEM_READ else Flag.QUIET
        bodies: dict[Opcode, Body] = {
            Opcode.MEM_READ: MemRead(handle, offset, length),
            Opcode.MEM_WRITE: MemWrite(handle, offset, bytes([length % 256]) * (length % 500)),
            Opcode.MEM_REUSE: Handle(handle),
        }
        return build_frame(op, build_body(bodies[op]), request_id=number, session_id=LEASE, flags=flags)

    return build


def graph_frame(number: int, graph: int = GRAPH, values: bytes = b"values") -> bytes:
    body = build_body(GraphLaunch(graph, values))
    return build_frame(Opcode.GRAPH_LAUNCH, body, request_id=number, session_id=LEASE, flags=Flag.QUIET)


def graph_record(text: Callable[[bytes], int]) -> bytes:
    """The table of graphs, with one graph, which has the last place."""
    frame = graph_frame(0)
    record = GraphRecord(GRAPH, len(frame), text(frame[:16]), text(frame[24:]), 1, 2, 3, 4)
    return bytes(ctypes.sizeof(record) * (GRAPH % 64)) + bytes(record)


def arena_frame(op: Opcode, number: int, offset: int, place: int, length: int) -> Callable[[int], bytes]:
    def build(handle: int) -> bytes:
        body = build_body(ArenaCopy(handle, offset, place, length))
        return build_frame(op, body, request_id=number, session_id=LEASE)

    return build


GRAPH_FRAMES = st.builds(
    graph_frame,
    st.integers(0, 2**64 - 1),
    st.one_of(st.just(GRAPH), st.integers(0, 2**64 - 1)),
    st.sampled_from([b"values", b"valued", b"value", b""]),
)
ARENA = st.builds(
    arena_frame,
    st.sampled_from([Opcode.ARENA_WRITE, Opcode.ARENA_READ]),
    st.integers(0, 2**64 - 1),
    st.one_of(st.integers(0, DEVICE_BYTES + 1), st.integers(0, 2**64 - 1)),
    st.one_of(st.integers(0, ARENA_BYTES + 1), st.integers(0, 2**64 - 1)),
    st.one_of(st.integers(0, DEVICE_BYTES + 1), st.integers(0, 2**64 - 1)),
)
MEMORY = st.builds(
    memory_frame,
    st.sampled_from([Opcode.MEM_WRITE, Opcode.MEM_READ, Opcode.MEM_REUSE]),
    st.integers(0, 2**64 - 1),
    st.one_of(st.integers(0, DEVICE_BYTES + 1), st.integers(0, 2**64 - 1)),
    st.one_of(st.integers(0, DEVICE_BYTES + 1), st.integers(0, 70_000), st.integers(0, 2**64 - 1)),
)
PIECES = st.lists(
    st.one_of(
        MEMORY,
        ARENA,
        GRAPH_FRAMES,
        st.builds(quiet, st.integers(0, 2**64 - 1), st.binary(min_size=13, max_size=13)),
        st.integers(0, 2**64 - 1).map(lambda number: build_frame(Opcode.SYNC, request_id=number, session_id=LEASE)),
        st.binary(max_size=300),
        st.tuples(st.integers(1, 200), st.integers(0, 2**64 - 1)).map(lambda cut: quiet(cut[1], bytes(13))[: cut[0]]),
    ),
    max_size=12,
)
WORD = st.tuples(st.booleans(), st.sampled_from([0, 1, 8, 16, 24]), st.one_of(st.integers(0, 2**64 - 1), st.just(0)))


@pytest.mark.exhaustive
@settings(max_examples=150, deadline=None)
@given(rounds=st.lists(st.tuples(PIECES, st.lists(WORD, max_size=2), st.integers(0, 2**64 - 1)), max_size=5))
def test_no_byte_outside_its_memory_is_touched(
    rounds: list[tuple[list[bytes | Callable[[int], bytes]], list[tuple[bool, int, int]], int]],
) -> None:
    with bench() as made:
        for pieces, words, turned in rounds:
            # As if the ring had gone round for years.
            made.ends.head = made.words[0] = turned
            made.ends.reply_tail = made.ends.reply_head = made.reply_words[8] = turned
            made.put(b"".join(piece if isinstance(piece, bytes) else piece(made.device.at) for piece in pieces))
            for is_reply, word, value in words:
                (made.reply_words if is_reply else made.words)[word] = value
            for _ in range(8):
                outcome = made.serve()
                assert 0 <= made.desk.start <= made.desk.end <= BUFFER_BYTES
                assert (made.ends.head - turned) & 2**64 - 1 <= 8 * RING_BYTES
                if outcome is not Outcome.WAKE_READER:
                    break
            # What is left is for Python, which empties the buffer.
            made.desk.start = made.desk.end = 0


@settings(max_examples=60, deadline=None)
@given(
    numbers=st.lists(st.tuples(st.integers(1, 2**64 - 1), st.binary(min_size=13, max_size=13)), max_size=12),
    turned=st.integers(0, 2**64 - 1),
)
def test_what_is_launched_is_what_was_sent(numbers: list[tuple[int, bytes]], turned: int) -> None:
    with bench() as made:
        made.ends.head = made.words[0] = turned
        made.put(b"".join(quiet(number, args) for number, args in numbers))
        made.serve()
        refused = next((place for place, (number, _) in enumerate(numbers) if number % 64 == 63), len(numbers))
        assert made.launches == [(number, laid_out(args)) for number, args in numbers[: refused + 1]]
        assert made.desk.end - made.desk.start == (len(numbers) - refused) * len(quiet(1, bytes(13)))


MOST = DEVICE_BYTES


@pytest.mark.parametrize(
    ("op", "offset", "length", "is_done"),
    [
        (Opcode.MEM_WRITE, 0, MOST, True),
        (Opcode.MEM_WRITE, 1, MOST, False),
        (Opcode.MEM_WRITE, 2**64 - 1, 2, False),
        (Opcode.MEM_WRITE, 0, 0, False),
        (Opcode.MEM_READ, MOST - 1, 1, True),
        (Opcode.MEM_READ, MOST, 1, False),
        (Opcode.MEM_READ, 2**64 - MOST, MOST, False),
        (Opcode.MEM_READ, 0, 2**64 - 1, False),
        (Opcode.MEM_READ, 0, 0, False),
        (Opcode.MEM_REUSE, 0, 0, True),
    ],
)
def test_a_copy_is_done_inside_its_allocation_alone(op: Opcode, offset: int, length: int, is_done: bool) -> None:
    with bench() as made:
        made.device.bytes[:] = list(range(DEVICE_BYTES))
        frame = memory_frame(op, 7, offset, length)(made.device.at)
        made.put(frame)
        made.serve()
        assert (made.desk.start == made.desk.end) is is_done
        after = list(range(DEVICE_BYTES))
        if is_done and op is not Opcode.MEM_READ:
            after = [0 if op is Opcode.MEM_REUSE else MOST] * DEVICE_BYTES
        assert list(made.device.bytes) == after
        assert made.reply_words[0] == (44 + length if is_done and op is Opcode.MEM_READ else 0)
        made.desk.start = made.desk.end = 0
        made.records.hide(made.device.at)
        made.put(frame)
        made.serve()
        assert made.desk.end == len(frame)


@pytest.mark.parametrize(
    ("offset", "place", "length", "is_done"),
    [
        (0, 0, DEVICE_BYTES, True),
        (1, 0, DEVICE_BYTES, False),
        (DEVICE_BYTES - 1, ARENA_BYTES - 1, 1, True),
        (0, ARENA_BYTES - 1, 2, False),
        (0, ARENA_BYTES, 1, False),
        (2**64 - 1, 0, 2, False),
        (0, 2**64 - 1, 2, False),
        (0, 0, 0, False),
        (0, 0, 2**64 - 1, False),
    ],
)
@pytest.mark.parametrize("op", [Opcode.ARENA_WRITE, Opcode.ARENA_READ])
def test_a_copy_of_the_arena_is_done_inside_both(
    op: Opcode, offset: int, place: int, length: int, *, is_done: bool
) -> None:
    with bench() as made:
        made.device.bytes[:] = [1] * DEVICE_BYTES
        made.arena.bytes[:] = [2] * ARENA_BYTES
        made.put(arena_frame(op, 7, offset, place, length)(made.device.at))
        made.serve()
        assert (made.desk.start == made.desk.end) is is_done
        is_write = op is Opcode.ARENA_WRITE
        assert list(made.device.bytes).count(2) == (length if is_done and is_write else 0)
        assert list(made.arena.bytes).count(1) == (length if is_done and not is_write else 0)
        assert made.reply_words[0] == (HEADER_BYTES if is_done else 0)


@pytest.mark.parametrize("is_launched", [True, False])
def test_a_copy_waits_for_launches_and_not_for_other_copies(*, is_launched: bool) -> None:
    with bench() as made:
        made.progress = 1
        busy_since = ctypes.c_uint64.from_address(made.desk.counters + 8 * Counter.BUSY_SINCE_NS)
        busy_since.value = is_launched
        made.put(memory_frame(Opcode.MEM_WRITE, 7, 0, MOST)(made.device.at))
        made.serve()
        assert list(made.device.bytes).count(MOST) == (0 if is_launched else MOST)
        # A SYNC waits for everything.
        busy_since.value = 0
        made.desk.start = made.desk.end = 0
        made.put(build_frame(Opcode.SYNC, request_id=8, session_id=LEASE))
        made.serve()
        assert made.reply_words[0] == 0


@pytest.mark.parametrize(
    ("frame", "is_done"),
    [
        (graph_frame(7), True),
        (graph_frame(0), False),
        (graph_frame(7, values=b"valued"), False),
        (graph_frame(7, values=b"value"), False),
        (graph_frame(7, graph=GRAPH + 64), False),
        (graph_frame(7)[:-1], False),
    ],
)
def test_a_replay_is_of_the_graph_and_the_values_that_python_has_shown(frame: bytes, *, is_done: bool) -> None:
    with bench() as made:
        made.put(frame)
        made.serve()
        assert made.replays == [7] * is_done
        assert (made.desk.start == made.desk.end) is is_done


def test_a_client_that_waits_anew_without_end_gets_its_quantum() -> None:
    with bench() as made:

        def wait_anew() -> None:
            made.words[1] += 1

        made.on_query = wait_anew
        made.words[1] = 1
        assert made.serve() is Outcome.QUANTUM_OVER
        assert made.reply_words[1] == 2 * made.words[1] - 1


@pytest.mark.parametrize("spins", [0, 1])
def test_a_client_that_waits_for_its_launch_is_answered_before_python_looks_around(spins: int) -> None:
    with bench() as made:
        made.desk.seen_epoch = EPOCH + 1
        made.ends.spins_per_byte = made.ends.spins_left = spins
        made.words[1] = 7
        made.put(quiet(1, bytes(13)))
        assert made.serve() is Outcome.QUANTUM_OVER
        assert len(made.launches) == 1
        # Without a spin it would cost a core that other processes may need.
        assert made.reply_words[1] == (15 if spins else 0)


def test_a_buffer_smaller_than_the_frame_is_left_to_python() -> None:
    with bench() as made:
        made.ends.buffer_bytes = HEADER_BYTES + 1
        made.put(quiet(1, bytes(13)))
        assert made.serve() is Outcome.FRAMES
        assert (made.desk.start, made.desk.end) == (0, HEADER_BYTES + 1)


NAMED = st.sampled_from([REGION_SET, REGION_SET, REGION_SET, bytes(8), b"\xff" * 8])


@settings(max_examples=60, deadline=None)
@given(
    launches=st.lists(
        st.tuples(st.binary(min_size=13, max_size=13), NAMED, st.binary(min_size=8, max_size=8)), max_size=12
    ),
    turned=st.integers(0, 2**64 - 1),
    is_over=st.sampled_from(["", "", "epoch", "deadline"]),
)
def test_a_launch_in_regions_goes_by_its_region_set(
    launches: list[tuple[bytes, bytes, bytes]], turned: int, is_over: str
) -> None:
    with bench(Opcode.LAUNCH_IN) as made:
        # Without the regions, Python compares them.
        made.refusal.count = 0
        made.ends.head = made.words[0] = turned
        frames = [
            quiet(number, args, Opcode.LAUNCH_IN, named + position)
            for number, (args, named, position) in enumerate(launches, start=1)
        ]
        made.put(b"".join(frames))
        if is_over == "epoch":
            made.desk.set_epoch = EPOCH + 1
        elif is_over == "deadline":
            made.desk.set_deadline = 1
        made.serve()
        others = (place for place, (_, named, _) in enumerate(launches) if named != REGION_SET)
        stop = 0 if is_over else next(others, len(launches))
        assert made.launches == [(place + 1, laid_out(launches[place][0])) for place in range(stop)]
        assert made.desk.end - made.desk.start == sum(map(len, frames[stop:]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", range(16))
def test_each_byte_of_a_region_set_counts_and_none_of_a_position(place: int) -> None:
    with bench(Opcode.LAUNCH_IN) as made:
        trailer = bytearray(TRAILER)
        trailer[place] ^= 0x80
        made.put(quiet(1, bytes(13), Opcode.LAUNCH_IN, bytes(trailer)))
        made.serve()
        assert len(made.launches) == (place >= 8)


REFUSED_PIECES = st.lists(
    st.one_of(
        st.builds(
            lambda number, args: quiet(number, args, Opcode.LAUNCH_IN, TRAILER),
            st.integers(0, 2**64 - 1),
            st.binary(min_size=13, max_size=13),
        ),
        st.integers(0, 2**64 - 1).map(lambda number: build_frame(Opcode.SYNC, request_id=number, session_id=LEASE)),
        st.binary(max_size=60),
    ),
    max_size=6,
)
FLIPS = st.tuples(st.integers(0, REGIONS - 1), st.sampled_from([*RegionWord]), st.sampled_from([1, 2]), st.booleans())


@pytest.mark.exhaustive
@settings(max_examples=150, deadline=None)
@given(
    rounds=st.lists(st.tuples(REFUSED_PIECES, st.lists(FLIPS, max_size=2), st.lists(WORD, max_size=1)), max_size=5),
    turned=st.integers(0, 2**64 - 1),
)
def test_a_refusal_touches_no_byte_outside_its_memory(
    rounds: list[tuple[list[bytes], list[tuple[int, RegionWord, int, bool]], list[tuple[bool, int, int]]]], turned: int
) -> None:
    with bench(Opcode.LAUNCH_IN) as made:
        made.ends.head = made.words[0] = turned
        made.ends.reply_tail = made.ends.reply_head = made.reply_words[8] = turned
        for pieces, flips, words in rounds:
            made.put(b"".join(pieces))
            for slot, state, number, raises in flips:
                made.flip(slot, word_of(number, state), raises=raises)
            for is_reply, word, value in words:
                (made.reply_words if is_reply else made.words)[word] = value
            began = len(made.launches)
            is_over = any(
                ctypes.c_uint64.from_address(made.refusal.words + 8 * slot).value != word_of(1, RegionWord.ACTIVE)
                for slot in range(REGIONS)
            )
            outcome = made.serve()
            assert 0 <= made.desk.start <= made.desk.end <= BUFFER_BYTES
            # Behind a raised epoch no launch begins in a set with a region that is not active.
            if is_over and ctypes.c_uint64.from_address(made.desk.epoch).value != made.desk.set_epoch:
                assert len(made.launches) == began
            if outcome is Outcome.REFUSED:
                assert made.refusal.member < REGIONS
                assert made.refusal.told_ns == 0 or made.refusal.told_ns >= made.refusal.seen_ns
            made.desk.start = made.desk.end = 0


def test_a_refused_launch_is_answered_with_its_numbers() -> None:
    with bench(Opcode.LAUNCH_IN) as made:
        made.put(quiet(7, bytes(13), Opcode.LAUNCH_IN, TRAILER))
        assert made.serve() is Outcome.IDLE
        made.flip(REGIONS - 1, word_of(1, RegionWord.REVOKED))
        sent = quiet(8, bytes(13), Opcode.LAUNCH_IN, TRAILER) + build_frame(Opcode.SYNC, request_id=9, session_id=LEASE)
        made.put(sent + quiet(10, bytes(13)))
        assert made.serve() is Outcome.REFUSED
        assert [number for number, _ in made.launches] == [7]
        assert made.refusal.member == REGIONS - 1
        # What came behind the SYNC is Python's.
        assert made.desk.end - made.desk.start == len(quiet(10, bytes(13)))
        reader = FrameReader(MAX_PAYLOAD_BYTES)
        reader.receive_data(bytes(made.replies.bytes[: made.reply_words[0]]))
        frame = reader.next_frame()
        assert frame is not None
        failure = Failure.from_payload(frame.status, frame.payload)
        expected = refusal_of_region(
            0x77 + REGIONS - 1,
            RegionWord.REVOKED,
            0,
            is_repeat=False,
            kernel="k",
            site=1,
            position=int.from_bytes(TRAILER[8:], "big"),
        )
        assert failure == replace(expected, failed_request_id=8, failed_op=Opcode.LAUNCH_IN)
        assert (frame.op, frame.request_id, frame.session_id) == (Opcode.SYNC, 9, LEASE)
