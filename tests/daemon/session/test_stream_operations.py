"""A session's streams without a daemon: the calls of the context, whatever a tenant sends in whatever order."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.daemon.contract.control_page import BrokerPage, WorkerPage
from gpulease.daemon.drivers.interface import Dim3, DriverKernel, Poll
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.driver import CpuDriver
from gpulease.daemon.session.ledger import Ledger
from gpulease.daemon.session.session import Session
from gpulease.daemon.session.stream_operations import ConnectionStreams
from gpulease.protocol.codec import build_body, parse_body, reply_body
from gpulease.protocol.failures import Failure
from gpulease.protocol.framing import Frame, FrameReader
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES, MAX_STREAMS
from gpulease.protocol.messages import ArenaCopy, Body, Empty, ErrorBody, Handle, Launch, StreamWait
from gpulease.protocol.opcodes import Flag, Opcode, Status
from helpers.kernels import TRANSFORM, packed_scale_args

LEASE = 0x1234
SLICE = 1 << 20
U64 = 2**64 - 1


@dataclass
class Told:
    """The embedded driver's context, which records the calls for streams; `selected` is where launches go."""

    context: CpuContext
    calls: list[tuple[object, ...]] = field(default_factory=list)
    selected: int = 0
    live: set[int] = field(default_factory=set)

    def stream_create(self) -> int:
        number = self.context.stream_create() + 100
        self.live.add(number)
        return number

    def stream_destroy(self, stream: int) -> None:
        self.live.remove(stream)

    def stream_select(self, stream: int) -> None:
        assert stream in self.live | {0}
        self.selected = stream

    def stream_wait(self, stream: int, other: int) -> None:
        self.calls.append(("wait", stream, other))

    def stream_sync(self, stream: int, poll: Poll) -> None:
        self.calls.append(("sync", stream))

    def launch(self, kernel: DriverKernel, grid: Dim3, block: Dim3, shared_bytes: int, params: bytes, tag: int) -> None:
        self.calls.append(("launch", self.selected))

    def begin_write(self, address: int, data: memoryview, poll: Poll) -> None:
        self.calls.append(("begin_write", self.selected, len(data)))

    def begin_read(self, address: int, into: memoryview, poll: Poll) -> None:
        self.calls.append(("begin_read", self.selected, len(into)))

    def write_pinned(self, address: int, data: memoryview, poll: Poll) -> None:
        self.calls.append(("write", self.selected, len(data)))

    def __getattr__(self, name: str) -> object:
        return getattr(self.context, name)


@dataclass
class Rig:
    session: Session
    page: BrokerPage
    told: Told
    launch_body: Launch
    address: int
    last: int = 0

    def send(self, op: Opcode, body: Body, *, quiet: bool = False) -> Frame | None:
        self.last += 1
        flags = int(Flag.QUIET) if quiet else 0
        reply = self.session.handle(Frame(op, flags, 0, self.last, LEASE, memoryview(build_body(body))))
        if reply is None:
            return None
        reader = FrameReader(MAX_PAYLOAD_BYTES)
        reader.receive_data(reply)
        return reader.next_frame()

    def ask(self, op: Opcode, body: Body) -> Body | Failure:
        frame = self.send(op, body)
        assert frame is not None
        if frame.status:
            return Failure.from_body(frame.status, parse_body(ErrorBody, frame.payload))
        return parse_body(reply_body(op), frame.payload)

    def stream(self) -> int:
        reply = self.ask(Opcode.STREAM_CREATE, Empty())
        assert isinstance(reply, Handle), reply
        return reply.handle

    def refused(self, op: Opcode, body: Body) -> Status:
        reply = self.ask(op, body)
        assert isinstance(reply, Failure), reply
        return reply.status

    def launch(self) -> None:
        self.send(Opcode.LAUNCH, self.launch_body, quiet=True)


