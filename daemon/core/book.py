"""The book of the node: live leases, ended ones, and the sums kept over them.

Everything here is constant time per change; `invariants.validate` recomputes it all.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable

from gpulease.daemon.core.cards import Card, CardAccount
from gpulease.daemon.core.leases import Lease, LeaseSnapshot, LeaseState, Trigger
from gpulease.daemon.core.limits import CoreLimits
from gpulease.daemon.core.recycling import Recycling
from gpulease.daemon.core.revoked import RevokedIds
from gpulease.daemon.core.submit import Submit, SubmitState
from gpulease.daemon.core.tenants import AcquireRates
from gpulease.daemon.core.waiting import WaitingLine
from gpulease.daemon.core.warm import WarmContext


class Book:
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
        self.line = WaitingLine(limits)
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
        has_place = account.gives_way(lease.tenant, self.recycling.max_idle) is not None
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
        return is_known or lease_id in self.cleared or self.line.has_lease_id(lease_id)

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
        self.bytes_by_tenant[lease.tenant] -= lease.size_bytes
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
        self.bytes_by_tenant[lease.tenant] += lease.size_bytes
