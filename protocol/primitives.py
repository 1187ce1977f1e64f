"""The encodings of all bodies, in construct: integers, bytes, lists, TLVs, optional fields.

All integers are big-endian. `bytes` is a u32 length and the data, `list` a u16 count and the items, `tlv` a u8 type, a
u16 length and the data, `optional` a u8 present flag and the field. Lengths are checked against their limit before the
data is read.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import construct as c
import msgpack

from gpulease.protocol import limits

U8 = c.Int8ub
U16 = c.Int16ub
I16 = c.Int16sb
U32 = c.Int32ub
U64 = c.Int64ub
U128 = c.BytesInteger(16)


class BadValue(c.ConstructError):  # type: ignore[misc]  # construct ships no types
    """A well-encoded value that is not allowed."""


def wire(subcon: Any) -> Any:
    """Return a dataclass field that travels as `subcon`."""
    return field(metadata={"wire": subcon})


def struct_of(record: type[Any]) -> Any:
    """Return the construct Struct of a dataclass whose fields are all made with `wire`."""
    return c.Struct(*(item.name / item.metadata["wire"] for item in fields(record)))


class Record(c.Adapter):  # type: ignore[misc]
    """A construct for a dataclass: parses to an instance, builds from one."""

    def __init__(self, record: type[Any]) -> None:
        super().__init__(struct_of(record))
        self.record = record
        self._names = tuple(item.name for item in fields(record))

    def _decode(self, obj: Any, context: Any, path: str) -> Any:
        return self.record(**{name: obj[name] for name in self._names})

    def _encode(self, obj: Any, context: Any, path: str) -> Any:
        return {name: getattr(obj, name) for name in self._names}


class _Converted(c.Adapter):  # type: ignore[misc]
    """A construct with conversions for parsing and building. Both may raise BadValue."""

    def __init__(self, subcon: Any, decode: Callable[[Any], Any], encode: Callable[[Any], Any]) -> None:
        super().__init__(subcon)
        self._in, self._out = decode, encode

    def _decode(self, obj: Any, context: Any, path: str) -> Any:
        return self._in(obj)

    def _encode(self, obj: Any, context: Any, path: str) -> Any:
        return self._out(obj)


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
    return c.Prefixed(_length(U32, "a bytes field", limit, "bytes"), c.GreedyBytes)


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
    return _Converted(c.PrefixedArray(count, item), tuple, list)


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
    return _Converted(pair, decode, encode)


@dataclass(frozen=True, slots=True)
class Tlv:
    """A type-length-value: a u8 type, a u16 length, the value."""

    type: int = wire(U8)
    value: bytes = wire(c.Prefixed(U16, c.GreedyBytes))


@dataclass(frozen=True, slots=True)
class LeaseParameter:
    """A lease parameter: a u16 tag, a u16 length, the value. The exclusivity class is `09 03 00 01 <class>`."""

    tag: int = wire(U16)
    value: bytes = wire(c.Prefixed(U16, c.GreedyBytes))


TLVS = list_of(Record(Tlv), limits.MAX_TLVS)
LEASE_PARAMETERS = list_of(Record(LeaseParameter), limits.MAX_TLVS)


def _unpack(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, strict_map_key=True)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise BadValue(f"a report is not msgpack: {error}") from None


REPORT = _Converted(sized_bytes(limits.MAX_PAYLOAD_BYTES), _unpack, msgpack.packb)
"""The encoding of one msgpack value in `bytes`, for reports, which are maps by nature."""
