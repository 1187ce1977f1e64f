"""One-shot submits: one kernel in its own context, next to a session. A fault of one does not affect the other."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gpulease.client import (
    AllocFailed,
    Busy,
    Disconnected,
    Drained,
    GpuLease,
    GpuLeaseError,
    GpuSession,
    InvalidRequest,
    KernelArgs,
    LaunchFailed,
    LeaseExpired,
    LoadFailed,
    Revoked,
    SyncFailed,
    TimedOut,
    aio,
)
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Drain, Empty
from helpers.daemon import Daemon, Faults, python_environment
from helpers.kernels import FAULTS, TRANSFORM, Neighbour, numbers, start_stray_store
from helpers.remote import Pki
from helpers.submits import (
    ENDS,
    ROOM,
    Running,
    check_scaled,
    endless,
    is_launched,
    running,
    scaling,
    start_endless,
    stray,
    timed_out,
    workers_of,
)
from helpers.waiting import wait_until

A_HUNDRED = 100

StartDaemon = Callable[..., Daemon]


@pytest.fixture
def gpu(daemon: Daemon) -> Iterator[GpuLease]:
    """Yield a lease with memory for submits."""
    with daemon.builder().submits(ROOM).acquire() as lease:
        yield lease


@pytest.fixture
def session_beside(gpu: GpuLease) -> Iterator[Neighbour]:
    """Yield the lease's own session. Its results must be correct during the whole test."""
    with GpuSession(gpu) as session:
        neighbour = Neighbour(session)
        yield neighbour
        neighbour.check()


def test_a_submit_answers_its_outputs(gpu: GpuLease) -> None:
    x = numbers(1024)
    binary = TRANSFORM
    (y,) = gpu.submit("scale", binary).grid([4]).block([256]).inout(x).arg(np.uint32(1024)).arg(np.float32(2)).launch()
    np.testing.assert_array_equal(np.frombuffer(y, np.float32), x * 2)


def test_outputs_are_zero_before_and_come_in_their_order(gpu: GpuLease) -> None:
    outputs = gpu.submit("fill_u32", FAULTS).block([2]).out(16).arg(np.uint32(2)).arg(np.uint32(7)).launch()
    assert outputs == [np.array([7, 7, 0, 0], np.uint32).tobytes()]


def test_coroutines_submit_too(daemon: Daemon) -> None:
    async def both() -> None:
        async with await aio.GpuBuilder(daemon.address).min_vram(1 << 20).submits(ROOM).acquire() as lease:
            check_scaled(await scaling(lease).launch())
            with pytest.raises(SyncFailed, match="stray_store"):
                await stray(lease).launch()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(endless(lease).launch(), 0.3)
            check_scaled(await scaling(lease).launch())

    asyncio.run(both())


def test_session_and_submits_work_side_by_side(gpu: GpuLease, session_beside: Neighbour) -> None:
    for factor in range(1, 4):
        work = Running(scaling(gpu, factor=factor))
        while not work.is_over:
            session_beside.check()
        work.wait()
        assert work.outputs is not None, work.error
        check_scaled(work.outputs, factor=factor)
    assert gpu.query()["state"] == "active"


def test_a_fault_in_a_submit_is_told_and_leaves_the_session_whole(gpu: GpuLease, session_beside: Neighbour) -> None:
    session_beside.check()
    with pytest.raises(SyncFailed) as caught:
        stray(gpu).launch()
    assert caught.value.kernel == "stray_store"
    assert caught.value.address is not None
    session_beside.check()
    check_scaled(scaling(gpu).launch())


def test_a_fault_in_the_session_leaves_a_submit_whole(daemon: Daemon, gpu: GpuLease) -> None:
    with GpuSession(gpu) as session:

        def scene(work: Running) -> bool:
            module, buffer = session.module_load(FAULTS), session.mem_alloc(4)
            start_stray_store(session, module, buffer)
            with pytest.raises(SyncFailed):
                session.sync()
            session.sync()
            return not work.is_over

        timed_out(daemon, gpu, scene)
    check_scaled(scaling(gpu).launch())


BAD = {
    "no such kernel": (lambda gpu: gpu.submit("nothing", TRANSFORM), LaunchFailed, "no kernel 'nothing'"),
    "arguments that do not fit": (lambda gpu: gpu.submit("scale", TRANSFORM).out(4), LaunchFailed, "takes arguments"),
    "a block too large": (lambda gpu: scaling(gpu).block([2000]), LaunchFailed, "threads was requested"),
    "no program": (lambda gpu: gpu.submit("scale", "nonsense"), LoadFailed, "nonsense"),
    "no image": (lambda gpu: gpu.submit("scale", b""), LoadFailed, "line 1|empty|no bytes"),
    "too little room": (lambda gpu: gpu.submit("scale", TRANSFORM).out(ROOM + 1), AllocFailed, "submits"),
    "too many outputs": (
        lambda gpu: gpu.submit("scale", TRANSFORM).out((16 << 20) + 1),
        InvalidRequest,
        "must be from 1 to",
    ),
    "a number without a size": (lambda gpu: gpu.submit("scale", TRANSFORM).arg(7), InvalidRequest, "np.uint32"),
    "no bytes": (lambda gpu: gpu.submit("scale", TRANSFORM).arg(b""), InvalidRequest, "at least one byte"),
    "too large a frame": (lambda gpu: scaling(gpu).arg(bytes(65 << 20)), InvalidRequest, "at most"),
}


