"""The arguments of a kernel, packed as the wire wants them: little-endian, without gaps."""

import struct
from dataclasses import dataclass
from typing import Any, Final, Literal, Self, get_args

from gpulease.client.core.texts import quoted
from gpulease.client.errors import InvalidHandle, InvalidRequest
from gpulease.client.handles import Buffer

_PACK_U32: Final = struct.Struct("<I").pack
_PACK_U64: Final = struct.Struct("<Q").pack
_PACK_I32: Final = struct.Struct("<i").pack
_PACK_I64: Final = struct.Struct("<q").pack
_PACK_F32: Final = struct.Struct("<f").pack
_PACK_F64: Final = struct.Struct("<d").pack
_POINTER: Final = struct.Struct("<Q")
_FOUR: Final = (4,)
_EIGHT: Final = (8,)


Kind = Literal["buffer", "u32", "u64", "i32", "i64", "f32", "f64", "raw"]
"""What `KernelArgs.push_parameter` takes: each stands for the method of that name."""

ParameterName = str

STREAM: Final = "stream"
"""No parameter's name: `graph.launch` takes what it runs in by it."""


@dataclass(frozen=True, slots=True)
class BoundParameter:
    """A parameter of a launch graph with a value.

    Attributes:
        kind: As it was pushed.
        value: Its bytes as a graph's launch carries them: of a buffer its handle and the offset.
        argument_bytes: Of the argument it stands for.
        buffer: The buffer, if it is one.
    """

    kind: Kind
    value: bytes
    argument_bytes: int
    buffer: Buffer | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.value.hex()}"


class KernelArgs:
    """A kernel's arguments in order; each method appends one and returns the object.

    It can be launched with many times. It holds its buffers, so they live as long as it does.

    Attributes:
        data: The packed bytes.
        sizes: Each argument's size in bytes.
        buffers: The buffers among them.
        parameters: (name, which argument, its value) of those that a launch graph's launches can give anew.
    """

    __slots__ = ("buffers", "data", "parameters", "sizes")

    def __init__(self) -> None:
        # Immutable values, so that a launch uses them as they are.
        self.data = b""
        self.sizes: tuple[int, ...] = ()
        self.buffers: tuple[Buffer, ...] = ()
        self.parameters: tuple[tuple[ParameterName, int, BoundParameter], ...] = ()

    def push_u32(self, value: int) -> Self:
        """An unsigned integer of 4 bytes."""
        try:
            self.data += _PACK_U32(value)
        except struct.error:
            raise self._misfit(value, "a u32, an integer from 0 to 2**32 - 1") from None
        self.sizes += _FOUR
        return self

    def push_u64(self, value: int) -> Self:
        """An unsigned integer of 8 bytes."""
        try:
            self.data += _PACK_U64(value)
        except struct.error:
            raise self._misfit(value, "a u64, an integer from 0 to 2**64 - 1") from None
        self.sizes += _EIGHT
        return self

    def push_i32(self, value: int) -> Self:
        """A signed integer of 4 bytes."""
        try:
            self.data += _PACK_I32(value)
        except struct.error:
            raise self._misfit(value, "an i32, an integer from -2**31 to 2**31 - 1") from None
        self.sizes += _FOUR
        return self

    def push_i64(self, value: int) -> Self:
        """A signed integer of 8 bytes."""
        try:
            self.data += _PACK_I64(value)
        except struct.error:
            raise self._misfit(value, "an i64, an integer from -2**63 to 2**63 - 1") from None
        self.sizes += _EIGHT
        return self

    def push_f32(self, value: float) -> Self:
        """A float of 4 bytes."""
        try:
            self.data += _PACK_F32(value)
        except (struct.error, OverflowError):
            raise self._misfit(value, "an f32, a number up to 3.4e38") from None
        self.sizes += _FOUR
        return self

    def push_f64(self, value: float) -> Self:
        """A float of 8 bytes."""
        try:
            self.data += _PACK_F64(value)
        except (struct.error, OverflowError):
            raise self._misfit(value, "an f64, a number up to 1.8e308") from None
        self.sizes += _EIGHT
        return self

    def push_buffer(self, buffer: Buffer, offset: int = 0) -> Self:
        """A pointer to a buffer's byte `offset`."""
        if not isinstance(buffer, Buffer):
            raise self._misfit(buffer, "a Buffer; integers go in with push_u64")
        if buffer.owner is None:
            raise InvalidHandle(f"argument {len(self.sizes)}: buffer {buffer.handle:#x} is freed")
        if offset:
            buffer.check_range(offset, 0, f"argument {len(self.sizes)}")
        self.data += _PACK_U64(buffer.handle + offset)
        self.sizes += _EIGHT
        self.buffers += (buffer,)
        return self

    def push_raw(self, data: bytes | bytearray | memoryview) -> Self:
        """One argument of as many bytes as given, a struct passed by value for example."""
        try:
            raw = bytes(memoryview(data))
        except TypeError:
            raise self._misfit(data, "bytes") from None
        if not raw:
            raise InvalidRequest(f"argument {len(self.sizes)}: it has no bytes")
        self.data += raw
        self.sizes += (len(raw),)
        return self

    def push_parameter(self, name: str, kind: Kind, value: Any) -> Self:
        """An argument that each launch of a graph can give another value: `graph.launch(name=value)`.

        In a launch that is not recorded it is an argument like the others.

        Args:
            name: What it is called there, but not "stream"; several arguments may be one parameter.
            kind: What to push: "buffer", "u32", "u64", "i32", "i64", "f32", "f64" or "raw".
            value: What it is where nothing else is said. Of a buffer: the buffer, or the buffer and an offset in it.
        """
        if not isinstance(name, str) or not name.isidentifier() or name == STREAM:
            raise InvalidRequest(f"argument {len(self.sizes)}: {quoted(name)} is no name for a parameter")
        bound = pack_parameter(f"argument {len(self.sizes)}", kind, value)
        index = len(self.sizes)
        _push(self, kind, value)
        self.parameters += ((name, index, bound),)
        return self

    def __len__(self) -> int:
        return len(self.sizes)

    def __repr__(self) -> str:
        return f"<KernelArgs sizes={self.sizes} data={self.data.hex()}>"

    def _misfit(self, value: Any, wanted: str) -> InvalidRequest:
        return InvalidRequest(f"argument {len(self.sizes)}: {quoted(value)} is not {wanted}")


def pack_parameter(what: str, kind: Kind, value: Any) -> BoundParameter:
    """A parameter's value. Raises InvalidRequest, naming it `what`, or InvalidHandle for a buffer that is freed."""
    if kind not in get_args(Kind):
        raise InvalidRequest(
            f"{what}: {quoted(kind)} is no kind of parameter; the kinds are {', '.join(get_args(Kind))}"
        )
    args = KernelArgs()
    try:
        _push(args, kind, value)
    except (InvalidRequest, InvalidHandle) as error:
        raise type(error)(f"{what}: {str(error).removeprefix('argument 0: ')}") from None
    if not args.buffers:
        return BoundParameter(kind, args.data, len(args.data))
    (buffer,) = args.buffers
    (pointer,) = _POINTER.unpack(args.data)
    place = _PACK_U64(buffer.handle) + _PACK_U64(pointer - buffer.handle)
    return BoundParameter(kind, place, len(args.data), buffer)


def _push(args: KernelArgs, kind: Kind, value: Any) -> None:
    if kind == "buffer" and isinstance(value, tuple) and len(value) == 2:
        args.push_buffer(*value)
    else:
        getattr(args, f"push_{kind}")(value)
