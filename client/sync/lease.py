"""Leases of the blocking API. Threads may share a lease; their operations take turns."""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from gpulease.client.core.events import OnWarning
from gpulease.client.core.exchange import GrantCleanUp
from gpulease.client.core.lease import (
    LeaseHandle,
    LeaseReport,
    LeaseUse,
    LeaseView,
    acquire,
    lease_clean_up,
    reacquire,
)
from gpulease.client.core.lease_request import LeaseRequest
from gpulease.client.core.regions import open_region, region_clean_up, resize
from gpulease.client.core.spare_connections import SpareConnections
from gpulease.client.core.submits import Image
from gpulease.client.core.tokens import TOKEN_S, Grant, HeldToken, issue_request, token_of
from gpulease.client.core.waits import Procedure
from gpulease.client.errors import GpuLeaseError
from gpulease.client.sync.driver import ask, drive, drive_with_clean_up, nothing
from gpulease.client.sync.events import KeepAlive, LeaseEvents, RegionWatch, WarningWatch, keep_alive
from gpulease.client.sync.regions import Region
from gpulease.client.sync.submits import Submission
from gpulease.client.texts import check_callback
from gpulease.protocol import Opcode
from gpulease.protocol.capabilities import Permission
from gpulease.protocol.messages import CapabilityPresent, Empty


class GpuBuilder(LeaseRequest):
    """Describes a lease and acquires it: `GpuBuilder().min_vram(64 << 20).lease_secs(120).acquire()`."""

    def acquire(self) -> "GpuLease":
        """Acquire the lease.

        Raises:
            CapacityExceeded: No card has room before the wait ends.
            Denied: A limit of the node or the tenant forbids the lease.
            Busy: The tenant acquires too often, or the name is taken.
            Drained: The node is drained.
            Unsupported: The node has no fleet for a name, or lacks a label.
            Disconnected: The daemon can't be reached.
        """
        clean_up, request = self._acquisition(None)
        return drive_with_clean_up(clean_up, request, GpuLease)

    def _acquisition(self, spare: SpareConnections | None) -> tuple[GrantCleanUp, Procedure[LeaseHandle]]:
        """Return the clean-up and the procedure of an acquire, which uses a spare connection if there is one."""
        clean_up = lease_clean_up()
        return clean_up, acquire(self._where(), self._request(), threading.RLock(), clean_up, spare)


