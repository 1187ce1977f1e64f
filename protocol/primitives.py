"""The encodings of all bodies, in construct: integers, bytes, lists, TLVs, optional fields.

All integers are big-endian. `bytes` is a u32 length and the data, `list` a u16 count and the items, `tlv` a u8 type, a
u16 length and the data, `optional` a u8 present flag and the field. Lengths are checked against their limit before the
data is read.

The constructs are the definition. Next to each is its `Plain` form, which the codec tries first.
"""

import struct
from collections.abc import Callable
from dataclasses import field, fields
from operator import attrgetter
from typing import Any, Final

import construct as c
import msgpack

from gpulease.protocol import limits
from gpulease.protocol.fast_dataclass import dataclass

U8 = c.Int8ub
U16 = c.Int16ub
I16 = c.Int16sb
U32 = c.Int32ub
U64 = c.Int64ub
U128 = c.BytesInteger(16)


class BadValue(c.ConstructError):  # type: ignore[misc]  # construct ships no types
    """A well-encoded value that is not allowed."""


@dataclass(frozen=True, slots=True)
class Plain:
    """An encoding by `struct` alone, because construct takes 5 to 20 times as long.

    Both functions raise one of the errors NOT_PLAIN for input that the construct might refuse. A read may end beyond
    the payload's end, so the caller compares the offset. Apart from that, it accepts what the construct accepts, with
    the same result.

    Attributes:
        read: Takes a payload and the value's offset; returns the value and the offset after it.
        write: Takes a value; returns its bytes.
    """

    read: Callable[[bytes, int], tuple[Any, int]]
    write: Callable[[Any], bytes]


NOT_PLAIN: Final = (struct.error, c.ConstructError, ValueError, TypeError, AttributeError, OverflowError)
"""Errors of a `Plain` after which the construct decides whether, and why, the input is wrong."""

_U8: Final = struct.Struct(">B")
_U16: Final = struct.Struct(">H")
_U32: Final = struct.Struct(">I")
_U128_BYTES: Final = 16


def plain_of(subcon: Any) -> Plain:
    """Return the plain form of an encoding of this module."""
    # There are three kinds: construct's integers, which have a format for struct; the one integer for which struct has
    # no letter; and the constructs of this module, which have their plain form in the attribute `plain`.
    if isinstance(subcon, c.FormatField):
        return _plain_integer(struct.Struct(subcon.fmtstr))
    if subcon is U128:
        return _PLAIN_U128
    plain: Plain = subcon.plain
    return plain


def _plain_integer(layout: struct.Struct) -> Plain:
    size, unpack_from = layout.size, layout.unpack_from
    return Plain(lambda data, at: (unpack_from(data, at)[0], at + size), layout.pack)


def _read_u128(data: bytes, at: int) -> tuple[int, int]:
    return int.from_bytes(data[at : at + _U128_BYTES], "big"), at + _U128_BYTES


_PLAIN_U128: Final = Plain(_read_u128, lambda value: value.to_bytes(_U128_BYTES, "big"))


def _plain_bytes(length: struct.Struct, limit: int) -> Plain:
    size, unpack_from = length.size, length.unpack_from

    def read(data: bytes, at: int) -> tuple[bytes, int]:
        (count,) = unpack_from(data, at)
        # Check the limit first. Slicing by an announced length is harmless, but the next field would be read at a wild
        # offset.
        if count > limit:
            raise BadValue
        begin = at + size
        return data[begin : begin + count], begin + count

    def write(value: Any) -> bytes:
        # Other objects have a length too, but perhaps not in bytes.
        if type(value) is not bytes or len(value) > limit:
            raise BadValue
        return length.pack(len(value)) + value

    return Plain(read, write)


def _plain_list(item: Plain, limit: int) -> Plain:
    read_item, write_item = item.read, item.write

    def read(data: bytes, at: int) -> tuple[tuple[Any, ...], int]:
        (count,) = _U16.unpack_from(data, at)
        # Check the count first, so that a list over the limit takes no time.
        if count > limit:
            raise BadValue
        at += _U16.size
        values = []
        for _ in range(count):
            value, at = read_item(data, at)
            values.append(value)
            # Stop as soon as the offset is beyond the data: a count of 65,535 must not read 65,535 empty items.
            if at > len(data):
                raise BadValue
        return tuple(values), at

    def write(values: Any) -> bytes:
        if len(values) > limit:
            raise BadValue
        return b"".join((_U16.pack(len(values)), *map(write_item, values)))

    return Plain(read, write)


