"""What tells a client that its lease is over, and what does not, on both APIs."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gpulease.client import (
    CapacityExceeded,
    Disconnected,
    Fenced,
    GpuLeaseError,
    GpuSessionFailed,
    LeaseExpired,
    SyncFailed,
)
from gpulease.protocol import Failure, Opcode, Status
from helpers.client_faces import Face, Scenario
from helpers.scripted_peer import HangUp, Refusal, SayGoodbye, ScriptedPeer
from helpers.waiting import PATIENCE_S

Run = Callable[[Scenario], None]

STOPPING = Failure(Status.DISCONNECTED, "the daemon is stopping")
STOPPING_TEXT = "the daemon is stopping. Acquire a new lease once the daemon is back, or on another node"
TELLING: list[BaseException] = [Refusal(STOPPING), SayGoodbye(STOPPING)]
ENDS = [
    (Refusal(Failure(Status.SESSION_FAILED, "its worker died")), GpuSessionFailed),
    (Refusal(Failure(Status.FENCED, "its memory is fenced")), Fenced),
    (Refusal(Failure(Status.LEASE_EXPIRED, "it expired")), LeaseExpired),
    *((telling, Disconnected) for telling in TELLING),
]


def name_of(value: object) -> str:
    failure = getattr(value, "failure", None)
    return f"{type(value).__name__}-{failure.status.name}" if failure else getattr(value, "__name__", str(value))


async def loss_of(keeper: Any) -> GpuLeaseError:
    async with asyncio.timeout(PATIENCE_S):
        while keeper.loss is None:  # noqa: ASYNC110  # a thread sets it on one of the APIs
            await asyncio.sleep(0.005)
    loss: GpuLeaseError = keeper.loss
    return loss


@pytest.mark.parametrize(("outcome", "error"), ENDS, ids=name_of)
def test_a_renewal_that_is_refused_for_good_ends_the_lease(
    run: Run, peer: ScriptedPeer, outcome: BaseException, error: type[GpuLeaseError]
) -> None:
    peer.on(Opcode.LEASE_RENEW, outcome)

    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        session = await face.open(lease)
        for _ in range(2):
            with pytest.raises(error) as caught:
                await lease.renew(5)
            assert type(caught.value) is error
        assert not lease.is_alive
        assert lease.remaining_s == 0
        assert not session.is_alive
        with pytest.raises(error):
            await session.sync()
        assert peer.ops().count("LEASE_RENEW") == 1

    run(scenario)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("renewed_soon")
@pytest.mark.parametrize(("outcome", "error"), ENDS, ids=name_of)
def test_keep_alive_gives_up_at_the_first_answer_that_says_so(
    run: Run, peer: ScriptedPeer, outcome: BaseException, error: type[GpuLeaseError]
) -> None:
    peer.on(Opcode.LEASE_RENEW, outcome)

    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        loss = await loss_of(lease.keep_alive())
        assert type(loss) is error
        assert not lease.is_alive
        assert peer.ops().count("LEASE_RENEW") == 1

    run(scenario)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("outcome", "error"), ENDS, ids=name_of)
def test_leaving_a_lease_that_is_over_is_no_error(
    run: Run, peer: ScriptedPeer, outcome: BaseException, error: type[GpuLeaseError]
) -> None:
    peer.on(Opcode.LEASE_FREE, outcome)

    async def scenario(face: Face) -> None:
        if error is Fenced:  # the memory did not come back: an operator should hear of it
            with pytest.raises(Fenced):
                async with face.session():
                    pass
        else:
            async with face.session():
                pass

    run(scenario)


@pytest.mark.usefixtures("renewed_soon")
def test_keep_alive_tries_again_while_nothing_is_known(run: Run, peer: ScriptedPeer) -> None:
    outcomes: list[BaseException] = [HangUp(), HangUp(), Refusal(Failure(Status.BUSY, "too many"))]
    renew = peer._lease_renew

    def answer(request: Any) -> Any:
        if outcomes:
            raise outcomes.pop(0)
        return renew(request)

    peer.script[Opcode.LEASE_RENEW] = answer

    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        keeper = lease.keep_alive()
        async with asyncio.timeout(PATIENCE_S):
            while lease.generation == 1:  # noqa: ASYNC110  # a thread renews it on one of the APIs
                await asyncio.sleep(0.005)
        assert keeper.loss is None
        assert lease.is_alive
        await lease.free()

    run(scenario)


@pytest.mark.parametrize("outcome", TELLING, ids=name_of)
@pytest.mark.parametrize("op", [Opcode.ATTACH, Opcode.SYNC])
def test_a_session_of_a_daemon_that_stops(run: Run, peer: ScriptedPeer, op: Opcode, outcome: BaseException) -> None:
    peer.on(op, outcome)

    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        for _ in range(2):
            with pytest.raises(Disconnected) as caught:
                await (await face.open(lease)).sync()
            assert str(caught.value).endswith(f": {STOPPING_TEXT}")
        assert not lease.is_alive
        with pytest.raises(Disconnected, match="lease_renew: the daemon is stopping"):
            await lease.renew(5)
        assert "LEASE_QUERY" not in peer.ops(), "it was told"

    run(scenario)


def test_the_daemons_own_hint_is_kept(run: Run, peer: ScriptedPeer) -> None:
    peer.fail(Opcode.LEASE_RENEW, Status.DISCONNECTED, "the daemon is stopping", hint="Have patience")

    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        with pytest.raises(Disconnected, match=r"the daemon is stopping\. Have patience$"):
            await lease.renew(5)

    run(scenario)


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "report"])
def test_a_connection_that_breaks_as_the_daemon_stops(run: Run, peer: ScriptedPeer, is_told: bool) -> None:
    peer.on(Opcode.SYNC, HangUp())
    if is_told:
        peer.on(Opcode.LEASE_QUERY, Refusal(STOPPING))
    else:
        peer.report.update(cause="shutdown")

    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        session = await face.open(lease)
        with pytest.raises(Disconnected, match=r"daemon (is stopping|shut down)\. Acquire a new lease once"):
            await session.sync()
        assert not lease.is_alive

    run(scenario)


def test_a_connection_that_breaks_ends_no_lease(run: Run, peer: ScriptedPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulease.client.core.lease.END_REASON_WAIT_S", 0.1)
    peer.on(Opcode.SYNC, HangUp())

    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        session = await face.open(lease)
        with pytest.raises(Disconnected, match="still active"):
            await session.sync()
        assert lease.is_alive
        await lease.renew(50)
        peer.close()
        with pytest.raises(Disconnected, match="can't connect"):
            await lease.renew(50)
        assert lease.is_alive

    run(scenario)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (Status.SESSION_FAILED, GpuSessionFailed),
        (Status.SYNC_FAILED, SyncFailed),
        (Status.CAPACITY_EXCEEDED, CapacityExceeded),
    ],
)
def test_an_operation_that_fails_ends_no_lease(
    run: Run, peer: ScriptedPeer, status: Status, error: type[GpuLeaseError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpulease.client.core.lease.END_REASON_WAIT_S", 0.05)
    peer.fail(Opcode.SYNC, status, "the context was lost")

    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        session = await face.open(lease)
        with pytest.raises(error):
            await session.sync()
        assert lease.is_alive
        await lease.renew(50)
        assert lease.is_alive

    run(scenario)
