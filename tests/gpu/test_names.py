"""Leases with a name on a real card: an endless kernel ends at the fleet's horizon; then another node can serve the
name.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulease.client import GpuSession, Revoked
from helpers.daemon import Faults
from helpers.etcd_cluster import need_etcd
from helpers.fleet_rig import FleetNode, fleet
from helpers.kernels import Neighbour, start_endless
from helpers.lasting import LastingDaemon
from helpers.nvml import Cards
from helpers.processes import stop_process
from helpers.waiting import wait_until

pytestmark = pytest.mark.gpu

GIB = 1 << 30
AHEAD_S = 3.0
"""Seconds from now to the horizon. This is longer than a busy host delays a beat."""


@pytest.mark.parametrize("broker", ["runs", "stopped", "killed"])
def test_an_endless_kernel_of_a_named_lease_ends_at_the_horizon(
    lasting: LastingDaemon, cards: Cards, tmp_path: Path, broker: str, capsys: pytest.CaptureFixture[str]
) -> None:
    horizon = tmp_path / "horizon"
    horizon.write_text(str(AHEAD_S))
    lasting.restart(Faults(names_in=tmp_path))
    anonymous = lasting.now.builder(GIB, seconds=120).device(0).acquire()
    lease = lasting.now.builder(2 * GIB, seconds=120).device(0).name("model-a").acquire()
    with GpuSession(anonymous) as neighbours, GpuSession(lease) as session:
        neighbour = Neighbour(neighbours)
        kept = session.mem_alloc(GIB), start_endless(session)
        worker = lasting.worker_pid(lease.lease_id)
        horizon.unlink()
        until_s = time.monotonic() + AHEAD_S
        if broker == "stopped":
            stop_process(lasting.now.process.pid)
        elif broker == "killed":
            lasting.kill()
        wait_until(lambda: neighbour.check() and not cards.process_bytes(0, worker), "its memory is back")
        late_s = time.monotonic() - until_s
        if broker == "stopped":
            os.kill(lasting.now.process.pid, signal.SIGCONT)
        elif broker == "killed":
            lasting.start(Faults(names_in=tmp_path))
        wait_until(lambda: lasting.now.query(lease.lease_id)["state"] == "torndown", "its memory is proved free")
        assert lasting.now.query(lease.lease_id)["cause"] == "isolated"
        with pytest.raises(Revoked):
            session.sync()
        neighbour.check()
        del kept
    with capsys.disabled():
        print(f"broker {broker}: off the card {late_s:.3f} s after the horizon at the latest")
    anonymous.free()
    lasting.now.allowed_trouble.append("the broker did not end it in time")
    lasting.check_idle()


def kill_daemon(node: FleetNode) -> Callable[[], object]:
    """Kill the daemon. Returns a function that starts another one."""
    node.kill()
    return node.start


def stop_daemon(node: FleetNode) -> Callable[[], object]:
    """Stop the daemon with SIGSTOP. Returns a function that continues it."""
    stop_process(node.now.process.pid)
    return lambda: os.kill(node.now.process.pid, signal.SIGCONT)


@pytest.mark.parametrize("fault", [kill_daemon, stop_daemon])
def test_a_dead_nodes_name_lives_on_though_its_kernel_never_ends(
    tmp_path: Path,
    cards: Cards,
    fault: Callable[[FleetNode], Callable[[], object]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    need_etcd()
    used = cards.used_bytes()
    with fleet(tmp_path, driver="cuda") as (_, (first, second)):
        lease = first.acquire("model-a")
        session = GpuSession(lease)
        kept = start_endless(session)
        worker = first.worker_pid(lease.lease_id)
        assert cards.process_bytes(0, worker)
        began_s = time.monotonic()
        mend = fault(first)
        with second.acquire("model-a") as again:
            took_s = time.monotonic() - began_s
            assert again.epoch > lease.epoch
            assert not cards.process_bytes(0, worker)
            with GpuSession(again) as elsewhere:
                Neighbour(elsewhere).check()
        mend()
        with pytest.raises(Revoked):
            session.sync()
        del kept
    with capsys.disabled():
        print(f"{fault.__name__}: granted elsewhere after {took_s:.2f} s")
    cards.check_back_to(used)
