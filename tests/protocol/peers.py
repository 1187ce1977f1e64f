"""Two connections that exchange bytes in memory, in any state, and three ways to pass bytes to one of them."""

from collections.abc import Iterator

from gpulease.protocol import Connection, Event, Opcode, Reply, Request, Role, State
from gpulease.protocol import messages as m
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES

HELLO = m.Hello(0, "tests", ())
HELLO_REPLY = m.HelloReply(0, "tests", MAX_PAYLOAD_BYTES, ())
ATTACH_REPLY = m.AttachReply(1 << 20, "cpu", "GPU-0", ())
SESSION_ID = 0x5E55


def events_of(connection: Connection) -> list[Event]:
    taken = []
    while (event := connection.next_event()) is not None:
        taken.append(event)
    return taken


def request_of(server: Connection) -> Request:
    (event,) = events_of(server)
    assert isinstance(event, Request)
    return event


class Pair:
    def __init__(self, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self.client = Connection(Role.CLIENT, max_payload_bytes=max_payload_bytes)
        self.server = Connection(Role.SERVER, max_payload_bytes=max_payload_bytes)

    def ask(self, op: Opcode, body: m.Body, session_id: int = 0) -> Request:
        """Send a request. Returns it as the server received it, without a reply."""
        _, wire = self.client.send_request(op, body, session_id=session_id)
        self.server.receive_data(wire)
        request = request_of(self.server)
        assert self.client.state is self.server.state
        return request

    def answer(self, request: Request, body: m.Body) -> Reply:
        self.client.receive_data(self.server.send_reply(request, body))
        (event,) = events_of(self.client)
        assert isinstance(event, Reply)
        assert self.client.state is self.server.state
        assert self.client.in_flight == self.server.in_flight
        return event


def pair_in(state: State) -> Pair:
    """Return two peers in a state. Nothing is in flight except the request that leads to the state."""
    pair = Pair()
    for reached in _journey(pair):
        if reached is state:
            break
    assert pair.client.state is pair.server.state is state
    return pair


def _journey(pair: Pair) -> Iterator[State]:
    yield State.OPENING
    hello = pair.ask(Opcode.HELLO, HELLO)
    yield State.GREETING
    pair.answer(hello, HELLO_REPLY)
    yield State.CONTROL
    attach = pair.ask(Opcode.ATTACH, m.Attach(()), SESSION_ID)
    yield State.ATTACHING
    pair.answer(attach, ATTACH_REPLY)
    yield State.SESSION
    pair.client.state = pair.server.state = State.CLOSED
    yield State.CLOSED


def fed(connection: Connection, chunks: list[bytes]) -> list[Event]:
    """Return the events of a connection that receives bytes in these pieces."""
    events = []
    for chunk in chunks:
        connection.receive_data(chunk)
        events += events_of(connection)
    return events
