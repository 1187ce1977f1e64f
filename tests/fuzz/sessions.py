"""The worker's session operations, on the embedded driver: daemon/session/session.py and every `OperationHandler`.

The invariant. Whatever frames a tenant sends, in whatever order:

- each frame that wants a reply gets exactly one, for its operation, its number and its session, with a known status and
  a body of that operation, or a failure. A quiet frame gets none. No error is raised except FramingError, if the
  protocol says that the frame ends the connection;
- the ledger's sums are those of its entries, within the slice; the driver and the ledger know the same objects; and the
  control page shows the sums;
- memory is zero when it is allocated, and contains what was written, as long as no kernel has run;
- once the lease is over, every operation is refused with the lease's status, and changes nothing;
- when the session is closed, nothing is left of it: no descriptor and no thread.
"""

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpulease.daemon.contract.control_page import BrokerPage, Counter, WorkerPage
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.session.ledger import Ledger
from gpulease.daemon.session.memory_operations import GRANULE_BYTES
from gpulease.daemon.session.session import Session
from gpulease.protocol import messages as m
from gpulease.protocol.codec import build_body, parse_body, reply_body
from gpulease.protocol.errors import FramingError
from gpulease.protocol.framing import Frame, build_frame
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES, MAX_STREAMS
from gpulease.protocol.opcodes import Flag, Opcode, Status
from gpulease.protocol.operations import SESSION_OPCODES

from .draws import Draws
from .frames import frames_of
from .session_requests import BODIES, SLICE, Tenant
from .vector_seeds import said_by, streams

MAX_BYTES = 1024
MAX_STEPS = 60
GONE_S = 60.0
"""Seconds. A thread that was joined may still be listed for some microseconds."""

LEASE = 0x77
ALLOWANCE = 1 << 16
DEADLINE_NS = 1 << 62
OPS = (*sorted(SESSION_OPCODES), Opcode.PING)
STATUSES = frozenset(int(status) for status in Status)
ENDS = (Status.REVOKED, Status.LEASE_EXPIRED, Status.FENCED, Status.SESSION_FAILED)


def check(data: bytes) -> None:
    draws = Draws(data)
    descriptors, threads = count("/proc/self/fd"), count("/proc/self/task")
    has_arena = draws.chance(4)
    with opened(has_arena=has_arena) as tenant:
        try:
            for _ in range(MAX_STEPS):
                if draws.is_over:
                    break
                step(tenant, draws)
                check_books(tenant)
        except FramingError:
            check_books(tenant)
        vars(tenant).clear()
    if has_arena:
        # The arena is closed with its last view, which graphs may have.
        gc.collect()
    assert count("/proc/self/fd") == descriptors
    until = time.monotonic() + GONE_S
    while count("/proc/self/task") != threads:
        assert time.monotonic() < until


def count(folder: str) -> int:
    return len(os.listdir(folder))


@contextmanager
def opened(*, has_arena: bool) -> Iterator[Tenant]:
    page = BrokerPage()
    page.set_deadline(DEADLINE_NS, 1)
    view = WorkerPage(page.fds)
    context = CpuContext(SLICE, hosts=1)
    ledger = Ledger(SLICE, ALLOWANCE)
    session = Session(LEASE, context, ledger, view)
    # The first event allocates memory for all events, which stays as long as the context lives.
    context.event(0)
    own = frozenset(context._modules), dict(context._arena._sizes)
    arena = session.arena.open(GRANULE_BYTES) if has_arena else None
    try:
        yield Tenant(session, context, ledger, page, *own)
    finally:
        context.close()
        assert context._is_closed
        if arena is not None:
            os.close(arena.fd)
        session._counters.release()
        session._graphs._counters.release()
        view.close()
        page.close()


def step(tenant: Tenant, draws: Draws) -> None:
    way = draws.byte()
    if way == 255:
        tenant.end = draws.pick(ENDS)
        tenant.page.refuse(tenant.end)
        return
    if way >= 240:
        send(tenant, draws.pick(FRAMES))
        return
    op = draws.pick(OPS)
    payload = build_body(BODIES[op](tenant, draws)) if op in BODIES else b""
    if way >= 230 and op not in (Opcode.LAUNCH, Opcode.GRAPH_CREATE):
        payload = payload[: draws.byte()] + draws.sized(16)
    flags = Flag.QUIET if way % 3 == 1 else Flag(0)
    tenant.last_id += way != 229
    session_id = LEASE + (way == 228)
    send(tenant, build_frame(op, payload, request_id=tenant.last_id, session_id=session_id, flags=flags))


