"""A tenant writes any values into the other half of its ring. The worker trusts none of them, and nobody else is
affected.
"""

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from gpulease.client import GpuSession
from gpulease.protocol import Goodbye, Opcode, Status
from gpulease.protocol.errors import FramingError
from gpulease.protocol.framing import HEADER_BYTES
from gpulease.protocol.messages import Empty, Handle, Launch, MemAlloc, MemRead, ModuleLoad, ModuleLoaded, Ping
from gpulease.protocol.opcodes import Flag
from gpulease.protocol.ring import DATA_AT, SharedMemoryRequest
from helpers.daemon import Daemon
from helpers.kernels import TRANSFORM, Neighbour, packed_scale_args
from helpers.processes import cpu_seconds
from helpers.raw_peer import RawPeer, frame_of
from helpers.ring_peer import READER_SLEEPS, REPLY_HEAD, REPLY_WRITER_SLEEPS, TAIL, RingPeer
from helpers.waiting import wait_until


@pytest.fixture
def owner(daemon: Daemon) -> Iterator[RawPeer]:
    with RawPeer(daemon.address).hello() as owner:
        yield owner


@pytest.fixture
def attach(daemon: Daemon, owner: RawPeer) -> Iterator[Callable[[], RingPeer]]:
    """Yield a function that attaches a new connection to one lease's session."""
    lease_id = owner.acquire().lease_id
    peers: list[RingPeer] = []

    def open_one() -> RingPeer:
        peers.append(RingPeer(daemon.address).hello())
        assert peers[-1].attach_ring(lease_id).ring is not None
        return peers[-1]

    yield open_one
    for peer in peers:
        peer.__exit__()
    with contextlib.suppress(AssertionError):  # Some leases are revoked.
        owner.free(lease_id)


@pytest.mark.parametrize("ahead", [(1 << 19) + 100, 1 << 40, 2**63, 2**64 - 1])
def test_a_tail_that_jumps(attach: Callable[[], RingPeer], neighbour: Neighbour, ahead: int) -> None:
    peer = attach()
    assert peer.ask_in_ring(Opcode.PING, Ping(3)) == Ping(3)
    peer.words[TAIL] = ahead
    peer.bell()
    end = peer.next_event()
    assert isinstance(end, Goodbye)
    assert end.failure.status is Status.INVALID_REQUEST
    assert "the ring's writer claims" in end.failure.message
    peer.check_closed()
    assert attach().ask_in_ring(Opcode.SYNC, Empty()) == Empty()
    neighbour.check()


@pytest.mark.parametrize("head", [1, 2**64 - 1])
def test_a_head_that_jumps(attach: Callable[[], RingPeer], neighbour: Neighbour, head: int) -> None:
    """The worker detects it once it needs the room that the head claims to be free."""
    peer = attach()
    handle = peer.ask_in_ring(Opcode.MEM_ALLOC, MemAlloc(1 << 20))
    assert isinstance(handle, Handle)
    peer.words[REPLY_HEAD] = head if head > 1 else (1 << 19) + HEADER_BYTES + 9
    _, frame = peer.connection.send_request(
        Opcode.MEM_READ, MemRead(handle.handle, 0, 1 << 20), session_id=peer.session_id
    )
    peer.put(frame)
    peer.check_closed()
    assert attach().ask_in_ring(Opcode.SYNC, Empty()) == Empty()
    neighbour.check()


def test_whatever_the_other_words_say(attach: Callable[[], RingPeer]) -> None:
    peer = attach()
    for word in (READER_SLEEPS, REPLY_WRITER_SLEEPS, 24, 48):
        for value in (0, 1, 2**64 - 1):
            peer.words[word] = value
            assert peer.ask_in_ring(Opcode.PING, Ping(value), rings=True) == Ping(value)


def test_a_worker_that_sleeps_looks_when_it_is_rung_at(attach: Callable[[], RingPeer]) -> None:
    """If a client clears the word that says that the worker sleeps, only this client waits."""
    peer = attach()
    wait_until(lambda: peer.words[READER_SLEEPS], "the worker sleeps")
    peer.words[READER_SLEEPS] = 0
    assert peer.ask_in_ring(Opcode.PING, Ping(5), rings=True) == Ping(5)


def test_bells_without_end_and_without_reason(
    daemon: Daemon, attach: Callable[[], RingPeer], neighbour: Neighbour
) -> None:
    peer = attach()
    peer.sock.setblocking(False)
    rung, until = 0, time.monotonic() + 60
    while rung <= 1 << 20:
        assert time.monotonic() < until, f"the worker read {rung} bells"
        try:
            rung += peer.sock.send(bytes(4096))
        except BlockingIOError:
            neighbour.check()
    assert peer.ask_in_ring(Opcode.PING, Ping(1)) == Ping(1)
    assert daemon.revoke(peer.session_id) == 0


def test_a_frame_that_never_ends(attach: Callable[[], RingPeer], neighbour: Neighbour) -> None:
    peer = attach()
    endless = frame_of(Opcode.MODULE_LOAD, Empty(), 9, peer.session_id)
    header = endless[:12] + (1 << 30).to_bytes(4, "big") + endless[16:]
    peer.put(header)
    end = peer.next_event()
    assert isinstance(end, Goodbye)
    assert "is announced" in end.failure.message
    neighbour.check()


