"""Leases of the blocking face. Threads may share a lease; they take turns."""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from gpulease.client.core.events import OnWarning
from gpulease.client.core.lease import LeaseReport, LeaseState, LeaseUse, LeaseView, acquire, free_silently, reacquire
from gpulease.client.core.lease_request import LeaseRequest
from gpulease.client.core.regions import RegionState, open_region, resize
from gpulease.client.core.submits import Image
from gpulease.client.core.tokens import TOKEN_S, Grant, HeldToken, issue_request, token_of
from gpulease.client.core.waits import Procedure
from gpulease.client.errors import GpuLeaseError
from gpulease.client.sync.driver import ask, drive
from gpulease.client.sync.events import KeepAlive, LeaseEvents, RegionWatch, WarningWatch, keep_alive
from gpulease.client.sync.regions import Region
from gpulease.client.sync.submits import Submission
from gpulease.protocol import Opcode
from gpulease.protocol.capabilities import Permission
from gpulease.protocol.messages import CapabilityPresent, Empty


class GpuBuilder(LeaseRequest):
    """Asks for a lease: `GpuBuilder().min_vram(64 << 20).lease_secs(120).acquire()`."""

    def acquire(self) -> "GpuLease":
        """Get the lease. Raises CapacityExceeded if there is no room in time, Disconnected if there is no daemon."""
        return _owned(acquire(self._where(), self._request(), threading.RLock()))


class GpuLease(LeaseView):
    """A number of bytes of a card for a number of seconds; made by `GpuBuilder.acquire`.

    Leaving its `with` block gives it back. Dropping the last reference or ending the program does so too, but waits for
    no reply. Whatever happens, the daemon takes the lease back at its deadline.
    """

    def __init__(self, state: LeaseState) -> None:
        self._state = state
        self._free_when_dropped()

    def renew(self, seconds: float) -> None:
        """Make it last at least `seconds` from now. Raises LeaseExpired, Revoked or Fenced if it is over."""
        drive(self._state.renew(seconds))

    def free(self) -> None:
        """Give it back: everything in its session is gone. Raises the error of its end if it had ended before."""
        drive(self._state.free())

    def reacquire(self) -> "GpuLease":
        """Get another lease on the terms that this one was asked for, once this one has ended.

        Size, time, card, wait in line and options are those of the builder then; what `renew`, `grow` and `shrink`
        changed is not. Nothing of the old lease's session is there. What to do again, and how often, is the caller's.

        Raises InvalidRequest while this lease goes on; otherwise what `GpuBuilder.acquire` raises.
        """
        return _owned(reacquire(self._state, threading.RLock()))

    def note(self, data: Mapping[str, Any]) -> None:
        """Write a record about it to the node's audit log; returns when the record is on the disk.

        Args:
            data: An object of texts, integers, booleans, None, lists and such objects, without floats: 4,096 bytes at
                most as JSON. Keys are ASCII letters, digits and underscores.

        After a connection that broke the request is repeated, so the record may be there twice.

        Raises Unsupported where the node keeps no audit log, Busy if the log takes no more now, InvalidRequest for
        what can't be recorded.
        """
        drive(self._state.note(data))

    def notes(self, several: Sequence[Mapping[str, Any]]) -> list[GpuLeaseError | None]:
        """Write up to 256 records like `note`, all in flight together; none is sent twice.

        Returns for each None if it is on the disk; else the error, Disconnected where the record may be there or not.
        Raises the error of the lease's end if it is over, InvalidRequest for too many.
        """
        return drive(self._state.notes(several))

    def query(self) -> LeaseReport:
        """Ask the daemon about it, whether it lives or not: `LeaseReport` has each member and its unit."""
        return drive(self._state.query())

    def used(self) -> LeaseUse:
        """Ask what device memory its session holds now, and the most it has held: the size for the next such lease.

        Raises Unsupported once the lease is over, or if the daemon is too old to tell.
        """
        return drive(self._state.used())

    def issue(
        self, permissions: Permission, audience: bytes | None = None, ttl_secs: float = TOKEN_S, nonce: int = 0
    ) -> Grant:
        """Issue a token by which somebody else can use this lease, for as long as it is not renewed.

        Args:
            permissions: The holder's permissions, such as `Permission.MEM_READ | Permission.TASKLET_SUBMIT`.
            audience: The holder's `my_audience()` on this node; None for this program's own user.
            ttl_secs: The token's life in seconds, at most 300 and never longer than the lease.
            nonce: A number of 128 bits that no token of the lease has had; 0: the daemon draws one.

        Raises Denied if the daemon lets only operators give that.
        """
        wanted = issue_request(self.lease_id, permissions, audience, ttl_secs, nonce)
        return drive(self._state.issue(wanted))

    def inspect_token(self, token: bytes | str | Grant) -> HeldToken:
        """Ask the node what a token of this lease lets this program do; its use stays open, as with `inspect_token`.

        Raises Denied with the check that the token failed.
        """
        return drive(self._state.inspect_token(token_of(token)))

    def revoke_token(self, token: bytes | str | Grant) -> None:
        """End one token that was issued for this lease, and every token narrowed from it; others go on.

        Sessions opened with it get `Denied` from their next operation on. A token that has ended already is no error.
        Raises Denied for a token that is not this node's, Busy if 200 of the lease were revoked in the last 300 s.
        """
        drive(self._state.revoke_token(token_of(token)))

    def region(self, size: int | str, *, tenant: str | None = None, ttl_secs: float | None = None) -> Region:
        """Open a region: a part of this lease's memory that can be ended alone, while the session goes on.

        Its bytes are taken from the slice, and read as zeros. When it ends, all but a sixteenth go back, 2 MiB at the
        least; `Region.close` gives that back, too.

        Args:
            size: Bytes, or a text such as "64MiB"; rounded up to `GpuSession.region_granule_bytes`, 2 MiB on a card.
            tenant: The tenant that may renew and free it; None for this lease's own, who may renew and revoke it in any
                case.
            ttl_secs: Its life in seconds, never longer than the lease's; None for what the lease was last given.

        Raises CapacityExceeded or AllocFailed if the slice has no room, Unsupported if the daemon has no regions.
        """
        state: RegionState | None = None
        try:
            state = drive(open_region(self._state, size, tenant, ttl_secs))
            region = Region(state)
            return region
        except BaseException:
            if state is not None:
                drive(state.give_up())  # interrupted behind its end
            raise

    def watch_regions(self) -> RegionWatch:
        """Subscribe to the launches that any of its regions refuses."""
        return RegionWatch(self._state.refusal_stream())

    def grow(self, size: int | str) -> None:
        """Make it larger by so many bytes while it runs. Raises CapacityExceeded if the card has no room."""
        drive(resize(self._state, size, "grow", 1))

    def shrink(self, size: int | str) -> None:
        """Make it smaller by so many bytes, which others get. Raises CapacityExceeded if it uses them."""
        drive(resize(self._state, size, "shrink", -1))

    def submit(self, kernel: str, image: Image) -> Submission:
        """Describe one kernel of an image, to be run in a context of its own that ends with the call.

        `lease.submit("infer", image).grid([4]).block([256]).arg(data).out(4096).launch()` returns its output. The
        submit has the lease's memory while no session was opened. For submits beside a session, keep some memory when
        the lease is acquired: `GpuBuilder().submits(bytes)`.
        """
        return Submission(kernel, image, lambda submission: submission._run_on(self._state))

    def keep_alive(self, on_loss: Callable[[GpuLeaseError], None] | None = None) -> KeepAlive:
        """Renew it in the background until the returned object is stopped or its `with` block is left.

        Args:
            on_loss: Called once, from the thread, with the error that says why it is lost: a renewal was refused, or it
                has ended. If that is None, leaving the block raises the error.
        """
        return keep_alive(self, on_loss)

    def events(self) -> LeaseEvents:
        """Subscribe to its events, from its present phase to its end, on a connection of their own."""
        return LeaseEvents(self._state.event_stream())

    def on_warning(self, callback: OnWarning) -> WarningWatch:
        """Call back, from a thread, whenever its end is near or its node is drained: `event.left_s` says how near."""
        return WarningWatch(self._state.event_stream(), callback)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with suppress(*(() if kind is None else (GpuLeaseError,))):
            drive(self._state.free_at_exit())


