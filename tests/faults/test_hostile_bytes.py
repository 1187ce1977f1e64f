"""Bytes that no correct peer sends: each gets a clear error or a closed connection, and all others are served."""

import random
import struct
from collections.abc import Callable, Iterator

import pytest

from gpulease.protocol import Failure, Opcode, Status
from gpulease.protocol.framing import HEADER_BYTES, MAGIC, build_frame
from gpulease.protocol.limits import MAX_CONTROL_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import (
    Attach,
    Body,
    Empty,
    Handle,
    Hello,
    LeaseRef,
    MemAlloc,
    MemRead,
    Ping,
)
from gpulease.protocol.opcodes import Flag
from helpers.daemon import Daemon, Faults
from helpers.kernels import Neighbour
from helpers.raw_peer import RawPeer, connect, frame_of, lease_alloc

# A neighbour must be served during every test.
pytestmark = pytest.mark.usefixtures("neighbour")

HELLO = frame_of(Opcode.HELLO, Hello(0, "hostile", ()), 1)
_HEADER = struct.Struct(">4sBBHhHIQ16s")


def header(
    *,
    magic: bytes = MAGIC,
    version: int = 1,
    flags: int = 0,
    op: int = Opcode.PING,
    status: int = 0,
    reserved: int = 0,
    length: int = 8,
    request_id: int = 9,
    session_id: int = 0,
) -> bytes:
    """Return a header that is valid, except the named fields."""
    ident = session_id.to_bytes(16, "big")
    return _HEADER.pack(magic, version, flags, op, status, reserved, length, request_id, ident)


@pytest.fixture
def control(daemon: Daemon) -> Iterator[RawPeer]:
    with RawPeer(daemon.address).hello() as peer:
        yield peer


@pytest.fixture
def session(daemon: Daemon) -> Iterator[RawPeer]:
    """Yield a connection that is attached to a session. Its `session_id` is the session's id."""
    with daemon.builder().acquire() as lease, RawPeer(daemon.address).hello() as peer:
        assert not isinstance(peer.attach(lease.lease_id), Failure)
        yield peer


BROKEN_STREAMS = {
    "another protocol": (b"GET / HTTP/1.1\r\nHost: gpu\r\n\r\n" + bytes(40), Status.INVALID_REQUEST),
    "wrong magic": (header(magic=b"GPLT"), Status.INVALID_REQUEST),
    "older version": (header(version=0), Status.UNSUPPORTED),
    "newer version": (header(version=2), Status.UNSUPPORTED),
    "unknown flag": (header(flags=0x04), Status.UNSUPPORTED),
    "all flags": (header(flags=0xFF), Status.UNSUPPORTED),
    "quiet reply": (header(flags=Flag.REPLY | Flag.QUIET), Status.INVALID_REQUEST),
    "reserved": (header(reserved=1), Status.INVALID_REQUEST),
    "status in a request": (header(status=-1), Status.INVALID_REQUEST),
    "largest length": (header(length=2**32 - 1), Status.INVALID_REQUEST),
    "length over the limit": (header(length=MAX_PAYLOAD_BYTES + 1), Status.INVALID_REQUEST),
}


@pytest.mark.parametrize("name", BROKEN_STREAMS)
def test_streams_that_can_not_be_followed(daemon: Daemon, control: RawPeer, session: RawPeer, name: str) -> None:
    data, status = BROKEN_STREAMS[name]
    with RawPeer(daemon.tcp_address) as newcomer:
        for peer in (newcomer, control, session):
            peer.sock.sendall(data + bytes(8))
            assert peer.goodbye().status is status


def test_the_control_connections_smaller_limit(control: RawPeer) -> None:
    control.sock.sendall(header(length=MAX_CONTROL_PAYLOAD_BYTES + 1))
    assert str(MAX_CONTROL_PAYLOAD_BYTES) in control.goodbye().message


def test_a_huge_length_reserves_nothing(daemon: Daemon, session: RawPeer) -> None:
    ident, worker = session.session_id, daemon.worker_pid(session.session_id)
    before = _resident_bytes(worker)
    session.sock.sendall(header(op=Opcode.MODULE_LOAD, length=MAX_PAYLOAD_BYTES, session_id=ident) + bytes(1000))
    daemon.available_bytes()
    assert _resident_bytes(worker) - before < MAX_PAYLOAD_BYTES // 4


