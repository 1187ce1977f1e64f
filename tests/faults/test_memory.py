"""A process may allocate no more memory: new work is refused with a reason; leases continue, and end in time."""

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from gpulease.client import Busy, GpuSession, GpuSessionFailed
from gpulease.protocol import Failure, Opcode, RevokeOutcome, Status
from gpulease.protocol.messages import LeaseRevoke, LeaseSubscribe
from helpers.audit_log import check_whole, config
from helpers.daemon import Daemon
from helpers.kernels import Neighbour, check_main_job
from helpers.raw_peer import RawPeer, lease_alloc
from helpers.waiting import wait_until

from .test_exhaustion import LATEST_S, SAME_USER

pytestmark = pytest.mark.exhaustive

OUT_OF_MEMORY = "out of memory"
LIMITS = {"addresses": (resource.RLIMIT_AS, "VmSize"), "data": (resource.RLIMIT_DATA, "VmData")}


@contextmanager
def memory_left(pid: int, room_bytes: int, of: str = "addresses") -> Iterator[None]:
    """Let a process allocate only so many bytes more during the block."""
    number, name = LIMITS[of]
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (has_kib,) = [int(line.split()[1]) for line in lines if line.startswith(f"{name}:")]
    _, hard = resource.prlimit(pid, number)
    resource.prlimit(pid, number, ((has_kib << 10) + room_bytes, hard))
    try:
        yield
    finally:
        # The process may have ended because of the limit.
        with suppress(ProcessLookupError):
            resource.prlimit(pid, number, (hard, hard))


@pytest.mark.parametrize("of", LIMITS)
def test_no_memory_is_left_to_the_broker(start_daemon: Callable[..., Daemon], tmp_path: Path, of: str) -> None:
    folder = tmp_path / "log"
    daemon = start_daemon(config=f'state = "{tmp_path / "state"}"\n' + config(folder, required=True), tcp=True)
    daemon.allowed_trouble.append(OUT_OF_MEMORY)
    with (
        daemon.builder().acquire() as lease,
        GpuSession(lease) as session,
        RawPeer(daemon.address).hello() as operator,
    ):
        neighbour = Neighbour(session)
        soon, other, given = (daemon.builder(seconds=s).acquire() for s in (1.0, 60, 60))
        for room in (0, 1 << 19):
            with memory_left(daemon.process.pid, room, of):
                refused = operator.refused(Opcode.LEASE_ALLOC, lease_alloc())
                assert refused.status is Status.BUSY
                assert OUT_OF_MEMORY in refused.message
                with pytest.raises(Busy, match=OUT_OF_MEMORY):
                    daemon.builder().acquire()
                # A tenant that is not connected yet gets a goodbye.
                with RawPeer(daemon.tcp_address) as stranger:
                    assert stranger.goodbye().status is Status.BUSY
                told = operator.refused(Opcode.LEASE_SUBSCRIBE, LeaseSubscribe(lease.lease_id))
                assert told.status is Status.BUSY
                lease.renew(60)
                neighbour.check()
                if not room:
                    given.free()
                    revoked = operator.request(Opcode.LEASE_REVOKE, LeaseRevoke(other.lease_id, "maintenance"))
                    assert revoked.outcome == RevokeOutcome.TORN_DOWN
                    wait_until(lambda: daemon.query(soon.lease_id)["state"] == "torndown", "a lease ends in time")
                    assert daemon.query(soon.lease_id)["ended_after_deadline_us"] < LATEST_S * 1e6
            with daemon.builder().acquire() as another:
                daemon.query(another.lease_id)
        assert (
            daemon.log().count(f"{OUT_OF_MEMORY}: new requests") == daemon.log().count("memory is available again") == 2
        )
    assert check_whole(folder) > 10


def test_no_memory_is_left_to_the_zygote(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    zygote = daemon.zygote_pid()
    with daemon.builder().acquire() as lease, GpuSession(lease) as session, RawPeer(daemon.address).hello() as peer:
        neighbour = Neighbour(session)
        for of in LIMITS:
            # Workers inherit the zygote's limits.
            with memory_left(zygote, 1 << 20, of):
                result = peer.ask(Opcode.LEASE_ALLOC, lease_alloc(256 << 20))
            assert isinstance(result, Failure)
            assert result.status is Status.SESSION_FAILED
            assert "Cannot allocate memory" in result.message
            neighbour.check()
        peer.free(peer.acquire().lease_id)
        assert daemon.zygote_pid() == zygote


def test_no_memory_is_left_to_a_worker(start_daemon: Callable[..., Daemon]) -> None:
    """Python or a compiler in the worker runs out of memory.

    Either way the lease ends, its tenant gets the reason, and nobody else is affected.
    """
    daemon = start_daemon(config=SAME_USER)
    # The worker may also run out of memory while it reports this, or while it cleans up.
    daemon.allowed_trouble += ["Traceback", "Exception ignored"]
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        neighbour = Neighbour(session)
        doomed = daemon.builder().acquire()
        with GpuSession(doomed) as victim, memory_left(daemon.worker_pid(doomed.lease_id), 0):
            with pytest.raises(GpuSessionFailed, match=r"process died|no memory left for its process"):
                check_main_job(victim)
            neighbour.check()
            daemon.wait_for_end(doomed.lease_id)
        assert daemon.query(doomed.lease_id)["cause"] in ("worker_died", "faulted")
        assert daemon.available_bytes() == (6 << 30) - lease.size_bytes


def test_the_kernel_ends_workers_first(daemon: Daemon) -> None:
    """To check the scores is enough: the kernel kills with SIGKILL, which tests/faults/test_kills.py tests."""

    def score(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    with daemon.builder().acquire() as lease:
        worker = daemon.worker_pid(lease.lease_id)
        assert score(worker) > max(score(daemon.process.pid), score(daemon.zygote_pid()))
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(GpuSessionFailed, match="SIGKILL"):
            wait_until(lambda: lease.renew(60), "the lease is over")
