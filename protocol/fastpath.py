"""The codec of the hot path: launches and copies, through struct.Structs derived from the construct definitions.

A construct parse costs tens of microseconds, and a launch must cost less than three. Each function here gives the same
result as the general code (`codec.build_body`, `codec.parse_body`): vectors and property tests compare the two.
"""

import struct
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Final

from gpulease.protocol.codec import build_body
from gpulease.protocol.errors import BodyError, LocalProtocolError
from gpulease.protocol.framing import HEADER_BYTES, build_frame
from gpulease.protocol.limits import MAX_ARGUMENT_BYTES, MAX_DATA_BYTES, MAX_KERNEL_NAME_BYTES
from gpulease.protocol.messages import (
    ArenaCopy,
    Body,
    GraphLaunch,
    Handle,
    Launch,
    LaunchIn,
    LaunchWith,
    MemAlloc,
    MemRead,
    MemWrite,
    StreamWait,
)
from gpulease.protocol.opcodes import Flag, Opcode

# Offsets in the header: the request id changes with every frame; the bytes before and after it do not.
REQUEST_ID_OFFSET: Final = 16
MIDDLE_AT: Final = REQUEST_ID_OFFSET + 8
_U32: Final = struct.Struct(">I")
# Plain integers: an operation on an IntFlag costs too much here.
_QUIET: Final = int(Flag.QUIET)
_REPLY: Final = int(Flag.REPLY)


def fixed_struct(record: type[Any], *names: str) -> struct.Struct:
    """Return one struct.Struct for adjacent integer fields of a message. Raises ValueError for another field."""
    subcons = {item.name: item.metadata["wire"] for item in fields(record)}
    # An integer of fixed size is construct's FormatField, which has its format for struct.
    formats = [getattr(subcons[name], "fmtstr", None) for name in names]
    if None in formats:
        raise ValueError(f"{record.__name__} has a field among {names} that is not an integer of fixed size")
    return struct.Struct(">" + "".join(str(fmt).lstrip(">") for fmt in formats))


HANDLE: Final = fixed_struct(Handle, "handle")
MEM_ALLOC: Final = fixed_struct(MemAlloc, "size_bytes")
MEM_READ: Final = fixed_struct(MemRead, "handle", "offset", "length")
ARENA_COPY: Final = fixed_struct(ArenaCopy, "handle", "offset", "arena_offset", "length")
STREAM_WAIT: Final = fixed_struct(StreamWait, "stream", "other")
LAYOUTS: Final = MappingProxyType(
    {Handle: HANDLE, MemAlloc: MEM_ALLOC, MemRead: MEM_READ, ArenaCopy: ARENA_COPY, StreamWait: STREAM_WAIT}
)

_GRAPH: Final = fixed_struct(GraphLaunch, "graph")
_MEM_WRITE: Final = fixed_struct(MemWrite, "handle", "offset")
_LAUNCH_MODULE: Final = fixed_struct(Launch, "module")
_LAUNCH_GEOMETRY: Final = fixed_struct(
    Launch, "grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes"
)
REGIONS: Final = fixed_struct(LaunchIn, "region_set", "position")
ATTRIBUTES: Final = fixed_struct(LaunchWith, "flags", "cluster_x", "cluster_y", "cluster_z")
# Offset of the kernel's name in a LAUNCH's payload, and the number of bytes between it and the arguments' length.
_NAME_AT: Final = _LAUNCH_MODULE.size
_AFTER_NAME: Final = _U32.size + _LAUNCH_GEOMETRY.size


# The fields that LAUNCH_IN and LAUNCH_WITH have after those of a LAUNCH.
_TRAILERS: Final = {
    Opcode.LAUNCH: "",
    Opcode.LAUNCH_IN: REGIONS.format[1:],
    Opcode.LAUNCH_WITH: REGIONS.format[1:] + ATTRIBUTES.format[1:],
}

