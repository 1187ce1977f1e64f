"""A session that records its launches. Tests pass frames to it, which native code or Python executes."""

import ctypes
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from gpulease.daemon.contract.control_page import BrokerPage, Counter, WorkerPage
from gpulease.daemon.drivers.interface import (
    AdmitGraph,
    Dim3,
    DriverGraph,
    DriverKernel,
    KernelStep,
    LaunchRejected,
    NativeLaunch,
    Poll,
    Step,
    admit_any,
    keep_waiting,
)
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.driver import CpuDriver
from gpulease.daemon.session.ledger import Ledger
from gpulease.daemon.session.session import Session
from gpulease.protocol.codec import build_body
from gpulease.protocol.framing import FrameReader, build_frame
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import Empty, Handle, Launch, MemRead, MemWrite
from gpulease.protocol.opcodes import Flag, Opcode
from helpers.kernels import TRANSFORM

LEASE = 0x77
SIZES = (8, 4, 4)
UNKNOWN_TO_NATIVE = 3
"""A number of blocks with which native code can't record a launch here, so that Python must record it."""

OF_THE_MOMENT = {
    Counter.LAST_POLL_NS,
    Counter.BUSY_NS,
    Counter.BUSY_SINCE_NS,
    Counter.HELD_BACK_NS,
    Counter.LAST_BUSY_FROM_NS,
    Counter.LAST_BUSY_UNTIL_NS,
}
"""Counters whose values are times or durations, so that they differ between runs."""

MINUTE_NS = 60_000_000_000
ALLOCATED_BYTES = 4096


CALLED = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64
)


REPLAY = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)

REPLAY_GRAPH = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)


class RecordedChain:
    """A chain of launches, whose record in native code is its number. It uses no card."""

    device_bytes = 0

    def __init__(self, number: int, steps: Sequence[KernelStep]) -> None:
        self.record = number
        self.steps = steps
        self.buffers = [ctypes.create_string_buffer(step.params, len(step.params)) for step in steps]
        self.given = [step.params for step in steps]
        self.params = [ctypes.addressof(buffer) for buffer in self.buffers]
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class RecordedGraph:
    """A graph of the embedded driver that native code can replay, by its number."""

    def __init__(self, native: int, graph: DriverGraph) -> None:
        self.native = native
        self.graph = graph
        self.noted = 0
        self.is_closed = False

    def replayed(self) -> None:
        assert not self.is_closed
        self.noted += 1

    def close(self) -> None:
        self.is_closed = True
        self.graph.close()

    def __getattr__(self, name: str) -> object:
        return getattr(self.graph, name)


