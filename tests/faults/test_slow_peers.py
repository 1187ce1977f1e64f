"""Peers that are slow, send nothing, or never read: they are limited in time and memory, and nobody waits for them."""

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from gpulease.client import GpuSession
from gpulease.client.sync.driver import ask
from gpulease.protocol import EndOfStream, Failure, Goodbye, Notification, Opcode, Reply, Status
from gpulease.protocol.framing import FrameReader
from gpulease.protocol.limits import MAX_DATA_BYTES, MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import (
    Attach,
    Data,
    Drain,
    Empty,
    Hello,
    HelloReply,
    LeaseEvent,
    LeaseRef,
    LeaseSubscribe,
    MemAlloc,
    MemRead,
    MemWrite,
    ModuleLoad,
    Ping,
)
from gpulease.protocol.opcodes import Flag, Phase
from helpers.daemon import Daemon, Faults, lent, running
from helpers.kernels import TRANSFORM, Neighbour, check_main_job
from helpers.raw_peer import RawPeer, connect, frame_of, lease_alloc
from helpers.waiting import wait_until

QUICK = {
    "gpulease.daemon.broker.control_connection:HELLO_TIMEOUT_S": 0.4,
    "gpulease.daemon.broker.control_connection:STALL_TIMEOUT_S": 0.4,
    "gpulease.daemon.broker.control_connection:LINGER_S": 0.4,
}


@pytest.fixture(scope="module")
def impatient_daemon() -> Iterator[Daemon]:
    with running(Daemon(tcp=True, faults=Faults(QUICK))) as daemon:
        yield daemon


@pytest.fixture
def impatient(impatient_daemon: Daemon) -> Iterator[Daemon]:
    """Yield a daemon whose limits for slow peers are 0.4 s instead of 10 s."""
    yield from lent(impatient_daemon)


def greeted(daemon: Daemon) -> RawPeer:
    """Return a peer that has completed HELLO.

    If a busy host makes it too late, and it is cut off, another one tries.
    """
    for _ in range(100):
        peer = RawPeer(daemon.address)
        if isinstance(peer.ask_or_goodbye(Opcode.HELLO, Hello(0, "raw", ())), HelloReply):
            return peer
        peer.sock.close()
    raise AssertionError("nobody can say hello in time")


def send_slowly(sock: socket.socket, data: bytes) -> None:
    """Send one byte per segment. That takes less time than pauses between the bytes."""
    for at in range(len(data)):
        sock.sendall(data[at : at + 1])


@pytest.mark.parametrize("over", ["unix", "tcp"])
def test_one_byte_at_a_time(daemon: Daemon, neighbour: Neighbour, over: str) -> None:
    with RawPeer(daemon.address if over == "unix" else daemon.tcp_address) as peer:
        if over == "tcp":
            peer.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def ask(op: Opcode, body: object, session_id: int = 0) -> object:
            _, frame = peer.connection.send_request(op, body, session_id=session_id)  # type: ignore[arg-type]
            send_slowly(peer.sock, frame)
            result = peer.next_event().result  # type: ignore[union-attr]
            assert not isinstance(result, Failure), result
            return result

        ask(Opcode.HELLO, Hello(0, "slow", ()))
        ident = ask(Opcode.LEASE_ALLOC, lease_alloc()).lease_id  # type: ignore[attr-defined]
        ask(Opcode.ATTACH, Attach(()), ident)
        handle = ask(Opcode.MEM_ALLOC, MemAlloc(16), ident).handle  # type: ignore[attr-defined]
        neighbour.check()
        ask(Opcode.MEM_WRITE, MemWrite(handle, 0, b"0123456789abcdef"), ident)
        ask(Opcode.MODULE_LOAD, ModuleLoad(TRANSFORM), ident)
        assert ask(Opcode.MEM_READ, MemRead(handle, 4, 8), ident) == Data(b"456789ab")
    with RawPeer(daemon.address if over == "unix" else daemon.tcp_address).hello() as peer:
        peer.free(ident)


@pytest.mark.exhaustive
@pytest.mark.parametrize("over", ["unix", "tcp"])
def test_connect_and_silence(impatient: Daemon, over: str) -> None:
    started = time.monotonic()
    with RawPeer(impatient.address if over == "unix" else impatient.tcp_address) as peer:
        failure = peer.goodbye()
        assert failure.status is Status.INVALID_REQUEST
        assert "no HELLO arrived within 0.4 s" in failure.message
    assert time.monotonic() - started >= 0.4


@pytest.mark.exhaustive
def test_half_a_hello_and_silence(impatient: Daemon) -> None:
    with RawPeer(impatient.address) as peer:
        peer.sock.sendall(frame_of(Opcode.HELLO, Hello(0, "half", ()), 1)[:-3])
        assert "no HELLO" in peer.goodbye().message


