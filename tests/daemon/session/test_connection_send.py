"""Replies to peers that do not read: the waits, the send buffer, the end of the connection."""

import contextlib
import select
import socket
import time
from collections.abc import Iterator

import pytest

from gpulease.daemon.session import connection as connections
from gpulease.daemon.session.connection import (
    STEP_BYTES,
    UNSENT_BYTES,
    AttachedConnection,
    ConnectionLost,
    RingWire,
    SendBuffer,
    SocketWire,
    WorkerSpinPolicy,
)
from gpulease.daemon.session.server import SessionServer
from gpulease.protocol.codec import build_body
from gpulease.protocol.framing import build_frame
from gpulease.protocol.messages import AttachReply, Ping
from gpulease.protocol.opcodes import Opcode
from helpers.session_rig import Rig, rig

MS = 1_000_000
LARGE = bytes(range(256)) * (64 << 10)


def test_a_peer_that_does_not_read_on_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    found = SendBuffer(bytes(4 * STEP_BYTES))
    assert not found.is_stale(160.0)
    assert found.is_stale(160.1)
    now_s = 150.0
    found.update(found.unsent[STEP_BYTES - 1 :])
    assert found.is_stale(160.1), "a byte short of a step is no step"
    found.update(found.unsent[1:])
    assert not found.is_stale(210.0)
    assert found.is_stale(210.1)


def test_a_send_buffer_copies_its_bytes() -> None:
    reply = bytearray(b"reply")
    found = SendBuffer(memoryview(reply))
    reply[:] = b"other"
    assert bytes(found.unsent) == b"reply"


@pytest.mark.parametrize("wait_ns", [0, 30 * MS])
@pytest.mark.parametrize("kind", [SocketWire, RingWire])
def test_a_send_waits_no_longer_than_it_may(kind: type[SocketWire | RingWire], wait_ns: int) -> None:
    near, far = socket.socketpair()
    with near, far:
        far.setblocking(False)
        wire = kind(far, WorkerSpinPolicy())
        began_ns = time.monotonic_ns()
        rest = wire.send(LARGE, wait_ns)
        took_ns = time.monotonic_ns() - began_ns
        assert rest is not None
        assert 0 < len(rest) < len(LARGE)
        assert bytes(rest) == LARGE[len(LARGE) - len(rest) :]
        assert wait_ns <= took_ns < wait_ns + 60_000 * MS
        with contextlib.suppress(BlockingIOError):
            while wire.send(bytes(4096), 0) is None:
                pass
        near.close()
        with pytest.raises(ConnectionLost):
            wire.send(LARGE, 10_000 * MS)
        wire.close()


class Pair:
    """A server without a loop, and connections to it."""

    def __init__(self, made: Rig, channel: socket.socket, stack: contextlib.ExitStack) -> None:
        self.server = SessionServer(channel, made.session, AttachReply(1 << 20, "cpu", "GPU-0", ()), is_shared=True)
        self.made = made
        self.stack = stack

    def connect(self) -> tuple[socket.socket, AttachedConnection]:
        near, far = socket.socketpair()
        self.stack.callback(near.close)
        self.stack.callback(far.close)
        far.setblocking(False)
        connection = AttachedConnection(far, b"", self.made.session.pinned_buffers, WorkerSpinPolicy())
        connection.holder = self.made.session.begin_connection(0, owns=True)
        self.server._connections[connection.fd] = connection
        self.server._poll.register(far, select.POLLIN)
        self.server._set_waits()
        return near, connection


@pytest.fixture
def pair() -> Iterator[Pair]:
    channel, broker = socket.socketpair()
    with contextlib.ExitStack() as stack, rig(is_native=False) as made:
        stack.callback(channel.close)
        stack.callback(broker.close)
        yield Pair(made, channel, stack)


def test_a_reply_waits_longest_alone_less_when_shared_and_not_after_a_pause(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, first = pair.connect()
    assert first.wait_ns == connections.ALONE_WAIT_NS
    _, second = pair.connect()
    assert first.wait_ns == second.wait_ns == connections.SHARED_WAIT_NS
    assert not pair.server._send(first, LARGE)
    assert (first.wait_ns, second.wait_ns) == (0, connections.SHARED_WAIT_NS)
    read = near.recv(len(LARGE))
    while len(read) < len(LARGE):
        pair.server._serve(first)
        read += near.recv(len(LARGE))
    assert read == LARGE
    assert first.send_buffer is None
    assert first.wait_ns == 0, "not so soon"
    pair.server._check_connections()
    assert first.wait_ns == 0
    monkeypatch.setattr(first, "no_wait_until_s", time.monotonic() - 1)
    pair.server._check_connections()
    assert first.wait_ns == connections.SHARED_WAIT_NS
    pair.server._drop(second, ConnectionLost("gone"))
    assert first.wait_ns == connections.ALONE_WAIT_NS


def test_a_peer_that_never_reads_is_dropped(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    near, first = pair.connect()
    _, second = pair.connect()
    assert not pair.server._send(first, LARGE)
    pair.server._check_connections()
    assert first.fd in pair.server._connections
    monkeypatch.setattr(connections, "UNSENT_TIMEOUT_S", -1.0)
    pair.server._check_connections()
    assert list(pair.server._connections) == [second.fd]
    while data := near.recv(1 << 20):
        assert data in LARGE + LARGE, "nothing stands behind half a reply"


def test_a_peer_is_not_blamed_for_the_time_in_which_the_worker_did_not_serve(pair: Pair) -> None:
    """The worker was stopped, or waited in the driver for another connection, for longer than a peer may take."""
    near, reads = pair.connect()
    other, sends = pair.connect()
    # One has read its reply meanwhile, and the other has sent the rest of its request.
    assert not pair.server._send(reads, LARGE)
    frame = build_frame(Opcode.PING, build_body(Ping(7)), request_id=1, session_id=pair.made.session.lease_id)
    other.sendall(frame[:-1])
    pair.server._serve(sends)
    assert reads.send_buffer is not None
    reads.send_buffer._step_s -= 3600
    sends.received_at_s -= 3600
    assert near.recv(1 << 20)
    other.sendall(frame[-1:])
    pair.server._check_connections()
    assert set(pair.server._connections) == {reads.fd, sends.fd}
    assert other.recv(1 << 10, socket.MSG_DONTWAIT)
    # A peer that did neither is dropped.
    other.sendall(frame[:-1])
    pair.server._serve(sends)
    reads.send_buffer._step_s -= 3600
    sends.received_at_s -= 3600
    pair.server._check_connections()
    assert not pair.server._connections


def test_unsent_bytes_are_bounded(pair: Pair) -> None:
    connections = [pair.connect()[1] for _ in range(UNSENT_BYTES // len(LARGE))]
    for connection in connections:
        assert not pair.server._send(connection, LARGE)
    _, last = pair.connect()
    with pytest.raises(ConnectionLost, match="were not read"):
        pair.server._send(last, bytes(1 << 20) + LARGE)
