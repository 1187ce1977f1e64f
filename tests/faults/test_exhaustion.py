"""Processes without free descriptors refuse requests with a reason, leak nothing, and later work again."""

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gpulease.client import GpuExclusivityClass, GpuSession
from gpulease.daemon.workers.worker import MAX_HAND_OVERS
from gpulease.protocol import EndOfStream, Failure, Opcode, RevokeOutcome, Status
from gpulease.protocol.messages import Attach, LeaseRevoke
from helpers.daemon import Daemon
from helpers.kernels import Neighbour, check_main_job
from helpers.processes import cpu_seconds, open_files
from helpers.raw_peer import RawPeer, lease_alloc
from helpers.waiting import wait_until

pytestmark = pytest.mark.exhaustive

LATEST_S = 2.0
"""Seconds. Far more than an expiry is ever late."""

SAME_USER = 'sandbox_without = ["user"]'
"""Settings with which workers run as the same user: else only CAP_SYS_RESOURCE permits to change their limits
(prlimit(2)).
"""


@contextmanager
def descriptors_left(pid: int, room: int) -> Iterator[None]:
    """Let a process open `room` more descriptors during the block, and no others."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    files = open_files(pid)
    free = [number for number in range(len(files) + room + 1) if number not in files]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[room], hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def test_no_descriptor_is_left_for_a_worker(daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease, GpuSession(lease) as session, RawPeer(daemon.address).hello() as peer:
        neighbour = Neighbour(session)
        files = len(daemon.open_files())
        for room in range(4):
            with descriptors_left(daemon.process.pid, room):
                result = peer.ask(Opcode.LEASE_ALLOC, lease_alloc())
            assert isinstance(result, Failure)
            assert result.status is Status.BUSY
            assert "Too many open files" in result.message
            assert "LimitNOFILE" in result.hint
            neighbour.check()
            assert len(daemon.open_files()) == files
        peer.free(peer.acquire().lease_id)
        assert len(daemon.leases()) == 1


def test_no_descriptor_is_left_for_a_hand_over(daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease, RawPeer(daemon.address).hello() as peer:
        with descriptors_left(daemon.process.pid, 0):
            result = peer.attach(lease.lease_id)
        assert isinstance(result, Failure)
        assert result.status is Status.BUSY
        assert not isinstance(peer.attach(lease.lease_id), Failure)


def test_no_descriptor_is_left_for_a_connection(daemon: Daemon) -> None:
    broker = daemon.process.pid
    with (
        daemon.builder().acquire() as lease,
        GpuSession(lease) as session,
        RawPeer(daemon.address).hello() as operator,
    ):
        neighbour = Neighbour(session)
        soon, other = daemon.builder(seconds=0.6).acquire(), daemon.builder().acquire()
        with descriptors_left(broker, 0):
            waiting = [RawPeer(daemon.address) for _ in range(20)]
            # Connections that were open before are served, and leases end in time.
            lease.renew(30)
            revoked = operator.request(Opcode.LEASE_REVOKE, LeaseRevoke(other.lease_id, "maintenance"))
            assert revoked.outcome == RevokeOutcome.TORN_DOWN
            wait_until(lambda: not daemon.has_worker(soon.lease_id), "a lease ends in time")
            neighbour.check()
            began_s, used_s = time.monotonic(), cpu_seconds(broker)
            lease.renew(30)
            time.sleep(0.3)
            assert cpu_seconds(broker) - used_s < (time.monotonic() - began_s) / 2, "it does not spin"
            for peer in waiting:
                peer.sock.close()
        report = daemon.query(soon.lease_id)
        assert (report["state"], report["cause"]) == ("torndown", "expired")
        assert report["ended_after_deadline_us"] < LATEST_S * 1e6
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)


def test_no_descriptor_is_left_to_the_zygote(daemon: Daemon) -> None:
    """The zygote can't even receive the descriptors that come with a request for a worker."""
    zygote = daemon.zygote_pid()
    with daemon.builder().acquire() as lease, GpuSession(lease) as session, RawPeer(daemon.address).hello() as peer:
        neighbour = Neighbour(session)
        files = len(open_files(zygote))
        for room in range(2):
            with descriptors_left(zygote, room):
                result = peer.ask(Opcode.LEASE_ALLOC, lease_alloc())
            assert isinstance(result, Failure)
            assert result.status is Status.SESSION_FAILED
            assert "the zygote has no descriptors left" in result.message
            neighbour.check()
            assert len(open_files(zygote)) == files
        peer.free(peer.acquire().lease_id)
        assert daemon.zygote_pid() == zygote


def test_no_descriptor_is_left_to_a_worker(start_daemon: Callable[..., Daemon]) -> None:
    """A new connection is closed if its socket can't be received. If only shared memory can't, it works without."""
    daemon = start_daemon(config=SAME_USER)
    with daemon.builder().exclusivity(GpuExclusivityClass.SHARED).acquire() as lease, GpuSession(lease) as session:
        worker = daemon.worker_pid(lease.lease_id)
        neighbour = Neighbour(session)
        files = len(open_files(worker))
        with descriptors_left(worker, 0):
            # Hand-overs that failed must not count for ever as hand-overs that are still under way.
            for _ in range(MAX_HAND_OVERS + 1):
                check_attach_is_closed(daemon, lease.lease_id)
            neighbour.check()
        for room in (1, 2):
            with descriptors_left(worker, room), GpuSession(lease) as another:
                check_main_job(another)
            wait_until(lambda: len(open_files(worker)) == files, "nothing of it is left open")
        neighbour.check()


def check_attach_is_closed(daemon: Daemon, lease_id: int) -> None:
    with RawPeer(daemon.address).hello() as peer:
        _, frame = peer.connection.send_request(Opcode.ATTACH, Attach(()), session_id=lease_id)
        peer.sock.sendall(frame)
        assert isinstance(peer.next_event(), EndOfStream)
