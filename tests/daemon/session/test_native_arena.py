"""Copies of the arena by native code: the same as by Python, and only between memory that Python has shown."""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.daemon.contract.control_page import Counter, TimeLimits
from gpulease.daemon.session import connection
from gpulease.daemon.session.memory_operations import GRANULE_BYTES
from gpulease.daemon.session.operations import Operation
from gpulease.protocol.codec import build_body
from gpulease.protocol.framing import HEADER_BYTES, Frame, FrameReader, build_frame
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import ArenaCopy
from gpulease.protocol.opcodes import Flag, Opcode, Status
from gpulease.protocol.ring import RingLayout
from helpers.ring_pair import Pair, pair
from helpers.session_rig import ALLOCATED_BYTES, LEASE, OF_THE_MOMENT, launch_of, quiet, sync, without_addresses

GRANULES = 3


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RING_LAYOUT", RingLayout(1 << 16, 4096))
    monkeypatch.setattr(connection, "SPIN_NS", 1000)


class Copies:
    """A session behind a ring, with an arena; counts the copies that Python serves."""

    def __init__(self, line: Pair, arena: mmap.mmap) -> None:
        self.line, self.made, self.arena = line, line.made, arena
        self.number = 0
        self.by_python = 0
        operations = self.made.session._operations
        for op in (Opcode.ARENA_WRITE, Opcode.ARENA_READ):
            operations[op] = self._counted(operations[op])

    def _counted(self, operation: Operation) -> Operation:
        def serve(frame: Frame) -> bytes | memoryview:
            self.by_python += 1
            return operation(frame)

        return serve

    def frame(
        self, op: Opcode, at: int, length: int, offset: int = 0, *, is_quiet: bool = False, session_id: int = LEASE
    ) -> bytes:
        self.number += 1
        body = build_body(ArenaCopy(self.made.address, offset, at, length))
        numbers = {"request_id": self.number, "session_id": session_id}
        return build_frame(op, body, flags=Flag.QUIET * is_quiet, **numbers)

    def copy(self, op: Opcode, at: int, length: int, offset: int = 0) -> int:
        """Ask for a copy and return its reply's status."""
        self.line.heard.clear()
        self.line.put(self.frame(op, at, length, offset))
        assert len(self.line.heard) >= HEADER_BYTES
        reader = FrameReader(MAX_PAYLOAD_BYTES)
        reader.receive_data(bytes(self.line.heard))
        frame = reader.next_frame()
        assert frame is not None
        assert (frame.op, frame.request_id, frame.session_id) == (op, self.number, LEASE)
        return frame.status


@contextmanager
def copies() -> Iterator[Copies]:
    with pair(is_native=True) as line:
        session_arena = line.made.session.arena.open(GRANULES * GRANULE_BYTES)
        try:
            with mmap.mmap(session_arena.fd, session_arena.size_bytes) as arena:
                yield Copies(line, arena)
        finally:
            line.made.session.arena.close()


@pytest.fixture(name="made")
def _made() -> Iterator[Copies]:
    with copies() as made:
        yield made


WRITE, READ = Opcode.ARENA_WRITE, Opcode.ARENA_READ


def test_the_second_copy_is_native_and_counts_like_the_first(made: Copies) -> None:
    page = made.made.page
    shown = [Counter.OPS, Counter.COPIES, Counter.COPIED_BYTES]
    steps = []
    for number in range(3):
        made.arena[100:164] = bytes([number + 1]) * 64
        before = [page.counter(counter) for counter in shown]
        assert made.copy(WRITE, 100, 64, 8) == Status.OK
        steps.append([page.counter(counter) - old for counter, old in zip(shown, before, strict=True)])
        assert made.made.contents[8:72] == bytes([number + 1]) * 64
        assert made.copy(READ, 300, 64, 8) == Status.OK
        assert made.arena[300:364] == bytes([number + 1]) * 64
    assert steps == [[1, 1, 64]] * 3
    assert made.by_python == 1


def test_the_page_says_which_copy_is_under_way(made: Copies) -> None:
    """The watchdog leaves a copy that waits in the driver alone, and knows it by its operation."""
    page, native = made.made.page, made.made.session._fast_path._native
    assert native is not None
    assert made.copy(WRITE, 0, 64) == Status.OK
    seen: list[int] = []

    def copy(_driver: int, _address: int, _host: int, _size: int) -> int:
        seen.append(page.counter(Counter.DOING))
        return 0

    called = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_uint64] * 4)(copy)
    native._state.copy_in = native._state.copy_out = ctypes.cast(called, ctypes.c_void_p).value
    assert [made.copy(op, 0, 64) for op in (WRITE, READ)] == [Status.OK] * 2
    assert seen == [WRITE, READ]
    assert page.counter(Counter.DOING) == 0
    assert made.by_python == 1


