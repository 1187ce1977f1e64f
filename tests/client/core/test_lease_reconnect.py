"""What a client asks again when its daemon is away for a moment, on both APIs: where leases outlive the daemon."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from gpulease.client import Busy, Disconnected, Revoked
from gpulease.client.core import lease as lease_module
from gpulease.protocol import Failure, Opcode, Status
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import HelloReply, Report
from gpulease.protocol.opcodes import HelloOption
from gpulease.protocol.primitives import Tlv
from helpers.client_faces import Face, Scenario, real
from helpers.scripted_peer import Handler, HangUp, Refusal, SayGoodbye, ScriptedPeer

Run = Callable[[Scenario], None]

KEEPS = HelloReply(0, "made-up", MAX_PAYLOAD_BYTES, (Tlv(HelloOption.KEEPS_LEASES, b""),))
LEAVING = SayGoodbye(Failure(Status.BUSY, "the daemon is being restarted"))
ASKED: dict[str, Opcode] = {"renew": Opcode.LEASE_RENEW, "query": Opcode.LEASE_QUERY, "free": Opcode.LEASE_FREE}


@pytest.fixture
def lasting(peer: ScriptedPeer) -> ScriptedPeer:
    peer.on(Opcode.HELLO, KEEPS)
    return peer


def then(peer: ScriptedPeer, op: Opcode, outcomes: list[BaseException]) -> None:
    """Do these in turn, and behave after that."""
    default: Handler = getattr(peer, f"_{op.name.lower()}")

    def answer(request: Any) -> Any:
        if outcomes:
            raise outcomes.pop(0)
        return default(request)

    peer.script[op] = answer


async def ask(lease: Any, what: str) -> Any:
    return await (lease.renew(30) if what == "renew" else getattr(lease, what)())


@pytest.mark.parametrize("outcomes", [[HangUp()] * 3, [LEAVING, HangUp(), LEAVING]], ids=["killed", "stopped"])
@pytest.mark.parametrize("what", list(ASKED))
def test_what_may_be_asked_again_is_until_there_is_an_answer(
    run: Run, lasting: ScriptedPeer, what: str, outcomes: list[BaseException]
) -> None:
    then(lasting, ASKED[what], list(outcomes))

    async def scenario(face: Face) -> None:
        await ask(await face.acquire(), what)

    run(scenario)
    assert lasting.ops().count(ASKED[what].name) == 4


def test_a_connection_that_ended_behind_an_answer_is_closed_for_the_next(run: Run, peer: ScriptedPeer) -> None:
    then(peer, Opcode.LEASE_QUERY, [SayGoodbye(LEAVING.failure, behind=Report({"state": "active"}))])

    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        for _ in range(2):
            assert (await lease.query())["state"] == "active"

    # A socket that is dropped unclosed fails a test by its warning.
    run(scenario)
    assert peer.ops().count("HELLO") == 2


@pytest.mark.parametrize("what", list(ASKED))
def test_a_daemon_whose_leases_end_with_it_is_not_waited_for(run: Run, peer: ScriptedPeer, what: str) -> None:
    then(peer, ASKED[what], [HangUp()] * 3)

    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        with pytest.raises(Disconnected):
            await ask(lease, what)

    run(scenario)
    assert peer.ops().count(ASKED[what].name) == 2


def test_nor_is_one_longer_than_the_lease_lasts(run: Run, lasting: ScriptedPeer) -> None:
    lasting.ttl_ms = 300
    then(lasting, Opcode.LEASE_RENEW, [HangUp()] * 1000)

    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        with pytest.raises(Disconnected):
            await lease.renew(30)
        assert time.monotonic() >= real(lease)._state.deadline
        lasting.script.clear()

    run(scenario)
    assert lasting.ops().count("LEASE_RENEW") < 20, "pauses grow, and come to an end"


def test_nor_for_ever(run: Run, lasting: ScriptedPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "RECONNECT_LIMIT_S", 0.2)
    then(lasting, Opcode.LEASE_QUERY, [HangUp()] * 1000)

    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        with pytest.raises(Disconnected):
            await lease.query()

    run(scenario)


@pytest.mark.parametrize("found", [Status.LEASE_FREED, Status.LEASE_EXPIRED, Status.NOT_FOUND], ids=lambda it: it.name)
def test_a_free_that_finds_the_lease_over_is_done(run: Run, lasting: ScriptedPeer, found: Status) -> None:
    then(lasting, Opcode.LEASE_FREE, [HangUp(), Refusal(Failure(found, "it is over"))])

    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        await lease.free()
        assert not lease.is_alive

    run(scenario)


def test_a_free_that_finds_it_revoked_says_so(run: Run, lasting: ScriptedPeer) -> None:
    then(lasting, Opcode.LEASE_FREE, [HangUp(), Refusal(Failure(Status.REVOKED, "by an operator"))])

    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        with pytest.raises(Revoked):
            await lease.free()

    run(scenario)


def test_a_refusal_is_an_answer(run: Run, lasting: ScriptedPeer) -> None:
    then(lasting, Opcode.LEASE_RENEW, [Refusal(Failure(Status.BUSY, "the disk is full"))])

    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        with pytest.raises(Busy, match="disk"):
            await lease.renew(30)

    run(scenario)
    assert lasting.ops().count("LEASE_RENEW") == 1


def test_an_acquire_is_not_asked_again(run: Run, lasting: ScriptedPeer) -> None:
    then(lasting, Opcode.LEASE_ALLOC, [HangUp()])

    async def scenario(face: Face) -> None:
        with pytest.raises(Disconnected):
            await face.acquire()

    run(scenario)
    assert lasting.ops().count("LEASE_ALLOC") == 1
