"""The worker's loop with regions, on the embedded driver: the broker speaks through its channel, a tenant beside it."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from gpulease.daemon.contract.control_page import BrokerPage, WorkerPage
from gpulease.daemon.contract.message_fields import Message, parse_message
from gpulease.daemon.contract.messages import (
    FROM_WORKER,
    AttachOrder,
    EndRegionOrder,
    ForwardRevokedReport,
    OpenRegionOrder,
    RegionEndedReport,
    RegionOpenedReport,
    RegionsPage,
    ResizeSliceOrder,
    SliceResizedReport,
)
from gpulease.daemon.drivers.interface import Poll
from gpulease.daemon.host.ipc import receive_message, send_message
from gpulease.daemon.ptx.context import CpuContext
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
    Empty,
    ErrorBody,
    Handle,
    LaunchIn,
    ModuleLoad,
    ModuleLoaded,
    RegionRef,
    RegionSet,
)
from gpulease.protocol.opcodes import Flag, Opcode, SessionOption, Status
from gpulease.protocol.session_words import RegionWord
from helpers.kernels import TRANSFORM
from helpers.region_rig import PageWriter
from helpers.session_rig import LEASE, MINUTE_NS, SIZES

SLICE = 64 << 20
REGION = 0x99


@dataclass
class Worker:
    """A worker's loop in a thread of its own, as broker and tenant see it."""

    channel: socket.socket
    tenant: socket.socket
    writer: PageWriter
    reader: FrameReader
    last: int = 0

    def say(self, message: Message, *fds: int) -> None:
        send_message(self.channel, message.to_map(), fds)

    def hear(self, kind: type[Message]) -> Message:
        while True:
            told, fds = receive_message(self.channel)
            assert not fds
            message = parse_message(FROM_WORKER, told)
            if isinstance(message, kind):
                return message

    def send(self, op: Opcode, body: Body, *, quiet: bool = False) -> None:
        self.last += 1
        flags = Flag.QUIET if quiet else Flag(0)
        frame = build_frame(op, build_body(body), request_id=self.last, session_id=LEASE, flags=flags)
        self.tenant.sendall(frame)

    def reply(self) -> Body | Failure:
        while (frame := self.reader.next_frame()) is None:
            data = self.tenant.recv(1 << 16)
            assert data
            self.reader.receive_data(data)
        if frame.status:
            return Failure.from_body(frame.status, parse_body(ErrorBody, frame.payload))
        return parse_body(reply_body(Opcode(frame.op)), frame.payload)

    def ask(self, op: Opcode, body: Body) -> Body | Failure:
        self.send(op, body)
        return self.reply()

    def open_region(self, granule_bytes: int) -> int:
        fd = self.writer.reading_fd()
        self.say(RegionsPage(), fd)
        os.close(fd)
        self.say(OpenRegionOrder(REGION, 0, 1, granule_bytes))
        opened = self.hear(RegionOpenedReport)
        assert isinstance(opened, RegionOpenedReport)
        self.writer.set(0, 1, RegionWord.ACTIVE, time.monotonic_ns() + MINUTE_NS)
        return opened.address


@contextmanager
def worker() -> Iterator[tuple[Worker, AttachReply]]:
    page = BrokerPage()
    page.set_deadline(time.monotonic_ns() + MINUTE_NS, 1)
    view = WorkerPage(page.fds)
    driver = CpuDriver()
    driver.preload()
    context = driver.open_context("GPU-0", SLICE)
    session = Session(LEASE, context, Ledger(SLICE), view)
    channel, broker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    tenant, far = socket.socketpair()
    writer = PageWriter()
    with ExitStack() as stack:
        for closing in (channel, tenant, writer, page, session.regions):
            stack.callback(closing.close)
        broker.settimeout(30)
        tenant.settimeout(30)
        server = SessionServer(channel, session, AttachReply(SLICE, "cpu", "GPU-0", ()), is_shared=False)
        thread = threading.Thread(target=server.run)
        thread.start()
        made = Worker(broker, tenant, writer, FrameReader(MAX_PAYLOAD_BYTES))
        try:
            made.say(AttachOrder(1, b"", ring=False, arena_bytes=0), far.fileno())
            far.close()
            welcome = made.reply()
            assert isinstance(welcome, AttachReply)
            yield made, welcome
        finally:
            broker.close()
            thread.join()
            for connection in server._connections.values():
                connection.wire.close()
            context.close()
            if session._gate.page is not None:
                session._gate.page.close()
            view.close()


