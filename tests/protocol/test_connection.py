import pytest

from gpulease.protocol import (
    Connection,
    EndOfStream,
    Failure,
    Goodbye,
    LocalProtocolError,
    Opcode,
    Rejected,
    Reply,
    Request,
    Role,
    State,
    Status,
    StreamBroken,
)
from gpulease.protocol import messages as m
from gpulease.protocol.codec import build_body
from gpulease.protocol.framing import HEADER_BYTES, build_frame
from gpulease.protocol.limits import MAX_CONTROL_PAYLOAD_BYTES, MAX_IN_FLIGHT, MAX_PAYLOAD_BYTES
from gpulease.protocol.opcodes import Flag
from gpulease.protocol.operations import SESSION_OPCODES

from .peers import ATTACH_REPLY, HELLO, HELLO_REPLY, SESSION_ID, Pair, events_of, pair_in, request_of


def ping(request_id: int, *, flags: int = 0, op: int = Opcode.PING) -> bytes:
    return build_frame(op, build_body(m.Ping(1)), request_id=request_id, flags=flags)


def broken(connection: Connection, wire: bytes) -> Failure:
    connection.receive_data(wire)
    (event,) = events_of(connection)
    assert isinstance(event, StreamBroken)
    assert connection.state is State.CLOSED
    return event.failure


def rejected(connection: Connection, wire: bytes) -> Failure:
    before = connection.state, connection.in_flight
    connection.receive_data(wire)
    (event,) = events_of(connection)
    assert isinstance(event, Rejected)
    assert (connection.state, connection.in_flight) == before
    return event.failure


# --- what is allowed ---


def test_a_request_and_its_reply() -> None:
    pair = pair_in(State.CONTROL)
    request = pair.ask(Opcode.PING, m.Ping(7))
    assert request == Request(Opcode.PING, 2, 0, False, m.Ping(7))
    assert pair.answer(request, m.Ping(7)) == Reply(Opcode.PING, 2, m.Ping(7))


def test_a_request_and_its_refusal() -> None:
    pair = pair_in(State.CONTROL)
    request = pair.ask(Opcode.LEASE_FREE, m.LeaseRef(9))
    failure = Failure(Status.NOT_FOUND, "there is no lease 9", hint="list them")
    pair.client.receive_data(pair.server.send_failure(request, failure))
    assert events_of(pair.client) == [Reply(Opcode.LEASE_FREE, 2, failure)]
    assert pair.client.in_flight == pair.server.in_flight == 0


@pytest.mark.parametrize(
    ("op", "body", "reply", "reached"),
    [
        (Opcode.PING, m.Ping(7), m.Ping(7), State.CONTROL),
        (Opcode.ATTACH, m.Attach(()), ATTACH_REPLY, State.SESSION),
    ],
    ids=["control", "attach"],
)
def test_a_request_right_behind_hello(op: Opcode, body: m.Body, reply: m.Body, reached: State) -> None:
    pair = Pair()
    _, hello = pair.client.send_request(Opcode.HELLO, HELLO)
    number, behind = pair.client.send_behind_hello(op, body, session_id=SESSION_ID)
    pair.server.receive_data(hello + behind)
    first = pair.server.next_event()
    assert isinstance(first, Request)
    answers = pair.server.send_reply(first, HELLO_REPLY)
    second = request_of(pair.server)
    assert second == Request(op, number, SESSION_ID, False, body)
    pair.client.receive_data(answers + pair.server.send_reply(second, reply))
    assert events_of(pair.client) == [Reply(Opcode.HELLO, 1, HELLO_REPLY), Reply(op, number, reply)]
    assert pair.client.state is pair.server.state is reached


def test_what_may_not_stand_behind_hello() -> None:
    client = Connection(Role.CLIENT, max_payload_bytes=MAX_PAYLOAD_BYTES)
    with pytest.raises(LocalProtocolError, match="right after HELLO now"):
        client.send_behind_hello(Opcode.PING, m.Ping(1))
    client.send_request(Opcode.HELLO, HELLO)
    for op, body in ((Opcode.SYNC, m.Empty()), (Opcode.HELLO, HELLO), (Opcode.PING, m.Empty())):
        with pytest.raises(LocalProtocolError, match="right after HELLO"):
            client.send_behind_hello(op, body)
    client.send_behind_hello(Opcode.PING, m.Ping(1))
    with pytest.raises(LocalProtocolError, match="right after HELLO now"):
        client.send_behind_hello(Opcode.PING, m.Ping(1))