@dataclass
class Recording:
    """The embedded driver's context. It records launches, and rejects those that the test chooses."""

    context: CpuContext
    launches: list[tuple[str, Dim3, Dim3, bytes, int]] = field(default_factory=list)
    refuse_tag: int = 0
    shapes: list[tuple[Any, ...]] = field(default_factory=list)
    taken_natively: int = 0
    does_them: bool = True
    chains: list[RecordedChain] = field(default_factory=list)
    replayed: int = 0
    refuses_chains: bool = False
    has_chains: bool = False
    has_graphs: bool = False
    graphs: list[RecordedGraph] = field(default_factory=list)
    graphs_replayed: list[int] = field(default_factory=list)
    refuses_graphs: bool = False

    def native(self) -> NativeLaunch:
        """Return functions with which native code launches. They record and execute launches like `launch`."""
        own = self.context.native()
        self.called = CALLED(self._from_native)
        address = ctypes.cast(self.called, ctypes.c_void_p).value or 0
        self.replay = REPLAY(self._replay)
        replay = ctypes.cast(self.replay, ctypes.c_void_p).value or 0
        noted = replace(own, launch=address, record=self._record, launched=lambda _kernel: None)
        if self.has_graphs:
            self.replay_graph = REPLAY_GRAPH(self._replay_graph)
            noted = replace(noted, replay_graph=ctypes.cast(self.replay_graph, ctypes.c_void_p).value or 0)
        return replace(noted, replay=replay, chain=self._chain) if self.has_chains else noted

    def _chain(self, steps: Sequence[KernelStep]) -> RecordedChain:
        self.chains.append(RecordedChain(len(self.chains), steps))
        return self.chains[-1]

    def _replay(self, _state: int, number: int, changed: int, tag: int) -> int:
        chain = self.chains[number]
        if self.refuses_chains or chain.is_closed:
            return 1
        for place, (step, buffer) in enumerate(zip(chain.steps, chain.buffers, strict=True)):
            if changed >> place & 1:
                chain.given[place] = buffer.raw
            self.launch(step.kernel, step.grid, step.block, step.shared_bytes, chain.given[place], tag)
        self.replayed += len(chain.steps)
        return 0

    def graph(self, steps: Sequence[Step], admit: AdmitGraph = admit_any, poll: Poll = keep_waiting) -> RecordedGraph:
        self.graphs.append(RecordedGraph(len(self.graphs) + 1, self.context.graph(steps, admit, poll)))
        return self.graphs[-1]

    def _replay_graph(self, _state: int, native: int, tag: int) -> int:
        made = self.graphs[native - 1]
        assert not made.is_closed
        if self.refuses_graphs:
            return 1
        self.graphs_replayed.append(tag)
        made.graph.replay(tag, keep_waiting)
        return 0

    def _record(self, *shape: Any) -> bytes | None:
        if shape[1][0] == UNKNOWN_TO_NATIVE:
            return None
        self.shapes.append(shape)
        return (len(self.shapes) - 1).to_bytes(8, "little")

    def _from_native(self, _state: int, record: int, params: int, size: int, tag: int) -> int:
        shape = self.shapes[int.from_bytes(ctypes.string_at(record, 8), "little")]
        try:
            kernel, grid, block, shared_bytes = shape
            self.launch(kernel, grid, block, shared_bytes, ctypes.string_at(params, size), tag)
        except LaunchRejected:
            return 1
        self.taken_natively += 1
        return 0

    def launch(self, kernel: DriverKernel, grid: Dim3, block: Dim3, shared_bytes: int, params: bytes, tag: int) -> None:
        if tag == self.refuse_tag:
            raise LaunchRejected("refused for the test")
        self.launches.append((kernel.name, grid, block, params, tag))
        if self.does_them:
            self.context.launch(kernel, grid, block, shared_bytes, params, tag)

    def __getattr__(self, name: str) -> object:
        return getattr(self.context, name)


GAPS = b"""
.version 8.0
.target sm_75
.address_size 64
.entry gaps(.param .u32 first, .param .u64 second, .param .u8 third) { ret; }
"""


@dataclass
class MadeModule:
    """A module with kernels that are never launched."""

    kernels: dict[str, DriverKernel] = field(default_factory=dict)
    device_bytes: int = 0
    shared_bytes: int = 0
    kept_bytes: int = 0

    def variable(self, name: str) -> tuple[int, int]:
        return 0, 0


@dataclass
class Rig:
    session: Session
    page: BrokerPage
    context: Recording
    address: int
    module: int
    reader: FrameReader = field(default_factory=lambda: FrameReader(MAX_PAYLOAD_BYTES))
    replies: list[bytes] = field(default_factory=list)

    @property
    def contents(self) -> bytes:
        return ctypes.string_at(self.address, ALLOCATED_BYTES)

    def feed(self, stream: bytes, *, expect_launches: bool) -> None:
        self.reader.receive_data(stream)
        while True:
            if expect_launches:
                self.session.take_launches(self.reader)
            frame = self.reader.next_frame()
            if frame is None:
                return
            reply = self.session.handle(frame)
            if reply is not None:
                self.replies.append(bytes(reply))


@contextmanager
def rig(*, is_native: bool = False, has_chains: bool = False, has_graphs: bool = False) -> Iterator[Rig]:
    page = BrokerPage()
    page.set_deadline(time.monotonic_ns() + MINUTE_NS, 1)
    view = WorkerPage(page.fds)
    context = Recording(CpuDriver().open_context("GPU-0", 1 << 20), has_chains=has_chains, has_graphs=has_graphs)
    ledger = Ledger(1 << 20)
    native = context.native() if is_native else None
    session = Session(LEASE, context, ledger, view, native=native)  # type: ignore[arg-type]  # forwards the rest
    address = context.context.mem_alloc(ALLOCATED_BYTES)
    ledger.add_allocation(address, ALLOCATED_BYTES)
    module = ledger.add_module(context.context.module_load(TRANSFORM), 1)
    ledger.add_module(context.context.module_load(GAPS), 1)
    try:
        yield Rig(session, page, context, address, module)
    finally:
        context.context.close()
        view.close()
        page.close()


