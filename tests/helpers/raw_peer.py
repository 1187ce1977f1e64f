"""A peer that sends the protocol's bytes by hand, including what no correct client would send."""

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
    """A blocking socket to a daemon, with a bound on every wait."""
    where = parse_address(address)
    if not isinstance(where, UnixAddress):
        return socket.create_connection((where.host, where.port), REPLY_LIMIT_S)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Without a limit yet: one that can't wait is refused while the daemon's queue is full.
        sock.connect(where.path)
        sock.settimeout(REPLY_LIMIT_S)
    except BaseException:
        sock.close()
        raise
    return sock


class RawPeer:
    """One connection: frames of any kind out, events in.

    Attributes:
        sock: The socket, for what is not even a frame.
        connection: The client's half of the protocol, which keeps the state and numbers requests.
        session_id: The session it asked to be last.
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
        """Send ATTACH for that session; returns the reply."""
        self.session_id = session_id
        return self.ask(Opcode.ATTACH, Attach(()), session_id)

    def ask_or_goodbye(self, op: Opcode, body: Body, session_id: int = 0) -> Body | Failure:
        """The same, or what the daemon said when it closed the connection first."""
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
        """`ask`, and check that the reply is a success."""
        result = self.ask(op, body, session_id)
        assert not isinstance(result, Failure), result
        return result

    def refused(self, op: Opcode, body: Body, session_id: int = 0) -> Failure:
        """`ask`, and check that the reply is a failure."""
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

    # --- whatever comes ---

    def next_event(self) -> Event:
        """The next thing the daemon says, or that it closed."""
        while (event := self.connection.next_event()) is None:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionError:
                data = b""  # closed before it had read all we sent
            if data:
                self.connection.receive_data(data)
            else:
                self.connection.receive_eof()
        return event

    def goodbye(self) -> Failure:
        """Why the daemon closes, which it then does."""
        event = self.next_event()
        assert isinstance(event, Goodbye), event
        self.check_closed()
        return event.failure

    def check_closed(self) -> None:
        """Fails unless the daemon has closed the connection, or does it now."""
        while True:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionError:
                return
            if not data:
                return

    def end(self) -> Goodbye | EndOfStream:
        """How the daemon ends the connection, whatever it says before."""
        while True:
            event = self.next_event()
            if isinstance(event, Goodbye | EndOfStream):
                return event


def lease_alloc(size_bytes: int = 1 << 20, ttl_ms: int = 60_000, *, wait_ms: int = 0, **special: Any) -> LeaseAlloc:
    """A small LEASE_ALLOC; `device` and `exclusivity` (a byte) are what may be special."""
    exclusivity = special.get("exclusivity")
    parameters = () if exclusivity is None else (LeaseParameter(EXCLUSIVITY.tag, bytes([exclusivity])),)
    return LeaseAlloc(GPU_RESOURCE_TYPE, size_bytes, ttl_ms, wait_ms, special.get("device"), parameters)


def frame_of(op: int, body: Body, request_id: int, session_id: int = 0, flags: int = 0) -> bytes:
    return build_frame(op, build_body(body), request_id=request_id, session_id=session_id, flags=flags)
