from typing import Any

import pytest

from gpulease.protocol import Connection, Failure, LocalProtocolError, Opcode, Rejected, Reply, Request, Role, Status
from gpulease.protocol import messages as m
from gpulease.protocol.codec import build_body, reply_body, request_body
from gpulease.protocol.connection import reply_trigger, request_trigger
from gpulease.protocol.connection_states import TRANSITIONS, State, WireTrigger
from gpulease.protocol.framing import build_frame
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.opcodes import Flag
from gpulease.protocol.operations import SESSION_OPCODES

from .encodings import Encoding, fields_of
from .peers import SESSION_ID, events_of

# Drawn by hand, row by row: what the table must say, not what it says.
ALLOWED = {
    State.OPENING: {WireTrigger.HELLO: State.GREETING},
    State.GREETING: {WireTrigger.HELLO_REPLY: State.CONTROL, WireTrigger.HELLO_REFUSED: State.CLOSED},
    State.CONTROL: {
        WireTrigger.CONTROL_REQUEST: State.CONTROL,
        WireTrigger.CONTROL_REPLY: State.CONTROL,
        WireTrigger.PING: State.CONTROL,
        WireTrigger.PING_REPLY: State.CONTROL,
        WireTrigger.ATTACH: State.ATTACHING,
    },
    State.ATTACHING: {WireTrigger.ATTACH_REPLY: State.SESSION, WireTrigger.ATTACH_REFUSED: State.CONTROL},
    State.SESSION: {
        WireTrigger.SESSION_REQUEST: State.SESSION,
        WireTrigger.SESSION_REPLY: State.SESSION,
        WireTrigger.PING: State.SESSION,
        WireTrigger.PING_REPLY: State.SESSION,
    },
    State.CLOSED: {},
}
ASKED = [op for op in Opcode if request_trigger(op) is not None]


def minimal(encoding: Encoding) -> Any:
    """The smallest value of an encoding."""
    if encoding.size is not None:
        return 0
    return {"bytes": b"", "text": "", "msgpack": None, "optional": None, "list": ()}[encoding.kind]


def smallest(kind: type[m.Body]) -> m.Body:
    return kind(**{name: minimal(encoding) for name, encoding in fields_of(kind).items()})


def server_in(state: State) -> Connection:
    return Connection(Role.SERVER, max_payload_bytes=MAX_PAYLOAD_BYTES, state=state)


def client_in(state: State, in_flight: dict[int, Opcode] | None = None) -> Connection:
    client = Connection(Role.CLIENT, max_payload_bytes=MAX_PAYLOAD_BYTES, state=state)
    client._in_flight = in_flight or {}
    return client


def test_the_table_is_the_one_drawn_here() -> None:
    drawn = {(state, trigger): after for state in State for trigger, after in ALLOWED[state].items()}
    assert drawn == TRANSITIONS


def test_every_operation_has_a_trigger_both_ways() -> None:
    for op in ASKED:
        trigger = request_trigger(op)
        assert trigger is not None
        replies = {reply_trigger(op, refused=refused) for refused in (False, True)}
        # Where a request is allowed, both its answers are.
        for state in State:
            if (after := TRANSITIONS.get((state, trigger))) is not None:
                assert all(reply is not None and (after, reply) in TRANSITIONS for reply in replies)
    assert set(Opcode) - set(ASKED) == {Opcode.GOODBYE, Opcode.LEASE_EVENT, Opcode.REGION_EVENT}
    assert {op for op in ASKED if request_trigger(op) is WireTrigger.SESSION_REQUEST} == SESSION_OPCODES


@pytest.mark.parametrize("state", [state for state in State if state is not State.CLOSED])
def test_a_server_takes_what_the_table_allows(state: State) -> None:
    for op in ASKED:
        server = server_in(state)
        body = smallest(request_body(op))
        server.receive_data(build_frame(op, build_body(body), request_id=1, session_id=SESSION_ID))
        (event,) = events_of(server)
        trigger = request_trigger(op)
        assert trigger is not None
        if trigger in ALLOWED[state]:
            assert event == Request(op, 1, SESSION_ID, False, body)
            assert server.state is ALLOWED[state][trigger]
        else:
            assert isinstance(event, Rejected), op
            assert event.failure.status is Status.INVALID_REQUEST
            assert server.state is state


@pytest.mark.parametrize("state", State)
def test_a_client_sends_what_the_table_allows(state: State) -> None:
    for op in ASKED:
        client = client_in(state)
        trigger = request_trigger(op)
        assert trigger is not None
        if trigger in ALLOWED[state]:
            client.send_request(op, smallest(request_body(op)), session_id=SESSION_ID)
            assert client.state is ALLOWED[state][trigger], op
            assert client.in_flight == 1
        else:
            with pytest.raises(LocalProtocolError, match=f"{op.name} is not allowed in state {state.name}"):
                client.send_request(op, smallest(request_body(op)), session_id=SESSION_ID)
            assert client.state is state
            assert client.in_flight == 0


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("state", State)
def test_both_sides_move_alike_by_a_reply(state: State, refused: bool) -> None:
    for op in ASKED:
        check_a_reply(state, op, refused)


def check_a_reply(state: State, op: Opcode, refused: bool) -> None:
    request = Request(op, 1, SESSION_ID, False, smallest(request_body(op)))
    server, client = server_in(state), client_in(state, {1: op})
    server._in_flight = {1: op}
    trigger = reply_trigger(op, refused=refused)
    assert trigger is not None
    failure = Failure(Status.INTERNAL, "no")

    def answer() -> bytes:
        return server.send_failure(request, failure) if refused else server.send_reply(request, body)

    body = smallest(reply_body(op))
    if trigger not in ALLOWED[state]:
        with pytest.raises(LocalProtocolError):
            answer()
        assert (server.state, server.in_flight) == (state, 1), op
        return
    client.receive_data(answer())
    assert events_of(client) == [Reply(op, 1, failure if refused else body)]
    assert client.state is server.state is ALLOWED[state][trigger]
    assert client.in_flight == server.in_flight == 0


def test_a_closed_connection_says_nothing() -> None:
    for connection in (server_in(State.CLOSED), client_in(State.CLOSED)):
        connection.receive_data(build_frame(Opcode.PING, bytes(8), request_id=1, flags=Flag.REPLY))
        connection.receive_eof()
        assert connection.next_event() is None
