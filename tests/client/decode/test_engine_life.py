"""The end of an engine, and a failed start: neither leaves anything on the lease."""

import asyncio
from dataclasses import replace

import pytest

from gpulease.client.aio import GpuBuilder, GpuSession
from gpulease.client.decode.checkpoint import RandomCheckpoint
from gpulease.client.decode.decode_errors import NoModelLoaded, RequestRejected
from gpulease.client.decode.engine.engine import DecodeEngine
from gpulease.client.decode.engine.forward_pass import StepLimits
from gpulease.client.errors import AllocFailed, InvalidRequest
from helpers.daemon import Daemon
from helpers.decode.engine_rig import GREEDY, opened
from helpers.decode.random_models import TINY
from helpers.processes import open_files

MIB = 1 << 20
LIMITS = StepLimits(max_rows=2, tables=2, positions=64)


def test_a_closed_engine_refuses_all_and_its_lease_goes_on(daemon: Daemon) -> None:
    async def part() -> None:
        async with opened(daemon.address, RandomCheckpoint(TINY, 1), LIMITS) as rig:
            engine = rig.engine
            await engine.start(rig.row(rig.seat(), GREEDY, 0, 7), [rig.pools[0]])
            await engine.close()
            await engine.close()
            assert engine.steps_under_way == 0
            with pytest.raises(NoModelLoaded):
                await engine.start(rig.row(rig.seat(), GREEDY, 0, 7), [rig.pools[0]])
            with pytest.raises(RequestRejected):
                await engine.finish()
            with pytest.raises(NoModelLoaded):
                await engine.logits(1)
            with pytest.raises(NoModelLoaded):
                await engine.open_pool(1)
            async with GpuSession(rig.lease) as session:
                await session.mem_alloc(MIB)

    asyncio.run(part())


def arenas() -> set[int]:
    """Return this process's descriptors of memory that it shares with workers."""
    return {fd for fd, path in open_files().items() if "gpulease-arena" in path}


def test_a_closed_engine_that_is_still_held_shares_no_memory(daemon: Daemon) -> None:
    async def part() -> None:
        before = arenas()
        async with opened(daemon.address, RandomCheckpoint(TINY, 1), LIMITS) as rig:
            assert arenas() > before
            await rig.engine.close()
            assert arenas() == before

    asyncio.run(part())


@pytest.mark.parametrize("size_bytes", [MIB // 2, 3 * MIB // 2], ids=["weights", "buffers"])
def test_an_engine_that_its_lease_has_no_room_for_leaves_nothing(daemon: Daemon, size_bytes: int) -> None:
    async def part() -> None:
        builder = GpuBuilder(daemon.address).min_vram(size_bytes).lease_secs(60)
        async with builder.acquire() as lease:
            with pytest.raises(AllocFailed):
                await DecodeEngine.open(lease, RandomCheckpoint(TINY, 1), LIMITS)
            async with GpuSession(lease) as session:
                await session.mem_alloc(size_bytes - MIB // 4)

    asyncio.run(part())


def test_an_engine_of_more_positions_than_the_model_s_context_is_refused(daemon: Daemon) -> None:
    async def part() -> None:
        limits = replace(LIMITS, positions=TINY.context + 1)
        async with GpuBuilder(daemon.address).min_vram(MIB).lease_secs(60).acquire() as lease:
            with pytest.raises(InvalidRequest, match="positions is 257; the model's own context has 256"):
                await DecodeEngine.open(lease, RandomCheckpoint(TINY, 1), limits)

    asyncio.run(part())