class GpuLease(LeaseView):
    """A number of bytes of a card for a number of seconds; made by `GpuBuilder.acquire`.

    Leaving its `with` block frees the lease. Dropping the last reference or exiting the program frees it too, without
    waiting for the daemon's reply. In any case the daemon ends the lease at its deadline.
    """

    def __init__(self, state: LeaseHandle) -> None:
        self._state = state
        self._free_when_dropped()

    def renew(self, seconds: float) -> None:
        """Move the deadline to at least `seconds` from now.

        Raises LeaseExpired, Revoked or Fenced if the lease has ended, Denied if `seconds` exceeds a limit of the node
        or the tenant.
        """
        drive(self._state.renew(seconds))

    def free(self) -> None:
        """Free the lease; everything in its session is lost. Raises the error of its end if it has already ended."""
        drive(self._state.free())

    def reacquire(self) -> "GpuLease":
        """Acquire another lease on the terms of this one, after this one has ended.

        The terms are those of the builder when it acquired this lease: size, time, card, waiting and options. Changes
        by `renew`, `grow` and `shrink` are lost, like everything in the old session. The caller decides what to
        restore, and how often to try.

        Raises InvalidRequest if this lease has not ended, and the errors of `GpuBuilder.acquire`.
        """
        clean_up = lease_clean_up()
        return drive_with_clean_up(clean_up, reacquire(self._state, threading.RLock(), clean_up), GpuLease)

    def note(self, data: Mapping[str, Any]) -> None:
        """Write a record about the lease to the node's audit log; returns once the record is on disk.

        If the connection breaks, the request is sent again, so the record may be in the log twice.

        Args:
            data: An object of strings, integers, booleans, None, lists and nested objects, without floats: at most
                4,096 bytes as JSON. Keys are ASCII letters, digits and underscores.

        Raises:
            Unsupported: The node keeps no audit log.
            Busy: The log accepts no more records at present.
            InvalidRequest: `data` can't be recorded.
        """
        drive(self._state.note(data))

    def notes(self, several: Sequence[Mapping[str, Any]]) -> list[GpuLeaseError | None]:
        """Write up to 256 records like `note`, all at the same time. No record is sent twice.

        Returns one entry per record: None if it is on disk, else the error. Disconnected means that the record may or
        may not be in the log. Raises InvalidRequest for too many records, and the error of the lease's end if it has
        ended.
        """
        return drive(self._state.notes(several))

    def query(self) -> LeaseReport:
        """Ask the daemon for the lease's state, even after its end.

        `LeaseReport` describes the members and their units.
        """
        return drive(self._state.query())

    def used(self) -> LeaseUse:
        """Ask how much device memory the session holds now and has held at most: the size to ask for next time.

        `LeaseUse` also has the time of the card that the lease has used.

        Raises Unsupported if the lease has ended, or if the daemon is too old to report it.
        """
        return drive(self._state.used())

    def issue(
        self, permissions: Permission, audience: bytes | None = None, ttl_secs: float = TOKEN_S, nonce: int = 0
    ) -> Grant:
        """Issue a token with which another program can use this lease.

        A token ends at its time, when it is revoked, and when the lease is renewed or ends.

        Args:
            permissions: What the holder may do, such as `Permission.MEM_READ | Permission.TASKLET_SUBMIT`.
            audience: What `my_audience()` returned to the holder on this node; None for this program's own user.
            ttl_secs: The token's lifetime in seconds, at most 300 and never beyond the lease's deadline.
            nonce: A 128-bit number that no other token of the lease has; if 0, the daemon chooses one.

        Raises Denied if the daemon reserves one of the permissions for operators.
        """
        request = issue_request(self.lease_id, permissions, audience, ttl_secs, nonce)
        # Check the request before the lock is taken, so that a wrong argument never waits for another thread.
        return drive(self._state.issue(request))

    def inspect_token(self, token: bytes | str | Grant) -> HeldToken:
        """Ask the node what a token of this lease permits this program to do. The token can still be used afterwards.

        Raises Denied, naming the check that the token failed.
        """
        return drive(self._state.inspect_token(token_of(token)))

    def revoke_token(self, token: bytes | str | Grant) -> None:
        """End one token of this lease and every token attenuated from it; the lease's other tokens stay valid.

        The next operation of a session that was opened with it raises Denied. Revoking a token that has already ended
        is not an error.

        Raises:
            Denied: The token was not issued by this node.
            Busy: 200 tokens of the lease were revoked in the last 300 s.
        """
        drive(self._state.revoke_token(token_of(token)))

    def region(self, size: int | str, *, tenant: str | None = None, ttl_secs: float | None = None) -> Region:
        """Open a region: a part of this lease's memory that can be ended on its own while the session continues.

        Its bytes are taken from the slice and are zero. When the region ends, all of them except a sixteenth (at least
        2 MiB) return to the slice; `Region.close` returns the rest.

        Args:
            size: Bytes, or a string such as "64MiB"; rounded up to `GpuSession.region_granule_bytes`, 2 MiB on a card.
            tenant: The tenant that may renew and free the region, in addition to this lease's tenant, who may always
                renew and revoke it; None for this lease's tenant alone.
            ttl_secs: The region's lifetime in seconds, never beyond the lease's deadline; None for the time that the
                lease was last granted.

        Raises:
            CapacityExceeded, AllocFailed: The slice has no room.
            Denied: The lease has too many regions.
            Busy: A submit has the lease's memory.
            Unsupported: The daemon has no regions.
        """
        clean_up = region_clean_up(self._state, tenant)
        return drive_with_clean_up(clean_up, open_region(clean_up, size, ttl_secs), Region)

    def watch_regions(self) -> RegionWatch:
        """Subscribe to notices of launches that were refused because of any region of this lease."""
        return RegionWatch(self._state.refusal_stream())

    def grow(self, size: int | str) -> None:
        """Enlarge the running lease.

        Args:
            size: The number of bytes to add, or a string such as "64MiB".

        Raises:
            CapacityExceeded: The card has no room.
            Denied: A limit of the tenant is reached.
            Busy: The card or the node is drained, or another change of the size or a submit is in progress.
        """
        drive(resize(self._state, size, "grow", 1))

    def shrink(self, size: int | str) -> None:
        """Give a part of the running lease's memory back to the card.

        Args:
            size: The number of bytes to remove, or a string such as "64MiB".

        Raises:
            CapacityExceeded: The session uses the bytes.
            InvalidRequest: Less than the smallest lease would be left.
            Busy: Another change of the size or a submit is in progress.
        """
        drive(resize(self._state, size, "shrink", -1))

    def park(self) -> int:
        """Move the session's memory to host memory now, so that others can use its bytes on the card.

        The lease must be parkable (`GpuBuilder().parkable()`). The session's next operation brings the memory back to
        the same addresses, and waits for that. This call returns once the card shows the bytes as free.

        Returns:
            How many bytes were moved.

        Raises:
            Unsupported: The lease is not parkable, or the node has no host memory for parked sessions.
            CapacityExceeded: The node's host memory for parked sessions is used up.
            Denied: The tenant's part of that memory is used up.
            Busy: A kernel runs for too long, a submit is in progress, the lease is being resized, a region is opening
                or ending, or too many sessions were parked just now.
        """
        return drive(self._state.park())

    def move(self, device: int | str) -> int:
        """Move the session to another card of its host now.

        The lease must be parkable (`GpuBuilder().parkable()`). Connections, handles and device addresses stay valid.
        Returns once the whole session is on that card; then `card_uuid` is that card's.

        Args:
            device: The card's index or UUID.

        Returns:
            How many bytes were moved.

        Raises the errors of `park`, and in addition:

        Raises:
            InvalidRequest: The card is unknown, or the lease is on it.
            Unsupported: A part of the session can't leave its process.
            Denied: The tenant may not use the card.
            CapacityExceeded: The card can't take the lease.
            Busy: The card is drained, or has no room in time.
        """
        return drive(self._state.move(device))

    def submit(self, kernel: str, image: Image) -> Submission:
        """Describe a one-shot job: one kernel of an image, run in a separate context that ends with the call.

        `lease.submit("infer", image).grid([4]).block([256]).arg(data).out(4096).launch()` returns its output. The job
        may use the lease's memory as long as no session was opened. To run jobs alongside a session, reserve memory for
        them when you acquire the lease: `GpuBuilder().submits(bytes)`.

        Args:
            kernel: The name of the kernel.
            image: PTX text or a cubin.
        """
        # The submission runs itself on this lease, when its `launch` is called.
        return Submission(kernel, image, lambda submission: submission._run_on(self._state))

    def keep_alive(self, on_loss: Callable[[GpuLeaseError], None] | None = None) -> KeepAlive:
        """Renew the lease in the background until the returned object is stopped or its `with` block ends.

        Args:
            on_loss: Called once, from a thread, with the error that says why the lease is lost: a renewal was refused,
                or the lease has ended. If None, leaving the block raises that error.
        """
        return keep_alive(self, on_loss)

    def events(self) -> LeaseEvents:
        """Subscribe to the lease's events, from its present phase to its end, over a separate connection."""
        return LeaseEvents(self._state.event_stream())

    def on_warning(self, callback: OnWarning) -> WarningWatch:
        """Call back, from a thread, when the lease's end is near or its node is being drained.

        Args:
            callback: Receives the event; `event.left_s` is the time that the lease has left, in seconds.
        """
        # Use a separate connection and thread, so that the warning comes even while this lease's operations wait.
        check_callback(callback, "on_warning: the callback")
        return WarningWatch(self._state.event_stream(), callback)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # If an error left the block, an error of freeing must not hide it.
        with suppress(*(() if kind is None else (GpuLeaseError,))):
            drive_with_clean_up(self._state.free_clean_up(), self._state.free_at_exit(), nothing)


