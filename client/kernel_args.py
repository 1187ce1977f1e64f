"""Kernel arguments, packed as the wire needs them: little-endian, without gaps."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Self, get_args

from gpulease.client.array_layout import ArrayView
from gpulease.client.errors import InvalidHandle, InvalidRequest, LaunchFailed
from gpulease.client.handles import Buffer
from gpulease.client.memory_views import view_of
from gpulease.client.numbers import integer, is_number
from gpulease.client.texts import quoted
from gpulease.protocol.opcodes import ParameterType

_PACK_U32: Final = struct.Struct("<I").pack
_PACK_U64: Final = struct.Struct("<Q").pack
_PACK_I32: Final = struct.Struct("<i").pack
_PACK_I64: Final = struct.Struct("<q").pack
_PACK_F32: Final = struct.Struct("<f").pack
_PACK_F64: Final = struct.Struct("<d").pack
_POINTER: Final = struct.Struct("<Q")


Kind = Literal["buffer", "u32", "u64", "i32", "i64", "f32", "f64", "raw"]
"""Kinds that `KernelArgs.push_parameter` accepts; each stands for the `push_` method of that name."""

ArgumentKind = str | int
"""Kind of an argument: a number's type ("f32"; for numpy scalars even "u8"), "buffer", or the size of raw bytes."""

_SIZES: Final[dict[ArgumentKind, int]] = {
    **{f"{sign}{8 * size}": size for sign in "ui" for size in (1, 2, 4, 8)},
    "f16": 2,
    "f32": 4,
    "f64": 8,
    "buffer": 8,
}
_U32: Final[tuple[ArgumentKind, ...]] = ("u32",)
_U64: Final[tuple[ArgumentKind, ...]] = ("u64",)
_I32: Final[tuple[ArgumentKind, ...]] = ("i32",)
_I64: Final[tuple[ArgumentKind, ...]] = ("i64",)
_F32: Final[tuple[ArgumentKind, ...]] = ("f32",)
_F64: Final[tuple[ArgumentKind, ...]] = ("f64",)
_BUFFER: Final[tuple[ArgumentKind, ...]] = ("buffer",)

ParameterName = str

KEYWORDS: Final = frozenset({"stream", "regions", "position"})
"""Names that a parameter can't have, because `graph.launch` has keywords of these names."""


@dataclass(frozen=True, slots=True)
class BoundParameter:
    """A parameter of a launch graph with a value.

    Attributes:
        kind: The kind with which it was pushed.
        value: Its bytes in a graph launch. For a buffer, these are the handle and the offset.
        argument_bytes: Size of the argument for which it stands.
        buffer: The buffer, if it is one.
    """

    kind: Kind
    value: bytes
    argument_bytes: int
    buffer: Buffer | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.value.hex()}"


