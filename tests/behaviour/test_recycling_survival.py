"""Contexts that serve their tenant again when the broker is killed or settings change, and their accounting."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpulease.client import GpuLease, GpuLeaseError, GpuSession, KernelArgs, LeaseFreed
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Empty, Metrics
from helpers import audit_log
from helpers.daemon import Daemon
from helpers.kernels import check_main_job, start_endless
from helpers.lasting import LastingDaemon
from helpers.processes import continue_process, is_running, open_files, stop_process
from helpers.recycling import PATIENT, SETTINGS, shared, wait_until_full
from helpers.submits import ROOM, check_scaled, running, scaling
from helpers.waiting import PATIENCE_S, wait_until
from helpers.working import working

MIB = 1 << 20


def free(lease: GpuLease) -> None:
    """Free a lease. The reply may come from this broker, from the next one, or not at all."""
    try:
        lease.free()
    except GpuLeaseError:
        return


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_scrubbed", [False, True], ids=["before the scrub", "once it is scrubbed"])
def test_a_broker_that_is_killed_amid_a_scrub(start_lasting: Callable[..., LastingDaemon], is_scrubbed: bool) -> None:
    """No lease owns the worker then: the next broker ends it, and frees the slice."""
    lasting = start_lasting(config=SETTINGS, faults=PATIENT)
    wait_until_full(lasting.now)
    lease = lasting.now.builder(8 * MIB).acquire()
    session = GpuSession(lease)
    check_main_job(session)
    pid = lasting.worker_pid(lease.lease_id)
    stop_process(pid)
    thread = threading.Thread(target=free, args=(lease,))
    thread.start()
    wait_until(lambda: lasting.now.query(lease.lease_id)["state"] == "draining", "it ends")
    if is_scrubbed:
        # Stop the broker, so that it does not learn of the scrub's end.
        stop_process(lasting.now.process.pid)
        continue_process(pid)
        wait_until(lambda: name_of(pid) == "gpul-warm", "it is scrubbed")
        lasting.kill()
    else:
        lasting.kill()
        continue_process(pid)
    lasting.start()
    wait_until(lambda: not is_running(pid), "it has ended")
    wait_until(lambda: not lasting.now.leases(), "the lease has ended")
    thread.join()
    with pytest.raises(GpuLeaseError):
        session.sync()
    session.close()
    with lasting.now.builder(8 * MIB).acquire() as other, GpuSession(other) as again:
        check_main_job(again)


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


@pytest.mark.exhaustive
def test_a_setting_that_was_changed_holds_for_what_lives_on(start_lasting: Callable[..., LastingDaemon]) -> None:
    lasting = start_lasting(config=SETTINGS, faults=PATIENT)
    wait_until_full(lasting.now)
    lasting.now.builder().acquire().free()
    with lasting.now.builder(seconds=60).acquire() as lease, working(lease) as work:
        pid = lasting.worker_pid(lease.lease_id)
        lasting.kill()
        lasting.config = lasting.config.replace("same-tenant", "off")
        lasting.start()
        work.check_goes_on()
    wait_until(lambda: not is_running(pid), "it has ended")
    wait_until_full(lasting.now)
    pid = os.getpid()
    for _ in range(2):
        with lasting.now.builder().acquire() as lease:
            assert lasting.worker_pid(lease.lease_id) != pid
            pid = lasting.worker_pid(lease.lease_id)
        assert not is_running(pid)


@pytest.mark.exhaustive
def test_recycling_that_is_turned_on_holds_though_sessions_live_on(start_lasting: Callable[..., LastingDaemon]) -> None:
    """Recycling is turned on while sessions live on.

    The zygote of their workers can't fork workers that overwrite the memory that they free.
    """
    lasting = start_lasting(config=SETTINGS.replace("same-tenant", "off"))
    with lasting.now.builder(seconds=60).acquire() as lease, working(lease) as work:
        lasting.kill()
        lasting.config = lasting.config.replace('"off"', '"same-tenant"')
        lasting.start(PATIENT)
        work.check_goes_on()
        wait_until_full(lasting.now)
        with lasting.now.builder().acquire() as other:
            pid = lasting.worker_pid(other.lease_id)
        assert is_running(pid)
        work.check_goes_on()


SAYS = b"""
.version 8.0
.target sm_75
.address_size 64
.extern .func (.param .b32 r) vprintf(.param .b64 format, .param .b64 values);
.entry say(.param .u64 text)
{
    .reg .b64 %d<3>;
    ld.param.u64 %d1, [text]; mov.u64 %d2, 0;
    .param .b64 a; .param .b64 b; .param .b32 c;
    st.param.b64 [a], %d1; st.param.b64 [b], %d2;
    call (c), vprintf, (a, b);
}
"""


def say(pid: int, text: bytes) -> None:
    """Write to a process's standard error. Has no effect if nobody reads it any more."""
    with suppress(BrokenPipeError):
        Path(f"/proc/{pid}/fd/2").write_bytes(text)