def granule_of(welcome: AttachReply) -> int:
    (value,) = [option.value for option in welcome.options if option.type == SessionOption.REGIONS]
    return int.from_bytes(value, "big")


def launch_in(made: Worker, address: int) -> LaunchIn:
    loaded = made.ask(Opcode.MODULE_LOAD, ModuleLoad(TRANSFORM))
    assert isinstance(loaded, ModuleLoaded)
    chosen = made.ask(Opcode.REGION_SET, RegionSet((RegionRef(0, 1),)))
    assert isinstance(chosen, Handle)
    args = address.to_bytes(8, "little") + (8).to_bytes(4, "little") + b"\0\0\x80\x3f"
    return LaunchIn(loaded.module, "scale", 1, 1, 1, 32, 1, 1, 0, args, SIZES, chosen.handle, 7)


def test_a_region_from_its_opening_to_its_release() -> None:
    with worker() as (made, welcome):
        granule_bytes = granule_of(welcome)
        address = made.open_region(granule_bytes)
        launch = launch_in(made, address)
        for _ in range(5):
            made.send(Opcode.LAUNCH_IN, launch, quiet=True)
        assert made.ask(Opcode.SYNC, Empty()) == Empty()
        made.writer.set(0, 1, RegionWord.REVOKED, 0, 5)
        made.send(Opcode.LAUNCH_IN, launch, quiet=True)
        failure = made.ask(Opcode.SYNC, Empty())
        assert isinstance(failure, Failure)
        assert (failure.status, failure.region, failure.position) == (Status.REVOKED, REGION, 7)
        told = made.hear(ForwardRevokedReport)
        assert isinstance(told, ForwardRevokedReport)
        assert (told.region_id, told.kernel, told.site, told.flipped_ns) == (REGION, "scale", 0, 5)
        made.say(EndRegionOrder(REGION, 1000))
        ended = made.hear(RegionEndedReport)
        assert isinstance(ended, RegionEndedReport)
        assert ended.freed_bytes + ended.kept_bytes == granule_bytes
        assert ended.shown_bytes == ended.freed_bytes
        assert made.ask(Opcode.REGION_RELEASE, Handle(address)) == Empty()


def test_a_resized_slice_is_what_the_next_connection_hears() -> None:
    with worker() as (made, _):
        made.say(ResizeSliceOrder(SLICE // 2))
        assert made.hear(SliceResizedReport) == SliceResizedReport(SLICE // 2, "")


def test_a_region_ends_while_the_session_waits_for_other_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant waits for its kernels; the broker has the region ended all the same, and other messages later."""
    waiting, go_on = threading.Event(), threading.Event()
    with worker() as (made, welcome):
        address = made.open_region(granule_of(welcome))
        launch_in(made, address)

        def sync(_context: CpuContext, poll: Poll) -> None:
            waiting.set()
            while not go_on.wait(0.001):
                poll()

        monkeypatch.setattr(CpuContext, "sync", sync)
        made.send(Opcode.STREAM_SYNC, Handle(0))
        made.send(Opcode.SYNC, Empty())
        waiting.wait()
        made.writer.set(0, 1, RegionWord.REVOKED, 0, 5)
        made.say(EndRegionOrder(REGION, 1000))
        assert isinstance(made.hear(RegionEndedReport), RegionEndedReport)
        assert not go_on.is_set()
        go_on.set()
        assert made.reply() == Empty()
        assert made.reply() == Empty()