def send(tenant: Tenant, wire: bytes) -> None:
    """Serve a frame like the worker's loop: expected frames are matched without being parsed."""
    (frame,) = frames_of(wire, MAX_PAYLOAD_BYTES)
    frame = frame._replace(payload=bytes(frame.payload))
    session, reader = tenant.session, tenant.reader
    reader.receive_data(wire)
    reply: bytes | memoryview | None = None
    before = books(tenant)
    if frame.op in (Opcode.LAUNCH, Opcode.LAUNCH_IN):
        session.take_launches(reader)
    elif frame.op == Opcode.SYNC:
        reply = session.take_sync(reader)
    if reply is None and (received := reader.next_frame()) is not None:
        reply = session.handle(received)
    if tenant.end is not None:
        assert books(tenant) == before, "a lease that is over has changed"
    if frame.op in (Opcode.LAUNCH, Opcode.GRAPH_LAUNCH):
        tenant.is_known = False
    if frame.is_quiet:
        assert reply is None
        note_quiet(tenant, frame)
    else:
        assert reply is not None
        check_reply(tenant, frame, bytes(reply))


def check_reply(tenant: Tenant, asked: Frame, reply: bytes) -> None:
    (frame,) = frames_of(reply, MAX_PAYLOAD_BYTES)
    assert len(reply) == 40 + len(frame.payload)
    assert (frame.op, frame.request_id, frame.session_id) == (asked.op, asked.request_id, asked.session_id)
    assert frame.flags == Flag.REPLY
    assert frame.status in STATUSES
    if frame.status:
        parse_body(m.ErrorBody, frame.payload)
        assert tenant.end is None or frame.status == tenant.end
        return
    assert tenant.end is None, "a lease that is over did what it was asked"
    body = parse_body(reply_body(Opcode(frame.op)), frame.payload)
    note(tenant, asked, body)


def note(tenant: Tenant, asked: Frame, body: Any) -> None:
    """Record what the tenant learns from a success, and check that it can be true."""
    payload = asked.payload
    match Opcode(asked.op):
        case Opcode.MEM_ALLOC:
            size_bytes = parse_body(m.MemAlloc, payload).size_bytes
            assert body.handle not in tenant.contents
            tenant.contents[body.handle] = bytearray(size_bytes)
        case Opcode.MEM_FREE:
            del tenant.contents[parse_body(m.Handle, payload).handle]
        case Opcode.MEM_REUSE:
            contents = tenant.contents[parse_body(m.Handle, payload).handle]
            contents[:] = bytes(len(contents))
        case Opcode.MEM_KEEP:
            assert parse_body(m.MemKeep, payload).handle in tenant.contents
        case Opcode.MEM_KEPT:
            assert all(len(tenant.contents[one.handle]) == one.size_bytes for one in body.buffers)
        case Opcode.MEM_RESET:
            # No connection is attached, so no connection holds memory.
            assert body.size_bytes == sum(map(len, tenant.contents.values()))
            tenant.contents.clear()
        case Opcode.MEM_WRITE:
            note_write(tenant, payload)
        case Opcode.MEM_READ:
            read = parse_body(m.MemRead, payload)
            assert len(body.data) == read.length
            known = tenant.contents[read.handle]
            assert read.offset + read.length <= len(known)
            if tenant.is_known:
                assert body.data == known[read.offset : read.offset + read.length]
        case Opcode.ARENA_WRITE:
            tenant.is_known = False
        case Opcode.PING:
            assert body == parse_body(m.Ping, payload)
    if isinstance(body, m.Handle | m.ModuleLoaded):
        tenant.numbers.append(body.handle if isinstance(body, m.Handle) else body.module)


def note_write(tenant: Tenant, payload: bytes | memoryview) -> None:
    write = parse_body(m.MemWrite, payload)
    known = tenant.contents[write.handle]
    assert write.offset + len(write.data) <= len(known)
    known[write.offset : write.offset + len(write.data)] = write.data


