"""Regions of the blocking face: leases inside a session, each ended by itself."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from gpulease.client.core.lease import LeaseReport
from gpulease.client.core.regions import RegionView
from gpulease.client.errors import GpuLeaseError
from gpulease.client.sync.driver import drive
from gpulease.client.sync.events import KeepAlive, LeaseEvents, RegionWatch, keep_alive
from gpulease.protocol import RevokeOutcome


class Region(RegionView):
    """A part of a lease's memory with an id, a deadline and an end of its own; made by `GpuLease.region`.

    It is a buffer of every session on its lease: launches, copies and graphs take it as they take what `mem_alloc`
    gives. When it ends, by `revoke`, its time or `free`, no launch that names it begins, its memory is taken out of
    the session's reach, and the session goes on (`GpuSession.region_set`).

    Leaving its `with` block closes it. Dropping the last reference does not end it: its deadline does.
    """

    __slots__ = ()

    def renew(self, seconds: float) -> None:
        """Make it last at least `seconds` from now; its lease's end ends it even so. Raises how it ended."""
        drive(self._state.renew(seconds))

    def free(self) -> None:
        """Give it back; its memory is out of the session's reach when this returns. Raises how it had ended."""
        drive(self._state.free())

    def revoke(self, reason: str = "revoked by its lease's tenant") -> RevokeOutcome | int:
        """End it, whoever uses it; its own tenant is told the reason.

        Returns:
            TORN_DOWN if its memory is proved free; a newer daemon may send another number.

        Raises Denied unless its lease is yours.
        """
        return drive(self._state.revoke(reason))

    def cancel(self) -> None:
        """Refuse launches that name it from now on, with RegionCancelled, until `resume`; it does not end."""
        drive(self._state.cancel(is_cancelled=True))

    def resume(self) -> None:
        """Take launches that name it again."""
        drive(self._state.cancel(is_cancelled=False))

    def note(self, data: Mapping[str, Any]) -> None:
        """Write a record about it to the node's audit log, as `GpuLease.note` does."""
        drive(self._state.note(data))

    def query(self) -> LeaseReport:
        """Ask the daemon about it, whether it lives or not, as `GpuLease.query` does."""
        return drive(self._state.query())

    def events(self) -> LeaseEvents:
        """Subscribe to its events, from its present phase to its end."""
        return LeaseEvents(self._state.event_stream())

    def watch(self) -> RegionWatch:
        """Subscribe to the launches that it refuses."""
        return RegionWatch(self._refusals())

    def keep_alive(self, on_loss: Callable[[GpuLeaseError], None] | None = None) -> KeepAlive:
        """Renew it in the background, as `GpuLease.keep_alive` renews a lease."""
        return keep_alive(self, on_loss)

    def close(self) -> None:
        """End it if it has not ended, and let go of its addresses: all of its bytes are the lease's again.

        Until then a part of them (`GpuLease.region`) stays in its place. A kernel that uses its addresses afterwards
        faults. That takes a session that is open here; without one the part stays until the lease ends.
        """
        if self.owner is None:
            return
        drive(self._state.close())
        self.owner = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with suppress(*(() if kind is None else (GpuLeaseError,))):
            self.close()
