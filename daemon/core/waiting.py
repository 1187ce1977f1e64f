"""The line of acquires that wait for room: first come, first served, per card, within limits.

A waiter that can't be placed holds others back: all behind it, and newcomers, are kept off every card that could
serve it, so that a stream of small requests can't starve a large one; whoever wants other cards may pass. It does so

- only until the end of its tenant's term (see `holding`), so never for longer than `max_hold_back_s`;
- not while its own tenant has a live lease on one of those cards: it could help itself by ending that.

After that others pass it whenever they fit, and it keeps its place in line for when it fits itself.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from gpulease.daemon.core import placement
from gpulease.daemon.core.cards import CardAccount
from gpulease.daemon.core.events import AcquireRequested
from gpulease.daemon.core.holding import HoldTerms
from gpulease.daemon.core.limits import CoreLimits
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
        holds_until_ns: Until when it may hold others back; not after `since_ns` if it never may.
    """

    acquire: AcquireRequested
    candidates: tuple[CardAccount, ...]
    since_ns: int
    due_ns: int
    holds_until_ns: int

    def has_own_lease(self) -> bool:
        """Whether its tenant has a live lease on a card that could serve it."""
        return any(self.acquire.tenant in account.leases_by_tenant for account in self.candidates)

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
    """The waiters in the order they came.

    Attributes:
        terms: When each tenant's waiters may hold others back.
        holders: The waiters whose time to hold others back has not run out, by request.
    """

    def __init__(self, limits: CoreLimits) -> None:
        self.terms = HoldTerms(limits)
        self.holders: dict[int, Waiter] = {}
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

    def bytes_of(self, tenant: str) -> int:
        """What the tenant's acquires in line ask for together."""
        waiters = self._waiters.values() if tenant in self._by_tenant else ()
        return sum(waiter.acquire.size_bytes for waiter in waiters if waiter.acquire.tenant == tenant)

    def join(self, waiter: Waiter) -> None:
        """Go to the end of the line."""
        self._waiters[waiter.acquire.request] = waiter
        self._lease_ids.add(waiter.acquire.lease_id)
        self._by_tenant[waiter.acquire.tenant] += 1
        if waiter.holds_until_ns > waiter.since_ns:
            self.holders[waiter.acquire.request] = waiter

    def leave(self, waiter: Waiter) -> None:
        """Leave the line, placed or not."""
        del self._waiters[waiter.acquire.request]
        self.holders.pop(waiter.acquire.request, None)
        self._lease_ids.remove(waiter.acquire.lease_id)
        self._by_tenant[waiter.acquire.tenant] -= 1
        if not self._by_tenant[waiter.acquire.tenant]:
            del self._by_tenant[waiter.acquire.tenant]

    def end_holds(self, now_ns: int) -> bool:
        """Let the waiters whose time to hold others back is over do so no more; whether there were any."""
        over = [request for request, waiter in self.holders.items() if waiter.holds_until_ns <= now_ns]
        for request in over:
            del self.holders[request]
        return bool(over)

    def next_hold_end_ns(self) -> int | None:
        """When the next waiter must stop holding others back, None if none may."""
        return min((waiter.holds_until_ns for waiter in self.holders.values()), default=None)

    def held_cards(self) -> set[str]:
        """The uuids of the cards that newcomers are kept off."""
        holding = [waiter for waiter in self.holders.values() if not waiter.has_own_lease()]
        return {account.card.uuid for waiter in holding for account in waiter.candidates}

    def next_placeable(self) -> tuple[Waiter, CardAccount] | None:
        """The first waiter that can be placed without passing one that holds it back, and its card."""
        blocked: set[str] = set()
        for waiter in self._waiters.values():
            allowed = [account for account in waiter.candidates if account.card.uuid not in blocked]
            acquire = waiter.acquire
            account = placement.choose(allowed, acquire.size_bytes, acquire.exclusivity, acquire.contexts)
            if account is not None:
                return waiter, account
            if acquire.request in self.holders and not waiter.has_own_lease():
                blocked.update(account.card.uuid for account in allowed)
        return None
