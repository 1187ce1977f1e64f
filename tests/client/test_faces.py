"""What a session does when the daemon behaves, on both APIs."""

import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpulease import client
from gpulease.client import (
    GpuExclusivityClass,
    GpuSession,
    InvalidHandle,
    InvalidRequest,
    KernelArgs,
    LaunchFailed,
    LeaseFreed,
    aio,
)
from gpulease.client.core.attachment import QUIET_WRITE_BYTES
from gpulease.protocol import Opcode, Status
from gpulease.protocol.limits import DATA_CHUNK_BYTES
from gpulease.protocol.messages import LeaseAlloc, MemRead, MemWrite
from helpers.client_faces import Face, Scenario
from helpers.scripted_peer import CARD, LEASE_ID, ScriptedPeer
from helpers.waiting import wait_until

Run = Callable[[Scenario], None]
CHUNK = DATA_CHUNK_BYTES


async def lease_and_view(face: Face) -> None:
    wish = face.builder().lease_secs(12.5).exclusivity(GpuExclusivityClass.SESSION_EXCLUSIVE).device(0).timeout(1.5)
    asked_s = time.monotonic()
    lease = await face.acquire(wish)
    asked = face.peer.heard[-1].body
    assert isinstance(asked, LeaseAlloc)
    assert (asked.ttl_ms, asked.wait_ms, asked.device) == (12_500, 1_500, "0")
    assert asked.parameters[0].tag == 0x0903
    assert lease.lease_id == LEASE_ID
    assert lease.lease_id_text == f"{LEASE_ID:032x}"
    assert lease.exclusivity is GpuExclusivityClass.SESSION_EXCLUSIVE
    assert (lease.size_bytes, lease.card_uuid, lease.generation) == (1 << 20, CARD, 1)
    assert 12.5 >= lease.remaining_s >= 12.5 - (time.monotonic() - asked_s)
    await lease.renew(100)
    assert 100 >= lease.remaining_s >= 100 - (time.monotonic() - asked_s)
    assert lease.generation == 2
    assert (await lease.query())["state"] == "active"
    assert lease.is_alive
    await lease.free()
    assert not lease.is_alive
    assert lease.remaining_s == 0
    with pytest.raises(LeaseFreed):
        await lease.free()
    with pytest.raises(InvalidRequest, match="renew: the lease was freed"):
        await lease.renew(5)


async def session_and_view(face: Face) -> None:
    async with face.session() as session:
        assert session.session_id == LEASE_ID
        assert (session.driver, session.card_uuid, session.slice_bytes) == ("made-up", CARD, 1 << 30)
        # The peer is too old to tell of its card.
        assert (session.compute_capability, session.cuda_version) == (0, 0)
        assert session.is_alive
    assert not session.is_alive
    with pytest.raises(InvalidRequest, match="the session was closed"):
        await session.sync()
    await session.close()
    assert face.peer.ops()[-1] == "LEASE_FREE"


async def launches_are_quiet_and_in_order(face: Face) -> None:
    async with face.session() as session:
        module = await session.module_load("// ptx")
        buffer = await session.mem_alloc(64)
        args = KernelArgs().push_buffer(buffer).push_u32(16).push_f32(2.0)
        first = await session.launch(module, "scale", [1, 1, 1], [256, 1, 1], args)
        second = await session.launch(module, "scale", (1,), (256,), args.data, args.sizes)
        await session.launch(module, "nothing", [2], [1], KernelArgs())
        await session.sync()
        assert second > first
        heard = [request for request in face.peer.heard if request.op is Opcode.LAUNCH]
        assert [request.is_quiet for request in heard] == [True] * 3
        assert heard[0].body.args == args.data  # type: ignore[attr-defined]
        assert heard[0].body.arg_sizes == (8, 4, 4)  # type: ignore[attr-defined]
        assert heard[1].session_id == LEASE_ID
        assert heard[1].request_id == second
        assert face.peer.ops()[-1] == "SYNC"


