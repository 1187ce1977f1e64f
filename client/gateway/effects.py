"""All that serving a request does to the world goes through one object, so that each step's failure can be had."""

import time
from typing import Final, Protocol

from gpulease.client.blocking import GpuBuilder, GpuLease, GpuSession
from gpulease.client.core.tokens import Grant
from gpulease.client.gateway.authority import MAX_TOKEN_S
from gpulease.client.gateway.store import ReplicatedIdempotencyStore
from gpulease.protocol import Exclusivity
from gpulease.protocol.capabilities import Permission


class Effects(Protocol):
    """What serving a request needs.

    Attributes:
        store: Where requests are reserved and completed.
        wait_s: How long to wait in the daemon's line for a lease.
        join_s: How long to wait for another attempt at the same request.
    """

    store: ReplicatedIdempotencyStore
    wait_s: float
    join_s: float

    def monotonic_s(self) -> float:
        """The time, for waits."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...

    def acquire(self, min_vram_bytes: int, ttl_s: float) -> GpuLease:
        """A lease of its own, SESSION_EXCLUSIVE. Raises CapacityExceeded if there is no room in time."""
        ...

    def open(self, lease: GpuLease) -> GpuSession:
        """The lease's session, as its owner."""
        ...

    def attach(self, grant: Grant, lease: GpuLease) -> GpuSession:
        """The same by a grant: what it does not permit is refused by the session's worker."""
        ...


COPYING: Final = Permission.MEM_READ | Permission.MEM_WRITE
"""What the owner's own sessions need, where a token is demanded of them: they copy in and out, and launch nothing."""


class DaemonEffects:
    """The real ones: a store, and the daemon at `address` (None: the one `GpuBuilder` finds).

    With `by_token` the owner's own sessions are opened by a grant of COPYING that it issues to itself, a new one for
    each, because a token opens one session: for daemons with `require_token = ["attach"]`.
    """

    def __init__(
        self,
        store: ReplicatedIdempotencyStore,
        address: str | None = None,
        *,
        wait_s: float = 0.0,
        join_s: float = 0.0,
        by_token: bool = False,
    ) -> None:
        self.store, self.wait_s, self.join_s = store, wait_s, join_s
        self._address, self._by_token = address, by_token

    def monotonic_s(self) -> float:
        """See Effects."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """See Effects."""
        time.sleep(seconds)

    def acquire(self, min_vram_bytes: int, ttl_s: float) -> GpuLease:
        """See Effects."""
        wish = GpuBuilder(self._address).min_vram(min_vram_bytes).lease_secs(ttl_s).timeout(self.wait_s)
        return wish.exclusivity(Exclusivity.SESSION_EXCLUSIVE).acquire()

    def open(self, lease: GpuLease) -> GpuSession:
        """See Effects."""
        if self._by_token:
            return GpuSession.attach(lease.issue(COPYING, ttl_secs=MAX_TOKEN_S), lease.address)
        return GpuSession(lease)

    def attach(self, grant: Grant, lease: GpuLease) -> GpuSession:
        """See Effects."""
        return GpuSession.attach(grant, lease.address)
