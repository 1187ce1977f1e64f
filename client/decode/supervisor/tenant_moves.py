"""Moves of a tenant's keys and values: into another region, or to the host's memory and back.

The tenant's sequences are held meanwhile, and keep their blocks' numbers; the other tenants' steps go on. Nothing is
computed again. A region that ends before it is copied is lost like any other, and its sequences are replayed.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from gpulease.client.decode.decode_errors import RequestRejected
from gpulease.client.decode.decode_log import DecodeLog
from gpulease.client.decode.engine.engine import BlockPool, DecodeEngine
from gpulease.client.decode.scheduler.scheduler import ContinuousBatchScheduler
from gpulease.client.decode.supervisor.tenant_regions import REGION_RETRY_S, TenantRegions
from gpulease.client.errors import CapacityExceeded, GpuLeaseError, RegionFailed

LOOK_S: Final = 1.0
"""Longest pause in seconds between two checks of the regions' ends."""

SHORTEST_LOOK_S: Final = 0.02
"""Shortest such pause: a failed move must not be retried without one."""


class MovesUser(Protocol):
    """A decoder, as its tenants' moves use it.

    Attributes:
        scheduler: Holds and resumes tenants.
        log: Where moves that fail are written.
    """

    scheduler: ContinuousBatchScheduler
    log: DecodeLog

    @property
    def engine(self) -> DecodeEngine:
        """The engine, another one after a loss."""

    @property
    def regions(self) -> TenantRegions:
        """The engine's regions."""

    def check_alive(self) -> None:
        """Raise what ended the decoder, if it ended."""

    def moved(self, tenant_id: str, pool: BlockPool) -> None:
        """Compute the tenant's sequences in this pool from now on."""

    def abort_tenant(self, tenant_id: str, error: BaseException) -> None:
        """End the tenant's sequences after the loss of their region; they are replayed in another one."""

    def wake(self) -> None:
        """Look for what there is to compute."""


@dataclass(frozen=True, slots=True)
class _Saved:
    """Blocks in the host's memory.

    Attributes:
        regions: The regions of the engine that they were computed in.
        blocks: Their numbers within the tenant's region.
        contents: [blocks, bytes of a block].
    """

    regions: TenantRegions
    blocks: list[int]
    contents: NDArray[np.uint8]


