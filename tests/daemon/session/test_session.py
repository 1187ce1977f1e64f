"""One session in this process, on the embedded driver: a frame in, a frame out."""

import gc
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from gpulease.daemon.contract.control_page import BrokerPage, Counter, WorkerPage
from gpulease.daemon.drivers.interface import ImageRejected
from gpulease.daemon.ptx.driver import CpuDriver
from gpulease.daemon.session.ledger import Ledger
from gpulease.daemon.session.session import Session
from gpulease.daemon.session.stream_operations import ConnectionStreams
from gpulease.protocol.codec import build_body, parse_body, reply_body
from gpulease.protocol.errors import FramingError
from gpulease.protocol.failures import Failure
from gpulease.protocol.framing import Frame, FrameReader, build_frame
from gpulease.protocol.limits import MAX_DATA_BYTES, MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import (
    Body,
    Data,
    Empty,
    ErrorBody,
    Handle,
    Launch,
    LeaseRef,
    MemAlloc,
    MemRead,
    MemWrite,
    ModuleLoad,
    Ping,
)
from gpulease.protocol.opcodes import Flag, Opcode, Status
from gpulease.protocol.operations import SESSION_OPCODES
from helpers.kernels import FAULTS, TRANSFORM, numbers, packed_scale_args

LEASE = 0x1234
SLICE = 1 << 20
FAR = 1 << 62


@dataclass
class Bench:
    """A session with its control page; `ask` sends requests as a tenant would."""

    session: Session
    page: BrokerPage
    last: int = 0

    def send(self, op: int, body: Body, *, quiet: bool = False, session_id: int = LEASE) -> Frame | None:
        self.last += 1
        flags = int(Flag.QUIET) if quiet else 0
        reply = self.session.handle(Frame(op, flags, 0, self.last, session_id, memoryview(build_body(body))))
        if reply is None:
            return None
        reader = FrameReader(MAX_PAYLOAD_BYTES)
        reader.receive_data(reply)
        frame = reader.next_frame()
        assert frame is not None
        assert frame.is_reply
        assert (frame.op, frame.request_id) == (op, self.last)
        assert not reader.is_mid_frame
        return frame

    def quiet(self, op: Opcode, body: Body, session_id: int = LEASE) -> int:
        assert self.send(op, body, quiet=True, session_id=session_id) is None
        return self.last

    def ask(self, op: Opcode, body: Body) -> Body:
        frame = self.send(op, body)
        assert frame is not None
        assert frame.status == 0, parse_body(ErrorBody, frame.payload)
        return parse_body(reply_body(op), frame.payload)

    def refused(self, op: int, body: Body, *, session_id: int = LEASE) -> Failure:
        frame = self.send(op, body, session_id=session_id)
        assert frame is not None
        assert frame.status != 0
        return Failure.from_body(frame.status, parse_body(ErrorBody, frame.payload))

    def alloc(self, size_bytes: int) -> int:
        reply = self.ask(Opcode.MEM_ALLOC, MemAlloc(size_bytes))
        assert isinstance(reply, Handle)
        return reply.handle

    def load(self, image: bytes) -> int:
        module: int = self.ask(Opcode.MODULE_LOAD, ModuleLoad(image)).module  # type: ignore[attr-defined]
        return module

    def bias(self, module: int, handle: int, kernel: str = "bias") -> Launch:
        return Launch(module, kernel, 1, 1, 1, 4, 1, 1, 0, *packed_scale_args(handle, 4, 1.0))

    def store(self, module: int, address: int) -> Launch:
        args = address.to_bytes(8, "little") + bytes(8)
        return Launch(module, "stray_store", 1, 1, 1, 1, 1, 1, 0, args, (8, 8))


@pytest.fixture
def bench() -> Iterator[Bench]:
    page = BrokerPage()
    page.set_deadline(FAR, 1)
    worker_page = WorkerPage(page.fds)
    driver = CpuDriver()
    driver.preload()
    context = driver.open_context("GPU-0", SLICE)
    session = Session(LEASE, context, Ledger(SLICE), worker_page)
    yield Bench(session, page)
    context.close()
    # It keeps views of the page, as it does to its process's end.
    session._counters.release()
    worker_page.close()
    page.close()