def test_a_reply_that_comes_before_hellos_breaks_the_stream() -> None:
    client = Connection(Role.CLIENT, max_payload_bytes=MAX_PAYLOAD_BYTES)
    client.send_request(Opcode.HELLO, HELLO)
    number, _ = client.send_behind_hello(Opcode.PING, m.Ping(1))
    assert "was not sent" in broken(client, ping(number, flags=Flag.REPLY)).message


def test_replies_may_come_in_any_order() -> None:
    pair = pair_in(State.CONTROL)
    requests = [pair.ask(Opcode.PING, m.Ping(nonce)) for nonce in range(5)]
    assert pair.client.in_flight == pair.server.in_flight == 5
    for request in (requests[3], requests[0], requests[4], requests[1], requests[2]):
        assert pair.answer(request, request.body).request_id == request.request_id


def test_quiet_requests_have_no_reply() -> None:
    pair = pair_in(State.SESSION)
    launch = m.Launch(1, "k", 1, 1, 1, 1, 1, 1, 0, b"", ())
    request_id, wire = pair.client.send_request(Opcode.LAUNCH, launch, session_id=SESSION_ID, quiet=True)
    pair.server.receive_data(wire)
    request = request_of(pair.server)
    assert request == Request(Opcode.LAUNCH, request_id, SESSION_ID, True, launch)
    assert pair.client.in_flight == pair.server.in_flight == 0
    with pytest.raises(LocalProtocolError, match="was quiet"):
        pair.server.send_reply(request, m.Empty())


def test_frames_built_elsewhere_share_the_numbering() -> None:
    pair = pair_in(State.SESSION)
    first = pair.client.next_request_id()
    second = pair.client.expect_reply(Opcode.SYNC)
    third, _ = pair.client.send_request(Opcode.SYNC, m.Empty(), session_id=SESSION_ID)
    assert (second, third) == (first + 1, first + 2)
    assert pair.client.in_flight == 2
    pair.client.receive_data(build_frame(Opcode.SYNC, request_id=second, flags=Flag.REPLY))
    assert events_of(pair.client) == [Reply(Opcode.SYNC, second, m.Empty())]


def test_another_process_answers_the_attach() -> None:
    """The broker receives ATTACH and hands over the socket and the bytes behind; the worker goes on from there."""
    pair = pair_in(State.CONTROL)
    _, wire = pair.client.send_request(Opcode.ATTACH, m.Attach(()), session_id=SESSION_ID)
    pair.server.receive_data(wire + b"GPL")
    event = pair.server.next_event()
    assert isinstance(event, Request)
    worker = Connection(Role.SERVER, max_payload_bytes=MAX_PAYLOAD_BYTES, state=State.ATTACHING)
    worker.receive_data(pair.server.take_rest())
    pair.client.receive_data(worker.send_reply(event, ATTACH_REPLY))
    assert events_of(pair.client) == [Reply(Opcode.ATTACH, event.request_id, ATTACH_REPLY)]
    assert pair.client.state is worker.state is State.SESSION
    _, wire = pair.client.send_request(Opcode.SYNC, m.Empty(), session_id=SESSION_ID)
    worker.receive_data(wire[3:])
    assert request_of(worker).op is Opcode.SYNC
    with pytest.raises(LocalProtocolError, match="answered before"):
        worker.send_reply(event, ATTACH_REPLY)


def test_a_refused_attach_leaves_a_control_connection() -> None:
    pair = pair_in(State.ATTACHING)
    attach = Request(Opcode.ATTACH, 2, SESSION_ID, False, m.Attach(()))
    pair.client.receive_data(pair.server.send_failure(attach, Failure(Status.LEASE_EXPIRED, "too late")))
    assert [type(event) for event in events_of(pair.client)] == [Reply]
    assert pair.client.state is pair.server.state is State.CONTROL


def test_a_refused_hello_ends_the_connection() -> None:
    pair = pair_in(State.GREETING)
    hello = Request(Opcode.HELLO, 1, 0, False, HELLO)
    pair.client.receive_data(pair.server.send_failure(hello, Failure(Status.BUSY, "full")))
    assert [type(event) for event in events_of(pair.client)] == [Reply]
    assert pair.client.state is pair.server.state is State.CLOSED


def test_a_goodbye_says_why() -> None:
    pair = pair_in(State.CONTROL)
    failure = Failure(Status.BUSY, "too many connections", hint="wait")
    pair.client.receive_data(pair.server.send_goodbye(failure))
    assert events_of(pair.client) == [Goodbye(failure)]
    assert pair.client.state is pair.server.state is State.CLOSED


@pytest.mark.parametrize("role", Role)
def test_the_end_of_the_stream(role: Role) -> None:
    clean = Connection(role, max_payload_bytes=100)
    clean.receive_eof()
    assert events_of(clean) == [EndOfStream(is_clean=True)]
    torn = Connection(role, max_payload_bytes=100)
    torn.receive_data(b"GPLS")
    torn.receive_eof()
    assert events_of(torn) == [EndOfStream(is_clean=False)]


