"""A lease, its engine and its tenants' regions, which open and close together.

A decoder has one serving engine. To move its load to another node, and after a loss, it opens another engine with the
same specification. The lease is watched for two reasons: an idle decoder notices a loss, and opens the next engine
before the next request; in a fleet, the load can leave its node in time.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Final, Protocol, Self

from gpulease.client.aio import GpuBuilder, GpuLease
from gpulease.client.aio.driver import drive
from gpulease.client.core.lease import follow_regions, state_of
from gpulease.client.core.lease_request import fleet_of
from gpulease.client.decode.checkpoint import Checkpoint
from gpulease.client.decode.decode_log import DecodeLog
from gpulease.client.decode.decode_requests import SharedPrefix, TenantConfig
from gpulease.client.decode.engine.engine import BlockPool, DecodeEngine
from gpulease.client.decode.engine.forward_pass import StepLimits
from gpulease.client.decode.scheduler.scheduler import ContinuousBatchScheduler
from gpulease.client.decode.supervisor.background_tasks import BackgroundTasks
from gpulease.client.decode.supervisor.tenant_regions import TenantRegions, stop_renewal
from gpulease.client.errors import Busy, Disconnected, Drained, GpuLeaseError, LeaseExpired
from gpulease.protocol import Phase

LEASE_S: Final = 120.0
"""Duration of the lease in seconds. It is renewed for as long as the engine is open."""

PARKABLE_WAIT_S: Final = 5.0
"""Seconds for which a parkable lease may wait for room, because another model has just left the card or is about to."""

FLEET_LEASE_S: Final = 40.0
"""Duration of a fleet's lease in seconds. If the lease ends without a renewal, the host is considered dead and the
decoder uses another node."""

DAEMON_RESTART_S: Final = 10.0
"""Seconds for which a daemon of a fleet may be down before the load leaves its node. A restart takes less."""

POLL_S: Final = 0.5
"""Seconds between two checks of the lease, each of which is one load from shared memory."""

WATCH_PAUSE_S: Final = 5.0
"""Seconds until a lease's events are requested again, and therefore between two attempts to move the load away."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineSpec:
    """The specification of all engines that a decoder opens.

    Attributes:
        checkpoint: The model.
        limits: Numbers of rows, sequences and positions for which memory is reserved.
        packed: Whether quantised weights stay packed.
        size_bytes: Size of the lease.
        tenants: The tenants, each with a region.
        prefixes: The shared prefixes, each with a region.
        region_life_s: Duration of a region in seconds; None: regions are renewed.
        is_latency: Whether the lease is of the latency class.
        is_parkable: Whether the lease can be parked.
    """

    checkpoint: Checkpoint
    limits: StepLimits
    packed: bool
    size_bytes: int
    tenants: tuple[TenantConfig, ...]
    prefixes: tuple[SharedPrefix, ...] = ()
    region_life_s: float | None = None
    is_latency: bool = False
    is_parkable: bool = False


class EngineUser(Protocol):
    """The callbacks of an engine.

    Attributes:
        scheduler: Read for the limits of rebinds, and never changed.
        log: Logs refusals.
    """

    scheduler: ContinuousBatchScheduler
    log: DecodeLog

    def region_opened(self, serving: "ServingEngine", tenant: TenantConfig, pool: BlockPool) -> None:
        """Process a region that replaces an ended one."""

    def engine_failed(self, serving: "ServingEngine", error: Exception) -> None:
        """Process a report, from outside the step loop, that the lease is lost or is about to be."""

    def lease_warned(self, serving: "ServingEngine", warning: GpuLeaseError) -> None:
        """Process a warning that a fleet's lease will end: Drained, or Disconnected if the daemon is down.

        The engine repeats the call until the lease has ended.
        """