def _resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_replies_from_a_client(control: RawPeer, session: RawPeer) -> None:
    control.sock.sendall(header(flags=Flag.REPLY) + bytes(8))
    assert control.goodbye().status is Status.INVALID_REQUEST
    session.sock.sendall(header(flags=Flag.REPLY) + bytes(8))
    assert session.goodbye().status is Status.INVALID_REQUEST


@pytest.mark.parametrize("op", [0, 0x0006, 0x0102, 0x0209, 0x06FF, 0x7FFF, 0xFFFF])
def test_unknown_operations(control: RawPeer, session: RawPeer, op: int) -> None:
    for peer in (control, session):
        number = peer.connection.expect_reply(Opcode.PING)
        peer.sock.sendall(build_frame(op, b"", request_id=number))
        frame = _next_frame(peer)
        assert (frame[0], frame[1]) == (op, Status.UNSUPPORTED)


def _next_frame(peer: RawPeer) -> tuple[int, int, int, bytes]:
    """Return (op, status, request id, payload) of the next frame. Skips the protocol's state machine."""
    data = bytearray()
    while len(data) < HEADER_BYTES or len(data) < HEADER_BYTES + int.from_bytes(data[12:16], "big"):
        received = peer.sock.recv(1)
        assert received
        data += received
    _, _, _, op, status, _, _, request_id, _ = _HEADER.unpack_from(data)
    return op, status, request_id, bytes(data[HEADER_BYTES:])


@pytest.mark.parametrize(
    "body", [(Opcode.LEASE_ALLOC, lease_alloc()), (Opcode.PING, Ping(1)), (Opcode.ATTACH, Attach(()))]
)
def test_before_hello(daemon: Daemon, body: tuple[Opcode, Body]) -> None:
    op, message = body
    with connect(daemon.address) as sock, RawPeer(daemon.address) as peer:
        sock.sendall(frame_of(op, message, 1))
        peer.sock.sendall(frame_of(op, message, 1))
        assert _next_frame(peer)[:3] == (op, Status.INVALID_REQUEST, 1)
        # The peer may still send HELLO.
        peer.hello()
        assert peer.request(Opcode.PING, Ping(2)) == Ping(2)


def test_hello_twice(control: RawPeer) -> None:
    control.sock.sendall(frame_of(Opcode.HELLO, Hello(0, "again", ()), 77))
    assert _next_frame(control)[1] == Status.INVALID_REQUEST
    assert control.request(Opcode.PING, Ping(3)) == Ping(3)


def test_session_operations_on_a_control_connection(control: RawPeer) -> None:
    control.sock.sendall(frame_of(Opcode.MEM_ALLOC, MemAlloc(4), 77))
    assert _next_frame(control)[1] == Status.INVALID_REQUEST
    control.sock.sendall(frame_of(Opcode.SYNC, Empty(), 78, flags=Flag.QUIET))
    assert control.request(Opcode.PING, Ping(3)) == Ping(3)


def test_control_operations_on_a_session(session: RawPeer) -> None:
    for op, body in (
        (Opcode.LEASE_ALLOC, lease_alloc()),
        (Opcode.GET_INVENTORY, Empty()),
        (Opcode.LEASE_FREE, LeaseRef(1)),
        (Opcode.HELLO, Hello(0, "again", ())),
        (Opcode.ATTACH, Attach(())),
    ):
        session.sock.sendall(frame_of(op, body, 77))
        assert _next_frame(session)[1] in (Status.INVALID_REQUEST, Status.UNSUPPORTED)


def test_attach_twice(daemon: Daemon, control: RawPeer) -> None:
    first, second = (control.acquire().lease_id for _ in range(2))
    with RawPeer(daemon.address).hello() as peer:
        peer.attach(first)
        peer.sock.sendall(frame_of(Opcode.ATTACH, Attach(()), 50, second))
        assert _next_frame(peer)[1] in (Status.INVALID_REQUEST, Status.UNSUPPORTED)
        assert peer.request(Opcode.PING, Ping(1), first) == Ping(1)
    for ident in (first, second):
        control.free(ident)


def test_attach_with_requests_in_flight(daemon: Daemon, control: RawPeer) -> None:
    with daemon.builder(5 << 30).acquire():
        waiting = frame_of(Opcode.LEASE_ALLOC, lease_alloc(2 << 30, wait_ms=60_000), 50)
        control.sock.sendall(waiting + frame_of(Opcode.ATTACH, Attach(()), 51, 1234))
        assert _next_frame(control)[:3] == (Opcode.ATTACH, Status.INVALID_REQUEST, 51)


