"""Another lease on the terms of one that has ended, on both APIs."""

from collections.abc import Callable

import pytest

from gpulease.client import GpuExclusivityClass, GpuSession, InvalidRequest, LeaseFreed, NotFound, Revoked
from gpulease.protocol import Failure, Opcode, Status
from gpulease.protocol.messages import LeaseAlloc
from helpers.client_faces import Face, Scenario
from helpers.daemon import Daemon
from helpers.scripted_peer import Refusal, ScriptedPeer

Run = Callable[[Scenario], None]


def asked(peer: ScriptedPeer) -> list[LeaseAlloc]:
    return [request.body for request in peer.heard if isinstance(request.body, LeaseAlloc)]


async def acquired_again(face: Face) -> None:
    wish = face.builder().lease_secs(12.5).exclusivity(GpuExclusivityClass.SESSION_EXCLUSIVE).device(0).timeout(1.5)
    lease = await face.acquire(wish)
    await lease.renew(100)
    await lease.free()
    wish.lease_secs(7)
    again = await lease.reacquire()
    one, other = asked(face.peer)
    assert one == other
    assert again.is_alive
    assert not lease.is_alive
    with pytest.raises(LeaseFreed):
        await lease.free()
    await again.free()


def test_the_terms_are_those_that_were_asked_for(run: Run) -> None:
    run(acquired_again)


async def refused_while_it_goes_on(face: Face) -> None:
    lease = await face.acquire()
    with pytest.raises(InvalidRequest, match="reacquire: the lease has not ended"):
        await lease.reacquire()
    assert len(asked(face.peer)) == 1


def test_a_lease_that_goes_on_is_not_doubled(run: Run) -> None:
    run(refused_while_it_goes_on)


def test_an_end_that_nobody_here_has_heard_of_is_asked_for(run: Run, peer: ScriptedPeer) -> None:
    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        peer.report.update(cause="revoked", state="torndown")
        await lease.reacquire()
        assert len(asked(peer)) == 2

    run(scenario)


def test_a_lease_that_the_daemon_has_forgotten_has_ended(run: Run, peer: ScriptedPeer) -> None:
    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        peer.on(Opcode.LEASE_QUERY, Refusal(Failure(Status.NOT_FOUND, "no such lease")))
        await lease.reacquire()
        assert len(asked(peer)) == 2
        with pytest.raises(NotFound):
            await lease.renew(5)

    run(scenario)


def test_after_a_revocation_the_work_goes_on_in_another_session(shared_daemon: Daemon) -> None:
    lease = shared_daemon.builder(2 << 20).acquire()
    session = GpuSession(lease)
    shared_daemon.revoke(lease.lease_id)
    with pytest.raises(Revoked):
        session.sync()
    with lease.reacquire() as again, GpuSession(again) as session:
        assert again.lease_id != lease.lease_id
        assert again.size_bytes == lease.size_bytes
        session.mem_alloc(1 << 20)
