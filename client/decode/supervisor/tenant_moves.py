"""Moves of a tenant's keys and values: into another region, or to the host's memory and back.

During a move the tenant's sequences are held, and the other tenants' steps continue. The sequences keep their blocks'
numbers, and nothing is computed again. If a region ends before it is copied, its sequences are replayed, as after any
loss.
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
from gpulease.client.errors import CapacityExceeded, GpuLeaseError, RegionFailed, RegionRevoked

POLL_S: Final = 1.0
"""Longest pause in seconds between two checks for regions that have ended."""

MIN_POLL_S: Final = 0.02
"""Shortest pause between two checks, in seconds: a failed move must not be retried without a pause."""


class MovesUser(Protocol):
    """The part of a decoder that its tenants' moves use.

    Attributes:
        scheduler: Holds and resumes tenants.
        log: Logs moves that fail.
    """

    scheduler: ContinuousBatchScheduler
    log: DecodeLog

    @property
    def engine(self) -> DecodeEngine: ...

    @property
    def regions(self) -> TenantRegions: ...

    def check_alive(self) -> None:
        """Raise the error that ended the decoder, if it has ended."""

    def moved(self, tenant_id: str, pool: BlockPool) -> None:
        """Use this pool in the rows of the tenant's sequences from now on."""

    def abort_tenant(self, tenant_id: str, error: BaseException) -> None:
        """End the tenant's sequences after the loss of their region; they are replayed in another one."""

    def abort_prefix(self, name: str, error: BaseException) -> None:
        """Stop sharing a prefix after the loss of its region; sequences that use it are replayed without it."""

    def wake(self) -> None:
        """Wake the step loop, because a tenant may have rows again."""


@dataclass(frozen=True, slots=True)
class _Saved:
    """A copy of a tenant's blocks in the host's memory.

    Attributes:
        regions: The regions of the engine that computed the blocks; another engine can't use the blocks.
        blocks: The blocks' numbers within the tenant's region.
        contents: [blocks, bytes of a block].
    """

    regions: TenantRegions
    blocks: list[int]
    contents: NDArray[np.uint8]


