"""The engine's steps: when they are refused, what they do not change, and what they accept."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from gpulease.client.decode.decode_errors import RequestRejected
from gpulease.client.decode.engine import engine as engine_module
from gpulease.client.decode.engine.engine import BlockPool, DecodeEngine
from gpulease.client.decode.row_records import Rows
from gpulease.client.errors import (
    CapacityExceeded,
    RegionCancelled,
    RegionExpired,
    RegionFailed,
    RegionFenced,
    RegionFreed,
    RegionRevoked,
)
from helpers.daemon import Daemon
from helpers.decode.engine_rig import GREEDY, EngineRig, RunningRig
from helpers.waiting import wait_until

BEYOND_ALL = 1 << 20
"""A number of blocks for which no lease of these tests has room."""

STEPS = 50
Scene = Callable[[EngineRig, BlockPool], Awaitable[None]]


def row(rig: EngineRig, position: int = 0, pool: BlockPool | None = None, tenant: int = 0) -> Rows:
    """Return a row of the first blocks of a tenant, or of another pool."""
    found = rig.row(rig.seat(tenant=tenant, table=tenant), GREEDY, position, 7 + position)
    if pool is not None:
        found["base"], found["blocks"], found["table"] = pool.region.address, pool.blocks, 5
    return found


def in_a_pool(tiny: RunningRig, scene: Scene, ttl_secs: float | None = None) -> None:
    """Play a scene with a separate third pool."""

    async def part(rig: EngineRig) -> None:
        pool = await rig.engine.open_pool(2, tenant="c", ttl_secs=ttl_secs)
        try:
            await scene(rig, pool)
            assert rig.engine.steps_under_way == 0
        finally:
            await rig.engine.close_pool(pool)

    tiny.run(part)


async def revoke(daemon: Daemon, pool: BlockPool) -> None:
    daemon.revoke(pool.region.lease_id)


async def revoke_as_the_lease_s_tenant(_: Daemon, pool: BlockPool) -> None:
    await pool.region.revoke("because")


async def free(_: Daemon, pool: BlockPool) -> None:
    await pool.region.free()


async def cancel(_: Daemon, pool: BlockPool) -> None:
    await pool.region.cancel()


async def expire(daemon: Daemon, pool: BlockPool) -> None:
    wait_until(lambda: daemon.query(pool.region.lease_id)["state"] != "active", "the region has expired")


ENDS = [
    (revoke, RegionRevoked, None),
    (revoke_as_the_lease_s_tenant, RegionRevoked, None),
    (free, RegionFreed, None),
    (cancel, RegionCancelled, None),
    (expire, RegionExpired, 0.3),
]


@dataclass
class Outcome:
    """What became of steps that were started one after the other."""

    results: list[bytes] = field(default_factory=list)
    errors: list[RegionFailed] = field(default_factory=list)


async def compute_all(engine: DecodeEngine, steps: list[tuple[Rows, list[BlockPool]]]) -> Outcome:
    """Start steps one after the other, up to one that is refused, and finish them."""
    found = Outcome()
    for rows, pools in steps:
        try:
            await engine.start(rows, pools)
        except RegionFailed as error:
            found.errors.append(error)
            break
    while engine.steps_under_way:
        try:
            found.results.append((await engine.finish()).tobytes())
        except RegionFailed as error:
            found.errors.append(error)
    return found


async def refused(rig: EngineRig, rows: Rows, pools: list[BlockPool]) -> RegionFailed:
    """Return the error of a step that does not begin, whether `start` or `finish` raises it."""
    found = await compute_all(rig.engine, [(rows, pools)])
    assert found.results == []
    return found.errors[0]


@pytest.mark.parametrize(("end", "kind", "ttl_s"), ENDS, ids=[end.__name__ for end, _, _ in ENDS])
def test_a_step_that_names_an_ended_region_does_not_begin(
    tiny: RunningRig,
    shared_daemon: Daemon,
    end: Callable[[Daemon, BlockPool], Awaitable[None]],
    kind: type[RegionFailed],
    ttl_s: float | None,
) -> None:
    async def scene(rig: EngineRig, pool: BlockPool) -> None:
        expected = await rig.compute(row(rig))
        before = await rig.memory(0)
        await end(shared_daemon, pool)
        number = rig.engine._next
        error = await refused(rig, np.concatenate([row(rig, 1), row(rig, 0, pool)]), [rig.pools[0], pool])
        assert isinstance(error, kind)
        assert error.lease_id == pool.region.lease_id
        assert error.position == number
        assert await rig.memory(0) == before
        assert (await rig.compute(row(rig))).tobytes() == expected.tobytes()

    in_a_pool(tiny, scene, ttl_s)


def test_steps_that_name_a_revoked_region_again_are_fenced_for_ever(tiny: RunningRig, shared_daemon: Daemon) -> None:
    """The tenant's next region does not permit steps that name its former one either."""

    async def scene(rig: EngineRig, pool: BlockPool) -> None:
        stale = np.concatenate([row(rig, 1), row(rig, 0, pool)]), [rig.pools[0], pool]
        before = await rig.memory(0)
        await revoke(shared_daemon, pool)
        assert isinstance(await refused(rig, *stale), RegionRevoked)
        fresh = await rig.engine.open_pool(2, tenant="c")
        await rig.engine.start(row(rig, 0, fresh), [fresh])
        await rig.engine.finish()
        for _ in range(3):
            error = await refused(rig, *stale)
            assert isinstance(error, RegionFenced)
            assert error.lease_id == pool.region.lease_id
        with pytest.raises(RegionFenced):
            await rig.engine.save_pool(pool, [0])
        assert await rig.memory(0) == before
        await rig.engine.close_pool(fresh)

    in_a_pool(tiny, scene)