def _plain_optional(item: Plain) -> Plain:
    def read(data: bytes, at: int) -> tuple[Any, int]:
        (flag,) = _U8.unpack_from(data, at)
        # A flag of 2 may have a meaning in a later version; construct names the flag in its error.
        if flag > 1:
            raise BadValue
        return item.read(data, at + 1) if flag else (None, at + 1)

    return Plain(read, lambda value: b"\0" if value is None else b"\1" + item.write(value))


def _plain_record(record: type[Any]) -> Plain:
    """Return a record's plain form: one struct reads neighbouring integers, and every other field has its own form."""
    runs: list[tuple[struct.Struct | Plain, list[str]]] = []
    for item in fields(record):
        subcon = item.metadata["wire"]
        form, named = runs[-1] if runs else (None, [])
        # A field with another encoding ends the preceding run of integers.
        if not isinstance(subcon, c.FormatField):
            runs.append((plain_of(subcon), [item.name]))
        elif isinstance(form, struct.Struct):
            # Leave out the second format's byte order, because a struct has it only at the beginning.
            runs[-1] = (struct.Struct(form.format + subcon.fmtstr[1:]), [*named, item.name])
        else:
            runs.append((struct.Struct(subcon.fmtstr), [item.name]))
    # A record of integers alone needs neither steps nor a list: one unpack makes the instance.
    first = runs[0][0] if runs else None
    if len(runs) == 1 and isinstance(first, struct.Struct):
        return _plain_integers(record, first, runs[0][1])
    # Otherwise alternate: a struct for each run of integers, a plain form for each field between them.
    steps = [form for form, _ in runs]
    writes = [_run_writer(form, named) for form, named in runs]
    # The options of a message are a tag and bytes. ATTACH's reply has some twenty, so read each in one step.
    last = fields(record)[-1].metadata["wire"] if len(fields(record)) == 2 else None
    if isinstance(first, struct.Struct) and isinstance(last, _Sized):
        return Plain(_tagged_reader(record, first, last), lambda value: b"".join([write(value) for write in writes]))

    def read(data: bytes, at: int) -> tuple[Any, int]:
        values: list[Any] = []
        for step in steps:
            if isinstance(step, Plain):
                value, at = step.read(data, at)
                values.append(value)
            else:
                values += step.unpack_from(data, at)
                at += step.size
        return record(*values), at

    return Plain(read, lambda value: b"".join([write(value) for write in writes]))


def _tagged_reader(record: type[Any], tag: struct.Struct, value: "_Sized") -> Callable[[bytes, int], tuple[Any, int]]:
    """Return the reader of a record of an integer, a length, and that many bytes."""
    layout = struct.Struct(tag.format + value.width.format[1:])
    size, unpack_from, limit = layout.size, layout.unpack_from, value.limit

    def read(data: bytes, at: int) -> tuple[Any, int]:
        number, count = unpack_from(data, at)
        if count > limit:
            raise BadValue
        begin = at + size
        end = begin + count
        return record(number, data[begin:end]), end

    return read


def _plain_integers(record: type[Any], layout: struct.Struct, names: list[str]) -> Plain:
    """Return the plain form of a record that has only integers, as most requests of a session do."""
    size, unpack_from = layout.size, layout.unpack_from

    def read(data: bytes, at: int) -> tuple[Any, int]:
        return record(*unpack_from(data, at)), at + size

    return Plain(read, _run_writer(layout, names))


def _run_writer(form: struct.Struct | Plain, names: list[str]) -> Callable[[Any], bytes]:
    # attrgetter gives a tuple for several names, and the bare value for one.
    get = attrgetter(*names)
    if isinstance(form, Plain):
        write = form.write
        return lambda record: write(get(record))
    pack = form.pack
    return (lambda record: pack(*get(record))) if len(names) > 1 else lambda record: pack(get(record))


def wire(subcon: Any) -> Any:
    """Return a dataclass field that is encoded as `subcon`."""
    return field(metadata={"wire": subcon})


def struct_of(record: type[Any]) -> Any:
    """Return the construct Struct of a dataclass with fields that are all made with `wire`."""
    return c.Struct(*(item.name / item.metadata["wire"] for item in fields(record)))


class Record(c.Adapter):  # type: ignore[misc]
    """A construct for a dataclass: parses to an instance, builds from one."""

    def __init__(self, record: type[Any]) -> None:
        super().__init__(struct_of(record))
        self.record = record
        self._names = tuple(item.name for item in fields(record))
        self.plain = _plain_record(record)

    def _decode(self, obj: Any, context: Any, path: str) -> Any:
        return self.record(**{name: obj[name] for name in self._names})

    def _encode(self, obj: Any, context: Any, path: str) -> Any:
        return {name: getattr(obj, name) for name in self._names}


