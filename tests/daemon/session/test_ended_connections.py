"""What connections made, once they have ended: in this process, on the embedded driver."""

import ctypes
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from gpulease.daemon.contract.control_page import BrokerPage, Counter, WorkerPage
from gpulease.daemon.ptx.driver import CpuDriver
from gpulease.daemon.session import ended_connections
from gpulease.daemon.session.ledger import Ledger
from gpulease.daemon.session.session import Session
from gpulease.daemon.session.stream_operations import ConnectionStreams
from gpulease.protocol.codec import build_body, parse_body, reply_body
from gpulease.protocol.failures import Failure
from gpulease.protocol.framing import Frame, FrameReader
from gpulease.protocol.limits import MAX_KEPT, MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import (
    Body,
    Empty,
    ErrorBody,
    Freed,
    GraphCreate,
    GraphNode,
    Handle,
    KeptBuffer,
    KeptBuffers,
    Launch,
    MemAlloc,
    MemKeep,
    MemRead,
    ModuleLoad,
    ModuleLoaded,
)
from gpulease.protocol.opcodes import Flag, Opcode, Status
from helpers.kernels import FAULTS, TRANSFORM, packed_scale_args
from helpers.waiting import wait_until

LEASE = 0x77
SLICE = 1 << 20
PART = SLICE // 4


@dataclass
class Connected:
    """One connection of the session."""

    scene: "Scene"
    owns: bool = True
    streams: ConnectionStreams = field(default_factory=ConnectionStreams)

    def __post_init__(self) -> None:
        self.holder = self.scene.session.begin_connection(4711, owns=self.owns)
        self.scene.count(+1)

    def send(self, op: Opcode, body: Body, flags: int = 0) -> Body | Failure | None:
        self.scene.session.switch_to(self.streams, self.holder)
        self.scene.last += 1
        frame = Frame(op, flags, 0, self.scene.last, LEASE, memoryview(build_body(body)))
        reply = self.scene.session.handle(frame)
        if reply is None:
            return None
        reader = FrameReader(MAX_PAYLOAD_BYTES)
        reader.receive_data(reply)
        answer = reader.next_frame()
        assert answer is not None
        if answer.status:
            return Failure.from_body(answer.status, parse_body(ErrorBody, answer.payload))
        return parse_body(reply_body(op), answer.payload)

    def ask(self, op: Opcode, body: Body) -> Body:
        found = self.send(op, body)
        assert found is not None
        assert not isinstance(found, Failure), found.message
        return found

    def refused(self, op: Opcode, body: Body) -> Failure:
        found = self.send(op, body)
        assert isinstance(found, Failure)
        return found

    def alloc(self, size_bytes: int = PART) -> int:
        found = self.ask(Opcode.MEM_ALLOC, MemAlloc(size_bytes))
        assert isinstance(found, Handle)
        return found.handle

    def load(self, image: bytes = TRANSFORM) -> int:
        found = self.ask(Opcode.MODULE_LOAD, ModuleLoad(image))
        assert isinstance(found, ModuleLoaded)
        return found.module

    def start_endless(self) -> int:
        """Launch a kernel that ends once its flag is not 0; the flag's address."""
        flag, module = self.alloc(4), self.load(FAULTS)
        launch = Launch(module, "endless", 1, 1, 1, 1, 1, 1, 0, flag.to_bytes(8, "little"), (8,))
        assert self.send(Opcode.LAUNCH, launch, Flag.QUIET) is None
        return flag

    def end(self) -> None:
        self.scene.count(-1)
        self.scene.session.end_connection(self.streams, self.holder, is_last=not self.scene.connections)


@dataclass
class Scene:
    session: Session
    ledger: Ledger
    page: BrokerPage
    last: int = 0
    connections: int = 0

    def count(self, more: int) -> None:
        self.connections += more
        self.session.count_connections(self.connections)

    @property
    def held(self) -> tuple[int, int, int]:
        """Bytes of all allocations, of those that are kept, and of those that no connection holds."""
        counters = Counter.ALLOCATED_BYTES, Counter.KEPT_BYTES, Counter.UNHELD_BYTES
        allocated, kept, unheld = map(self.page.counter, counters)
        return allocated, kept, unheld

    @property
    def shown(self) -> list[int]:
        return [one.held_bytes for one in self.page.connections()]

    def advance(self) -> bool:
        self.session.ended.advance()
        return not self.session.ended.has_any


@pytest.fixture
def scene() -> Iterator[Scene]:
    page = BrokerPage()
    page.set_deadline(1 << 62, 1)
    view = WorkerPage(page.fds)
    driver = CpuDriver()
    driver.preload()
    context = driver.open_context("GPU-0", SLICE)
    ledger = Ledger(SLICE, allowance_bytes=SLICE)
    scene = Scene(Session(LEASE, context, ledger, view), ledger, page)
    yield scene
    context.close()
    scene.session._counters.release()
    view.close()
    page.close()


