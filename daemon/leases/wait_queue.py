"""The queue of the acquires and parked sessions that wait for room.

After each released lease the queue is searched for the first waiter that can be placed. The waiters are indexed by the
properties that decide where they fit, so that the cost of a search that finds none does not grow with their number.
"""

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple

from gpulease.daemon.leases import devices
from gpulease.daemon.leases.devices import CardAccount, PlacementOrder
from gpulease.daemon.leases.events import AcquireRequested
from gpulease.daemon.leases.model import Lease, LeaseTerms
from gpulease.daemon.leases.quotas import CoreLimits
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.opcodes import Exclusivity
from gpulease.protocol.time_units import NS_PER_S


@dataclass(frozen=True, slots=True)
class WaiterSnapshot:
    """A queued acquire, for reports; times are monotonic nanoseconds."""

    request: int
    lease_id: int
    tenant: str
    size_bytes: int
    exclusivity: Exclusivity
    since_ns: int
    due_ns: int


class HoldGroup(NamedTuple):
    """The properties that decide which cards a waiter holds: all waiters of a group hold the same cards, or none."""

    tenant: str
    candidates: tuple[CardAccount, ...]
    is_returning: bool

    def open_candidates(self) -> Sequence[CardAccount]:
        """Return the cards that may serve it now: an acquire waits for no drained card, until that drain is ended."""
        if self.is_returning:
            return self.candidates
        return [account for account in self.candidates if account.drain_ns is None]

    def has_own_lease(self) -> bool:
        """Return whether its tenant has a live lease on a card that could serve it."""
        # A lease that waits to return does not count: ending it would defeat its wait.
        least = 2 if self.is_returning else 1
        # Not `any`, because a generator would take twice as long, and newcomers cause a call for every waiting tenant.
        for account in self.candidates:
            if self.tenant in account.leases_by_tenant and account.leases_by_tenant[self.tenant] >= least:
                return True
        return False


@dataclass(frozen=True, slots=True)
class Waiter:
    """An acquire in the queue, or a parked session that must return.

    Attributes:
        candidates: Cards that could ever serve it.
        since_ns: Time of joining.
        due_ns: Time at which it is refused.
        holds_until_ns: Time until which it may hold others back; not later than `since_ns` if it may not.
        returning: The parked lease, if its session waits to return; None for an acquire. Its `acquire` is synthetic:
            its request number is negative, and it is never answered.
    """

    acquire: AcquireRequested
    candidates: tuple[CardAccount, ...]
    since_ns: int
    due_ns: int
    holds_until_ns: int
    returning: Lease | None = None

    @property
    def group(self) -> HoldGroup:
        return HoldGroup(self.acquire.tenant, self.candidates, self.returning is not None)

    def open_candidates(self) -> Sequence[CardAccount]:
        """Return the cards that may serve it now."""
        return self.group.open_candidates()

    def needed_bytes(self, account: CardAccount) -> int:
        """Return the bytes of a card that it waits for."""
        if self.returning is not None and self.returning.park is not None:
            return self.returning.park.off_bytes
        return account.charge_bytes(self.acquire.terms)

    def choose(self, allowed: Sequence[CardAccount], order: PlacementOrder) -> CardAccount | None:
        """Return the best of the allowed cards that has room for it now; None if none has."""
        if self.returning is None:
            return devices.choose(allowed, self.acquire.terms, order)
        # A parked lease returns to its own card, on which it counts already.
        return next((account for account in allowed if self.needed_bytes(account) <= account.free_bytes), None)

    def fits(self, allowed: Sequence[CardAccount]) -> bool:
        """Return whether any of the allowed cards has room for it now."""
        return self.choose(allowed, PlacementOrder.PACK) is not None

    def snapshot(self) -> WaiterSnapshot:
        """Return the waiter without the accounts of its cards."""
        acquire = self.acquire
        return WaiterSnapshot(
            acquire.request,
            acquire.lease_id,
            acquire.tenant,
            acquire.terms.size_bytes,
            acquire.terms.exclusivity,
            self.since_ns,
            self.due_ns,
        )


