"""Leases whose clients are gone: which clients count as connected, and what reports and events say."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpulease.client import GpuLease, GpuSession, LeaseExpired, Permission, Phase, my_audience
from gpulease.client.cli.__main__ import main
from gpulease.protocol import Opcode
from gpulease.protocol.address import ADDRESS_VARIABLE
from gpulease.protocol.messages import GpuSubmit
from helpers.daemon import Daemon, Faults, python_environment
from helpers.lasting import LastingDaemon
from helpers.raw_peer import RawPeer
from helpers.submits import check_scaled, scaling
from helpers.waiting import wait_until

KEEPS_LEASE = """
import sys
from gpulease.client import GpuBuilder, GpuSession
lease = GpuBuilder(sys.argv[1]).min_vram(1 << 20).lease_secs(600).orphan_secs(float(sys.argv[2])).acquire()
session = GpuSession(lease) if sys.argv[3] == "session" else None
print(lease.lease_id, flush=True)
sys.stdin.read()
"""

LONG_S = 300.0
"""A waiting time that no test waits for."""


@contextmanager
def client(address: str, orphan_s: float, has: str) -> Iterator[tuple[int, Callable[[], None]]]:
    """Yield the lease id of a program with a lease, and a function that kills the program."""
    with subprocess.Popen(
        [sys.executable, "-c", KEEPS_LEASE, address, str(orphan_s), has],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=python_environment(),
    ) as process:
        assert process.stdout is not None
        try:
            lease_id = int(process.stdout.readline(), 16)

            def kill() -> None:
                process.kill()
                process.wait()

            yield lease_id, kill
        finally:
            process.kill()


def waits(daemon: Daemon, lease_id: int) -> bool:
    """Return whether the lease is about to be orphaned. Uses the list, because a query would count as a connection."""
    return row(daemon, lease_id)["orphaned_in_ms"] is not None


def row(daemon: Daemon, lease_id: int) -> dict[str, Any]:
    """Return the lease's entry in the list of leases."""
    (found,) = [one for one in daemon.leases() if int(one["lease_id"], 16) == lease_id]
    return found


def wait_for_end(daemon: Daemon, lease_id: int) -> str:
    """Wait until the lease has ended, without a query of it before. Returns the cause."""
    wait_until(lambda: lease_id not in [int(one["lease_id"], 16) for one in daemon.leases()], "the lease is gone")
    return str(daemon.query(lease_id)["cause"])


def wait_for_the_wait(daemon: Daemon, lease_id: int) -> None:
    wait_until(lambda: waits(daemon, lease_id), "no client is connected")


@pytest.mark.parametrize("has", ["session", "lease"])
def test_the_lease_of_a_client_that_was_killed_is_orphaned(daemon: Daemon, has: str) -> None:
    with client(daemon.address, 0.2, has) as (lease_id, kill):
        assert not waits(daemon, lease_id)
        assert row(daemon, lease_id)["orphan_ms"] == 200
        kill()
        wait_for_end(daemon, lease_id)
    report = daemon.query(lease_id)
    assert (report["cause"], report["reason"]) == ("orphaned", "no client was connected to it for 200 ms")


def test_those_who_listen_are_warned_and_told_the_cause(daemon: Daemon) -> None:
    lease = daemon.builder().orphan_secs(0.3).acquire()
    with lease.events() as events:
        assert next(events).phase is Phase.ACTIVE
        lease._state.channel.close()
        heard = list(events)
    assert heard[0].phase is Phase.WARNING
    assert "no client is connected" in heard[0].reason
    assert (heard[-1].phase, heard[-1].cause) == (Phase.ENDED, "orphaned")
    with pytest.raises(LeaseExpired, match="orphaned: no client was connected to it"):
        lease.renew(60)


def test_the_list_says_for_how_long_it_still_waits(daemon: Daemon) -> None:
    with daemon.builder().orphan_secs(LONG_S).acquire() as lease:
        lease._state.channel.close()
        wait_for_the_wait(daemon, lease.lease_id)
        shown = CliRunner().invoke(main, ["leases"], env={ADDRESS_VARIABLE: daemon.address}).output
        assert "active (unconnected, ends in " in shown


