"""The broker is killed during a submit: the submit's outcome and its report, with and without a state folder."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulease.client import CapacityExceeded, Disconnected, GpuBuilder, GpuLease, GpuSession
from helpers.daemon import Daemon, Faults
from helpers.kernels import Neighbour
from helpers.lasting import LastingDaemon
from helpers.processes import is_running, stop_process
from helpers.submits import (
    ROOM,
    WORKER,
    Running,
    check_scaled,
    running,
    scaling,
    start_endless,
    timed_out,
    wait_until_warm,
)
from helpers.waiting import wait_until

pytestmark = pytest.mark.exhaustive

StartLasting = Callable[..., LastingDaemon]


def is_running_known(daemon: Daemon, lease: GpuLease) -> bool:
    """Whether a daemon reports that a kernel of the lease's submit is running."""
    submit = daemon.query(lease.lease_id).get("submit", {})
    return bool(submit.get("state") == "running")


def test_a_submit_goes_on_without_its_broker_and_is_known_to_the_next(lasting: LastingDaemon) -> None:
    with lasting.now.builder().submits(ROOM).acquire() as lease, GpuSession(lease) as session:
        neighbour = Neighbour(session)

        def scene(work: Running) -> bool:
            lasting.kill()
            neighbour.check()
            lasting.start()
            neighbour.check()
            return is_running_known(lasting.now, lease)

        timed_out(lasting.now, lease, scene)
        neighbour.check()
        check_scaled(scaling(lease).launch())
    lasting.check_idle()


def test_one_that_ends_without_a_broker_is_proved_gone_by_the_next(lasting: LastingDaemon) -> None:
    with lasting.now.builder().submits(ROOM).acquire() as lease:
        with running(lasting.now, lease) as work:
            lasting.kill()
            os.kill(lasting.workers()[WORKER], signal.SIGKILL)
            lasting.start()
        assert isinstance(work.error, Disconnected)
        assert "may have run" in str(work.error)
        check_scaled(scaling(lease).launch())
        assert lease.query()["state"] == "active"
    lasting.check_idle()


def test_its_lease_ends_though_there_is_no_broker(start_lasting: StartLasting) -> None:
    lasting = start_lasting()
    lease, work, _ = lasting.now.short_lease(start_endless(lasting.now), submit_bytes=ROOM)
    lasting.kill()
    wait_until(lambda: not lasting.workers(), "both workers are gone", seen=lasting.processes)
    lasting.start()
    work.wait()
    lasting.check_idle()
    lasting.now.wait_for_end(lease.lease_id)


def test_who_is_killed_without_a_broker_is_told_by_its_lease(start_lasting: StartLasting) -> None:
    # A new daemon, because the error is in the log of the daemon that started the zygote.
    lasting = start_lasting()

    def stopped(lease: GpuLease) -> tuple[Running, int]:
        work = start_endless(lasting.now)(lease)
        pid = lasting.workers()[WORKER]
        # A stopped worker can't end by itself.
        stop_process(pid)
        return work, pid

    lease, (work, pid), _ = lasting.now.short_lease(stopped, submit_bytes=ROOM)
    killed = lasting.now
    lasting.kill()
    wait_until(lambda: not lasting.workers(), "both workers are gone", seen=lasting.processes)

    def kills() -> list[str]:
        return [
            line for line in killed.log().splitlines() if "the zygote killed the worker" in line and f"={pid}" in line
        ]

    told = wait_until(kills, "the log says it", seen=killed.log)
    assert [f"lease_id={lease.lease_id:032x}" in line for line in told] == [True]
    lasting.start()
    work.wait()
    lasting.check_idle()


def test_one_that_is_revoked_by_the_next_broker_is_gone_with_its_lease(lasting: LastingDaemon) -> None:
    lease = lasting.now.builder().submits(ROOM).acquire()
    with running(lasting.now, lease):
        lasting.restart()
        lasting.now.revoke(lease.lease_id)
    assert WORKER not in lasting.workers()
    lasting.check_idle()


