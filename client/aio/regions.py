"""Regions of the asyncio API: leases inside a session, each of which ends on its own."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from gpulease.client.aio.driver import drive, undisturbed
from gpulease.client.aio.events import KeepAlive, LeaseEvents, RegionWatch, keep_alive
from gpulease.client.core.lease import LeaseReport
from gpulease.client.core.regions import RegionView, close_with_clean_up
from gpulease.client.core.waits import Procedure
from gpulease.client.errors import GpuLeaseError
from gpulease.protocol import RevokeOutcome

T = TypeVar("T")


class Region(RegionView):
    """A part of a lease's memory with its own id, deadline and end; made by `GpuLease.region`.

    It is a buffer of every session of its lease: launches, copies and graphs accept it like a buffer of `mem_alloc`.
    After it ends, by `revoke`, by its deadline or by `free`, no launch that names it in its region set starts, and the
    session can no longer access its memory. The session itself continues (`GpuSession.region_set`).

    Leaving its `async with` block closes it. Dropping the last reference does not end it; its deadline does.
    """

    __slots__ = ()

    async def renew(self, seconds: float) -> None:
        """Move the deadline to at least `seconds` from now, up to the lease's.

        If the region has ended, raises the error that says how it ended.
        """
        await self._run(self._state.renew(seconds))

    async def free(self) -> None:
        """Free the region. On return, the session can't access its memory.

        If the region has ended already, raises the error that says how it ended.
        """
        await self._run(self._state.free())

    async def revoke(self, reason: str = "revoked by its lease's tenant") -> RevokeOutcome | int:
        """End the region, even if it is in use.

        Args:
            reason: Reported to the region's tenant.

        Returns:
            TORN_DOWN if its memory is proved free, FENCED if not; a newer daemon may send another number.

        Only the lease's tenant and operators may revoke. Raises Denied for the region's own tenant, and NotFound for
        others.
        """
        # The request has the region's lease id, so it ends this region and no other part of the lease.
        return await self._run(self._state.revoke(reason))

    async def cancel(self) -> None:
        """Refuse launches that name the region, with RegionCancelled, until `resume`. The region does not end."""
        await self._run(self._state.cancel(is_cancelled=True))

    async def resume(self) -> None:
        """Accept launches that name the region again, after `cancel`."""
        await self._run(self._state.cancel(is_cancelled=False))

    async def note(self, data: Mapping[str, Any]) -> None:
        """Write a record about the region to the node's audit log, as `GpuLease.note` does."""
        await self._run(self._state.note(data))

    async def query(self) -> LeaseReport:
        """Ask the daemon for the region's state, even after its end, as `GpuLease.query` does."""
        return await self._run(self._state.query())

    def events(self) -> LeaseEvents:
        """Subscribe to the region's events, from its present phase to its end."""
        return LeaseEvents(self._state.event_stream())

    def watch(self) -> RegionWatch:
        """Subscribe to notices of launches that were refused because of the region."""
        return RegionWatch(self._refusals())

    def keep_alive(self, on_loss: Callable[[GpuLeaseError], None] | None = None) -> KeepAlive:
        """Renew the region in the background, as `GpuLease.keep_alive` renews a lease.

        Args:
            on_loss: Called once, from a task, with the error that says why the region is lost. If None, leaving the
                returned object's block raises that error.
        """
        return keep_alive(self, on_loss)

    async def close(self) -> None:
        """End the region if it has not ended, and release its addresses, so that all its bytes return to the lease.

        Until then a part of its memory stays reserved (`GpuLease.region`). A kernel that uses its addresses after this
        faults. Releasing the addresses takes a session that is open in this program; without one, the part stays
        reserved until the lease ends.
        """
        # Do nothing if it is closed already.
        if self.owner is None:
            return
        await self._run(close_with_clean_up(self._state))
        # Without an owner the region no longer belongs to the session, so launches and copies with it are refused.
        self.owner = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        # An error of the block itself matters more than an error of the close.
        with suppress(*(() if kind is None else (GpuLeaseError,))):
            await self.close()

    async def _run(self, procedure: Procedure[T]) -> T:
        # The region uses its lease's connection, and so its lock.
        return await undisturbed(drive(procedure), lock=self._state.lock)