def wait_until_said(daemon: Daemon, text: str) -> None:
    wait_until(lambda: text in daemon.log(), "it is logged")


@pytest.fixture(scope="module")
def recycling() -> Iterator[Daemon]:
    """The daemon of several tests. The context of one test's last lease may serve the next one's first."""
    yield from shared(Daemon(config=SETTINGS, faults=PATIENT))


@pytest.mark.exhaustive
def test_what_a_kernel_has_printed_is_nobody_else_s(recycling: Daemon) -> None:
    """Neither the next lease in the context nor the log gets it."""
    daemon = recycling
    wait_until_full(daemon)
    served = []
    for text in ("one", "two"):
        with daemon.builder().acquire() as lease, GpuSession(lease) as session:
            served.append(daemon.worker_pid(lease.lease_id))
            assert session.printed() == ("", False)
            buffer = session.mem_alloc(64)
            session.mem_write(buffer, 0, f"{text} of a session\n\0".encode())
            session.launch(session.module_load(SAYS), "say", [1], [1], KernelArgs().push_buffer(buffer))
            session.sync()
        wait_until_full(daemon)
    assert len(set(served)) == 1
    assert "of a session" not in daemon.log()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write for a worker")
def test_a_process_that_is_not_heard_any_more_serves_nobody_again(start_daemon: Callable[..., Daemon]) -> None:
    """Its output was cut off because of what it printed in one lease, so output of the next lease would be lost."""
    daemon = start_daemon(config=SETTINGS, faults=PATIENT)
    wait_until_full(daemon)
    with daemon.builder().acquire() as lease, GpuSession(lease):
        pid = daemon.worker_pid(lease.lease_id)

        def is_cut_off() -> bool:
            say(pid, (b"x" * 200 + b"\n") * 16)
            return "the rest is lost" in daemon.log()

        wait_until(is_cut_off, "it has said too much")
    wait_until(lambda: not is_running(pid), "its process has ended")
    wait_until_said(daemon, "more output than is logged of one process")


@pytest.mark.exhaustive
def test_each_lease_has_its_own_bound_on_kernels(recycling: Daemon) -> None:
    daemon = recycling
    wait_until_full(daemon)
    # A busy host must not make a short kernel take so long.
    with daemon.builder().max_kernel_secs(2).acquire() as lease, GpuSession(lease) as session:
        pid = daemon.worker_pid(lease.lease_id)
        check_main_job(session)
    # This lease has no limit for kernels: the limit of the lease before must not apply to it.
    with daemon.builder().acquire() as lease:
        session = GpuSession(lease)
        assert daemon.worker_pid(lease.lease_id) == pid
        start_endless(session)
        time.sleep(3)
        assert daemon.query(lease.lease_id)["state"] == "active"
    wait_until_full(daemon)
    daemon.builder().acquire().free()
    with daemon.builder().max_kernel_secs(0.2).acquire() as lease:
        session = GpuSession(lease)
        start_endless(session)
        wait_until(lambda: daemon.query(lease.lease_id)["cause"] == "kernel_timeout", "it is ended")


