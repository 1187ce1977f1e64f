"""A daemon is killed while an attacker controls a worker: the lease still ends at its deadline."""

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
    # Keep the object: a lease object that is garbage collected frees its lease.
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