class ServingEngine:
    """A lease with an engine and its tenants' regions.

    Attributes:
        lease: The lease.
        engine: The engine.
        regions: The tenants' regions.
        shares_clock: Whether the daemon is on this host, so that its monotonic times can be compared with local ones.
        is_of_fleet: Whether the lease was requested from a fleet, which may have other nodes.
    """

    def __init__(
        self,
        lease: GpuLease,
        engine: DecodeEngine,
        user: EngineUser,
        stack: AsyncExitStack,
        region_life_s: float | None = None,
        *,
        is_of_fleet: bool = False,
    ) -> None:
        self.lease, self.engine, self.is_of_fleet = lease, engine, is_of_fleet
        self.regions = TenantRegions(
            engine,
            user.scheduler,
            user.log,
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
        """Acquire a lease of a daemon or a fleet, load the model, and open every tenant's region.

        Raises ModelRejected, CapacityExceeded if no card has room, and the errors of `GpuBuilder.acquire`. After an
        error nothing stays open.
        """
        serving: Self | None = None

        def lose(error: GpuLeaseError) -> None:
            # Until the engine has opened, `open` itself raises its failure.
            if serving is not None:
                user.engine_failed(serving, error)

        async with AsyncExitStack() as stack:
            # Open in this order: lease, its renewal, engine, regions, watches. The stack closes them in reverse if any
            # fails.
            is_of_fleet = fleet_of(address) is not None
            lease_s = FLEET_LEASE_S if is_of_fleet else LEASE_S
            builder = GpuBuilder(address).min_vram(spec.size_bytes).lease_secs(lease_s).regions_required()
            if spec.is_latency:
                builder.latency()
            if spec.is_parkable:
                # The timeout also applies when a parked engine returns, while the card may be full for a moment.
                builder.parkable().timeout(PARKABLE_WAIT_S)
            lease = await stack.enter_async_context(builder.acquire())
            # Renew the lease from the start, because loading a large model may take longer than it lasts.
            stack.push_async_callback(stop_renewal, lease.keep_alive(lose))
            engine = await DecodeEngine.open(lease, spec.checkpoint, spec.limits, packed=spec.packed, progress=progress)
            stack.push_async_callback(engine.close)
            opened = cls(lease, engine, user, stack, spec.region_life_s, is_of_fleet=is_of_fleet)
            stack.push_async_callback(opened.regions.close)
            # Open all regions before the first step, so that a lease that is too small fails here.
            for tenant in spec.tenants:
                await opened.regions.open(tenant)
            for prefix in spec.prefixes:
                await opened.regions.open_prefix(prefix)
            # On the daemon's host, a word in shared memory shows the end of the lease. On other hosts, and for a
            # fleet's warnings, the daemon sends events over a connection.
            watch = BackgroundTasks()
            stack.push_async_callback(watch.stop)
            if engine.session.shares_memory:
                watch.start(opened._poll(user))
            else:
                watch.start(opened._follow_regions())
            if is_of_fleet or not engine.session.shares_memory:
                watch.start(opened._watch(user))
            # Nothing can fail from here on: `close` now owns the cleanup, and `lose` reports losses to the user.
            opened._stack = stack.pop_all()
            serving = opened
        return opened

    async def _poll(self, user: EngineUser) -> None:
        """Report the lease's end as soon as the daemon has written it into memory shared with this process."""
        while not self.lease.revoked:  # noqa: ASYNC110  # a word in shared memory can only be polled
            await asyncio.sleep(POLL_S)
        await self._report_end(user)

    async def _follow_regions(self) -> None:
        """Record the ends of regions as the daemon reports them; no shared memory shows them."""
        while self.lease.is_alive:
            with suppress(GpuLeaseError):
                await drive(follow_regions(state_of(self.lease)))
            await asyncio.sleep(WATCH_PAUSE_S)

    async def _report_end(self, user: EngineUser) -> None:
        """If the lease has ended, report the reason, which the daemon's refusal of a renewal contains."""
        try:
            await self.lease.renew(LEASE_S)
        except GpuLeaseError as error:
            user.engine_failed(self, error)

    async def _watch(self, user: EngineUser) -> None:
        """Report the lease's end, when the daemon sends the event or when the lease's time has run out.

        In a fleet, also report warnings that the lease will end.
        """
        unreachable_since: float | None = None
        while self.lease.is_alive:
            warning: GpuLeaseError | None
            try:
                # If the host does not respond, this wait ends with the lease; a renewal would time out only later.
                async with asyncio.timeout(self.lease.remaining_s):
                    warning = await _warning_of(self.lease)
                if warning is None:
                    await self._report_end(user)
                    return
                # The daemon answered: an earlier outage is over.
                unreachable_since = None
            except TimeoutError:
                continue
            except Disconnected as error:
                # The daemon is down. A restart takes less than DAEMON_RESTART_S, so leave the node only after that.
                # Drop the error's traceback, because its frames would keep this engine alive.
                now = time.monotonic()
                unreachable_since = now if unreachable_since is None else unreachable_since
                warning = error.with_traceback(None) if now - unreachable_since >= DAEMON_RESTART_S else None
            # Too many connections wait for events: ask again after the pause.
            except Busy:
                warning = None
            except GpuLeaseError:
                await self._report_end(user)
                return
            # Only in a fleet is there another node to move to.
            if warning is not None and self.is_of_fleet:
                user.lease_warned(self, warning)
            await asyncio.sleep(WATCH_PAUSE_S)
        # The lease has expired, so the engine is lost even if its host does not respond.
        user.engine_failed(self, LeaseExpired("the lease's time ran out before it was renewed"))

    async def close(self) -> None:
        """Close the regions, the engine's session and the watches, and free the lease."""
        await self._stack.aclose()

    async def abandon(self) -> None:
        """Close an engine that is lost or no longer needed. Ignores errors, because parts of it may have ended."""
        with suppress(GpuLeaseError):
            await self.close()


async def _warning_of(lease: GpuLease) -> Drained | None:
    """Wait for the warning that a lease will end. Returns None if it has ended. Raises the errors of `events`.

    Unless this process was stopped, only a drain causes a warning, because an engine's lease is renewed and has a
    session.
    """
    async with lease.events() as events:
        async for event in events:
            if event.phase == Phase.WARNING:
                return Drained(f"{event.reason}: the lease lasts {event.left_s:.0f} s more")
    return None
