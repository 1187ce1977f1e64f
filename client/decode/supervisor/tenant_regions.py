"""The regions of one engine, for tenants and for shared prefixes: opens, renews and replaces them."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from itertools import count
from typing import Final

from gpulease.client.aio.events import KeepAlive
from gpulease.client.decode.decode_log import DecodeLog
from gpulease.client.decode.decode_requests import SharedPrefix, TenantConfig
from gpulease.client.decode.engine.engine import BlockPool, DecodeEngine
from gpulease.client.decode.row_records import PAGE
from gpulease.client.decode.scheduler.scheduler import ContinuousBatchScheduler
from gpulease.client.decode.supervisor import engine_losses
from gpulease.client.decode.supervisor.background_tasks import BackgroundTasks
from gpulease.client.errors import CapacityExceeded, Drained, GpuLeaseError
from gpulease.protocol.lease_ids import lease_text

REGION_TTL_S: Final = 120.0
"""Duration of a region in seconds. It is renewed for as long as it is in use."""

MOVE_MARGIN_S: Final = 5.0
"""How many seconds before a region's end its tenant moves to another region. Renewals come long before that."""

REGION_RETRY_S: Final = 0.1
"""Seconds between two tries to open a region for which the lease has no room. The tenant's requests wait meanwhile."""

NO_ROOM_TRIES: Final = 50
"""Number of tries at intervals of REGION_RETRY_S if there is no room: the daemon usually frees the lost region's bytes
soon. After that, a lack of room is handled like any other refusal: pauses grow, and attempts are logged."""


async def stop_renewal(renewal: KeepAlive) -> None:
    """Stop renewing. An error that ended the renewals was reported when it happened, so it is not raised again."""
    with suppress(GpuLeaseError):
        await renewal.stop()