@contextmanager
def made_rig() -> Iterator[Rig]:
    page = BrokerPage()
    page.set_deadline(time.monotonic_ns() + 600_000_000_000, 1)
    view = WorkerPage(page.fds)
    told = Told(CpuDriver().open_context("GPU-0", SLICE))
    ledger = Ledger(SLICE)
    session = Session(LEASE, told, ledger, view)  # type: ignore[arg-type]  # the rest is forwarded
    address = told.context.mem_alloc(4096)
    ledger.add_allocation(address, 4096)
    module = ledger.add_module(told.context.module_load(TRANSFORM), 1)
    body = Launch(module, "bias", 1, 1, 1, 4, 1, 1, 0, *packed_scale_args(address, 4, 1.0))
    try:
        yield Rig(session, page, told, body, address)
    finally:
        told.context.close()
        # It keeps views of the page, and its arena, as it does to its process's end.
        session._counters.release()
        session.arena._arena = None
        view.close()
        page.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    with made_rig() as made:
        yield made


def test_what_follows_a_selection_goes_into_that_stream(rig: Rig) -> None:
    first, second = rig.stream(), rig.stream()
    rig.launch()
    rig.send(Opcode.STREAM_SELECT, Handle(first), quiet=True)
    rig.launch()
    rig.send(Opcode.STREAM_WAIT, StreamWait(second, first), quiet=True)
    assert rig.ask(Opcode.STREAM_SELECT, Handle(second)) == Empty()
    rig.launch()
    assert rig.ask(Opcode.STREAM_SYNC, Handle(first)) == Empty()
    assert rig.ask(Opcode.STREAM_SYNC, Handle(0)) == Empty()
    rig.send(Opcode.STREAM_SELECT, Handle(0), quiet=True)
    rig.launch()
    assert rig.told.calls == [
        ("launch", 0),
        ("launch", 101),
        ("wait", 102, 101),
        ("launch", 102),
        ("sync", 101),
        ("sync", 0),
        ("launch", 0),
    ]


def test_a_quiet_arena_copy_is_only_begun(rig: Rig) -> None:
    os.close(rig.session.arena.open(4 << 20).fd)
    copy, stream = ArenaCopy(rig.address, 0, 0, 16), rig.stream()
    rig.send(Opcode.ARENA_WRITE, copy, quiet=True)
    rig.send(Opcode.STREAM_SELECT, Handle(stream), quiet=True)
    rig.send(Opcode.ARENA_WRITE, copy, quiet=True)
    rig.send(Opcode.ARENA_READ, copy, quiet=True)
    assert rig.ask(Opcode.ARENA_WRITE, copy) == Empty()
    sizes = [("begin_write", 0, 16), ("begin_write", 101, 16), ("begin_read", 101, 16), ("write", 101, 16)]
    assert rig.told.calls == sizes
    rig.send(Opcode.ARENA_WRITE, ArenaCopy(rig.address, 0, 4 << 20, 1), quiet=True)
    assert rig.refused(Opcode.SYNC, Empty()) is Status.INVALID_REQUEST


@pytest.mark.parametrize("op", [Opcode.STREAM_DESTROY, Opcode.STREAM_SELECT, Opcode.STREAM_SYNC])
def test_numbers_that_name_no_stream(rig: Rig, op: Opcode) -> None:
    gone = rig.stream()
    assert rig.ask(Opcode.STREAM_DESTROY, Handle(gone)) == Empty()
    known = rig.stream()
    assert known != gone
    for number in (gone, known + 1, U64):
        assert rig.refused(op, Handle(number)) is Status.INVALID_HANDLE
        assert rig.refused(Opcode.STREAM_WAIT, StreamWait(known, number)) is Status.INVALID_HANDLE
        assert rig.refused(Opcode.STREAM_WAIT, StreamWait(number, known)) is Status.INVALID_HANDLE
    for body in (Empty(), StreamWait(1, 1)):
        assert rig.refused(op, body) is Status.INVALID_REQUEST
    assert rig.told.calls == []


