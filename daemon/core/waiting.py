"""The line of acquires that wait for room: first come, first served, per card.

A waiter that can't be placed blocks every card that could serve it, for all behind it and for newcomers; whoever
wants other cards may pass. So a large request is never starved by a stream of small ones.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from gpulease.daemon.core import placement
from gpulease.daemon.core.cards import CardAccount
from gpulease.daemon.core.events import AcquireRequested
from gpulease.protocol.opcodes import Exclusivity


@dataclass(frozen=True, slots=True)
class WaiterSnapshot:
    """Who waits, for what, since when and until when; times are monotonic nanoseconds."""

    request: int
    lease_id: int
    tenant: str
    size_bytes: int
    exclusivity: Exclusivity
    since_ns: int
    due_ns: int


@dataclass(frozen=True, slots=True)
class Waiter:
    """One acquire in line.

    Attributes:
        candidates: The cards that could ever serve it.
        since_ns: When it joined.
        due_ns: When it is sent away.
    """

    acquire: AcquireRequested
    candidates: tuple[CardAccount, ...]
    since_ns: int
    due_ns: int

    def snapshot(self) -> WaiterSnapshot:
        """The waiter without the accounts of the cards."""
        acquire = self.acquire
        return WaiterSnapshot(
            acquire.request,
            acquire.lease_id,
            acquire.tenant,
            acquire.size_bytes,
            acquire.exclusivity,
            self.since_ns,
            self.due_ns,
        )


class WaitingLine:
    """The waiters in the order they came, with counts per tenant and, in the accounts, per card."""

    def __init__(self) -> None:
        self._waiters: dict[int, Waiter] = {}
        self._lease_ids: set[int] = set()
        self._by_tenant: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(tuple(self._waiters.values()))

    def get(self, request: int) -> Waiter | None:
        """The waiter with that request number."""
        return self._waiters.get(request)

    def has_lease_id(self, lease_id: int) -> bool:
        """Whether a waiter is to become that lease."""
        return lease_id in self._lease_ids

    def count_of(self, tenant: str) -> int:
        """How many of the tenant's acquires are in line."""
        return self._by_tenant.get(tenant, 0)

    def join(self, waiter: Waiter) -> None:
        """Go to the end of the line."""
        self._waiters[waiter.acquire.request] = waiter
        self._lease_ids.add(waiter.acquire.lease_id)
        self._by_tenant[waiter.acquire.tenant] += 1
        for account in waiter.candidates:
            account.waiters += 1

    def leave(self, waiter: Waiter) -> None:
        """Leave the line, placed or not."""
        del self._waiters[waiter.acquire.request]
        self._lease_ids.remove(waiter.acquire.lease_id)
        self._by_tenant[waiter.acquire.tenant] -= 1
        if not self._by_tenant[waiter.acquire.tenant]:
            del self._by_tenant[waiter.acquire.tenant]
        for account in waiter.candidates:
            account.waiters -= 1

    def next_placeable(self) -> tuple[Waiter, CardAccount] | None:
        """The first waiter that can be placed without passing another, and its card."""
        blocked: set[str] = set()
        for waiter in self._waiters.values():
            allowed = [account for account in waiter.candidates if account.card.uuid not in blocked]
            acquire = waiter.acquire
            account = placement.choose(allowed, acquire.size_bytes, acquire.exclusivity)
            if account is not None:
                return waiter, account
            blocked.update(account.card.uuid for account in allowed)
        return None
