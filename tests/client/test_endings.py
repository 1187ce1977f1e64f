"""What a client raises when the session's connection ends, on both APIs."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gpulease import client
from gpulease.client import Disconnected, GpuLeaseError
from gpulease.client.core.lease import END_REASON_WAIT_S, end_reason_of
from gpulease.protocol import Failure, Opcode, Status
from gpulease.protocol.codec import build_body
from gpulease.protocol.framing import build_frame
from gpulease.protocol.messages import Data, Handle
from gpulease.protocol.opcodes import Flag
from helpers.client_faces import Face, Scenario, any_operation
from helpers.scripted_peer import LEASE_ID, HangUp, SayGoodbye, ScriptedPeer, SendRaw, Silence

Run = Callable[[Scenario], None]

SESSION_OPERATIONS = [
    "MEM_ALLOC",
    "MEM_WRITE",
    "MEM_READ",
    "MODULE_LOAD",
    "MODULE_UNLOAD",
    "SYNC",
    "LAUNCH",
]


CAUSES = [
    ({"cause": "expired", "state": "draining"}, client.LeaseExpired, "the lease expired"),
    ({"cause": "expired", "state": "fenced"}, client.LeaseExpired, "the lease expired"),
    ({"cause": "revoked", "state": "torndown", "reason": "maintenance"}, client.Revoked, "revoked: maintenance"),
    ({"cause": "freed", "state": "torndown"}, client.LeaseFreed, "the lease was freed"),
    ({"cause": "worker_died", "reason": "signal 9"}, client.GpuSessionFailed, "process died: signal 9"),
    ({"cause": "faulted", "reason": "illegal address"}, client.GpuSessionFailed, "illegal address"),
    ({"cause": "faulted", "state": "fenced"}, client.Fenced, "memory is fenced"),
    ({"cause": "shutdown"}, client.Disconnected, "the daemon shut down"),
    ({"cause": "something new"}, client.GpuSessionFailed, "something new"),
]


@pytest.mark.parametrize("op", SESSION_OPERATIONS)
def test_eof_in_any_operation_tells_what_became_of_the_lease(run_over_both: Run, peer: ScriptedPeer, op: str) -> None:
    async def scenario(face: Face) -> None:
        async with face.session() as session:
            buffer, module = await session.mem_alloc(1 << 21), await session.module_load(b"ptx")
            peer.report.update(cause="worker_died", reason="signal 9")
            peer.on(Opcode[op], HangUp())
            for _ in range(2):
                with pytest.raises(client.GpuSessionFailed, match=f"{op.lower()}: .*process died: signal 9") as caught:
                    await any_operation(session, buffer, module, op)
                assert type(caught.value) is client.GpuSessionFailed
            assert not session.is_alive
            assert not buffer.is_alive

    run_over_both(scenario)


@pytest.mark.parametrize(("report", "error", "words"), CAUSES, ids=lambda value: str(value)[:30])
def test_every_end_of_a_lease_has_its_error(
    run: Run, peer: ScriptedPeer, report: dict[str, Any], error: type[GpuLeaseError], words: str
) -> None:
    peer.report.update(report)
    peer.on(Opcode.SYNC, HangUp())

    async def scenario(face: Face) -> None:
        async with face.session() as session:
            with pytest.raises(error, match=words) as caught:
                await session.sync()
            assert type(caught.value) is error

    run(scenario)


def test_an_end_because_of_a_region_is_not_said_to_be_a_kernels_time_limit() -> None:
    region = {"cause": "kernel_timeout", "reason": f"region {2:032x} could not be taken away: a launch still runs"}
    kernel = {"cause": "kernel_timeout", "reason": "a kernel ran for more than 0.5 s"}
    texts = [failure.message for failure in map(end_reason_of, (region, kernel)) if failure is not None]
    assert [text.partition(":")[0] for text in texts] == [
        "a region of the session could not be ended",
        "a kernel ran for longer than the lease allows",
    ]


@pytest.mark.parametrize(
    ("cause", "reason", "is_kill"),
    [
        ("worker_died", "was killed by SIGKILL", True),
        ("worker_died", "was killed by SIGSEGV", False),
        ("faulted", "an illegal address; was killed by SIGKILL", False),
        ("kernel_timeout", "was killed by SIGKILL", False),
    ],
)
def test_a_kill_from_outside_is_told_from_what_the_lease_computed(
    run: Run, peer: ScriptedPeer, cause: str, reason: str, is_kill: bool
) -> None:
    peer.report.update(cause=cause, reason=reason)
    peer.on(Opcode.SYNC, HangUp())

    async def scenario(face: Face) -> None:
        async with face.session() as session:
            with pytest.raises(client.GpuSessionFailed) as caught:
                await session.sync()
            assert caught.value.failure.is_kill is is_kill

    run(scenario)


def test_eof_while_attaching(run: Run, peer: ScriptedPeer) -> None:
    peer.on(Opcode.ATTACH, HangUp())
    peer.report.update(cause="spawn_failed", reason="no memory")

    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        with pytest.raises(client.GpuSessionFailed, match="could not be started: no memory"):
            await face.open(lease)
        with pytest.raises(client.GpuSessionFailed, match="could not be started"):
            await face.open(lease)

    run(scenario)


def test_attach_refused(run: Run, peer: ScriptedPeer) -> None:
    peer.fail(Opcode.ATTACH, Status.LEASE_EXPIRED, "too late")

    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        with pytest.raises(client.LeaseExpired, match="attach: too late"):
            await face.open(lease)

    run(scenario)


@pytest.mark.exhaustive
@pytest.mark.parametrize("length", range(0, 48, 3))
def test_eof_at_every_point_of_a_reply(run_over_both: Run, peer: ScriptedPeer, length: int) -> None:
    peer.report.update(cause="worker_died")
    for op, body in ((Opcode.MEM_ALLOC, Handle(1)), (Opcode.MEM_READ, Data(bytes(100)))):
        whole = build_frame(op, build_body(body), request_id=3, session_id=LEASE_ID, flags=Flag.REPLY)
        peer.on(op, SendRaw(whole[:length], closes=True))

    async def scenario(face: Face) -> None:
        async with face.session() as session:
            with pytest.raises(client.GpuSessionFailed):
                await session.mem_alloc(100)

    run_over_both(scenario)


def test_eof_in_the_middle_of_a_read(run: Run, peer: ScriptedPeer) -> None:
    async def scenario(face: Face) -> None:
        async with face.session() as session:
            buffer = await session.mem_alloc(1 << 20)
            peer.report.update(cause="revoked")
            reply = build_body(Data(bytes(1 << 20)))
            whole = build_frame(Opcode.MEM_READ, reply, request_id=4, session_id=LEASE_ID, flags=Flag.REPLY)
            peer.on(Opcode.MEM_READ, SendRaw(whole[: 1 << 19], closes=True))
            with pytest.raises(client.Revoked):
                await session.mem_read(buffer, 0, 1 << 20)

    run(scenario)


@pytest.mark.parametrize("size", [10, 1 << 20])
@pytest.mark.parametrize("difference", [-1, 1])
def test_a_read_of_another_length(run: Run, peer: ScriptedPeer, size: int, difference: int) -> None:
    peer.on(Opcode.MEM_READ, Data(bytes(size + difference)))
    peer.report.update(cause="shutdown")

    async def scenario(face: Face) -> None:
        async with face.session() as session:
            buffer = await session.mem_alloc(size)
            with pytest.raises(Disconnected):
                await session.mem_read(buffer, 0, size)

    run(scenario)


def test_a_goodbye_says_why_by_itself(run: Run, peer: ScriptedPeer) -> None:
    peer.on(Opcode.SYNC, SayGoodbye(Failure(Status.REVOKED, "an operator wants it back")))

    async def scenario(face: Face) -> None:
        async with face.session() as session:
            for _ in range(2):
                with pytest.raises(client.Revoked, match="sync: an operator wants it back"):
                    await session.sync()
            assert "LEASE_QUERY" not in peer.ops()

    run(scenario)


def test_eof_while_the_broker_knows_of_nothing(run: Run, peer: ScriptedPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    peer.on(Opcode.SYNC, HangUp())

    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        session = await face.open(lease)
        # By the client's clock, each query takes more than half of the time for which it asks.
        took_s = END_REASON_WAIT_S * 0.6
        clock = SimpleNamespace(monotonic=lambda: peer.ops().count("LEASE_QUERY") * took_s)
        monkeypatch.setattr("gpulease.client.core.lease.time", clock)
        with pytest.raises(Disconnected, match="still active"):
            await session.sync()
        assert peer.ops().count("LEASE_QUERY") == 2
        await session.close()

    run(scenario)


def test_eof_and_no_broker_either(run: Run, peer: ScriptedPeer) -> None:
    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        session = await face.open(lease)
        peer.close()
        with pytest.raises(Disconnected, match="can't connect"):
            await session.sync()
        await session.close()
        with pytest.raises(Disconnected):
            await lease.free()

    run(scenario)


def test_a_forgotten_lease_past_its_end_is_expired(run: Run, peer: ScriptedPeer) -> None:
    peer.ttl_ms = 1
    peer.on(Opcode.SYNC, HangUp())
    peer.fail(Opcode.LEASE_QUERY, Status.NOT_FOUND, "no such lease")

    async def scenario(face: Face) -> None:
        async with face.session() as session:
            await asyncio.sleep(0.01)
            with pytest.raises(client.LeaseExpired):
                await session.sync()

    run(scenario)


def test_a_sync_that_never_ends_ends_with_the_lease(
    run: Run, peer: ScriptedPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.on(Opcode.SYNC, Silence())
    answers: list[dict[str, Any]] = [{"remaining_ms": 60_100}, {"cause": "expired", "remaining_ms": 0}]
    query = peer._lease_query

    def advance(request: Any) -> Any:
        peer.report.update(answers.pop(0) if len(answers) > 1 else answers[0])
        return query(request)

    peer.script[Opcode.LEASE_QUERY] = advance

    async def scenario(face: Face) -> None:
        lease = await face.acquire(face.builder().lease_secs(60))
        session = await face.open(lease)
        # The sync is all that the lease's end bounds: a slow host has a minute for the rest.
        monkeypatch.setattr("gpulease.client.core.operations.EXPIRY_MARGIN_S", 0.1 - 60)
        with pytest.raises(client.LeaseExpired, match="sync: the lease expired"):
            await session.sync()
        await session.close()

    run(scenario)
    assert peer.ops().count("LEASE_QUERY") >= 2, "first it was renewed elsewhere"


def test_a_hung_daemon_is_not_asked_long_why_an_expired_lease_ended(run: Run, peer: ScriptedPeer) -> None:
    peer.on(Opcode.SYNC, HangUp())
    peer.on(Opcode.LEASE_QUERY, Silence())

    async def scenario(face: Face) -> None:
        lease = await face.acquire(face.builder().lease_secs(1))
        session = await face.open(lease)
        with pytest.raises(client.LeaseExpired, match=r"did not answer within [56] s"):
            await session.sync()

    run(scenario)