def test_requests_before_the_end_of_the_stream_are_seen() -> None:
    server = pair_in(State.CONTROL).server
    server.receive_data(ping(5))
    server.receive_eof()
    assert [type(event) for event in events_of(server)] == [Request, EndOfStream]


# --- what breaks the stream ---


def test_a_client_can_not_reply() -> None:
    assert broken(pair_in(State.CONTROL).server, ping(5, flags=Flag.REPLY)).message == "a client sent a reply"


def test_a_daemon_can_not_ask() -> None:
    assert broken(pair_in(State.CONTROL).client, ping(5)).message == "the daemon sent a request"


def test_a_request_id_can_not_be_used_twice_at_once() -> None:
    server = pair_in(State.CONTROL).server
    server.receive_data(ping(5))
    request_of(server)
    assert "already in flight" in broken(server, ping(5)).message


def test_a_request_id_may_be_used_again_once_answered() -> None:
    server = pair_in(State.CONTROL).server
    for _ in range(2):
        server.receive_data(ping(5))
        server.send_reply(request_of(server), m.Ping(1))


def test_request_id_0_is_not_for_requests() -> None:
    assert "request id 0" in broken(pair_in(State.CONTROL).server, ping(0)).message


def test_too_many_requests_in_flight() -> None:
    server = pair_in(State.CONTROL).server
    server.receive_data(b"".join(ping(at) for at in range(1, MAX_IN_FLIGHT + 1)))
    assert all(isinstance(event, Request) for event in events_of(server))
    assert broken(server, ping(MAX_IN_FLIGHT + 1)).status is Status.BUSY


def test_a_reply_nobody_asked_for() -> None:
    assert "not sent" in broken(pair_in(State.CONTROL).client, ping(99, flags=Flag.REPLY)).message


def test_a_reply_to_another_operation() -> None:
    pair = pair_in(State.CONTROL)
    request = pair.ask(Opcode.LEASE_LIST_ACTIVE, m.Empty())
    assert "not sent" in broken(pair.client, ping(request.request_id, flags=Flag.REPLY)).message


def test_a_reply_that_is_malformed() -> None:
    pair = pair_in(State.CONTROL)
    request = pair.ask(Opcode.PING, m.Ping(1))
    wire = build_frame(Opcode.PING, b"short", request_id=request.request_id, flags=Flag.REPLY)
    assert "PING: Ping is malformed" in broken(pair.client, wire).message


def test_an_error_reply_that_is_malformed() -> None:
    pair = pair_in(State.CONTROL)
    request = pair.ask(Opcode.PING, m.Ping(1))
    wire = build_frame(Opcode.PING, b"\xff", request_id=request.request_id, flags=Flag.REPLY, status=Status.INTERNAL)
    assert "error reply is malformed" in broken(pair.client, wire).message


def test_nothing_comes_after_the_stream_broke() -> None:
    server = pair_in(State.CONTROL).server
    broken(server, ping(0) + ping(1))
    server.receive_data(ping(2))
    server.receive_eof()
    assert server.next_event() is None


# --- what is refused and goes on ---


@pytest.mark.parametrize("op", [0x0000, 0x0006, 0x06FF, 0xFFFF])
@pytest.mark.parametrize("state", [State.OPENING, State.CONTROL, State.SESSION])
def test_an_unknown_operation(op: int, state: State) -> None:
    failure = rejected(pair_in(state).server, ping(50, op=op))
    assert failure == Failure(Status.UNSUPPORTED, f"unknown operation {op:#06x}")


def test_a_goodbye_is_never_asked_for() -> None:
    wire = build_frame(Opcode.GOODBYE, request_id=50)
    assert rejected(pair_in(State.CONTROL).server, wire).status is Status.INVALID_REQUEST


def test_an_attach_while_requests_are_in_flight() -> None:
    pair = pair_in(State.CONTROL)
    pair.ask(Opcode.PING, m.Ping(1))
    wire = build_frame(Opcode.ATTACH, b"\0\0", request_id=50, session_id=SESSION_ID)
    assert "in flight" in rejected(pair.server, wire).message
    with pytest.raises(LocalProtocolError, match="in flight"):
        pair.client.send_request(Opcode.ATTACH, m.Attach(()), session_id=SESSION_ID)


@pytest.mark.parametrize("op", sorted(set(Opcode) - SESSION_OPCODES - {Opcode.GOODBYE, Opcode.LEASE_EVENT}))
def test_only_session_operations_are_quiet(op: Opcode) -> None:
    for state in (State.OPENING, State.CONTROL, State.SESSION):
        wire = build_frame(op, b"", request_id=50, flags=Flag.QUIET)
        assert rejected(pair_in(state).server, wire).status is Status.INVALID_REQUEST