# A LAUNCH_WITH has no pattern: it is always parsed.
_PATTERN_TRAILERS: Final = {op: _TRAILERS[op] for op in (Opcode.LAUNCH, Opcode.LAUNCH_IN)}

# A frame up to its data: the header's first twelve bytes, which depend only on op and flags, and the remaining fields.
_HEADER_REST: Final = "IQ16s"
_WRITE_PREFIX: Final = struct.Struct(f">12s{_HEADER_REST}QQI")
_WRITE_FIXED_BYTES: Final = _MEM_WRITE.size + _U32.size
_READ_FRAME: Final = struct.Struct(f">12s{_HEADER_REST}QQQ")
_REUSE_FRAME: Final = struct.Struct(f">12s{_HEADER_REST}Q")
_DATA_PREFIX: Final = struct.Struct(f">12s{_HEADER_REST}I")
_REFUSED_PREFIX: Final = struct.Struct(f">12s{_HEADER_REST}HII")
_POSITION: Final = struct.Struct(">Q")


def _head(op: Opcode, flags: int) -> bytes:
    return build_frame(op, request_id=0, flags=flags)[:12]


# Take each head from a frame that the general code builds, so that both always agree.
_WRITE_HEAD: Final = _head(Opcode.MEM_WRITE, 0)
_QUIET_WRITE_HEAD: Final = _head(Opcode.MEM_WRITE, _QUIET)
_READ_HEAD: Final = _head(Opcode.MEM_READ, 0)
_DATA_HEAD: Final = _head(Opcode.MEM_READ, _REPLY)
_REUSE_HEAD: Final = _head(Opcode.MEM_REUSE, _QUIET)
_REFUSED_HEAD: Final = _head(Opcode.REGION_REFUSED, _QUIET)

SMALL_FRONTS: Final = (
    _QUIET_WRITE_HEAD,
    build_frame(Opcode.MEM_READ, bytes(MEM_READ.size), request_id=0)[:REQUEST_ID_OFFSET],
    _DATA_HEAD,
    build_frame(Opcode.MEM_REUSE, bytes(HANDLE.size), request_id=0, flags=_QUIET)[:REQUEST_ID_OFFSET],
)
"""The beginnings of a quiet MEM_WRITE, a MEM_READ, a successful MEM_READ reply, and a quiet MEM_REUSE. The beginnings
of the write and of the reply end before the payload's length."""

ARENA_FRONTS: Final = tuple(
    build_frame(op, bytes(size_bytes), request_id=0, flags=flags)[:REQUEST_ID_OFFSET]
    for op in (Opcode.ARENA_WRITE, Opcode.ARENA_READ)
    for size_bytes, flags in ((ARENA_COPY.size, 0), (0, _REPLY))
)
"""The beginnings of an ARENA_WRITE that requests a reply, of that reply, and of the same two frames of an
ARENA_READ."""