def test_replies_that_nobody_reads(daemon: Daemon, attach: Callable[[], RingPeer], neighbour: Neighbour) -> None:
    """The worker waits for room until the lease ends, with or without wake-ups.

    To revoke the lease takes no longer than usual.
    """
    peer = attach()
    handle = peer.ask_in_ring(Opcode.MEM_ALLOC, MemAlloc(1 << 20))
    assert isinstance(handle, Handle)
    for _ in range(2):
        _, frame = peer.connection.send_request(
            Opcode.MEM_READ, MemRead(handle.handle, 0, 1 << 20), session_id=peer.session_id
        )
        peer.put(frame)
    wait_until(lambda: peer.words[REPLY_WRITER_SLEEPS], "the worker waits for room")
    peer.bell()
    neighbour.check()
    assert daemon.revoke(peer.session_id) == 0


def test_the_memory_can_be_cut_short_by_nobody(attach: Callable[[], RingPeer]) -> None:
    peer = attach()
    for size in (0, 4096, peer.layout.total_bytes - 1, peer.layout.total_bytes + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(peer.fd, size)
    # The client can discard the memory's pages. They then read as zeros, which are invalid counters.
    assert peer.ask_in_ring(Opcode.PING, Ping(1)) == Ping(1)


def test_a_client_that_is_gone_leaves_its_session_to_the_next(attach: Callable[[], RingPeer]) -> None:
    peer = attach()
    _, frame = peer.connection.send_request(Opcode.PING, Ping(1))
    peer.put(frame[:-3])
    peer.sock.close()
    assert attach().ask_in_ring(Opcode.PING, Ping(2)) == Ping(2)


def test_a_quiet_flood_is_served_and_starves_nobody(
    daemon: Daemon, attach: Callable[[], RingPeer], neighbour: Neighbour
) -> None:
    peer = attach()
    number, until = 100, time.monotonic() + 0.3
    while time.monotonic() < until:
        frame = frame_of(Opcode.SYNC, Empty(), number, peer.session_id, Flag.QUIET)
        peer.put(frame * 50)
        number += 1
    assert daemon.query(peer.session_id)["operations"] > 50
    assert daemon.revoke(peer.session_id) == 0


@pytest.mark.parametrize("words", [(), (READER_SLEEPS, 24, REPLY_WRITER_SLEEPS, 48), (TAIL, REPLY_HEAD)])
def test_what_is_served_is_scribbled_over_meanwhile(
    attach: Callable[[], RingPeer], neighbour: Neighbour, words: tuple[int, ...]
) -> None:
    """Bytes and counters of launches and syncs change while the worker reads them.

    The worker may close the connection.
    """
    peer = attach()
    loaded = peer.ask_in_ring(Opcode.MODULE_LOAD, ModuleLoad(TRANSFORM))
    assert isinstance(loaded, ModuleLoaded)
    args, sizes = packed_scale_args(0, 0)
    launch = frame_of(
        Opcode.LAUNCH, Launch(loaded.module, "scale", 1, 1, 1, 32, 1, 1, 0, args, sizes), 7, peer.session_id, Flag.QUIET
    )
    peer.put(launch * 4)
    stop = threading.Event()
    scribbler = threading.Thread(target=_scribble, args=(peer, words, stop))
    scribbler.start()
    until = time.monotonic() + 0.3
    with contextlib.suppress(FramingError, AssertionError, OSError):
        while time.monotonic() < until:
            peer.put(launch * 8 + frame_of(Opcode.SYNC, Empty(), 8, peer.session_id))
            peer.replies.take(memoryview(bytearray(4096)))
    stop.set()
    scribbler.join()
    peer.sock.close()
    neighbour.check()
    again = attach()
    # A launch may have been read with changed bytes. Its fault is reported once.
    for number in (1, 2):
        _, frame = again.connection.send_request(Opcode.PING, Ping(number), session_id=again.session_id)
        again.put(frame)
        reply = again.next_event()
    assert reply.result == Ping(2)


def _scribble(peer: RingPeer, words: tuple[int, ...], stop: threading.Event) -> None:
    rng = random.Random(5)
    while not stop.is_set():
        # Mostly change argument bytes, because a frame that is invalid ends the connection.
        peer.memory[DATA_AT + rng.randrange(1 << 14)] = rng.randrange(256)
        for word in words:
            peer.words[word] = peer.words[word] + rng.choice((-1, 0, 0, 1, 90)) & 2**64 - 1
        time.sleep(0.0002)


def test_no_ring_where_it_can_not_be(daemon: Daemon, owner: RawPeer) -> None:
    lease_id = owner.acquire().lease_id
    with RingPeer(daemon.address).hello() as plain:
        assert plain.attach_ring(lease_id, SharedMemoryRequest()).ring is None
        assert plain.fds == []
        assert plain.request(Opcode.PING, Ping(1), lease_id) == Ping(1)
    owner.free(lease_id)


def test_sessions_that_wait_cost_nothing(daemon: Daemon) -> None:
    leases = [daemon.builder().acquire() for _ in range(8)]
    sessions = [GpuSession(lease) for lease in leases]
    for session in sessions:
        session.sync()
    workers = [daemon.worker_pid(lease.lease_id) for lease in leases]
    wait_until(lambda: is_quiet(workers), "eight workers use no processor for 0.2 s")
    for session, lease in zip(sessions, leases, strict=True):
        session.close()
        lease.free()


def is_quiet(pids: list[int], seconds: float = 0.2) -> bool:
    before = [cpu_seconds(pid) for pid in pids]
    time.sleep(seconds)
    return before == [cpu_seconds(pid) for pid in pids]
