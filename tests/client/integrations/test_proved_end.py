"""The end of a lease of a cluster's job, on a real daemon."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gpulease.client import NotFound, Revoked
from gpulease.client.integrations.proved_end import REVOKED, NotProvedFree, free_and_prove, report_of
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.lease_ids import LeaseId
from gpulease.protocol.lease_options import ORPHAN
from gpulease.protocol.messages import LeaseAlloc
from gpulease.protocol.opcodes import GPU_RESOURCE_TYPE
from gpulease.protocol.primitives import LeaseParameter
from helpers.daemon import Daemon, Faults
from helpers.waiting import wait_until


def lease_of(daemon: Daemon) -> LeaseId:
    """A lease that outlives the connection that asked for it."""
    parameters = (LeaseParameter(ORPHAN.tag, bytes(4)),)
    wanted = LeaseAlloc(GPU_RESOURCE_TYPE, 1 << 20, 600_000, 0, None, parameters)
    return LeaseId(ask(Opcode.LEASE_ALLOC, wanted, daemon.address).lease_id)


def test_a_lease_that_is_freed_is_over_and_may_be_freed_again(daemon: Daemon) -> None:
    said: list[str] = []
    lease_id = lease_of(daemon)
    assert report_of(lease_id, daemon.address)["state"] == "active"
    for _ in range(2):
        free_and_prove(lease_id, daemon.address, 60, said.append)
        assert report_of(lease_id, daemon.address)["state"] == "torndown"
    assert said == []


def test_a_lease_that_no_daemon_knows_is_over(daemon: Daemon) -> None:
    with pytest.raises(NotFound):
        daemon.query(7)
    free_and_prove(LeaseId(7), daemon.address, 60, print)
    assert report_of(LeaseId(7), daemon.address) == {"state": "torndown", "cause": None}


def test_a_lease_that_was_revoked_long_ago_is_over(start_daemon: Callable[..., Daemon]) -> None:
    """The daemon remembers nothing else of it, and says so by an error."""
    daemon = start_daemon(config="[limits]\nmax_tombstones = 1\n")
    lease_id = lease_of(daemon)
    daemon.revoke(lease_id)
    free_and_prove(lease_of(daemon), daemon.address, 60, print)

    def forgotten() -> bool:
        try:
            daemon.query(lease_id)
        except Revoked:
            return True
        return False

    wait_until(forgotten, "the lease is forgotten")
    assert report_of(lease_id, daemon.address) == {"state": "torndown", "cause": REVOKED}
    free_and_prove(lease_id, daemon.address, 60, print)


def test_memory_that_is_not_proved_free_is_told(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    withheld = tmp_path / "withheld"
    limits = "[limits]\nreclaim_timeout_s = 1\n"
    daemon = start_daemon(config=limits, faults=Faults(withhold_proof_while=withheld))
    lease_id = lease_of(daemon)
    withheld.touch()
    for _ in range(2):
        with pytest.raises(NotProvedFree, match="fenced"):
            free_and_prove(lease_id, daemon.address, 60, print)
    daemon.allowed_trouble += ["the test withholds the proof", "fence"]