class LaunchTemplate:
    """A quiet LAUNCH, LAUNCH_IN or LAUNCH_WITH frame without its request id and argument bytes, sent many times.

    Attributes:
        layout: Packs a frame of `head`, the request id, `before`, the argument bytes and `after`; for a LAUNCH_IN also
            the region set and the position, and for a LAUNCH_WITH in addition its flags and cluster.
        joined: The same, but `after` and the integers that follow it are one field of bytes.
        args_bytes: The exact number of argument bytes; struct would silently cut or pad any other.
    """

    __slots__ = ("after", "args_bytes", "before", "head", "joined", "layout")

    def __init__(self, launch: Launch, session_id: int, op: Opcode = Opcode.LAUNCH) -> None:
        # A wrong sum would shift every later field, and the worker would refuse each frame of the template.
        if sum(launch.arg_sizes) != len(launch.args):
            raise LocalProtocolError(
                f"the argument sizes add up to {sum(launch.arg_sizes)} bytes, the arguments have {len(launch.args)}"
            )
        # Build one whole frame by the general code, then cut it around the bytes that change.
        trailer = _TRAILERS[op]
        trailer_bytes = struct.calcsize(f">{trailer}")
        payload = build_body(launch) + bytes(trailer_bytes)
        frame = build_frame(op, payload, request_id=0, session_id=session_id, flags=Flag.QUIET)
        args_at = HEADER_BYTES + _NAME_AT + _AFTER_NAME + len(launch.kernel.encode()) + _U32.size
        self.args_bytes = len(launch.args)
        self.head = frame[:REQUEST_ID_OFFSET]
        self.before = frame[MIDDLE_AT:args_at]
        self.after = frame[args_at + self.args_bytes : len(frame) - trailer_bytes]
        front = f">{REQUEST_ID_OFFSET}sQ{len(self.before)}s{self.args_bytes}s"
        self.layout = struct.Struct(f"{front}{len(self.after)}s{trailer}")
        self.joined = struct.Struct(f"{front}{len(self.after) + trailer_bytes}s")

    def frame(self, request_id: int, args: bytes, *trailer: int) -> bytes:
        """Return the frame with these argument bytes; the caller has checked that they are `args_bytes` long.

        Args:
            request_id: The frame's number.
            args: The argument bytes.
            trailer: The integers after the fields of a LAUNCH.
        """
        return self.layout.pack(self.head, request_id, self.before, args, self.after, *trailer)


class LaunchPattern:
    """The constant bytes of a quiet LAUNCH or LAUNCH_IN, by which the next such frame is recognised.

    A frame matches if it is `frame_bytes` long and has `front`, `middle` and `tail` at 0, `MIDDLE_AT` and `args_end`.
    The other bytes are the request id, at `REQUEST_ID_OFFSET`, the arguments, from `args_at` to `args_end`, and the
    last `trailer_bytes`: the region set and the position of a LAUNCH_IN, else none.
    """

    __slots__ = ("args_at", "args_end", "frame_bytes", "front", "middle", "tail", "trailer_bytes")

    def __init__(self, payload: bytes | memoryview, session_id: int, op: Opcode = Opcode.LAUNCH) -> None:
        # Build such a launch's frame with request id 0. Everything except the id, arguments and trailer is compared.
        frame = build_frame(op, payload, request_id=0, session_id=session_id, flags=Flag.QUIET)
        self.trailer_bytes = struct.calcsize(f">{_PATTERN_TRAILERS[op]}")
        shape, args = split_launch(memoryview(payload)[: len(payload) - self.trailer_bytes])
        (name_bytes,) = _U32.unpack_from(shape, _NAME_AT)
        self.args_at = HEADER_BYTES + _NAME_AT + _AFTER_NAME + name_bytes + _U32.size
        self.args_end = self.args_at + len(args)
        self.frame_bytes = len(frame)
        self.front = frame[:REQUEST_ID_OFFSET]
        self.middle = frame[MIDDLE_AT : self.args_at]
        self.tail = frame[self.args_end : self.frame_bytes - self.trailer_bytes]


def split_regions(payload: memoryview) -> tuple[memoryview, int, int]:
    """Split the payload of a LAUNCH_IN or GRAPH_LAUNCH_IN into that of its LAUNCH or GRAPH_LAUNCH, set and position.

    The first part is not checked here. Raises BodyError if the payload is too short.
    """
    # The trailer has a fixed size, so cut it off at the end; the rest needs no parsing.
    at = len(payload) - REGIONS.size
    if at < 0:
        raise BodyError("LaunchIn is malformed: it ends too early")
    return payload[:at], *REGIONS.unpack_from(payload, at)


def split_attributes(payload: memoryview) -> tuple[memoryview, int, tuple[int, int, int]]:
    """Split the payload of a LAUNCH_WITH into that of its LAUNCH_IN, its flags and its cluster.

    The first part is not checked here. Raises BodyError if the payload is too short.
    """
    at = len(payload) - ATTRIBUTES.size
    if at < 0:
        raise BodyError("LaunchWith is malformed: it ends too early")
    flags, *cluster = ATTRIBUTES.unpack_from(payload, at)
    return payload[:at], flags, (cluster[0], cluster[1], cluster[2])


