"""A region in the client: the requests about it, its end, and its use as a buffer of a session.

A region is a lease inside a session, so `RegionHandle` is a `LeaseHandle` that uses its lease's connection. A failure
that names a region ends only that region here, whatever operation the reply was for.
"""

import time
from collections.abc import Container
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any, Final

from gpulease.client.core.attachment import Attachment
from gpulease.client.core.clean_ups import with_clean_up
from gpulease.client.core.events import RefusalStream
from gpulease.client.core.lease import LEASE_OVER, LeaseHandle, ReplyCleanUp
from gpulease.client.core.lease_request import MAX_WIRE_BYTES, milliseconds, size_of
from gpulease.client.core.waits import Procedure, Sleep
from gpulease.client.errors import GpuLeaseError, InvalidHandle, InvalidRequest
from gpulease.client.handles import BorrowedBuffer, HandleOwner
from gpulease.client.numbers import whole
from gpulease.client.texts import bounded
from gpulease.client.transport.channel import Channel
from gpulease.protocol import Failure, Opcode, RevokeOutcome, Status
from gpulease.protocol.back_off import back_off_s
from gpulease.protocol.fastpath import HANDLE
from gpulease.protocol.lease_ids import LeaseId
from gpulease.protocol.limits import MAX_TEXT_BYTES
from gpulease.protocol.messages import Body, LeaseGrant, LeaseRef, LeaseRevoke, RegionCancel, RegionGrant, RegionOpen

RETURN_WAIT_S: Final = 30.0
"""Longest time, in seconds, that closing a region waits for the end of the launches that named it; the daemon's grace
is shorter."""

FIRST_RETURN_POLL_S: Final = 0.0005
LAST_RETURN_POLL_S: Final = 0.01
"""Shortest and longest pause between two polls for the end of those launches, in seconds. Each pause is twice the
previous one. A small region is free within a millisecond or two."""

_KNOWN_OUTCOMES: Final = {int(outcome): outcome for outcome in RevokeOutcome}
_HAS_MEMORY: Final = frozenset({"pending", "active", "draining"})
"""States in which a region's memory is still mapped."""


