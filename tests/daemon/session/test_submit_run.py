"""A submit in this process, on the embedded driver: its run, its one connection, and what ends it."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from gpulease.daemon.contract.control_page import BrokerPage, Counter, WorkerPage
from gpulease.daemon.contract.guests import Guest
from gpulease.daemon.drivers.interface import KernelFault
from gpulease.daemon.host.ipc import ChannelClosed, receive_message, send_message
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.driver import CpuDriver
from gpulease.daemon.session import server as once
from gpulease.daemon.session.ledger import Ledger
from gpulease.daemon.session.server import SubmitServer
from gpulease.daemon.session.session import Session
from gpulease.protocol.capabilities import Permission
from gpulease.protocol.codec import build_body, parse_body
from gpulease.protocol.failures import Failure
from gpulease.protocol.framing import FrameReader, build_frame
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import AttachReply, ErrorBody, Ping, SubmitArgument, SubmitDone, SubmitRun
from gpulease.protocol.opcodes import ArgumentKind, Opcode, Status
from helpers.kernels import FAULTS, TRANSFORM, numbers

LEASE = 0x1234
SLICE = 1 << 20
MINUTE_NS = 60_000_000_000
LIMIT_S = 120.0


def value(data: bytes) -> SubmitArgument:
    return SubmitArgument(ArgumentKind.VALUE, 0, data)


SCALE = SubmitRun(
    "scale",
    *(4, 1, 1, 256, 1, 1, 0),
    (
        SubmitArgument(ArgumentKind.INOUT, 0, numbers(1000).tobytes()),
        value((1000).to_bytes(4, "little")),
        value(np.float32(2).tobytes()),
    ),
    TRANSFORM,
)
OUT = SubmitArgument(ArgumentKind.OUTPUT, 4, b"")
# Some tenths of a second: one that never ends could only be ended with this process.
LONG = SubmitRun("slow", *(1,) * 6, 0, (OUT, value((60_000_000).to_bytes(4, "little"))), FAULTS)
STRAY = replace(LONG, kernel="stray_store", arguments=(OUT, value((1 << 40).to_bytes(8, "little"))))


@dataclass
class Bench:
    """A submit's worker in a thread: the broker's end of its channel, the page, and the tenant's end."""

    session: Session
    page: BrokerPage
    channel: socket.socket
    tenant: socket.socket
    thread: threading.Thread

    def attach(self, guest: Guest | None = None, rest: bytes = b"") -> AttachReply:
        ours, theirs = socket.socketpair()
        self.tenant.close()
        self.tenant = ours
        self.tenant.settimeout(LIMIT_S)
        terms = None if guest is None else guest.to_message()
        with theirs:
            message = {"op": "attach", "request_id": 1, "rest": rest, "ring": False, "arena": 0, "guest": terms}
            send_message(self.channel, message, (theirs.fileno(),))
        assert receive_message(self.channel)[0] == {"op": "attached"}
        reply = self.heard(Opcode.GPU_SUBMIT)
        assert isinstance(reply, AttachReply)
        return reply

    def say(self, op: Opcode, body: SubmitRun | Ping, request_id: int = 2) -> None:
        self.tenant.sendall(build_frame(op, build_body(body), request_id=request_id, session_id=LEASE))

    def heard(self, op: Opcode) -> object:
        """The body or the failure of the next frame, which must reply to that operation."""
        reader = FrameReader(MAX_PAYLOAD_BYTES)
        while (frame := reader.next_frame()) is None:
            reader.receive_data(self.tenant.recv(1))
        assert frame.op == op
        if frame.status:
            return Failure.from_body(frame.status, parse_body(ErrorBody, frame.payload))
        kinds = {Opcode.GPU_SUBMIT: AttachReply, Opcode.SUBMIT_RUN: SubmitDone, Opcode.PING: Ping}
        return parse_body(kinds[op], bytes(frame.payload))

    def is_over(self) -> bool:
        self.thread.join(LIMIT_S)
        return not self.thread.is_alive()


@pytest.fixture
def bench() -> Iterator[Bench]:
    broker, page = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET), BrokerPage()
    page.set_deadline(time.monotonic_ns() + MINUTE_NS, 1)
    worker_page = WorkerPage(page.fds)
    driver = CpuDriver()
    context = driver.open_context("GPU-x", SLICE)
    session = Session(LEASE, context, Ledger(SLICE), worker_page, is_submit=True)
    server = SubmitServer(broker[1], session, AttachReply(SLICE, "cpu", "GPU-x", ()))
    bench = Bench(session, page, broker[0], socket.socket(), threading.Thread(target=server.run))
    bench.thread.start()
    yield bench
    page.refuse(Status.LEASE_FREED)
    broker[0].close()
    bench.tenant.close()
    assert bench.is_over()
    with contextlib.suppress(KernelFault):
        # Where it ended before its kernel, as a process does that is about to exit.
        context.sync()
    context.close()
    broker[1].close()
    worker_page.close()
    page.close()