def test_without_a_state_folder_nobody_knows_whether_it_ran(start_daemon: Callable[..., Daemon]) -> None:
    daemon = Daemon()
    try:
        daemon.wait_until_it_answers()
        lease = GpuBuilder(daemon.address).min_vram(ROOM).submits(ROOM).acquire()
        with running(daemon, lease) as work:
            daemon.kill()
        assert isinstance(work.error, Disconnected)
        assert "may have run" in str(work.error)
    finally:
        daemon.discard()


def test_memory_that_can_not_be_proved_free_costs_its_lease_the_next_submits(
    start_lasting: StartLasting, tmp_path: Path
) -> None:
    flag = tmp_path / "withhold"
    faults = Faults(withhold_proof_while=flag)
    lasting = start_lasting(config="[limits]\nreclaim_timeout_s = 1\n", faults=faults)
    with lasting.now.builder().acquire() as other, GpuSession(other) as session:
        neighbour = Neighbour(session)
        lease = lasting.now.builder().submits(ROOM).acquire()
        check_scaled(scaling(lease).launch())
        wait_until(lambda: "submit" not in lease.query(), "the first is gone")
        flag.touch()
        check_scaled(scaling(lease).launch())
        wait_until(lambda: lease.query().get("submit", {}).get("state") == "fenced", "it is fenced")
        neighbour.check()
        assert lease.query()["state"] == "active"
        with pytest.raises(CapacityExceeded, match="could not be proved free"):
            scaling(lease).launch()

        flag.unlink()
        lasting.restart()
        # The next broker checks the bytes again, and they are free now.
        wait_until(lambda: "submit" not in lease.query(), "it is gone")
        check_scaled(scaling(lease).launch())
        lease.free()
        neighbour.check()
    lasting.check_idle()


def test_one_that_had_not_begun_when_the_broker_died_was_not_run(lasting: LastingDaemon) -> None:
    with lasting.now.builder().submits(ROOM).acquire() as lease:
        (zygote,) = lasting.zygotes()
        stop_process(zygote)
        try:
            work = Running(scaling(lease))
            wait_until(lambda: lease.query().get("submit", {}).get("state") == "starting", "it is asked for")
            lasting.kill()
        finally:
            os.kill(zygote, signal.SIGCONT)
        lasting.start()
        work.wait()
        assert isinstance(work.error, Disconnected)
        assert "Nothing was run" in str(work.error)
        wait_until(lambda: "submit" not in lease.query(), "what was made of it is gone", seen=lease.query)
        check_scaled(scaling(lease).launch())
    lasting.check_idle()


def test_one_on_a_context_made_ahead_is_known_to_the_next_broker_by_its_zygote(start_lasting: StartLasting) -> None:
    lasting = start_lasting(config="warm_contexts = 1\n")
    with lasting.now.builder().submits(ROOM).acquire() as lease:
        made = wait_until_warm(lasting.now)

        def scene(work: Running) -> bool:
            worker = lasting.workers().get(WORKER)
            assert worker is None or worker in made
            lasting.restart()
            ran = worker is not None and is_running_known(lasting.now, lease)
            made.extend(wait_until_warm(lasting.now))
            return ran

        timed_out(lasting.now, lease, scene)
        wait_until_warm(lasting.now)
        check_scaled(scaling(lease).launch())


def test_one_whose_broker_dies_as_it_takes_a_context_was_not_run(start_lasting: StartLasting) -> None:
    lasting = start_lasting(config="warm_contexts = 1\n[limits]\nadopt_timeout_s = 30\n")
    with lasting.now.builder().submits(ROOM).acquire() as lease:
        (made,) = wait_until_warm(lasting.now)
        stop_process(made)
        work = Running(scaling(lease))
        wait_until(lambda: lease.query().get("submit", {}).get("state") == "starting", "it takes it")
        lasting.restart()
        work.wait()
        assert isinstance(work.error, Disconnected)
        assert "Nothing was run" in str(work.error)
        # The zygote or the next broker ends the context, because no client was told of it.
        wait_until(lambda: not is_running(made), "the context is gone")
        wait_until(lambda: "submit" not in lease.query(), "and so is what it was to be", seen=lease.query)
        check_scaled(scaling(lease).launch())
