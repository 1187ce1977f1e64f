"""The metrics of a real daemon: what tenants did, even after they have left, and whether the daemon is ready."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from prometheus_client.parser import text_string_to_metric_families

from gpulease.client import GpuSession, GpuSessionFailed
from gpulease.client.cli.__main__ import main
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode, RevokeOutcome, Status
from gpulease.protocol.address import ADDRESS_VARIABLE
from gpulease.protocol.messages import Drain, DrainStatus, Empty, FenceClear, Metrics
from helpers.daemon import Daemon, Faults
from helpers.kernels import check_main_job
from helpers.lasting import LastingDaemon
from helpers.raw_peer import RawPeer, lease_alloc
from helpers.submits import ROOM, check_scaled, running, scaling, workers_of
from helpers.waiting import wait_until

TENANT = f"uid:{os.getuid()}"
SESSION = ("launch", "sync", "copy", "copied_bytes", "operation", "operation_errors", "sync_errors")


class Scrape:
    """The metrics at one moment. A series is found by its name and some of its labels."""

    def __init__(self, daemon: Daemon) -> None:
        reply = ask(Opcode.METRICS, Empty(), daemon.address)
        assert isinstance(reply, Metrics)
        self.text = reply.exposition
        self._samples = [s for family in text_string_to_metric_families(self.text) for s in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of all series with these labels; 0 if there are none."""
        fitting = [s for s in self._samples if s.name == name and labels.items() <= s.labels.items()]
        return sum(s.value for s in fitting)

    def of_tenant(self, *names: str) -> list[float]:
        return [self.value(f"gpu_session_{name}_total", tenant=TENANT) for name in names]


def test_what_a_session_did_stays_when_its_lease_ends(daemon: Daemon) -> None:
    before = Scrape(daemon)
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)
        during = Scrape(daemon)
        assert during.value("gpu_lease_active", tenant=TENANT) == 1
        assert during.value("gpu_lease_slice_bytes", tenant=TENANT) == 1 << 20
        kept = session.mem_alloc(4096)
        assert Scrape(daemon).value("gpu_session_mem_alloc_bytes") >= 4096
        session.mem_free(kept)
        session.sync()
    after = Scrape(daemon)
    did = [now - then for now, then in zip(after.of_tenant(*SESSION), before.of_tenant(*SESSION), strict=True)]
    launches, syncs, copies, copied_bytes, operations, *errors = did
    assert launches >= 1
    assert syncs >= 2
    assert copies >= 2
    assert copied_bytes > copies
    assert operations >= launches + syncs + copies
    assert errors == [0, 0]
    for earlier, later in ((before, during), (during, after)):
        assert all(
            then <= now for then, now in zip(earlier.of_tenant(*SESSION), later.of_tenant(*SESSION), strict=True)
        )
    for name in ("acquired_total", "dropped_total", "lifetime_seconds_count"):
        assert after.value(f"gpu_lease_{name}") == before.value(f"gpu_lease_{name}") + 1, name
    assert after.value("gpu_lease_active") == after.value("gpu_session_mem_alloc_bytes") == 0
    assert after.value("gpu_lease_leaked_bytes") == after.value("gpu_lease_fenced_slices") == 0


def test_what_submits_did_is_their_tenants_too(daemon: Daemon) -> None:
    before = Scrape(daemon)
    with daemon.builder().submits(ROOM).acquire() as lease:
        with running(daemon, lease):
            during = Scrape(daemon)
            assert during.of_tenant("launch")[0] == before.of_tenant("launch")[0] + 1
            assert 0 < during.value("gpu_session_mem_alloc_bytes") <= ROOM
            os.kill(workers_of(daemon.processes)[0], signal.SIGKILL)
        check_scaled(scaling(lease).launch())
        wait_until(lambda: "submit" not in lease.query(), "both are gone")
        after = Scrape(daemon)
    did = [now - then for now, then in zip(after.of_tenant(*SESSION), before.of_tenant(*SESSION), strict=True)]
    launches, syncs, copies, copied_bytes, operations, *_ = did
    assert (launches, copies, copied_bytes, operations) == (2, 2, 2 * 4000, 2)
    assert syncs >= 1
    assert after.value("gpu_lease_submits_total") == before.value("gpu_lease_submits_total") + 2


