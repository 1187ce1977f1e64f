"""A parked session, on the embedded driver: whatever its tenant does next brings it back as it was."""

import fcntl
import gc
import mmap
import os
import random
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpulease.daemon.contract.control_page import SESSION_USES, Counter, sealed_memory
from gpulease.daemon.contract.guests import Guest
from gpulease.daemon.contract.messages import (
    AttachOrder,
    CopyAheadOrder,
    EndRegionOrder,
    EndSession,
    ImagedReport,
    LeaveOrder,
    OpenRegionOrder,
    ParkedReport,
    ParkMemoryOrder,
    ParkOrder,
    ParkRefusal,
    ParkRefusedReport,
    RefuseReturn,
    RegionEndedReport,
    RegionOpenedReport,
    ResizeSliceOrder,
    ReturnedReport,
    ReturnFailedReport,
    ReturnOrder,
    ReturnWantedReport,
    SliceResizedReport,
    StayOrder,
)
from gpulease.daemon.drivers.interface import PARK_STEP_BYTES, OutOfMemory, PageMove, Poll
from gpulease.daemon.host.ipc import channel_pair
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.parked_memory import ParkedMemory
from gpulease.daemon.session import connection, server
from gpulease.daemon.session.connection import AttachedConnection
from gpulease.daemon.session.huge_mapping import HugeMapping
from gpulease.daemon.session.image_channel import ReceivedImage
from gpulease.protocol.capabilities import Permission
from gpulease.protocol.codec import build_body
from gpulease.protocol.errors import FramingError
from gpulease.protocol.failures import Failure
from gpulease.protocol.messages import (
    Body,
    Data,
    Empty,
    GraphCreate,
    GraphNode,
    Handle,
    Launch,
    MemAlloc,
    MemRead,
    MemWrite,
    ModuleLoad,
    Ping,
)
from gpulease.protocol.opcodes import Opcode, Status
from gpulease.protocol.session_words import RegionWord
from helpers.kernels import TRANSFORM, packed_scale_args
from helpers.pointers import POINTERS
from helpers.server_rig import LIMIT_S, REGION, SLICE, Tenant, Worker, worker
from helpers.session_rig import MINUTE_NS
from helpers.waiting import wait_until

MEMORY = SLICE + (2 << 20)
SIZES_OF_ALLOCATIONS = (1, 100, 4096, 65_537, 1 << 20, (1 << 20) + 1, 5 << 20)
GRANULE = HUGE = 2 << 20
AWAITED, ANSWER = 1, 33
"""Words of a ring: what the client waits for, and the worker's answer."""

HAS_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage").exists() and tuple(
    map(int, os.uname().release.split(".")[:2])
) >= (6, 1)


class Contents:
    """Allocations of many sizes with random bytes."""

    def __init__(self, tenant: Tenant, seed: int = 5) -> None:
        source = random.Random(seed)
        self._bytes: dict[int, bytes] = {}
        for size in SIZES_OF_ALLOCATIONS:
            handle = tenant.alloc(size)
            self._bytes[handle] = source.randbytes(size)
            for at in range(0, size, 1 << 20):
                tenant.write(handle, at, self._bytes[handle][at : at + (1 << 20)])

    def check(self, tenant: Tenant) -> None:
        for handle, data in self._bytes.items():
            for at in range(0, len(data), 1 << 20):
                part = data[at : at + (1 << 20)]
                assert tenant.read(handle, at, len(part)) == part


def test_every_byte_is_there_after_a_park() -> None:
    with worker(is_parkable=True) as (made, _):
        contents = Contents(made)
        made.give_memory(MEMORY)
        for number in (1, 2, 7):
            pages = made.page.counter(Counter.PAGES_BYTES)
            parked = made.park(number)
            assert parked.moved_bytes == pages == sum(SIZES_OF_ALLOCATIONS)
            assert made.bring_back(number).moved_bytes == pages
            contents.check(made)


def test_the_host_has_the_pages_back_while_they_are_parked() -> None:
    with worker(is_parkable=True, slice_bytes=256 << 20) as (made, _):
        handle = made.alloc(200 << 20)
        for at in range(0, 200 << 20, 8 << 20):
            made.write(handle, at, b"\1" * (8 << 20))
        before = private_bytes()
        made.give_memory(256 << 20)
        made.park()
        assert before - private_bytes() > 180 << 20
        made.bring_back()
        assert made.read(handle, (200 << 20) - 4, 4) == b"\1" * 4


def unread_bytes(sock: socket.socket) -> int:
    """Bytes that were sent and that the peer has not received."""
    return int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), "little")


def private_bytes() -> int:
    """Resident anonymous bytes of this process."""
    gc.collect()
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


REQUESTS: dict[str, Callable[[int, int], tuple[Opcode, Body]]] = {
    "read": lambda handle, _: (Opcode.MEM_READ, MemRead(handle, 0, 8)),
    "write": lambda handle, _: (Opcode.MEM_WRITE, MemWrite(handle, 8, b"x")),
    "alloc": lambda *_: (Opcode.MEM_ALLOC, MemAlloc(64)),
    "free": lambda _, other: (Opcode.MEM_FREE, Handle(other)),
    "sync": lambda *_: (Opcode.SYNC, Empty()),
    "stream sync": lambda *_: (Opcode.STREAM_SYNC, Handle(0)),
    "load": lambda *_: (Opcode.MODULE_LOAD, ModuleLoad(TRANSFORM)),
    "ping": lambda *_: (Opcode.PING, Ping(7)),
    "reset": lambda *_: (Opcode.MEM_RESET, Empty()),
}


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("ring", [False, True])
def test_any_request_waits_for_the_return(name: str, ring: bool) -> None:
    with worker(is_parkable=True, is_native=ring, ring=ring) as (made, _):
        handle, other = made.alloc(100), made.alloc(100)
        made.write(handle, 0, b"abcdefgh")
        made.give_memory(MEMORY)
        made.park()
        op, body = REQUESTS[name](handle, other)
        made.send(op, body)
        assert made.hear(ReturnWantedReport).number == 1
        assert not made.has_reply(0.05)
        made.bring_back()
        answer = made.reply()
        assert not isinstance(answer, Failure), answer
        if name == "read":
            assert isinstance(answer, Data)
            assert bytes(answer.data) == b"abcdefgh"
        if name != "reset":
            assert made.read(handle, 0, 8) == b"abcdefgh"