class TenantMoves:
    """The moves of one decoder's tenants, one at a time.

    Attributes:
        count: How often a tenant's sequences went to another region.
    """

    def __init__(self, user: MovesUser) -> None:
        self.count = 0
        self._user = user
        self._saved: dict[str, _Saved] = {}
        self._one_at_a_time = asyncio.Lock()
        self._answered = asyncio.Event()

    @property
    def suspended(self) -> dict[str, int]:
        """Bytes in the host's memory of each suspended tenant, by the tenants' ids."""
        return {tenant_id: saved.contents.nbytes for tenant_id, saved in self._saved.items()}

    def is_suspended(self, tenant_id: str) -> bool:
        """Return whether a tenant waits for `resume`."""
        return tenant_id in self._saved

    def step_answered(self) -> None:
        """Called when a step was answered, or when there will be no answer."""
        self._answered.set()

    async def suspend(self, tenant_id: str) -> None:
        """Copy a tenant's keys and values to the host's memory, and close its region.

        Its requests wait until `resume`. Raises RequestRejected if it has no region, RegionFailed if that ends first.
        """
        async with self._one_at_a_time:
            pool = self._pool_of(tenant_id)
            async with self._held(tenant_id):
                saved = self._saved[tenant_id] = await self._save(tenant_id, pool)
            await saved.regions.release(tenant_id)

    async def resume(self, tenant_id: str) -> None:
        """Open a region for a suspended tenant, and continue its sequences where they were.

        Raises RequestRejected if it is not suspended, CapacityExceeded while the lease has no room: it stays suspended.
        """
        async with self._one_at_a_time:
            self._user.check_alive()
            saved = self._saved.get(tenant_id)
            if saved is None:
                raise RequestRejected(f"Tenant {tenant_id} is not suspended")
            if not self._is_current(tenant_id, saved):
                # The sequences are replayed. If another engine took over, they have a region there already.
                del self._saved[tenant_id]
                if saved.regions is self._user.regions:
                    saved.regions.replace(tenant_id)
                async with self._held(tenant_id):
                    return
            pool = await saved.regions.open(self._user.scheduler.tenants[tenant_id].config)
            del self._saved[tenant_id]
            async with self._held(tenant_id):
                await self._go_on(tenant_id, pool, saved)

    async def move(self, tenant_id: str) -> None:
        """Move a tenant's sequences into a new region, and end the old one.

        The new one is opened first, if the lease has room for both. Otherwise the old one ends as soon as it is saved.
        Raises RequestRejected if the tenant has no region, RegionFailed if it ends first.
        """
        async with self._one_at_a_time:
            old, regions = self._pool_of(tenant_id), self._user.regions
            try:
                pool = await regions.open_beside(self._user.scheduler.tenants[tenant_id].config)
            except CapacityExceeded:
                async with self._held(tenant_id):
                    saved = await self._save(tenant_id, old)
                    await self._reopen(tenant_id, saved)
                return
            try:
                async with self._held(tenant_id):
                    saved = await self._save(tenant_id, old)
                    await self._user.engine.load_pool(pool, saved.blocks, saved.contents)
                    self._check_current(tenant_id, saved)
                    regions.exchange(tenant_id, pool)
                    self._moved(tenant_id, pool)
            except BaseException:
                regions.let_go(pool)
                raise

    async def _reopen(self, tenant_id: str, saved: _Saved) -> None:
        """End a region that is saved, and open the next one as soon as the lease has its room."""
        try:
            await saved.regions.release(tenant_id)
            while True:
                try:
                    pool = await saved.regions.open(self._user.scheduler.tenants[tenant_id].config)
                    break
                except CapacityExceeded:
                    await asyncio.sleep(REGION_RETRY_S)
        except BaseException as error:
            self._abort(tenant_id, saved, error)
            raise
        await self._go_on(tenant_id, pool, saved)

    async def watch(self) -> None:
        """Move tenants before their regions end, and replace ended regions of idle tenants.

        It does so as long as this task runs.
        """
        while True:
            regions = self._user.regions
            left_s = [pool.region.remaining_s for pool in regions.pools.values()]
            pause_s = min(left_s, default=LOOK_S) - regions.move_before_s
            await asyncio.sleep(min(max(pause_s, SHORTEST_LOOK_S), LOOK_S))
            for tenant_id in regions.ending():
                try:
                    await self.move(tenant_id)
                except GpuLeaseError as error:
                    self._user.log.failure("region_not_moved", error, tenant=tenant_id)
            for tenant_id in regions.ended():
                # A tenant with something to compute learns of it by its next step.
                if self._user.scheduler.tenants[tenant_id].is_idle:
                    with suppress(GpuLeaseError):
                        await self._replace_if_ended(tenant_id)

    async def _replace_if_ended(self, tenant_id: str) -> None:
        """Take a region as gone, if a copy of it says so. Raises what the copy raises, or RequestRejected."""
        async with self._one_at_a_time:
            pool = self._pool_of(tenant_id)
            async with self._held(tenant_id):
                await self._save(tenant_id, pool, [0])

    # --- how ---

    def _pool_of(self, tenant_id: str) -> BlockPool:
        self._user.check_alive()
        if tenant_id not in self._user.scheduler.tenants:
            raise RequestRejected(f"There is no tenant {tenant_id!r}")
        if tenant_id in self._saved:
            raise RequestRejected(f"Tenant {tenant_id} is suspended", "Resume it first")
        pool = self._user.regions.pools.get(tenant_id)
        if pool is None:
            raise RequestRejected(f"Tenant {tenant_id} has no region now: another one is being opened", "Try again")
        return pool

    def _is_current(self, tenant_id: str, saved: _Saved) -> bool:
        """Return whether the sequences that were saved are still there."""
        user = self._user
        return user.regions is saved.regions and bool(user.scheduler.tenants[tenant_id].region_blocks)

    def _check_current(self, tenant_id: str, saved: _Saved) -> None:
        if not self._is_current(tenant_id, saved):
            raise RequestRejected(f"Tenant {tenant_id}'s region ended as it was copied", "Its sequences are replayed")

    @asynccontextmanager
    async def _held(self, tenant_id: str) -> AsyncIterator[None]:
        """Hold a tenant, unless it is suspended in the end. If its region ends meanwhile, it is taken as lost."""
        scheduler, regions = self._user.scheduler, self._user.regions
        scheduler.hold(tenant_id)
        try:
            yield
        except RegionFailed as error:
            if self._user.regions is regions and regions.tenant_of(error.lease_id) == tenant_id:
                self._user.abort_tenant(tenant_id, error)
            raise
        finally:
            if tenant_id not in self._saved:
                scheduler.resume(tenant_id)
            self._user.wake()

    async def _save(self, tenant_id: str, pool: BlockPool, blocks: list[int] | None = None) -> _Saved:
        """Copy blocks, or what a held tenant's steps wrote, as soon as they are answered."""
        user, regions = self._user, self._user.regions
        while user.scheduler.is_under_way(tenant_id):
            self._answered.clear()
            await self._answered.wait()
            user.check_alive()
        if user.regions is not regions or regions.pools.get(tenant_id) is not pool:
            raise RequestRejected(
                f"Tenant {tenant_id}'s region ended before it was saved", "Its sequences are replayed"
            )
        if blocks is None:
            blocks = user.scheduler.tenants[tenant_id].written_blocks
        saved = _Saved(regions, blocks, await user.engine.save_pool(pool, blocks))
        self._check_current(tenant_id, saved)
        return saved

    async def _go_on(self, tenant_id: str, pool: BlockPool, saved: _Saved) -> None:
        """Fill the only region of a held tenant, and continue its sequences there."""
        try:
            await self._user.engine.load_pool(pool, saved.blocks, saved.contents)
            self._check_current(tenant_id, saved)
        except BaseException as error:
            self._abort(tenant_id, saved, error)
            raise
        self._moved(tenant_id, pool)

    def _moved(self, tenant_id: str, pool: BlockPool) -> None:
        self._user.moved(tenant_id, pool)
        self.count += 1

    def _abort(self, tenant_id: str, saved: _Saved, error: BaseException) -> None:
        """Abort sequences that have lost one region and have no other yet; they are replayed."""
        if self._is_current(tenant_id, saved):
            self._user.abort_tenant(tenant_id, error)