async def many_launches_to_a_slow_reader(face: Face) -> None:
    """More than the socket holds: the client waits for room and loses nothing."""
    async with face.session() as session:
        module = await session.module_load(b"ptx")
        raw = bytes(4)
        for _ in range(3000):
            await session.launch(module, "small", [1], [1], raw, [4])
        await session.sync()
        assert face.peer.ops().count("LAUNCH") == 3000


async def what_is_handed_over_arrives_by_itself(face: Face) -> None:
    """The caller computes, and calls nothing of the session any more; nor does its event loop get a turn."""
    async with face.session() as session:
        module, buffer = await session.module_load(b"ptx"), await session.mem_alloc(8)
        for _ in range(3):
            await session.launch(module, "nothing", [1], [1], KernelArgs())
        await session.mem_write(buffer, 0, b"abcdefgh")
        handle = buffer.handle
        wait_until(lambda: face.peer.memory[handle] == b"abcdefgh", "the worker has it")
        await session.mem_free(buffer)
        wait_until(lambda: handle not in face.peer.memory, "the worker has freed it")
        assert face.peer.ops().count("LAUNCH") == 3


async def closing_sends_what_was_handed_over(face: Face) -> None:
    async with face.session() as session:
        module = await session.module_load(b"ptx")
        for _ in range(3):
            await session.launch(module, "nothing", [1], [1], KernelArgs())
    wait_until(lambda: face.peer.ops().count("LAUNCH") == 3, "the worker has it")