def park_within_a_frame(made: Worker) -> tuple[int, bytes]:
    """Park when the worker has received all but 4 bytes of a write; return the buffer and these bytes."""
    handle = made.alloc(8)
    made.give_memory(MEMORY)
    frame = made.next_frame(Opcode.MEM_WRITE, MemWrite(handle, 0, b"whatever"))
    made.sock.sendall(frame[:-4])
    wait_until(lambda: not unread_bytes(made.sock), "the worker has received it")
    made.park()
    return handle, frame[-4:]


def test_half_a_frame_of_a_parked_session_is_not_dropped_for_a_late_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest came while the worker was stopped: it is read once the session is back."""
    with worker(is_parkable=True) as (made, _):
        handle, rest = park_within_a_frame(made)

        def notice_late(attached: AttachedConnection, now_s: float) -> FramingError:
            monkeypatch.undo()
            made.sock.sendall(rest)
            return FramingError("the rest of a frame did not arrive")

        monkeypatch.setattr(AttachedConnection, "overdue", notice_late)
        made.hear(ReturnWantedReport)
        made.bring_back()
        assert made.reply() == Empty()
        assert made.read(handle, 0, 8) == b"whatever"


def test_a_client_that_stalls_within_a_frame_does_not_bring_a_parked_session_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with worker(is_parkable=True) as (made, _):
        park_within_a_frame(made)
        monkeypatch.setattr(connection, "FRAME_TIMEOUT_S", -1.0)
        failure = made.reply()
        assert isinstance(failure, Failure)
        assert "the rest of a frame did not arrive" in failure.message
        assert made.hears_nothing(ReturnWantedReport, 0.05)


@pytest.mark.parametrize("ring", [False, True])
def test_launches_that_chase_pointers_in_their_data_go_on(ring: bool) -> None:
    """The data holds device addresses, and a module's variable counts: both are where they were."""
    with worker(is_parkable=True, is_native=ring, ring=ring) as (made, _):
        nodes = [made.alloc(16) for _ in range(20)]
        for node, following in zip(nodes, nodes[1:] + nodes[:1], strict=True):
            made.write(node, 0, struct.pack("<QQ", following, 0))
        module, counted = made.load(POINTERS), made.alloc(8)
        made.give_memory(MEMORY)
        chase = (module, "chase", struct.pack("<QI", nodes[0], 50), (8, 4))
        for turn in range(1, 5):
            for _ in range(3):
                made.launch(*chase)
            made.launch(module, "count", struct.pack("<Q", counted), (8,))
            assert made.ask(Opcode.SYNC, Empty()) == Empty()
            made.park(turn)
            # The first launch after it, quiet and in the ring, brings it back.
            made.launch(*chase)
            assert made.hear(ReturnWantedReport).number == turn
            made.bring_back(turn)
            assert made.ask(Opcode.SYNC, Empty()) == Empty()
            counts = [struct.unpack("<Q", made.read(node, 8, 8))[0] for node in nodes]
            assert sum(counts) == turn * 4 * 50
            assert counts == [turn * 4 * (2 + (place < 10)) for place in range(20)]
            assert struct.unpack("<Q", made.read(counted, 0, 8)) == (5 + turn,)


def test_a_client_that_waits_by_the_rings_word_is_sent_to_a_request() -> None:
    with worker(is_parkable=True, is_native=True, ring=True) as (made, _):
        made.alloc(8)
        made.give_memory(MEMORY)
        made.park()
        assert made.ring is not None
        made.ring.words[AWAITED] = 77
        made.sock.sendall(b"!")
        words = made.ring.words
        wait_until(lambda: words[ANSWER] == 2 * 77, "the worker answers")
        assert made.hears_nothing(ReturnWantedReport, 0.02)
        made.send(Opcode.SYNC, Empty())
        made.hear(ReturnWantedReport)
        made.bring_back()
        assert made.reply() == Empty()


def test_without_room_what_waits_is_refused_and_a_later_request_asks_again() -> None:
    with worker(is_parkable=True) as (made, _):
        handle = made.alloc(8)
        made.write(handle, 0, b"whatever")
        made.give_memory(MEMORY)
        made.park(3)
        made.send(Opcode.MEM_READ, MemRead(handle, 0, 8))
        made.hear(ReturnWantedReport)
        made.say(RefuseReturn(2, "of an earlier park"))
        assert not made.has_reply(0.05)
        made.say(RefuseReturn(3, "the card is full"))
        failure = made.reply()
        assert isinstance(failure, Failure)
        assert (failure.status, failure.message) == (Status.BUSY, "the card is full")
        made.send(Opcode.MEM_READ, MemRead(handle, 0, 8))
        assert made.hear(ReturnWantedReport).number == 3
        made.bring_back(3)
        found = made.reply()
        assert isinstance(found, Data)
        assert bytes(found.data) == b"whatever"


def test_a_quiet_request_that_is_refused_is_reported_by_the_next() -> None:
    with worker(is_parkable=True) as (made, _):
        handle = made.alloc(8)
        made.give_memory(MEMORY)
        made.park()
        made.send(Opcode.MEM_WRITE, MemWrite(handle, 0, b"x"), quiet=True)
        made.hear(ReturnWantedReport)
        made.say(RefuseReturn(1, "the card is full"))
        made.send(Opcode.SYNC, Empty())
        made.hear(ReturnWantedReport)
        made.bring_back()
        failure = made.reply()
        assert isinstance(failure, Failure)
        assert (failure.status, failure.failed_op) == (Status.BUSY, Opcode.MEM_WRITE)
        assert made.read(handle, 0, 1) == b"\0"


def test_the_wish_to_return_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulease.daemon.session.parking.WANTED_AGAIN_NS", 1)
    monkeypatch.setattr("gpulease.daemon.session.server.HELD_POLL_MS", 5)
    with worker(is_parkable=True) as (made, _):
        made.give_memory(MEMORY)
        made.park()
        made.send(Opcode.SYNC, Empty())
        for _ in range(3):
            made.hear(ReturnWantedReport)
        made.bring_back()
        assert made.reply() == Empty()