class WaiterShape(NamedTuple):
    """The properties, besides the size, that decide where a waiter fits.

    Of two acquires of one shape, the smaller one fits wherever the larger one does.
    """

    candidates: tuple[CardAccount, ...]
    is_returning: bool
    exclusivity: Exclusivity
    contexts: int
    is_parkable: bool


def shape_of(waiter: Waiter) -> WaiterShape:
    terms = waiter.acquire.terms
    is_returning = waiter.returning is not None
    return WaiterShape(waiter.candidates, is_returning, terms.exclusivity, terms.contexts, terms.is_parkable)


class QueuePlace(NamedTuple):
    """Where a waiter is in the queue: its number in the order of joining, and the indexes that have it."""

    number: int
    shape: WaiterShape
    group: HoldGroup


class WaitersOfShape:
    """The waiters of one shape, by size and in the order of their joining."""

    def __init__(self, shape: WaiterShape) -> None:
        self._shape = shape
        # The sizes in ascending order, and the waiters of each. An `OrderedDict`, unlike a dict, finds its first entry
        # at once although earlier ones were removed.
        self._sizes: list[int] = []
        self._by_size: dict[int, OrderedDict[int, Waiter]] = {}

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def add(self, number: int, waiter: Waiter) -> None:
        size_bytes = waiter.acquire.terms.size_bytes
        if size_bytes not in self._by_size:
            insort(self._sizes, size_bytes)
            self._by_size[size_bytes] = OrderedDict()
        self._by_size[size_bytes][number] = waiter

    def remove(self, number: int, waiter: Waiter) -> None:
        size_bytes = waiter.acquire.terms.size_bytes
        del self._by_size[size_bytes][number]
        if not self._by_size[size_bytes]:
            del self._by_size[size_bytes]
            del self._sizes[bisect_left(self._sizes, size_bytes)]

    def first_fitting(self, blocked: Collection[str]) -> tuple[int, Waiter] | None:
        """Return the first waiter that fits on a card that is not blocked, with its number; None if none fits."""
        allowed = self._shape.candidates
        if blocked:
            allowed = tuple(account for account in allowed if account.card.uuid not in blocked)
        if self._shape.is_returning:
            # How many bytes a parked session needs does not depend on its lease's size alone, so compare each.
            waiters = [entry for waiters in self._by_size.values() for entry in waiters.items()]
            return min(((number, one) for number, one in waiters if one.fits(allowed)), default=None)
        # All sizes up to the largest one that fits on any card fit. Usually not even the smallest one does.
        sizes, fitting = self._sizes, 0
        for account in allowed:
            if fitting == len(sizes):
                break
            if devices.fits_now(account, self._terms_of(sizes[fitting])):
                fitting = self._count_fitting(account, fitting + 1)
        return min((next(iter(self._by_size[size_bytes].items())) for size_bytes in sizes[:fitting]), default=None)

    def _count_fitting(self, account: CardAccount, known: int) -> int:
        """Return how many sizes fit on a card, of which the `known` smallest ones do."""
        return bisect_left(
            self._sizes, True, known, key=lambda size_bytes: not devices.fits_now(account, self._terms_of(size_bytes))
        )

    def _terms_of(self, size_bytes: int) -> LeaseTerms:
        return next(iter(self._by_size[size_bytes].values())).acquire.terms