def test_a_copy_waits_for_the_launches_before_it(made: Copies) -> None:
    made.arena[0:64] = b"\0\0\x80\x3f" * 16
    assert made.copy(WRITE, 0, 64) == Status.OK
    launches = b"".join(quiet(launch_of(made.made, "bias"), 100 + number) for number in range(50))
    made.line.put(launches + made.frame(READ, 128, 64))
    assert made.arena[128:132] == b"\0\0\x4c\x42"  # 51.0: each launch has added 1 to the first eight


@pytest.mark.parametrize(
    ("at", "length", "offset"),
    [
        (GRANULE_BYTES - 32, 64, 0),  # from a pinned granule into one that is not
        (2 * GRANULE_BYTES, 64, 0),  # not pinned
    ],
)
def test_memory_that_is_not_pinned_is_pinned_by_python(made: Copies, at: int, length: int, offset: int) -> None:
    assert made.copy(WRITE, 0, 64) == Status.OK
    assert made.copy(WRITE, at, length, offset) == Status.OK
    assert made.by_python == 2


@pytest.mark.parametrize(
    ("at", "length", "offset"),
    [
        (0, ALLOCATED_BYTES + 1, 0),
        (0, 64, ALLOCATED_BYTES - 63),
        (0, 64, 1 << 63),
        (0, 1 << 63, 0),
        (GRANULES * GRANULE_BYTES - 63, 64, 0),
        (GRANULES * GRANULE_BYTES, 1, 0),
        (1 << 63, 64, 0),
        ((1 << 64) - 32, 64, 0),
    ],
)
def test_what_is_outside_is_refused_by_python(made: Copies, at: int, length: int, offset: int) -> None:
    # All of the arena is pinned, by one extent.
    assert made.copy(WRITE, 0, 64) == Status.OK
    for granule in range(GRANULES):
        assert made.copy(READ, granule * GRANULE_BYTES, 64) == Status.OK
    for op in (WRITE, READ):
        assert made.copy(op, at, length, offset) != Status.OK
    assert made.by_python == GRANULES + 2


def test_no_copy_after_the_leases_end_or_under_a_limit_of_time(made: Copies) -> None:
    assert made.copy(WRITE, 0, 64) == Status.OK
    made.made.page.set_time_limits(TimeLimits(allowance_ns=1 << 62, until_ns=1 << 62))
    assert made.copy(WRITE, 0, 64) == Status.OK
    assert made.by_python == 2
    made.made.page.set_time_limits(TimeLimits())
    made.made.page.refuse(Status.REVOKED)
    made.arena[0:64] = bytes(range(64))
    assert made.copy(WRITE, 0, 64) == Status.REVOKED
    assert made.made.contents[:64] == bytes(64)


KINDS = ("write", "read", "write quietly", "far", "launch", "sync", "foreign", "none", "beyond")


def frame_of(made: Copies, kind: str) -> bytes:
    size = 1 + made.number % 60
    match kind:
        case "write":
            return made.frame(WRITE, made.number, size, made.number % 90)
        case "read":
            return made.frame(READ, 5000 + made.number, size, made.number % 90)
        case "write quietly":
            return made.frame(WRITE, made.number, size, is_quiet=True)
        case "far":
            return made.frame(READ, GRANULE_BYTES - 30, size)
        case "foreign":
            return made.frame(WRITE, 0, 8, session_id=LEASE + 1)
        case "none":
            return made.frame(READ, 0, 0)
        case "beyond":
            return made.frame(READ, 0, 64, ALLOCATED_BYTES - size)
    made.number += 1
    return quiet(launch_of(made.made, "bias"), made.number) if kind == "launch" else sync(made.number)


@settings(max_examples=40, deadline=None)
@given(portions=st.lists(st.lists(st.sampled_from(KINDS), min_size=1, max_size=8), max_size=6))
def test_native_copies_do_what_python_does(portions: list[list[str]]) -> None:
    outcomes = []
    for is_native in (False, True):
        with copies() as made:
            if not is_native:
                made.made.session._fast_path.use_arena(0, 0, 0)
            made.arena[:4096] = bytes(range(256)) * 16
            for kinds in portions:
                made.line.put(b"".join(frame_of(made, kind) for kind in kinds))
            made.line.put(sync(9000) + sync(9001))
            counters = {counter: made.made.page.counter(counter) for counter in set(Counter) - OF_THE_MOMENT}
            outcomes.append(
                (without_addresses(made.line.heard), counters, made.made.contents, made.arena[: 2 * GRANULE_BYTES])
            )
    assert outcomes[0] == outcomes[1]