def test_the_main_job(bench: Bench) -> None:
    handle = bench.alloc(16)
    bench.ask(Opcode.MEM_WRITE, MemWrite(handle, 0, numbers(4).tobytes()))
    module = bench.load(TRANSFORM)
    bench.quiet(Opcode.LAUNCH, bench.bias(module, handle, "scale"))
    bench.quiet(Opcode.LAUNCH, bench.bias(module, handle))
    bench.ask(Opcode.SYNC, Empty())
    reply = bench.ask(Opcode.MEM_READ, MemRead(handle, 0, 16))
    assert isinstance(reply, Data)
    assert np.frombuffer(reply.data, np.float32).tolist() == [1, 2, 3, 4]
    bench.ask(Opcode.MODULE_UNLOAD, Handle(module))
    bench.ask(Opcode.MEM_FREE, Handle(handle))


def test_counters(bench: Bench) -> None:
    handle = bench.alloc(100)
    module = bench.load(TRANSFORM)
    bench.quiet(Opcode.LAUNCH, bench.bias(module, handle))
    bench.ask(Opcode.SYNC, Empty())
    bench.refused(Opcode.MEM_FREE, Handle(1))
    bench.ask(Opcode.MEM_WRITE, MemWrite(handle, 0, bytes(16)))
    bench.ask(Opcode.MEM_READ, MemRead(handle, 4, 8))
    bench.refused(Opcode.MEM_READ, MemRead(handle, 96, 8))
    of_moment = {Counter.LAST_POLL_NS, Counter.DOING, Counter.KERNEL_SINCE_NS, Counter.COMPILING_SINCE_NS}
    of_moment |= {Counter.BUSY_NS, Counter.BUSY_SINCE_NS, Counter.LAST_BUSY_FROM_NS, Counter.LAST_BUSY_UNTIL_NS}
    assert {counter: bench.page.counter(counter) for counter in set(Counter) - of_moment} == {
        Counter.LAUNCHES: 1,
        Counter.SYNCS: 1,
        Counter.FAILED_OPS: 2,
        Counter.ALLOCATED_BYTES: 100,
        Counter.OPS: 8,
        Counter.SYNC_ERRORS: 0,
        Counter.COPIES: 2,
        Counter.COPIED_BYTES: 24,
        Counter.CONNECTIONS: 0,
        Counter.MOST_ALLOCATED_BYTES: 100,
        Counter.KEPT_BYTES: 0,
        Counter.UNHELD_BYTES: 100,
        Counter.PARK_NUMBER: 0,
        Counter.PAGES_BYTES: 0,
        Counter.HELD_BACK_NS: 0,
        Counter.HELD_BACK_SINCE_NS: 0,
        Counter.TIME_VERSION: 1,
        Counter.TRANSFER: 0,
        Counter.AHEAD_DISCARDED: 0,
        Counter.AHEAD_DISCARDED_BYTES: 0,
    }


def test_a_wait_that_is_answered_with_a_failure_counts_as_one(bench: Bench) -> None:
    def errors() -> int:
        return bench.page.counter(Counter.SYNC_ERRORS)

    bench.quiet(Opcode.MEM_FREE, Handle(1))
    bench.refused(Opcode.SYNC, Empty())
    assert (errors(), bench.page.counter(Counter.SYNCS)) == (1, 0)
    bench.refused(Opcode.STREAM_SYNC, Handle(7))
    bench.refused(Opcode.MEM_FREE, Handle(1))
    assert errors() == 2, "another operation's failure is none"
    bench.ask(Opcode.STREAM_SYNC, Handle(0))
    assert (errors(), bench.page.counter(Counter.SYNCS)) == (2, 1)
    bench.page.refuse(Status.REVOKED)
    bench.refused(Opcode.SYNC, Empty())
    assert errors() == 2, "the end of a lease is none"


def test_a_reply_ends_the_stream(bench: Bench) -> None:
    with pytest.raises(FramingError, match="sent a reply"):
        bench.session.handle(Frame(Opcode.PING, int(Flag.REPLY), 0, 1, LEASE, build_body(Ping(1))))