def split_launch(payload: memoryview) -> tuple[bytes, bytes]:
    """Split a LAUNCH payload into everything but the argument bytes, and the argument bytes.

    Two launches have the same first part if and only if they have the same kernel, shape and argument sizes. So it can
    be the key of a cache of checked launches. The first part is not checked here. Raises BodyError if the lengths don't
    fit.
    """
    # Skip the two fields of variable length: the kernel's name, then the arguments. Check each length before it is
    # used.
    try:
        (name_bytes,) = _U32.unpack_from(payload, _NAME_AT)
        if name_bytes > MAX_KERNEL_NAME_BYTES:
            raise BodyError(f"Launch is malformed: a kernel name of {name_bytes} bytes")
        length_at = _NAME_AT + _AFTER_NAME + name_bytes
        (args_bytes,) = _U32.unpack_from(payload, length_at)
    except struct.error:
        raise BodyError("Launch is malformed: it ends too early") from None
    # After the arguments, at least the u16 count of their sizes must follow.
    begin = length_at + 4
    end = begin + args_bytes
    if args_bytes > MAX_ARGUMENT_BYTES or end + 2 > len(payload):
        raise BodyError(f"Launch is malformed: {args_bytes} argument bytes do not fit")
    # The first part is the name, the geometry and the argument sizes, which are checked once per shape.
    return b"".join((payload[:begin], payload[end:])), bytes(payload[begin:end])


def graph_launch_payload(graph: int, args: bytes, *regions: int) -> bytes:
    """Return a GRAPH_LAUNCH payload; with a region set and a position, that of a GRAPH_LAUNCH_IN.

    Raises LocalProtocolError.
    """
    # struct would accept any length, so check the definition's limit by hand.
    if len(args) > MAX_ARGUMENT_BYTES:
        raise LocalProtocolError(f"{len(args)} bytes of parameters; at most {MAX_ARGUMENT_BYTES} are allowed")
    try:
        trailer = REGIONS.pack(*regions) if regions else b""
        return b"".join((_GRAPH.pack(graph), _U32.pack(len(args)), args, trailer))
    except struct.error as error:
        raise LocalProtocolError(f"GraphLaunch can't be encoded: {error}") from None


def parse_graph_launch(payload: memoryview) -> tuple[int, bytes]:
    """Return graph and parameters' values of a GRAPH_LAUNCH payload. Raises BodyError."""
    # After two fixed fields, exactly the announced number of bytes must follow.
    args_at = _GRAPH.size + _U32.size
    if len(payload) < args_at:
        raise BodyError("GraphLaunch is malformed: it ends too early")
    (graph,) = _GRAPH.unpack_from(payload)
    (length,) = _U32.unpack_from(payload, _GRAPH.size)
    if length > MAX_ARGUMENT_BYTES or len(payload) != args_at + length:
        raise BodyError(
            f"GraphLaunch is malformed: {length} bytes of parameters announced, {len(payload) - args_at} there; "
            f"at most {MAX_ARGUMENT_BYTES} are allowed"
        )
    return graph, bytes(payload[args_at:])


def parse_mem_write(payload: memoryview) -> tuple[int, int, memoryview]:
    """Return handle, offset and a view of the data of a MEM_WRITE payload, without a copy. Raises BodyError."""
    # Make the definition's checks, with its texts, so that a sender sees no difference between the two codecs.
    data_at = _MEM_WRITE.size + _U32.size
    if len(payload) < data_at:
        raise BodyError("MemWrite is malformed: it ends too early")
    handle, offset = _MEM_WRITE.unpack_from(payload)
    (length,) = _U32.unpack_from(payload, _MEM_WRITE.size)
    if length > MAX_DATA_BYTES:
        raise BodyError(f"MemWrite is malformed: a bytes field of {length} bytes; at most {MAX_DATA_BYTES} are allowed")
    if len(payload) != data_at + length:
        raise BodyError(f"MemWrite is malformed: {length} bytes of data announced, {len(payload) - data_at} there")
    return handle, offset, payload[data_at:]