async def clear(rig: EngineRig, tenant: int) -> None:
    region = rig.pools[tenant].region
    await rig.engine.session.mem_write(region, 0, bytes(region.size_bytes))
    await rig.engine.session.sync()


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
@pytest.mark.parametrize("is_new", [True, False], ids=["new sets", "known sets"])
def test_of_two_steps_the_one_that_names_an_ended_region_does_not_begin(
    tiny: RunningRig, shared_daemon: Daemon, is_first: bool, is_new: bool
) -> None:
    """A step before it succeeds. One behind it, which names only valid regions, does not begin either.

    A new set of regions is requested between the two, and that request may be the first to receive the refusal.
    """

    async def scene(rig: EngineRig, pool: BlockPool) -> None:
        engine = rig.engine
        bad = np.concatenate([row(rig, 1), row(rig, 0, pool)]), [rig.pools[0], pool]
        good = row(rig, 2, tenant=1), [rig.pools[1]]
        await clear(rig, 1)
        expected = (await rig.compute(good[0], (1,))).tobytes()
        await engine.start(*bad)
        await engine.finish()
        if is_new:
            engine._sets.clear()
        await clear(rig, 1)
        before = [await rig.memory(tenant) for tenant in (0, 1)]
        await revoke(shared_daemon, pool)
        number = engine._next if is_first else engine._next + 1
        found = await compute_all(engine, [bad, good] if is_first else [good, bad])
        assert found.results == ([] if is_first else [expected])
        assert found.errors
        for error in found.errors:
            assert isinstance(error, RegionRevoked)
            assert (error.lease_id, error.position) == (pool.region.lease_id, number)
        assert await rig.memory(0) == before[0]
        assert (await rig.memory(1) == before[1]) == is_first
        assert (await rig.compute(good[0], (1,))).tobytes() == expected

    in_a_pool(tiny, scene)


def test_a_cancelled_region_does_not_change_and_takes_the_step_later(tiny: RunningRig) -> None:
    async def scene(rig: EngineRig, pool: BlockPool) -> None:
        engine = rig.engine
        step = np.concatenate([row(rig, 0, pool), row(rig, 1, pool), row(rig)]), [rig.pools[0], pool]
        await engine.start(*step)
        expected = (await engine.finish()).tobytes()
        await engine.session.mem_write(pool.region, 0, bytes(pool.region.size_bytes))
        await engine.session.sync()
        await pool.region.cancel()
        assert isinstance(await refused(rig, *step), RegionCancelled)
        await pool.region.resume()
        assert not any(await engine.session.mem_read(pool.region, 0, pool.region.size_bytes))
        await engine.start(*step)
        assert (await engine.finish()).tobytes() == expected

    in_a_pool(tiny, scene)


# --- What a caller may not do. ---


def test_a_step_of_no_rows_or_too_many_is_refused(tiny: RunningRig) -> None:
    async def part(rig: EngineRig) -> None:
        for rows in (row(rig)[:0], np.concatenate([row(rig)] * (rig.engine.limits.max_rows + 1))):
            with pytest.raises(RequestRejected, match="1 to 16 rows"):
                await rig.engine.start(rows, [rig.pools[0]])
        assert rig.engine.steps_under_way == 0

    tiny.run(part)


def test_a_third_step_is_refused_and_the_two_under_way_are_good(tiny: RunningRig) -> None:
    async def part(rig: EngineRig) -> None:
        expected = await rig.compute(row(rig))
        for _ in range(2):
            await rig.engine.start(row(rig), [rig.pools[0]])
        with pytest.raises(RequestRejected, match="2 steps are already in progress"):
            await rig.engine.start(row(rig), [rig.pools[0]])
        assert [(await rig.engine.finish()).tobytes() for _ in range(2)] == [expected.tobytes()] * 2
        with pytest.raises(RequestRejected, match="No step"):
            await rig.engine.finish()

    tiny.run(part)


def test_a_pool_that_the_lease_has_no_room_for_is_refused(tiny: RunningRig) -> None:
    async def part(rig: EngineRig) -> None:
        with pytest.raises(CapacityExceeded):
            await rig.engine.open_pool(BEYOND_ALL)
        await rig.compute(row(rig))

    tiny.run(part)


# --- What it accepts. ---


def test_steps_allocate_nothing(tiny: RunningRig) -> None:
    """After their first steps, both tenants' compositions are in the session; later steps add nothing to it."""

    async def part(rig: EngineRig) -> None:
        both = [row(rig), row(rig, 0, tenant=1)]

        async def steps(count: int) -> int:
            for number in range(count):
                rows = np.concatenate([both[index % 2] for index in range(1 + number % 16)])
                await rig.engine.start(rows, rig.pools)
                if rig.engine.steps_under_way == 2:
                    await rig.engine.finish()
            await rig.engine.finish()
            return (await rig.lease.query())["allocated_bytes"]

        before = await steps(2)
        assert before > 0
        assert await steps(STEPS) == before

    tiny.run(part)


def test_region_sets_are_few_however_many_compositions_there_are(
    tiny: RunningRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "MAX_REGION_SETS", 2)

    async def part(rig: EngineRig) -> None:
        rig.engine._sets.clear()
        expected = (await rig.compute(row(rig))).tobytes()
        for tenants in [(0, 1), (0,), (1,)] * 3:
            found = await rig.compute(row(rig, tenant=tenants[0]), tenants)
            assert len(rig.engine._sets) <= 2
            assert found.tobytes() == expected

    tiny.run(part)
