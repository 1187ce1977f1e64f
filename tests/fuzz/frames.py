"""The frame reader and decoder: protocol/framing.py, connection.py, codec.py, fastpath.py, failures.py.

The invariant. Whatever bytes arrive, in whatever pieces:

- they become events of the documented classes; no error is raised, and an ending is the last event;
- they become the same events, whether the bytes arrive at once, in any pieces, or one by one;
- the reader's buffer never exceeds the connection's largest payload plus a header;
- a decoded frame, encoded again, has the same bytes (except msgpack, which has several encodings of a number: there the
  value is the same);
- the codec of the hot path accepts and refuses the same payloads as the definitions, and reads the same values;
- a payload that a definition's plain form accepts, the definition accepts too, and both read and write the same.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, get_args

from gpulease.protocol import (
    Connection,
    EndOfStream,
    Event,
    Goodbye,
    Opcode,
    Reply,
    Request,
    Role,
    State,
    StreamBroken,
    codec,
)
from gpulease.protocol import fastpath as fast
from gpulease.protocol import messages as m
from gpulease.protocol.codec import build_body, parse_body
from gpulease.protocol.connection import reply_trigger
from gpulease.protocol.connection_states import TRANSITIONS
from gpulease.protocol.errors import BodyError, FramingError
from gpulease.protocol.failures import Failure
from gpulease.protocol.framing import HEADER_BYTES, Frame, FrameReader, build_frame
from gpulease.protocol.operations import SPECS
from gpulease.protocol.primitives import NOT_PLAIN

from .draws import Draws
from .vector_seeds import said_by, streams

MAX_BYTES = 4096
SESSION_ID = 9
ROLES = (Role.SERVER, Role.CLIENT)
STATES = (State.SESSION, State.CONTROL, State.OPENING, State.GREETING, State.ATTACHING, State.CLOSED)
LIMITS = (1000, 40, 3000)
ONE_BY_ONE = 3
"""Index of the way to cut a stream into single bytes, which takes a hundred times as long as the others."""

EVENTS = get_args(Event)
ENDINGS = (StreamBroken, EndOfStream, Goodbye)
WITH_REPORTS = (m.Inventory, m.Report)
OPS = tuple(Opcode)


def _is_answered_in(state: State, op: Opcode) -> bool:
    return all((state, reply_trigger(op, refused=refused)) in TRANSITIONS for refused in (False, True))


ASKED = {state: [op for op in OPS if op is not Opcode.GOODBYE and _is_answered_in(state, op)] for state in State}
"""Operations that a client may have in flight, by its state. The first has request number 1, and so on."""


def check(data: bytes) -> None:
    draws = Draws(data)
    role, state, limit = draws.pick(ROLES), draws.pick(STATES), draws.pick(LIMITS)
    way, cuts = draws.below(16), sorted(draws.number(2) for _ in range(3))
    wire = draws.rest()
    whole = events_of(role, state, limit, [wire])
    pieces = [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
    if way == ONE_BY_ONE:
        pieces = [wire[at : at + 1] for at in range(len(wire))]
    assert same(events_of(role, state, limit, pieces), whole)
    for frame in frames_of(wire, limit):
        check_fast_path(frame)
        check_plain_forms(frame)
    if role is Role.SERVER:
        check_encoded_again(wire, whole)
    else:
        for event in whole:
            if not isinstance(event, Reply) or isinstance(event.result, Failure):
                continue
            body = build_body(event.result)
            if isinstance(event.result, WITH_REPORTS):
                assert same(parse_body(type(event.result), body), event.result)
            else:
                assert wire.find(body) >= 0


def same(one: object, other: object) -> bool:
    return one == other or repr(one) == repr(other)


def events_of(role: Role, state: State, limit: int, pieces: list[bytes]) -> list[Event]:
    """Return the events of a connection that receives a stream in these pieces and then its end."""
    connection = Connection(role, max_payload_bytes=limit, state=state)
    if role is Role.CLIENT:
        connection._in_flight = dict(enumerate(ASKED[state], 1))
    most = max(connection.reader._initial_bytes, limit + HEADER_BYTES, max(map(len, pieces), default=0) + limit + 40)
    events: list[Event] = []
    for piece in (*pieces, None):
        if connection.state is State.CLOSED:
            # Bytes after an ending are ignored.
            break
        if piece is None:
            connection.receive_eof()
        else:
            connection.receive_data(piece)
        while (event := connection.next_event()) is not None:
            assert isinstance(event, EVENTS)
            events.append(event)
        assert len(connection.reader.buffer) <= most
    assert not any(isinstance(event, ENDINGS) for event in events[:-1])
    assert state is State.CLOSED or isinstance(events[-1], ENDINGS)
    return events


def frames_of(wire: bytes, limit: int) -> Iterator[Frame]:
    """Yield the complete frames of a stream, up to the first invalid one."""
    reader = FrameReader(limit)
    reader.receive_data(wire)
    with contextlib.suppress(FramingError):
        while (frame := reader.next_frame()) is not None:
            yield frame


def check_encoded_again(wire: bytes, events: list[Event]) -> None:
    """Encode the requests that a daemon received again, and compare the bytes. There is one event for each frame."""
    at = 0
    for event in events:
        if isinstance(event, ENDINGS):
            return
        length = HEADER_BYTES + int.from_bytes(wire[at + 12 : at + 16], "big")
        frame, at = wire[at : at + length], at + length
        if isinstance(event, Request):
            flags = 2 * event.is_quiet
            body = build_body(event.body)
            built = build_frame(event.op, body, request_id=event.request_id, session_id=event.session_id, flags=flags)
            assert built == frame, event


def check_plain_forms(frame: Frame) -> None:
    """Parse a payload in both ways, as each body that it may be."""
    payload = bytes(frame.payload)
    spec = SPECS.get(frame.op)  # type: ignore[call-overload]  # A plain number is equal to its Opcode.
    for kind in () if spec is None else (spec.request, spec.reply):
        schema = codec._SCHEMAS[kind]
        try:
            body, end = schema.plain.read(payload, 0)
        except NOT_PLAIN:
            continue
        if end == len(payload):
            assert same(schema.parse(payload), body)
            assert isinstance(body, WITH_REPORTS) or schema.plain.write(body) == schema.build(body) == payload


def check_fast_path(frame: Frame) -> None:
    """Decode a payload with both codecs, and compare."""
    payload = memoryview(frame.payload)
    if (fixed := FIXED.get(frame.op)) is not None:
        layout, kind = fixed
        check_equal(kind, payload, lambda: fast.parse_fixed(layout, kind, payload))
    elif frame.op == Opcode.MEM_WRITE:
        check_equal(m.MemWrite, payload, lambda: fast.parse_mem_write(payload))
    elif frame.op == Opcode.GRAPH_LAUNCH:
        check_equal(m.GraphLaunch, payload, lambda: fast.parse_graph_launch(payload))
    elif frame.op == Opcode.GRAPH_LAUNCH_IN:
        check_equal(m.GraphLaunchIn, payload, lambda: graph_launch_in(payload))
    elif frame.op in (Opcode.LAUNCH, Opcode.LAUNCH_IN):
        check_launch(Opcode(frame.op), payload)


def graph_launch_in(payload: memoryview) -> tuple[Any, ...]:
    rest, *regions = fast.split_regions(payload)
    return *fast.parse_graph_launch(rest), *regions


FIXED = {
    int(op): (fast.LAYOUTS[spec.request], spec.request) for op, spec in SPECS.items() if spec.request in fast.LAYOUTS
}


def check_equal(kind: type[Any], payload: memoryview, parse: Callable[[], tuple[Any, ...]]) -> None:
    body = parsed(kind, payload)
    try:
        values = parse()
    except BodyError:
        assert body is None
        return
    assert body is not None
    assert kind(*(bytes(value) if isinstance(value, memoryview) else value for value in values)) == body


def check_launch(op: Opcode, payload: memoryview) -> None:
    """Check that a launch is split into its shape and arguments, and that a pattern made from it matches its frame."""
    body = parsed(SPECS[op].request, payload)
    try:
        plain, *regions = fast.split_regions(payload) if op is Opcode.LAUNCH_IN else (payload,)
        shape, args = fast.split_launch(plain)
    except BodyError:
        assert body is None
        return
    assert len(shape) + len(args) == len(plain)
    if body is None:
        return
    assert body.args == args
    pattern = fast.LaunchPattern(payload, SESSION_ID, op)
    frame = build_frame(op, bytes(payload), request_id=1, session_id=SESSION_ID, flags=2)
    assert frame[: len(pattern.front)] == pattern.front
    assert frame[fast.MIDDLE_AT : pattern.args_at] == pattern.middle
    assert frame[pattern.args_at : pattern.args_end] == args
    assert frame[pattern.args_end : len(frame) - pattern.trailer_bytes] == pattern.tail
    if sum(body.arg_sizes) == len(args):
        assert fast.LaunchTemplate(parsed(m.Launch, plain), SESSION_ID, op).frame(1, args, *regions) == frame


def parsed(kind: type[Any], payload: memoryview) -> Any:
    try:
        return parse_body(kind, payload)
    except BodyError:
        return None


def seeds() -> Iterator[bytes]:
    for wire in dict.fromkeys([*streams(), *said_by("client")]):
        for number in range(3):
            yield bytes([0, number, number, ONE_BY_ONE, 0, 3, 0, 41, 0, 90]) + wire
    for wire in dict.fromkeys([*streams(), *said_by("daemon")]):
        for number, state in enumerate(STATES):
            yield bytes([1, number, 2, 2, 0, 0, 0, 40, 0, 41]) + renumbered(wire, state)


def renumbered(wire: bytes, state: State) -> bytes:
    """Return the same frames as replies to the requests in flight."""
    numbers = {int(op): number for number, op in enumerate(ASKED[state], 1)}
    data, at = bytearray(wire), 0
    for frame in frames_of(wire, MAX_BYTES):
        if frame.request_id:
            data[at + 16 : at + 24] = numbers.get(frame.op, frame.request_id).to_bytes(8, "big")
        at += HEADER_BYTES + len(frame.payload)
    return bytes(data)
