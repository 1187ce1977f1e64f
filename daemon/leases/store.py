"""The line of acquires that wait for room: first come, first served, per card, within limits.

A waiter that can't be placed holds others back: all behind it, and newcomers, are kept off every card that could
serve it, so that a stream of small requests can't starve a large one; whoever wants other cards may pass. It does so

- only until the end of its tenant's term (see `holding`), so never for longer than `max_hold_back_s`;
- not while its own tenant has a live lease on one of those cards: it could help itself by ending that.

After that others pass it whenever they fit, and it keeps its place in line for when it fits itself.

The ids of leases that ended by revocation: known for ever, so that one is never "not found".

The store of the node: live leases, ended ones, and the sums kept over them.

Everything here is constant time per change; `invariants.validate` recomputes it all.
"""

from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from gpulease.daemon.leases import devices
from gpulease.daemon.leases.devices import Card, CardAccount
from gpulease.daemon.leases.events import AcquireRequested
from gpulease.daemon.leases.model import (
    NS_PER_S,
    Lease,
    LeaseSnapshot,
    LeaseState,
    Recycling,
    Submit,
    SubmitState,
    Trigger,
    WarmContext,
)
from gpulease.daemon.leases.rules import AcquireRates, CoreLimits
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
            acquire.terms.size_bytes,
            acquire.terms.exclusivity,
            self.since_ns,
            self.due_ns,
        )


TERM_SPACING: Final = 10
"""From the beginning of a tenant's term to that of its next, in lengths of a term."""


class HoldTerms:
    """The last term of each tenant.

    A tenant's term begins when an acquire of it joins the line, and lasts for `max_hold_back_s` by the clock,
    whatever becomes of that acquire. Those that join during the term may hold others back until its end; those that
    join later may not at all. An acquire that joins `TERM_SPACING` lengths after the beginning, or later, begins the
    next term. So the time is counted per tenant, and to leave the line and queue again gains nothing.

    In any window of `TERM_SPACING` lengths H, the tenant holds others back for at most one: a window that begins x
    into a term (x < H) has H - x left of it and at most x of the next, and any other meets at most one term.

    Kept is one time per tenant, until its next term may begin, and never more than `max_waiting` of them: a tenant
    that finds no room holds nobody back. The terms lie in the order they began, so the outdated ones are in front.
    """

    def __init__(self, limits: CoreLimits) -> None:
        self.length_ns = limits.max_hold_back_s * NS_PER_S
        self.max_terms = limits.max_waiting
        self.begun_ns: dict[str, int] = {}

    def end_for(self, tenant: str, now_ns: int) -> int:
        """Until when an acquire that joins the line now may hold others back; not after `now_ns` if it may not."""
        self._forget(now_ns)
        begun_ns = self.begun_ns.get(tenant)
        if begun_ns is None:
            if len(self.begun_ns) >= self.max_terms:
                return now_ns
            begun_ns = self.begun_ns[tenant] = now_ns
        return begun_ns + self.length_ns

    def _forget(self, now_ns: int) -> None:
        while self.begun_ns:
            tenant, begun_ns = next(iter(self.begun_ns.items()))
            if now_ns < begun_ns + TERM_SPACING * self.length_ns:
                return
            del self.begun_ns[tenant]


class WaitQueue:
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
        return sum(waiter.acquire.terms.size_bytes for waiter in waiters if waiter.acquire.tenant == tenant)

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
            account = devices.choose(allowed, acquire.terms)
            if account is not None:
                return waiter, account
            if acquire.request in self.holders and not waiter.has_own_lease():
                blocked.update(account.card.uuid for account in allowed)
        return None


_MARK_MASK: Final = (1 << 64) - 1


def mark_of(lease_id: int) -> int:
    """What is remembered of an id: its low 64 bits.

    Ids are random, so an id that was never revoked is taken for one of a million that were with a chance of 5e-14; it
    could not be given out then.
    """
    return lease_id & _MARK_MASK