def end_kernel(flag: int) -> None:
    """Write the flag as no request can while the kernel runs: the embedded driver's memory is this process's."""
    ctypes.c_uint32.from_address(flag).value = 1


def graph_of(module: int, buffer: int) -> GraphCreate:
    launch = Launch(module, "bias", 1, 1, 1, 4, 1, 1, 0, *packed_scale_args(buffer, 4, 1.0))
    return GraphCreate((GraphNode(Opcode.LAUNCH, build_body(launch)),), (buffer,), (), ())


def test_all_that_a_connection_made_ends_with_it_and_nothing_of_another_s(scene: Scene) -> None:
    for _ in range(3):
        first, second = Connected(scene), Connected(scene)
        handle, module = first.alloc(), first.load()
        graph = first.ask(Opcode.GRAPH_CREATE, graph_of(module, handle))
        assert isinstance(graph, Handle)
        other = second.alloc()
        assert (scene.held, scene.shown) == ((2 * PART, 0, 0), [PART, PART])
        first.end()
        assert (scene.held, scene.shown) == ((PART, 0, 0), [PART])
        second.ask(Opcode.MEM_READ, MemRead(other, 0, 4))
        for op, number in (
            (Opcode.MEM_FREE, handle),
            (Opcode.MODULE_UNLOAD, module),
            (Opcode.GRAPH_DESTROY, graph.handle),
        ):
            assert second.refused(op, Handle(number)).status is Status.INVALID_HANDLE
        second.end()
        assert (scene.held, scene.shown) == ((0, 0, 0), [])


def test_many_allocations_go_in_portions(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_connections, "FREES_PER_TURN", 4)
    first, second = Connected(scene), Connected(scene)
    for _ in range(10):
        first.alloc(16)
    first.end()
    assert scene.held == (6 * 16, 0, 6 * 16)
    assert scene.session.ended.sleep_ms() == 0, "the connections are served in between, and then it goes on"
    assert not scene.advance()
    assert scene.advance()
    assert scene.held == (0, 0, 0)
    assert scene.session.ended.sleep_ms() is None
    second.end()