def test_odd_requests(rig: Rig) -> None:
    assert rig.refused(Opcode.STREAM_DESTROY, Handle(0)) is Status.INVALID_REQUEST
    assert rig.refused(Opcode.STREAM_CREATE, Handle(0)) is Status.INVALID_REQUEST
    assert rig.refused(Opcode.STREAM_WAIT, Handle(0)) is Status.INVALID_REQUEST
    assert rig.ask(Opcode.STREAM_WAIT, StreamWait(0, 0)) == Empty()


def test_streams_are_bounded_and_come_back(rig: Rig) -> None:
    numbers = [rig.stream() for _ in range(MAX_STREAMS)]
    assert rig.session.take_growth()
    assert rig.refused(Opcode.STREAM_CREATE, Empty()) is Status.BUSY
    rig.send(Opcode.STREAM_CREATE, Empty(), quiet=True)
    assert rig.refused(Opcode.SYNC, Empty()) is Status.BUSY
    assert len(rig.told.live) == MAX_STREAMS
    rig.ask(Opcode.STREAM_DESTROY, Handle(numbers[5]))
    assert rig.stream() not in numbers


def test_a_destroyed_stream_is_not_selected_any_more(rig: Rig) -> None:
    stream = rig.stream()
    rig.ask(Opcode.STREAM_SELECT, Handle(stream))
    rig.ask(Opcode.STREAM_DESTROY, Handle(stream))
    rig.launch()
    assert rig.told.calls == [("launch", 0)]


@pytest.mark.parametrize("over", ["revoked", "kept"])
def test_a_selection_is_never_skipped(rig: Rig, over: str) -> None:
    first, second = rig.stream(), rig.stream()
    if over == "revoked":
        rig.page.refuse(Status.REVOKED)
    else:
        rig.send(Opcode.STREAM_SYNC, Handle(99), quiet=True)
    for number in (first, 98, second):
        rig.send(Opcode.STREAM_SELECT, Handle(number), quiet=True)
    rig.launch()
    assert (rig.told.selected, rig.told.calls) == (102, [])
    # As the one that brings the failure, too.
    failed = Status.REVOKED if over == "revoked" else Status.INVALID_HANDLE
    assert rig.refused(Opcode.STREAM_SELECT, Handle(first)) is failed
    assert rig.told.selected == (102 if over == "revoked" else 101)


def test_use_token_chooses_the_token_of_its_connection_even_while_requests_are_skipped(rig: Rig) -> None:
    current = rig.session.streams.current
    assert rig.ask(Opcode.USE_TOKEN, Handle(0)) == Empty()
    assert rig.refused(Opcode.USE_TOKEN, Handle(1)) is Status.INVALID_REQUEST
    assert not current.uses_second_token
    current.has_second_token = True
    assert rig.refused(Opcode.USE_TOKEN, Handle(2)) is Status.INVALID_REQUEST
    assert rig.ask(Opcode.USE_TOKEN, Handle(1)) == Empty()
    assert current.uses_second_token
    # It is served after a failed quiet request, quietly and as the request whose reply reports the failure.
    rig.send(Opcode.STREAM_SYNC, Handle(99), quiet=True)
    rig.send(Opcode.USE_TOKEN, Handle(0), quiet=True)
    assert not current.uses_second_token
    assert rig.refused(Opcode.USE_TOKEN, Handle(1)) is Status.INVALID_HANDLE
    assert current.uses_second_token
    rig.page.refuse(Status.REVOKED)
    rig.send(Opcode.USE_TOKEN, Handle(0), quiet=True)
    assert not current.uses_second_token


