"""A session in this process, on the embedded driver, with kernels and buffers for launch graphs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from gpulease.daemon.contract.control_page import BrokerPage, WorkerPage
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.driver import CpuDriver
from gpulease.daemon.session.ledger import Ledger
from gpulease.daemon.session.memory_operations import GRANULE_BYTES
from gpulease.daemon.session.session import Session
from gpulease.protocol.codec import build_body, parse_body, reply_body
from gpulease.protocol.failures import Failure
from gpulease.protocol.framing import Frame, FrameReader
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import (
    ArenaCopy,
    Body,
    Data,
    ErrorBody,
    GraphCreate,
    GraphLaunch,
    GraphNode,
    GraphParameter,
    GraphPlace,
    Launch,
    MemAlloc,
    MemRead,
    MemWrite,
    ModuleLoad,
)
from gpulease.protocol.opcodes import Flag, Opcode
from helpers.kernels import FAULTS, TRANSFORM, packed_scale_args

LEASE = 0x4321
SLICE = 1 << 20


@dataclass
class Rig:
    """A session with 64 bytes of memory, two modules and an arena. `ask` sends it operations, as a tenant would."""

    session: Session
    page: BrokerPage
    context: CpuContext
    arena_fd: int
    last: int = 0
    buffer: int = field(init=False)
    module: int = field(init=False)
    faults: int = field(init=False)

    def __post_init__(self) -> None:
        self.buffer = self.alloc()
        self.module = self.made(Opcode.MODULE_LOAD, ModuleLoad(TRANSFORM), "module")
        self.faults = self.made(Opcode.MODULE_LOAD, ModuleLoad(FAULTS), "module")

    def send(self, op: int, body: Body | bytes, *, quiet: bool = False) -> Body | Failure | None:
        self.last += 1
        payload = body if isinstance(body, bytes) else build_body(body)
        reply = self.session.handle(Frame(op, int(Flag.QUIET) * quiet, 0, self.last, LEASE, memoryview(payload)))
        if reply is None:
            return None
        reader = FrameReader(MAX_PAYLOAD_BYTES)
        reader.receive_data(reply)
        frame = reader.next_frame()
        assert frame is not None
        if frame.status:
            return Failure.from_body(frame.status, parse_body(ErrorBody, frame.payload))
        return parse_body(reply_body(Opcode(op)), frame.payload)

    def ask(self, op: Opcode, body: Body) -> Body:
        reply = self.send(op, body)
        assert reply is not None
        assert not isinstance(reply, Failure), reply
        return reply

    def refused(self, op: Opcode, body: Body | bytes) -> Failure:
        reply = self.send(op, body)
        assert isinstance(reply, Failure), reply
        return reply

    def made(self, op: Opcode, body: Body, name: str = "handle") -> int:
        return int(getattr(self.ask(op, body), name))

    def alloc(self) -> int:
        return self.made(Opcode.MEM_ALLOC, MemAlloc(64))

    def graph(
        self,
        *nodes: GraphNode,
        buffers: tuple[int, ...] = (),
        parameters: tuple[GraphParameter, ...] = (),
        places: tuple[GraphPlace, ...] = (),
    ) -> int:
        return self.made(Opcode.GRAPH_CREATE, GraphCreate(nodes, buffers, parameters, places))

    def replay(self, graph: int, args: bytes = b"") -> int:
        assert self.send(Opcode.GRAPH_LAUNCH, GraphLaunch(graph, args), quiet=True) is None
        return self.last

    def floats(self, buffer: int | None = None, count: int = 4) -> list[float]:
        reply = self.ask(Opcode.MEM_READ, MemRead(buffer or self.buffer, 0, 4 * count))
        assert isinstance(reply, Data)
        return [float(value) for value in np.frombuffer(reply.data, np.float32)]

    # --- nodes ---

    def launch(self, kernel: str, value: float, buffer: int | None = None) -> GraphNode:
        args = packed_scale_args(buffer or self.buffer, 4, value)
        return node(Opcode.LAUNCH, Launch(self.module, kernel, 1, 1, 1, 4, 1, 1, 0, *args))

    def stray(self) -> GraphNode:
        args = self.buffer.to_bytes(8, "little") + (1 << 40).to_bytes(8, "little")
        return node(Opcode.LAUNCH, Launch(self.faults, "stray_store", 1, 1, 1, 1, 1, 1, 0, args, (8, 8)))

    def write(self, data: bytes, offset: int = 0) -> GraphNode:
        return node(Opcode.MEM_WRITE, MemWrite(self.buffer, offset, data))

    def copy(self, op: Opcode, at: int, length: int = 16, offset: int = 0) -> GraphNode:
        return node(op, ArenaCopy(self.buffer, offset, at, length))


def node(op: int, body: Body) -> GraphNode:
    return GraphNode(op, build_body(body))


def value(number: float) -> bytes:
    return np.float32(number).tobytes()


def place(handle: int, offset: int = 0) -> bytes:
    return handle.to_bytes(8, "little") + offset.to_bytes(8, "little")


@contextmanager
def rigged() -> Iterator[Rig]:
    """Yield a session. After the block, nothing of the session must be left."""
    page = BrokerPage()
    page.set_deadline(1 << 62, 1)
    worker_page = WorkerPage(page.fds)
    driver = CpuDriver()
    driver.preload()
    context = driver.open_context("GPU-0", SLICE)
    session = Session(LEASE, context, Ledger(SLICE), worker_page)
    arena = session.arena.open(GRANULE_BYTES)
    rig = Rig(session, page, context, arena.fd)
    try:
        # Hypothesis ends an example with an exception if it has drawn enough.
        yield rig
    finally:
        os.close(arena.fd)
        context.close()
        session._counters.release()
        session._graphs._counters.release()
        worker_page.close()
        page.close()
        # Remove the graphs, which have the last views of the arena. The arena can't be closed before.
        vars(rig).clear()
