"""Converts bodies to payloads and back, by the construct definitions. A payload consists of exactly its body's bytes.

The plain form of a definition is tried first. If it fails, construct decides whether the body or payload is valid, and
describes the mistake.
"""

from typing import Any, Final, TypeVar

import construct as c

from gpulease.protocol.errors import BodyError, LocalProtocolError
from gpulease.protocol.messages import AttachReply, Body, Empty, ErrorBody, Hello, HelloReply
from gpulease.protocol.opcodes import Opcode
from gpulease.protocol.operations import SPECS
from gpulease.protocol.primitives import NOT_PLAIN, BadValue, Record

T = TypeVar("T", bound=Body)

_EMPTY = Empty()

_REQUESTS: Final = {op: spec.request for op, spec in SPECS.items()}
_REPLIES: Final = {op: spec.reply for op, spec in SPECS.items()}
_BODIES: Final[set[type[Body]]] = {ErrorBody, *_REQUESTS.values(), *_REPLIES.values()}
_SCHEMAS: Final[dict[type[Body], Any]] = {body: Record(body) for body in _BODIES}

_GREETINGS: Final = frozenset({Hello, HelloReply, AttachReply})
"""Classes of the bodies that begin a connection. Nearly all connections of a process send and receive equal ones."""

MAX_GREETING_BYTES: Final = 1024
"""Largest payload of a greeting that is kept."""

_last_built: dict[type[Body], tuple[bytes, Body]] = {}
_last_parsed: dict[type[Body], tuple[bytes, Body]] = {}
"""The payload and body of the last greeting of each kind that was built, and of the last one that was parsed."""


def build_body(body: Body) -> bytes:
    """Return a body's payload. Raises LocalProtocolError if a field does not fit its encoding."""
    if type(body) is Empty:
        return b""
    kind = type(body)
    is_greeting = kind in _GREETINGS
    if is_greeting and (last := _last_built.get(kind)) is not None and last[1] == body:
        return last[0]
    schema = _SCHEMAS[kind]
    # Step 1: try the plain form. It raises for everything that construct might refuse, so its result is final.
    plain: bytes | None
    try:
        plain = schema.plain.write(body)
    except NOT_PLAIN:
        plain = None
    if plain is not None:
        if is_greeting and len(plain) <= MAX_GREETING_BYTES:
            _last_built[kind] = plain, body
        return plain
    # Step 2: use construct, for its decision and its message. A valid value that the plain form refused is encoded
    # here.
    try:
        return bytes(schema.build(body))
    except (c.ConstructError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise LocalProtocolError(f"{type(body).__name__} can't be encoded: {_reason(error)}") from error


def parse_body(kind: type[T], payload: bytes | memoryview) -> T:
    """Return the body of a payload. Raises BodyError if the payload is malformed, too long or too short."""
    if not payload and kind is Empty:
        return _EMPTY  # type: ignore[return-value]
    schema, data = _SCHEMAS[kind], bytes(payload)
    # For the same bytes, return the same body as before, because a body can't change.
    is_greeting = kind in _GREETINGS
    if is_greeting and (last := _last_parsed.get(kind)) is not None and last[0] == data:
        return last[1]  # type: ignore[return-value]
    # Step 1: try the plain form, which must also have used every byte. If a read went past the payload's end, the
    # returned offset differs from the payload's length.
    try:
        body, end = schema.plain.read(data, 0)
    except NOT_PLAIN:
        end = -1
    if end == len(data):
        if is_greeting and len(data) <= MAX_GREETING_BYTES:
            _last_parsed[kind] = data, body
        return body  # type: ignore[no-any-return]
    # Step 2: construct decides whether the payload is malformed, and says where.
    stream = c.io.BytesIO(data)
    try:
        body = schema.parse_stream(stream)
    except c.ConstructError as error:
        raise BodyError(f"{kind.__name__} is malformed: {_reason(error)}") from None
    # Refuse bytes after the body, so that no sender can rely on a receiver that skips them.
    rest_bytes = len(data) - stream.tell()
    if rest_bytes:
        raise BodyError(f"{kind.__name__} is followed by {rest_bytes} bytes that do not belong to it")
    return body  # type: ignore[no-any-return]


def request_body(op: Opcode) -> type[Body]:
    """Return the class of an operation's request."""
    return _REQUESTS[op]


def reply_body(op: Opcode) -> type[Body]:
    """Return the class of an operation's successful reply."""
    return _REPLIES[op]


def _reason(error: Exception) -> str:
    # Choose the most helpful text: our own, then the end of the payload, then construct's first line. Its other lines
    # describe its call path.
    if isinstance(error, BadValue):
        return str(error.args[0]) if error.args else "a value is not allowed"
    if isinstance(error, c.StreamError):
        return "it ends too early"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
