"""A connection of a shared session does not read: neither the session's other connections nor the broker wait."""

import contextlib
import select
import time
from collections.abc import Iterator

import pytest

from gpulease.client import GpuLease, GpuSession, Revoked
from gpulease.daemon.session.connection import UNSENT_TIMEOUT_S
from gpulease.protocol import Exclusivity, Opcode
from gpulease.protocol.framing import FrameReader
from gpulease.protocol.limits import MAX_DATA_BYTES, MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import MemAlloc, MemRead, Ping
from helpers.daemon import Daemon
from helpers.kernels import Neighbour
from helpers.raw_peer import RawPeer, frame_of
from helpers.ring_peer import RingPeer
from helpers.waiting import wait_until

pytestmark = pytest.mark.exhaustive

HELD_UP_S = UNSENT_TIMEOUT_S / 2
"""Seconds. A round of the neighbour takes milliseconds; if it waited for the hostile peer, it would take
UNSENT_TIMEOUT_S.
"""


@pytest.fixture
def shared(daemon: Daemon) -> Iterator[GpuLease]:
    files = len(daemon.open_files())
    with daemon.builder(256 << 20, 60).exclusivity(Exclusivity.SHARED).acquire() as lease:
        yield lease
    daemon.check_idle(files)


def hostile(daemon: Daemon, lease: GpuLease, over: str) -> RawPeer:
    """Return a peer of the session that repeatedly requests 16 MiB and reads nothing."""
    peer = RingPeer(daemon.address) if over == "ring" else RawPeer(daemon.address)
    peer.hello()
    if isinstance(peer, RingPeer):
        peer.attach_ring(lease.lease_id)
        handle = peer.ask_in_ring(Opcode.MEM_ALLOC, MemAlloc(MAX_DATA_BYTES)).handle  # type: ignore[attr-defined]
    else:
        peer.attach(lease.lease_id)
        handle = peer.request(Opcode.MEM_ALLOC, MemAlloc(MAX_DATA_BYTES), lease.lease_id).handle
    read = MemRead(handle, 0, MAX_DATA_BYTES)
    frames = b"".join(frame_of(Opcode.MEM_READ, read, number, lease.lease_id) for number in range(100, 104))
    if isinstance(peer, RingPeer):
        peer.put(frames)
        peer.bell()
    else:
        peer.sock.sendall(frames)
    return peer


@pytest.mark.parametrize("over", ["unix", "ring"])
def test_the_others_go_on(daemon: Daemon, shared: GpuLease, over: str) -> None:
    with GpuSession(shared) as session, GpuSession(shared, shared_memory=False) as third:
        neighbours = [Neighbour(session), Neighbour(third)]
        with hostile(daemon, shared, over):
            began = time.monotonic()
            for _ in range(20):
                assert all(neighbour.check() for neighbour in neighbours)
            # The worker still serves the broker's channel: a new connection is accepted.
            with GpuSession(shared) as late:
                late.sync()
            assert time.monotonic() - began < HELD_UP_S


@pytest.mark.parametrize("over", ["unix", "ring"])
def test_it_may_read_on(daemon: Daemon, shared: GpuLease, over: str) -> None:
    """If the peer reads later, it gets complete replies in order, and its requests were executed."""
    with GpuSession(shared) as session, hostile(daemon, shared, over) as peer:
        neighbour = Neighbour(session)
        assert neighbour.check()
        peer.sock.settimeout(60)
        reader = FrameReader(MAX_PAYLOAD_BYTES)
        into = memoryview(bytearray(1 << 18))
        numbers: list[int] = []
        while len(numbers) < 4:
            if isinstance(peer, RingPeer):
                count = peer.replies.take(into)
                if not count and peer.replies.doze():
                    assert select.select([peer.sock], [], [], 10)[0]
                    peer.sock.recv(4096)
                    peer.replies.rise()
            else:
                count = peer.sock.recv_into(into)
                assert count
            reader.receive_data(into[:count])
            while (frame := reader.next_frame()) is not None:
                assert (frame.status, len(frame.payload)) == (0, MAX_DATA_BYTES + 4)
                numbers.append(frame.request_id)
        assert numbers == [100, 101, 102, 103]
        assert neighbour.check()
        ping = (Opcode.PING, Ping(3))
        if isinstance(peer, RingPeer):
            assert peer.ask_in_ring(*ping) == Ping(3)
        else:
            assert peer.request(*ping, shared.lease_id) == Ping(3)


@pytest.mark.parametrize("over", ["unix", "ring"])
def test_its_lease_ends_all_the_same(daemon: Daemon, over: str) -> None:
    with (
        daemon.builder(64 << 20).exclusivity(Exclusivity.SHARED).acquire() as lease,
        GpuSession(lease) as session,
        hostile(daemon, lease, over),
    ):
        assert daemon.revoke(lease.lease_id) == 0
        with pytest.raises(Revoked):
            session.sync()


@pytest.mark.parametrize("over", ["unix", "ring"])
def test_one_that_leaves(daemon: Daemon, shared: GpuLease, over: str) -> None:
    """After a peer has left, its place in the session is free."""
    with contextlib.ExitStack() as peers:
        for _ in range(15):
            with hostile(daemon, shared, over):
                pass
        session = peers.enter_context(GpuSession(shared))
        for _ in range(15):
            wait_until(lambda: _can_attach(daemon, shared, peers), "there is a place")
        session.sync()


def _can_attach(daemon: Daemon, lease: GpuLease, peers: contextlib.ExitStack) -> bool:
    peer = peers.enter_context(RawPeer(daemon.address).hello())
    return not hasattr(peer.attach(lease.lease_id), "status")


def test_too_much_left_unread_costs_whoever_asks_for_more(daemon: Daemon, shared: GpuLease) -> None:
    with GpuSession(shared) as session, contextlib.ExitStack() as stack:
        neighbour = Neighbour(session)
        peers = [stack.enter_context(hostile(daemon, shared, "unix")) for _ in range(6)]
        wait_until(lambda: neighbour.check() and any(map(_is_cut, peers)), "one is cut off")
        assert neighbour.check()


def _is_cut(peer: RawPeer) -> bool:
    poll = select.poll()
    poll.register(peer.sock, 0)
    return any(found & select.POLLHUP for _, found in poll.poll(0))
