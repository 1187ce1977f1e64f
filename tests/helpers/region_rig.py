"""A session with regions in this process's memory, to which tests pass frames, and the broker's side of both."""

import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from gpulease.daemon.contract.control_page import BrokerPage, WorkerPage, sealed_memory
from gpulease.daemon.contract.message_fields import Message
from gpulease.daemon.contract.messages import OpenRegionOrder
from gpulease.daemon.drivers.interface import DriverError, KernelFault, Poll, RegionReturn, keep_waiting
from gpulease.daemon.ptx.driver import CpuDriver
from gpulease.daemon.session.ledger import Ledger
from gpulease.daemon.session.session import Session
from gpulease.protocol.codec import build_body, parse_body, reply_body
from gpulease.protocol.failures import Failure
from gpulease.protocol.framing import Frame, FrameReader, build_frame
from gpulease.protocol.lease_options import WorkerOptions
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import Body, ErrorBody, Handle, LaunchIn, RegionRef, RegionSet
from gpulease.protocol.opcodes import Flag, Opcode
from gpulease.protocol.session_words import (
    DEADLINES_AT,
    EPOCH_AT,
    FLIPPED_AT,
    SESSION_WORDS_BYTES,
    WORDS_AT,
    RegionWord,
    word_of,
)
from helpers.kernels import TRANSFORM
from helpers.session_rig import GAPS, LEASE, MINUTE_NS, SIZES, Recording

GRANULE = 4096
KEPT = 1024
SLICE = 1 << 20
FIRST_ID = 0x900
_U64 = struct.Struct("=Q")


class PageWriter:
    """The broker's side of a page with region words."""

    def __init__(self) -> None:
        self.fd = sealed_memory("regions-for-test", SESSION_WORDS_BYTES)
        self._map = mmap.mmap(self.fd, SESSION_WORDS_BYTES)
        self.epoch = 0

    def put(self, at: int, value: int) -> None:
        _U64.pack_into(self._map, at, value)

    def set(
        self, slot: int, number: int, state: int, deadline_ns: int, flipped_ns: int = 0, *, raises: bool = True
    ) -> None:
        self.put(FLIPPED_AT + 8 * slot, flipped_ns)
        self.put(DEADLINES_AT + 8 * slot, deadline_ns)
        self.put(WORDS_AT + 8 * slot, word_of(number, RegionWord.NONE) | state)
        if raises:
            self.raise_epoch()

    def raise_epoch(self) -> None:
        self.epoch += 1
        self.put(EPOCH_AT, self.epoch)

    def reading_fd(self) -> int:
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)


@dataclass
class Ticket:
    """A mark in a stream. It is done when the test calls `finish`."""

    stream: int
    done: bool

    def is_done(self) -> bool:
        return self.done


@dataclass
class RegionCard(Recording):
    """A card with regions that are allocations of the embedded driver. Marks are done at once, unless `holds`."""

    holds: bool = False
    tickets: list[Ticket] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    wiped: list[int] = field(default_factory=list)
    is_zeroed: bool = True
    free: int = 1 << 30
    end_error: DriverError | None = None
    mark_fault: KernelFault | None = None
    opened: dict[int, int] = field(default_factory=dict)

    @property
    def region_granule_bytes(self) -> int:
        return GRANULE

    def region_open(self, size_bytes: int, spare_bytes: int = 0, poll: Poll = keep_waiting) -> int:
        address = self.context.mem_alloc(size_bytes)
        self.opened[address] = size_bytes
        self.free -= size_bytes
        return address

    def region_kept_bytes(self, size_bytes: int) -> int:
        return KEPT

    def region_is_zeroed(self) -> bool:
        return self.is_zeroed

    def region_wipe(self, address: int) -> None:
        self.wiped.append(address)

    def region_end(self, address: int, poll: Poll = keep_waiting) -> RegionReturn:
        if self.end_error is not None:
            raise self.end_error
        self.ended.append(address)
        self.free += self.opened[address] - KEPT
        return RegionReturn(self.opened[address] - KEPT, KEPT)

    def region_release(self, address: int) -> None:
        self.released.append(address)

    def free_bytes(self) -> int:
        return self.free

    def mark(self, stream: int) -> Ticket:
        if self.mark_fault is not None:
            fault, self.mark_fault = self.mark_fault, None
            raise fault
        self.tickets.append(Ticket(stream, not self.holds))
        return self.tickets[-1]

    def finish(self, stream: int | None = None) -> None:
        for ticket in self.tickets:
            ticket.done = ticket.done or stream in (None, ticket.stream)


@dataclass
class Opened:
    region_id: int
    slot: int
    number: int
    address: int

    @property
    def ref(self) -> RegionRef:
        return RegionRef(self.slot, self.number)


