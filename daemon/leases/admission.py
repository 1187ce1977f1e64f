"""Admission: the checks of an acquire, its placement and the queue. Drains: emptying a node or a card by a deadline."""

from collections.abc import Sequence
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
    DrainCancelled,
    DrainRequested,
    DrainSet,
    DrainTimerFired,
    Effect,
    HoldTimerFired,
    RequestDenied,
    TenantRulesChanged,
    WaitTimerFired,
)
from gpulease.daemon.leases.model import Cause, Lease, LeaseState
from gpulease.daemon.leases.park_state import ParkState
from gpulease.daemon.leases.parking import Parking, check_parkable
from gpulease.daemon.leases.quotas import check_ttl
from gpulease.daemon.leases.table_state import LeaseStore
from gpulease.daemon.leases.teardown import Teardown
from gpulease.daemon.leases.wait_queue import Waiter
from gpulease.daemon.leases.waiting_requests import answered
from gpulease.daemon.leases.warm_pool import WarmPool
from gpulease.protocol import fast_dataclass
from gpulease.protocol.counts import counted
from gpulease.protocol.sizes import size_text
from gpulease.protocol.time_units import NS_PER_MS, NS_PER_S

MAX_LEASE_ID = (1 << 128) - 1


class Admission:
    """Places acquires or queues them. Each method appends what to execute to `effects`."""

    def __init__(self, store: LeaseStore, pool: WarmPool, parking: Parking) -> None:
        self._store = store
        self._pool = pool
        self._parking = parking

    def on_rules_changed(self, event: TenantRulesChanged, now_ns: int, effects: list[Effect]) -> None:
        """Apply new bounds to future requests. Tenants keep their leases, and queued acquires stay in the queue."""
        store = self._store
        # Limits are not retroactive: tenants keep their leases and queued acquires, so `invariants` must not report
        # these tenants for exceeding the new limits.
        store.under_earlier_rules = {*store.live_by_tenant, *(waiter.acquire.tenant for waiter in store.queue)}
        store.limits = replace(store.limits, tenants=event.rules)
        store.renamed |= event.renamed
        # A renamed tenant may be another person now, who must not get a context that has the first person's data.
        self._pool.drop_renamed(now_ns, effects)

    def acquire(self, event: AcquireRequested, now_ns: int, effects: list[Effect]) -> None:
        """Check the request, then place it, queue it or refuse it.

        Appends exactly one of `RequestDenied`, `Checked`, a placement's effects, or the queue's timer.
        """
        # Step 1: do the checks that need no card. Check the rate first, so that refused requests count against it as
        # well.
        denial = self._check_rate(event, now_ns) or self._check_node_drain(now_ns)
        denial = denial or self._check_request(event) or self._check_claim(event, now_ns) or self._check_counts(event)
        if denial is not None:
            effects.append(RequestDenied(event.request, denial))
            return
        # Step 2: narrow the cards down. `selected`: the cards that the request names. `usable`: those that its tenant
        # may use. `suitable`: those of the right kind. `candidates`: those that could hold the lease if they were
        # empty.
        selected = placement.select(self._store.accounts, event.selector)
        usable = self._usable(selected, event.tenant)
        suitable = placement.suitable(usable, event.terms.exclusivity)
        candidates = tuple([a for a in suitable if a.charge_bytes(event.terms) <= a.card.capacity_bytes])
        denial = self._check_devices(event, selected, usable)
        denial = denial or self._check_cards(event, usable or selected, suitable, candidates)
        denial = denial or self._check_drains(candidates, now_ns)
        if denial is not None:
            effects.append(RequestDenied(event.request, denial))
            return
        # Step 3: a claimed acquire stops here. The node asks the fleet for the claim, then sends PLACE.
        if event.step is AcquireStep.CHECK:
            effects.append(Checked(event.request))
            return
        # Step 4: first come, first served. Serve the waiters before this request, and exclude each card that is kept
        # for a waiter.
        if self._store.queue.end_holds(now_ns):
            # The hold timer fires late, but waiters still come before this request.
            self.serve_queue(now_ns, effects)
        allowed: Sequence[CardAccount] = candidates
        account = placement.choose(allowed, event.terms, self._store.order)
        # Whom the waiters hold back matters only if there is room, or if sessions could be parked to make some.
        if (account is not None or event.wait_ms == 0) and (held := self._store.queue.held_cards()):
            allowed = [candidate for candidate in candidates if candidate.card.uuid not in held]
            account = placement.choose(allowed, event.terms, self._store.order)
        # Step 5: place it, refuse it, or let it wait.
        if account is not None:
            self._place(event, account, now_ns, effects)
        elif event.wait_ms == 0 and not self._parking.may_make_room(tuple(allowed), event.terms, now_ns):
            effects.append(RequestDenied(event.request, self._no_room(event, candidates)))
        else:
            self._enqueue(event, candidates, now_ns, effects)

    def serve_queue(self, now_ns: int, effects: list[Effect]) -> None:
        """Place every waiter that fits and is not held back, and refuse those that have waited too long."""
        self._store.queue.end_holds(now_ns)
        # Each placement changes which cards have room, so ask the queue again for the first waiter that fits.
        while (placement := self._store.queue.next_placeable()) is not None:
            waiter, account = placement
            self._store.queue.leave(waiter)
            # The waiter's timer may be late: a client that has waited for its whole time must not get a lease.
            if waiter.returning is not None:
                self._parking.give_room(waiter.returning, now_ns, effects)
            elif now_ns >= waiter.due_ns:
                effects.append(RequestDenied(waiter.acquire.request, self._wait_denial(waiter, now_ns)))
            else:
                with answered(waiter.acquire.request, effects):
                    self._place(waiter.acquire, account, now_ns, effects)
        self._store.has_freed_room = False

    def on_wait_timer(self, request: int, now_ns: int, effects: list[Effect]) -> None:
        waiter = self._store.queue.get(request)
        if waiter is None:
            return
        # Check the timer against the table's own times, and arm an early one again.
        if now_ns < waiter.due_ns:
            effects.append(ArmTimer(WaitTimerFired(request), waiter.due_ns))
            return
        self.drop(waiter)
        if waiter.returning is not None:
            self._parking.refuse_return(waiter, now_ns, effects)
            return
        effects.append(RequestDenied(request, self._wait_denial(waiter, now_ns)))

    def on_hold_timer(self, now_ns: int, effects: list[Effect]) -> None:
        """End the holds that are due, serve the waiters that they held back, and arm the timer for the next end."""
        if self._store.queue.end_holds(now_ns):
            self.serve_queue(now_ns, effects)
        due_ns = self._store.queue.next_hold_end_ns()
        if due_ns is not None:
            effects.append(ArmTimer(HoldTimerFired(), due_ns))

    def drop(self, waiter: Waiter) -> None:
        """Remove a waiter from the queue, so that the waiters after it can be placed."""
        self._store.queue.leave(waiter)
        self._store.has_freed_room = True

    def close_queue(self, denial: Denial, effects: list[Effect]) -> None:
        # Keep the waiting sessions: they belong to leases, which may last until the drain's deadline.
        for waiter in [waiter for waiter in self._store.queue if waiter.returning is None]:
            self._store.queue.leave(waiter)
            effects.append(RequestDenied(waiter.acquire.request, denial))

    def refuse_without_card(self, denial: Denial, effects: list[Effect]) -> None:
        """Refuse the waiters that only drained cards could serve. The others stay in the queue."""
        for waiter in self._store.queue:
            if not waiter.open_candidates():
                self._store.queue.leave(waiter)
                effects.append(RequestDenied(waiter.acquire.request, denial))

    def _place(self, event: AcquireRequested, account: CardAccount, now_ns: int, effects: list[Effect]) -> None:
        orphan_ms = event.terms.orphan_ms
        # The tenant chose no bound, so the node's default applies. From now on the lease has that value.
        if orphan_ms is None:
            orphan_ms = self._store.limits.orphan_s * 1000
        lease = Lease(
            lease_id=event.lease_id,
            tenant=event.tenant,
            card_uuid=account.card.uuid,
            terms=fast_dataclass.replace(event.terms, orphan_ms=orphan_ms),
            charge_bytes=account.charge_bytes(event.terms),
            request=event.request,
            created_ns=now_ns,
            spawn_due_ns=now_ns + self._store.limits.spawn_timeout_s * NS_PER_S,
            max_story_entries=self._store.limits.max_story_entries,
            park=ParkState() if event.terms.is_parkable else None,
            wait_ms=event.wait_ms if event.terms.is_parkable else 0,
        )
        # Charge the card now, so that no later acquire gets these bytes. Then the pool picks the worker.
        self._store.open(lease)
        self._pool.place(lease, now_ns, effects)

    def _enqueue(
        self, event: AcquireRequested, candidates: tuple[CardAccount, ...], now_ns: int, effects: list[Effect]
    ) -> None:
        denial = self._check_queue(event)
        if denial is not None:
            effects.append(RequestDenied(event.request, denial))
            return
        queue = self._store.queue
        # Record when the shared timer is due before this waiter joins, to find out whether it must fire earlier now.
        armed_ns = queue.next_hold_end_ns()
        holds_until_ns = queue.terms.end_for(event.tenant, now_ns)
        # A request that allows no wait still waits while sessions are parked to make room for it.
        wait_ns = event.wait_ms * NS_PER_MS or self._parking.patience_ns
        waiter = Waiter(event, candidates, now_ns, now_ns + wait_ns, holds_until_ns)
        queue.join(waiter)
        effects.append(ArmTimer(WaitTimerFired(event.request), waiter.due_ns))
        # One timer serves all waiters. It must fire when the first hold ends.
        hold_end_ns = queue.next_hold_end_ns()
        if hold_end_ns is not None and (armed_ns is None or hold_end_ns < armed_ns):
            effects.append(ArmTimer(HoldTimerFired(), hold_end_ns))

    def _check_rate(self, event: AcquireRequested, now_ns: int) -> Denial | None:
        # CHECK has already counted this acquire; counting it again would halve the tenant's rate.
        if event.step is AcquireStep.PLACE:
            return None
        return self._store.rates.denial(event.tenant, self._store.limits.tenants.of(event.tenant), now_ns)

    def _check_request(self, event: AcquireRequested) -> Denial | None:
        # Check what no other request can change: the shutdown, the id, the sizes, the times.
        if self._store.is_shutting_down:
            return denials.shutting_down()
        if not 0 < event.lease_id <= MAX_LEASE_ID or self._store.is_used(event.lease_id):
            return denials.id_used(event.lease_id)
        if event.terms.size_bytes < self._store.limits.min_size_bytes:
            return denials.invalid(
                f"The size of a lease must be at least {size_text(self._store.limits.min_size_bytes)}, "
                f"not {event.terms.size_bytes} bytes.",
                "Request a larger lease.",
            )
        # The session keeps at least one byte.
        if not 0 <= event.terms.submit_bytes < event.terms.size_bytes:
            return denials.invalid(
                f"A lease of {event.terms.size_bytes} bytes can't reserve {event.terms.submit_bytes} of "
                "them for submits: its session needs the rest.",
                "Request a larger lease, or reserve less for submits.",
            )
        if event.wait_ms < 0:
            return denials.invalid(f"A request can't wait for {event.wait_ms} ms.", "Use a wait of 0 ms or more.")
        if event.wait_ms > self._store.limits.max_wait_s * 1000:
            return denials.over_limit(
                "max_wait_s",
                f"A wait of {denials.duration_text(event.wait_ms)} was requested, but this node allows at most "
                f"{self._store.limits.max_wait_s} s",
                "Request a shorter wait.",
            )
        # Check the options that give the lease more of the card's time than others get.
        bounds = self._store.limits.tenants.of(event.tenant)
        if event.terms.weight > bounds.max_weight:
            return denials.too_heavy(event.tenant, event.terms.weight, bounds.max_weight)
        if event.terms.latency and not bounds.may_latency:
            return denials.no_latency(event.tenant)
        denial = check_parkable(event.terms) if event.terms.is_parkable else None
        return denial or check_ttl(event.terms.ttl_ms, self._store.limits, event.tenant)

    def _check_claim(self, event: AcquireRequested, now_ns: int) -> Denial | None:
        """Return the denial for a claim that this node can't serve; None if it can, or if nothing is claimed."""
        name, epoch = event.terms.name, event.terms.epoch
        if event.step is AcquireStep.CHECK:
            # The claim follows if this check succeeds.
            return None
        # Past the membership deadline another node may serve the same claims.
        if event.terms.is_claimed and self._store.is_isolated(now_ns):
            return denials.isolated(denials.MEMBERSHIP_LOST)
        if not name:
            return None
        # A name has at most one lease per node until that lease's memory is proved free. Only the lease's own tenant is
        # given its id.
        if (holder := self._store.claimed.get(name)) is not None:
            return denials.name_taken(name, holder.lease_id if holder.tenant == event.tenant else None)
        if (waiting := self._store.queue.named(name)) is not None:
            is_own = waiting.acquire.tenant == event.tenant
            return denials.name_taken(name, waiting.acquire.lease_id if is_own else None)
        # If a claim's epoch is not above the highest served here, the claim is old and has arrived late. Granting it
        # could give one name to two tenants.
        if (highest := self._store.epochs.of(name)) >= epoch:
            return denials.old_epoch(name, epoch, highest)
        self._store.epochs.note(name, epoch)
        return None

    def _check_counts(self, event: AcquireRequested) -> Denial | None:
        # Count waiters as placed, so that placing them later can't exceed a limit.
        store, limits = self._store, self._store.limits
        if len(store.live) + store.queue.acquires() >= limits.max_leases:
            return denials.over_limit(
                "max_leases",
                f"This node has {counted(limits.max_leases, 'lease')}, counting those that wait to be "
                "granted, the maximum",
                "Try again when some of them have ended, or use another node.",
            )
        tenant_leases = store.live_by_tenant.get(event.tenant, 0) + store.queue.count_of(event.tenant)
        if tenant_leases >= limits.max_leases_of(event.tenant):
            is_own = limits.tenants.of(event.tenant).max_leases is not None
            return denials.over_limit(
                f"max_leases of tenant {event.tenant!r}" if is_own else "max_leases_per_tenant",
                f"Tenant {event.tenant!r} has {counted(tenant_leases, 'lease')}, counting those that wait "
                "to be granted, the maximum for one tenant here",
                "Free a lease that you no longer need.",
            )
        return self._check_bytes(event)

    def _check_bytes(self, event: AcquireRequested) -> Denial | None:
        return self._store.check_bytes(event.tenant, event.terms.size_bytes)

    def _usable(self, selected: tuple[CardAccount, ...], tenant: str) -> tuple[CardAccount, ...]:
        """Return the selected cards that the tenant may use."""
        limits = self._store.limits.tenants.of(tenant)
        return selected if limits.devices is None else tuple(a for a in selected if limits.may_use(a.card))

    def _check_devices(
        self,
        event: AcquireRequested,
        selected: tuple[CardAccount, ...],
        usable: tuple[CardAccount, ...],
    ) -> Denial | None:
        # If no card is selected, `_check_cards` reports the unknown selector instead.
        if usable or not selected:
            return None
        return denials.over_tenant_limit(
            event.tenant,
            "devices",
            "This tenant may not use any of the requested cards",
            "Leave the choice of the card to the daemon, or ask the operator.",
        )

    def _check_queue(self, event: AcquireRequested) -> Denial | None:
        # Check the queue's bounds: first the node's, then the tenant's, which keeps one tenant from filling it.
        limits = self._store.limits
        if self._store.queue.acquires() >= limits.max_waiting:
            waiting = counted(limits.max_waiting, "request waits", "requests wait")
            return denials.over_limit(
                "max_waiting",
                f"No card has room now, and {waiting} already, the maximum",
                "Try again later, or on another node.",
            )
        if self._store.queue.count_of(event.tenant) >= limits.max_waiting_per_tenant:
            waiting = counted(limits.max_waiting_per_tenant, "request")
            return denials.over_limit(
                "max_waiting_per_tenant",
                f"No card has room now, and tenant {event.tenant!r} already has {waiting} in the queue, "
                "the maximum for one tenant",
                "Wait for the reply to one of them.",
            )
        return None

    def _check_cards(
        self,
        event: AcquireRequested,
        selected: tuple[CardAccount, ...],
        suitable: Sequence[CardAccount],
        candidates: tuple[CardAccount, ...],
    ) -> Denial | None:
        # Name the most specific obstacle: an unknown card, a card of the wrong kind, or a size that never fits.
        if event.selector is not None and not selected:
            cards = [account.card for account in self._store.accounts]
            return denials.unknown_card(event.selector, cards, "leave the choice to the daemon")
        if selected and not suitable:
            return denials.no_partition()
        if not candidates:
            largest = placement.largest_slice_bytes(suitable, event.terms.contexts)
            available = placement.available_bytes(suitable, event.terms.contexts)
            return denials.never_fits(event.terms.size_bytes, largest, available)
        return None

    def _check_node_drain(self, now_ns: int) -> Denial | None:
        drain_ns = self._store.drain_ns
        return None if drain_ns is None else denials.draining(drain_ns - now_ns)

    def _check_drains(self, candidates: tuple[CardAccount, ...], now_ns: int) -> Denial | None:
        """Return the denial for a lease that only drained cards could hold."""
        ends_ns = [account.drain_ns for account in candidates if account.drain_ns is not None]
        if len(ends_ns) < len(candidates):
            return None
        return denials.card_draining(candidates[0].card.uuid, ends_ns[0] - now_ns)

    def _no_room(self, event: AcquireRequested, candidates: tuple[CardAccount, ...], waited_ms: int = 0) -> Denial:
        available = placement.available_bytes(candidates, event.terms.contexts)
        # Choose the sentence that shows the tenant whether it is useful to wait.
        if not any(account.others.is_known for account in candidates):
            reason = "the memory of the cards could not be read yet"
        elif any(placement.fits_now(account, event.terms) for account in candidates):
            reason = "earlier requests wait for the same cards"
        elif available >= event.terms.size_bytes:
            reason = "every card has other leases"
        elif all(account.exclusive_leases for account in candidates):
            reason = "other leases have exclusive use of the cards"
        else:
            reason = "other leases use the memory"
        largest = placement.largest_slice_bytes(candidates, event.terms.contexts)
        return denials.no_room(event.terms.size_bytes, largest, available, reason=reason, waited_ms=waited_ms)

    def _wait_denial(self, waiter: Waiter, now_ns: int) -> Denial:
        waited_ms = max(1, (now_ns - waiter.since_ns) // NS_PER_MS)
        return self._no_room(waiter.acquire, waiter.candidates, waited_ms)


NODE_DRAINED: Final = "the node is drained"
CARD_DRAINED: Final = "its card is drained"


class Drains:
    """Drains the node or a card: admits no lease there, warns the tenants, ends the remaining leases at a deadline.

    1. During the drain, no lease is granted there. Acquires that no other card could serve are refused, including
       queued ones. Leases that still wait for their worker there end. The pool drops its contexts there.
    2. The subscribers of each active lease are sent the time that is left. A renewal extends a lease to the drain's
       deadline at most. When a lease is moved off a drained card, its warning is withdrawn.
    3. At the deadline all remaining leases end with DRAINED. The drain lasts until an operator admits tenants again. A
       restart of the daemon does not end it.
    4. A second request moves the deadline to an earlier or a later time. Cancelling a drain leaves every lease its full
       time.
    5. The node's drain and a card's drain are independent: on that card the earlier deadline counts, and ending one
       drain does not end the other.

    Each method appends what to execute to `effects`.
    """

    def __init__(self, store: LeaseStore, teardown: Teardown, admission: Admission) -> None:
        self._store = store
        self._teardown = teardown
        self._admission = admission

    def on_requested(self, event: DrainRequested, now_ns: int, effects: list[Effect]) -> None:
        """Begin a drain, or move its deadline. If the deadline is now, end all leases at once."""
        drain_ns = now_ns + max(0, event.within_ms) * NS_PER_MS
        if event.card is None:
            self._store.drain_ns = drain_ns
            # Refuse everything that is not granted yet: queued acquires, and leases that still wait for their worker.
            self._admission.close_queue(denials.draining(drain_ns - now_ns), effects)
            self._begin(event.request, None, now_ns, effects)
        elif (account := self._card(event.request, event.card, effects)) is not None:
            account.drain_ns = drain_ns
            self._admission.refuse_without_card(denials.card_draining(account.card.uuid, drain_ns - now_ns), effects)
            self._begin(event.request, account, now_ns, effects)

    def _begin(self, request: int, account: CardAccount | None, now_ns: int, effects: list[Effect]) -> None:
        for lease in self._on(account):
            if lease.state is LeaseState.PENDING:
                reason = NODE_DRAINED if account is None else CARD_DRAINED
                self._teardown.begin(lease, Cause.DRAINED, reason, now_ns, effects)
        # Reply and warn the tenants. If the deadline is now, then end all leases at once.
        self._set(request, account, now_ns, effects)
        self.on_timer(now_ns, effects)

    def on_cancelled(self, event: DrainCancelled, now_ns: int, effects: list[Effect]) -> None:
        """Admit tenants again. Without a drain nothing changes."""
        account = None
        if event.card is None:
            self._store.drain_ns = None
        elif (account := self._card(event.request, event.card, effects)) is None:
            return
        else:
            account.drain_ns = None
        self._set(event.request, account, now_ns, effects)

    def on_timer(self, now_ns: int, effects: list[Effect]) -> None:
        """End the leases of each drain that has reached its deadline, and arm the timer for the next deadline."""
        for lease in self._store.live.values():
            drain = self._store.drain_of(lease.card_uuid)
            if lease.state is LeaseState.ACTIVE and drain is not None and now_ns >= drain.due_ns:
                reason = CARD_DRAINED if drain.is_of_card else NODE_DRAINED
                self._teardown.begin(lease, Cause.DRAINED, reason, now_ns, effects)
        ends_ns = [self._store.drain_ns, *(account.drain_ns for account in self._store.accounts)]
        later_ns = [end_ns for end_ns in ends_ns if end_ns is not None and end_ns > now_ns]
        if later_ns:
            effects.append(ArmTimer(DrainTimerFired(), min(later_ns)))

    def _card(self, request: int, selector: str, effects: list[Effect]) -> CardAccount | None:
        """Return the card that a selector names, or refuse the request."""
        selected = placement.select(self._store.accounts, selector)
        if not selected:
            cards = [account.card for account in self._store.accounts]
            effects.append(RequestDenied(request, denials.unknown_card(selector, cards)))
            return None
        return selected[0]

    def _on(self, account: CardAccount | None) -> list[Lease]:
        """Return the live leases of a card; of all cards for None."""
        return [lease for lease in self._store.live.values() if account is None or lease.card_uuid == account.card.uuid]

    def _set(self, request: int, account: CardAccount | None, now_ns: int, effects: list[Effect]) -> None:
        active = [lease for lease in self._on(account) if lease.state is LeaseState.ACTIVE]
        if account is None:
            effects.append(DrainSet(request, self._store.drain_ns, len(active)))
        else:
            effects.append(DrainSet(request, account.drain_ns, len(active), account.card.uuid))
        # Waiters may now be placed on other cards than before, so the queue must be checked.
        self._store.has_freed_room = True
        # Warn every active lease, even one that was warned before: its deadline may be earlier or later now.
        for lease in active:
            self._store.warn(lease, now_ns, effects)
