"""Regions of the asyncio face."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from gpulease.client.aio.driver import drive, undisturbed
from gpulease.client.aio.events import KeepAlive, LeaseEvents, RegionWatch, keep_alive
from gpulease.client.core.lease import LeaseReport
from gpulease.client.core.regions import RegionView
from gpulease.client.core.waits import Procedure
from gpulease.client.errors import GpuLeaseError
from gpulease.protocol import RevokeOutcome

T = TypeVar("T")


class Region(RegionView):
    """A part of a lease's memory with an end of its own, like `gpulease.client.Region`; made by `GpuLease.region`."""

    __slots__ = ()

    async def renew(self, seconds: float) -> None:
        """Make it last at least `seconds` from now, like `gpulease.client.Region.renew`."""
        await self._run(self._state.renew(seconds))

    async def free(self) -> None:
        """Give it back, like `gpulease.client.Region.free`."""
        await self._run(self._state.free())

    async def revoke(self, reason: str = "revoked by its lease's tenant") -> RevokeOutcome | int:
        """End it, whoever uses it, like `gpulease.client.Region.revoke`."""
        return await self._run(self._state.revoke(reason))

    async def cancel(self) -> None:
        """Refuse launches that name it until `resume`, like `gpulease.client.Region.cancel`."""
        await self._run(self._state.cancel(is_cancelled=True))

    async def resume(self) -> None:
        """Take launches that name it again, like `gpulease.client.Region.resume`."""
        await self._run(self._state.cancel(is_cancelled=False))

    async def note(self, data: Mapping[str, Any]) -> None:
        """Write a record about it to the node's audit log, like `gpulease.client.Region.note`."""
        await self._run(self._state.note(data))

    async def query(self) -> LeaseReport:
        """Ask the daemon about it, like `gpulease.client.Region.query`."""
        return await self._run(self._state.query())

    def events(self) -> LeaseEvents:
        """Subscribe to its events, like `gpulease.client.Region.events`."""
        return LeaseEvents(self._state.event_stream())

    def watch(self) -> RegionWatch:
        """Subscribe to the launches that it refuses, like `gpulease.client.Region.watch`."""
        return RegionWatch(self._refusals())

    def keep_alive(self, on_loss: Callable[[GpuLeaseError], None] | None = None) -> KeepAlive:
        """Renew it in a task, as `GpuLease.keep_alive` renews a lease."""
        return keep_alive(self, on_loss)

    async def close(self) -> None:
        """End it and let go of its addresses, like `gpulease.client.Region.close`."""
        if self.owner is None:
            return
        await self._run(self._state.close())
        self.owner = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        with suppress(*(() if kind is None else (GpuLeaseError,))):
            await self.close()

    async def _run(self, procedure: Procedure[T]) -> T:
        return await undisturbed(drive(procedure), lock=self._state.lock)
