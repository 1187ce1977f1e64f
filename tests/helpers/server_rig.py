"""A worker's loop in a thread, with any driver. The test is its broker, through the channel, and its tenant."""

import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from gpulease.daemon.contract.control_page import BrokerPage, Counter, WorkerPage, sealed_memory
from gpulease.daemon.contract.message_fields import Message, parse_message
from gpulease.daemon.contract.messages import (
    FROM_WORKER,
    AttachOrder,
    OpenRegionOrder,
    ParkedReport,
    ParkMemoryOrder,
    ParkOrder,
    RegionOpenedReport,
    RegionsPage,
    ReturnedReport,
    ReturnOrder,
)
from gpulease.daemon.drivers.interface import Context, Driver
from gpulease.daemon.host.ipc import receive_message, send_message
from gpulease.daemon.ptx.driver import CpuDriver
from gpulease.daemon.session.ledger import Ledger
from gpulease.daemon.session.server import SessionServer
from gpulease.daemon.session.session import Session
from gpulease.protocol.codec import build_body, parse_body, reply_body
from gpulease.protocol.failures import Failure
from gpulease.protocol.framing import FrameReader, build_frame
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import (
    AttachReply,
    Body,
    Data,
    Empty,
    ErrorBody,
    Handle,
    Launch,
    MemAlloc,
    MemRead,
    MemWrite,
    ModuleLoad,
    ModuleLoaded,
)
from gpulease.protocol.opcodes import Flag, Opcode
from gpulease.protocol.ring import DATA_AT, MAX_DESCRIPTORS, RingReader, RingWriter, SharedMemoryGrant, client_ends
from gpulease.protocol.session_words import RegionWord
from helpers.region_rig import PageWriter
from helpers.session_rig import LEASE, MINUTE_NS

SLICE = 64 << 20
REGION = 0x99
LIMIT_S = 30.0

M = TypeVar("M", bound=Message)


class Ring:
    """The client's ends of a ring."""

    def __init__(self, sock: socket.socket, given: SharedMemoryGrant, fds: list[int]) -> None:
        assert given.ring is not None
        self._map = mmap.mmap(fds[0], given.ring.total_bytes)
        for fd in fds:
            os.close(fd)
        self.words = memoryview(self._map)[:DATA_AT].cast("Q")
        barriers = (threading.Lock(), threading.Lock())
        ends = client_ends(memoryview(self._map), given.ring, barriers, lambda: sock.sendall(b"!"))
        self.replies: RingReader = ends[0]
        self.requests: RingWriter = ends[1]

    def close(self) -> None:
        self.replies.release()
        self.requests.release()
        self.words.release()


@dataclass
class Tenant:
    """A connection to a worker."""

    sock: socket.socket
    reader: FrameReader = field(default_factory=lambda: FrameReader(MAX_PAYLOAD_BYTES))
    ring: Ring | None = None
    last: int = 0
    last_module: int = 0

    def next_frame(self, op: Opcode, body: Body, *, quiet: bool = False) -> bytes:
        """Return the frame of the next request, without sending it."""
        self.last += 1
        flags = Flag.QUIET if quiet else Flag(0)
        return build_frame(op, build_body(body), request_id=self.last, session_id=LEASE, flags=flags)

    def send(self, op: Opcode, body: Body, *, quiet: bool = False) -> None:
        frame = self.next_frame(op, body, quiet=quiet)
        if self.ring is None:
            self.sock.sendall(frame)
            return
        until = time.monotonic() + LIMIT_S
        while frame:
            frame = frame[self.ring.requests.put(frame) :]
            assert time.monotonic() < until, "the worker takes nothing"

    def has_reply(self, wait_s: float) -> bool:
        """Return whether the worker sends something within that time."""
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            if self._receive(0.01):
                return True
        return False

    def _receive(self, wait_s: float) -> bool:
        if self.ring is not None:
            into = bytearray(1 << 16)
            if count := self.ring.replies.take(memoryview(into)):
                self.reader.receive_data(bytes(into[:count]))
                return True
            time.sleep(min(wait_s, 0.001))
            return False
        if not select.select([self.sock], [], [], wait_s)[0]:
            return False
        data = self.sock.recv(1 << 16)
        assert data, "the worker closed the connection"
        self.reader.receive_data(data)
        return True

    def reply(self) -> Body | Failure:
        until = time.monotonic() + LIMIT_S
        while (frame := self.reader.next_frame()) is None:
            self._receive(0.1)
            assert time.monotonic() < until, "the worker says nothing"
        if frame.status:
            return Failure.from_body(frame.status, parse_body(ErrorBody, frame.payload))
        return parse_body(reply_body(Opcode(frame.op)), frame.payload)

    def ask(self, op: Opcode, body: Body) -> Body | Failure:
        self.send(op, body)
        return self.reply()

    # --- the usual requests ---

    def alloc(self, size_bytes: int) -> int:
        made = self.ask(Opcode.MEM_ALLOC, MemAlloc(size_bytes))
        assert isinstance(made, Handle), made
        return made.handle

    def write(self, handle: int, offset: int, data: bytes) -> None:
        assert self.ask(Opcode.MEM_WRITE, MemWrite(handle, offset, data)) == Empty()

    def read(self, handle: int, offset: int, length: int) -> bytes:
        found = self.ask(Opcode.MEM_READ, MemRead(handle, offset, length))
        assert isinstance(found, Data), found
        return bytes(found.data)

    def load(self, image: bytes) -> int:
        loaded = self.ask(Opcode.MODULE_LOAD, ModuleLoad(image))
        assert isinstance(loaded, ModuleLoaded), loaded
        self.last_module = loaded.module
        return loaded.module

    def launch(
        self, module: int, kernel: str, args: bytes, sizes: tuple[int, ...], grid: int = 1, block: int = 1
    ) -> None:
        body = Launch(module, kernel, grid, 1, 1, block, 1, 1, 0, args, sizes)
        self.send(Opcode.LAUNCH, body, quiet=True)

    def close(self) -> None:
        if self.ring is not None:
            self.ring.close()
            self.ring = None
        self.sock.close()


