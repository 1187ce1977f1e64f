"""Copies to and from device memory: cut into chunks, pipelined, and with no copy of the data on this side."""

import ctypes
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from gpulease.client.engine.exchange import receive, send
from gpulease.client.engine.staging import STAGED_FROM_BYTES
from gpulease.client.engine.steps import Procedure
from gpulease.client.errors import InvalidRequest
from gpulease.client.handles import Buffer
from gpulease.client.texts import quoted
from gpulease.protocol import Failure, Opcode
from gpulease.protocol.fastpath import ARENA_COPY, mem_read_frame, mem_write_prefix
from gpulease.protocol.messages import Body

if TYPE_CHECKING:
    from gpulease.client.engine.session import SessionCore

PROMPT_READ_BYTES: Final = 32 << 10
"""Up to this size a read's reply is looked for in the ring as a whole; it fits there with much to spare."""

READ_WINDOW: Final = 4
"""MEM_READs in flight at once: enough that the worker copies the next chunk while this one is received."""

COPY_BYTES_PER_NS: Final = 20
"""A slow bus's rate: the answer to an arena's copy is looked for as long as the copy takes, and then as usual."""

MAX_COPY_SPIN_NS: Final = 1_000_000
"""Longest such look: it keeps the tenant's other threads from running. To sleep costs little beside a longer copy."""


def spin_ns(nbytes: int) -> int:
    """How long the answer to an arena's copy may take because of its size."""
    return min(nbytes // COPY_BYTES_PER_NS, MAX_COPY_SPIN_NS)


def readable_bytes(data: Any, doing: str) -> memoryview:
    """A flat view of a buffer's bytes. What is not contiguous is copied into C order, as numpy's tobytes does."""
    try:
        view = memoryview(data)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{doing}: the data is no buffer of bytes: {error}") from None
    return _flat(view) or memoryview(view.tobytes())


def writable_bytes(into: Any, nbytes: int, doing: str) -> memoryview:
    """A flat view of the first `nbytes` of a buffer that can be written in place."""
    try:
        view = memoryview(into)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{doing}: `into` is no buffer of bytes: {error}") from None
    if view.readonly:
        raise InvalidRequest(f"{doing}: `into` is read-only")
    if view.nbytes < nbytes:
        raise InvalidRequest(f"{doing}: `into` has {view.nbytes} bytes, {nbytes} are to be read")
    if not view.nbytes:
        return memoryview(bytearray())
    flat = _flat(view)
    if flat is None:
        raise InvalidRequest(
            f"{doing}: `into` is not C-contiguous, so there is nowhere to read to",
            "Read into a C-contiguous array, such as np.empty makes, and copy from that",
        )
    return flat[:nbytes]


def _flat(view: memoryview) -> memoryview | None:
    """The bytes of a C-contiguous view in place; None if it is none, or can't be seen in place."""
    if not view.c_contiguous:
        return None
    try:
        return view.cast("B")
    except TypeError:
        pass  # no bytes at all, or a format that struct does not know: a complex number's, a record's
    if view.readonly or not view.nbytes:
        return None
    return memoryview((ctypes.c_ubyte * view.nbytes).from_buffer(view)).cast("B")


def write(session: "SessionCore", buffer: Buffer, offset: int, data: memoryview) -> Procedure[None]:
    """MEM_WRITEs of a chunk each, quiet but for the last, whose reply answers for all; a small one without a reply."""
    link, limit = session.channel.link, session.limit
    place = None if session.arena is None or len(data) <= session.quiet_bytes else session.arena.offset_of(data)
    if place is not None:
        copy = ARENA_COPY.pack(buffer.handle, offset, place, len(data))
        yield from session.arena_write.do(session, copy, spin_ns(len(data)))
        return
    if len(data) >= STAGED_FROM_BYTES and session.staging is not None and session.staging.is_ready:
        yield from session.staging.write(session, buffer.handle, offset, data)
        return
    if len(data) <= session.quiet_bytes:
        yield from send(session.channel, (quiet_prefix(session, buffer, offset, data), data), limit)
        return
    own_requests: list[int] = []
    first_id = link.connection.last_request_id + 1
    for at in range(0, len(data), session.chunk_bytes):
        piece = data[at : at + session.chunk_bytes]
        is_last = at + len(piece) == len(data)
        if is_last:
            request_id = link.expect(Opcode.MEM_WRITE)
        else:
            request_id = link.connection.next_request_id()
            own_requests.append(request_id)
        prefix = mem_write_prefix(
            buffer.handle,
            offset + at,
            len(piece),
            request_id=request_id,
            session_id=session.session_id,
            quiet=not is_last,
        )
        yield from send(session.channel, (prefix, piece), limit)
    session.settle((yield from receive(session.channel, request_id, limit)), "mem_write", own_requests)
    session.acknowledge(Opcode.MEM_WRITE, request_id, first_id)


def quiet_prefix(session: "SessionCore", buffer: Buffer, offset: int, data: memoryview) -> bytes:
    """What goes before the data of a write that is not waited for."""
    number = session.connection.next_request_id()
    return mem_write_prefix(
        buffer.handle, offset, len(data), request_id=number, session_id=session.session_id, quiet=True
    )


def read(session: "SessionCore", buffer: Buffer, offset: int, target: memoryview) -> Procedure[None]:
    """MEM_READs of a chunk each, a few in flight at a time, received where they belong."""
    place = None if session.arena is None else session.arena.offset_of(target)
    if place is not None:
        copy = ARENA_COPY.pack(buffer.handle, offset, place, len(target))
        yield from session.arena_read.do(session, copy, spin_ns(len(target)))
        return
    if len(target) >= STAGED_FROM_BYTES and session.staging is not None and session.staging.is_ready:
        yield from session.staging.read(session, buffer.handle, offset, target)
        return
    in_flight: deque[int] = deque()
    failures: list[Failure] = []
    for at in range(0, len(target), session.chunk_bytes):
        if len(in_flight) == READ_WINDOW:
            yield from _take(session, in_flight.popleft(), failures)
        if failures:
            break
        piece = target[at : at + session.chunk_bytes]
        request_id = session.channel.link.expect(Opcode.MEM_READ, piece)
        frame = mem_read_frame(
            buffer.handle, offset + at, len(piece), request_id=request_id, session_id=session.session_id
        )
        yield from send(session.channel, (frame,), session.limit)
        in_flight.append(request_id)
    while in_flight:
        yield from _take(session, in_flight.popleft(), failures)
    # The first is the one that matters: it may report a launch, and the ones behind it then succeed.
    session.settle(failures[0] if failures else None, "mem_read")
    session.acknowledge(Opcode.MEM_READ, session.connection.last_request_id)


def _take(session: "SessionCore", request_id: int, failures: list[Failure]) -> Procedure[None]:
    result: Body | Failure = yield from receive(session.channel, request_id, session.limit)
    if isinstance(result, Failure):
        failures.append(result)


def check_total(buffer: Buffer, offset: int, nbytes: int, doing: str) -> None:
    """Raises InvalidHandle or InvalidRequest unless the bytes are all inside the buffer."""
    if not isinstance(offset, int) or not isinstance(nbytes, int) or nbytes < 0:
        raise InvalidRequest(f"{doing}: offset {quoted(offset)} and length {quoted(nbytes)} are not counts of bytes")
    buffer.check_range(offset, nbytes, doing)