@pytest.mark.exhaustive
def test_each_lease_is_counted_for_its_own_time(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = start_daemon(config=audit_log.config(tmp_path / "audit") + SETTINGS, faults=PATIENT)
    wait_until_full(daemon)
    held_us, leases = 0.0, 3
    for _ in range(leases):
        began = time.monotonic()
        lease = daemon.builder(MIB).acquire()
        time.sleep(0.05)
        lease.free()
        held_us += (time.monotonic() - began) * 1e6
        # Now the context waits for the tenant, who is not charged for that time.
        time.sleep(0.2)
    audit_log.stop(daemon)
    (used,) = audit_log.usage(tmp_path / "audit").values()
    assert (used["leases"], used["open_leases"]) == (leases, 0)
    assert leases * 50_000 <= used["lease_us"] <= held_us
    assert used["byte_us"] == used["lease_us"] * MIB


@pytest.mark.exhaustive
def test_what_each_lease_did_is_counted_once(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(config=SETTINGS, faults=PATIENT)
    wait_until_full(daemon)
    done = 0.0
    for _ in range(3):
        before = counted(daemon, "gpu_session_launch_total")
        assert before == done
        with daemon.builder().acquire() as lease, GpuSession(lease) as session:
            check_main_job(session)
            session.sync()
            done += lease.query()["launches"]
    assert counted(daemon, "gpu_session_launch_total") == done >= 3
    assert counted(daemon, "gpu_lease_acquired_total") == counted(daemon, "gpu_lease_dropped_total") == 3
    assert counted(daemon, "gpulease_warm_contexts_recycled_total") == 3
    assert counted(daemon, "gpulease_warm_contexts", state="recycled") == 1


def counted(daemon: Daemon, name: str, **labels: str) -> float:
    """Return the sum of a metric's series with these labels."""
    reply = ask(Opcode.METRICS, Empty(), daemon.address)
    assert isinstance(reply, Metrics)
    families = text_string_to_metric_families(reply.exposition)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return float(sum(sample.value for sample in samples if labels.items() <= sample.labels.items()))


@pytest.mark.exhaustive
def test_events_are_each_leases_own(recycling: Daemon) -> None:
    daemon = recycling
    wait_until_full(daemon)
    heard: list[list[int]] = []
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            lease = daemon.builder().acquire()
            with lease.events() as events:
                told = pool.submit(lambda: [event.phase for event in events])
                with GpuSession(lease) as session:
                    check_main_job(session)
                lease.free()
                heard.append(told.result(PATIENCE_S))
    assert heard[0] == heard[1]
    assert len(heard[0]) >= 2
    with pytest.raises(LeaseFreed):
        GpuSession(lease)


@pytest.mark.exhaustive
def test_a_lease_leaves_its_context_once_its_submits_are_gone(recycling: Daemon) -> None:
    daemon = recycling
    wait_until_full(daemon)
    with daemon.builder().submits(ROOM).acquire() as lease:
        pid = daemon.worker_pid(lease.lease_id)
        check_scaled(scaling(lease).launch())
        wait_until(lambda: not lease.query().get("submit"), "it is proved gone", seen=lease.query)
    assert is_running(pid)
    with daemon.builder().submits(ROOM).acquire() as lease:
        assert daemon.worker_pid(lease.lease_id) == pid
        with running(daemon, lease):
            lease.free()
    assert not is_running(pid)
    assert daemon.inventory().details[0]["recycled_contexts"] == 0


@pytest.mark.exhaustive
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can look into a worker")
def test_each_lease_has_pages_of_its_own_and_reads_the_first_alone(recycling: Daemon) -> None:
    daemon = recycling
    wait_until_full(daemon)
    seen, pids = set(), set()
    for _ in range(3):
        with daemon.builder().acquire() as lease, GpuSession(lease) as session:
            check_main_job(session)
            pid = daemon.worker_pid(lease.lease_id)
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            lines = [line.split() for line in maps if "gpulease-lease" in line or "gpulease-claims" in line]
            assert sorted((line[1], line[5]) for line in lines) == [
                ("r--s", "/memfd:gpulease-lease"),
                ("rw-s", "/memfd:gpulease-claims"),
            ]
            for fd, to in open_files(pid).items():
                if "gpulease-lease" in to:
                    flags = Path(f"/proc/{pid}/fdinfo/{fd}").read_text().partition("flags:")[2].split()[0]
                    assert int(flags, 8) & os.O_ACCMODE == os.O_RDONLY
                    assert os.stat(f"/proc/{pid}/fd/{fd}").st_mode & 0o777 == 0o400
            pids.add(pid)
            seen |= {line[4] for line in lines}
    # The lines are in another file each time, but all come from one process.
    assert (len(pids), len(seen)) == (1, 6)