class KernelArgs:
    """A kernel's arguments in order. Each method appends one, and returns the object.

    It can be used for many launches. It keeps its buffers alive.

    Attributes:
        data: The packed bytes.
        kinds: Each argument's kind; for raw bytes, their size.
        buffers: The buffers among the arguments.
        parameters: (name, index of the argument, value) of arguments that each launch of a graph can replace.
    """

    __slots__ = ("buffers", "data", "kinds", "parameters")

    def __init__(self) -> None:
        # The values are immutable, so that a launch can use them without copying.
        self.data = b""
        self.kinds: tuple[ArgumentKind, ...] = ()
        self.buffers: tuple[Buffer, ...] = ()
        self.parameters: tuple[tuple[ParameterName, int, BoundParameter], ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Each argument's size in bytes, as `arg_sizes` of a launch."""
        return sizes_of(self.kinds)

    def push_u32(self, value: int) -> Self:
        """Append an unsigned integer of 4 bytes. Raises InvalidRequest if the value does not fit."""
        # struct checks type and range in one step. Translate its error, which does not name the argument.
        try:
            self.data += _PACK_U32(value)
        except (struct.error, TypeError):
            raise self._misfit(value, "a u32, an integer from 0 to 2**32 - 1") from None
        self.kinds += _U32
        return self

    def push_u64(self, value: int) -> Self:
        """Append an unsigned integer of 8 bytes. Raises InvalidRequest if the value does not fit."""
        try:
            self.data += _PACK_U64(value)
        except (struct.error, TypeError):
            raise self._misfit(value, "a u64, an integer from 0 to 2**64 - 1") from None
        self.kinds += _U64
        return self

    def push_i32(self, value: int) -> Self:
        """Append a signed integer of 4 bytes. Raises InvalidRequest if the value does not fit."""
        try:
            self.data += _PACK_I32(value)
        except (struct.error, TypeError):
            raise self._misfit(value, "an i32, an integer from -2**31 to 2**31 - 1") from None
        self.kinds += _I32
        return self

    def push_i64(self, value: int) -> Self:
        """Append a signed integer of 8 bytes. Raises InvalidRequest if the value does not fit."""
        try:
            self.data += _PACK_I64(value)
        except (struct.error, TypeError):
            raise self._misfit(value, "an i64, an integer from -2**63 to 2**63 - 1") from None
        self.kinds += _I64
        return self

    def push_f32(self, value: float) -> Self:
        """Append a float of 4 bytes. Raises InvalidRequest if the value does not fit."""
        try:
            self.data += _PACK_F32(value)
        except (struct.error, OverflowError):
            raise self._misfit(value, "an f32, a number up to 3.4e38") from None
        self.kinds += _F32
        return self

    def push_f64(self, value: float) -> Self:
        """Append a float of 8 bytes. Raises InvalidRequest if the value does not fit."""
        try:
            self.data += _PACK_F64(value)
        except (struct.error, OverflowError):
            raise self._misfit(value, "an f64, a number up to 1.8e308") from None
        self.kinds += _F64
        return self

    def push_buffer(self, buffer: Buffer | ArrayView, offset: int = 0) -> Self:
        """Append a pointer to byte `offset` of a buffer, or of an array counted from its first element.

        Raises InvalidHandle if the buffer is freed, or too small for the offset.
        """
        if type(offset) is not int:
            try:
                offset = integer(offset)
            except TypeError:
                raise self._misfit(offset, "a buffer with an integer as its offset") from None
        # An array is its buffer plus the place of its first element.
        if isinstance(buffer, ArrayView):
            offset += buffer.layout.offset
            buffer = buffer.buffer
        if not isinstance(buffer, Buffer):
            raise self._misfit(buffer, "a Buffer", "Push an integer with push_u64")
        if buffer.owner is None:
            raise InvalidHandle(f"argument {len(self.kinds)}: buffer {buffer.handle:#x} is freed")
        # An offset equal to the size is allowed: a pointer to the end, of which the kernel reads nothing.
        if offset:
            buffer.check_range(offset, 0, f"argument {len(self.kinds)}")
        self.data += _PACK_U64(buffer.handle + offset)
        self.kinds += _BUFFER
        self.buffers += (buffer,)
        return self

    def push_raw(self, data: bytes | bytearray | memoryview) -> Self:
        """Append raw bytes as one argument, for example a struct passed by value.

        Raises InvalidRequest if there are none.
        """
        try:
            raw = bytes(view_of(data))
        except (TypeError, ValueError):
            raise self._misfit(data, "bytes") from None
        if not raw:
            raise InvalidRequest(f"argument {len(self.kinds)} must be at least one byte, not none")
        self.data += raw
        self.kinds += (len(raw),)
        return self

    def push_parameter(self, name: str, kind: Kind, value: Any) -> Self:
        """Append an argument that each launch of a graph can replace: `graph.launch(name=value)`.

        In a launch that is not recorded, it is an ordinary argument.

        Args:
            name: Its keyword in `graph.launch`; not "stream", "regions" or "position". Several arguments may share a
                name.
            kind: Its kind: "buffer", "u32", "u64", "i32", "i64", "f32", "f64" or "raw".
            value: Its value in launches that give none. For a buffer: the buffer, or the buffer and an offset.
        """
        # The name becomes a keyword of `graph.launch`, so it must be one that Python accepts.
        if not isinstance(name, str) or not name.isidentifier() or name in KEYWORDS:
            raise InvalidRequest(
                f"argument {len(self.kinds)}: a parameter's name must be an identifier, not {quoted(name)}",
                f"It can't be {', '.join(sorted(KEYWORDS))}",
            )
        # Pack the value twice: as a parameter with its name, and as an ordinary argument of this launch.
        bound = pack_parameter(f"argument {len(self.kinds)}", kind, value)
        index = len(self.kinds)
        _push(self, kind, value)
        self.parameters += ((name, index, bound),)
        return self

    def __len__(self) -> int:
        return len(self.kinds)

    def __repr__(self) -> str:
        return f"<KernelArgs sizes={self.sizes} data={self.data.hex()}>"

    def _misfit(self, value: Any, expected: str, hint: str = "") -> InvalidRequest:
        return InvalidRequest(f"argument {len(self.kinds)} must be {expected}, not {quoted(value)}", hint)


def pack_parameter(subject: str, kind: Kind, value: Any) -> BoundParameter:
    """Pack a parameter's value.

    Args:
        subject: The parameter's name in messages.
        kind: Its kind.
        value: Its value, as for `KernelArgs.push_parameter`.

    Raises InvalidRequest, or InvalidHandle for a freed buffer.
    """
    if kind not in get_args(Kind):
        raise InvalidRequest(
            f"{subject}: the kind of parameter must be one of {', '.join(get_args(Kind))}, not {quoted(kind)}"
        )
    args = KernelArgs()
    try:
        _push(args, kind, value)
    except (InvalidRequest, InvalidHandle) as error:
        raise type(error)(f"{subject}: {str(error).removeprefix('argument 0: ')}") from None
    # A value is its bytes. A buffer is checked at each launch, so it needs more than its address.
    if not args.buffers:
        return BoundParameter(kind, args.data, len(args.data))
    # A graph's launch names the buffer and the offset separately, so that the worker can check the buffer.
    (buffer,) = args.buffers
    (pointer,) = _POINTER.unpack(args.data)
    place = _PACK_U64(buffer.handle) + _PACK_U64(pointer - buffer.handle)
    return BoundParameter(kind, place, len(args.data), buffer)


def _push(args: KernelArgs, kind: Kind, value: Any) -> None:
    if kind == "buffer" and isinstance(value, tuple) and len(value) == 2:
        args.push_buffer(*value)
    else:
        getattr(args, f"push_{kind}")(value)


def sizes_of(kinds: tuple[ArgumentKind, ...]) -> tuple[int, ...]:
    """Return each argument's size in bytes, by its kind."""
    return tuple(kind if isinstance(kind, int) else _SIZES[kind] for kind in kinds)


# --- arguments as a list ---

_SCALAR_LETTERS: Final = dict.fromkeys("BHILQ?", "u") | dict.fromkeys("bhilq", "i") | dict.fromkeys("efd", "f")
"""A scalar's kind of number by the letter of its format (Python's struct)."""

_PACKED_AS: Final = {
    "u8": "<B", "u16": "<H", "u32": "<I", "u64": "<Q", "i8": "<b", "i16": "<h", "i32": "<i", "i64": "<q",
    "f16": "<e", "f32": "<f", "f64": "<d",
}  # fmt: skip


MATCH_HINT: Final = "Give a float for a float, and an integer or a buffer for an integer; raw bytes fit any parameter"

UNTOLD: Final = "the image does not declare the parameter's type"


def pack_listed(values: Sequence[Any], types: Sequence[ParameterType] = (), why_undeclared: str = UNTOLD) -> KernelArgs:
    """Pack a list of buffers, device arrays, (buffer, offset) pairs, numpy scalars and bytes.

    Python numbers are accepted, too, if the parameter's type is known.

    Args:
        values: The arguments in order.
        types: The types of the kernel's parameters, as far as the image declares them.
        why_undeclared: Why a type is unknown, for messages.

    Raises InvalidRequest or InvalidHandle, or LaunchFailed for a float where the image declares an integer.
    """
    args = KernelArgs()
    for index, value in enumerate(values):
        # Device memory, raw bytes and numbers with a size pack by themselves; a Python number needs the declared type.
        if isinstance(value, Buffer | ArrayView):
            args.push_buffer(value)
        elif isinstance(value, tuple) and value and isinstance(value[0], Buffer | ArrayView):
            _push(args, "buffer", value)
        elif isinstance(value, bytes | bytearray | memoryview):
            args.push_raw(value)
        else:
            declared = types[index] if index < len(types) else ParameterType.UNTOLD
            kind, data = _scalar(index, value) or _number(index, value, declared, why_undeclared)
            args.data += data
            args.kinds += (kind,)
    return args


def _scalar(index: int, value: Any) -> tuple[ArgumentKind, bytes] | None:
    """Pack a number whose type has a size (numpy, ctypes), or return None. Raises InvalidRequest for an array."""
    try:
        # numpy and ctypes scalars have the buffer protocol, which gives size and kind.
        view = view_of(value)
    except (TypeError, ValueError):
        return None
    if view.ndim:
        raise InvalidRequest(
            f"argument {index}: a kernel can't take an array in the host's memory",
            "Write it to a buffer, or create session.array(it), and pass that; pass a struct by value as bytes",
        )
    # Kernels read little-endian numbers; a silent conversion would hide that the data has another byte order.
    if view.format.startswith((">", "!")):
        raise InvalidRequest(f"argument {index}: {quoted(value)} is big-endian")
    letter = _SCALAR_LETTERS.get(view.format.lstrip("@=<"))
    return f"{letter}{8 * view.itemsize}" if letter else view.itemsize, view.tobytes()


def _number(index: int, value: Any, declared: ParameterType, why_undeclared: str) -> tuple[ArgumentKind, bytes]:
    """Pack a Python number as the parameter's declared type. Raises InvalidRequest or LaunchFailed."""
    if not isinstance(value, int | float):
        hint = "A list may contain buffers, arrays on the card, (buffer, offset), numpy scalars and bytes"
        raise InvalidRequest(f"argument {index}: a kernel can't take {quoted(value)}", hint)
    # PTX calls signed integers s32; here they are i32, as in numpy.
    kind = "u64" if declared is ParameterType.POINTER else declared.name.lower().replace("s", "i")
    layout = _PACKED_AS.get(kind)
    if layout is None:
        scalars = (
            "np.float32({0!r}) or np.float64({0!r})"
            if isinstance(value, float)
            else "np.uint32({0!r}) or np.int64({0!r})"
        )
        reason = (
            why_undeclared
            if declared is ParameterType.UNTOLD
            else f"the parameter, {declared.text}, has no single type"
        )
        hint = (
            f"Write it as a numpy scalar of the parameter's type: {scalars.format(value)}" if is_number(value) else ""
        )
        raise InvalidRequest(f"argument {index}: {quoted(value)} has no size, and {reason}", hint)
    # A float would be cut to an integer, which PTX would not report.
    if isinstance(value, float) and not kind.startswith("f"):
        raise LaunchFailed(
            f"argument {index} is a Python float, but the kernel's parameter is {declared.text}", MATCH_HINT
        )
    # A C compiler declares its signed integers, such as int and char, as unsigned in PTX.
    if value < 0 and kind.startswith("u") and declared is not ParameterType.POINTER:
        kind = kind.replace("u", "i")
    try:
        return kind, struct.pack(_PACKED_AS[kind], value)
    except (struct.error, OverflowError):
        raise InvalidRequest(f"argument {index}: {quoted(value)} does not fit the parameter, {declared.text}") from None


def type_of(kind: ArgumentKind) -> ParameterType:
    """Return an argument's type in PTX's terms; UNTOLD for raw bytes."""
    if isinstance(kind, int):
        return ParameterType.UNTOLD
    return ParameterType.POINTER if kind == "buffer" else ParameterType[kind.upper().replace("I", "S")]


def mismatch(kind: ArgumentKind, declared: ParameterType) -> bool:
    """Return whether an argument is a float where the kernel expects an integer or a pointer, or the reverse.

    Sizes are compared elsewhere. Raw bytes fit any parameter; an integer fits a pointer; signs don't matter.
    """
    return type_of(kind).clashes_with(declared)