@pytest.mark.parametrize(("build", "kind", "words"), BAD.values(), ids=BAD)
def test_what_is_wrong_is_told(
    gpu: GpuLease, build: Callable[[GpuLease], object], kind: type[GpuLeaseError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        build(gpu).launch()  # type: ignore[attr-defined]  # a submission, if it gets so far
    check_scaled(scaling(gpu).launch())


def test_a_lease_without_a_session_submits_in_its_own_slice(daemon: Daemon) -> None:
    with daemon.builder(ROOM).acquire() as lease:
        for factor in (2, 3):
            check_scaled(scaling(lease, factor=factor).launch(), factor=factor)
        with GpuSession(lease) as session:  # Opened at once, so it waits until the submit has ended.
            Neighbour(session).check()
        with pytest.raises(InvalidRequest, match=r"GpuBuilder\(\).submits"):
            scaling(lease).launch()


def test_a_session_is_not_opened_while_a_submit_has_its_memory(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(faults=Faults({"gpulease.daemon.broker.handlers.attach_requests:SUBMIT_WAIT_S": 0.1}))
    with daemon.builder(ROOM).acquire() as lease, running(daemon, lease):
        with pytest.raises(Busy, match="a submit is using the lease's memory"):
            GpuSession(lease)
        lease.free()


def test_what_is_kept_for_submits_is_not_the_sessions(daemon: Daemon) -> None:
    with daemon.builder(ROOM).submits(3 * ROOM).acquire() as lease, GpuSession(lease) as session:
        assert (lease.size_bytes, session.slice_bytes) == (4 * ROOM, ROOM)
        with pytest.raises(AllocFailed):
            session.mem_alloc(ROOM + 1)
        nothing = KernelArgs().push_u32(0).push_u32(0)
        assert lease.submit("fill_u32", FAULTS).out(2 * ROOM).args(nothing).launch() == [bytes(2 * ROOM)]


def test_a_submit_that_takes_too_long_is_ended(daemon: Daemon, gpu: GpuLease, session_beside: Neighbour) -> None:
    begun = time.monotonic()
    with pytest.raises(TimedOut):
        endless(gpu).timeout_secs(0.3).launch()
    assert time.monotonic() - begun >= 0.3
    session_beside.check()
    check_scaled(scaling(gpu).launch())
    assert gpu.query()["state"] == "active"


@pytest.mark.exhaustive
def test_one_that_is_killed_before_it_can_say_so_has_timed_out_all_the_same(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(faults=Faults(constants={"gpulease.daemon.leases.submits:GRACE_MS": 0}))
    with daemon.builder().submits(ROOM).acquire() as lease:
        # The time limit begins when the context exists. It is long enough for the reply with the job's number to
        # arrive, even on a busy host: without the number, the client can't find its job in the lease's report.
        for _ in range(2):
            with pytest.raises(TimedOut):
                endless(lease).timeout_secs(1.0).launch()
        assert lease.query()["last_submit"]["timed_out"]


def test_max_kernel_secs_binds_submits_too(daemon: Daemon) -> None:
    with daemon.builder().submits(ROOM).max_kernel_secs(0.3).acquire() as lease:
        with pytest.raises(TimedOut):
            endless(lease).launch()
        assert lease.query()["state"] == "active"


@pytest.mark.parametrize(("end", "kind"), ENDS.values(), ids=ENDS)
def test_a_submit_ends_with_its_lease(
    daemon: Daemon, end: Callable[[Daemon, GpuLease], None], kind: type[GpuLeaseError]
) -> None:
    lease = daemon.builder().submits(ROOM).acquire()
    with running(daemon, lease) as work:
        end(daemon, lease)
    assert isinstance(work.error, kind), work.error
    assert ("maintenance at noon" in str(work.error)) == (kind is Revoked)
    daemon.wait_for_end(lease.lease_id)
    assert not workers_of(daemon.processes)


def test_a_submit_ends_when_its_lease_expires(daemon: Daemon) -> None:
    with daemon.builder(seconds=1.5).submits(ROOM).acquire() as lease:
        with pytest.raises(LeaseExpired):
            endless(lease).launch()
        daemon.wait_for_end(lease.lease_id)


@pytest.mark.exhaustive
def test_a_renewal_keeps_a_submit_alive(daemon: Daemon) -> None:
    deadlines_s: list[float] = []

    def renew(lease: GpuLease) -> Running:
        deadlines_s.append(time.monotonic() + lease.remaining_s)
        work = start_endless(daemon)(lease)
        lease.renew(60)
        return work

    lease, work, _ = daemon.short_lease(renew, submit_bytes=ROOM)
    with lease:
        wait_until(lambda: time.monotonic() > deadlines_s[-1], "it would have ended")
        assert is_launched(daemon, lease.lease_id)
        assert not work.is_over
        os.kill(workers_of(daemon.processes)[0], signal.SIGKILL)
        work.wait()
        assert lease.is_alive


@pytest.mark.exhaustive
def test_a_submit_ends_with_a_drain(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    with daemon.builder().submits(ROOM).acquire() as lease:
        with running(daemon, lease) as work:
            ask(Opcode.DRAIN, Drain(200), daemon.address)
        assert isinstance(work.error, Drained), work.error
    ask(Opcode.DRAIN_CANCEL, Empty(), daemon.address)


def test_the_death_of_its_worker_is_told_and_ends_no_lease(
    daemon: Daemon, gpu: GpuLease, session_beside: Neighbour
) -> None:
    with running(daemon, gpu) as work:
        (pid,) = workers_of(daemon.processes)
        os.kill(pid, signal.SIGKILL)
    assert isinstance(work.error, Disconnected)
    assert "may have run" in str(work.error)
    session_beside.check()
    check_scaled(scaling(gpu).launch())


KILLED = """
import sys
sys.path.insert(0, {tests!r})
from gpulease.client import GpuBuilder
from helpers.submits import endless
lease = GpuBuilder({address!r}).min_vram(1 << 20).submits(1 << 20).lease_secs(30).acquire()
print(lease.lease_id, flush=True)
endless(lease).launch()
"""


def test_a_submit_whose_program_is_killed_is_ended(daemon: Daemon) -> None:
    tests = os.path.dirname(os.path.dirname(__file__))
    script = KILLED.format(tests=tests, address=daemon.address)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=python_environment()) as program:
        assert program.stdout is not None
        lease_id = int(program.stdout.readline(), 16)
        wait_until(lambda: is_launched(daemon, lease_id), "its kernel is launched")
        program.kill()
    wait_until(lambda: not workers_of(daemon.processes), "its worker is gone", seen=daemon.processes)
    daemon.revoke(lease_id)


@pytest.mark.exhaustive
def test_one_runs_one_waits_and_others_are_refused(daemon: Daemon, gpu: GpuLease) -> None:
    others: list[Running] = []

    def scene(first: Running) -> bool:
        others[:] = [Running(scaling(gpu)) for _ in range(2)]
        wait_until(lambda: any(other.is_over for other in others), "one is refused")
        ran = not first.is_over
        for other in others:
            other.wait()
        return ran

    timed_out(daemon, gpu, scene)
    (served,) = [other.outputs for other in others if other.error is None and other.outputs is not None]
    check_scaled(served)
    (refused,) = [other.error for other in others if other.error is not None]
    assert isinstance(refused, Busy)


@pytest.mark.exhaustive
def test_a_hundred_in_a_row_leave_nothing(daemon: Daemon, gpu: GpuLease) -> None:
    check_scaled(scaling(gpu).launch())
    wait_until(lambda: not workers_of(daemon.processes), "the first is gone")
    files = len(daemon.open_files())
    for _ in range(A_HUNDRED):
        check_scaled(scaling(gpu, 64).launch(), 64)
    wait_until(lambda: not workers_of(daemon.processes), "all are gone")
    wait_until(lambda: len(daemon.open_files()) <= files, "nothing is left open", seen=daemon.open_files)


@pytest.mark.exhaustive
def test_a_remote_tenant_submits_too(start_daemon: StartDaemon, tmp_path: Path) -> None:
    pki = Pki.make(tmp_path)
    daemon = start_daemon(tls=True, config=pki.settings())
    with pki.builder(daemon.tls_address, pki.ann).submits(ROOM).acquire() as lease:
        check_scaled(scaling(lease, 100_000).launch(), 100_000)
        with pytest.raises(TimedOut):
            endless(lease).timeout_secs(0.3).launch()
        check_scaled(scaling(lease).launch())


@pytest.mark.exhaustive
def test_one_whose_connection_can_not_be_handed_over(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(faults=Faults(constants={"gpulease.daemon.workers.worker:MAX_HAND_OVERS": 0}))
    with daemon.builder().submits(ROOM).acquire() as lease:
        with pytest.raises(Busy, match="the submit's process did not take over the connection; nothing was run"):
            scaling(lease).launch()
        wait_until(lambda: "submit" not in lease.query(), "its memory is proved free")
        assert lease.query()["state"] == "active"
