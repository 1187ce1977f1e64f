"""A card's whole capacity can be leased, and not a byte more.

Further requests are refused at once, or wait if they ask to.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from gpulease.client import CapacityExceeded, GpuLease, GpuSession
from gpulease.protocol import Opcode, Status
from helpers.daemon import Daemon
from helpers.kernels import check_main_job
from helpers.raw_peer import RawPeer, lease_alloc
from helpers.waiting import PATIENCE_S

GIB = 1 << 30
SOON_S = 60.0


@pytest.fixture
def six(daemon: Daemon) -> Iterator[list[GpuLease]]:
    """Yield six leases of 1 GiB each, which use the whole card."""
    with ExitStack() as stack:
        yield [stack.enter_context(daemon.builder(GIB).acquire()) for _ in range(6)]


def test_the_seventh_is_refused_at_once(daemon: Daemon, six: list[GpuLease]) -> None:
    assert daemon.available_bytes() == 0
    started = time.monotonic()
    with pytest.raises(CapacityExceeded, match="other leases use the memory") as caught:
        daemon.builder(GIB).acquire()
    assert time.monotonic() - started < SOON_S
    assert caught.value.host_code == -4
    assert caught.value.hint
    assert len(daemon.leases()) == 6


def test_one_byte_too_many(daemon: Daemon, six: list[GpuLease]) -> None:
    six[0].free()
    with pytest.raises(CapacityExceeded):
        daemon.builder(GIB + 1).acquire()
    with daemon.builder(GIB).acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)


def test_all_six_work(six: list[GpuLease]) -> None:
    with ExitStack() as stack:
        sessions = [stack.enter_context(GpuSession(lease)) for lease in six]
        for session in sessions:
            check_main_job(session)


def test_the_seventh_waits_and_gets_what_is_freed(daemon: Daemon, six: list[GpuLease]) -> None:
    granted: list[GpuLease] = []
    waiting = threading.Thread(target=lambda: granted.append(daemon.builder(GIB).timeout(PATIENCE_S).acquire()))
    waiting.start()
    assert not granted
    six[3].free()
    waiting.join()
    (lease,) = granted
    with lease, GpuSession(lease) as session:
        check_main_job(session)


def test_an_expiry_frees_as_well_as_a_tenant(daemon: Daemon) -> None:
    with daemon.builder(5 * GIB).acquire():
        short = daemon.builder(GIB, seconds=0.4).acquire()
        with daemon.builder(GIB).timeout(PATIENCE_S).acquire() as next_one:
            assert daemon.query(short.lease_id)["cause"] == "expired"
            assert next_one.size_bytes == GIB


def test_a_wait_ends_at_its_deadline(daemon: Daemon, six: list[GpuLease]) -> None:
    started = time.monotonic()
    with pytest.raises(CapacityExceeded, match="after waiting"):
        daemon.builder(GIB).timeout(0.3).acquire()
    assert 0.3 <= time.monotonic() - started < SOON_S


def test_those_who_wait_are_served_in_order(daemon: Daemon, six: list[GpuLease]) -> None:
    with ExitStack() as stack:
        peers = [stack.enter_context(RawPeer(daemon.address).hello()) for _ in range(3)]
        for peer in peers:
            _, frame = peer.connection.send_request(Opcode.LEASE_ALLOC, lease_alloc(GIB, wait_ms=30_000))
            peer.sock.sendall(frame)
            # This request has its own connection, so it gets a reply although the first one waits.
            daemon.available_bytes()
        for lease, peer in zip(six, peers, strict=False):
            lease.free()
            grant = peer.next_event().result  # type: ignore[union-attr]
            assert grant.size_bytes == GIB  # type: ignore[union-attr]
        for report in daemon.leases():
            daemon.revoke(int(report["lease_id"], 16))


def test_who_leaves_the_line_gets_nothing(daemon: Daemon, six: list[GpuLease]) -> None:
    with RawPeer(daemon.address).hello() as peer:
        _, frame = peer.connection.send_request(Opcode.LEASE_ALLOC, lease_alloc(GIB, wait_ms=30_000))
        peer.sock.sendall(frame)
        daemon.available_bytes()
    six[0].free()
    with daemon.builder(GIB).timeout(PATIENCE_S).acquire() as lease:
        assert len(daemon.leases()) == 6
        assert lease.is_alive


def test_what_could_never_fit_does_not_wait(daemon: Daemon) -> None:
    started = time.monotonic()
    with pytest.raises(CapacityExceeded, match="largest possible slice"):
        daemon.builder(6 * GIB + 1).timeout(2 * SOON_S).acquire()
    assert time.monotonic() - started < SOON_S


@pytest.mark.parametrize("size_bytes", [0, 2**64 - 1])
def test_sizes_at_the_ends_of_the_range(daemon: Daemon, size_bytes: int) -> None:
    expected = Status.CAPACITY_EXCEEDED if size_bytes else Status.INVALID_REQUEST
    with RawPeer(daemon.address).hello() as peer:
        assert peer.refused(Opcode.LEASE_ALLOC, lease_alloc(size_bytes)).status is expected


def test_a_tenant_has_a_limit_of_leases(daemon: Daemon) -> None:
    with RawPeer(daemon.address).hello() as peer:
        grants = [peer.acquire(lease_alloc(1)) for _ in range(32)]
        assert len({grant.lease_id for grant in grants}) == 32
        for grant in grants:
            peer.free(grant.lease_id)
