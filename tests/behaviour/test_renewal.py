"""A renewal in time moves the deadline; one that is too late changes nothing. `keep_alive` renews automatically."""

import threading
import time
from contextlib import suppress

import pytest

from gpulease.client import (
    Denied,
    GpuLease,
    GpuLeaseError,
    GpuSession,
    InvalidRequest,
    LeaseExpired,
    LeaseFreed,
    NotFound,
    Revoked,
    keep_alive,
)
from gpulease.client.core import lease as leases
from gpulease.protocol import Opcode, Status
from gpulease.protocol.messages import LeaseRef, LeaseRenew
from helpers.daemon import SHORT_LEASES_S, Daemon
from helpers.kernels import Neighbour, check_main_job
from helpers.raw_peer import RawPeer, lease_alloc
from helpers.waiting import wait_until


def wait_past(deadline: float) -> None:
    wait_until(lambda: time.monotonic() > deadline, "the first deadline is past")


def test_a_renewed_lease_outlives_its_first_deadline(daemon: Daemon) -> None:
    def renewed(lease: GpuLease) -> float:
        first_deadline, generation = time.monotonic() + lease.remaining_s, lease.generation
        lease.renew(300)
        assert lease.generation > generation
        assert 250 < lease.remaining_s <= 300
        return first_deadline

    lease, first_deadline, _ = daemon.short_lease(renewed)
    with lease, GpuSession(lease) as session:
        neighbour = Neighbour(session)
        # The timer of the first generation fires now, and must have no effect.
        wait_past(first_deadline + 0.3)
        neighbour.check()
        check_main_job(session)
        report = lease.query()
        assert (report["state"], report["generation"]) == ("active", lease.generation)
        assert report["remaining_ms"] > 20_000


def test_many_renewals_leave_one_deadline(daemon: Daemon) -> None:
    def renewed(lease: GpuLease) -> tuple[GpuSession, float]:
        session, seconds = GpuSession(lease), lease.query()["ttl_ms"] / 1000
        for _ in range(50):
            asked_s = time.monotonic()
            lease.renew(seconds)
        return session, asked_s + seconds

    lease, (session, last_deadline), _ = daemon.short_lease(renewed)
    daemon.wait_for_end(lease.lease_id)
    assert time.monotonic() >= last_deadline
    with session, pytest.raises(LeaseExpired):
        session.sync()


def test_renewing_never_shortens(daemon: Daemon) -> None:
    with daemon.builder(seconds=60).acquire() as lease:
        lease.renew(1)
        assert lease.query()["remaining_ms"] > 50_000
        assert lease.remaining_s > 50


def test_over_the_maximum_time(daemon: Daemon) -> None:
    with pytest.raises(Denied, match="86400") as caught:
        daemon.builder(seconds=86_401).acquire()
    assert caught.value.hint
    with daemon.builder().acquire() as lease:
        with pytest.raises(Denied, match="86400"):
            lease.renew(86_401)
        assert lease.query()["state"] == "active"


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 2**40])
def test_times_that_are_none(daemon: Daemon, seconds: float) -> None:
    with daemon.builder().acquire() as lease, pytest.raises(InvalidRequest):
        lease.renew(seconds)


def test_a_time_to_live_of_nothing_on_the_wire(daemon: Daemon) -> None:
    with RawPeer(daemon.address).hello() as peer:
        assert peer.refused(Opcode.LEASE_ALLOC, lease_alloc(ttl_ms=0)).status is Status.INVALID_REQUEST
        grant = peer.acquire()
        assert peer.refused(Opcode.LEASE_RENEW, LeaseRenew(grant.lease_id, 0)).status is Status.INVALID_REQUEST
        peer.free(grant.lease_id)


@pytest.mark.parametrize(("end", "error"), [("free", LeaseFreed), ("revoke", Revoked), ("expire", LeaseExpired)])
def test_an_ended_lease_stays_ended(daemon: Daemon, end: str, error: type[GpuLeaseError]) -> None:
    lease = daemon.builder(seconds=0.2 if end == "expire" else 60).acquire()
    if end == "free":
        lease.free()
    elif end == "revoke":
        daemon.revoke(lease.lease_id)
    else:
        daemon.wait_for_end(lease.lease_id)
    for use in (lambda: lease.renew(60), lease.free, lambda: GpuSession(lease)):
        with pytest.raises(error):
            use()
    # A client that does not know of the end gets the same error from the daemon.
    with RawPeer(daemon.address).hello() as peer:
        for op, body in (
            (Opcode.LEASE_RENEW, LeaseRenew(lease.lease_id, 60_000)),
            (Opcode.LEASE_FREE, LeaseRef(lease.lease_id)),
        ):
            assert peer.refused(op, body).status is error.default_status
    assert daemon.query(lease.lease_id)["state"] == "torndown"


def test_a_lease_the_daemon_never_granted(daemon: Daemon) -> None:
    with RawPeer(daemon.address).hello() as peer:
        for op, body in (
            (Opcode.LEASE_RENEW, LeaseRenew(99, 1000)),
            (Opcode.LEASE_FREE, LeaseRef(99)),
            (Opcode.LEASE_QUERY, LeaseRef(99)),
        ):
            assert peer.refused(op, body).status is NotFound.default_status


@pytest.mark.exhaustive
def test_keep_alive_carries_a_lease_past_its_time(daemon: Daemon) -> None:
    # A busy host may renew a short lease too late. Then a longer one is tried.
    *short, longest_s = SHORT_LEASES_S
    for seconds in short:
        with suppress(LeaseExpired):
            return check_keep_alive(daemon, seconds)
    check_keep_alive(daemon, longest_s)


def check_keep_alive(daemon: Daemon, seconds: float) -> None:
    with daemon.builder(seconds=seconds).acquire() as lease, GpuSession(lease) as session:
        neighbour = Neighbour(session)
        until = time.monotonic() + 4 * seconds
        with lease.keep_alive() as keeper:
            wait_until(lambda: neighbour.check() and time.monotonic() > until, "four times its time has passed")
            if keeper.loss is not None:
                raise keeper.loss
        assert lease.generation > 3
        # After it was stopped, it renews no more.
        daemon.wait_for_end(lease.lease_id)
        with pytest.raises(LeaseExpired):
            session.sync()


def test_keep_alive_tells_a_loss_once(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEW_AT", 0.01)
    losses: list[GpuLeaseError] = []
    lost = threading.Event()

    def on_loss(error: GpuLeaseError) -> None:
        losses.append(error)
        lost.set()

    with daemon.builder(seconds=60).acquire() as lease:
        keeper = keep_alive(lease, on_loss)
        daemon.revoke(lease.lease_id)
        assert lost.wait(60)
        keeper.stop()
        assert [type(error) for error in losses] == [Revoked]
        assert keeper.loss is losses[0]


def test_keep_alive_of_a_lease_that_is_given_back_is_no_loss(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEW_AT", 1e-3)
    losses: list[GpuLeaseError] = []
    lease = daemon.builder(seconds=60).acquire()
    with lease.keep_alive(losses.append) as keeper:
        lease.free()
        daemon.wait_for_end(lease.lease_id)
        # Its wait ends when the next renewal is due.
        wait_until(lambda: not keeper._thread.is_alive(), "it ends by itself")
    assert keeper.loss is None
    assert not losses
