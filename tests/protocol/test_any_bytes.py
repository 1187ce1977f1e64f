"""Whatever bytes come, however they are cut: events, and never another exception than the documented ones."""

from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.protocol import (
    Connection,
    EndOfStream,
    Event,
    Goodbye,
    Opcode,
    Role,
    State,
    Status,
    StreamBroken,
)
from gpulease.protocol.codec import build_body
from gpulease.protocol.connection import request_trigger
from gpulease.protocol.connection_states import TRANSITIONS
from gpulease.protocol.framing import build_frame

from . import strategies
from .peers import SESSION_ID, events_of, fed

EVENTS = get_args(Event)
ENDINGS = (StreamBroken, EndOfStream, Goodbye)


def connection_in(role: Role, state: State, limit: int) -> Connection:
    """A connection with what its state allows asked, so that replies can be right."""
    connection = Connection(role, max_payload_bytes=limit, state=state)
    if role is Role.CLIENT:
        asked = {1: Opcode.PING, 2: Opcode.SYNC, 3: Opcode.LEASE_QUERY}
        connection._in_flight = {at: op for at, op in asked.items() if (state, request_trigger(op)) in TRANSITIONS}
    return connection


def checked_events(connection: Connection, chunks: list[bytes]) -> list[Event]:
    events = fed(connection, chunks)
    connection.receive_eof()
    events += events_of(connection)
    assert all(isinstance(event, EVENTS) for event in events)
    assert not any(isinstance(event, ENDINGS) for event in events[:-1])
    assert len(connection.reader.buffer) <= max(connection.reader._initial_bytes, 40 + 1000)
    return events


FRAMES = st.builds(
    lambda op, payload, request_id, flags, status: build_frame(
        op, payload, request_id=request_id, session_id=SESSION_ID, flags=flags, status=status if flags & 1 else 0
    ),
    st.sampled_from([*Opcode, 0x7777]),
    strategies.BODIES.map(build_body) | st.binary(max_size=60),
    st.integers(0, 4),
    st.sampled_from([0, 1, 2]),
    st.sampled_from([0, 0, Status.INTERNAL]),
)


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    wire=st.binary(max_size=150) | st.binary(max_size=100).map(b"GPLS\1\0\0\3".__add__),
    role=st.sampled_from(Role),
    state=st.sampled_from(State),
)
def test_any_bytes_give_events_and_nothing_else(data: st.DataObject, wire: bytes, role: Role, state: State) -> None:
    checked_events(connection_in(role, state, 1000), data.draw(strategies.chunks(wire)))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), frames=st.lists(FRAMES, max_size=4), tail=st.binary(max_size=45), role=st.sampled_from(Role))
def test_any_frames_give_the_same_events_however_they_come(
    data: st.DataObject, frames: list[bytes], tail: bytes, role: Role
) -> None:
    wire = b"".join(frames) + tail
    state = data.draw(st.sampled_from([State.OPENING, State.CONTROL, State.SESSION]))
    in_pieces = [data.draw(strategies.chunks(wire)), [wire], [bytes([byte]) for byte in wire]]
    whole, *others = (checked_events(connection_in(role, state, 1000), chunks) for chunks in in_pieces)
    assert all(other == whole for other in others)