@pytest.mark.parametrize("request_id", [0, 50])
def test_request_ids_that_are_taken(daemon: Daemon, control: RawPeer, request_id: int) -> None:
    with daemon.builder(5 << 30).acquire():
        waiting = frame_of(Opcode.LEASE_ALLOC, lease_alloc(2 << 30, wait_ms=60_000), 50)
        control.sock.sendall(waiting + header(request_id=request_id) + bytes(8))
        assert control.goodbye().status is Status.INVALID_REQUEST


@pytest.mark.exhaustive
def test_too_many_requests_in_flight(start_daemon: Callable[..., Daemon]) -> None:
    # The limit itself is part of the protocol's vectors. Of a thousand waiting requests, each delays all others.
    most = 40
    daemon = start_daemon(faults=Faults(constants={"gpulease.protocol.connection:MAX_IN_FLIGHT": most}))
    with daemon.builder(6 << 30).acquire() as lease:
        with RawPeer(daemon.address).hello() as peer:
            wanted = lease_alloc(wait_ms=60_000)
            peer.sock.sendall(b"".join(frame_of(Opcode.LEASE_ALLOC, wanted, number) for number in range(50, 51 + most)))
            failure = peer.goodbye()
            assert failure.status is Status.BUSY
            assert str(most) in failure.message
        assert [report["lease_id"] for report in daemon.leases()] == [lease.lease_id_text]


@pytest.mark.parametrize("cut", ["shorter", "longer"])
@pytest.mark.parametrize(
    ("op", "body"),
    [
        (Opcode.MEM_ALLOC, MemAlloc(4)),
        (Opcode.MEM_FREE, Handle(4)),
        (Opcode.MEM_READ, MemRead(1, 2, 3)),
        (Opcode.PING, Ping(4)),
    ],
)
def test_bodies_of_a_wrong_length(session: RawPeer, cut: str, op: Opcode, body: Body) -> None:
    ident = session.session_id
    good = frame_of(op, body, 1)[HEADER_BYTES:]
    payload = good[:-1] if cut == "shorter" else good + b"\0"
    session.sock.sendall(build_frame(op, payload, request_id=77, session_id=ident))
    assert _next_frame(session)[:3] == (op, Status.INVALID_REQUEST, 77)
    assert session.request(Opcode.PING, Ping(1), ident) == Ping(1)


def test_garbage(daemon: Daemon, neighbour: Neighbour) -> None:
    dice = random.Random(20)
    for round_number in range(150):
        with connect(daemon.tcp_address if round_number % 2 else daemon.address) as sock:
            data = dice.randbytes(dice.randrange(1, 300))
            prefix = (b"", HELLO, MAGIC, HELLO + header(op=dice.randrange(1 << 16))[: dice.randrange(40)])
            sock.sendall(dice.choice(prefix) + data)
    neighbour.check()


@pytest.mark.exhaustive
def test_flipped_bits(daemon: Daemon, neighbour: Neighbour) -> None:
    dice = random.Random(21)
    good = HELLO + frame_of(Opcode.LEASE_ALLOC, lease_alloc(ttl_ms=50), 2)
    for at in range(len(good) * 8):
        data = bytearray(good)
        data[at // 8] ^= 1 << at % 8
        with connect(daemon.address) as sock:
            sock.sendall(data)
            sock.shutdown(dice.choice((1, 2)))
    neighbour.check()


def test_truncation_at_every_byte(daemon: Daemon, neighbour: Neighbour) -> None:
    conversation = HELLO + frame_of(Opcode.LEASE_ALLOC, lease_alloc(), 2)
    for length in range(len(conversation)):
        with connect(daemon.address) as sock:
            sock.sendall(conversation[:length])
            sock.shutdown(1)
            while sock.recv(1 << 16):
                pass
    assert len(daemon.leases()) == 1
    neighbour.check()


def test_truncation_of_a_session_at_every_byte(daemon: Daemon) -> None:
    with RawPeer(daemon.address).hello() as owner:
        ident = owner.acquire(lease_alloc(exclusivity=0)).lease_id
        start = HELLO + frame_of(Opcode.ATTACH, Attach(()), 2, ident)
        frame = frame_of(Opcode.MEM_ALLOC, MemAlloc(1), 3, ident)
        for length in range(len(frame)):
            with connect(daemon.address) as sock:
                sock.sendall(start + frame[:length])
                sock.shutdown(1)
                while sock.recv(1 << 16):
                    pass
        assert daemon.query(ident)["allocated_bytes"] == 0
        owner.free(ident)