def args(made: Rig, count: int) -> bytes:
    return made.address.to_bytes(8, "little") + count.to_bytes(4, "little") + b"\0\0\x80\x3f"


def launch_of(made: Rig, kernel: str = "scale", blocks: int = 1, count: int = 8) -> Launch:
    return Launch(made.module, kernel, blocks, 1, 1, 32, 1, 1, 0, args(made, count), SIZES)


def quiet(launch: Launch, request_id: int, session_id: int = LEASE) -> bytes:
    return build_frame(
        Opcode.LAUNCH, build_body(launch), request_id=request_id, session_id=session_id, flags=Flag.QUIET
    )


def sync(request_id: int) -> bytes:
    return build_frame(Opcode.SYNC, build_body(Empty()), request_id=request_id, session_id=LEASE)


MEMORY_KINDS = ("write", "write much", "read", "read all", "read beyond", "reuse", "reuse beside", "read for another")
LAUNCH_KINDS = ("scale", "bias", "scale wide", "scale by Python", "gaps", "foreign", "no kernel", "truncated sizes")
KINDS = st.sampled_from([*LAUNCH_KINDS, "sync", *MEMORY_KINDS])


def write(made: Rig, request_id: int, data: bytes, offset: int = 0) -> bytes:
    body = build_body(MemWrite(made.address, offset, data))
    return build_frame(Opcode.MEM_WRITE, body, request_id=request_id, session_id=LEASE, flags=Flag.QUIET)


def read(made: Rig, request_id: int, offset: int, length: int, session_id: int = LEASE) -> bytes:
    body = build_body(MemRead(made.address, offset, length))
    return build_frame(Opcode.MEM_READ, body, request_id=request_id, session_id=session_id)


def reuse(made: Rig, request_id: int, beside: int = 0) -> bytes:
    body = build_body(Handle(made.address + beside))
    return build_frame(Opcode.MEM_REUSE, body, request_id=request_id, session_id=LEASE, flags=Flag.QUIET)


def memory_frame(made: Rig, kind: str, number: int) -> bytes:
    match kind:
        case "write":
            return write(made, number, bytes([number % 256]) * (1 + number % 40), number % 4000)
        case "write much":
            return write(made, number, bytes(range(256)) * 8, number % 2048)
        case "read":
            return read(made, number, number % 4000, 1 + number % 90)
        case "read all":
            return read(made, number, 0, 4096)
        case "read beyond":
            return read(made, number, 4096 - number % 64, 65)
        case "read for another":
            return read(made, number, 0, 8, LEASE + 1)
        case _:
            return reuse(made, number, 8 * (kind == "reuse beside"))


def stream_of(made: Rig, kinds: list[str]) -> bytes:
    frames = []
    for number, kind in enumerate(kinds, start=1):
        plain = launch_of(made, count=number)
        match kind:
            case kind if kind in MEMORY_KINDS:
                frames.append(memory_frame(made, kind, number))
            case "scale":
                frames.append(quiet(plain, number))
            case "bias":
                frames.append(quiet(replace(plain, kernel="bias"), number))
            case "scale wide":
                frames.append(quiet(replace(plain, grid_x=2), number))
            case "scale by Python":
                frames.append(quiet(replace(plain, grid_x=UNKNOWN_TO_NATIVE), number))
            case "gaps":
                args = number.to_bytes(4, "little") + bytes(range(8)) + b"\7"
                frames.append(quiet(Launch(made.module + 1, "gaps", 1, 1, 1, 1, 1, 1, 0, args, (4, 8, 1)), number))
            case "foreign":
                frames.append(quiet(plain, number, LEASE + 1))
            case "no kernel":
                frames.append(quiet(replace(plain, kernel="scald"), number))
            case "truncated sizes":
                frames.append(quiet(replace(plain, arg_sizes=SIZES[:2]), number))
            case _:
                frames.append(sync(number))
    return b"".join(frames)


def without_addresses(replies: bytes | bytearray) -> bytes:
    """Return replies without the addresses in failures, because each rig has other addresses."""
    return re.sub(rb"0x[0-9a-f]{8,}", b"0x", replies)


def told(made: Rig) -> tuple[object, ...]:
    """Return a session's launches and counters, except addresses and times."""
    counters = {counter: made.page.counter(counter) for counter in set(Counter) - OF_THE_MOMENT}
    launches = [(*shape, params[8:], tag) for *shape, params, tag in made.context.launches]
    return launches, counters
