"""Nothing of a lease is left in a process that serves its tenant again, however a secret was brought into it."""

import secrets
from collections.abc import Callable

import pytest

from gpulease.client import GpuSession
from gpulease.client.verify.memory_search import count_in_process
from helpers.daemon import Daemon
from helpers.recycling import PATIENT, SETTINGS, wait_until_full
from helpers.secret_ways import WAYS

MIB = 1 << 20


@pytest.mark.exhaustive
def test_nothing_is_left(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(config=SETTINGS, faults=PATIENT)
    wait_until_full(daemon)
    pids = set()
    for way, leave in WAYS.items():
        lease = daemon.builder(16 * MIB).acquire()
        pid = daemon.worker_pid(lease.lease_id)
        with GpuSession(lease) as session:
            secret = leave(session, secrets.token_bytes(32))
            assert count_in_process(pid, secret), f"{way}: the search finds nothing, so it proves nothing"
        lease.free()
        assert daemon.inventory().details[0]["recycled_contexts"] == 1, (way, daemon.log())
        assert count_in_process(pid, secret) == 0, way
        pids.add(pid)
    assert len(pids) == 1
