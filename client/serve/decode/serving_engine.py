"""A lease, the engine on it and the tenants' regions in it, which open and close as one.

A decoder has one; while its load moves, or after a loss, it opens another of the same specification.
"""

from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Final, Protocol, Self

from gpulease.client.aio import GpuBuilder, GpuLease
from gpulease.client.errors import GpuLeaseError
from gpulease.client.serve.decode.checkpoint import Checkpoint
from gpulease.client.serve.decode.decode_requests import TenantConfig
from gpulease.client.serve.decode.engine import BlockPool, DecodeEngine
from gpulease.client.serve.decode.forward_pass import StepLimits
from gpulease.client.serve.decode.scheduler import ContinuousBatchScheduler
from gpulease.client.serve.decode.tenant_regions import TenantRegions

LEASE_S: Final = 120.0
"""Seconds of the lease; renewed in time for as long as the engine is open."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineSpec:
    """An engine to open, as often as it takes.

    Attributes:
        checkpoint: The model.
        limits: Rows, sequences and positions to make room for.
        packed: Whether quantised weights stay packed.
        size_bytes: Memory of the lease.
        tenants: Whose regions to open.
        region_life_s: Seconds of a region; None: regions are renewed.
    """

    checkpoint: Checkpoint
    limits: StepLimits
    packed: bool
    size_bytes: int
    tenants: tuple[TenantConfig, ...]
    region_life_s: float | None = None


class EngineUser(Protocol):
    """A decoder, as its engine calls it back.

    Attributes:
        scheduler: Asked for the limits of rebinds, and never told anything.
    """

    scheduler: ContinuousBatchScheduler

    def region_opened(self, serving: "ServingEngine", tenant: TenantConfig, pool: BlockPool) -> None:
        """Take a region in the place of one that ended."""

    def engine_failed(self, serving: "ServingEngine", error: Exception) -> None:
        """Hear, outside of any step, that the lease is lost, or is about to be."""


class ServingEngine:
    """A lease with an engine and its tenants' regions.

    Attributes:
        lease: The lease.
        engine: The engine.
        regions: The tenants' regions.
        shares_clock: Whether the daemon is on this host, so that its monotonic times are those of here.
    """

    def __init__(
        self,
        lease: GpuLease,
        engine: DecodeEngine,
        user: EngineUser,
        stack: AsyncExitStack,
        region_life_s: float | None = None,
    ) -> None:
        """Use `open`."""
        self.lease, self.engine = lease, engine
        self.regions = TenantRegions(
            engine,
            user.scheduler,
            lambda tenant, pool: user.region_opened(self, tenant, pool),
            lambda error: user.engine_failed(self, error),
            region_life_s,
        )
        self.shares_clock = lease.address.startswith("unix:")
        self._stack = stack

    @classmethod
    async def open(
        cls,
        spec: EngineSpec,
        user: EngineUser,
        address: str | None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Self:
        """Acquire a lease, load the model, open every tenant's region.

        Raises ModelRejected, CapacityExceeded if no card has the room, and what `GpuBuilder.acquire` raises. Nothing
        stays open then.
        """
        serving: Self | None = None

        def lose(error: GpuLeaseError) -> None:
            if serving is not None:
                user.engine_failed(serving, error)

        async with AsyncExitStack() as stack:
            builder = GpuBuilder(address).min_vram(spec.size_bytes).lease_secs(LEASE_S).regions_required()
            lease = await stack.enter_async_context(builder.acquire())
            await stack.enter_async_context(lease.keep_alive(lose))
            engine = await DecodeEngine.open(lease, spec.checkpoint, spec.limits, packed=spec.packed, progress=progress)
            stack.push_async_callback(engine.close)
            opened = cls(lease, engine, user, stack, spec.region_life_s)
            stack.push_async_callback(opened.regions.close)
            for tenant in spec.tenants:
                await opened.regions.open(tenant)
            opened._stack = stack.pop_all()
            serving = opened
        return opened

    async def close(self) -> None:
        """Close all of it, and give the lease back."""
        await self._stack.aclose()

    async def abandon(self) -> None:
        """Close what is left of an engine that is lost, or no longer wanted."""
        with suppress(GpuLeaseError):
            await self.close()