class WaitQueue:
    """The acquires and parked sessions that wait for room: first come, first served, per card, within limits.

    A waiter that can't be placed holds others back: later waiters and newcomers are kept off every card that could
    serve it, so that a stream of small requests can't starve a large one. Waiters for other cards may pass. A waiter
    holds others back

    - only until the end of its tenant's backfill reservation (`HoldTerms`), so never for longer than `max_hold_back_s`;
    - not while its own tenant has a live lease on one of those cards, because the tenant could end that lease.

    After that, others pass it whenever they fit, and it keeps its place in the queue.

    Attributes:
        terms: Each tenant's time to hold others back.
        holders: Waiters that may still hold others back, by request.
        order: The order in which waiters prefer cards.
    """

    def __init__(self, limits: CoreLimits, order: PlacementOrder) -> None:
        self.terms = HoldTerms(limits)
        self.holders: dict[int, Waiter] = {}
        self._waiters: dict[int, Waiter] = {}
        self._lease_ids: set[int] = set()
        self._by_tenant: Counter[str] = Counter()
        self._bytes_by_tenant: Counter[str] = Counter()
        self._named: dict[str, Waiter] = {}
        self.order = order
        # Indexes of the waiters: their places by request, those of each shape, and the number of holders in each group.
        self._last_number = 0
        self._places: dict[int, QueuePlace] = {}
        self._shapes: dict[WaiterShape, WaitersOfShape] = {}
        self._groups: Counter[HoldGroup] = Counter()
        # The ends of all holds, in ascending order.
        self._hold_ends_ns: list[int] = []

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(tuple(self._waiters.values()))

    def get(self, request: int) -> Waiter | None:
        return self._waiters.get(request)

    def named(self, name: str) -> Waiter | None:
        """Return the waiter that asks for a lease with that name."""
        return self._named.get(name)

    def has_lease_id(self, lease_id: int) -> bool:
        """Return whether a waiter has reserved that id for its lease."""
        return lease_id in self._lease_ids

    def count_of(self, tenant: str) -> int:
        """Return the number of the tenant's acquires in the queue."""
        return self._by_tenant.get(tenant, 0)

    def acquires(self) -> int:
        """Return the number of acquires in the queue, without the sessions that are to return."""
        return len(self._lease_ids)

    def bytes_of(self, tenant: str) -> int:
        """Return the sum of bytes that the tenant's queued acquires ask for."""
        # The bytes of a session that is to return count with its lease.
        return self._bytes_by_tenant.get(tenant, 0)

    def join(self, waiter: Waiter) -> None:
        acquire = waiter.acquire
        self._waiters[acquire.request] = waiter
        # Reserve the id: until the waiter leaves the queue, no other acquire may use it.
        if waiter.returning is None:
            self._lease_ids.add(acquire.lease_id)
            self._by_tenant[acquire.tenant] += 1
            self._bytes_by_tenant[acquire.tenant] += acquire.terms.size_bytes
            if acquire.terms.name:
                self._named[acquire.terms.name] = waiter
        self._last_number += 1
        place = self._places[acquire.request] = QueuePlace(self._last_number, shape_of(waiter), waiter.group)
        if place.shape not in self._shapes:
            self._shapes[place.shape] = WaitersOfShape(place.shape)
        self._shapes[place.shape].add(place.number, waiter)
        # Only a waiter within a term of its tenant may hold others back.
        if waiter.holds_until_ns > waiter.since_ns:
            self.holders[acquire.request] = waiter
            self._groups[place.group] += 1
            insort(self._hold_ends_ns, waiter.holds_until_ns)

    def leave(self, waiter: Waiter) -> None:
        """Remove a waiter that was placed, refused or abandoned. It no longer holds others back."""
        acquire = waiter.acquire
        self._end_hold(acquire.request)
        del self._waiters[acquire.request]
        place = self._places.pop(acquire.request)
        self._shapes[place.shape].remove(place.number, waiter)
        if not self._shapes[place.shape]:
            del self._shapes[place.shape]
        if waiter.returning is not None:
            return
        self._lease_ids.remove(acquire.lease_id)
        self._by_tenant[acquire.tenant] -= 1
        self._bytes_by_tenant[acquire.tenant] -= acquire.terms.size_bytes
        if not self._by_tenant[acquire.tenant]:
            del self._by_tenant[acquire.tenant]
            del self._bytes_by_tenant[acquire.tenant]
        if acquire.terms.name:
            del self._named[acquire.terms.name]

    def _end_hold(self, request: int) -> None:
        """End the hold of a waiter on others, if it has one."""
        waiter = self.holders.pop(request, None)
        if waiter is None:
            return
        del self._hold_ends_ns[bisect_left(self._hold_ends_ns, waiter.holds_until_ns)]
        group = self._places[request].group
        self._groups[group] -= 1
        if not self._groups[group]:
            del self._groups[group]

    def end_holds(self, now_ns: int) -> bool:
        """End the holds that are due at `now_ns`; return whether any were."""
        if not self._hold_ends_ns or self._hold_ends_ns[0] > now_ns:
            return False
        # These waiters stay in the queue, but may no longer hold others back.
        for request in [request for request, waiter in self.holders.items() if waiter.holds_until_ns <= now_ns]:
            self._end_hold(request)
        return True

    def next_hold_end_ns(self) -> int | None:
        """Return the time at which the next hold ends; None if there is none."""
        return self._hold_ends_ns[0] if self._hold_ends_ns else None

    def held_cards(self) -> set[str]:
        """Return the uuids of the cards that newcomers may not use, because a waiter holds them."""
        held: set[str] = set()
        for group in self._groups:
            # A tenant with a lease there can make room itself by ending that lease.
            if not group.has_own_lease():
                held.update(account.card.uuid for account in group.open_candidates())
        return held

    def next_placeable(self) -> tuple[Waiter, CardAccount] | None:
        """Return the first waiter that can be placed without passing one that holds it back, and its card."""
        # Step 1: find the first waiter that fits, as if nobody held others back. Usually there is none.
        blocked: set[str] = set()
        first = self._first_fitting(blocked)
        if first is None:
            return None
        # Step 2: all holders before it found no room, so they block their cards for it and for all after it. With fewer
        # cards, the first waiter that fits is another one, further back.
        seen: set[HoldGroup] = set()
        for request in self.holders:
            number, _, group = self._places[request]
            if number >= first[0] or len(seen) == len(self._groups):
                break
            if group in seen:
                continue
            seen.add(group)
            cards = {account.card.uuid for account in group.open_candidates()} - blocked
            if cards and not group.has_own_lease():
                blocked |= cards
                first = self._first_fitting(blocked)
                if first is None:
                    return None
        # Step 3: choose its card.
        waiter = first[1]
        allowed = [account for account in waiter.open_candidates() if account.card.uuid not in blocked]
        account = waiter.choose(allowed, self.order)
        return None if account is None else (waiter, account)

    def _first_fitting(self, blocked: Collection[str]) -> tuple[int, Waiter] | None:
        """Return the first waiter that fits on a card that is not blocked, with its number; None if none fits."""
        fitting = [waiters.first_fitting(blocked) for waiters in self._shapes.values()]
        return min(filter(None, fitting), default=None)