def test_each_connection_has_its_own_streams(rig: Rig) -> None:
    streams, here = rig.session.streams, rig.session.streams.current
    there = ConnectionStreams()
    mine = rig.stream()
    rig.ask(Opcode.STREAM_SELECT, Handle(mine))
    streams.switch_to(there)
    assert rig.refused(Opcode.STREAM_SELECT, Handle(mine)) is Status.INVALID_HANDLE
    rig.launch()
    theirs = rig.stream()
    rig.ask(Opcode.STREAM_SELECT, Handle(theirs))
    streams.switch_to(here)
    rig.launch()
    streams.switch_to(there)
    rig.launch()
    streams.release(there)
    rig.launch()
    assert rig.told.calls == [("launch", 0), ("launch", 101), ("launch", 102), ("launch", 0)]
    assert rig.told.live == {101}
    streams.switch_to(here)
    rig.launch()
    assert rig.told.calls[-1] == ("launch", 101)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["select", "launch", "wrong", "fence", "switch", "create", "destroy"]),
        st.integers(0, 5),
        st.booleans(),
    ),
    min_size=25,
    max_size=40,
)


@settings(max_examples=120, deadline=None)
@given(steps=STEPS)
def test_any_order(steps: list[tuple[str, int, bool]]) -> None:
    """Every launch that is done goes into the stream that its connection selected last, whatever failed before."""
    with made_rig() as rig:
        model = Model([rig.session.streams.current, ConnectionStreams()])
        for at in (1, 0, 1, 0):
            switch(rig, model, at, True)
            create(rig, model, 0, True)
        for kind, number, quiet in steps:
            STEP[kind](rig, model, number, quiet)
        assert [call[1] for call in rig.told.calls] == model.launched
        assert rig.told.live == set().union(*model.known) - {0}


@dataclass
class Model:
    """The state of two connections by the specification; streams by the context's numbers."""

    connections: list[ConnectionStreams]
    at: int = 0
    failed: bool = False
    created: int = 0
    known: list[set[int]] = field(default_factory=lambda: [{0}, {0}])
    selected: list[int] = field(default_factory=lambda: [0, 0])
    launched: list[int] = field(default_factory=list)

    def is_done(self, quiet: bool, *, right: bool = True) -> bool:
        """Whether a request is done: not behind a failure, nor where it brings one."""
        done = right and not self.failed
        self.failed = quiet and (self.failed or not right)
        return done


def number_of(stream: int) -> int:
    """The wire's number: both count up, the rig's context from 101."""
    return stream - 100 if stream else 0


def create(rig: Rig, model: Model, _: int, quiet: bool) -> None:
    if model.is_done(False):
        model.created += 1
        model.known[model.at].add(100 + model.created)
    rig.send(Opcode.STREAM_CREATE, Empty())


def destroy(rig: Rig, model: Model, number: int, quiet: bool) -> None:
    stream = number + 100
    if model.is_done(quiet, right=stream in model.known[model.at]):
        model.known[model.at].remove(stream)
        if model.selected[model.at] == stream:
            model.selected[model.at] = 0
    rig.send(Opcode.STREAM_DESTROY, Handle(number_of(stream)), quiet=quiet)


def select(rig: Rig, model: Model, number: int, quiet: bool) -> None:
    stream = number + 100 if number else 0
    if stream in model.known[model.at]:
        model.selected[model.at] = stream
    model.is_done(quiet, right=stream in model.known[model.at])
    rig.send(Opcode.STREAM_SELECT, Handle(number), quiet=quiet)


def launch(rig: Rig, model: Model, _: int, quiet: bool) -> None:
    if model.is_done(quiet):
        model.launched.append(model.selected[model.at])
    rig.send(Opcode.LAUNCH, rig.launch_body, quiet=quiet)


def wrong(rig: Rig, model: Model, _: int, quiet: bool) -> None:
    model.is_done(quiet, right=False)
    rig.send(Opcode.MEM_FREE, Handle(1), quiet=quiet)


def fence(rig: Rig, model: Model, _: int, quiet: bool) -> None:
    model.is_done(False)
    rig.send(Opcode.PING, Empty())


def switch(rig: Rig, model: Model, number: int, _: bool) -> None:
    model.at = number % 2
    rig.session.streams.switch_to(model.connections[model.at])


STEP: dict[str, Callable[[Rig, Model, int, bool], None]] = {
    "create": create,
    "destroy": destroy,
    "select": select,
    "launch": launch,
    "wrong": wrong,
    "fence": fence,
    "switch": switch,
}
