"""A broker that has run out of descriptors refuses in words, leaks nothing, and works again when it has some."""

import resource
from collections.abc import Callable

from gpulease.client import GpuSession
from gpulease.protocol import Failure, Opcode, Status
from helpers.daemon import Daemon
from helpers.kernels import Neighbour, check_main_job
from helpers.raw_peer import RawPeer, lease_alloc


def test_no_descriptor_is_left_for_a_worker(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    _, hard = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
    with daemon.builder().acquire() as lease, GpuSession(lease) as session, RawPeer(daemon.address).hello() as peer:
        neighbour = Neighbour(session)
        files = len(daemon.open_files())
        for room in range(3):
            limit = max(daemon.open_files()) + 1 + room
            resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (limit, hard))
            result = peer.ask(Opcode.LEASE_ALLOC, lease_alloc())
            resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (hard, hard))
            assert isinstance(result, Failure)
            assert result.status is Status.SESSION_FAILED
            assert "Too many open files" in result.message
            neighbour.check()
            assert len(daemon.open_files()) == files
        peer.free(peer.acquire().lease_id)
        assert len(daemon.leases()) == 1


def test_no_descriptor_is_left_for_a_connection(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        neighbour = Neighbour(session)
        limit = max(daemon.open_files()) + 1
        _, hard = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (limit, hard))
        waiting = [RawPeer(daemon.address) for _ in range(20)]
        # Who is inside already is served.
        lease.renew(30)
        neighbour.check()
        for peer in waiting:
            peer.sock.close()
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (hard, hard))
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)