class TenantMoves:
    """The moves of one decoder's tenants, one at a time.

    Attributes:
        count: How often a tenant's sequences moved to another region.
        is_paused: Whether `watch` must do nothing, because the engine is parked and any copy would bring it back to the
            card.
    """

    def __init__(self, user: MovesUser) -> None:
        self.count = 0
        self.is_paused = False
        self._user = user
        self._saved: dict[str, _Saved] = {}
        # Only one move may run at a time: each copies at the card's full speed, and needs room for a second region.
        self._one_at_a_time = asyncio.Lock()
        self._answered = asyncio.Event()

    @property
    def suspended(self) -> dict[str, int]:
        """By suspended tenant, how many bytes the tenant's blocks take in the host's memory."""
        return {tenant_id: saved.contents.nbytes for tenant_id, saved in self._saved.items()}

    def is_suspended(self, tenant_id: str) -> bool:
        """Return whether a tenant waits for `resume`."""
        return tenant_id in self._saved

    def step_answered(self) -> None:
        """Record that a step was answered, or that no answer will come."""
        self._answered.set()

    async def suspend(self, tenant_id: str) -> None:
        """Copy a tenant's keys and values to the host's memory, and close its region.

        Its requests wait until `resume`. Raises RequestRejected if the tenant has no region, RegionFailed if the region
        ends before it is copied.
        """
        async with self._one_at_a_time:
            pool = self._pool_of(tenant_id)
            async with self._held(tenant_id):
                # Store the copy in `_saved` before this block ends, so that `_held` leaves the tenant held.
                saved = self._saved[tenant_id] = await self._save(tenant_id, pool)
            await saved.regions.release(tenant_id)

    async def resume(self, tenant_id: str) -> None:
        """Open a region for a suspended tenant, and continue its sequences where they stopped.

        Raises RequestRejected if the tenant is not suspended, CapacityExceeded while the lease has no room. The tenant
        then stays suspended.
        """
        async with self._one_at_a_time:
            self._user.check_alive()
            saved = self._saved.get(tenant_id)
            if saved is None:
                raise RequestRejected(f"Tenant {tenant_id} is not suspended")
            if not self._is_current(tenant_id, saved):
                # The engine or the region was lost, so the saved blocks are useless. The sequences are replayed. If
                # another engine took over, the tenant already has a region there.
                del self._saved[tenant_id]
                if saved.regions is self._user.regions:
                    saved.regions.replace(tenant_id)
                async with self._held(tenant_id):
                    return
            pool = await saved.regions.open(self._user.scheduler.tenants[tenant_id].config)
            del self._saved[tenant_id]
            async with self._held(tenant_id):
                await self._resume(tenant_id, pool, saved)

    async def move(self, tenant_id: str) -> None:
        """Move a tenant's sequences into a new region, and end the old one.

        The new region is opened first if the lease has room for both. Otherwise the old one ends as soon as it is
        saved. Raises RequestRejected if the tenant has no region, RegionFailed if the region ends before it is copied.
        """
        async with self._one_at_a_time:
            old, regions = self._pool_of(tenant_id), self._user.regions
            try:
                pool = await regions.open_replacement(self._user.scheduler.tenants[tenant_id].config)
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
                    # From here on the tenant's rows use the new region. Close the old one in the background.
                    regions.exchange(tenant_id, pool)
                    self._moved(tenant_id, pool)
            except BaseException:
                # The new region is not needed, whether the tenant has kept the old region or lost it.
                regions.discard(pool)
                raise

    async def _reopen(self, tenant_id: str, saved: _Saved) -> None:
        """End a region whose blocks are saved, and open the next one as soon as the lease has room."""
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
        await self._resume(tenant_id, pool, saved)

    async def watch(self) -> None:
        """Move tenants before their regions end, and replace ended regions of idle tenants. Runs until cancelled."""
        while True:
            regions = self._user.regions
            left_s = [pool.region.remaining_s for pool in regions.pools.values()]
            # Sleep until the first tenant must leave its region, but check for ended regions every POLL_S.
            pause_s = min(left_s, default=POLL_S) - regions.move_margin_s
            await asyncio.sleep(min(max(pause_s, MIN_POLL_S), POLL_S))
            if self.is_paused:
                continue
            # A region expires if its renewals failed or if it has a fixed life. Leave it while a copy is still
            # possible.
            for tenant_id in regions.expiring():
                try:
                    await self.move(tenant_id)
                except GpuLeaseError as error:
                    self._user.log.failure("region_not_moved", error, tenant=tenant_id)
            for tenant_id in regions.ended():
                # If the tenant has something to compute, its next step reports the end.
                if self._user.scheduler.tenants[tenant_id].is_idle:
                    with suppress(GpuLeaseError):
                        await self._replace_if_ended(tenant_id)
            self._drop_ended_prefixes()

    def _drop_ended_prefixes(self) -> None:
        """Stop sharing unused prefixes whose region has ended. If a prefix is in use, the next step reports the end."""
        scheduler = self._user.scheduler
        if scheduler.unanswered_steps:
            return
        used = {sequence.prefix for tenant in scheduler.tenants.values() for sequence in tenant.live.values()}
        for name in set(self._user.regions.ended_prefixes()) - used:
            self._user.abort_prefix(name, RegionRevoked("its region has ended"))

    async def _replace_if_ended(self, tenant_id: str) -> None:
        """Copy one block of a region. If the region has ended, the copy fails and `_held` replaces the region.

        Raises the errors of the copy, or RequestRejected.
        """
        async with self._one_at_a_time:
            pool = self._pool_of(tenant_id)
            async with self._held(tenant_id):
                await self._save(tenant_id, pool, [0])

    # --- steps of a move ---

    def _pool_of(self, tenant_id: str) -> BlockPool:
        self._user.check_alive()
        if tenant_id not in self._user.scheduler.tenants:
            raise RequestRejected(f"The decoder has no tenant {tenant_id!r}")
        if tenant_id in self._saved:
            raise RequestRejected(f"Tenant {tenant_id} is suspended", "Resume it first")
        pool = self._user.regions.pools.get(tenant_id)
        if pool is None:
            raise RequestRejected(f"Tenant {tenant_id} has no region now: another one is being opened", "Try again")
        return pool

    def _is_current(self, tenant_id: str, saved: _Saved) -> bool:
        """Return whether the tenant still has the engine and the region that it had when the blocks were saved."""
        user = self._user
        return user.regions is saved.regions and bool(user.scheduler.tenants[tenant_id].region_blocks)

    def _check_current(self, tenant_id: str, saved: _Saved) -> None:
        if not self._is_current(tenant_id, saved):
            raise RequestRejected(f"Tenant {tenant_id}'s region ended as it was copied", "Its sequences are replayed")

    @asynccontextmanager
    async def _held(self, tenant_id: str) -> AsyncIterator[None]:
        """Hold a tenant during the block. A tenant that the block suspends stays held.

        If the region ends during the block, the tenant's sequences end and are replayed.
        """
        scheduler, regions = self._user.scheduler, self._user.regions
        scheduler.hold(tenant_id)
        try:
            yield
        except RegionFailed as error:
            # Another task may have replaced the failed region, so check that the tenant still has it.
            if self._user.regions is regions and regions.tenant_of(error.lease_id) == tenant_id:
                self._user.abort_tenant(tenant_id, error)
            raise
        finally:
            if tenant_id not in self._saved:
                scheduler.resume(tenant_id)
            self._user.wake()

    async def _save(self, tenant_id: str, pool: BlockPool, blocks: list[int] | None = None) -> _Saved:
        """Wait until no step of a held tenant is in progress, then copy `blocks`, or for None all written blocks."""
        user, regions = self._user, self._user.regions
        # Steps that were planned before the hold may still write the tenant's blocks.
        while user.scheduler.is_under_way(tenant_id):
            self._answered.clear()
            await self._answered.wait()
            user.check_alive()
        # During that wait, the region or the engine may have been lost and replaced.
        if user.regions is not regions or regions.pools.get(tenant_id) is not pool:
            raise RequestRejected(
                f"Tenant {tenant_id}'s region ended before it was saved", "Its sequences are replayed"
            )
        if blocks is None:
            blocks = user.scheduler.tenants[tenant_id].blocks_to_save()
        saved = _Saved(regions, blocks, await user.engine.save_pool(pool, blocks))
        self._check_current(tenant_id, saved)
        return saved

    async def _resume(self, tenant_id: str, pool: BlockPool, saved: _Saved) -> None:
        """Copy saved blocks into a held tenant's new region, its only one, and continue its sequences there."""
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
        """After a failed move, without an old region to return to, end a tenant's sequences. They are replayed."""
        if self._is_current(tenant_id, saved):
            self._user.abort_tenant(tenant_id, error)
