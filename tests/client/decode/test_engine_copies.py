"""Blocks of keys and values, copied to the host and back: a sequence continues with the same bits in any region."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.client.decode.decode_errors import RequestRejected
from gpulease.client.decode.engine import engine as engine_module
from gpulease.client.decode.engine.engine import BlockPool, _runs
from gpulease.client.decode.row_records import PAGE
from gpulease.client.errors import RegionRevoked
from gpulease.client.transport.session_words import NO_WORD
from helpers.daemon import Daemon
from helpers.decode.engine_rig import GREEDY, EngineRig, RunningRig

POSITIONS = 2 * PAGE + 3
BLOCKS = [0, 1, 2]


async def fill(rig: EngineRig) -> None:
    """Compute POSITIONS positions in tenant 0's first blocks."""
    for begin in range(0, POSITIONS, 8):
        positions = range(begin, min(begin + 8, POSITIONS))
        rows = [rig.row(rig.seat(), GREEDY, position, 7 + position) for position in positions]
        await rig.compute(np.concatenate(rows))


async def next_bits(rig: EngineRig, pool: BlockPool) -> bytes:
    """Return the result of the position after those, with the blocks of any pool."""
    row = rig.row(rig.seat(), GREEDY, POSITIONS, 1)
    row["base"], row["blocks"] = pool.region.address, pool.blocks
    await rig.engine.start(row, [pool])
    return (await rig.engine.finish()).tobytes()


@pytest.mark.parametrize("copy_bytes", [1, 8 << 20], ids=["block by block", "in runs"])
def test_a_sequence_goes_on_with_its_bits_in_another_region(
    tiny: RunningRig, monkeypatch: pytest.MonkeyPatch, copy_bytes: int
) -> None:
    monkeypatch.setattr(engine_module, "COPY_BYTES", copy_bytes)

    async def part(rig: EngineRig) -> None:
        engine = rig.engine
        await fill(rig)
        expected = await next_bits(rig, rig.pools[0])
        pool = await engine.open_pool(rig.pools[0].blocks, tenant="c")
        try:
            assert await next_bits(rig, pool) != expected
            await engine.load_pool(pool, BLOCKS, await engine.save_pool(rig.pools[0], BLOCKS))
            assert await next_bits(rig, pool) == expected
        finally:
            await engine.close_pool(pool)

    tiny.run(part)


def test_another_region_s_end_in_the_midst_changes_neither_the_copy_nor_what_the_step_hears(
    tiny: RunningRig, shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def part(rig: EngineRig) -> None:
        engine = rig.engine
        # The region's word changes right after the client has read it: the worker refuses the step.
        attachment = engine.session._session.attachment
        monkeypatch.setattr(attachment, "words", None)
        monkeypatch.setattr(attachment, "regions_epoch", NO_WORD)
        await fill(rig)
        expected = await next_bits(rig, rig.pools[0])
        gone, pool = await engine.open_pool(2, tenant="d"), await engine.open_pool(rig.pools[0].blocks, tenant="c")
        try:
            kept = await engine.save_pool(rig.pools[0], BLOCKS)
            row = rig.row(rig.seat(tenant=1, table=1), GREEDY, 0, 7)
            shared_daemon.revoke(gone.region.lease_id)
            await engine.start(row, [rig.pools[1], gone])
            await engine.load_pool(pool, BLOCKS, kept)
            with pytest.raises(RegionRevoked) as refused:
                await engine.finish()
            assert refused.value.lease_id == gone.region.lease_id
            assert await next_bits(rig, pool) == expected
        finally:
            await engine.close_pool(pool)
            await engine.close_pool(gone)

    tiny.run(part)


def test_steps_of_other_pools_go_on_beside_a_copy(tiny: RunningRig) -> None:
    async def part(rig: EngineRig) -> None:
        await fill(rig)
        row = rig.row(rig.seat(tenant=1, table=1), GREEDY, 0, 7)
        expected = (await rig.compute(row, (1,))).tobytes()
        kept = await rig.engine.save_pool(rig.pools[0], BLOCKS)
        copies = asyncio.gather(*(rig.engine.save_pool(rig.pools[0], BLOCKS) for _ in range(5)))
        found = [(await rig.compute(row, (1,))).tobytes() for _ in range(3)]
        assert all(np.array_equal(copy, kept) for copy in await copies)
        assert found == [expected] * 3

    tiny.run(part)


def test_a_pool_that_was_revoked_can_t_be_saved(tiny: RunningRig, shared_daemon: Daemon) -> None:
    async def part(rig: EngineRig) -> None:
        pool = await rig.engine.open_pool(2, tenant="c")
        shared_daemon.revoke(pool.region.lease_id)
        with pytest.raises(RegionRevoked):
            await rig.engine.save_pool(pool, [0])
        await rig.engine.close_pool(pool)

    tiny.run(part)


def test_blocks_that_a_pool_has_not_and_arrays_of_another_shape_are_refused(tiny: RunningRig) -> None:
    async def part(rig: EngineRig) -> None:
        pool = rig.pools[0]
        with pytest.raises(RequestRejected, match="not one of the pool's"):
            await rig.engine.save_pool(pool, [0, pool.blocks])
        kept = await rig.engine.save_pool(pool, [0])
        with pytest.raises(RequestRejected, match="must be uint8"):
            await rig.engine.load_pool(pool, [0, 1], kept)

    tiny.run(part)


@given(st.lists(st.integers(0, 30), unique=True), st.integers(1, 5))
def test_runs_are_all_blocks_in_their_order(blocks: list[int], most: int) -> None:
    found = [blocks[first:last] for first, last in _runs(blocks, most)]
    assert [block for run in found for block in run] == blocks
    for run in found:
        assert run == list(range(run[0], run[0] + len(run)))
        assert len(run) <= most
