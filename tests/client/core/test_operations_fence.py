"""Leaving a session's or a stream's `with` block tells what failed in it, on both APIs."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gpulease import client
from gpulease.client import InvalidHandle, InvalidRequest, KernelArgs, LaunchFailed, LeaseExpired, SyncFailed, TimedOut
from gpulease.client.core import operations
from gpulease.protocol import Failure, Opcode, Status
from helpers.client_faces import Awaited, Face, Scenario
from helpers.scripted_peer import GRANULE, Refusal, SayGoodbye, ScriptedPeer, Silence

Run = Callable[[Scenario], None]
Block = Callable[[Any], Awaitable[None]]

FAULT = Failure(Status.SYNC_FAILED, "illegal address", failed_request_id=5, failed_op=Opcode.LAUNCH, kernel="nothing")


async def in_block(thing: Any, block: Block) -> None:
    """Run something in the `with` block of a session or a stream of either face."""
    real = getattr(thing, "target", thing)
    if hasattr(real, "__aenter__"):
        async with real:
            await block(real)
    else:
        with real:
            await block(Awaited(real))


async def in_session(face: Face, block: Block) -> None:
    await in_block(await face.open(await face.acquire()), block)


async def launch(session: Any) -> None:
    module = await session.module_load(b"ptx")
    await session.launch(module, "nothing", [1], [1], KernelArgs())


def test_a_launch_that_failed_last_is_raised(run_over_both: Run, peer: ScriptedPeer) -> None:
    peer.fail(Opcode.LAUNCH, Status.LAUNCH_FAILED, "no such kernel")

    async def scenario(face: Face) -> None:
        with pytest.raises(LaunchFailed, match="earlier launch 4 of kernel 'nothing' failed: no such kernel"):
            await in_session(face, launch)

    run_over_both(scenario)


def test_a_write_that_ended_the_connection_is_raised(run_over_both: Run, peer: ScriptedPeer) -> None:
    peer.on(Opcode.SYNC, SayGoodbye(Failure(Status.DENIED, "the token permits MEM_READ only")))

    async def write(session: Any) -> None:
        await session.mem_write(await session.mem_alloc(4), 0, b"four")

    async def scenario(face: Face) -> None:
        with pytest.raises(client.Denied, match="permits MEM_READ only"):
            await in_session(face, write)

    run_over_both(scenario)


async def waits_itself(session: Any) -> None:
    await launch(session)
    await session.sync()
    await session.mem_alloc(4)


async def reads_last(session: Any) -> None:
    buffer = await session.mem_alloc(4)
    await launch(session)
    await session.mem_read(buffer, 0, 4)


async def sends_nothing_quietly(session: Any) -> None:
    buffer = await session.mem_alloc(1 << 20)
    await session.mem_write(buffer, 0, bytes(1 << 20))
    await session.module_load(b"ptx")


@pytest.mark.parametrize("block", [waits_itself, reads_last, sends_nothing_quietly])
def test_nothing_is_asked_when_all_was_answered(run_over_both: Run, peer: ScriptedPeer, block: Block) -> None:
    async def scenario(face: Face) -> None:
        async def leaves(session: Any) -> None:
            await block(session)
            peer.heard.clear()

        await in_session(face, leaves)

    run_over_both(scenario)
    assert "SYNC" not in peer.ops()


def test_a_launch_costs_one_sync_and_a_read_does_not_answer_for_another_stream(run: Run, peer: ScriptedPeer) -> None:
    async def launches_in_a_stream(session: Any) -> None:
        await session.stream()
        await reads_last(session)

    async def scenario(face: Face) -> None:
        for block in (launch, launches_in_a_stream):
            peer.heard.clear()
            await in_session(face, block)
            assert peer.ops().count("SYNC") == 1

    run(scenario)


def test_a_block_left_by_an_exception_raises_that_and_waits_for_nothing(run: Run, peer: ScriptedPeer) -> None:
    peer.on(Opcode.SYNC, Silence())
    peer.on(Opcode.STREAM_SYNC, Silence())

    async def breaks(session: Any) -> None:
        await launch(session)
        await in_block(await session.stream(), breaks_off)

    async def breaks_off(_: Any) -> None:
        raise KeyError("mine")

    async def scenario(face: Face) -> None:
        with pytest.raises(KeyError, match="mine"):
            await in_session(face, breaks)

    run(scenario)
    assert not {"SYNC", "STREAM_SYNC"} & set(peer.ops())


def test_what_was_raised_already_is_not_raised_again(run: Run, peer: ScriptedPeer) -> None:
    def lost(_: Any) -> Any:
        raise Refusal(FAULT)

    peer.script[Opcode.SYNC] = lost

    async def handles(session: Any) -> None:
        await launch(session)
        with pytest.raises(SyncFailed):
            await session.sync()

    async def scenario(face: Face) -> None:
        await in_session(face, handles)
        with pytest.raises(SyncFailed, match="illegal address"):
            await in_session(face, launch)

    run(scenario)


@pytest.mark.parametrize(
    ("report", "error"), [({"cause": "expired"}, LeaseExpired), ({"remaining_ms": 60_000}, TimedOut)]
)
def test_a_kernel_without_end_is_waited_for_no_longer_than_the_lease_had_left(
    run: Run, peer: ScriptedPeer, monkeypatch: pytest.MonkeyPatch, report: dict[str, Any], error: type[Exception]
) -> None:
    peer.ttl_ms = 60_000
    peer.on(Opcode.SYNC, Silence())
    peer.report.update(report)

    async def launch_at_the_end(session: Any) -> None:
        await launch(session)
        # A slow host has had a minute until here.
        monkeypatch.setattr(operations, "EXPIRY_MARGIN_S", 0.1 - 60)

    async def scenario(face: Face) -> None:
        with pytest.raises(error):
            await in_session(face, launch_at_the_end)
        monkeypatch.undo()

    run(scenario)


def test_a_lease_that_was_freed_in_the_block_is_left_silently(run: Run, peer: ScriptedPeer) -> None:
    async def scenario(face: Face) -> None:
        lease = await face.acquire()

        async def frees(session: Any) -> None:
            await launch(session)
            await lease.free()

        await in_block(await face.open(lease), frees)

    run(scenario)
    assert "SYNC" not in peer.ops()


def test_a_stream_s_block_raises_what_failed_in_it(run: Run, peer: ScriptedPeer) -> None:
    peer.fail(Opcode.LAUNCH, Status.LAUNCH_FAILED, "no such kernel")

    async def scenario(face: Face) -> None:
        async with face.session() as session:
            module = await session.module_load(b"ptx")
            stream = await session.stream()

            async def launches(_: Any) -> None:
                real = getattr(stream, "target", stream)
                await session.launch(module, "nothing", [1], [1], KernelArgs(), stream=real)

            with pytest.raises(LaunchFailed, match="earlier launch"):
                await in_block(stream, launches)
            peer.heard.clear()
            await session.sync()
            assert peer.ops() == ["STREAM_DESTROY", "SYNC"], "it is let go of, and was waited for in its block"

    run(scenario)


@pytest.mark.parametrize(
    ("what", "op"),
    [
        ("used", "LEASE_QUERY"),
        ("grow", "LEASE_RESIZE"),
        ("region", "REGION_OPEN"),
        ("park", "LEASE_PARK"),
        ("move", "LEASE_MOVE"),
    ],
)
def test_a_request_about_the_lease_does_not_overtake_what_its_session_has_sent(
    run_over_both: Run, peer: ScriptedPeer, what: str, op: str
) -> None:
    """The worker has answered for the quiet write before the broker gets the request; a second one costs nothing."""

    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        session = await face.open(lease)
        buffer = await session.mem_alloc(4)
        await session.mem_write(buffer, 0, b"full")
        for expected in (["MEM_WRITE", "PING", op], [op]):
            await getattr(lease, what)(*({"used": [], "park": [], "move": ["1"]}.get(what, [GRANULE])))
            assert peer.ops()[-len(expected) :] == expected
        assert peer.ops().count("PING") == 1
        await session.close()
        await lease.free()

    peer.report |= {"allocated_bytes": 0, "most_allocated_bytes": 0}
    run_over_both(scenario)


def test_a_moved_lease_is_on_its_new_card(run_over_both: Run) -> None:
    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        assert await lease.move(3) == 0
        assert lease.card_uuid == "GPU-3"
        for card in (-1, "x" * 5000):
            with pytest.raises(InvalidRequest, match="move: device"):
                await lease.move(card)
        await lease.free()

    run_over_both(scenario)


def test_a_failure_that_such_a_wait_finds_is_the_next_operations(run_over_both: Run, peer: ScriptedPeer) -> None:
    peer.fail(Opcode.MEM_WRITE, Status.INVALID_HANDLE)

    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        session = await face.open(lease)
        buffer = await session.mem_alloc(4)
        await session.mem_write(buffer, 0, b"full")
        await lease.park()
        with pytest.raises(InvalidHandle):
            await session.sync()
        await session.sync()
        await session.close()
        await lease.free()

    run_over_both(scenario)