def test_a_lease_object_that_lives_is_a_connection_and_so_is_a_session(daemon: Daemon) -> None:
    with daemon.builder().orphan_secs(LONG_S).acquire() as lease:
        with GpuSession(lease) as session:
            session.sync()
        assert not waits(daemon, lease.lease_id), "its session is closed, and the program lives"
        with GpuSession(lease) as session:
            lease._state.channel.close()
            session.sync()
            assert not waits(daemon, lease.lease_id), "its session is open"
        wait_for_the_wait(daemon, lease.lease_id)
        with GpuSession(lease) as session:
            assert not waits(daemon, lease.lease_id), "somebody attached meanwhile"
        wait_for_the_wait(daemon, lease.lease_id)
        lease.renew(60)
        assert not waits(daemon, lease.lease_id), "it was renewed, on another connection"


def test_a_guest_by_a_token_is_somebody(daemon: Daemon) -> None:
    with daemon.builder().orphan_secs(LONG_S).acquire() as lease:
        audience = my_audience(daemon.tcp_address)
        with GpuSession.attach(lease.issue(Permission.MEM_READ, audience), daemon.tcp_address):
            lease._state.channel.close()
            assert not waits(daemon, lease.lease_id)
        wait_for_the_wait(daemon, lease.lease_id)


@pytest.mark.exhaustive
def test_the_operators_default_is_for_those_who_do_not_say(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(config="[limits]\norphan_s = 1\n")

    def abandoned(lease: GpuLease) -> int:
        lease._state.channel.close()
        return lease.lease_id

    goes, stays = (abandoned(wish.acquire()) for wish in (daemon.builder(), daemon.builder().orphan_secs(0)))
    assert wait_for_end(daemon, goes) == "orphaned"
    assert daemon.query(stays)["state"] == "active"
    daemon.revoke(stays)


@pytest.mark.exhaustive
def test_the_next_daemon_knows_who_is_connected(lasting: LastingDaemon) -> None:
    quiet = lasting.now.builder().orphan_secs(2).acquire()
    busy = lasting.now.builder().orphan_secs(2).acquire()
    with GpuSession(busy) as session:
        daemon = lasting.restart(Faults({"gpulease.daemon.broker.connection_tracker:TAKEOVER_WAIT_MS": 1}))
        assert wait_for_end(daemon, quiet.lease_id) == "orphaned"
        session.sync()
        assert not waits(daemon, busy.lease_id)
    assert wait_for_end(daemon, busy.lease_id) == "orphaned"


def test_a_client_that_lives_has_time_to_come_back_to_the_next_daemon(
    lasting: LastingDaemon,
) -> None:
    with lasting.now.builder(seconds=300).orphan_secs(0.2).acquire() as lease:
        daemon = lasting.restart()
        assert row(daemon, lease.lease_id)["orphaned_in_ms"] > 200
        check_scaled(scaling(lease).launch())
        wait_for_the_wait(daemon, lease.lease_id)
        assert row(daemon, lease.lease_id)["orphaned_in_ms"] > 200, "its submit is gone, and it has none but those"
        assert lease.query()["orphaned_in_ms"] is None
        assert not waits(daemon, lease.lease_id), "it asked, and is still connected"


def test_a_daemon_that_is_killed_before_it_writes_the_end_down_tells_the_next_one_the_cause(
    start_lasting: Callable[..., LastingDaemon], tmp_path: Path
) -> None:
    hang = tmp_path / "hang"
    lasting = start_lasting(faults=Faults(hang_syncs_while=hang))
    lease = lasting.now.builder().orphan_secs(0.2).acquire()
    hang.touch()
    lease._state.channel.close()
    wait_until(lambda: not lasting.has_worker(lease.lease_id), "it is orphaned")
    lasting.kill()
    hang.unlink()
    assert wait_for_end(lasting.start(), lease.lease_id) == "orphaned"


def test_a_question_of_its_tenant_is_a_connection(daemon: Daemon) -> None:
    with daemon.builder().orphan_secs(LONG_S).acquire() as lease:
        lease._state.channel.close()
        wait_for_the_wait(daemon, lease.lease_id)
        lease.query()
        assert not waits(daemon, lease.lease_id)
        lease._state.channel.close()
        wait_for_the_wait(daemon, lease.lease_id)
        with RawPeer(daemon.address).hello() as peer:
            peer.refused(Opcode.GPU_SUBMIT, GpuSubmit(0, ()), lease.lease_id)
            assert not waits(daemon, lease.lease_id), "a submit that was refused was asked for"