def test_what_a_killed_worker_did_counts(daemon: Daemon) -> None:
    before = Scrape(daemon)
    lease = daemon.builder().acquire()
    with GpuSession(lease) as session:
        buffer = session.mem_alloc(4096)
        for _ in range(10):
            session.mem_write(buffer, 0, np.zeros(16, np.uint8))
        session.sync()
        os.kill(daemon.worker_pid(lease.lease_id), signal.SIGKILL)
        daemon.wait_for_end(lease.lease_id)
        with pytest.raises(GpuSessionFailed):
            session.sync()
    after = Scrape(daemon)
    assert after.of_tenant("copy")[0] >= before.of_tenant("copy")[0] + 10
    name = "gpu_lease_revocation_seconds_count"
    assert after.value(name, cause="worker_died") == before.value(name, cause="worker_died") + 1


def test_all_of_it_is_for_operators_and_health_for_anybody_here(daemon: Daemon) -> None:
    with RawPeer(daemon.tcp_address).hello() as stranger:
        denied = stranger.refused(Opcode.METRICS, Empty())
        assert denied.status is Status.DENIED
        assert "operators" in denied.message
        report = stranger.request(Opcode.HEALTH, Empty()).report
        assert report["ready"] is True
        stranger.refused(Opcode.LEASE_ALLOC, lease_alloc(1 << 50))
    scrape = Scrape(daemon)
    assert scrape.value("gpu_lease_denied_total", operation="metrics", reason="denied") >= 1
    assert scrape.value("gpu_lease_denied_total", operation="lease_alloc", reason="capacity_exceeded") >= 1


@pytest.fixture
def gpulease() -> Callable[..., Result]:
    def run(daemon: Daemon, *words: str) -> Result:
        return CliRunner().invoke(main, list(words), env={ADDRESS_VARIABLE: daemon.address})

    return run


def test_what_a_person_types(daemon: Daemon, gpulease: Callable[..., Result]) -> None:
    shown = gpulease(daemon, "metrics")
    assert shown.exit_code == 0, shown.output
    assert "gpulease_ready 1.0\n" in shown.stdout
    assert shown.stdout.endswith("\n")
    shown = gpulease(daemon, "health")
    assert (shown.exit_code, shown.stdout.count(" ok")) == (0, 8), shown.output
    ask(Opcode.DRAIN, Drain(60_000), daemon.address)
    try:
        shown = gpulease(daemon, "health", "--json")
        assert shown.exit_code == 1
        checks = {check["check"]: check["detail"] for check in json.loads(shown.stdout)["checks"] if not check["ok"]}
        assert checks == {"not_draining": "the node is drained"}
        assert "FAILS" in gpulease(daemon, "health").stdout
        assert Scrape(daemon).value("gpulease_draining") == 1
    finally:
        assert isinstance(ask(Opcode.DRAIN_CANCEL, Empty(), daemon.address), DrainStatus)


@pytest.mark.exhaustive
def test_a_new_broker_goes_on_from_where_sessions_are(lasting: LastingDaemon) -> None:
    # Earlier tests may have used this daemon, so compare with the value before.
    before = sum(Scrape(lasting.now).of_tenant("copy"))
    with lasting.now.builder().acquire() as lease, GpuSession(lease) as session:
        buffer = session.mem_alloc(4096)
        for _ in range(50):
            session.mem_write(buffer, 0, bytes(16))
        session.sync()
        assert sum(Scrape(lasting.now).of_tenant("copy")) - before == 50
        lasting.restart()
        session.mem_write(buffer, 0, bytes(16))
        session.sync()
        scrape = Scrape(lasting.now)
        assert scrape.of_tenant("copy") == [1], "what was counted by another daemon is not counted again"
        assert scrape.value("gpu_lease_adopted_total") == scrape.value("gpu_lease_active") == 1
        assert scrape.value("gpu_lease_acquired_total") == 0
    wait_until(lambda: Scrape(lasting.now).value("gpu_lease_dropped_total") == 1, "its end is counted")


@pytest.mark.exhaustive
def test_memory_that_is_not_proved_free_shows_and_so_does_its_end(
    start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    withheld = tmp_path / "withheld"
    daemon = start_daemon(config="[limits]\nreclaim_timeout_s = 1\n", faults=Faults(withhold_proof_while=withheld))
    lease = daemon.builder().acquire()
    withheld.touch()
    assert daemon.revoke(lease.lease_id) == RevokeOutcome.FENCED
    scrape = Scrape(daemon)
    assert scrape.value("gpu_lease_fenced_slices") == scrape.value("gpu_lease_fenced_total") == 1
    assert scrape.value("gpu_lease_fenced_bytes") == 1 << 20
    assert scrape.value("gpu_lease_leaked_bytes") == 0, "it is accounted for"
    withheld.unlink()
    ask(Opcode.FENCE_CLEAR, FenceClear(None), daemon.address)
    scrape = Scrape(daemon)
    assert (scrape.value("gpu_lease_fenced_slices"), scrape.value("gpu_lease_fenced_total")) == (0, 1)
