"""A real daemon, killed beside a worker that was taken over: the lease ends at its deadline all the same."""

import time
from collections.abc import Callable

import pytest

from helpers.daemon import Faults
from helpers.hostile_worker import HOSTILE_BYTES
from helpers.lasting import LastingDaemon
from helpers.waiting import wait_until

LEASE_S = 2.0


@pytest.fixture
def lasting(start_lasting: Callable[..., LastingDaemon]) -> LastingDaemon:
    return start_lasting(faults=Faults(has_hostile_workers=True))


@pytest.mark.exhaustive
def test_without_a_daemon_a_hostile_worker_ends_when_its_lease_does(lasting: LastingDaemon) -> None:
    begun_at = time.monotonic()
    # Kept: a lease that nobody has is given back.
    lease = lasting.now.builder(HOSTILE_BYTES, seconds=LEASE_S).acquire()
    lease_id = lease.lease_id
    assert lasting.has_worker(lease_id)
    lasting.kill()
    wait_until(lambda: not lasting.has_worker(lease_id), "it ends, with no daemon there")
    assert time.monotonic() >= begun_at + LEASE_S
    daemon = lasting.start()
    daemon.wait_for_end(lease_id)
    assert daemon.query(lease_id)["cause"] == "expired"
    lasting.check_idle()