@dataclass
class RegionRig:
    session: Session
    page: BrokerPage
    writer: PageWriter
    context: RegionCard
    ledger: Ledger
    module: int
    reader: FrameReader = field(default_factory=lambda: FrameReader(MAX_PAYLOAD_BYTES))
    replies: list[bytes] = field(default_factory=list)
    last: int = 0
    opened: int = 0

    # --- the broker ---

    def told(self) -> list[Message]:
        return list(self.session.take_reports())

    def open(self, slot: int | None = None, number: int = 1, size_bytes: int = GRANULE) -> Opened:
        """Open a region, and activate it for a minute."""
        slot = self.opened if slot is None else slot
        self.opened += 1
        region_id = FIRST_ID + self.opened
        self.session.regions.open(OpenRegionOrder(region_id, slot, number, size_bytes))
        (answer,) = self.told()
        region = Opened(region_id, slot, number, answer.address)  # type: ignore[attr-defined]  # The test fails without it.
        self.activate(region)
        return region

    def activate(self, region: Opened, deadline_ns: int = 0, **how: bool) -> None:
        deadline_ns = deadline_ns or time.monotonic_ns() + MINUTE_NS
        self.writer.set(region.slot, region.number, RegionWord.ACTIVE, deadline_ns, **how)

    def flip(self, region: Opened, word: RegionWord = RegionWord.REVOKED, flipped_ns: int = 77) -> None:
        self.writer.set(region.slot, region.number, word, 1 << 62, flipped_ns)

    # --- the tenant ---

    def send(self, op: int, body: Body, *, quiet: bool = False) -> Body | Failure | None:
        self.last += 1
        reply = self.session.handle(
            Frame(op, int(Flag.QUIET) * quiet, 0, self.last, LEASE, memoryview(build_body(body)))
        )
        return None if reply is None else parsed(bytes(reply))

    def ask(self, op: Opcode, body: Body) -> Body:
        reply = self.send(op, body)
        assert reply is not None
        assert not isinstance(reply, Failure), reply
        return reply

    def refused(self, op: Opcode, body: Body) -> Failure:
        reply = self.send(op, body)
        assert isinstance(reply, Failure), reply
        return reply

    def set_of(self, *regions: Opened) -> int:
        reply = self.ask(Opcode.REGION_SET, RegionSet(tuple(region.ref for region in regions)))
        assert isinstance(reply, Handle)
        return reply.handle

    def launch(self, region_set: int, address: int, position: int = 0, kernel: str = "scale", **how: int) -> LaunchIn:
        args = address.to_bytes(8, "little") + (8).to_bytes(4, "little") + b"\0\0\x80\x3f"
        body = LaunchIn(self.module, kernel, 1, 1, 1, 32, 1, 1, 0, args, SIZES, region_set, position)
        return replace(body, **how)  # type: ignore[arg-type]  # Fields that the test sets.

    def feed(self, stream: bytes, *, expect_launches: bool = True) -> None:
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


def quiet_in(launch: LaunchIn, request_id: int, session_id: int = LEASE) -> bytes:
    return build_frame(
        Opcode.LAUNCH_IN, build_body(launch), request_id=request_id, session_id=session_id, flags=Flag.QUIET
    )


def parsed(reply: bytes) -> Body | Failure:
    """Return a reply's body, or its failure."""
    reader = FrameReader(MAX_PAYLOAD_BYTES)
    reader.receive_data(reply)
    frame = reader.next_frame()
    assert frame is not None
    if frame.status:
        return Failure.from_body(frame.status, parse_body(ErrorBody, frame.payload))
    return parse_body(reply_body(Opcode(frame.op)), frame.payload)


@contextmanager
def region_rig(*, is_native: bool = False, regions_required: bool = False) -> Iterator[RegionRig]:
    page = BrokerPage()
    page.set_deadline(time.monotonic_ns() + MINUTE_NS, 1)
    view = WorkerPage(page.fds)
    context = RegionCard(CpuDriver().open_context("GPU-0", SLICE))
    ledger = Ledger(SLICE)
    native = context.native() if is_native else None
    options = WorkerOptions(regions_required=regions_required)
    session = Session(LEASE, context, ledger, view, options=options, native=native)  # type: ignore[arg-type]
    writer = PageWriter()
    fd = writer.reading_fd()
    session.regions.use_page(fd)
    os.close(fd)
    module = ledger.add_module(context.context.module_load(TRANSFORM), 1)
    ledger.add_module(context.context.module_load(GAPS), 1)
    made = RegionRig(session, page, writer, context, ledger, module)
    try:
        yield made
    finally:
        context.context.close()
        session.regions.close()
        if session._gate.page is not None:
            session._gate.page.close()
        made.writer.close()
        view.close()
        page.close()
