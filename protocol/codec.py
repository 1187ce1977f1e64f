"""Bodies to payloads and back, by the construct definitions. A payload has no byte besides its body's."""

import struct
from dataclasses import fields
from typing import Any, TypeVar

import construct as c

from gpulease.protocol.errors import BodyError, LocalProtocolError
from gpulease.protocol.messages import BODIES, Body, Data, Empty, ErrorBody
from gpulease.protocol.opcodes import Opcode
from gpulease.protocol.primitives import BadValue, Record

T = TypeVar("T", bound=Body)

# Fast paths: construct takes microseconds even for an empty payload or one of fixed-size integers.
_EMPTY = Empty()
_NO_DATA = Data(b"")
_NO_DATA_BYTES = bytes(4)

_SCHEMAS: dict[type[Any], Any] = {
    body: Record(body) for body in {ErrorBody, *(body for pair in BODIES.values() for body in pair)}
}


def _integers_of(kind: type[Any]) -> struct.Struct | None:
    formats = [getattr(item.metadata["wire"], "fmtstr", "") for item in fields(kind)]
    return struct.Struct(">" + "".join(fmt.lstrip(">") for fmt in formats)) if formats and all(formats) else None


_INTEGERS: dict[type[Any], struct.Struct] = {
    body: layout for body in _SCHEMAS if (layout := _integers_of(body)) is not None
}


def build_body(body: Body) -> bytes:
    """Return a body's payload. Raises LocalProtocolError if a field does not fit its encoding."""
    if type(body) is Empty:
        return b""
    try:
        return bytes(_SCHEMAS[type(body)].build(body))
    except (c.ConstructError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise LocalProtocolError(f"{type(body).__name__} can't be encoded: {_reason(error)}") from error


def parse_body(kind: type[T], payload: bytes | memoryview) -> T:
    """Return the body of a payload. Raises BodyError if the payload is malformed, too long or too short."""
    if not payload and kind is Empty:
        return _EMPTY  # type: ignore[return-value]
    layout = _INTEGERS.get(kind)
    if layout is not None and len(payload) == layout.size:
        return kind(*layout.unpack(payload))
    if kind is Data and payload == _NO_DATA_BYTES:
        return _NO_DATA  # type: ignore[return-value]
    schema = _SCHEMAS[kind]
    data = bytes(payload)
    stream = c.io.BytesIO(data)
    try:
        body = schema.parse_stream(stream)
    except c.ConstructError as error:
        raise BodyError(f"{kind.__name__} is malformed: {_reason(error)}") from None
    left = len(data) - stream.tell()
    if left:
        raise BodyError(f"{kind.__name__} is followed by {left} bytes that belong to nothing")
    return body  # type: ignore[no-any-return]


def request_body(op: Opcode) -> type[Body]:
    """Return the class of an operation's request."""
    return BODIES[op][0]


def reply_body(op: Opcode) -> type[Body]:
    """Return the class of an operation's successful reply."""
    return BODIES[op][1]


def _reason(error: Exception) -> str:
    if isinstance(error, BadValue):
        return str(error.args[0]) if error.args else "a value is not allowed"
    if isinstance(error, c.StreamError):
        return "it ends too early"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