@pytest.mark.parametrize(
    ("op", "status"),
    [
        (Opcode.LEASE_ALLOC, Status.INVALID_REQUEST),
        (Opcode.ATTACH, Status.INVALID_REQUEST),
        (0x06FF, Status.UNSUPPORTED),
        (0xFFFF, Status.UNSUPPORTED),
    ],
)
def test_operations_a_session_does_not_serve(bench: Bench, op: int, status: Status) -> None:
    assert bench.refused(op, Empty()).status is status


def test_another_session(bench: Bench) -> None:
    failure = bench.refused(Opcode.PING, Ping(1), session_id=LEASE + 1)
    assert failure.status is Status.INVALID_REQUEST
    number = bench.quiet(Opcode.LAUNCH, bench.bias(1, 1), session_id=LEASE + 1)
    failure = bench.refused(Opcode.SYNC, Empty())
    assert (failure.status, failure.failed_request_id) == (Status.INVALID_REQUEST, number)


@pytest.mark.parametrize("word", [Status.REVOKED, Status.LEASE_EXPIRED, Status.LEASE_FREED, Status.SESSION_FAILED])
def test_after_the_revocation_nothing_is_done(bench: Bench, word: Status) -> None:
    handle = bench.alloc(16)
    module = bench.load(TRANSFORM)
    bench.page.refuse(word)
    launches = bench.page.counter(Counter.LAUNCHES)
    for op, body in (
        (Opcode.MEM_ALLOC, MemAlloc(4)),
        (Opcode.MEM_READ, MemRead(handle, 0, 4)),
        (Opcode.LAUNCH, bench.bias(module, handle)),
        (Opcode.SYNC, Empty()),
        (Opcode.PING, Ping(1)),
    ):
        failure = bench.refused(op, body)
        assert failure.status is word
        assert failure.message
        assert failure.hint
    bench.quiet(Opcode.LAUNCH, bench.bias(module, handle))
    assert bench.page.counter(Counter.LAUNCHES) == launches


def test_the_deadline_alone_ends_the_session(bench: Bench) -> None:
    bench.page.set_deadline(1, 2)
    assert bench.refused(Opcode.SYNC, Empty()).status is Status.LEASE_EXPIRED


def test_a_quiet_failure_is_reported_once_and_the_operation_that_reports_it_is_not_done(bench: Bench) -> None:
    handle = bench.alloc(16)
    module = bench.load(TRANSFORM)
    number = bench.quiet(Opcode.LAUNCH, bench.bias(module, handle, "nothing"))
    bench.quiet(Opcode.LAUNCH, bench.bias(module, handle))
    bench.quiet(Opcode.MEM_FREE, Handle(handle))
    failure = bench.refused(Opcode.MEM_WRITE, MemWrite(handle, 0, b"\xff" * 16))
    assert failure.status is Status.LAUNCH_FAILED
    assert (failure.failed_request_id, failure.failed_op) == (number, Opcode.LAUNCH)
    assert failure.kernel == "nothing"
    assert bench.ask(Opcode.MEM_READ, MemRead(handle, 0, 16)) == Data(bytes(16))


@pytest.fixture
def connections(bench: Bench) -> list[Callable[[], None]]:
    """Functions that make the first and the second connection of a session the current one."""
    made: list[Callable[[], None]] = []
    for _ in range(2):
        streams, holder = ConnectionStreams(), bench.session.begin_connection(0, owns=True)
        made.append(partial(bench.session.switch_to, streams, holder))
    return made


def test_a_failure_is_reported_to_the_connection_that_made_the_request(
    bench: Bench, connections: list[Callable[[], None]]
) -> None:
    to_first, to_second = connections
    to_first()
    handle = bench.alloc(4)
    number = bench.quiet(Opcode.MEM_FREE, Handle(12345))
    bench.quiet(Opcode.MEM_WRITE, MemWrite(handle, 0, b"skip"))
    # The other connection's requests, quiet ones too, are neither skipped nor answered with the failure.
    to_second()
    bench.quiet(Opcode.MEM_WRITE, MemWrite(handle, 0, b"done"))
    assert bench.ask(Opcode.MEM_READ, MemRead(handle, 0, 4)) == Data(b"done")
    own = bench.quiet(Opcode.MEM_FREE, Handle(54321))
    to_first()
    assert bench.refused(Opcode.SYNC, Empty()).failed_request_id == number
    assert bench.ask(Opcode.MEM_READ, MemRead(handle, 0, 4)) == Data(b"done")
    to_second()
    assert bench.refused(Opcode.SYNC, Empty()).failed_request_id == own
    bench.ask(Opcode.SYNC, Empty())