def test_one_run_and_the_end(bench: Bench) -> None:
    assert bench.attach().slice_bytes == SLICE
    bench.say(Opcode.PING, Ping(7))
    assert bench.heard(Opcode.PING) == Ping(7)
    bench.say(Opcode.SUBMIT_RUN, SCALE)
    assert bench.heard(Opcode.SUBMIT_RUN) == SubmitDone(((numbers(1000) * 2).tobytes(),))
    assert bench.is_over()
    assert bench.tenant.recv(1) == b""
    did = [bench.page.counter(one) for one in (Counter.LAUNCHES, Counter.SYNCS, Counter.COPIES, Counter.COPIED_BYTES)]
    assert did == [1, 1, 2, 2 * 4000]
    assert [bench.page.counter(one) for one in (Counter.OPS, Counter.FAILED_OPS)] == [2, 0]


def test_what_came_behind_the_request_is_served(bench: Bench) -> None:
    bench.attach(rest=build_frame(Opcode.SUBMIT_RUN, build_body(SCALE), request_id=2, session_id=LEASE))
    assert isinstance(bench.heard(Opcode.SUBMIT_RUN), SubmitDone)


@pytest.mark.parametrize("what", ["word", "peer"])
def test_an_endless_kernel_does_not_keep_the_worker(bench: Bench, what: str) -> None:
    bench.attach()
    bench.say(Opcode.SUBMIT_RUN, LONG)
    while bench.page.counter(Counter.LAUNCHES) == 0:
        time.sleep(0.001)
    if what == "peer":
        bench.tenant.close()
    else:
        bench.page.refuse(Status.TIMED_OUT)
        told = bench.heard(Opcode.SUBMIT_RUN)
        assert isinstance(told, Failure)
        assert told.status is Status.TIMED_OUT
    assert bench.is_over()


def test_a_kernel_that_faults_answers_no_outputs(bench: Bench) -> None:
    bench.attach()
    bench.say(Opcode.SUBMIT_RUN, STRAY)
    told = bench.heard(Opcode.SUBMIT_RUN)
    assert isinstance(told, Failure)
    assert (told.status, told.kernel) == (Status.SYNC_FAILED, "stray_store")
    assert [bench.page.counter(one) for one in (Counter.SYNCS, Counter.SYNC_ERRORS, Counter.COPIES)] == [0, 1, 0]
    assert bench.is_over()


def test_a_lost_context_is_reported_before_the_reply(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a card, where a fault costs the context: the broker counts the fault before the tenant has the reply."""
    sync = CpuContext.sync

    def losing(context: CpuContext, look: Callable[[], None] = lambda: None) -> None:
        try:
            sync(context, look)
        except KernelFault as fault:
            fault.context_lost = True
            raise

    monkeypatch.setattr(CpuContext, "sync", losing)
    bench.attach()
    bench.say(Opcode.SUBMIT_RUN, STRAY)
    assert isinstance(bench.heard(Opcode.SUBMIT_RUN), Failure)
    bench.channel.setblocking(False)
    said = []
    with contextlib.suppress(BlockingIOError, ChannelClosed):
        while True:
            said.append(receive_message(bench.channel)[0])
    assert [message["op"] for message in said if message["op"] != "look"] == ["faulted"]
    assert said[-1]["reason"]


def test_a_guest_that_may_not_run_is_refused(bench: Bench) -> None:
    bench.attach(Guest(Permission.MEM_READ, time.monotonic_ns() + MINUTE_NS, 1, 7))
    bench.say(Opcode.SUBMIT_RUN, SCALE)
    told = bench.heard(Opcode.SUBMIT_RUN)
    assert isinstance(told, Failure)
    assert told.status is Status.DENIED


def test_the_broker_ends_a_submit_that_waits(bench: Bench) -> None:
    bench.attach()
    bench.page.refuse(Status.REVOKED)
    send_message(bench.channel, {"op": "end"})
    told = bench.heard(Opcode.GOODBYE)
    assert isinstance(told, Failure)
    assert told.status is Status.REVOKED
    assert bench.is_over()


@pytest.mark.parametrize("message", [{"op": "end"}, {"op": "attach"}])
def test_a_submit_without_a_connection_ends(bench: Bench, message: dict[str, str]) -> None:
    send_message(bench.channel, message)
    assert bench.is_over()


def test_a_submit_that_hears_nothing_ends(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(once, "HANDOVER_S", 0.05)
    assert request.getfixturevalue("bench").is_over()