def mem_write_prefix(handle: int, offset: int, length: int, *, request_id: int, session_id: int, quiet: bool) -> bytes:
    """Return a MEM_WRITE frame up to its data, which follows on the wire. Raises LocalProtocolError."""
    if length > MAX_DATA_BYTES:
        raise LocalProtocolError(f"{length} bytes in one MEM_WRITE; at most {MAX_DATA_BYTES} are allowed")
    head = _QUIET_WRITE_HEAD if quiet else _WRITE_HEAD
    payload_bytes = _WRITE_FIXED_BYTES + length
    try:
        return _WRITE_PREFIX.pack(head, payload_bytes, request_id, session_id.to_bytes(16), handle, offset, length)
    except (struct.error, OverflowError) as error:
        raise LocalProtocolError(f"MemWrite can't be encoded: {error}") from None


def mem_read_frame(handle: int, offset: int, length: int, *, request_id: int, session_id: int) -> bytes:
    """Return a MEM_READ request. Raises LocalProtocolError."""
    try:
        return pack_mem_read(request_id, session_id.to_bytes(16), handle, offset, length)
    except (struct.error, OverflowError) as error:
        raise LocalProtocolError(f"MemRead can't be encoded: {error}") from None


def pack_mem_read(request_id: int, session_bytes: bytes, handle: int, offset: int, length: int) -> bytes:
    """`mem_read_frame` without keywords, for a session id given as bytes. Raises struct.error."""
    return _READ_FRAME.pack(_READ_HEAD, MEM_READ.size, request_id, session_bytes, handle, offset, length)


def pack_quiet_write(request_id: int, session_bytes: bytes, handle: int, offset: int, length: int) -> bytes:
    """`mem_write_prefix` of a quiet MEM_WRITE without keywords, for at most MAX_DATA_BYTES. Raises struct.error."""
    return _WRITE_PREFIX.pack(
        _QUIET_WRITE_HEAD, _WRITE_FIXED_BYTES + length, request_id, session_bytes, handle, offset, length
    )


def mem_reuse_frame(handle: int, *, request_id: int, session_id: int) -> bytes:
    """Return a quiet MEM_REUSE; `handle` must be a handle that the peer has returned."""
    return _REUSE_FRAME.pack(_REUSE_HEAD, HANDLE.size, request_id, session_id.to_bytes(16), handle)


def region_refused_frame(
    slot: int, number: int, kernel: str, position: int, *, request_id: int, session_id: int
) -> bytes:
    """Return a quiet REGION_REFUSED; its fields are those of a launch or copy that was checked before."""
    name = kernel.encode()
    # Slot, number and the name's length, the name, the position.
    payload_bytes = _REFUSED_PREFIX.size - HEADER_BYTES + len(name) + _POSITION.size
    session = session_id.to_bytes(16)
    prefix = _REFUSED_PREFIX.pack(_REFUSED_HEAD, payload_bytes, request_id, session, slot, number, len(name))
    return b"".join((prefix, name, _POSITION.pack(position)))


def data_prefix(length: int, *, request_id: int, session_id: int) -> bytes:
    """Return a successful MEM_READ reply up to its data, which follows on the wire."""
    return _DATA_PREFIX.pack(_DATA_HEAD, _U32.size + length, request_id, session_id.to_bytes(16), length)


def parse_fixed(layout: struct.Struct, kind: type[Body], payload: memoryview) -> tuple[int, ...]:
    """Return the integers of a payload that holds nothing else. Raises BodyError."""
    if len(payload) != layout.size:
        raise BodyError(f"{kind.__name__} is malformed: {len(payload)} bytes instead of {layout.size}")
    return layout.unpack(payload)