class RegionHandle(LeaseHandle):
    """An open region. Requests about it go through its lease.

    Attributes:
        parent: Its lease.
        tenant: Its tenant; "" for the lease's own.
        address_on_card: Its device address.
        slot: Together with `number`, it identifies the region in region sets.
        number: Distinguishes it from other regions that have used the slot.
        is_end_raised: Whether an error has reported how it ended; later errors are RegionFenced.
        dropped: Always empty. An owner of a buffer must have this attribute, and this object is the buffer's owner
            until a session uses the region.
    """

    def __init__(self, parent: LeaseHandle, granted: RegionGrant, tenant: str) -> None:
        self.parent = parent
        self.tenant = tenant
        self.address_on_card = granted.address
        self.slot, self.number = granted.slot, granted.number
        self.is_end_raised = False
        self.dropped: list[tuple[Opcode, int]] = []
        grant = LeaseGrant(
            granted.lease_id,
            granted.generation,
            granted.size_bytes,
            granted.ttl_ms,
            granted.expires_at_unix_s,
            parent.grant.exclusivity,
            parent.grant.card_uuid,
        )
        # A region shares the lease's connection and lock, because the program that holds the lease sends the region's
        # requests.
        super().__init__(parent.channel, parent.lock, grant)
        self.outlives_daemon = parent.outlives_daemon
        parent.regions[granted.lease_id] = self

    @property
    def channel(self) -> Channel:
        """The connection of its lease, which the region shares."""
        return self.parent.channel

    @channel.setter
    def channel(self, channel: Channel) -> None:
        self.parent.channel = channel

    @property
    def remaining_s(self) -> float:
        """Seconds until the region or its lease ends, whichever is first; 0 afterwards."""
        # A region can't outlive its lease.
        return min(super().remaining_s, self.parent.remaining_s)

    @property
    def is_alive(self) -> bool:
        """True while it has time left and is not known here to have ended."""
        return self.remaining_s > 0

    @property
    def is_revoked(self) -> bool:
        """True while launches that name it are refused."""
        words = self.parent.words
        return (
            self.end_failure is not None
            or self.parent.is_revoked
            or (words is not None and words.is_refused(self.slot, self.number))
        )

    def note_failure(self, failure: Failure, over: Container[Status] = LEASE_OVER) -> Failure:
        """Record a failure from the daemon, which may mean that the region has ended; its lease continues."""
        # Step 1: a failure that is not about this region.
        if failure.status not in over and failure.region is None:
            return failure
        # If a failure that would end a lease comes in a reply about this region, it reports the region's end.
        if failure.region is None:
            failure = replace(failure, region=self.grant.lease_id)
        # Step 2: remember the end, and whether an error has reported it: later errors say FENCED.
        if failure.status in over and failure.flipped_ns is not None:
            self.is_end_raised = True
        if failure.status in over and self.end_failure is None:
            self.end_failure = failure
        return failure

    # --- procedures ---

    def free(self) -> Procedure[None]:
        """Free the region. Raises the error of its end if it had already ended."""
        lease_id = self.grant.lease_id
        yield from self._control(Opcode.LEASE_FREE, LeaseRef(lease_id))
        self.end_failure = Failure(Status.LEASE_FREED, "the region was freed", region=lease_id)

    def revoke(self, reason: str) -> Procedure[RevokeOutcome | int]:
        """End the region even while others use it; its tenant receives the reason."""
        body = LeaseRevoke(self.grant.lease_id, bounded(reason, "revoke: the reason", MAX_TEXT_BYTES))
        revoked = yield from self._control(Opcode.LEASE_REVOKE, body)
        # Record the end at once, so that every later request about the region is refused here.
        self.end_failure = Failure(Status.REVOKED, f"the region was revoked: {reason}", region=self.grant.lease_id)
        return _KNOWN_OUTCOMES.get(revoked.outcome, int(revoked.outcome))

    def cancel(self, *, is_cancelled: bool) -> Procedure[None]:
        """Refuse launches that name it, or accept them again."""
        yield from self._control(Opcode.REGION_CANCEL, RegionCancel(self.grant.lease_id, int(is_cancelled)))

    def close(self) -> Procedure[None]:
        """End the region if it has not ended, and release its addresses in the session that is open here."""
        # Step 1: end it. If it had already ended, raise only FENCED: its memory was not proved free.
        if self.end_failure is None and self.parent.end_failure is None:
            try:
                # A region of another tenant is revoked, the lease's own is freed: the cause in the audit log differs.
                yield from self.revoke("its lease's tenant is done with it") if self.tenant else self.free()
            except GpuLeaseError as error:
                if self.end_failure is None or error.status is Status.FENCED:
                    raise
        operations = self.parent.attached()
        if operations is None or operations.attachment.end_failure is not None:
            return  # the rest of its memory is freed with the lease
        # Step 2: wait until the launches that named it have ended. Step 3: release its addresses.
        yield from self._await_launches()
        release = operations.ask(Opcode.REGION_RELEASE, HANDLE.pack(self.address_on_card))
        try:
            yield from operations.do("close", release)
        except GpuLeaseError as error:
            # Raise only the failure of an earlier operation. If the worker can't release the addresses now, it does so
            # when the last session ends, or in `reset`. Another thread or task may have closed the session meanwhile.
            is_refused = isinstance(error, InvalidHandle) and error.failure.failed_request_id is None
            if not (is_refused or operations.attachment.is_closed):
                raise

    def _await_launches(self) -> Procedure[None]:
        # The launches that named it end by themselves, or after the daemon's grace period. Poll with growing pauses.
        last, polls = time.monotonic() + RETURN_WAIT_S, 0
        while (yield from self.query()).get("state") in _HAS_MEMORY and time.monotonic() < last:
            yield Sleep(back_off_s(polls, FIRST_RETURN_POLL_S, LAST_RETURN_POLL_S))
            polls += 1

    def _control(
        self,
        op: Opcode,
        body: Body,
        *,
        waits_for_daemon: bool = True,
        clean_up: ReplyCleanUp | None = None,
        most_s: float = inf,
    ) -> Procedure[Any]:
        # A lease's end is its regions' end, even if no failure has named the region.
        if self.end_failure is None:
            self.end_failure = self.parent.end_failure
        ask = super()._control
        return (yield from ask(op, body, waits_for_daemon=waits_for_daemon, clean_up=clean_up, most_s=most_s))


