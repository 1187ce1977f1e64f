"""Regions of the blocking API: leases inside a session, each of which ends on its own."""

import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from gpulease.client.core.lease import LeaseReport
from gpulease.client.core.regions import RegionCleanUp, RegionHandle, RegionView
from gpulease.client.errors import GpuLeaseError
from gpulease.client.sync.driver import clean_up_in_thread, drive, drive_with_clean_up, nothing
from gpulease.client.sync.events import KeepAlive, LeaseEvents, RegionWatch, keep_alive
from gpulease.protocol import RevokeOutcome


class Region(RegionView):
    """A part of a lease's memory with its own id, deadline and end; made by `GpuLease.region`.

    It is a buffer of every session of its lease: launches, copies and graphs accept it like a buffer of `mem_alloc`.
    After it ends, by `revoke`, by its deadline or by `free`, no launch that names it in its region set starts, and the
    session can no longer access its memory. The session itself continues (`GpuSession.region_set`).

    Leaving its `with` block closes it. Dropping the last reference does not end it; its deadline does. If an interrupt
    cuts its block short, the region is closed when its last reference is dropped.
    """

    __slots__ = ("_left",)

    def __init__(self, state: RegionHandle) -> None:
        super().__init__(state)
        # The finalizer that closes the region if its block ends without `__exit__`; None outside a block.
        self._left: weakref.finalize[..., Any] | None = None

    def renew(self, seconds: float) -> None:
        """Move the deadline to at least `seconds` from now, up to the lease's.

        If the region has ended, raises the error that says how it ended.
        """
        drive(self._state.renew(seconds))

    def free(self) -> None:
        """Free the region. On return, the session can't access its memory.

        If the region has ended already, raises the error that says how it ended.
        """
        drive(self._state.free())

    def revoke(self, reason: str = "revoked by its lease's tenant") -> RevokeOutcome | int:
        """End the region, even if it is in use.

        Args:
            reason: Reported to the region's tenant.

        Returns:
            TORN_DOWN if its memory is proved free, FENCED if not; a newer daemon may send another number.

        Only the lease's tenant and operators may revoke. Raises Denied for the region's own tenant, and NotFound for
        others.
        """
        # The request has the region's lease id, so it ends this region and no other part of the lease.
        return drive(self._state.revoke(reason))

    def cancel(self) -> None:
        """Refuse launches that name the region, with RegionCancelled, until `resume`. The region does not end."""
        drive(self._state.cancel(is_cancelled=True))

    def resume(self) -> None:
        """Accept launches that name the region again, after `cancel`."""
        drive(self._state.cancel(is_cancelled=False))

    def note(self, data: Mapping[str, Any]) -> None:
        """Write a record about the region to the node's audit log, as `GpuLease.note` does."""
        drive(self._state.note(data))

    def query(self) -> LeaseReport:
        """Ask the daemon for the region's state, even after its end, as `GpuLease.query` does."""
        return drive(self._state.query())

    def events(self) -> LeaseEvents:
        """Subscribe to the region's events, from its present phase to its end."""
        return LeaseEvents(self._state.event_stream())

    def watch(self) -> RegionWatch:
        """Subscribe to notices of launches that were refused because of the region."""
        return RegionWatch(self._refusals())

    def keep_alive(self, on_loss: Callable[[GpuLeaseError], None] | None = None) -> KeepAlive:
        """Renew the region in the background, as `GpuLease.keep_alive` renews a lease.

        Args:
            on_loss: Called once, from a thread, with the error that says why the region is lost. If None, leaving the
                returned object's block raises that error.
        """
        return keep_alive(self, on_loss)

    def close(self) -> None:
        """End the region if it has not ended, and release its addresses, so that all its bytes return to the lease.

        Until then a part of its memory stays reserved (`GpuLease.region`). A kernel that uses its addresses after this
        faults. Releasing the addresses takes a session that is open in this program; without one, the part stays
        reserved until the lease ends.
        """
        # Do nothing if it is closed already.
        if self.owner is None:
            return
        try:
            drive_with_clean_up(RegionCleanUp.of(self._state), self._state.close(), nothing)
        except GpuLeaseError:
            self._detach()
            raise
        self._detach()
        # Without an owner the region no longer belongs to the session, so launches and copies with it are refused.
        self.owner = None

    def _detach(self) -> None:
        clean_up, self._left = self._left, None
        if clean_up is not None:
            clean_up.detach()

    def __enter__(self) -> Self:
        # An interrupt may come before `__exit__` has begun. Then the region is closed once nothing refers to it.
        self._left = weakref.finalize(self, _leave, self._state)
        # The region ends with the lease, so the program's exit need not wait for it.
        self._left.atexit = False
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # An error of the block itself matters more than an error of the close.
        with suppress(*(() if kind is None else (GpuLeaseError,))):
            self.close()


def _leave(state: RegionHandle) -> None:
    clean_up_in_thread(RegionCleanUp.of(state))