def test_half_a_request_and_silence(impatient: Daemon) -> None:
    with greeted(impatient) as peer:
        peer.sock.sendall(frame_of(Opcode.PING, Ping(1), 2)[:-1])
        failure = peer.goodbye()
        assert failure.status is Status.INVALID_REQUEST
        assert "the rest of a frame did not arrive within 0.4 s" in failure.message


def test_an_idle_connection_that_said_hello_may_stay(impatient: Daemon) -> None:
    with greeted(impatient) as idle, RawPeer(impatient.address) as silent:
        silent.goodbye()
        assert idle.request(Opcode.PING, Ping(9)) == Ping(9)


def test_a_peer_that_asks_and_never_reads(impatient: Daemon) -> None:
    files = len(impatient.open_files())
    with greeted(impatient) as peer:
        peer.sock.setblocking(False)
        frames = b"".join(frame_of(Opcode.GET_INVENTORY, Empty(), number) for number in range(10, 1000))

        def is_cut_off() -> bool:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                peer.sock.send(frames)
            return len(impatient.open_files()) <= files

        wait_until(is_cut_off, "it is cut off")
        peer.sock.setblocking(True)
        peer.check_closed()


@pytest.mark.exhaustive
def test_a_subscriber_that_never_reads(daemon: Daemon, neighbour: Neighbour) -> None:
    """The subscriber loses events, and is told how many. The daemon keeps the latest ones, and does not wait."""
    rounds = 600
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(daemon.builder().acquire())
        stack.callback(ask, Opcode.DRAIN_CANCEL, Empty(), daemon.address)
        slow = stack.enter_context(RawPeer(daemon.address).hello())
        slow.request(Opcode.LEASE_SUBSCRIBE, LeaseSubscribe(0))
        operator = stack.enter_context(RawPeer(daemon.address).hello())
        for number in range(rounds):
            operator.request(Opcode.DRAIN, Drain(1_000_000 - number))
        neighbour.check()
        told: list[Notification] = []
        while not told or told[-1].event.sequence < 9 * rounds:
            event = slow.next_event()
            assert isinstance(event, Notification)
            told.append(event)
        lost = [event.event.lost for event in told]
        assert sum(lost) + len(told) == 9 * rounds
        assert sum(lost) > rounds
        sequences = [event.event.sequence for event in told]
        assert all(
            here == before + 1 + gone for before, here, gone in zip(sequences, sequences[1:], lost[1:], strict=False)
        )
        assert isinstance(told[-1].event, LeaseEvent)
        assert told[-1].event.left_ms <= 1_000_000 - rounds + 1


