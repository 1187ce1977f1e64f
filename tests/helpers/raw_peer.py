"""A peer that sends the protocol's bytes itself, including bytes that no correct client would send."""

import socket
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from gpulease.protocol import Connection, EndOfStream, Event, Failure, Goodbye, Opcode, Reply, Role
from gpulease.protocol.address import UnixAddress, parse_address
from gpulease.protocol.codec import build_body
from gpulease.protocol.framing import build_frame
from gpulease.protocol.lease_options import EXCLUSIVITY
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import Attach, Body, Hello, LeaseAlloc, LeaseGrant, LeaseRef
from gpulease.protocol.opcodes import GPU_RESOURCE_TYPE
from gpulease.protocol.primitives import LeaseParameter

T = TypeVar("T", bound=Body)

REPLY_LIMIT_S = 120.0


def connect(address: str) -> socket.socket:
    """Return a blocking socket that is connected to a daemon, with a limit on every wait."""
    where = parse_address(address)
    if not isinstance(where, UnixAddress):
        return socket.create_connection((where.host, where.port), REPLY_LIMIT_S)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Connect without a time limit: a non-blocking socket is refused while the daemon's queue is full.
        sock.connect(where.path)
        sock.settimeout(REPLY_LIMIT_S)
    except BaseException:
        sock.close()
        raise
    return sock


class RawPeer:
    """One connection, which sends frames of any kind and receives events.

    Attributes:
        sock: The socket, to send bytes that are not even a frame.
        connection: The client's half of the protocol, which keeps the state and numbers requests.
        session_id: The id of the session to which it attached last.
    """

    def __init__(self, address: str) -> None:
        self.sock = connect(address)
        self.connection = Connection(Role.CLIENT, max_payload_bytes=MAX_PAYLOAD_BYTES)
        self.session_id = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.sock.close()

    # --- well-formed requests ---

    def hello(self) -> Self:
        self.request(Opcode.HELLO, Hello(0, "raw", ()))
        return self

    def attach(self, session_id: int) -> Body | Failure:
        """Send ATTACH for that session, and return the reply."""
        self.session_id = session_id
        return self.ask(Opcode.ATTACH, Attach(()), session_id)

    def ask_or_goodbye(self, op: Opcode, body: Body, session_id: int = 0) -> Body | Failure:
        """Send a request. Returns the reply, or the failure with which the daemon closed the connection before it."""
        _, frame = self.connection.send_request(op, body, session_id=session_id)
        with suppress(OSError):
            self.sock.sendall(frame)
        event = self.next_event()
        assert isinstance(event, Reply | Goodbye), event
        return event.result if isinstance(event, Reply) else event.failure

    def ask(self, op: Opcode, body: Body, session_id: int = 0) -> Body | Failure:
        number, frame = self.connection.send_request(op, body, session_id=session_id)
        self.sock.sendall(frame)
        reply = self.next_event()
        assert isinstance(reply, Reply), reply
        assert reply.request_id == number
        return reply.result

    def request(self, op: Opcode, body: Body, session_id: int = 0) -> Any:
        """Send a request, and return the reply's body. Fails if the reply is a failure."""
        result = self.ask(op, body, session_id)
        assert not isinstance(result, Failure), result
        return result

    def refused(self, op: Opcode, body: Body, session_id: int = 0) -> Failure:
        """Send a request, and return the failure. Fails if the reply is a success."""
        result = self.ask(op, body, session_id)
        assert isinstance(result, Failure), result
        return result

    def quiet(self, op: Opcode, body: Body, session_id: int) -> int:
        number, frame = self.connection.send_request(op, body, session_id=session_id, quiet=True)
        self.sock.sendall(frame)
        return number

    def acquire(self, wanted: LeaseAlloc | None = None) -> LeaseGrant:
        grant = self.request(Opcode.LEASE_ALLOC, wanted or lease_alloc())
        assert isinstance(grant, LeaseGrant)
        return grant

    def free(self, lease_id: int) -> None:
        self.request(Opcode.LEASE_FREE, LeaseRef(lease_id))

    # --- events of any kind ---

    def next_event(self) -> Event:
        """Return the next event that the daemon sends, or the end of the connection."""
        while (event := self.connection.next_event()) is None:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionError:
                data = b""  # The daemon closed the connection before it had read everything that was sent.
            if data:
                self.connection.receive_data(data)
            else:
                self.connection.receive_eof()
        return event

    def goodbye(self) -> Failure:
        """Return the reason that the daemon gives for closing the connection. The daemon then closes it."""
        event = self.next_event()
        assert isinstance(event, Goodbye), event
        self.check_closed()
        return event.failure

    def check_closed(self) -> None:
        """Fail unless the daemon has closed the connection, or closes it soon."""
        while True:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionError:
                return
            if not data:
                return

    def end(self) -> Goodbye | EndOfStream:
        """Return how the daemon ends the connection, and ignore everything that it sends before."""
        while True:
            event = self.next_event()
            if isinstance(event, Goodbye | EndOfStream):
                return event


def lease_alloc(size_bytes: int = 1 << 20, ttl_ms: int = 60_000, *, wait_ms: int = 0, **special: Any) -> LeaseAlloc:
    """Return a LEASE_ALLOC for a small lease. `special` may have `device`, and `exclusivity` as a byte."""
    exclusivity = special.get("exclusivity")
    parameters = () if exclusivity is None else (LeaseParameter(EXCLUSIVITY.tag, bytes([exclusivity])),)
    return LeaseAlloc(GPU_RESOURCE_TYPE, size_bytes, ttl_ms, wait_ms, special.get("device"), parameters)


def frame_of(op: int, body: Body, request_id: int, session_id: int = 0, flags: int = 0) -> bytes:
    return build_frame(op, build_body(body), request_id=request_id, session_id=session_id, flags=flags)
