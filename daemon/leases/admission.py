"""Admission: the checks of an acquire, its placement and the queue; and the drain of a node."""

from dataclasses import replace
from typing import Final

from gpulease.daemon.leases import denials
from gpulease.daemon.leases import devices as placement
from gpulease.daemon.leases.acquire_steps import AcquireStep, Checked
from gpulease.daemon.leases.denials import Denial
from gpulease.daemon.leases.devices import CardAccount
from gpulease.daemon.leases.events import (
    AcquireRequested,
    ArmTimer,
    Denied,
    DrainCancelled,
    DrainRequested,
    DrainSet,
    DrainTimerFired,
    Effect,
    HoldTimerFired,
    TenantRulesChanged,
    WaitTimerFired,
    Warned,
)
from gpulease.daemon.leases.model import Cause, Lease, LeaseState, RegionState
from gpulease.daemon.leases.quotas import check_ttl, phase_of, region_phase_of
from gpulease.daemon.leases.table_state import LeaseStore, Waiter
from gpulease.daemon.leases.teardown import Teardown
from gpulease.daemon.leases.warm_pool import WarmPool
from gpulease.protocol.counts import counted
from gpulease.protocol.sizes import size_text
from gpulease.protocol.time_units import NS_PER_MS, NS_PER_S

MAX_LEASE_ID = (1 << 128) - 1