def test_a_failure_ends_with_its_connection(bench: Bench, connections: list[Callable[[], None]]) -> None:
    to_first, to_second = connections
    to_second()
    bench.quiet(Opcode.MEM_FREE, Handle(12345))
    assert bench.session.keeps_failure
    streams, holder = to_second.args  # type: ignore[attr-defined]
    bench.session.end_connection(streams, holder, is_last=False)
    assert not bench.session.keeps_failure
    to_first()
    bench.ask(Opcode.SYNC, Empty())


def test_a_fault_is_reported_to_the_next_reply_and_to_each_connection_that_skipped(
    bench: Bench, connections: list[Callable[[], None]]
) -> None:
    to_first, to_second = connections
    to_first()
    module, handle = bench.load(FAULTS), bench.alloc(4)
    number = bench.quiet(Opcode.LAUNCH, bench.store(module, 0x10))
    # MEM_WRITE notices the fault, and is skipped.
    bench.quiet(Opcode.MEM_WRITE, MemWrite(handle, 0, b"skip"))
    to_second()
    bench.quiet(Opcode.MEM_WRITE, MemWrite(handle, 0, b"skip"))
    to_first()
    assert bench.refused(Opcode.SYNC, Empty()).failed_request_id == number
    bench.ask(Opcode.SYNC, Empty())
    to_second()
    assert bench.refused(Opcode.SYNC, Empty()).failed_request_id == number
    assert bench.ask(Opcode.MEM_READ, MemRead(handle, 0, 4)) == Data(bytes(4))


def test_a_fault_names_its_launch(bench: Bench) -> None:
    module = bench.load(FAULTS)
    number = bench.quiet(Opcode.LAUNCH, bench.store(module, 0x10))
    failure = bench.refused(Opcode.SYNC, Empty())
    assert failure.status is Status.SYNC_FAILED
    assert (failure.failed_request_id, failure.kernel, failure.address) == (number, "stray_store", 0x10)
    assert bench.session.lost is None
    bench.ask(Opcode.SYNC, Empty())


def test_a_failed_load_changes_nothing(bench: Bench) -> None:
    failure = bench.refused(Opcode.MODULE_LOAD, ModuleLoad(TRANSFORM.replace(b"mul.wide", b"mul.narrow")))
    assert failure.status is Status.LOAD_FAILED
    assert failure.line > 0
    assert "mul.narrow" in failure.log
    assert bench.load(TRANSFORM) == 1


def test_a_modules_variables_are_taken_from_the_slice_and_given_back(bench: Bench) -> None:
    image = b".version 7.0\n.target sm_75\n.address_size 64\n.global .b8 big[700000];\n.visible .entry k() { ret; }\n"
    module = bench.load(image)
    assert bench.page.counter(Counter.ALLOCATED_BYTES) == 700_000
    failure = bench.refused(Opcode.MODULE_LOAD, ModuleLoad(image))
    assert failure.status is Status.LOAD_FAILED
    assert "the slice has room for 348576" in failure.message
    assert failure.hint
    assert bench.refused(Opcode.MEM_ALLOC, MemAlloc(348_577)).status is Status.ALLOC_FAILED
    bench.ask(Opcode.MODULE_UNLOAD, Handle(module))
    assert bench.page.counter(Counter.ALLOCATED_BYTES) == 0
    bench.alloc(SLICE)


def test_reads_are_bounded_before_anything_is_reserved(bench: Bench) -> None:
    handle = bench.alloc(16)
    tracemalloc.start()
    failure = bench.refused(Opcode.MEM_READ, MemRead(handle, 0, MAX_DATA_BYTES + 1))
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert failure.status is Status.INVALID_REQUEST
    assert most_bytes < MAX_DATA_BYTES


