"""The tenants' regions of one engine: opened, renewed, and opened anew in the place of those that end."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from gpulease.client.aio.events import KeepAlive
from gpulease.client.errors import CapacityExceeded
from gpulease.client.serve.decode.background_tasks import BackgroundTasks
from gpulease.client.serve.decode.decode_requests import TenantConfig
from gpulease.client.serve.decode.engine import BlockPool, DecodeEngine
from gpulease.client.serve.decode.scheduler import ContinuousBatchScheduler

REGION_TTL_S: Final = 120.0
"""Seconds of a region; renewed in time for as long as it serves."""

REGION_RETRY_S: Final = 0.1
"""Seconds between two tries to open a region that the lease has no room for; its tenant's requests wait meanwhile."""


class TenantRegions:
    """The regions of one engine.

    Attributes:
        pools: The tenants' blocks by the tenants' ids; a tenant whose region is being opened anew has none.
    """

    def __init__(
        self,
        engine: DecodeEngine,
        scheduler: ContinuousBatchScheduler,
        on_opened: Callable[[TenantConfig, BlockPool], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """Serve a decoder, which calls `open` for each tenant.

        Args:
            engine: Whose lease has the regions.
            scheduler: Asked for limits, and never told anything.
            on_opened: Called when a lost region has its successor.
            on_failure: Called when one can't be had, because the engine is lost.
        """
        self.pools: dict[str, BlockPool] = {}
        self._engine, self._scheduler = engine, scheduler
        self._on_opened, self._on_failure = on_opened, on_failure
        self._renewals: dict[str, KeepAlive] = {}
        self._rebinding = BackgroundTasks()

    async def open(self, tenant: TenantConfig) -> BlockPool:
        """Open a tenant's region, and renew it in time for as long as it goes on.

        Raises CapacityExceeded while the lease has no room, and what `GpuLease.region` raises.
        """
        pool = await self._engine.open_pool(tenant.max_blocks, tenant=tenant.id, ttl_secs=REGION_TTL_S)
        self.pools[tenant.id] = pool
        self._renewals[tenant.id] = pool.region.keep_alive()
        return pool

    def tenant_of(self, lease_id: int | None) -> str | None:
        """Return the tenant whose region has this id; None if no tenant's has."""
        return next((name for name, pool in self.pools.items() if pool.region.lease_id == lease_id), None)

    def replace(self, tenant_id: str) -> None:
        """Take a tenant's region as gone, and begin to open another: as soon as limiter and lease let it."""
        self._rebinding.start(self._rebind(tenant_id, self.pools.pop(tenant_id)))

    async def _rebind(self, tenant_id: str, lost: BlockPool) -> None:
        tenant = self._scheduler.tenants[tenant_id].config
        try:
            await self._renewals.pop(tenant_id).stop()
            await self._engine.close_pool(lost)
            delay_s = self._scheduler.rebind_delay_s(tenant_id, time.monotonic())
            while (pool := await self._opened(tenant, delay_s)) is None:
                delay_s = REGION_RETRY_S
        except Exception as error:
            self._on_failure(error)
            return
        self._on_opened(tenant, pool)

    async def _opened(self, tenant: TenantConfig, delay_s: float) -> BlockPool | None:
        """Open a region after a delay; None if the lease has no room for it, as while bytes are proved free."""
        await asyncio.sleep(delay_s)
        try:
            return await self.open(tenant)
        except CapacityExceeded:
            return None

    async def close(self) -> None:
        """Stop to renew and to open regions; they end with their lease."""
        await self._rebinding.stop()
        self.pools.clear()
        for renewal in self._renewals.values():
            await renewal.stop()