class RegionView(BorrowedBuffer):
    """Base of both APIs' regions: a buffer for every session of its lease, with all properties that need no request.

    Attributes:
        size_bytes: Its size.
    """

    __slots__ = ("_state",)

    def __init__(self, state: RegionHandle) -> None:
        super().__init__(state, state.address_on_card, state.grant.size_bytes)
        self._state = state

    def check(self, session: HandleOwner, subject: str) -> None:
        """Raise InvalidHandle, naming the operation `subject`, if `session` is not of its lease, or if it is closed."""
        lease_id = self._state.parent.grant.lease_id
        if self.owner is None:
            raise InvalidHandle(f"{subject}: region {self.lease_id} is closed")
        if not isinstance(session, Attachment) or session.session_id != lease_id:
            raise InvalidHandle(f"{subject}: region {self.lease_id} belongs to another lease")
        # From now on each launch's own check of the owner succeeds at once.
        self.owner = session

    def mark_freed(self) -> tuple[Opcode, int]:
        """Raise InvalidRequest: a region is not an allocation."""
        raise InvalidRequest(
            "mem_free: the argument must be an allocation, not a region", "End it with region.free() or region.close()"
        )

    @property
    def lease_id(self) -> LeaseId:
        """The region's own id, from the same space as lease ids."""
        return LeaseId(self._state.grant.lease_id)

    @property
    def lease_id_text(self) -> str:
        """The region's id as 32 hex digits, for code that needs a str."""
        return str(self.lease_id)

    @property
    def address(self) -> int:
        """The region's device address. No other region of the session ever has the same one."""
        return self.handle

    @property
    def generation(self) -> int:
        """The number of its grant: 1 at first, incremented by every renewal."""
        return self._state.generation

    @property
    def tenant(self) -> str:
        """The tenant for which it was opened; "" for the lease's own."""
        return self._state.tenant

    @property
    def expires_at_unix_secs(self) -> int:
        """The time of its end by the daemon's wall clock, in Unix seconds; for display."""
        return self._state.expires_at_unix_s

    @property
    def remaining_s(self) -> float:
        """Seconds until it ends, by this machine's monotonic clock; 0 once it has."""
        return self._state.remaining_s

    @property
    def is_alive(self) -> bool:
        """True while it has time left and is not known here to have ended."""
        return self._state.is_alive

    @property
    def revoked(self) -> bool:
        """True while launches that name it are refused, because it has ended or is cancelled.

        While a session with shared memory is open, this reads one word of memory that the daemon writes, so an engine
        can afford it in every step. Over TCP and TLS it turns True when an operation or the daemon has reported the
        end.
        """
        return self._state.is_revoked

    def __repr__(self) -> str:
        time_left = f"{self.remaining_s:.1f} s left" if self.is_alive else "over"
        return f"<{type(self).__name__} {self.lease_id_text} {self.size_bytes} bytes at {self.handle:#x}, {time_left}>"

    def _refusals(self) -> RefusalStream:
        return self._state.refusal_stream()


class RegionCleanUp(ReplyCleanUp):
    """Closes a region that an interrupted call was opening or closing.

    Attributes:
        region: The region; None until it is granted.
        tenant: Its tenant; "" for the lease's own.
    """

    def __init__(self, lease: LeaseHandle, tenant: str, region: RegionHandle | None = None) -> None:
        super().__init__(lease)
        self.region = region
        self.tenant = tenant

    @classmethod
    def of(cls, region: RegionHandle) -> "RegionCleanUp":
        """Return the clean-up of a call that closes an open region."""
        return cls(region.parent, region.tenant, region)

    def opened(self) -> RegionHandle:
        if self.region is None:
            self.region = RegionHandle(self.lease, self.made, self.tenant)
        return self.region

    def _give_back(self) -> Procedure[None]:
        yield from self.late()
        if self.region is not None or self.made is not None:
            with suppress(GpuLeaseError):
                yield from self.opened().close()


def close_with_clean_up(region: RegionHandle) -> Procedure[None]:
    """Close a region; if that is interrupted, its lease's next request completes the close."""
    return with_clean_up(RegionCleanUp.of(region), region.close())


def region_clean_up(lease: LeaseHandle, tenant: str | None) -> RegionCleanUp:
    """Return the clean-up for a call to `open_region`. Raises InvalidRequest for a tenant that can't be a name."""
    return RegionCleanUp(lease, "" if tenant is None else bounded(tenant, "region: the tenant", MAX_TEXT_BYTES))


def open_region(clean_up: RegionCleanUp, size: int | str, ttl_secs: float | None) -> Procedure[RegionHandle]:
    """Open a region of a lease. Raises CapacityExceeded, Denied, Unsupported, InvalidRequest or a similar error.

    Args:
        clean_up: Records the region that may have been granted.
        size: Bytes, or a string such as "64MiB".
        ttl_secs: Its lifetime in seconds; None for the time to live that was last granted to the lease.
    """
    lease = clean_up.lease
    # By default it lasts as long as the lease was last granted.
    ttl_ms = milliseconds(lease.ttl_s if ttl_secs is None else ttl_secs, "region: ttl_secs", least_ms=1)
    body = RegionOpen(lease.grant.lease_id, size_of(size, "region: size"), ttl_ms, clean_up.tenant)
    # Buffers that the client holds for reuse take room in the slice: free them first.
    yield from lease.finish_sent()
    yield from lease._control(Opcode.REGION_OPEN, body, clean_up=clean_up)
    return clean_up.opened()


def resize(lease: LeaseHandle, more_bytes: int | str, operation: str, sign: int) -> Procedure[None]:
    """Make a lease larger (sign 1) or smaller (sign -1). `GpuLease.grow` and `shrink` list the errors."""
    yield from lease.settle_clean_ups()
    # The caller passes the change in size; the request contains the new size.
    size_bytes = lease.grant.size_bytes + sign * size_of(more_bytes, f"{operation}: size")
    yield from lease.resize(whole(size_bytes, f"{operation}: the new size", least=1, most=MAX_WIRE_BYTES))