class TenantRegions:
    """The regions of one engine.

    Attributes:
        pools: The tenants' regions, by the tenants' ids. A tenant that is suspended, or waits for its next region, has
            no entry.
        prefixes: The shared prefixes whose region has not been dropped, by name, each with its region.
        move_margin_s: How many seconds before a region's end its tenant must move to another region.
    """

    def __init__(
        self,
        engine: DecodeEngine,
        scheduler: ContinuousBatchScheduler,
        log: DecodeLog,
        on_opened: Callable[[TenantConfig, BlockPool], None],
        on_failure: Callable[[Exception], None],
        life_s: float | None = None,
    ) -> None:
        """Prepare without opening a region. The decoder then calls `open` for each tenant.

        Args:
            engine: The engine; the regions are parts of its lease.
            scheduler: Has the tenants and the limiter; it is only read.
            log: Receives refused renewals and refused regions.
            on_opened: Called when a region replaces a lost one.
            on_failure: Called when no region can be opened because the engine is lost.
            life_s: Duration in seconds of regions that are not renewed; None: regions are renewed.
        """
        self.pools: dict[str, BlockPool] = {}
        self.prefixes: dict[str, tuple[SharedPrefix, BlockPool]] = {}
        self._engine, self._scheduler, self._log = engine, scheduler, log
        self._on_opened, self._on_failure = on_opened, on_failure
        self._life_s = life_s
        # If regions are very short, move in the last quarter.
        self.move_margin_s = min(MOVE_MARGIN_S, (life_s or REGION_TTL_S) / 4)
        self._renewals: dict[str, KeepAlive] = {}
        self._prefix_renewals: dict[str, KeepAlive] = {}
        self._rebinding = BackgroundTasks()

    async def open(self, tenant: TenantConfig) -> BlockPool:
        """Open a tenant's region, and renew it for as long as it exists.

        Raises CapacityExceeded while the lease has no room, and the errors of `GpuLease.region`.
        """
        # Renewal starts only once the tenant has the region, in `_bind`.
        pool = await self.open_replacement(tenant)
        self._bind(tenant.id, pool)
        return pool

    async def open_prefix(self, prefix: SharedPrefix) -> None:
        """Open a shared prefix's region, compute its blocks, and renew it for as long as it exists.

        No step may be in progress. Raises the errors of `GpuLease.region` and `DecodeEngine.fill_pool`.
        """
        pool = await self._engine.open_pool(prefix.blocks, ttl_secs=REGION_TTL_S)
        region = lease_text(pool.region.lease_id)

        def refused(error: GpuLeaseError) -> None:
            self._log.failure("prefix_renewal_refused", error, prefix=prefix.name, region=region)

        self.prefixes[prefix.name] = prefix, pool
        self._prefix_renewals[prefix.name] = pool.region.keep_alive(refused)
        await self._engine.fill_pool(pool, prefix.token_ids[: prefix.blocks * PAGE])

    def drop_prefix(self, name: str) -> None:
        """In the background, close the region of a shared prefix that has ended. No step in flight may name it."""
        _, pool = self.prefixes.pop(name)
        self._rebinding.start(self._end(pool, self._prefix_renewals.pop(name)))

    def prefix_of(self, lease_id: int | None) -> str | None:
        """Return the name of the shared prefix in the region with this id; None if there is none."""
        return next((name for name, (_, pool) in self.prefixes.items() if pool.region.lease_id == lease_id), None)

    def ended_prefixes(self) -> list[str]:
        """Return the shared prefixes whose regions have ended; [] if the whole lease has ended."""
        if not self.prefixes or self._engine.lease.revoked:
            return []
        return [name for name, (_, pool) in self.prefixes.items() if pool.region.revoked]

    async def open_replacement(self, tenant: TenantConfig) -> BlockPool:
        """Open another region for a tenant, for `exchange` or `discard`. Raises the errors of `open`."""
        return await self._engine.open_pool(tenant.max_blocks, tenant=tenant.id, ttl_secs=self._life_s or REGION_TTL_S)

    def exchange(self, tenant_id: str, pool: BlockPool) -> None:
        """Give a tenant another region, and end its old one, which no step in flight may name."""
        old, renewal = self.pools[tenant_id], self._renewals.pop(tenant_id, None)
        self._bind(tenant_id, pool)
        self._rebinding.start(self._end(old, renewal))

    def discard(self, pool: BlockPool) -> None:
        """In the background, end a region from `open_replacement` that no tenant uses."""
        self._rebinding.start(self._end(pool, None))

    async def release(self, tenant_id: str) -> None:
        """End a tenant's region, and open no other. No step in flight may name it."""
        pool, renewal = self.pools.pop(tenant_id), self._renewals.pop(tenant_id, None)
        await self._close(pool, renewal)

    def expiring(self) -> list[str]:
        """Return the tenants whose regions are about to end; [] if the lease itself is about to end."""
        if self._engine.remaining_s <= self.move_margin_s:
            return []
        return [name for name, pool in self.pools.items() if 0 < pool.region.remaining_s <= self.move_margin_s]

    def ended(self) -> list[str]:
        """Return the tenants whose regions have ended; [] if the whole lease has ended.

        Reads one value from shared memory for each tenant.
        """
        if self._engine.lease.revoked:
            return []
        return [name for name, pool in self.pools.items() if pool.region.revoked]

    def _bind(self, tenant_id: str, pool: BlockPool) -> None:
        self.pools[tenant_id] = pool
        if self._life_s is None:
            # Without a fixed life, the region is renewed. A refused renewal is only logged: `expiring` then moves the
            # tenant.
            region = lease_text(pool.region.lease_id)

            def refused(error: GpuLeaseError) -> None:
                left_s = pool.region.remaining_s
                self._log.failure("region_renewal_refused", error, tenant=tenant_id, region=region, left_s=left_s)

            self._renewals[tenant_id] = pool.region.keep_alive(refused)

    async def _end(self, pool: BlockPool, renewal: KeepAlive | None) -> None:
        try:
            await self._close(pool, renewal)
        except Exception as error:
            self._on_failure(error)

    async def _close(self, pool: BlockPool, renewal: KeepAlive | None) -> None:
        if renewal is not None:
            await stop_renewal(renewal)
        await self._engine.close_pool(pool)

    def tenant_of(self, lease_id: int | None) -> str | None:
        """Return the id of the tenant that uses the region with this id; None if there is none."""
        return next((name for name, pool in self.pools.items() if pool.region.lease_id == lease_id), None)

    def replace(self, tenant_id: str) -> None:
        """Close a tenant's lost region and open another, in the background, when the limiter and the lease allow it."""
        self._rebinding.start(self._rebind(tenant_id, self.pools.pop(tenant_id, None)))

    async def _rebind(self, tenant_id: str, lost: BlockPool | None) -> None:
        tenant = self._scheduler.tenants[tenant_id].config
        try:
            # Step 1: release the lost region's addresses and bytes, which the next one may need.
            if lost is not None:
                await self._close(lost, self._renewals.pop(tenant_id, None))
            # Step 2: wait for the limiter. `ContinuousBatchScheduler.rebound` takes its permit once the region is open.
            now = asyncio.get_running_loop().time()
            await asyncio.sleep(self._scheduler.rebind_delay_s(tenant_id, now))
            # Step 3: open the region, retrying until it is granted.
            pool = await self._open_with_retries(tenant)
        except Exception as error:
            self._on_failure(error)
            return
        self._on_opened(tenant, pool)

    async def _open_with_retries(self, tenant: TenantConfig) -> BlockPool:
        """Open a region, retrying until it is granted. Raises the error if the lease or its session is lost.

        The number of tries is unlimited, because a refusal of this tenant's region does not affect other tenants.
        """
        for tries in count(1):
            try:
                return await self.open(tenant)
            except GpuLeaseError as error:
                # While a daemon drains, it refuses new regions, but the lease still serves the existing ones. This is
                # not a loss yet.
                is_drain = isinstance(error, Drained) and self._engine.lease.is_alive
                # The lease itself is lost: `_rebind` reports it, and the supervisor opens another engine.
                if engine_losses.shows_loss(error) and not is_drain:
                    raise
                # A lack of room right after a loss is expected, so at first retry quickly and log nothing.
                counted_tries = tries - NO_ROOM_TRIES if isinstance(error, CapacityExceeded) else tries
                if counted_tries < 1:
                    pause_s = REGION_RETRY_S
                else:
                    pause_s = engine_losses.pause_s(counted_tries - 1)
                    if engine_losses.is_logged(counted_tries):
                        self._log.failure("region_refused", error, tenant=tenant.id, tries=tries, next_try_s=pause_s)
            await asyncio.sleep(pause_s)
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """Stop renewing and opening regions. The regions themselves end with their lease.

        The remaining renewals are stopped even if this call is cancelled.
        """
        self.pools.clear()
        self.prefixes.clear()
        async with AsyncExitStack() as stack:
            for renewal in (*self._renewals.values(), *self._prefix_renewals.values()):
                stack.push_async_callback(stop_renewal, renewal)
            await self._rebinding.stop()