def test_a_kernel_that_still_runs_keeps_what_it_uses_and_holds_up_nobody(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ended_connections, "ALONE_WAIT_S", 0.02)
    first = Connected(scene)
    first.alloc(SLICE - PART)
    flag = first.start_endless()
    first.end()
    held = SLICE - PART + 4
    assert scene.held == (held, 0, held)
    second = Connected(scene)
    second.alloc(16)
    failure = second.refused(Opcode.MEM_ALLOC, MemAlloc(SLICE // 2))
    assert failure.status is Status.ALLOC_FAILED
    assert f"connections that have ended still hold {held} bytes" in failure.message
    assert "max_kernel_secs" in failure.hint
    assert not scene.advance()
    assert 0 < (scene.session.ended.sleep_ms() or 0) <= ended_connections.LAST_PAUSE_S * 1000
    end_kernel(flag)
    wait_until(scene.advance, "its memory goes once the kernel has ended")
    assert scene.held == (16, 0, 0)
    second.alloc(SLICE // 2)
    second.end()


def test_an_allocation_without_room_waits_for_that_kernel(scene: Scene) -> None:
    first = Connected(scene)
    first.alloc(SLICE - PART)
    flag = first.start_endless()
    first.end()
    second = Connected(scene)
    timer = threading.Timer(0.05, end_kernel, (flag,))
    timer.start()
    second.alloc(SLICE)
    timer.join()
    second.end()
    assert scene.held == (0, 0, 0)


def test_what_another_freed_or_took_meanwhile_is_not_freed_again(scene: Scene) -> None:
    first, second = Connected(scene), Connected(scene)
    freed, kept = first.alloc(16), first.alloc(32)
    flag = first.start_endless()
    first.end()
    second.ask(Opcode.MEM_KEEP, MemKeep(kept, "kept"))
    end_kernel(flag)
    second.ask(Opcode.MEM_FREE, Handle(freed))
    again = second.alloc(16)
    wait_until(scene.advance, "the rest goes")
    assert scene.held == (48, 32, 0)
    for handle in (again, kept):
        second.ask(Opcode.MEM_READ, MemRead(handle, 0, 16))
    second.end()


# --- kept ---


def test_a_kept_allocation_stays_until_it_is_freed_or_taken(scene: Scene) -> None:
    first = Connected(scene)
    a, b = first.alloc(16), first.alloc(32)
    first.ask(Opcode.MEM_KEEP, MemKeep(a, "a"))
    first.ask(Opcode.MEM_KEEP, MemKeep(b, "b"))
    first.ask(Opcode.MEM_KEEP, MemKeep(b, "b"))
    first.end()
    assert scene.held == (48, 48, 0)
    second = Connected(scene)
    listed = KeptBuffers((KeptBuffer("a", a, 16), KeptBuffer("b", b, 32)))
    assert second.ask(Opcode.MEM_KEPT, Empty()) == listed
    second.ask(Opcode.MEM_KEEP, MemKeep(a, ""))
    assert (scene.held, scene.shown) == ((48, 32, 0), [16])
    assert second.refused(Opcode.MEM_KEEP, MemKeep(a, "")).status is Status.INVALID_HANDLE, "nobody takes it twice"
    second.ask(Opcode.MEM_FREE, Handle(b))
    assert second.ask(Opcode.MEM_KEPT, Empty()) == KeptBuffers(())
    second.end()
    assert scene.held == (0, 0, 0)


def test_a_name_goes_with_its_allocation(scene: Scene) -> None:
    first = Connected(scene)
    a, b = first.alloc(16), first.alloc(16)
    first.ask(Opcode.MEM_KEEP, MemKeep(a, "it"))
    taken = first.refused(Opcode.MEM_KEEP, MemKeep(b, "it"))
    assert (taken.status, f"{a:#x}" in taken.message) == (Status.INVALID_REQUEST, True)
    first.ask(Opcode.MEM_KEEP, MemKeep(a, "that"))
    first.ask(Opcode.MEM_KEEP, MemKeep(b, "it"))
    # Another allocation takes the place of the one that was kept.
    first.ask(Opcode.MEM_REUSE, Handle(a))
    assert first.ask(Opcode.MEM_KEPT, Empty()) == KeptBuffers((KeptBuffer("it", b, 16),))
    assert (scene.held, scene.shown) == ((32, 16, 0), [16])
    first.end()
    assert scene.held == (16, 16, 0)


def test_how_many_are_kept_is_bounded(scene: Scene) -> None:
    first = Connected(scene)
    handles = [first.alloc(16) for _ in range(MAX_KEPT + 1)]
    for number, handle in enumerate(handles[:-1]):
        first.ask(Opcode.MEM_KEEP, MemKeep(handle, str(number)))
    assert first.refused(Opcode.MEM_KEEP, MemKeep(handles[-1], "one more")).status is Status.BUSY
    first.ask(Opcode.MEM_KEEP, MemKeep(handles[0], "another name"))
    assert first.refused(Opcode.MEM_KEEP, MemKeep(1, "no allocation")).status is Status.INVALID_HANDLE
    first.end()


# --- what nobody holds ---


def test_an_older_client_s_stays_until_a_reset_that_none_of_them_is_attached_to(scene: Scene) -> None:
    old, other = Connected(scene, owns=False), Connected(scene, owns=False)
    old.alloc(16)
    old.load()
    old.end()
    assert scene.held == (16, 0, 16)
    new = Connected(scene)
    kept, own = new.alloc(32), new.alloc(64)
    new.ask(Opcode.MEM_KEEP, MemKeep(kept, "kept"))
    assert new.ask(Opcode.MEM_RESET, Empty()) == Freed(32), "what the other old one may use stays"
    other.end()
    assert new.ask(Opcode.MEM_RESET, Empty()) == Freed(16)
    assert not scene.ledger.modules()
    assert scene.held == (64, 0, 0)
    new.ask(Opcode.MEM_READ, MemRead(own, 0, 4))
    new.end()


# --- failures ---


def test_a_failure_that_nobody_asked_for_goes_with_its_connection(scene: Scene) -> None:
    first, second = Connected(scene), Connected(scene)
    for ended, left in ((first, second), (second, None)):
        assert ended.send(Opcode.MEM_FREE, Handle(1), Flag.QUIET) is None
        ended.end()
        if left is not None:
            left.ask(Opcode.SYNC, Empty())
    third = Connected(scene)
    third.ask(Opcode.SYNC, Empty())
    third.end()


def test_a_kernel_s_fault_too(scene: Scene) -> None:
    first = Connected(scene)
    module = first.load(FAULTS)
    args = (1 << 40).to_bytes(8, "little") + bytes(8)
    flag = first.start_endless()
    stray = Launch(module, "stray_store", 1, 1, 1, 1, 1, 1, 0, args, (8, 8))
    assert first.send(Opcode.LAUNCH, stray, Flag.QUIET) is None
    first.end()
    end_kernel(flag)
    wait_until(scene.advance, "what it left goes")
    second = Connected(scene)
    second.ask(Opcode.SYNC, Empty())
    second.end()