# --- ends ---


def test_a_revoked_session_tells_what_waits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # The broker's message alone wakes it: it looks by itself only long after the reply is awaited.
    for name in ("HELD_POLL_MS", "MAX_SLEEP_MS"):
        monkeypatch.setattr(f"gpulease.daemon.session.server.{name}", 10 * round(1000 * LIMIT_S))
    with worker(is_parkable=True) as (made, _):
        made.give_memory(MEMORY)
        made.park()
        made.send(Opcode.SYNC, Empty())
        made.hear(ReturnWantedReport)
        made.page.refuse(Status.REVOKED, "for the test")
        made.say(EndSession())
        failure = made.reply()
        assert isinstance(failure, Failure)
        assert failure.status == Status.REVOKED


@pytest.mark.parametrize("ring", [False, True])
def test_a_deadline_that_no_broker_reports_is_found(ring: bool) -> None:
    with worker(is_parkable=True, is_native=ring, ring=ring) as (made, _):
        made.give_memory(MEMORY)
        made.park()
        made.send(Opcode.SYNC, Empty())
        made.hear(ReturnWantedReport)
        made.page.set_deadline(time.monotonic_ns(), 1)
        failure = made.reply()
        assert isinstance(failure, Failure)
        assert failure.status == Status.LEASE_EXPIRED
        # A renewal in that moment lets nothing run either.
        made.page.set_deadline(time.monotonic_ns() + MINUTE_NS, 2)
        made.send(Opcode.SYNC, Empty())
        made.hear(ReturnWantedReport)
        made.bring_back()
        assert made.reply() == Empty()


def refused(made: Worker, number: int = 1, grace_s: float = 10.0) -> ParkRefusedReport:
    made.say(ParkOrder(number, time.monotonic_ns() + round(grace_s * 1e9)))
    report = made.hear(ParkRefusedReport)
    assert report.number == number
    assert made.page.counter(Counter.PARK_NUMBER) == 0
    return report


def test_a_lease_that_has_ended_is_not_parked() -> None:
    with worker(is_parkable=True) as (made, _):
        made.alloc(8)
        made.give_memory(MEMORY)
        made.page.refuse(Status.REVOKED)
        assert refused(made).why is ParkRefusal.OVER


