"""A real daemon's account of the GPU time that sessions use, and how it shares that time."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpulease.client import Denied, GpuLease, GpuSession, KernelArgs
from helpers.daemon import Daemon
from helpers.kernels import FAULTS
from helpers.lasting import LastingDaemon
from helpers.waiting import wait_until

TENANT = f"uid:{os.getuid()}"


@contextmanager
def saturating(lease: GpuLease) -> Iterator[None]:
    """Keep a session of the lease busy with kernels of some milliseconds."""
    with GpuSession(lease) as session:
        module, buffer = session.module_load(FAULTS), session.mem_alloc(4 << 16)
        args = KernelArgs().push_buffer(buffer).push_u32(1 << 16).push_u32(7)
        is_over = threading.Event()

        def launch() -> None:
            while not is_over.is_set():
                for _ in range(64):
                    session.launch(module, "fill_u32", [256], [256], args)
                session.sync()

        thread = threading.Thread(target=launch)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def used(daemon: Daemon, lease: GpuLease) -> dict[str, float]:
    report = daemon.query(lease.lease_id)
    return {key: float(report.get(f"{key}_seconds", 0.0)) for key in ("gpu", "busy", "held_back")}


def test_a_session_s_time_is_accounted_while_it_works(daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease:
        began_s = time.monotonic()
        with saturating(lease):
            wait_until(lambda: used(daemon, lease)["gpu"] >= 0.3, "its time is accounted")
        wall_s = time.monotonic() - began_s
        found = used(daemon, lease)
        assert found["gpu"] <= found["busy"] <= wall_s
        assert found["held_back"] == 0
        # An idle session uses no time.
        again = used(daemon, lease)
        assert again["busy"] == pytest.approx(found["busy"], abs=0.05)


def test_two_sessions_that_work_together_share_the_time(daemon: Daemon) -> None:
    with daemon.builder().acquire() as one, daemon.builder().acquire() as other:
        with saturating(one), saturating(other):
            for lease in (one, other):
                wait_until(lambda lease=lease: used(daemon, lease)["gpu"] > 0.1, "its time is accounted")  # type: ignore[misc]
        for lease in (one, other):
            found = used(daemon, lease)
            assert found["gpu"] < found["busy"]


def test_a_tenant_without_permission_is_refused_weight_and_latency_class(daemon: Daemon) -> None:
    with pytest.raises(Denied, match=r"limit max_weight of tenant"):
        daemon.builder().weight(2).acquire()
    with pytest.raises(Denied, match=r"limit may_latency of tenant"):
        daemon.builder().latency().acquire()


@pytest.mark.exhaustive
def test_a_cap_holds_a_session_back_and_a_reload_takes_it_away() -> None:
    daemon = Daemon(config=f'[tenants."{TENANT}"]\nmax_share = 10\n')
    try:
        daemon.wait_until_it_answers()
        with daemon.builder().acquire() as lease:
            began_s = time.monotonic()
            with saturating(lease):
                wait_until(lambda: used(daemon, lease)["held_back"] > 0.3, "the session is held back")
            wall_s = time.monotonic() - began_s
            # The limit is higher than the session's cap, because the cap holds only on average.
            assert used(daemon, lease)["gpu"] < max(0.6, 0.3 * wall_s)
            (daemon.folder / "config.toml").write_text(f'[tenants."{TENANT}"]\nmax_weight = 2\n')
            daemon.process.send_signal(signal.SIGHUP)
            # The reload is complete once the new limit applies.
            wait_until(lambda: _is_granted(daemon), "the reload")
            before = used(daemon, lease)
            with saturating(lease):
                time.sleep(1.0)
            assert used(daemon, lease)["held_back"] == pytest.approx(before["held_back"], abs=0.1)
    finally:
        daemon.stop()
    daemon.check_nothing_is_left()


def _is_granted(daemon: Daemon) -> bool:
    try:
        daemon.builder().weight(2).acquire().free()
    except Denied:
        return False
    return True


def test_the_next_daemon_continues_the_account() -> None:
    node = LastingDaemon()
    try:
        daemon = node.start()
        lease = daemon.builder().acquire()
        with saturating(lease):
            wait_until(lambda: used(daemon, lease)["gpu"] > 0, "its time is accounted")
            before = used(daemon, lease)
            daemon = node.restart()
            # The session worked while no daemon ran.
            wait_until(lambda: used(daemon, lease)["busy"] > before["busy"], "the account continues")
        after = used(daemon, lease)
        assert after["gpu"] >= before["gpu"] > 0
        lease.free()
    finally:
        node.stop()