class GpuSharedLease(LeaseView):
    """A lease that another tenant or `gpulease run` holds, reached by a token or the environment. Never freed here."""

    def __init__(self, state: LeaseHandle) -> None:
        self._state = state
        # The lease is another holder's, so only the connection is closed; nothing is freed.
        weakref.finalize(self, state.channel.close)

    def query(self) -> LeaseReport:
        """Ask the daemon for the lease's state, as `GpuLease.query` does."""
        return drive(self._state.query())

    def events(self) -> LeaseEvents:
        """Subscribe to the lease's events for as long as the token is valid, as `GpuLease.events` does."""
        return LeaseEvents(self._state.event_stream())


def my_audience(address: str | None = None) -> bytes:
    """Ask a node how it names this program's user. Give the result to tenants who issue tokens for this program.

    Args:
        address: The node's address; GPULEASE_ADDRESS or the default socket if None.
    """
    # Use a connection for this one request, which needs no lease.
    return bytes(ask(Opcode.CAPABILITY_AUDIENCE, Empty(), address).audience)


def inspect_token(token: bytes | str | Grant, address: str | None = None) -> HeldToken:
    """Ask the node what a token permits this program to do, and until when. The token can still be used afterwards.

    Raises Denied, naming the check that the token failed.
    """
    # Present it on a connection that ends with the reply. No session is opened, so the token is not used up.
    return HeldToken.of(ask(Opcode.CAPABILITY_PRESENT, CapabilityPresent(token_of(token)), address))