async def a_read_takes_what_was_written(face: Face) -> None:
    """Of every size around those that are sent and received in ways of their own, and around the ring's end."""
    async with face.session() as session:
        buffer = await session.mem_alloc(1 << 18)
        for round_ in range(12):
            for size in (1, 4096, 8191, 8192, 32 << 10, (32 << 10) + 1, 64 << 10, (64 << 10) + 1):
                data = bytes([round_ + 1, size & 255]) * (size // 2) + b"x" * (size % 2)
                await session.mem_write(buffer, 7, data)
                assert await session.mem_read(buffer, 7, size) == data
                into = bytearray(size + 1)
                await session.mem_read(buffer, 7, size, into=into)
                assert into == data + b"\0"


async def dropped_handles_are_freed_by_the_next_operation(face: Face) -> None:
    async with face.session() as session:
        buffer = await session.mem_alloc(16)
        module = await session.module_load(b"ptx")
        handles = {buffer.handle, module.handle}
        args = KernelArgs().push_buffer(buffer)
        del buffer
        await session.sync()
        assert "MEM_FREE" not in face.peer.ops(), "the arguments still hold it"
        del args, module
        await session.sync()
        freed = [request for request in face.peer.heard if request.op in (Opcode.MEM_FREE, Opcode.MODULE_UNLOAD)]
        assert {request.body.handle for request in freed} == handles  # type: ignore[attr-defined]
        assert all(request.is_quiet for request in freed)
        await session.sync()
        assert face.peer.ops().count("MEM_FREE") == 1


async def dropped_handles_are_freed_by_a_launch(face: Face) -> None:
    async with face.session() as session:
        module = await session.module_load(b"ptx")
        await session.mem_alloc(16)
        await session.launch(module, "nothing", [1], [1], KernelArgs())
        await session.sync()
        assert face.peer.ops()[-3:] == ["LAUNCH", "MEM_FREE", "SYNC"]


async def frees_skipped_behind_a_failure_are_sent_again(face: Face) -> None:
    async with face.session() as session:
        module = await session.module_load(b"ptx")
        buffer = await session.mem_alloc(16)
        face.peer.fail(Opcode.LAUNCH, Status.LAUNCH_FAILED)
        await session.launch(module, "nothing", [1], [1], KernelArgs())
        del buffer
        with pytest.raises(LaunchFailed):
            await session.sync()
        assert len(face.peer.memory) == 1
        await session.sync()
        assert not face.peer.memory


async def explicit_frees(face: Face) -> None:
    async with face.session() as session:
        buffer, module = await session.mem_alloc(16), await session.module_load(b"ptx")
        assert buffer.is_alive
        await session.mem_free(buffer)
        await session.module_unload(module)
        assert not buffer.is_alive
        for operation in (
            session.mem_free(buffer),
            session.mem_write(buffer, 0, b"x"),
            session.mem_read(buffer, 0, 1),
            session.module_unload(module),
        ):
            with pytest.raises(InvalidHandle, match="is freed"):
                await operation
        with pytest.raises(InvalidHandle, match=r"argument 0: buffer .* is freed"):
            KernelArgs().push_buffer(buffer)
        with pytest.raises(LaunchFailed, match="the module is unloaded"):
            await session.launch(module, "nothing", [1], [1], KernelArgs())


async def foreign_handles(face: Face) -> None:
    async with face.session() as one, face.session() as other:
        buffer, module = await one.mem_alloc(16), await one.module_load(b"ptx")
        with pytest.raises(InvalidHandle, match="belongs to another session"):
            await other.mem_read(buffer, 0, 1)
        with pytest.raises(LaunchFailed, match="belongs to another session"):
            await other.launch(module, "nothing", [1], [1], KernelArgs())
        mine = await other.module_load(b"ptx")
        args = KernelArgs().push_buffer(buffer).push_u32(1).push_u32(1)
        with pytest.raises(InvalidHandle, match="belongs to another session"):
            await other.launch(mine, "scale", [1], [1], args)
        with pytest.raises(InvalidHandle, match="must be a Buffer, not"):
            await one.mem_free(module)


async def ranges_are_checked_here(face: Face) -> None:
    async with face.session() as session:
        buffer = await session.mem_alloc(16)
        for offset, nbytes in ((0, 17), (16, 1), (-1, 1), (1 << 70, 1)):
            with pytest.raises(InvalidHandle, match="outside buffer"):
                await session.mem_read(buffer, offset, nbytes)
            with pytest.raises(InvalidHandle, match="outside buffer"):
                await session.mem_write(buffer, offset, bytes(nbytes))
        for size in (0, -1, 1.5, "4", 1 << 64):
            with pytest.raises(InvalidRequest, match="mem_alloc"):
                await session.mem_alloc(size)
        with pytest.raises(InvalidRequest, match="must be numbers of bytes, not"):
            await session.mem_read(buffer, 0, -1)
        with pytest.raises(InvalidRequest, match="a buffer of bytes"):
            await session.mem_write(buffer, 0, 5)
        # No memory has room for a copy of these.
        for huge in (np.broadcast_to(np.uint8(1), 1 << 50), np.broadcast_to(np.datetime64("now"), 1 << 47)):
            with pytest.raises(InvalidHandle, match="outside buffer"):
                await session.mem_write(buffer, 0, huge)
        with pytest.raises(InvalidRequest, match="read-only"):
            await session.mem_read(buffer, 0, 4, into=b"1234")
        with pytest.raises(InvalidRequest, match="must have 4 bytes, not 3"):
            await session.mem_read(buffer, 0, 4, into=bytearray(3))
        for into in (np.zeros(8, np.uint8)[::2], np.zeros((2, 4), np.uint8, order="F")):
            with pytest.raises(InvalidRequest, match="must be C-contiguous"):
                await session.mem_read(buffer, 0, 4, into=into)
        with pytest.raises(InvalidRequest, match=r"must have 1 to .* bytes, not 0"):
            await session.module_load(b"")
        assert face.peer.ops()[-1] == "MEM_ALLOC", "nothing of this was sent"


async def any_buffer_can_be_copied(face: Face) -> None:
    async with face.session() as session:
        buffer = await session.mem_alloc(64)
        grid = np.arange(16, dtype=np.float32).reshape(4, 4)
        record = np.zeros(4, dtype=[("a", ">i4"), ("b", "f4")])
        record["b"] = 3
        cases: list[tuple[Any, bytes]] = [
            (b"abcd", b"abcd"),
            (bytearray(b"efgh"), b"efgh"),
            (memoryview(b"--ijkl--")[2:6], b"ijkl"),
            (array("d", [1.5, 2.5]), array("d", [1.5, 2.5]).tobytes()),
            (grid, grid.tobytes()),
            (grid.T, grid.T.tobytes()),
            (grid[:, 1], grid[:, 1].tobytes()),
            (record, record.tobytes()),
            (np.zeros((0, 4)), b""),
        ]
        for data, expected in cases:
            await session.mem_write(buffer, 0, data)
            assert await session.mem_read(buffer, 0, len(expected)) == expected
        into = np.empty((4, 4), np.float32)
        await session.mem_write(buffer, 0, grid)
        assert await session.mem_read(buffer, 0, 64, into=into) is into
        assert (into == grid).all()
        longer = bytearray(b"\xff" * 10)
        await session.mem_read(buffer, 4, 4, into=longer)
        assert longer == grid.tobytes()[4:8] + b"\xff" * 6


SCENARIOS: list[Scenario] = [
    lease_and_view,
    session_and_view,
    launches_are_quiet_and_in_order,
    many_launches_to_a_slow_reader,
    dropped_handles_are_freed_by_the_next_operation,
    dropped_handles_are_freed_by_a_launch,
    frees_skipped_behind_a_failure_are_sent_again,
    explicit_frees,
    foreign_handles,
    ranges_are_checked_here,
    any_buffer_can_be_copied,
    what_is_handed_over_arrives_by_itself,
    a_read_takes_what_was_written,
    closing_sends_what_was_handed_over,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: str(scenario.__name__))
def test_scenario(run_over_both: Run, scenario: Scenario) -> None:
    run_over_both(scenario)


@pytest.mark.parametrize(
    "size",
    [1, 43, 44, 45, QUIET_WRITE_BYTES, QUIET_WRITE_BYTES + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 6 * CHUNK + 3],
)
def test_copies_around_the_chunk_limit(run_over_both: Run, peer: ScriptedPeer, size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()

    async def copy(face: Face) -> None:
        async with face.session() as session:
            buffer = await session.mem_alloc(size + 5)
            await session.mem_write(buffer, 5, data)
            assert await session.mem_read(buffer, 5, size) == data
            assert bytes(await session.mem_read(buffer, 5, size, into=bytearray(size))) == data

    run_over_both(copy)
    writes = [request for request in peer.heard if request.op is Opcode.MEM_WRITE]
    assert len(writes) == -(-size // CHUNK)
    waits_for_last = size > QUIET_WRITE_BYTES
    assert [request.is_quiet for request in writes] == [True] * (len(writes) - waits_for_last) + [
        False
    ] * waits_for_last
    for request in peer.heard:
        if isinstance(request.body, MemWrite):
            assert len(request.body.data) <= CHUNK
        elif isinstance(request.body, MemRead):
            assert request.body.length <= CHUNK


def test_chunks_fit_what_the_daemon_takes(run: Run, peer: ScriptedPeer) -> None:
    peer.max_payload_bytes = 1020

    async def copy(face: Face) -> None:
        async with face.session() as session:
            buffer = await session.mem_alloc(10_000)
            data = bytes(range(250)) * 40
            await session.mem_write(buffer, 0, data)
            assert await session.mem_read(buffer, 0, 10_000) == data
            with pytest.raises(InvalidRequest, match="must have 1 to 1016 bytes, not 1017"):
                await session.module_load(bytes(1017))

    run(copy)
    assert max(len(request.body.data) for request in peer.heard if isinstance(request.body, MemWrite)) == 1000


def test_the_guides_name_each_method_of_both_faces() -> None:
    guides = "".join(path.read_text(encoding="utf-8") for path in (Path(__file__).parents[2] / "client").rglob("*.md"))
    # What both APIs have of their own: the session, its objects, the lease and its builder.
    kinds = [kind for name in aio.__all__ if isinstance(kind := getattr(client, name), type)]
    kinds = [kind for kind in kinds if kind.__module__.startswith("gpulease.client.sync")]
    assert GpuSession in kinds
    methods = {name for kind in kinds for name, value in vars(kind).items() if callable(value) and name[0] != "_"}
    assert [name for name in sorted(methods) if f"{name}(" not in guides and f"`{name}`" not in guides] == []