@dataclass(kw_only=True)
class Worker(Tenant):
    """A worker's loop, as the broker sees it, and the first connection of its tenant.

    Attributes:
        page: The worker's page.
        context: The worker's context, which only the worker's thread may use.
    """

    channel: socket.socket
    writer: PageWriter
    page: BrokerPage
    server: SessionServer | None = None
    context: Context | None = None
    heard: list[Message] = field(default_factory=list)

    def say(self, message: Message, *fds: int) -> None:
        send_message(self.channel, message.to_map(), fds)

    def hear(self, kind: type[M]) -> M:
        """Return the next message of that kind. Messages before it are appended to `heard`."""
        while True:
            told, fds = receive_message(self.channel)
            assert not fds
            message = parse_message(FROM_WORKER, told)
            if isinstance(message, kind):
                return message
            if message is not None:
                self.heard.append(message)

    def hears_nothing(self, kind: type[Message], wait_s: float) -> bool:
        """Return whether no message of that kind arrives within that time. Other messages are appended to `heard`."""
        until = time.monotonic() + wait_s
        while (left_s := until - time.monotonic()) > 0:
            if select.select([self.channel], [], [], left_s)[0]:
                message = parse_message(FROM_WORKER, receive_message(self.channel)[0])
                if isinstance(message, kind):
                    return False
                if message is not None:
                    self.heard.append(message)
        return True

    def attach(self, *, ring: bool = False) -> tuple[Tenant, AttachReply]:
        """Open a further connection of the lease's tenant."""
        near, far = socket.socketpair()
        near.settimeout(LIMIT_S)
        self.say(AttachOrder(1, b"", ring=ring, arena_bytes=0), far.fileno())
        far.close()
        tenant = Tenant(near)
        data, fds, _, _ = socket.recv_fds(near, 1 << 16, MAX_DESCRIPTORS)
        tenant.reader.receive_data(data)
        welcome = tenant.reply()
        assert isinstance(welcome, AttachReply), welcome
        if ring:
            tenant.ring = Ring(near, SharedMemoryGrant.from_options(welcome.options), fds)
        return tenant, welcome

    def open_region(self, granule_bytes: int) -> int:
        fd = self.writer.reading_fd()
        self.say(RegionsPage(), fd)
        os.close(fd)
        self.say(OpenRegionOrder(REGION, 0, 1, granule_bytes))
        address = self.hear(RegionOpenedReport).address
        self.writer.set(0, 1, RegionWord.ACTIVE, time.monotonic_ns() + MINUTE_NS)
        return address

    # --- parking ---

    def give_memory(self, size_bytes: int) -> None:
        """Give the session host memory of that size for parking."""
        fd = sealed_memory("park-for-test", size_bytes)
        self.say(ParkMemoryOrder(size_bytes), fd)
        os.close(fd)

    def park(self, number: int = 1, grace_s: float = 10.0) -> ParkedReport:
        """Park the session in the host memory that it was given."""
        self.say(ParkOrder(number, time.monotonic_ns() + round(grace_s * 1e9)))
        report = self.hear(ParkedReport)
        assert report.number == number == self.page.counter(Counter.PARK_NUMBER)
        return report

    def bring_back(self, number: int = 1) -> ReturnedReport:
        self.say(ReturnOrder(number))
        report = self.hear(ReturnedReport)
        assert report.number == number
        assert self.page.counter(Counter.PARK_NUMBER) == 0
        return report


@contextmanager
def worker(
    driver: Driver | None = None,
    *,
    card: str = "GPU-0",
    slice_bytes: int = SLICE,
    is_parkable: bool = False,
    is_shared: bool = False,
    is_native: bool = False,
    ring: bool = False,
) -> Iterator[tuple[Worker, AttachReply]]:
    page = BrokerPage()
    page.set_deadline(time.monotonic_ns() + 10 * MINUTE_NS, 1)
    view = WorkerPage(page.fds)
    chosen = CpuDriver() if driver is None else driver
    chosen.preload()
    broker, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    broker.settimeout(LIMIT_S)
    writer = PageWriter()
    made = Worker(sock=socket.socket(), channel=broker, writer=writer, page=page)
    is_open = threading.Event()

    def run() -> None:
        # Create the context in this thread, because it belongs to the thread that creates it.
        try:
            made.context = context = chosen.open_context(card, slice_bytes)
            if is_parkable:
                context.make_parkable(slice_bytes)
            native = context.native() if is_native else None
            session = Session(
                LEASE, context, Ledger(slice_bytes, 0, context.page_bytes), view, native=native, is_parkable=is_parkable
            )
            welcome = AttachReply(slice_bytes, chosen.name, card, ())
            made.server = SessionServer(channel, session, welcome, is_shared=is_shared)
        finally:
            is_open.set()
        made.server.run()
        for connection in made.server._connections.values():
            connection.wire.close()
        if session._gate.page is not None:
            session._gate.page.close()
        session.regions.close()
        session.parking.close()
        context.close()

    thread = threading.Thread(target=run)
    with ExitStack() as stack:
        for closing in (channel, made, writer, page):
            stack.callback(closing.close)
        made.sock.close()
        thread.start()
        is_open.wait()
        try:
            first, welcome = made.attach(ring=ring)
            made.sock, made.reader, made.ring = first.sock, first.reader, first.ring
            yield made, welcome
        finally:
            broker.close()
            thread.join()
            view.close()