def test_a_subscriber_that_repeats_its_number_is_refused_and_nobody_misses_an_event(daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease, RawPeer(daemon.address).hello() as hostile:
        number, frame = hostile.connection.send_request(Opcode.LEASE_SUBSCRIBE, LeaseSubscribe(lease.lease_id))
        hostile.sock.sendall(frame)
        assert isinstance(hostile.next_event(), Reply)
        assert isinstance(hostile.next_event(), Notification)
        hostile.sock.sendall(frame)
        with RawPeer(daemon.address).hello() as honest:
            honest.request(Opcode.LEASE_SUBSCRIBE, LeaseSubscribe(lease.lease_id))
            assert isinstance(honest.next_event(), Notification)
            lease.free()
            phases: list[int] = []
            while not phases or phases[-1] != Phase.ENDED:
                event = honest.next_event()
                assert isinstance(event, Notification)
                assert isinstance(event.event, LeaseEvent)
                phases.append(event.event.phase)
        reader = FrameReader(MAX_PAYLOAD_BYTES)
        reader.receive_data(hostile.sock.recv(1 << 16))
        answer = reader.next_frame()
        assert answer is not None
        assert (answer.request_id, answer.status) == (number, Status.INVALID_REQUEST)


@pytest.mark.exhaustive
@pytest.mark.parametrize("over", ["unix", "tcp"])
def test_a_tenant_that_stops_reading_a_big_read_while_its_lease_expires(
    daemon: Daemon, neighbour: Neighbour, over: str
) -> None:
    with RawPeer(daemon.address if over == "unix" else daemon.tcp_address).hello() as peer:
        ident = peer.acquire(lease_alloc(64 << 20, ttl_ms=600)).lease_id
        peer.attach(ident)
        handle = peer.request(Opcode.MEM_ALLOC, MemAlloc(MAX_DATA_BYTES), ident).handle
        body = MemRead(handle, 0, MAX_DATA_BYTES)
        peer.sock.sendall(b"".join(frame_of(Opcode.MEM_READ, body, number, ident) for number in range(100, 108)))
        wait_until(
            lambda: neighbour.check() and daemon.query(ident)["state"] == "torndown", "the lease ends all the same"
        )
        assert not daemon.has_worker(ident)
        assert daemon.query(ident)["cause"] == "expired"
        peer.check_closed()


def test_a_tenant_that_sends_half_a_frame_and_lets_its_lease_expire(daemon: Daemon) -> None:
    with RawPeer(daemon.address).hello() as peer:
        ident = peer.acquire(lease_alloc(ttl_ms=400)).lease_id
        peer.attach(ident)
        peer.sock.sendall(frame_of(Opcode.MEM_WRITE, MemWrite(1, 0, bytes(1 << 16)), 50, ident)[: 1 << 15])
        wait_until(lambda: daemon.query(ident)["state"] == "torndown", "the lease ends")
        end = peer.end()
        assert isinstance(end, EndOfStream) or end.failure.status is Status.LEASE_EXPIRED


def test_a_peer_that_closes_its_sending_half(daemon: Daemon) -> None:
    with RawPeer(daemon.address).hello() as peer:
        peer.sock.shutdown(socket.SHUT_WR)
        peer.check_closed()


def test_half_closed_connections_in_every_state(daemon: Daemon) -> None:
    hello = frame_of(Opcode.HELLO, Hello(0, "gone", ()), 1)
    for said in (b"", hello[:7], hello, hello + frame_of(Opcode.PING, Ping(1), 2)):
        with connect(daemon.address) as sock:
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass


def test_a_client_that_vanishes_during_its_acquire(daemon: Daemon) -> None:
    for _ in range(20):
        with connect(daemon.address) as sock:
            hello = frame_of(Opcode.HELLO, Hello(0, "gone", ()), 1)
            sock.sendall(hello + frame_of(Opcode.LEASE_ALLOC, lease_alloc(), 2))
    wait_until(lambda: not daemon.leases(), "leases nobody knows of are given back")


def test_bytes_behind_an_attach_reach_the_worker(daemon: Daemon) -> None:
    with RawPeer(daemon.address).hello() as owner:
        ident = owner.acquire().lease_id
        with RawPeer(daemon.address) as peer:
            frames = [peer.connection.send_request(Opcode.HELLO, Hello(0, "eager", ()))[1]]
            frames.append(frame_of(Opcode.ATTACH, Attach(()), 2, ident))
            frames.append(frame_of(Opcode.MEM_ALLOC, MemAlloc(64), 3, ident))
            frames += [frame_of(Opcode.PING, Ping(number), number, ident) for number in range(4, 500)]
            frames.append(frame_of(Opcode.SYNC, Empty(), 500, ident, flags=Flag.QUIET))
            frames.append(frame_of(Opcode.PING, Ping(501), 501, ident))
            peer.sock.sendall(b"".join(frames))
            assert _reply_numbers(peer.sock, 501) == [*range(1, 500), 501]
        owner.free(ident)


def _reply_numbers(sock: socket.socket, last: int) -> list[int]:
    """Return the request ids of the replies up to `last`, in the order in which they arrived."""
    reader = FrameReader(MAX_PAYLOAD_BYTES)
    numbers: list[int] = []
    while last not in numbers:
        data = sock.recv(1 << 16)
        assert data, numbers[-5:]
        reader.receive_data(data)
        while (frame := reader.next_frame()) is not None:
            assert frame.status == 0
            numbers.append(frame.request_id)
    return numbers


def test_attach_a_session_split_at_every_byte(daemon: Daemon) -> None:
    """The hand-over of the socket to the worker loses no byte, wherever the stream is cut into two segments."""
    with RawPeer(daemon.address).hello() as owner:
        ident = owner.acquire(lease_alloc(exclusivity=0)).lease_id
        stream = b"".join(
            [
                frame_of(Opcode.HELLO, Hello(0, "cut", ()), 1),
                frame_of(Opcode.ATTACH, Attach(()), 2, ident),
                frame_of(Opcode.PING, Ping(3), 3, ident),
            ]
        )
        for at in range(1, len(stream)):
            with connect(daemon.address) as sock:
                sock.sendall(stream[:at])
                sock.sendall(stream[at:])
                assert _reply_numbers(sock, 3) == [1, 2, 3]
                # Close it, so that the worker has room for the next connection.
                sock.shutdown(socket.SHUT_WR)
                assert not sock.recv(1)
        owner.request(Opcode.LEASE_FREE, LeaseRef(ident))


def test_goodbye_is_read_before_the_close(impatient: Daemon) -> None:
    with RawPeer(impatient.tcp_address) as peer:
        assert isinstance(peer.end(), Goodbye)
    with impatient.builder().acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)