def note_quiet(tenant: Tenant, frame: Frame) -> None:
    """Take the effect of a quiet request from the ledger.

    A write's contents are unknown, because it may have failed.
    """
    if frame.op in (Opcode.MEM_WRITE, Opcode.ARENA_WRITE):
        tenant.is_known = False
    held = tenant.ledger._allocations
    for gone in tenant.contents.keys() - held.keys():
        del tenant.contents[gone]
    for new in held.keys() - tenant.contents.keys():
        tenant.contents[new] = bytearray(held[new])


def books(tenant: Tenant) -> tuple[Any, ...]:
    ledger, session = tenant.ledger, tenant.session
    return (
        dict(ledger._allocations),
        set(ledger._modules),
        dict(session.streams.current.known),
        set(session._graphs._graphs),
        ledger.charged_bytes,
        dict(tenant.context._arena._sizes),
    )


def check_books(tenant: Tenant) -> None:
    ledger, context = tenant.ledger, tenant.context
    assert ledger.used_bytes == sum(ledger._allocations.values())
    assert sum(map(tenant.page.counter, (Counter.UNHELD_BYTES, Counter.KEPT_BYTES))) == ledger.used_bytes
    assert ledger._holders.keys() == ledger._allocations.keys()
    assert 0 <= ledger.used_bytes <= ledger.charged_bytes <= SLICE
    assert ledger._image_bytes == sum(loaded.image_bytes for loaded in ledger._modules.values())
    assert {loaded.module for loaded in ledger._modules.values()} == context._modules - tenant.own_modules
    start = context._arena.memory.address
    sizes = {at: size for at, size in context._arena._sizes.items() if at not in tenant.own_sizes}
    variables = {address - start for module in context._modules for address in module.variable_addresses if address}
    held = {address - start: size for address, size in ledger._allocations.items()}
    assert sizes.keys() == held.keys() | variables
    assert {at: size for at, size in sizes.items() if at not in variables} == held
    assert set(tenant.contents) == set(ledger._allocations)
    assert tenant.page.counter(Counter.ALLOCATED_BYTES) == ledger.charged_bytes
    assert tenant.page.counter(Counter.DOING) == 0
    streams_now = tenant.session.streams
    assert streams_now._stream_count == len(streams_now.current.known) - 1 <= MAX_STREAMS
    assert streams_now.current.selected in streams_now.current.known


def _whole_frames() -> tuple[bytes, ...]:
    """Return frames of the vectors: as those of another session, and changed to this session's."""
    found: dict[bytes, None] = {}
    for wire in (*streams(), *said_by("client")):
        for frame in frames_of(wire, 1 << 16):
            found[build_frame(*frame[:1], frame.payload, request_id=frame.request_id, session_id=LEASE)] = None
    return tuple(found)


FRAMES = _whole_frames()


def seeds() -> Iterator[bytes]:
    """Yield the main job in many orders, then each operation after it, and then after the lease's end."""
    ask = {op: number for number, op in enumerate(OPS)}
    alloc, load = bytes([0, ask[Opcode.MEM_ALLOC], 2]), bytes([0, ask[Opcode.MODULE_LOAD], 0])
    launched = bytes([0, ask[Opcode.LAUNCH], 0, 0, 3, 0, 1, 9, 0, 0, 128, 63, 0, 1, 2, 0, 0])
    write = bytes([0, ask[Opcode.MEM_WRITE], 1, 0, 16, *range(16), 0])
    read, sync = bytes([0, ask[Opcode.MEM_READ], 1, 0, 3]), bytes([0, ask[Opcode.SYNC]])
    job = alloc + load + write + launched * 3 + sync + read
    yield b"\0" + job + bytes([255, 0]) + job
    for arena in (0, 3):
        yield bytes([arena]) + job
        for number in range(len(OPS)):
            for way in (0, 1, 228, 229, 230):
                yield (
                    bytes([arena]) + job + bytes([way, number, 1, 1, 2, 3, 0, 1, 0, 1, 0, 2, 1, 0, 0, 3, 0]) * 3 + read
                )
    for number in range(len(FRAMES)):
        yield b"\0" + alloc + load + bytes([240]) + number.to_bytes(2, "big")[-1 - (len(FRAMES) > 256) :] + read