class GpuSharedLease(LeaseView):
    """A lease that others hold, known by a token or by `gpulease run`. It is not freed here."""

    def __init__(self, state: LeaseState) -> None:
        self._state = state
        weakref.finalize(self, state.channel.close)

    def query(self) -> LeaseReport:
        """Ask the daemon about it, as `GpuLease.query` does."""
        return drive(self._state.query())

    def events(self) -> LeaseEvents:
        """Subscribe to its events, for as long as the token is good, like `GpuLease.events`."""
        return LeaseEvents(self._state.event_stream())


def _owned(acquiring: Procedure[LeaseState]) -> GpuLease:
    state: LeaseState | None = None
    try:
        state = drive(acquiring)
        lease = GpuLease(state)
        return lease
    except BaseException:
        if state is not None:
            free_silently(state)  # interrupted behind its end
        raise


def my_audience(address: str | None = None) -> bytes:
    """Ask a node for its name of this program's user: tell it to those who are to issue tokens for this program."""
    return bytes(ask(Opcode.CAPABILITY_AUDIENCE, Empty(), address).audience)


def inspect_token(token: bytes | str | Grant, address: str | None = None) -> HeldToken:
    """Ask the node what a token lets this program do, and until when. The token is not used up.

    Raises Denied with the check that the token failed.
    """
    return HeldToken.of(ask(Opcode.CAPABILITY_PRESENT, CapabilityPresent(token_of(token)), address))