class RevokedIds:
    """A set of ids, at 8 bytes each: a sorted array. To add one to a million moves 8 MB, in half a millisecond.

    Args:
        marks: Of those that are in it from the start, in ascending order.

    Raises:
        ValueError: They are not.
    """

    def __init__(self, marks: Iterable[int] = ()) -> None:
        self._marks = array("Q", marks)
        if any(low >= high for low, high in pairwise(self._marks)):
            raise ValueError("The marks of revoked ids are not in ascending order.")

    def __len__(self) -> int:
        return len(self._marks)

    def __contains__(self, lease_id: int) -> bool:
        mark = mark_of(lease_id)
        place = bisect_left(self._marks, mark)
        return place < len(self._marks) and self._marks[place] == mark

    def add(self, lease_id: int) -> None:
        """Remember an id."""
        if lease_id not in self:
            mark = mark_of(lease_id)
            self._marks.insert(bisect_left(self._marks, mark), mark)


class LeaseStore:
    """What the parts of the lease table share. A lease is in `live` from its placement until it is torn down.

    Attributes:
        pending: The lease each open, placed acquire waits for.
        live_by_tenant: How many live leases each tenant has; tenants without any are absent.
        bytes_by_tenant: Of what size they are together; likewise.
        fenced: The live leases that are fenced.
        ended: The last leases torn down, oldest first.
        revoked: Every lease that was revoked, also those that are forgotten otherwise.
        cleared: Every lease whose fence an operator cleared, likewise: its memory was never proved free.
        warm: The contexts of the pool, by number.
        renamed: Tenants who may have been other people earlier: what they leave is nobody's to use again.
        recycling: Within what bounds contexts serve their tenant again; None if they never do.
        submits: Those that are not proved gone, by number.
        rates: How fast each tenant asks for contexts.
        drain_ns: When a drain ends what is left; None while the node is not drained.
        under_earlier_rules: Tenants who had or awaited something when their bounds last changed: it stays theirs.
        has_freed_room: Bytes came back, or the line got shorter, since the line was last served.
    """

    def __init__(
        self, cards: Iterable[Card], limits: CoreLimits, warm_contexts: int, recycling: Recycling | None = None
    ) -> None:
        self.limits = limits
        self.recycling = recycling
        self.accounts = tuple(CardAccount(card, warm_contexts) for card in sorted(cards, key=lambda card: card.index))
        self.account_by_uuid = {account.card.uuid: account for account in self.accounts}
        self.live: dict[int, Lease] = {}
        self.pending: dict[int, int] = {}
        self.live_by_tenant: Counter[str] = Counter()
        self.bytes_by_tenant: Counter[str] = Counter()
        self.fenced: dict[int, Lease] = {}
        self.ended: OrderedDict[int, LeaseSnapshot] = OrderedDict()
        self.revoked = RevokedIds()
        self.cleared = RevokedIds()
        self.warm: dict[int, WarmContext] = {}
        self.submits: dict[int, Submit] = {}
        self.rates = AcquireRates()
        self.queue = WaitQueue(limits)
        self.under_earlier_rules: set[str] = set()
        self.renamed: set[str] = set()
        self.has_freed_room = False
        self.is_shutting_down = False
        self.drain_ns: int | None = None
        selectors = {account.card.uuid.lower().removeprefix("gpu-") for account in self.accounts}
        indexes = {account.card.index for account in self.accounts}
        if len(selectors) < len(self.accounts) or len(indexes) < len(self.accounts):
            raise ValueError("Two cards have the same uuid or the same index.")

    def may_keep_warm(self, account: CardAccount) -> bool:
        """Whether a card may have contexts that wait for leases."""
        is_closed = self.is_shutting_down or self.drain_ns is not None
        return not (is_closed or account.exclusive_leases)

    def may_recycle(self, lease: Lease) -> bool:
        """Whether the context of a lease that its tenant gave back, and that had nothing amiss, may serve it again.

        A lease with a submit that runs, waits or is not proved gone must be torn down whole: its bytes are one.
        """
        is_whole = not (lease.submit_id or lease.next_submit is not None or lease.is_in_doubt or lease.fault)
        is_whole = is_whole and lease.tenant not in self.renamed
        if self.recycling is None or lease.is_restored or not lease.warm_id or not is_whole:
            return False
        account = self.account_by_uuid[lease.card_uuid]
        is_worn = lease.served + 1 >= self.recycling.max_leases
        has_place = account.contexts_to_drop(lease.tenant, self.recycling.max_idle) is not None
        return not is_worn and self.may_keep_warm(account) and has_place

    def get(self, lease_id: int) -> LeaseSnapshot | None:
        """The lease as it is, or as it was when it ended; None if it is unknown or forgotten."""
        lease = self.live.get(lease_id)
        return lease.snapshot() if lease is not None else self.ended.get(lease_id)

    def charge_bytes(self, number: int) -> int:
        """What one process may hold of its card: a live lease's session, a submit, a warm context; 0 if it is none."""
        lease, other = self.live.get(number), self.submits.get(number) or self.warm.get(number)
        if other is not None:
            return other.charge_bytes
        return 0 if lease is None else lease.charge_bytes - lease.submit_charge_bytes

    def card_of(self, number: int) -> str | None:
        """The card of an active lease, a submit that runs, a context that waits for its tenant; None if it is none."""
        lease, submit, context = self.live.get(number), self.submits.get(number), self.warm.get(number)
        if submit is not None:
            return submit.card_uuid if submit.state is SubmitState.RUNNING else None
        if context is not None:
            return context.card_uuid if context.waits_for_tenant else None
        return None if lease is None or lease.state is not LeaseState.ACTIVE else lease.card_uuid

    def is_used(self, lease_id: int) -> bool:
        """Whether a lease had, has or is to have this id."""
        is_known = lease_id in self.live or lease_id in self.ended or lease_id in self.revoked
        return is_known or lease_id in self.cleared or self.queue.has_lease_id(lease_id)

    def open(self, lease: Lease) -> None:
        """Enter a new lease and hold its bytes."""
        self._enter(lease)
        self.pending[lease.request] = lease.lease_id
        self.account_by_uuid[lease.card_uuid].take(lease)

    def restore(self, lease: Lease) -> None:
        """Enter a lease that was there before this table, and hold its bytes."""
        self._enter(lease)
        account = self.account_by_uuid[lease.card_uuid]
        account.restore(lease)
        if lease.state is LeaseState.FENCED:
            self.fenced[lease.lease_id] = lease
            account.fenced_bytes += lease.charge_bytes

    def leave_pending(self, lease: Lease) -> None:
        """Nobody waits for the lease's worker any more."""
        del self.pending[lease.request]
        self.account_by_uuid[lease.card_uuid].leave_pending(lease)

    def add_warm(self, context: WarmContext) -> None:
        """Enter a context in the pool and hold its bytes."""
        self.warm[context.warm_id] = context
        self.account_by_uuid[context.card_uuid].warm[context.warm_id] = context

    def remove_warm(self, context: WarmContext) -> None:
        """A lease has it now, or its bytes are proved back."""
        del self.warm[context.warm_id]
        del self.account_by_uuid[context.card_uuid].warm[context.warm_id]

    def fence(self, lease: Lease, now_ns: int) -> None:
        """Keep the bytes of a lease that could not be proved free."""
        lease.move(Trigger.RECLAIM_FAILED, now_ns)
        lease.ended_ns = now_ns
        self.fenced[lease.lease_id] = lease
        self.account_by_uuid[lease.card_uuid].fenced_bytes += lease.charge_bytes

    def close(self, lease: Lease, trigger: Trigger, now_ns: int) -> None:
        """Give a lease's bytes back and remember it as ended."""
        was_fenced = lease.state is LeaseState.FENCED
        lease.move(trigger, now_ns)
        account = self.account_by_uuid[lease.card_uuid]
        if was_fenced:
            del self.fenced[lease.lease_id]
            account.fenced_bytes -= lease.charge_bytes
        else:
            lease.ended_ns = now_ns
        account.give_back(lease)
        del self.live[lease.lease_id]
        self.live_by_tenant[lease.tenant] -= 1
        self.bytes_by_tenant[lease.tenant] -= lease.terms.size_bytes
        if not self.live_by_tenant[lease.tenant]:
            del self.live_by_tenant[lease.tenant]
            del self.bytes_by_tenant[lease.tenant]
        if lease.tenant:
            self.remember(lease.snapshot())
        self.has_freed_room = True

    def remember(self, ended: LeaseSnapshot) -> None:
        """Know of a lease that was torn down, until too many others were."""
        self.ended[ended.lease_id] = ended
        if len(self.ended) > self.limits.max_tombstones:
            self.ended.popitem(last=False)

    def _enter(self, lease: Lease) -> None:
        self.live[lease.lease_id] = lease
        self.live_by_tenant[lease.tenant] += 1
        self.bytes_by_tenant[lease.tenant] += lease.terms.size_bytes