@pytest.mark.parametrize("method", ["park", "unpark"])
def test_a_lease_that_ends_during_a_copy(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is given up, and everything is where it was."""
    real = getattr(CpuContext, method)

    def late(self: CpuContext, *arguments: object) -> PageMove:
        made.page.refuse(Status.REVOKED)
        moved: PageMove = real(self, *arguments)
        return moved

    with worker(is_parkable=True) as (made, _):
        contents = Contents(made)
        made.give_memory(MEMORY)
        if method == "unpark":
            made.park()
        with monkeypatch.context() as patched:
            patched.setattr(CpuContext, method, late)
            if method == "park":
                assert refused(made).why is ParkRefusal.OVER
            else:
                made.say(ReturnOrder(1))
                assert "ended" in made.hear(ReturnFailedReport).reason
        # The page lives again, which no broker does, and shows that no byte was lost.
        made.page._words[0] = 0
        if method == "unpark":
            made.bring_back()
        contents.check(made)


def test_what_runs_is_waited_for_until_the_grace_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    is_short = threading.Event()
    real = CpuContext.sync

    def sync(self: CpuContext, poll: Poll) -> None:
        # What runs has no end, and then one: so long after the wait for it begins, however late a slow host begins it.
        until_s = time.monotonic() + 0.05
        while not is_short.is_set() or time.monotonic() < until_s:
            poll()
            time.sleep(0.001)
        real(self, poll)

    with worker(is_parkable=True) as (made, _):
        contents = Contents(made)
        made.give_memory(MEMORY)
        monkeypatch.setattr(CpuContext, "sync", sync)
        assert refused(made, 1, grace_s=0.02).why is ParkRefusal.RUNNING
        is_short.set()
        assert made.park(2).waited_ns >= 50_000_000
        made.bring_back(2)
        contents.check(made)


def test_a_park_behind_a_long_wait_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant waits for its kernels: the order is answered although the worker's loop does not run."""
    waiting, ended = threading.Event(), threading.Event()

    def sync(_context: CpuContext, poll: Poll) -> None:
        waiting.set()
        while not ended.wait(0.001):
            poll()

    with worker(is_parkable=True) as (made, _):
        made.give_memory(MEMORY)
        with monkeypatch.context() as patched:
            patched.setattr(CpuContext, "sync", sync)
            made.send(Opcode.SYNC, Empty())
            waiting.wait()
            assert refused(made, grace_s=0.02).why is ParkRefusal.RUNNING
            assert not ended.is_set()
            ended.set()
            assert made.reply() == Empty()


@pytest.mark.parametrize("ring", [False, True])
def test_what_was_sent_before_the_order_is_served_before_the_park(ring: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order comes over another connection than the write, and while the worker serves neither."""
    waiting, ended = threading.Event(), threading.Event()

    def sync(_context: CpuContext, poll: Poll) -> None:
        waiting.set()
        while not ended.wait(0.001):
            poll()

    with worker(is_parkable=True, is_shared=True) as (made, _):
        writer, _welcome = made.attach(ring=ring)
        handle = writer.alloc(8)
        made.give_memory(MEMORY)
        with monkeypatch.context() as patched:
            patched.setattr(CpuContext, "sync", sync)
            made.send(Opcode.SYNC, Empty())
            waiting.wait()
            writer.send(Opcode.MEM_WRITE, MemWrite(handle, 0, b"whatever"), quiet=True)
            made.say(ParkOrder(1, time.monotonic_ns() + round(LIMIT_S * 1e9)))
            time.sleep(0.05)
        ended.set()
        made.hear(ParkedReport)
        assert made.hears_nothing(ReturnWantedReport, 0.05)
        made.bring_back()
        assert writer.read(handle, 0, 8) == b"whatever"
        writer.close()


@pytest.mark.parametrize("size", [None, 1 << 20])
def test_host_memory_that_is_missing_or_too_small_is_asked_for(size: int | None) -> None:
    with worker(is_parkable=True) as (made, _):
        contents = Contents(made)
        if size is not None:
            made.give_memory(size)
        report = refused(made)
        assert report.why is ParkRefusal.NO_MEMORY
        assert report.needed_bytes == sum(SIZES_OF_ALLOCATIONS)
        made.give_memory(report.needed_bytes)
        made.park(2)
        made.bring_back(2)
        contents.check(made)
        # Without a descriptor it is dropped.
        made.say(ParkMemoryOrder())
        assert refused(made, 3).why is ParkRefusal.NO_MEMORY


def test_a_session_of_another_lease_is_not_parkable() -> None:
    with worker() as (made, _):
        made.give_memory(MEMORY)
        assert refused(made).why is ParkRefusal.NOT_PARKABLE
        made.alloc(8)


def test_a_card_without_room_leaves_it_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_context: CpuContext, _poll: Poll) -> PageMove:
        raise OutOfMemory("the card is full")

    with worker(is_parkable=True) as (made, _):
        contents = Contents(made)
        made.give_memory(MEMORY)
        made.park()
        with monkeypatch.context() as patched:
            patched.setattr(CpuContext, "unpark", full)
            made.say(ReturnOrder(1))
            assert made.hear(ReturnFailedReport).reason == "the card is full"
        assert made.page.counter(Counter.PARK_NUMBER) == 1
        made.bring_back()
        contents.check(made)


def test_orders_may_be_repeated_and_those_of_other_parks_count_for_nothing() -> None:
    with worker(is_parkable=True) as (made, _):
        contents = Contents(made)
        made.give_memory(MEMORY)
        made.say(ReturnOrder(9))
        assert made.hear(ReturnedReport) == ReturnedReport(9, 0, 0, 0)
        first = made.park(4)
        again = made.park(5)
        assert (again.moved_bytes, again.kept_bytes) == (first.moved_bytes, first.kept_bytes)
        made.say(ReturnOrder(4))
        assert made.hears_nothing(ReturnedReport, 0.05)
        # What the host memory holds is not replaced while it holds it.
        made.give_memory(MEMORY)
        made.bring_back(5)
        contents.check(made)


# --- connections ---


def test_a_connection_attaches_to_a_parked_session_and_brings_it_back() -> None:
    with worker(is_parkable=True, is_shared=True) as (made, _):
        handle = made.alloc(8)
        made.write(handle, 0, b"whatever")
        made.give_memory(MEMORY)
        made.park()
        other, welcome = made.attach()
        assert welcome.slice_bytes == SLICE
        made.hear(ReturnWantedReport)
        other.send(Opcode.MEM_READ, MemRead(handle, 0, 8))
        made.send(Opcode.MEM_READ, MemRead(handle, 0, 4))
        assert not other.has_reply(0.05)
        made.bring_back()
        for tenant, length in ((other, 8), (made, 4)):
            found = tenant.reply()
            assert isinstance(found, Data)
            assert bytes(found.data) == b"whatever"[:length]
        other.close()


def test_a_connection_that_ends_asks_for_nothing_and_its_memory_goes_afterwards() -> None:
    with worker(is_parkable=True, is_shared=True) as (made, _):
        contents = Contents(made)
        other, _welcome = made.attach()
        handle = other.alloc(6 << 20)
        other.write(handle, 0, b"\1" * (1 << 20))
        made.give_memory(MEMORY)
        made.park()
        other.close()
        assert made.hears_nothing(ReturnWantedReport, 0.1)
        made.bring_back()
        contents.check(made)
        # Memory given out again is zero, whatever was copied back meanwhile.
        made.ask(Opcode.MEM_FREE, Handle(handle))
        fresh = made.alloc(6 << 20)
        assert made.read(fresh, 0, 1 << 20) == bytes(1 << 20)


def test_half_a_request_is_completed_after_the_return() -> None:
    with worker(is_parkable=True) as (made, _):
        handle = made.alloc(1 << 20)
        made.give_memory(MEMORY)
        made.park()
        data = os.urandom(1 << 20)
        sender = threading.Thread(target=lambda: made.send(Opcode.MEM_WRITE, MemWrite(handle, 0, data)))
        sender.start()
        made.hear(ReturnWantedReport)
        made.bring_back()
        sender.join()
        assert made.reply() == Empty()
        assert made.read(handle, 0, 1 << 20) == data


# --- regions ---


def test_a_region_is_parked_with_its_session() -> None:
    with worker(is_parkable=True) as (made, _):
        address = made.open_region(GRANULE)
        made.write(address, 5, b"in a region")
        handle = made.alloc(8)
        made.write(handle, 0, b"whatever")
        made.give_memory(MEMORY)
        assert made.park().moved_bytes == GRANULE + 8
        made.bring_back()
        assert made.read(address, 5, 11) == b"in a region"
        assert made.read(handle, 0, 8) == b"whatever"


def test_a_region_that_ends_while_it_is_parked_comes_back_as_nothing() -> None:
    with worker(is_parkable=True) as (made, _):
        address = made.open_region(GRANULE)
        made.write(address, 0, b"\1" * 64)
        handle = made.alloc(8)
        made.write(handle, 0, b"whatever")
        made.give_memory(MEMORY)
        made.park()
        made.writer.set(0, 1, 0, 0)
        made.say(EndRegionOrder(REGION, 1000))
        ended = made.hear(RegionEndedReport)
        assert ended.shown_bytes == ended.freed_bytes
        assert made.page.counter(Counter.PARK_NUMBER) == 1
        made.bring_back()
        assert made.read(handle, 0, 8) == b"whatever"
        assert made.ask(Opcode.REGION_RELEASE, Handle(address)) == Empty()


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_region_that_ends_while_the_session_has_left_ends_if_that_stays_after_all(is_restarted: bool) -> None:
    with worker(is_parkable=True) as (made, _):
        address = made.open_region(GRANULE)
        made.give_memory(MEMORY)
        made.park()
        ours, theirs = channel_pair()
        with ours, theirs:
            made.say(LeaveOrder(1), theirs.fileno())
            made.hear(ImagedReport)
        # The broker wipes the region in the image, and orders nothing.
        made.writer.set(0, 1, RegionWord.REVOKED, 0)
        # A broker that has just started knows of no image, and parks the session again.
        made.say(ParkOrder(1, time.monotonic_ns() + MINUTE_NS) if is_restarted else StayOrder(1))
        assert made.hear(RegionEndedReport).region_id == REGION
        made.bring_back()
        assert made.ask(Opcode.REGION_RELEASE, Handle(address)) == Empty()


# --- a direct move: the session is parked with its bytes on the card ---


def test_a_session_that_has_lent_its_pages_goes_on_unchanged_if_it_stays() -> None:
    with worker(is_parkable=True) as (made, _):
        address, handle = made.open_region(GRANULE), made.alloc(1 << 20)
        data = random.Random(1).randbytes(1 << 20)
        made.write(handle, 0, data)
        made.write(address, 5, b"in a region")
        made.give_memory(MEMORY)
        made.say(ParkOrder(1, time.monotonic_ns() + MINUTE_NS, in_place=True))
        report = made.hear(ParkedReport)
        assert (report.in_place, report.moved_bytes, report.shown_bytes) == (True, GRANULE + (1 << 20), 0)
        assert made.page.counter(Counter.PARK_NUMBER) == 1
        # What is sent now waits, and becomes part of the image.
        made.send(Opcode.SYNC, Empty())
        made.hear(ReturnWantedReport)
        ours, theirs = channel_pair()
        with ours, theirs:
            made.say(LeaveOrder(1, carries=True), theirs.fileno())
            assert made.hear(ImagedReport).is_awaited
            received = ReceivedImage(ours.fileno(), 1)
            with mmap.mmap(received.pages[0], 0, prot=mmap.PROT_READ) as lent:
                assert data in lent[:]
            received.close()
        made.say(StayOrder(1))
        made.bring_back()
        assert made.reply() == Empty()
        assert made.read(handle, 0, len(data)) == data
        assert made.read(address, 5, 11) == b"in a region"
        # The next park is a usual one.
        assert not made.park(2).in_place
        made.bring_back(2)
        assert made.read(handle, 0, len(data)) == data


def test_a_region_may_end_while_its_session_is_parked_on_the_card() -> None:
    with worker(is_parkable=True) as (made, _):
        made.open_region(GRANULE)
        made.give_memory(MEMORY)
        made.say(ParkOrder(1, time.monotonic_ns() + MINUTE_NS, in_place=True))
        made.hear(ParkedReport)
        made.writer.set(0, 1, 0, 0)
        made.say(EndRegionOrder(REGION, 1000))
        assert made.hear(RegionEndedReport).freed_bytes > 0
        # A usual park, which a new broker may order, moves the bytes after all.
        assert not made.park(2).in_place
        made.bring_back(2)


@pytest.mark.parametrize("ring", [False, True])
def test_a_worker_that_its_session_has_left_sends_its_connections_nothing_at_its_end(ring: bool) -> None:
    """Another worker may serve them: bytes of this one would break their streams."""
    with worker(is_parkable=True, is_native=ring, ring=ring) as (made, _):
        handle = made.alloc(8)
        made.write(handle, 0, b"whatever")
        made.give_memory(MEMORY)
        made.park()
        ours, theirs = channel_pair()
        with ours, theirs:
            made.say(LeaveOrder(1), theirs.fileno())
            made.hear(ImagedReport)
        made.say(EndSession())
        # The session is here after all, and each connection is where it was.
        made.say(StayOrder(1))
        made.bring_back()
        assert not made.has_reply(0.05)
        assert made.read(handle, 0, 8) == b"whatever"


def test_orders_that_need_the_card_wait_for_the_return() -> None:
    with worker(is_parkable=True) as (made, _):
        made.open_region(GRANULE)
        made.give_memory(MEMORY)
        made.park()
        made.say(OpenRegionOrder(REGION + 1, 1, 1, GRANULE))
        made.say(ResizeSliceOrder(SLICE // 2))
        made.hear(ReturnWantedReport)
        assert made.hears_nothing(RegionOpenedReport, 0.05)
        made.bring_back()
        assert made.hear(RegionOpenedReport).region_id == REGION + 1
        assert made.hear(SliceResizedReport) == SliceResizedReport(SLICE // 2, "")


def test_a_region_that_ends_before_the_return_opens_it_is_never_opened() -> None:
    with worker(is_parkable=True) as (made, _):
        made.open_region(GRANULE)
        made.give_memory(MEMORY)
        made.park()
        made.say(OpenRegionOrder(REGION + 1, 1, 1, GRANULE))
        made.hear(ReturnWantedReport)
        made.say(EndRegionOrder(REGION + 1, 1000))
        assert made.hear(RegionEndedReport) == RegionEndedReport(REGION + 1, 0, 0, 0)
        made.bring_back()
        assert made.hears_nothing(RegionOpenedReport, 0.05)


# --- the host memory ---


def test_host_memory_is_prepared_while_the_session_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the session needs it, and further when it has grown."""
    pinned: list[int] = []
    monkeypatch.setattr(CpuContext, "pin_host", lambda _context, memory: pinned.append(len(memory)))
    with worker(is_parkable=True, slice_bytes=4 * PARK_STEP_BYTES) as (made, _):
        made.give_memory(4 * PARK_STEP_BYTES)
        for steps in (1, 3):
            made.alloc(PARK_STEP_BYTES)
            if steps == 3:
                made.alloc(PARK_STEP_BYTES)
            until = time.monotonic() + 10
            while sum(pinned) < steps * PARK_STEP_BYTES and time.monotonic() < until:
                time.sleep(0.01)
            assert pinned == [PARK_STEP_BYTES] * steps


def test_a_host_that_gives_no_memory_refuses_the_park_and_the_session_stays() -> None:
    """The memory is taken from the file once the session has mapped it, so the kernel can't give any."""
    with worker(is_parkable=True) as (made, _):
        contents = Contents(made)
        fd = os.memfd_create("park-for-test")
        os.ftruncate(fd, MEMORY)
        made.say(ParkMemoryOrder(MEMORY), fd)
        os.ftruncate(fd, 0)
        os.close(fd)
        made.say(ParkOrder(1, time.monotonic_ns() + MINUTE_NS))
        refused = made.hear(ParkRefusedReport)
        assert (refused.why, "too little host memory" in refused.reason or "no memory" in refused.reason) == (
            ParkRefusal.NO_MEMORY,
            True,
        )
        contents.check(made)
        made.give_memory(MEMORY)
        made.park(2)
        made.bring_back(2)
        contents.check(made)


@pytest.mark.parametrize("is_idle", [True, False])
def test_dropped_memory_goes_back_to_the_host_bit_by_bit(monkeypatch: pytest.MonkeyPatch, is_idle: bool) -> None:
    """While the session is idle, or after some time if it never is."""
    unpinned: list[int] = []
    monkeypatch.setattr(CpuContext, "unpin_host", lambda _context, memory: unpinned.append(len(memory)))
    if not is_idle:
        monkeypatch.setattr("gpulease.daemon.session.parking.IDLE_NS", MINUTE_NS)
        monkeypatch.setattr("gpulease.daemon.session.parking.RELEASE_NS", 1_000_000)
    with worker(is_parkable=True, slice_bytes=4 * PARK_STEP_BYTES) as (made, _):
        made.alloc(2 * PARK_STEP_BYTES)
        contents = Contents(made)
        fd = sealed_memory("park-for-test", 4 * PARK_STEP_BYTES)
        made.say(ParkMemoryOrder(4 * PARK_STEP_BYTES), fd)
        made.park()
        made.bring_back()
        assert os.fstat(fd).st_blocks * 512 >= 2 * PARK_STEP_BYTES
        made.say(ParkMemoryOrder())
        wait_until(lambda: not os.fstat(fd).st_blocks, "the host has its memory back")
        assert unpinned == [PARK_STEP_BYTES] * 3
        os.close(fd)
        contents.check(made)
        # Memory that is given before the rest of the last one is gone serves the next park.
        made.give_memory(4 * PARK_STEP_BYTES)
        made.say(ParkMemoryOrder())
        made.give_memory(4 * PARK_STEP_BYTES)
        made.park(2)
        made.bring_back(2)
        contents.check(made)


@pytest.mark.skipif(not HAS_HUGE_PAGES, reason="this kernel makes no huge pages on request")
def test_host_memory_has_huge_pages_and_keeps_what_is_in_it() -> None:
    fd = os.memfd_create("park-for-test")
    os.ftruncate(fd, 16 * HUGE)
    mapping = HugeMapping(fd, 16 * HUGE)
    mapping.view[HUGE - 4 : HUGE + 4] = b"contents"
    assert mapping.populate(0, 8 * HUGE) == ""
    assert (mapping.address % HUGE, huge_bytes_at(mapping.address)) == (0, 8 * HUGE)
    assert os.fstat(fd).st_blocks * 512 == 8 * HUGE
    assert bytes(mapping.view[HUGE - 4 : HUGE + 4]) == b"contents"
    mapping.close()
    os.close(fd)


def huge_bytes_at(address: int) -> int:
    """Bytes of huge pages in the mapping that begins there."""
    with open("/proc/self/smaps") as maps:
        lines = iter(maps)
        next(line for line in lines if line.startswith(f"{address:x}-"))
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("ShmemPmdMapped"))


# --- copying ahead ---


AHEAD_STEP = 1 << 20
"""The size of a step in these tests, so that the contents take several."""


class Copies:
    """Counts the steps that parks and copies ahead of them copy, and can hold a copy ahead back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = self.size_bytes = 0
        self.is_whole = False
        self.allowed = 1 << 30
        save, copy_ahead = ParkedMemory._save_step, CpuContext.copy_ahead

        def count(memory: ParkedMemory, *args: Any) -> None:
            self.steps += 1
            self.size_bytes += args[1][2]
            save(memory, *args)

        def hold_back(context: CpuContext, host: memoryview, end: int) -> bool:
            self.is_whole = copy_ahead(context, host, end if self.steps < self.allowed else 0)
            return self.is_whole

        monkeypatch.setattr(ParkedMemory, "_save_step", count)
        monkeypatch.setattr(CpuContext, "copy_ahead", hold_back)
        monkeypatch.setattr("gpulease.daemon.ptx.parked_memory.PARK_STEP_BYTES", AHEAD_STEP)

    def await_steps(self, steps: int) -> None:
        wait_until(lambda: self.steps == steps, f"{steps} steps are copied")

    def await_whole(self) -> None:
        wait_until(lambda: self.is_whole, "everything is copied")


STEPS = sum(-(-size // AHEAD_STEP) for size in SIZES_OF_ALLOCATIONS)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    return Copies(monkeypatch)


def test_a_park_has_nothing_left_to_copy_after_a_copy_ahead(copies: Copies) -> None:
    with worker(is_parkable=True) as (made, _):
        contents = Contents(made)
        made.give_memory(MEMORY)
        for number in (1, 2):
            copies.is_whole, before = False, copies.steps
            made.say(CopyAheadOrder())
            copies.await_whole()
            # A copy that counts is not made again.
            made.say(CopyAheadOrder())
            parked = made.park(number)
            assert parked.moved_bytes == parked.ahead_bytes == sum(SIZES_OF_ALLOCATIONS)
            assert copies.steps - before == STEPS
            made.bring_back(number)
            contents.check(made)
        assert discarded(made) == (0, 0)


def test_a_park_copies_the_rest_of_a_copy_ahead(copies: Copies) -> None:
    with worker(is_parkable=True) as (made, _):
        contents = Contents(made)
        made.give_memory(MEMORY)
        for number in range(1, STEPS):
            copies.steps, copies.allowed = 0, number
            made.say(CopyAheadOrder())
            copies.await_steps(number)
            assert 0 < made.park(number).ahead_bytes < sum(SIZES_OF_ALLOCATIONS)
            assert copies.steps == STEPS
            made.bring_back(number)
            contents.check(made)
        assert discarded(made) == (0, 0)


def discarded(made: Worker) -> tuple[int, int]:
    """The copies ahead that the session's page says were made in vain, and their bytes."""
    return made.page.counter(Counter.AHEAD_DISCARDED), made.page.counter(Counter.AHEAD_DISCARDED_BYTES)


def use(made: Worker, name: str, handle: int, other: int) -> None:
    match name:
        case "launch":
            made.launch(made.last_module, "count", struct.pack("<Q", handle), (8,))
        case "quiet write":
            made.send(Opcode.MEM_WRITE, MemWrite(handle, 8, b"y"), quiet=True)
        case _:
            made.ask(*REQUESTS[name](handle, other))


@pytest.mark.parametrize("name", [*REQUESTS, "launch", "quiet write"])
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("is_whole", [False, True])
def test_any_use_makes_a_copy_ahead_void(copies: Copies, name: str, ring: bool, is_whole: bool) -> None:
    """Whatever serves it, native code or Python: the park copies everything as it is now."""
    with worker(is_parkable=True, is_native=ring, ring=ring) as (made, _):
        handle, other, spare = made.alloc(2 * AHEAD_STEP), made.alloc(100), made.alloc(3 * AHEAD_STEP)
        made.load(POINTERS)
        # Two of the same kind, so that native code knows the second.
        for _ in range(2):
            use(made, "launch", handle, other)
            use(made, "quiet write", handle, other)
        assert made.ask(Opcode.SYNC, Empty()) == Empty()
        made.write(spare, 0, b"spare")
        made.give_memory(MEMORY)
        copies.allowed = 1 << 30 if is_whole else 3
        made.say(CopyAheadOrder())
        if is_whole:
            copies.await_whole()
        else:
            copies.await_steps(3)
        copied_bytes = copies.size_bytes
        use(made, name, handle, other)
        before = made.read(handle, 0, 16) if name == "read" else None
        copies.steps = 0
        assert made.park().ahead_bytes == 0
        assert copies.steps > 5, "the park took the copy for what is on the card"
        assert discarded(made) == (1, copied_bytes)
        made.bring_back()
        if name != "reset":
            count, text = struct.unpack("<Q", made.read(handle, 0, 8))[0], made.read(handle, 8, 1)
            assert (count, text) == (8 if name == "launch" else 7, b"x" if name == "write" else b"y")
            assert before in (None, made.read(handle, 0, 16))
            assert made.read(spare, 0, 5) == b"spare"


def test_a_copy_in_vain_is_counted_although_no_park_follows(copies: Copies) -> None:
    with worker(is_parkable=True) as (made, _):
        contents = Contents(made)
        made.give_memory(MEMORY)
        for count in (1, 2):
            copies.is_whole = False
            made.say(CopyAheadOrder())
            copies.await_whole()
            contents.check(made)
            wanted = (count, count * sum(SIZES_OF_ALLOCATIONS))
            wait_until(lambda wanted=wanted: discarded(made) == wanted, "the copy is counted")  # type: ignore[misc]


def test_nothing_is_copied_ahead_while_work_runs(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels may change the bytes after they were copied."""
    is_running, looked = True, threading.Event()
    real = CpuContext.sync

    def sync(context: CpuContext, poll: Poll) -> None:
        looked.set()
        while is_running:
            poll()
            time.sleep(0.001)
        real(context, poll)

    with worker(is_parkable=True) as (made, _):
        contents = Contents(made)
        made.give_memory(MEMORY)
        with monkeypatch.context() as patched:
            patched.setattr(CpuContext, "sync", sync)
            made.say(CopyAheadOrder())
            assert looked.wait(LIMIT_S)
            # The worker serves on, and does not look again.
            assert made.ask(Opcode.PING, Ping(7)) == Ping(7)
            is_running = False
        made.park()
        assert copies.steps == STEPS
        made.bring_back()
        contents.check(made)


def test_a_region_that_opens_or_ends_makes_a_copy_ahead_void(copies: Copies) -> None:
    with worker(is_parkable=True) as (made, _):
        contents = Contents(made)
        made.give_memory(MEMORY)
        made.say(CopyAheadOrder())
        copies.await_whole()
        made.open_region(GRANULE)
        copies.steps = 0
        assert made.park().ahead_bytes == 0
        assert copies.steps == STEPS + GRANULE // AHEAD_STEP
        assert discarded(made) == (1, sum(SIZES_OF_ALLOCATIONS))
        made.bring_back()
        copies.is_whole = False
        made.say(CopyAheadOrder())
        copies.await_whole()
        made.writer.set(0, 1, RegionWord.REVOKED, 0)
        made.say(EndRegionOrder(REGION, 1000))
        made.hear(RegionEndedReport)
        copies.steps = 0
        made.park(2)
        assert copies.steps == STEPS
        made.bring_back(2)
        contents.check(made)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_copy_ahead_ends_with_its_host_memory(
    copies: Copies, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    """A card may still write there, so that is awaited before the memory is unpinned."""
    calls: list[str] = []
    monkeypatch.setattr(CpuContext, "unpin_host", lambda *_args: calls.append("unpin"))
    forget = CpuContext.forget_ahead

    def note_forget(context: CpuContext) -> None:
        calls.append("forget")
        forget(context)

    monkeypatch.setattr(CpuContext, "forget_ahead", note_forget)
    with worker(is_parkable=True) as (made, _):
        contents = Contents(made)
        made.give_memory(MEMORY)
        copies.allowed = 4
        made.say(CopyAheadOrder())
        copies.await_steps(4)
        calls.clear()
        made.say(ParkMemoryOrder())
        wait_until(lambda: "unpin" in calls, "the memory is released")
        assert calls[0] == "forget"
        assert discarded(made)[0] == 1
        if is_replaced:
            copies.steps = 0
            made.give_memory(MEMORY)
            made.park()
            assert copies.steps == STEPS
            made.bring_back()
        else:
            assert refused(made).why is ParkRefusal.NO_MEMORY
        contents.check(made)


def test_a_copy_ahead_is_no_use_of_the_session(copies: Copies) -> None:
    """Nor does it change what the broker sees of it."""
    with worker(is_parkable=True) as (made, _):
        Contents(made)
        made.give_memory(MEMORY)
        uses = [made.page.counter(counter) for counter in SESSION_USES]
        made.say(CopyAheadOrder())
        copies.await_whole()
        assert [made.page.counter(counter) for counter in SESSION_USES] == uses
        assert (made.page.counter(Counter.KERNEL_SINCE_NS), made.page.counter(Counter.PARK_NUMBER)) == (0, 0)


@pytest.mark.parametrize("has_memory", [False, True])
def test_an_order_to_copy_ahead_that_comes_late_changes_nothing(copies: Copies, has_memory: bool) -> None:
    with worker(is_parkable=True) as (made, _):
        contents = Contents(made)
        if has_memory:
            made.give_memory(MEMORY)
            made.park()
        made.say(CopyAheadOrder())
        if not has_memory:
            made.give_memory(MEMORY)
            made.park()
        assert copies.steps == STEPS
        made.bring_back()
        contents.check(made)
        time.sleep(0.1)
        assert copies.steps == STEPS


# --- a storm ---


STORM_PARKS = 30


class Broker(threading.Thread):
    """Parks a session again and again, refuses some of its wishes to return, and brings it back."""

    def __init__(self, made: Worker, seed: int) -> None:
        super().__init__()
        self._made = made
        self._source = random.Random(seed)
        self.stops = threading.Event()
        self.parks = 0

    def run(self) -> None:
        source, number = self._source, 0
        while not self.stops.is_set():
            number += 1
            if source.random() < 0.2:
                self._made.give_memory(MEMORY)
            self._made.park(number)
            self.parks += 1
            if source.random() < 0.7:
                self._made.hear(ReturnWantedReport)
            else:
                time.sleep(source.random() * 0.01)
            self._made.bring_back(number)
            time.sleep(source.random() * 0.005)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_session_that_is_parked_all_the_time_computes_right(ring: bool, seed: int) -> None:
    """Writes, reads, launches, allocations and frees between parks at any moment, checked byte by byte."""
    source = random.Random(seed)
    with worker(is_parkable=True, is_native=ring, ring=ring) as (made, _):
        module, counted = made.load(POINTERS), made.alloc(8)
        model: dict[int, bytearray] = {}
        made.give_memory(MEMORY)
        broker = Broker(made, seed)
        broker.start()
        try:
            count, until = 5, time.monotonic() + LIMIT_S
            while broker.parks < STORM_PARKS and time.monotonic() < until:
                match source.randrange(5):
                    case 0 if len(model) < 20:
                        size = source.choice([8, 1000, 70_000])
                        handle = made.alloc(size)
                        assert made.read(handle, 0, size) == bytes(size)
                        model[handle] = bytearray(size)
                    case 1 if len(model) > 5:
                        handle = source.choice(sorted(model))
                        assert made.ask(Opcode.MEM_FREE, Handle(handle)) == Empty()
                        del model[handle]
                    case 2 if model:
                        handle = source.choice(sorted(model))
                        data = source.randbytes(source.randrange(1, len(model[handle]) + 1))
                        made.write(handle, 0, data)
                        model[handle][: len(data)] = data
                    case 3 if model:
                        handle = source.choice(sorted(model))
                        assert made.read(handle, 0, len(model[handle])) == model[handle]
                    case _:
                        for _ in range(source.randrange(1, 5)):
                            made.launch(module, "count", struct.pack("<Q", counted), (8,))
                            count += 1
                        assert made.ask(Opcode.SYNC, Empty()) == Empty()
                        assert struct.unpack("<Q", made.read(counted, 0, 8)) == (count,)
        finally:
            broker.stops.set()
            # A park that waits for a wish gets one.
            made.ask(Opcode.SYNC, Empty())
            broker.join(5)
            while broker.is_alive():
                made.ask(Opcode.SYNC, Empty())
                broker.join(0.1)
        assert broker.parks >= STORM_PARKS
        for handle, expected in model.items():
            assert made.read(handle, 0, len(expected)) == expected


def test_the_page_says_what_keeps_a_session_in_its_process_as_soon_as_it_does() -> None:
    with worker(is_parkable=True) as (made, _):
        module, handle = made.load(TRANSFORM), made.alloc(4096)
        launch = Launch(module, "bias", 1, 1, 1, 4, 1, 1, 0, *packed_scale_args(handle, 4, 1.0))
        nodes = (GraphNode(Opcode.LAUNCH, build_body(launch)),)
        graph = made.ask(Opcode.GRAPH_CREATE, GraphCreate(nodes, (handle,), (), ()))
        assert isinstance(graph, Handle), graph
        assert made.page.why_stays() == ""
        made.ask(Opcode.MEM_FREE, Handle(handle))
        # No request and no order follows.
        wait_until(lambda: "no longer exists" in made.page.why_stays(), "the session in use shows its reason")
        made.give_memory(MEMORY)
        made.park()
        assert "no longer exists" in made.page.why_stays()
        made.bring_back()
        made.ask(Opcode.GRAPH_DESTROY, Handle(graph.handle))
        wait_until(lambda: not made.page.why_stays(), "nothing keeps it any more")


def test_a_client_with_a_token_keeps_a_session_in_its_process_while_it_is_connected() -> None:
    with worker(is_parkable=True, is_shared=True) as (made, _):
        near, far = socket.socketpair()
        guest = Guest(Permission.MEM_READ, time.monotonic_ns() + MINUTE_NS, 1, 1)
        made.say(AttachOrder(1, b"", ring=False, arena_bytes=0, guest=guest), far.fileno())
        far.close()
        wait_until(lambda: "with a token" in made.page.why_stays(), "the client is shown")
        near.close()
        wait_until(lambda: not made.page.why_stays(), "the client is gone")


def test_a_session_that_allocates_all_the_time_seldom_checks_what_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[None] = []

    def check(_: CpuContext) -> str:
        checks.append(None)
        return ""

    monkeypatch.setattr(CpuContext, "why_stays", check)
    monkeypatch.setattr(server, "SHOW_AGAIN_MS", 3_600_000)
    with worker(is_parkable=True) as (made, _):
        for _ in range(50):
            made.ask(Opcode.MEM_FREE, Handle(made.alloc(64)))
    assert len(checks) <= 1