def test_a_quiet_control_request_is_not_sent() -> None:
    client = pair_in(State.CONTROL).client
    with pytest.raises(LocalProtocolError, match="can't be quiet"):
        client.send_request(Opcode.PING, m.Ping(1), quiet=True)


def test_a_malformed_body_is_answered() -> None:
    pair = pair_in(State.CONTROL)
    pair.server.receive_data(build_frame(Opcode.PING, b"short", request_id=50) + ping(51))
    first, second = events_of(pair.server)
    assert isinstance(first, Rejected)
    assert first.failure.status is Status.INVALID_REQUEST
    assert isinstance(second, Request)
    wire = pair.server.send_failure(first, first.failure)
    assert pair.server.in_flight == 1
    assert wire[:16] == build_frame(Opcode.PING, wire[40:], request_id=50, flags=1, status=-16)[:16]


# --- our own mistakes change nothing ---


def test_a_request_that_can_not_be_sent_changes_nothing() -> None:
    client = pair_in(State.CONTROL).client
    before = client.state, client.in_flight, client.last_request_id
    mistakes: list[tuple[Opcode, m.Body, int]] = [
        (Opcode.PING, m.Ping(-1), 0),
        (Opcode.PING, m.Ping(1), 1 << 128),
        (Opcode.PING, m.Empty(), 0),
        (Opcode.HELLO, HELLO, 0),
        (Opcode.SYNC, m.Empty(), SESSION_ID),
        (Opcode.GOODBYE, m.Empty(), 0),
        (Opcode.ATTACH, m.Attach(()), -1),
    ]
    for op, body, session_id in mistakes:
        with pytest.raises(LocalProtocolError):
            client.send_request(op, body, session_id=session_id)
        assert (client.state, client.in_flight, client.last_request_id) == before


def test_a_module_too_large_for_a_frame_changes_nothing() -> None:
    client = pair_in(State.SESSION).client
    before = client.in_flight
    with pytest.raises(LocalProtocolError, match="at most"):
        client.send_request(Opcode.MODULE_LOAD, m.ModuleLoad(bytes(MAX_PAYLOAD_BYTES)), session_id=SESSION_ID)
    assert client.in_flight == before


def test_a_reply_that_can_not_be_sent_can_still_be_refused() -> None:
    pair = pair_in(State.CONTROL)
    request = pair.ask(Opcode.LEASE_QUERY, m.LeaseRef(1))
    for body in (m.Ping(1), m.Report(object()), m.Report(bytes(MAX_PAYLOAD_BYTES - 5))):
        with pytest.raises(LocalProtocolError):
            pair.server.send_reply(request, body)
    pair.client.receive_data(pair.server.send_failure(request, Failure(Status.INTERNAL, "too large")))
    assert [type(event) for event in events_of(pair.client)] == [Reply]


def test_an_answer_is_given_once() -> None:
    pair = pair_in(State.CONTROL)
    request = pair.ask(Opcode.PING, m.Ping(1))
    pair.answer(request, m.Ping(1))
    with pytest.raises(LocalProtocolError, match="answered before"):
        pair.server.send_reply(request, m.Ping(1))


def test_a_client_keeps_to_the_limit_of_requests_in_flight() -> None:
    client = pair_in(State.CONTROL).client
    for _ in range(MAX_IN_FLIGHT):
        client.send_request(Opcode.PING, m.Ping(1))
    with pytest.raises(LocalProtocolError) as caught:
        client.send_request(Opcode.PING, m.Ping(1))
    assert caught.value.status is Status.BUSY
    assert client.in_flight == MAX_IN_FLIGHT


def test_a_client_that_sends_its_hello_byte_by_byte() -> None:
    pair = Pair()
    _, wire = pair.client.send_request(Opcode.HELLO, HELLO)
    for byte in wire[:-1]:
        pair.server.receive_data(bytes([byte]))
        assert pair.server.next_event() is None
    pair.server.receive_data(wire[-1:])
    assert pair.answer(request_of(pair.server), HELLO_REPLY).result == HELLO_REPLY


def test_a_control_connection_takes_small_frames_only() -> None:
    server = Connection(Role.SERVER, max_payload_bytes=MAX_CONTROL_PAYLOAD_BYTES)
    wire = build_frame(Opcode.HELLO, bytes(MAX_CONTROL_PAYLOAD_BYTES + 1), request_id=1)
    assert "accepts at most 65536" in broken(server, wire[:HEADER_BYTES]).message