def test_reads_and_writes_of_nothing(bench: Bench) -> None:
    handle = bench.alloc(16)
    assert bench.ask(Opcode.MEM_READ, MemRead(handle, 16, 0)) == Data(b"")
    bench.ask(Opcode.MEM_WRITE, MemWrite(handle, 16, b""))


def stream_outcome(bench: Bench, stream: bytes, *, expecting: bool) -> list[object]:
    """(op, status, request id) of each reply to a stream, and how it broke off if it did."""
    reader, replies = FrameReader(MAX_PAYLOAD_BYTES), FrameReader(MAX_PAYLOAD_BYTES)
    reader.receive_data(stream)
    outcome: list[object] = []
    try:
        while True:
            if expecting:
                bench.session.take_launches(reader)
            frame = reader.next_frame()
            if frame is None:
                break
            replies.receive_data(bench.session.handle(frame) or b"")
    except FramingError as error:
        outcome.append(error.status)
    while (reply := replies.next_frame()) is not None:
        outcome.append((reply.op, reply.status, reply.request_id))
    return outcome


@pytest.mark.exhaustive
def test_no_byte_of_an_expected_launch_goes_unchecked(bench: Bench) -> None:
    """Each single changed byte has the outcome it has when nothing is expected: launches alike, failures alike."""
    handle, module = bench.alloc(16), bench.load(TRANSFORM)
    flags = int(Flag.QUIET)
    payload = build_body(bench.bias(module, handle))
    good = build_frame(Opcode.LAUNCH, payload, request_id=50, session_id=LEASE, flags=flags)
    sync = build_frame(Opcode.SYNC, b"", request_id=51, session_id=LEASE)
    geometry = range(len(good) - len(payload) + 16, len(good) - len(payload) + 44)
    for at in range(len(good)):
        for bit in (0x01, 0x02, 0x80):
            if at in geometry and bit == 0x80:
                continue  # a grid of millions of blocks would be launched, as it should
            changed = bytearray(good)
            changed[at] ^= bit
            stream = good + bytes(changed) + sync
            launches, outcomes = [], []
            for expecting in (False, True):
                before = bench.page.counter(Counter.LAUNCHES)
                outcomes.append(stream_outcome(bench, stream, expecting=expecting))
                # What is left to report, and a clean slate.
                bench.send(Opcode.SYNC, Empty())
                launches.append(bench.page.counter(Counter.LAUNCHES) - before)
            assert outcomes[0] == outcomes[1], (at, bit)
            assert launches[0] == launches[1], (at, bit)


@pytest.mark.parametrize(
    ("op", "body"),
    [
        (Opcode.MEM_ALLOC, Empty()),
        (Opcode.MEM_FREE, Empty()),
        (Opcode.MEM_WRITE, MemAlloc(1)),
        (Opcode.MEM_READ, Handle(1)),
        (Opcode.MODULE_LOAD, Handle(1)),
        (Opcode.LAUNCH, Handle(1)),
        (Opcode.SYNC, Handle(1)),
        (Opcode.PING, LeaseRef(1)),
    ],
)
def test_bodies_of_another_operation(bench: Bench, op: Opcode, body: Body) -> None:
    assert bench.refused(op, body).status is Status.INVALID_REQUEST


def test_a_refused_request_leaves_nothing_of_its_frames_behind(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a refused image was called, or said, would stay in memory until the garbage collector came."""

    class Local:
        pass

    left: list[weakref.ref[Local]] = []

    def refuse(*_: object) -> None:
        local = Local()
        left.append(weakref.ref(local))
        raise ImageRejected("no", log="log")

    monkeypatch.setattr(bench.session._context, "module_load", refuse)
    gc.disable()
    try:
        assert bench.refused(Opcode.MODULE_LOAD, ModuleLoad(TRANSFORM)).status is Status.LOAD_FAILED
        assert [one() for one in left] == [None]
    finally:
        gc.enable()


def test_a_session_serves_each_operation_of_sessions(bench: Bench) -> None:
    submit = Session(LEASE, bench.session._context, Ledger(SLICE), bench.session._page, is_submit=True)
    assert bench.session._operations.keys() | submit._operations.keys() == SESSION_OPCODES | {Opcode.PING}
    assert bench.session._operations.keys() & submit._operations.keys() == {Opcode.PING}
    submit._counters.release()
