"""The broker of real contexts is killed: they continue, their memory is counted correctly, and expired leases are
freed.
"""

import os
import signal
import time
from collections.abc import Callable

import pytest

from gpulease.client import GpuSession, GpuSessionFailed, LeaseExpired
from helpers.kernels import Neighbour, start_endless
from helpers.lasting import LastingDaemon
from helpers.nvml import Cards
from helpers.waiting import wait_until

pytestmark = pytest.mark.gpu

GIB = 1 << 30
RESTARTS = 5


def rounds_until(neighbour: Neighbour, is_over: Callable[[], bool]) -> float:
    """Work until something is true. Returns the longest round in seconds."""
    longest_s = 0.0
    while not is_over():
        started = time.perf_counter()
        neighbour.check()
        longest_s = max(longest_s, time.perf_counter() - started)
    return longest_s


def test_a_session_goes_on_and_what_expired_meanwhile_is_back(
    lasting: LastingDaemon, cards: Cards, capsys: pytest.CaptureFixture[str]
) -> None:
    card = lasting.now.inventory().details[0]
    lease = lasting.now.builder(4 * GIB, seconds=120).device(0).acquire()
    session = GpuSession(lease)
    neighbour = Neighbour(session)
    buffer = session.mem_alloc(3 * GIB)
    session.mem_write(buffer, 3 * GIB - 4, b"last")
    endless = lasting.now.builder(2 * GIB, seconds=4).device(0).acquire()
    expires_at = time.monotonic() + 4
    doomed = GpuSession(endless)
    kept = start_endless(doomed), doomed.mem_alloc(GIB)
    worker, other = lasting.worker_pid(endless.lease_id), lasting.worker_pid(lease.lease_id)
    assert cards.process_bytes(0, worker) > GIB
    used = cards.used_bytes()[0]
    lasting.kill()
    longest_s = rounds_until(neighbour, lambda: not cards.process_bytes(0, worker))
    late_s = time.monotonic() - expires_at
    assert -0.1 < late_s < 2
    wait_until(lambda: cards.used_bytes()[0] < used - GIB, "its bytes are back, without a broker")
    with pytest.raises(LeaseExpired):
        doomed.sync()
    started = time.monotonic()
    lasting.start()
    restart_s = time.monotonic() - started
    with capsys.disabled():
        print(f"longest round {longest_s:.3f} s; gone {late_s:.3f} s after the deadline; back in {restart_s:.2f} s")
    after = lasting.now.inventory().details[0]
    assert after["capacity_bytes"] == card["capacity_bytes"]
    wait_until(lambda: len(lasting.now.leases()) == 1, "the expired lease is torn down", seen=lasting.now.leases)
    held = lasting.now.inventory().details[0]["held_bytes"]
    assert 4 * GIB < held < 6 * GIB
    assert 3 * GIB < cards.process_bytes(0, other) <= held
    neighbour.check()
    lease.renew(100)
    assert session.mem_read(buffer, 3 * GIB - 4, 4) == b"last"
    # All bytes that are reported as available can be leased, next to the session that continues.
    size = lasting.now.available_bytes()
    assert size > card["capacity_bytes"] - held - 2 * GIB
    with lasting.now.builder(size).device(0).acquire() as rest, GpuSession(rest) as more:
        area = more.mem_alloc(size)
        more.mem_write(area, size - 4, b"last")
        assert more.mem_read(area, size - 4, 4) == b"last"
        neighbour.check()
    del kept
    lease.free()
    lasting.check_idle()
    assert lasting.now.inventory().details[0]["available_bytes"] == card["available_bytes"]


def test_a_kernel_that_runs_for_too_long_ends_its_lease_without_a_broker(lasting: LastingDaemon, cards: Cards) -> None:
    with lasting.now.builder(GIB, seconds=120).device(0).acquire() as lease, GpuSession(lease) as session:
        neighbour = Neighbour(session)
        endless = lasting.now.builder(GIB, seconds=120).max_kernel_secs(1).device(0).acquire()
        doomed = GpuSession(endless)
        kept = start_endless(doomed)
        worker = lasting.worker_pid(endless.lease_id)
        lasting.kill()
        rounds_until(neighbour, lambda: not cards.process_bytes(0, worker))
        lasting.start()
        report = lasting.now.query(endless.lease_id)
        assert (report["cause"], report["reason"]) == ("kernel_timeout", "a kernel ran for more than 1 s")
        neighbour.check()
        del kept
    lasting.check_idle()


def test_many_restarts_shrink_nothing(lasting: LastingDaemon) -> None:
    card = lasting.now.inventory().details[0]
    with lasting.now.builder(GIB, seconds=120).device(0).acquire() as lease, GpuSession(lease) as session:
        neighbour = Neighbour(session)
        for _ in range(RESTARTS):
            # A worker that dies now: its bytes become free while the next broker starts.
            dying = lasting.now.builder(2 * GIB, seconds=120).device(0).acquire()
            os.kill(lasting.worker_pid(dying.lease_id), signal.SIGKILL)
            lasting.restart()
            neighbour.check()
            after = lasting.now.inventory().details[0]
            assert (after["capacity_bytes"], after["fenced_bytes"]) == (card["capacity_bytes"], 0)
            lasting.now.wait_for_end(dying.lease_id)
            lease.renew(120)
    lasting.check_idle()
    assert lasting.now.inventory().details[0]["available_bytes"] == card["available_bytes"]


def test_what_dies_with_its_zygote_is_proved_back_by_the_next_broker(lasting: LastingDaemon, cards: Cards) -> None:
    lease = lasting.now.builder(4 * GIB, seconds=120).device(0).acquire()
    session = GpuSession(lease)
    kept = session.mem_alloc(3 * GIB), start_endless(session)
    lasting.kill()
    (zygote,) = lasting.zygotes()
    os.kill(zygote, signal.SIGKILL)
    lasting.start()
    with pytest.raises(GpuSessionFailed):
        session.sync()
    lasting.now.wait_for_end(lease.lease_id)
    assert lasting.now.query(lease.lease_id)["cause"] == "worker_died"
    del kept
    lasting.check_idle()
