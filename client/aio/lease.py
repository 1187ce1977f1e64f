"""Leases of the asyncio face."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from gpulease.client.aio.driver import ConnectionLock, Opening, ask, drive, undisturbed
from gpulease.client.aio.events import KeepAlive, LeaseEvents, RegionWatch, WarningWatch, keep_alive
from gpulease.client.aio.regions import Region
from gpulease.client.aio.submits import Submission
from gpulease.client.core.events import OnWarning
from gpulease.client.core.lease import LeaseReport, LeaseState, LeaseUse, LeaseView, acquire, reacquire
from gpulease.client.core.lease_request import LeaseRequest
from gpulease.client.core.regions import open_region, resize
from gpulease.client.core.submits import Image
from gpulease.client.core.tokens import TOKEN_S, Grant, HeldToken, issue_request, token_of
from gpulease.client.core.waits import Procedure
from gpulease.client.errors import GpuLeaseError
from gpulease.protocol import Opcode
from gpulease.protocol.capabilities import Permission
from gpulease.protocol.messages import CapabilityPresent, Empty

T = TypeVar("T")


class GpuBuilder(LeaseRequest):
    """Asks for a lease: `async with GpuBuilder().min_vram(64 << 20).lease_secs(120).acquire() as lease:`."""

    def acquire(self) -> "Opening[GpuLease]":
        """Get the lease, by `await` or by `async with`, like `gpulease.client.GpuBuilder.acquire`."""
        return Opening(self._acquired())

    async def _acquired(self) -> "GpuLease":
        return GpuLease(await drive(acquire(self._where(), self._request(), ConnectionLock())))


class GpuLease(LeaseView):
    """A number of bytes of a card for a number of seconds, like `gpulease.client.GpuLease`."""

    def __init__(self, state: LeaseState) -> None:
        self._state = state
        self._free_when_dropped()

    async def renew(self, seconds: float) -> None:
        """Make it last at least `seconds` from now, like `gpulease.client.GpuLease.renew`."""
        await self._run(self._state.renew(seconds))

    async def free(self) -> None:
        """Give it back, like `gpulease.client.GpuLease.free`."""
        await self._run(self._state.free())

    def reacquire(self) -> "Opening[GpuLease]":
        """Get another lease on these terms, by `await` or `async with`, like `gpulease.client.GpuLease.reacquire`."""
        return Opening(self._reacquired())

    async def _reacquired(self) -> "GpuLease":
        return GpuLease(await drive(reacquire(self._state, ConnectionLock())))

    async def note(self, data: Mapping[str, Any]) -> None:
        """Write a record about it to the node's audit log, like `gpulease.client.GpuLease.note`."""
        await self._run(self._state.note(data))

    async def notes(self, several: Sequence[Mapping[str, Any]]) -> list[GpuLeaseError | None]:
        """Write several records about it at once, like `gpulease.client.GpuLease.notes`."""
        return await self._run(self._state.notes(several))

    async def query(self) -> LeaseReport:
        """Ask the daemon about it, like `gpulease.client.GpuLease.query`."""
        return await self._run(self._state.query())

    async def used(self) -> LeaseUse:
        """Ask what device memory its session holds, like `gpulease.client.GpuLease.used`."""
        return await self._run(self._state.used())

    async def issue(
        self, permissions: Permission, audience: bytes | None = None, ttl_secs: float = TOKEN_S, nonce: int = 0
    ) -> Grant:
        """Issue a token by which somebody else can use this lease, like `gpulease.client.GpuLease.issue`."""
        return await self._run(self._state.issue(issue_request(self.lease_id, permissions, audience, ttl_secs, nonce)))

    async def inspect_token(self, token: bytes | str | Grant) -> HeldToken:
        """Ask the node what a token of this lease is worth, like `gpulease.client.GpuLease.inspect_token`."""
        return await self._run(self._state.inspect_token(token_of(token)))

    async def revoke_token(self, token: bytes | str | Grant) -> None:
        """End one token that was issued for this lease, like `gpulease.client.GpuLease.revoke_token`."""
        await self._run(self._state.revoke_token(token_of(token)))

    def region(self, size: int | str, *, tenant: str | None = None, ttl_secs: float | None = None) -> "Opening[Region]":
        """Open a region, by `await` or by `async with`, like `gpulease.client.GpuLease.region`."""
        return Opening(self._region(size, tenant, ttl_secs))

    async def _region(self, size: int | str, tenant: str | None, ttl_secs: float | None) -> Region:
        opening = self._drive(open_region(self._state, size, tenant, ttl_secs))
        return Region(await undisturbed(opening, lambda state: self._drive(state.give_up()), self._state.lock))

    def watch_regions(self) -> RegionWatch:
        """Subscribe to the launches that any of its regions refuses."""
        return RegionWatch(self._state.refusal_stream())

    async def grow(self, size: int | str) -> None:
        """Make it larger by so many bytes, like `gpulease.client.GpuLease.grow`."""
        await self._run(resize(self._state, size, "grow", 1))

    async def shrink(self, size: int | str) -> None:
        """Make it smaller by so many bytes, like `gpulease.client.GpuLease.shrink`."""
        await self._run(resize(self._state, size, "shrink", -1))

    def submit(self, kernel: str, image: Image) -> Submission:
        """Describe one kernel to be run in a context of its own, like `gpulease.client.GpuLease.submit`."""
        return Submission(kernel, image, lambda submission: submission._run_on(self._state))

    def keep_alive(self, on_loss: Callable[[GpuLeaseError], None] | None = None) -> KeepAlive:
        """Renew it in a task until the returned object is stopped or its block is left, like the blocking one's."""
        return keep_alive(self, on_loss)

    def events(self) -> LeaseEvents:
        """Subscribe to its events, like `gpulease.client.GpuLease.events`."""
        return LeaseEvents(self._state.event_stream())

    def on_warning(self, callback: OnWarning) -> WarningWatch:
        """Call back, from a task, whenever its end is near, like `gpulease.client.GpuLease.on_warning`."""
        return WarningWatch(self._state.event_stream(), callback)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        with suppress(*(() if kind is None else (GpuLeaseError,))):
            await self._run(self._state.free_at_exit())
        await self._state.lock.wait_for_abandoned()

    async def _run(self, procedure: Procedure[T]) -> T:
        return await undisturbed(self._drive(procedure), lock=self._state.lock)

    async def _drive(self, procedure: Procedure[T]) -> T:
        # A method, because a task that goes on must keep the lease from being dropped under it.
        return await drive(procedure)


class GpuSharedLease(LeaseView):
    """A lease that others hold, like `gpulease.client.sync.lease.GpuSharedLease`."""

    def __init__(self, state: LeaseState) -> None:
        self._state = state
        weakref.finalize(self, state.channel.close)

    async def query(self) -> LeaseReport:
        """Ask the daemon about it, like `gpulease.client.GpuLease.query`."""
        return await drive(self._state.query())

    def events(self) -> LeaseEvents:
        """Subscribe to its events, for as long as the token is good, like `gpulease.client.GpuLease.events`."""
        return LeaseEvents(self._state.event_stream())


async def my_audience(address: str | None = None) -> bytes:
    """Ask a node for its name of this program's user, like `gpulease.client.my_audience`."""
    return bytes((await ask(Opcode.CAPABILITY_AUDIENCE, Empty(), address)).audience)


async def inspect_token(token: bytes | str | Grant, address: str | None = None) -> HeldToken:
    """Ask the node what a token lets this program do, like `gpulease.client.inspect_token`."""
    return HeldToken.of(await ask(Opcode.CAPABILITY_PRESENT, CapabilityPresent(token_of(token)), address))