TERM_SPACING: Final = 10
"""Minimum time between the beginnings of two terms of a tenant, as a multiple of a term's length."""


class HoldTerms:
    """The last term of each tenant.

    A term is a backfill reservation, during which the tenant's waiters may hold others back.

    A term begins when an acquire of the tenant joins the queue. The term lasts `max_hold_back_s` by the clock, whatever
    happens to that acquire. Acquires that join during the term may hold others back until its end; later ones may not.
    An acquire that joins `TERM_SPACING` lengths after the beginning, or later, begins the next term. Because time
    counts per tenant, leaving the queue and joining again gains nothing.

    In any window of `TERM_SPACING` lengths H, a tenant holds others back for at most one H. A window that begins x into
    a term (x < H) contains H - x of that term and at most x of the next. Any other window overlaps at most one term.

    One time is stored for each tenant, until its next term may begin, and at most `max_waiting` times in total. Tenants
    beyond that number can't hold others back. Terms are stored in the order in which they began, so outdated ones come
    first.
    """

    def __init__(self, limits: CoreLimits) -> None:
        self.length_ns = limits.max_hold_back_s * NS_PER_S
        self.max_terms = limits.max_waiting
        self.begun_ns: dict[str, int] = {}

    def end_for(self, tenant: str, now_ns: int) -> int:
        """Return until when an acquire that joins now may hold others back; not later than `now_ns` if it may not."""
        self._forget(now_ns)
        # A running term is not extended; a new one begins only after its spacing.
        begun_ns = self.begun_ns.get(tenant)
        if begun_ns is None:
            # The table of terms is full: the acquire waits without holding others back.
            if len(self.begun_ns) >= self.max_terms:
                return now_ns
            begun_ns = self.begun_ns[tenant] = now_ns
        return begun_ns + self.length_ns

    def _forget(self, now_ns: int) -> None:
        while self.begun_ns:
            # The oldest term comes first, so the search stops at the first that still counts.
            tenant, begun_ns = next(iter(self.begun_ns.items()))
            if now_ns < begun_ns + TERM_SPACING * self.length_ns:
                return
            del self.begun_ns[tenant]