class _Converted(c.Adapter):  # type: ignore[misc]
    """A construct with conversions for parsing and building. Both may raise BadValue."""

    def __init__(
        self, subcon: Any, decode: Callable[[Any], Any], encode: Callable[[Any], Any], plain: Plain | None = None
    ) -> None:
        """Combine a construct and its conversions.

        Args:
            subcon: The construct.
            decode: Converts a parsed value.
            encode: Converts a value to build.
            plain: The plain form of the result; None to derive it from that of `subcon`.
        """
        super().__init__(subcon)
        self._in, self._out = decode, encode
        self.plain = plain or self._plain_converted(plain_of(subcon))

    def _plain_converted(self, inner: Plain) -> Plain:
        decode, encode = self._in, self._out

        def read(data: bytes, at: int) -> tuple[Any, int]:
            value, at = inner.read(data, at)
            return decode(value), at

        return Plain(read, lambda value: inner.write(encode(value)))

    def _decode(self, obj: Any, context: Any, path: str) -> Any:
        return self._in(obj)

    def _encode(self, obj: Any, context: Any, path: str) -> Any:
        return self._out(obj)


class _Sized(c.Prefixed):  # type: ignore[misc]
    """A construct of a length, at most `limit`, and that many bytes. `width` is the length's plain layout."""

    def __init__(self, length: Any, width: struct.Struct, limit: int) -> None:
        super().__init__(length, c.GreedyBytes)
        self.width, self.limit = width, limit
        self.plain = _plain_bytes(width, limit)


def _bounded(kind: str, limit: int, unit: str) -> Callable[[int], int]:
    def check(count: int) -> int:
        if count > limit:
            raise BadValue(f"{kind} of {count} {unit}; at most {limit} are allowed")
        return count

    return check


def _length(width: Any, kind: str, limit: int, unit: str) -> Any:
    check = _bounded(kind, limit, unit)
    return _Converted(width, check, check)


def sized_bytes(limit: int) -> Any:
    """Return the encoding `bytes`: a u32 length, at most `limit`, and that many bytes."""
    return _Sized(_length(U32, "a bytes field", limit, "bytes"), _U32, limit)


def text(limit: int = limits.MAX_TEXT_BYTES) -> Any:
    """Return the encoding of UTF-8 text in `bytes`."""

    def decode(data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise BadValue(f"a text field is not UTF-8: {error}") from None

    return _Converted(sized_bytes(limit), decode, lambda value: value.encode())


def list_of(item: Any, limit: int) -> Any:
    """Return the encoding `list`: a u16 count, at most `limit`, and the items. Its value is a tuple."""
    count = _length(U16, "a list", limit, "items")
    # Construct parses to a list; bodies hold tuples, so that they are hashable and frozen as a whole.
    return _Converted(c.PrefixedArray(count, item), tuple, list, _plain_list(plain_of(item), limit))


def optional(item: Any) -> Any:
    """Return the encoding `optional`: a u8 present flag, and the field if the flag is 1. A flag of 0 means None."""

    def decode(parsed: Any) -> Any:
        return parsed.value

    def encode(value: Any) -> Any:
        return {"present": value is not None, "value": value}

    def flag(raw: int) -> bool:
        if raw > 1:
            raise BadValue(f"a present flag of {raw}; it is 0 or 1")
        return bool(raw)

    pair = c.Struct("present" / _Converted(U8, flag, int), "value" / c.If(c.this.present, item))
    return _Converted(pair, decode, encode, _plain_optional(plain_of(item)))


@dataclass(frozen=True, slots=True)
class Tlv:
    """A type-length-value: a u8 type, a u16 length, the value."""

    type: int = wire(U8)
    value: bytes = wire(_Sized(U16, _U16, 0xFFFF))


@dataclass(frozen=True, slots=True)
class LeaseParameter:
    """A lease parameter: a u16 tag, a u16 length, the value. The exclusivity class is `09 03 00 01 <class>`."""

    tag: int = wire(U16)
    value: bytes = wire(_Sized(U16, _U16, 0xFFFF))


TLVS = list_of(Record(Tlv), limits.MAX_TLVS)
LEASE_PARAMETERS = list_of(Record(LeaseParameter), limits.MAX_TLVS)


def _unpack(data: bytes) -> Any:
    # msgpack nests without a bound, so a hostile report can exhaust the stack: that is a bad value too.
    try:
        return msgpack.unpackb(data, strict_map_key=True)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise BadValue(f"a report is not msgpack: {error}") from None


REPORT = _Converted(sized_bytes(limits.MAX_PAYLOAD_BYTES), _unpack, msgpack.packb)
"""The encoding of one msgpack value in `bytes`, for reports, which are maps by nature."""