class Admission:
    """Places acquires or queues them. Each method appends the effects to execute to `out`."""

    def __init__(self, store: LeaseStore, pool: WarmPool) -> None:
        self._store = store
        self._pool = pool

    def on_rules_changed(self, event: TenantRulesChanged, now_ns: int, out: list[Effect]) -> None:
        """Apply new bounds to future requests; tenants keep the leases and places in the queue they have."""
        store = self._store
        store.under_earlier_rules = {*store.live_by_tenant, *(waiter.acquire.tenant for waiter in store.queue)}
        store.limits = replace(store.limits, tenants=event.rules)
        store.renamed |= event.renamed
        self._pool.drop_renamed(now_ns, out)

    def acquire(self, event: AcquireRequested, now_ns: int, out: list[Effect]) -> None:
        """Check the request; then place it, queue it, or refuse it."""
        denial = self._check_rate(event, now_ns) or self._store.drain_denial(now_ns)
        denial = denial or self._check_request(event) or self._check_claim(event, now_ns) or self._check_counts(event)
        if denial is not None:
            out.append(Denied(event.request, denial))
            return
        selected = placement.select(self._store.accounts, event.selector)
        usable = self._usable(selected, event.tenant)
        suitable = [account for account in usable if placement.suits(account, event.terms.exclusivity)]
        candidates = tuple(a for a in suitable if placement.could_ever_hold(a, event.terms))
        denial = self._check_devices(event, selected, usable)
        denial = denial or self._check_cards(event, usable or selected, suitable, candidates)
        if denial is not None:
            out.append(Denied(event.request, denial))
            return
        if event.step is AcquireStep.CHECK:
            out.append(Checked(event.request))
            return
        if self._store.queue.end_holds(now_ns):
            # The timer is late, but waiters still come before a newcomer.
            self.serve_queue(now_ns, out)
        held = self._store.queue.held_cards()
        allowed = [account for account in candidates if account.card.uuid not in held]
        account = placement.choose(allowed, event.terms, self._store.order)
        if account is not None:
            self._place(event, account, now_ns, out)
        elif event.wait_ms == 0:
            out.append(Denied(event.request, self._no_room(event, candidates)))
        else:
            self._enqueue(event, candidates, now_ns, out)

    def serve_queue(self, now_ns: int, out: list[Effect]) -> None:
        """Place every waiter that fits and is not held back; refuse those past their time."""
        self._store.queue.end_holds(now_ns)
        while (found := self._store.queue.next_placeable()) is not None:
            waiter, account = found
            self._store.queue.leave(waiter)
            if now_ns >= waiter.due_ns:
                out.append(Denied(waiter.acquire.request, self._waited_in_vain(waiter, now_ns)))
            else:
                self._place(waiter.acquire, account, now_ns, out)
        self._store.has_freed_room = False

    def on_wait_timer(self, request: int, now_ns: int, out: list[Effect]) -> None:
        """Refuse a waiter whose time is over."""
        waiter = self._store.queue.get(request)
        if waiter is None:
            return
        if now_ns < waiter.due_ns:
            out.append(ArmTimer(WaitTimerFired(request), waiter.due_ns))
            return
        self.drop(waiter)
        out.append(Denied(request, self._waited_in_vain(waiter, now_ns)))

    def on_hold_timer(self, now_ns: int, out: list[Effect]) -> None:
        """Serve the waiters that were held back for long enough."""
        if self._store.queue.end_holds(now_ns):
            self.serve_queue(now_ns, out)
        due_ns = self._store.queue.next_hold_end_ns()
        if due_ns is not None:
            out.append(ArmTimer(HoldTimerFired(), due_ns))

    def drop(self, waiter: Waiter) -> None:
        """Take a waiter out of the queue, so that those behind it may go on."""
        self._store.queue.leave(waiter)
        self._store.has_freed_room = True

    def close_queue(self, denial: Denial, out: list[Effect]) -> None:
        """Refuse every waiter."""
        for waiter in self._store.queue:
            self._store.queue.leave(waiter)
            out.append(Denied(waiter.acquire.request, denial))

    def _place(self, event: AcquireRequested, account: CardAccount, now_ns: int, out: list[Effect]) -> None:
        orphan_ms = event.terms.orphan_ms
        if orphan_ms is None:
            orphan_ms = self._store.limits.orphan_s * 1000
        lease = Lease(
            lease_id=event.lease_id,
            tenant=event.tenant,
            card_uuid=account.card.uuid,
            terms=replace(event.terms, orphan_ms=orphan_ms),
            charge_bytes=account.charge_bytes(event.terms),
            request=event.request,
            created_ns=now_ns,
            spawn_due_ns=now_ns + self._store.limits.spawn_timeout_s * NS_PER_S,
            max_story_entries=self._store.limits.max_story_entries,
        )
        self._store.open(lease)
        self._pool.place(lease, now_ns, out)

    def _enqueue(
        self, event: AcquireRequested, candidates: tuple[CardAccount, ...], now_ns: int, out: list[Effect]
    ) -> None:
        denial = self._check_queue(event)
        if denial is not None:
            out.append(Denied(event.request, denial))
            return
        queue = self._store.queue
        armed_ns = queue.next_hold_end_ns()
        holds_until_ns = queue.terms.end_for(event.tenant, now_ns)
        waiter = Waiter(event, candidates, now_ns, now_ns + event.wait_ms * NS_PER_MS, holds_until_ns)
        queue.join(waiter)
        out.append(ArmTimer(WaitTimerFired(event.request), waiter.due_ns))
        # One timer serves all waiters; it is due when the first hold ends, or earlier.
        hold_end_ns = queue.next_hold_end_ns()
        if hold_end_ns is not None and (armed_ns is None or hold_end_ns < armed_ns):
            out.append(ArmTimer(HoldTimerFired(), hold_end_ns))

    def _check_rate(self, event: AcquireRequested, now_ns: int) -> Denial | None:
        if event.step is AcquireStep.PLACE:
            return None
        return self._store.rates.denial(event.tenant, self._store.limits.tenants.of(event.tenant), now_ns)

    def _check_request(self, event: AcquireRequested) -> Denial | None:
        if self._store.is_shutting_down:
            return denials.shutting_down()
        if not 0 < event.lease_id <= MAX_LEASE_ID or self._store.is_used(event.lease_id):
            return denials.id_used(event.lease_id)
        if event.terms.size_bytes < self._store.limits.min_size_bytes:
            return denials.invalid(
                f"The smallest lease is {size_text(self._store.limits.min_size_bytes)}, not {event.terms.size_bytes} "
                "bytes.",
                "Ask for the bytes you need.",
            )
        if not 0 <= event.terms.submit_bytes < event.terms.size_bytes:
            return denials.invalid(
                f"Of the lease's {event.terms.size_bytes} bytes, {event.terms.submit_bytes} can't be kept for submits.",
                "Leave the session some: ask for more in all, or keep less.",
            )
        if event.wait_ms < 0:
            return denials.invalid(f"A request can't wait for {event.wait_ms} ms.", "Ask for a wait of 0 ms or more.")
        if event.wait_ms > self._store.limits.max_wait_s * 1000:
            return denials.over_limit(
                "max_wait_s",
                f"A wait of {denials.duration_text(event.wait_ms)} was requested, but this node allows at most "
                f"{self._store.limits.max_wait_s} s",
                "Wait for less, and ask again.",
            )
        return check_ttl(event.terms.ttl_ms, self._store.limits, event.tenant)

    def _check_claim(self, event: AcquireRequested, now_ns: int) -> Denial | None:
        """Return the denial for a claim that can't be served; None if it can, or without a claim."""
        name, epoch = event.terms.name, event.terms.epoch
        if event.step is AcquireStep.CHECK:
            return None
        if event.terms.is_claimed and self._store.is_isolated(now_ns):
            return denials.isolated(denials.NO_HORIZON)
        if not name:
            return None
        if (holder := self._store.claimed.get(name)) is not None:
            return denials.name_taken(name, holder.lease_id if holder.tenant == event.tenant else None)
        if (waiting := self._store.queue.named(name)) is not None:
            is_own = waiting.acquire.tenant == event.tenant
            return denials.name_taken(name, waiting.acquire.lease_id if is_own else None)
        if (highest := self._store.epochs.of(name)) >= epoch:
            return denials.old_epoch(name, epoch, highest)
        self._store.epochs.note(name, epoch)
        return None

    def _check_counts(self, event: AcquireRequested) -> Denial | None:
        # Waiters count as placed, so that placing them later can't go over a limit.
        store, limits = self._store, self._store.limits
        if len(store.live) + len(store.queue) >= limits.max_leases:
            return denials.over_limit(
                "max_leases",
                f"This node has or awaits {counted(limits.max_leases, 'lease')}, as many as it may have",
                "Try again when some have ended, or on another node.",
            )
        mine = store.live_by_tenant.get(event.tenant, 0) + store.queue.count_of(event.tenant)
        if mine >= limits.max_leases_of(event.tenant):
            is_own = limits.tenants.of(event.tenant).max_leases is not None
            return denials.over_limit(
                f"max_leases of tenant {event.tenant!r}" if is_own else "max_leases_per_tenant",
                f"Tenant {event.tenant!r} has or awaits {counted(mine, 'lease')}, as many as one tenant may have here",
                "Free a lease you no longer need.",
            )
        return self._check_bytes(event)

    def _check_bytes(self, event: AcquireRequested) -> Denial | None:
        return self._store.check_bytes(event.tenant, event.terms.size_bytes)

    def _usable(self, selected: tuple[CardAccount, ...], tenant: str) -> tuple[CardAccount, ...]:
        """Return those of the cards that the tenant may use."""
        devices = self._store.limits.tenants.of(tenant).devices
        if devices is None:
            return selected
        return tuple(a for a in selected if any(a.card.answers_to(device) for device in devices))

    def _check_devices(
        self, event: AcquireRequested, selected: tuple[CardAccount, ...], usable: tuple[CardAccount, ...]
    ) -> Denial | None:
        if usable or not selected:
            return None
        return denials.over_tenant_limit(
            event.tenant,
            "devices",
            "This tenant may use none of the requested cards",
            "Leave the choice of the card to the daemon, or ask the operator.",
        )

    def _check_queue(self, event: AcquireRequested) -> Denial | None:
        limits = self._store.limits
        if len(self._store.queue) >= limits.max_waiting:
            waiting = counted(limits.max_waiting, "request waits", "requests wait")
            return denials.over_limit(
                "max_waiting",
                f"There is no room now, and {waiting} already, as many as may",
                "Try again later, or on another node.",
            )
        if self._store.queue.count_of(event.tenant) >= limits.max_waiting_per_tenant:
            waiting = counted(limits.max_waiting_per_tenant, "request")
            return denials.over_limit(
                "max_waiting_per_tenant",
                f"There is no room now, and tenant {event.tenant!r} already has {waiting} in the queue, as many as "
                "one tenant may have",
                "Wait for one of them to be answered.",
            )
        return None

    def _check_cards(
        self,
        event: AcquireRequested,
        selected: tuple[CardAccount, ...],
        suitable: list[CardAccount],
        candidates: tuple[CardAccount, ...],
    ) -> Denial | None:
        if event.selector is not None and not selected:
            return denials.unknown_card(event.selector, [account.card for account in self._store.accounts])
        if selected and not suitable:
            return denials.no_partition()
        if not candidates:
            largest = placement.largest_slice_bytes(suitable, event.terms.contexts)
            available = placement.available_bytes(suitable, event.terms.contexts)
            return denials.never_fits(event.terms.size_bytes, largest, available)
        return None

    def _no_room(self, event: AcquireRequested, candidates: tuple[CardAccount, ...], waited_ms: int = 0) -> Denial:
        available = placement.available_bytes(candidates, event.terms.contexts)
        if any(placement.fits_now(account, event.terms) for account in candidates):
            why = "earlier requests wait for the same cards"
        elif available >= event.terms.size_bytes:
            why = "no card is without other leases"
        elif all(account.exclusive_leases for account in candidates):
            why = "other leases have the cards to themselves"
        else:
            why = "other leases hold the memory"
        largest = placement.largest_slice_bytes(candidates, event.terms.contexts)
        return denials.no_room(event.terms.size_bytes, largest, available, why=why, waited_ms=waited_ms)

    def _waited_in_vain(self, waiter: Waiter, now_ns: int) -> Denial:
        waited_ms = max(1, (now_ns - waiter.since_ns) // NS_PER_MS)
        return self._no_room(waiter.acquire, waiter.candidates, waited_ms)


REASON: Final = "the node is drained"


class Drain:
    """Drains a node: admits nobody, warns the tenants, and ends the leases left at a deadline.

    1. From the request on, no lease is granted. Acquires are refused, queued ones and those whose worker still starts
       included. The pool's contexts are dropped.
    2. Every active lease is told how long it can last. A renewal is allowed up to that deadline and no further.
    3. At the deadline every lease left ends, DRAINED. The node stays drained until an operator lets tenants in again,
       also for a table restored from this one.
    4. A second request moves the deadline, sooner or later. A cancelled drain has cost no lease any time.

    Each method appends the effects to execute to `out`.
    """

    def __init__(self, store: LeaseStore, teardown: Teardown, admission: Admission) -> None:
        self._store = store
        self._teardown = teardown
        self._admission = admission

    def on_requested(self, event: DrainRequested, now_ns: int, out: list[Effect]) -> None:
        """Begin a drain, or move its deadline."""
        self._store.drain_ns = now_ns + max(0, event.within_ms) * NS_PER_MS
        self._admission.close_queue(denials.draining(self._store.drain_ns - now_ns), out)
        for lease in self._store.live.values():
            if lease.state is LeaseState.PENDING:
                self._teardown.begin(lease, Cause.DRAINED, REASON, now_ns, out)
        self._set(event.request, now_ns, out)
        self.on_timer(now_ns, out)

    def on_cancelled(self, event: DrainCancelled, now_ns: int, out: list[Effect]) -> None:
        """Let tenants in again; without a drain nothing changes."""
        self._store.drain_ns = None
        self._set(event.request, now_ns, out)

    def on_timer(self, now_ns: int, out: list[Effect]) -> None:
        """End the leases left, if the deadline has come."""
        if self._store.drain_ns is None:
            return
        if now_ns < self._store.drain_ns:
            out.append(ArmTimer(DrainTimerFired(), self._store.drain_ns))
            return
        for lease in self._store.live.values():
            if lease.state is LeaseState.ACTIVE:
                self._teardown.begin(lease, Cause.DRAINED, REASON, now_ns, out)

    def _set(self, request: int, now_ns: int, out: list[Effect]) -> None:
        active = [lease for lease in self._store.live.values() if lease.state is LeaseState.ACTIVE]
        out.append(DrainSet(request, self._store.drain_ns, len(active)))
        for lease in active:
            phase = phase_of(lease, self._store.drain_ns, now_ns)
            out.append(Warned(lease.lease_id, phase.phase, phase.left_ms(now_ns)))
        for region in self._store.regions.values():
            if region.state is RegionState.ACTIVE:
                phase = region_phase_of(region, self._store.live[region.lease_id], self._store.drain_ns, now_ns)
                out.append(Warned(region.region_id, phase.phase, phase.left_ms(now_ns)))
