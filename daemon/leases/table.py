"""The lease table: takes one event and the time, and returns effects in the order in which to execute them.

All state changes go through `LeaseTable.handle`. The same events always give the same effects. The work per event does
not grow with the number of leases, nor with the length of the queue (`daemon/leases/wait_queue.py`).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, get_args

from gpulease.daemon.leases import denials, devices, events, invariants, membership_events
from gpulease.daemon.leases.admission import Admission, Drains
from gpulease.daemon.leases.denials import Denial
from gpulease.daemon.leases.devices import Card, CardSnapshot, PlacementOrder
from gpulease.daemon.leases.events import (
    ArmTimer,
    Effect,
    Event,
    Granted,
    Renewed,
    RequestDenied,
    RevokeDone,
    SetDeadline,
    SlicesCleared,
    TimerFired,
    TimerKind,
    Warned,
)
from gpulease.daemon.leases.membership_deadlines import MembershipDeadlines
from gpulease.daemon.leases.model import (
    Cause,
    Lease,
    LeaseSnapshot,
    LeaseState,
    MembershipDeadline,
    Recycling,
    RegionState,
    SubmitRequested,
    TransitionRecord,
    Trigger,
    WarmSnapshot,
    WorkerKind,
    kind_of,
)
from gpulease.daemon.leases.persisted import LeaseRow, RecoveredState, WarmRow, lease_row
from gpulease.daemon.leases.quotas import CoreLimits, LeasePhase, check_ttl, ended_phase, phase_of, renewed_until
from gpulease.daemon.leases.restoration import Restoration
from gpulease.daemon.leases.table_state import DeferrableRequest, LeaseStore
from gpulease.daemon.leases.teardown import Teardown, timer_due_ns
from gpulease.daemon.leases.wait_queue import WaiterSnapshot
from gpulease.daemon.leases.waiting_requests import answered
from gpulease.daemon.leases.warm_pool import WarmPool
from gpulease.protocol import fast_dataclass
from gpulease.protocol.opcodes import RevokeOutcome
from gpulease.protocol.time_units import NS_PER_MS

WORKER_EVENTS: Final = get_args(events.WorkerEvent)
"""Events about one worker, which `LeaseTable` dispatches by the worker's kind."""

_CHANGES_NO_PARKS: Final = (
    events.RenewRequested,
    events.SessionsUsed,
    events.ConnectionsChanged,
    events.CardPolled,
    membership_events.MembershipDeadlineMoved,
)
"""Frequent events that, unless they release bytes, allow no additional session to be parked. A timer checks whether
time alone allows one."""

WorkerHandler = Callable[[Any, Any, int, list[Effect]], None]


class LeaseTable:
    """Every lease of the node, and the queue of acquires.

    Args:
        cards: Cards to lease.
        limits: Bounds of the node.
        warm_contexts: Number of contexts that each card keeps ready for future leases.
        recovered: Records of an earlier table. Its leases come as events, before all others.
        recycling: Bounds within which contexts serve their tenant again; None if they never do.
        order: The order in which leases prefer cards.

    Raises:
        ValueError: Two cards have the same uuid or index.
    """

    def __init__(
        self,
        cards: Iterable[Card],
        limits: CoreLimits | None = None,
        warm_contexts: int = 0,
        recovered: RecoveredState | None = None,
        recycling: Recycling | None = None,
        order: PlacementOrder = PlacementOrder.SPREAD,
    ) -> None:
        self._limits = limits or CoreLimits()
        self._store = LeaseStore(cards, self._limits, warm_contexts, recycling, order)
        # The modules share the store, and each changes only a separate part of it. All of them may use the teardown.
        self._teardown = Teardown(self._store)
        self.submits = self._teardown.submits
        self.regions = self._teardown.regions
        self._resizes = self._teardown.resizes
        self.parking = self._teardown.parking
        self._pool = WarmPool(self._store, self._teardown)
        self._cold = self.parking.cold
        self._admission = Admission(self._store, self._pool, self.parking)
        self._membership_deadlines = MembershipDeadlines(self._store, self._teardown)
        self._restoration = Restoration(self._store, self._teardown, self._pool)
        # Do this before any event: revoked ids, fences and drains apply from the first request on.
        self._restoration.recover(recovered or RecoveredState())
        self._drain = Drains(self._store, self._teardown, self._admission)
        self._handlers = self._event_handlers()
        # Per kind of worker: the live workers by id, and the handler of each event about one of them.
        self._workers: dict[WorkerKind, tuple[Mapping[int, Any], Mapping[type, WorkerHandler]]] = {
            WorkerKind.LEASE: (self._store.live, self._lease_handlers()),
            WorkerKind.WARM: (self._store.warm, self._pool.handlers),
            WorkerKind.SUBMIT: (self._store.submits, self.submits.handlers),
        }

    def _event_handlers(self) -> dict[type, Callable[[Any, int, list[Effect]], None]]:
        # Each handler takes exactly its own type of event, which the type of a dict can't express.
        return {
            events.AcquireRequested: self._on_acquire_requested,
            events.RenewRequested: self._on_renew_requested,
            events.FreeRequested: self._on_free_requested,
            events.RevokeRequested: self._on_revoke_requested,
            SubmitRequested: self._unless_deferred(self.submits.on_requested),
            events.RequesterGone: self._on_requester_gone,
            events.FenceClearRequested: self._on_fence_clear_requested,
            events.DrainRequested: self._drain.on_requested,
            events.DrainCancelled: self._drain.on_cancelled,
            events.TenantRulesChanged: self._admission.on_rules_changed,
            membership_events.MembershipDeadlineMoved: self._membership_deadlines.on_moved,
            membership_events.ClaimsLost: self._membership_deadlines.on_claims_lost,
            events.ShutdownRequested: self._on_shutdown_requested,
            events.ConnectionsChanged: self._on_connections_changed,
            events.SessionOpened: self._on_session_opened,
            events.SessionFaulted: self._on_session_faulted,
            events.GuestAttached: self._pool.on_guest_attached,
            events.WorkerScrubbed: self._pool.on_worker_scrubbed,
            events.WorkerUnlisted: self._on_worker_unlisted,
            events.CardPolled: self._pool.on_card_polled,
            events.WaitTimerFired: self._on_wait_timer,
            events.HoldTimerFired: lambda _, now_ns, effects: self._admission.on_hold_timer(now_ns, effects),
            events.PoolTimerFired: lambda *_: self._pool.on_pool_timer(),
            events.DrainTimerFired: lambda _, now_ns, effects: self._drain.on_timer(now_ns, effects),
            events.LeaseRestored: self._restoration.on_lease_restored,
            events.WorkerFound: self._restoration.on_worker_found,
            events.SubmitFound: self._restoration.on_submit_found,
            **self._region_handlers(),
            **dict.fromkeys(WORKER_EVENTS, self._on_worker_event),
        }

    def _region_handlers(self) -> dict[type, Callable[[Any, int, list[Effect]], None]]:
        return {
            events.RegionRequested: self._unless_deferred(self.regions.on_requested),
            events.RegionOpened: self.regions.on_opened,
            events.RegionRefused: self.regions.on_refused,
            events.RegionEnded: self.regions.on_ended,
            events.RegionStuck: self.regions.on_stuck,
            events.RegionProved: self._on_region_proved,
            events.RegionReleased: self.regions.on_released,
            events.RegionCancelRequested: self.regions.on_cancel_requested,
            events.RegionRestored: self.regions.on_restored,
            events.ResizeRequested: self._unless_deferred(self._resizes.on_requested),
            events.SliceResized: self._resizes.on_resized,
            events.ParkRequested: self.parking.on_requested,
            events.SessionParked: self.parking.on_parked,
            events.SessionParkRefused: self.parking.on_park_refused,
            events.ReturnWanted: self.parking.on_return_wanted,
            events.SessionReturned: self.parking.on_returned,
            events.SessionReturnFailed: self.parking.on_return_failed,
            events.SessionImaged: self._cold.on_imaged,
            events.SessionStays: self._cold.on_stays,
            events.MoveRequested: self._unless_deferred(self._cold.on_move_requested),
            events.SessionsUsed: self.parking.on_used,
            events.StayClaimed: self.parking.on_stay_claimed,
            events.ParkTimerFired: lambda *_: self.parking.on_park_timer(),
        }

    def _unless_deferred(
        self, handler: Callable[[Any, int, list[Effect]], None]
    ) -> Callable[[Any, int, list[Effect]], None]:
        """Return a handler for requests that need the session: it defers them while the session is parked."""

        def handle(event: DeferrableRequest, now_ns: int, effects: list[Effect]) -> None:
            if not self.parking.deferred.defer(event, now_ns, effects):
                handler(event, now_ns, effects)

        return handle

    def _lease_handlers(self) -> dict[type, Callable[[Lease, Any, int, list[Effect]], None]]:
        return {
            events.WorkerReady: self._on_worker_ready,
            events.WorkerFailed: self._on_worker_failed,
            events.WorkerExited: self._on_worker_exited,
            events.SessionCondemned: self._on_session_condemned,
            events.TimerFired: self._on_timer_fired,
            events.ReclaimProved: self._on_reclaim_proved,
            events.ReclaimFailed: self._on_reclaim_failed,
        }

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """Handle an event at monotonic time `now_ns`, and return the effects to execute, in order.

        Raises:
            ValueError: An acquire reuses the number of one that is still open.
            InvalidTransition: A bug in the core. The event is half handled and the table must no longer be used.
        """
        effects: list[Effect] = []
        may_park = not isinstance(event, _CHANGES_NO_PARKS)
        # Step 1: handle the event.
        self._handlers[type(event)](event, now_ns, effects)
        while True:
            # Handle the requests whose session has returned.
            if self._store.deferred:
                for request in self.parking.deferred.take_ready(now_ns, effects):
                    with answered(request.request, effects):
                        self._handlers[type(request)](request, now_ns, effects)
            # Step 2: offer released bytes to the queue before anything else can take them.
            if self._store.has_freed_room:
                self._admission.serve_queue(now_ns, effects)
                may_park = True
            # Step 3: park idle sessions to make room for requests that still wait. Finding them takes time for each
            # session.
            if may_park and self._store.parkable:
                self.parking.update(now_ns, effects)
            # Step 4: let the pool use the rest, so that it never competes with leases.
            self._pool.update(now_ns, effects)
            # If step 4 released the room of a session that no worker could continue, offer that to the queue as well.
            if not self._store.has_freed_room and not (self._store.deferred and self.parking.deferred.has_ready()):
                return effects

    def get(self, lease_id: int) -> LeaseSnapshot | None:
        """Return a live lease or region, or an ended one that is still recorded; else None."""
        return self._store.get(lease_id)

    @property
    def limits(self) -> CoreLimits:
        """The current bounds of the node and its tenants."""
        return self._store.limits

    def charge_bytes(self, lease_id: int) -> int:
        """Return the bytes that a live lease holds on its card, with its contexts' overhead; 0 if there is none."""
        lease = self._store.live.get(lease_id)
        return 0 if lease is None else lease.charge_bytes

    def booked_bytes(self) -> dict[str, int]:
        """Return the bytes charged to all live leases together, by card; cards without any are absent."""
        booked: dict[str, int] = {}
        for lease in self._store.live.values():
            booked[lease.card_uuid] = booked.get(lease.card_uuid, 0) + lease.charge_bytes
        return booked

    def live_ids(self) -> tuple[int, ...]:
        """Return the ids of all live leases, oldest first, then those of their regions that are not returned."""
        return (*self._store.live, *self.regions.open_ids())

    def stray_bytes(self, card_uuid: str, unowned_bytes: int) -> int:
        """Return a card's unowned bytes that the table has not booked; 0 within the card's slack."""
        # Bytes within the slack, and bytes that are already booked, are accounted for.
        unowned = self._store.account_by_uuid[card_uuid].others.unowned
        return 0 if unowned.is_within(unowned_bytes) else unowned_bytes - unowned.booked_bytes

    def lease_row(self, lease_id: int, worker_pid: int = 0) -> LeaseRow | None:
        """Return the row of a live lease that outlives this table; None if it is pending or unknown."""
        lease = self._store.live.get(lease_id)
        return None if lease is None else lease_row(lease, worker_pid)

    def warm_row(self, warm_id: int) -> WarmRow | None:
        """Return the record of a warm context that outlives this table; None if it is unknown."""
        warm_context = self._store.warm.get(warm_id)
        return (
            None
            if warm_context is None
            else WarmRow(warm_id, warm_context.card_uuid, warm_context.charge_bytes, warm_context.reason)
        )

    def snapshots(self) -> tuple[LeaseSnapshot, ...]:
        """Return every live lease, fenced ones included, oldest first."""
        return tuple(lease.snapshot() for lease in self._store.live.values())

    def cards(self) -> tuple[CardSnapshot, ...]:
        """Return every card by index, with the bytes held on it."""
        return tuple(account.snapshot() for account in self._store.accounts)

    def warming(self) -> tuple[WarmSnapshot, ...]:
        """Return every context of the pool, those being dropped included, oldest first."""
        return tuple(context.snapshot() for context in self._store.warm.values())

    def waiting(self) -> tuple[WaiterSnapshot, ...]:
        """Return the queued acquires, in the order of the queue."""
        return tuple(waiter.snapshot() for waiter in self._store.queue if waiter.returning is None)

    def history(self, lease_id: int) -> tuple[TransitionRecord, ...]:
        """Return the recorded transitions of a live lease or region, oldest first.

        For an ended one, `LeaseEnded` carries them.
        """
        lease = self._store.live.get(lease_id) or self._store.regions.get(lease_id)
        return tuple(lease.history) if lease is not None else ()

    def denial_for(self, lease_id: int, now_ns: int) -> Denial | None:
        """Return the denial for work under a lease or region now; None if it is active and in time."""
        return self._store.denial_for(lease_id, now_ns)

    def tenants_with_access(self, lease_id: int) -> frozenset[str]:
        """Return the tenants with access to a lease or region: its own, and for a region that of its lease."""
        lease = self._store.get(lease_id)
        return frozenset() if lease is None else self._store.tenants_with_access(lease)

    def claims(self) -> dict[str, int]:
        """Return the epoch of each name that a live lease (fenced ones included) or a queued acquire has."""
        terms = [lease.terms for lease in self._store.claimed.values()]
        queued = (waiter.acquire.terms for waiter in self._store.queue if waiter.returning is None)
        terms += [waiting for waiting in queued if waiting.name]
        return {claim.name: claim.epoch for claim in terms}

    def counted(self) -> dict[int, str]:
        """Return the tenant of each lease that counts against a quota in the fleet, queued acquires included."""
        claimed = self._store.with_claims.values()
        tenants = {lease.lease_id: lease.tenant for lease in claimed if lease.terms.fleet_bytes}
        acquires = (waiter.acquire for waiter in self._store.queue if waiter.returning is None)
        return tenants | {acquire.lease_id: acquire.tenant for acquire in acquires if acquire.terms.fleet_bytes}

    @property
    def has_claimed_lease(self) -> bool:
        """Return whether a claimed lease is alive. A fenced one is not, although its claim remains."""
        return any(lease.state is not LeaseState.FENCED for lease in self._store.with_claims.values())

    def counts_in_fleet(self, tenant: str) -> bool:
        """Return whether a tenant's new leases count against a quota in the fleet."""
        return self._store.limits.tenants.of(tenant).fleet_quota

    @property
    def membership_deadline(self) -> MembershipDeadline | None:
        """The membership deadline, until which claimed leases may be granted; None if they may not."""
        return self._store.membership_deadline

    @property
    def highest_epoch(self) -> int:
        """Return the highest epoch that any name has had on this node."""
        return self._store.epochs.highest()

    def is_isolated(self, now_ns: int) -> bool:
        """Return whether no claimed lease may be granted now."""
        return self._store.is_isolated(now_ns)

    def lease_of_request(self, tenant: str, request_id: str) -> LeaseSnapshot | None:
        """Return the tenant's active lease by its acquire's `request_id`; None if the tenant has none."""
        lease = self._store.by_request.get((tenant, request_id))
        return None if lease is None or lease.state is not LeaseState.ACTIVE else lease.snapshot()

    def phase(self, lease_id: int, now_ns: int) -> LeasePhase | None:
        """Return the phase of a lease or region; None if it is unknown or was never granted."""
        lease = self._store.live.get(lease_id)
        if lease_id in self._store.regions:
            return self.regions.phase(lease_id, now_ns)
        if lease is None:
            ended = self._store.get_ended(lease_id)
            return None if ended is None or ended.deadline_ns is None else ended_phase(ended)
        if lease.deadline_ns is None:
            return None
        return phase_of(lease, self._store.drain_of(lease.card_uuid), now_ns)

    def orphan_ms(self, lease_id: int) -> int:
        """Return the longest time that a live lease may be without a connection; 0: no bound, or no such lease."""
        lease = self._store.live.get(lease_id)
        return 0 if lease is None else lease.orphan_ms

    def orphan_due_ns(self, lease_id: int) -> int | None:
        """Return the time at which an active lease ends for lack of a connection; None if none is set."""
        lease = self._store.live.get(lease_id)
        return None if lease is None or lease.state is not LeaseState.ACTIVE else lease.orphan_due_ns

    @property
    def drain_ns(self) -> int | None:
        """Time at which the node's drain ends the remaining leases; None while there is none."""
        return self._store.drain_ns

    def drain_ns_of(self, card_uuid: str) -> int | None:
        """Return when a drain, the node's or the card's own, ends the leases on a card; None if neither is drained."""
        return self._store.drain_ns_of(card_uuid)

    @property
    def grants_nothing(self) -> bool:
        """Whether the node is drained, or all of its cards are."""
        accounts = self._store.accounts
        are_drained = bool(accounts) and all(account.drain_ns is not None for account in accounts)
        return self._store.drain_ns is not None or are_drained

    @property
    def has_drain(self) -> bool:
        """Whether the node or one of its cards is drained."""
        return self._store.drain_ns is not None or any(account.drain_ns is not None for account in self._store.accounts)

    @property
    def is_shutting_down(self) -> bool:
        """True once a shutdown was requested. The shutdown is complete when only fenced leases remain."""
        return self._store.is_shutting_down

    def validate(self) -> None:
        """Recompute every running sum and check every rule.

        Raises:
            InvariantBroken: A rule does not hold; the text says which.
        """
        invariants.validate(self._store)

    def charges(self) -> invariants.Charges:
        """Return the bytes that each live lease holds on its card, and those of contexts that no lease can have."""
        return invariants.charges_of(self._store)

    def validate_charges(self, before: invariants.Charges) -> None:
        """Check that the last event charged nothing beyond a card's capacity.

        Events that restore an earlier table's leases are exempt, because the capacity may be lower by now.

        Args:
            before: Result of `charges` before that event.

        Raises:
            InvariantBroken: A lease got more than the card had; the text says which.
        """
        invariants.validate_charges(self._store, before)

    # --- requests ---

    def _on_acquire_requested(self, event: events.AcquireRequested, now_ns: int, effects: list[Effect]) -> None:
        # Two open requests with one number would get two answers. That is a bug of the broker, so it is not a denial.
        if event.request in self._store.pending or self._store.queue.get(event.request) is not None:
            raise ValueError(f"Request {event.request} is still open; an acquire needs a number of its own.")
        self._admission.acquire(event, now_ns, effects)

    def _on_requester_gone(self, event: events.RequesterGone, now_ns: int, effects: list[Effect]) -> None:
        # A request number belongs to a submit, a region, a deferred request, a queued acquire or a pending lease. Find
        # out which.
        if self.submits.on_requester_gone(event.request, now_ns, effects):
            return
        if self.regions.on_requester_gone(event.request, now_ns, effects):
            return
        if self.parking.deferred.on_requester_gone(event.request):
            return
        waiter = self._store.queue.get(event.request)
        if waiter is not None:
            self._admission.drop(waiter)
            return
        lease = self._store.live.get(self._store.pending.get(event.request, 0))
        if lease is not None:
            self._teardown.begin(lease, Cause.ABANDONED, "the connection of its acquire was closed", now_ns, effects)

    def _on_renew_requested(self, event: events.RenewRequested, now_ns: int, effects: list[Effect]) -> None:
        # A region's id is used like a lease's, so one operation serves both.
        if (region := self._store.regions.get(event.lease_id)) is not None:
            self.regions.on_renew(region, event, now_ns, effects)
            return
        if (denial := self._store.denial_unless_owner(event.lease_id, event.tenant, event.is_operator)) is not None:
            effects.append(RequestDenied(event.request, denial))
            return
        lease = self._store.live.get(event.lease_id)
        # Expire it first: a renewal that arrives after the deadline, before the late timer, must fail.
        self._teardown.expire_if_due(lease, now_ns, effects)
        denial = self._store.denial_for(event.lease_id, now_ns) or check_ttl(
            event.ttl_ms, self._store.limits, event.tenant if lease is None else lease.tenant
        )
        if denial is not None or lease is None or lease.deadline_ns is None:
            effects.append(RequestDenied(event.request, denial or denials.not_found(event.lease_id)))
            return
        # The new generation invalidates the timers of the old deadline, and the tokens of the old generation.
        lease.generation += 1
        lease.move(Trigger.RENEWED, now_ns)
        # Most renewals ask for the same time as before, and then the terms stay the same.
        if event.ttl_ms != lease.terms.ttl_ms:
            lease.terms = fast_dataclass.replace(lease.terms, ttl_ms=event.ttl_ms)
        # A renewal never shortens the time granted before, which had the same maximum.
        deadline_ns = renewed_until(now_ns, event.ttl_ms, self._store.drain_ns_of(lease.card_uuid))
        self._set_deadline(lease, max(lease.deadline_ns, deadline_ns), effects)
        # A renewal shows that the tenant is alive, so the wait for a connection starts again now.
        if lease.unconnected_ns is not None:
            self._await_connection(lease, now_ns, effects)
        self.parking.on_generation(lease, effects)
        effects.append(Renewed(event.request, lease.snapshot()))

    def _on_connections_changed(self, event: events.ConnectionsChanged, now_ns: int, effects: list[Effect]) -> None:
        lease = self._store.live.get(event.lease_id)
        # Leases without a bound never end for lack of a connection, and a repeated report changes nothing.
        if lease is None or lease.state is not LeaseState.ACTIVE or not lease.orphan_ms:
            return
        if event.is_connected == (lease.unconnected_ns is None):
            return
        if event.is_connected:
            lease.unconnected_ns = None
        else:
            self._await_connection(lease, now_ns, effects, event.least_wait_ms)
        # Warn subscribers of the deadline for a connection, or that it no longer applies.
        phase = phase_of(lease, self._store.drain_of(lease.card_uuid), now_ns)
        effects.append(Warned(lease.lease_id, phase.phase, phase.left_ms(now_ns)))

    def _await_connection(self, lease: Lease, now_ns: int, effects: list[Effect], least_wait_ms: int = 0) -> None:
        """Start the wait after which the lease ends unless it gets a connection."""
        # A daemon that took over the lease gives its clients more time to reconnect than the tenant's bound.
        more_ms = max(0, least_wait_ms - lease.orphan_ms)
        # An earlier, longer wait remains valid.
        lease.unconnected_ns = max(now_ns + more_ms * NS_PER_MS, lease.unconnected_ns or 0)
        due_ns = lease.unconnected_ns + lease.orphan_ms * NS_PER_MS
        effects.append(ArmTimer(TimerFired(lease.lease_id, lease.generation, TimerKind.ORPHAN), due_ns))

    def _on_free_requested(self, event: events.FreeRequested, now_ns: int, effects: list[Effect]) -> None:
        # A region is freed inside its lease, which continues.
        if (region := self._store.regions.get(event.lease_id)) is not None:
            self.regions.on_free(region, event, now_ns, effects)
            return
        if (denial := self._store.denial_unless_owner(event.lease_id, event.tenant, event.is_operator)) is not None:
            effects.append(RequestDenied(event.request, denial))
            return
        lease = self._store.live.get(event.lease_id)
        self._teardown.expire_if_due(lease, now_ns, effects)
        if lease is not None and lease.state in (LeaseState.PENDING, LeaseState.ACTIVE):
            lease.free_request = event.request
            # If anyone but the tenant frees the lease, the context must not serve another lease.
            lease.is_in_doubt = lease.is_in_doubt or event.tenant != lease.tenant
            by_whom = "an operator" if event.tenant != lease.tenant else "its tenant"
            self._teardown.begin(lease, Cause.FREED, f"freed by {by_whom}", now_ns, effects)
            return
        # The lease is neither pending nor active: it has ended, or it is unknown. Report which.
        denial = self._store.denial_for(event.lease_id, now_ns) or denials.not_found(event.lease_id)
        effects.append(RequestDenied(event.request, denial))

    def _on_revoke_requested(self, event: events.RevokeRequested, now_ns: int, effects: list[Effect]) -> None:
        if (denial := self._check_revoke(event)) is not None:
            effects.append(RequestDenied(event.request, denial))
            return
        # A returned region has ended, so it gets the answer of an ended lease below.
        region = self._store.regions.get(event.lease_id)
        if region is not None and region.state is not RegionState.RETURNED:
            self.regions.on_revoke(region, event, now_ns, effects)
            return
        lease = self._store.live.get(event.lease_id)
        # For an ended lease, repeat the answer to its first revoke, so that a repeated request is harmless.
        if lease is None:
            effects.append(RevokeDone(event.request, self._past_outcome(event.lease_id)))
            return
        self._teardown.expire_if_due(lease, now_ns, effects)
        if lease.state is LeaseState.FENCED:
            effects.append(RevokeDone(event.request, RevokeOutcome.FENCED))
            return
        # A revoked lease must be torn down completely, so a scrub in progress is abandoned.
        lease.revoke_requests.append(event.request)
        self._teardown.give_up_scrub(lease, now_ns, effects)
        if lease.state is not LeaseState.DRAINING:
            self._teardown.begin(lease, Cause.REVOKED, event.reason, now_ns, effects)

    def _check_revoke(self, event: events.RevokeRequested) -> Denial | None:
        """Return the denial for a caller that may not revoke; None if it may.

        Operators may revoke anything. The tenant of a lease may revoke the regions in it.
        """
        if event.is_operator:
            return None
        lease = self._store.get(event.lease_id)
        if lease is None:
            return self._store.unknown(event.lease_id)
        # The tenant of the surrounding lease may revoke a region, because the memory belongs to that lease.
        parent = self._store.get(lease.parent_id) if lease.parent_id else None
        if parent is not None and parent.tenant == event.tenant:
            return None
        is_own = lease.tenant == event.tenant
        return denials.not_revocable(event.lease_id) if is_own else denials.not_found(event.lease_id)

    def _on_fence_clear_requested(self, event: events.FenceClearRequested, now_ns: int, effects: list[Effect]) -> None:
        selected = devices.select(self._store.accounts, event.card_uuid)
        if event.card_uuid is not None and not selected:
            cards = [account.card for account in self._store.accounts]
            effects.append(
                RequestDenied(
                    event.request, denials.unknown_card(event.card_uuid, cards, "name none to clear every fence")
                )
            )
            return
        # Release leases with their regions, then fences of regions in live leases, warm contexts and submits.
        uuids = {account.card.uuid for account in selected}
        cleared = [lease for lease in self._store.fenced.values() if lease.card_uuid in uuids]
        lease_ids = [lease.lease_id for lease in cleared]
        for lease in cleared:
            lease_ids += self.regions.return_with(lease, Trigger.FENCE_CLEARED, now_ns, effects)
            self._store.close(lease, Trigger.FENCE_CLEARED, now_ns)
        of_living = self.regions.clear_fences(uuids, now_ns)
        lease_ids += of_living
        for lease_id in lease_ids:
            self._store.cleared.add(lease_id)
        warm_ids = self._pool.clear_fences(uuids)
        count = len(cleared) + len(of_living) + len(warm_ids) + self.submits.clear_fences(uuids, effects)
        effects.append(SlicesCleared(event.request, count, tuple(lease_ids), warm_ids))

    def _on_shutdown_requested(self, event: events.ShutdownRequested, now_ns: int, effects: list[Effect]) -> None:
        self._store.is_shutting_down = True
        # Close the queue first, so that no waiter gets the bytes of a lease that ends now.
        self._admission.close_queue(denials.shutting_down(), effects)
        for lease in self._store.live.values():
            self._teardown.expire_if_due(lease, now_ns, effects)
            # A lease that was overdue has ended as EXPIRED, and keeps that cause.
            if lease.state in (LeaseState.PENDING, LeaseState.ACTIVE):
                self._teardown.begin(lease, Cause.SHUTDOWN, "a shutdown was requested", now_ns, effects)

    # --- workers ---

    def _on_worker_event(self, event: events.WorkerEvent, now_ns: int, effects: list[Effect]) -> None:
        """Dispatch an event to the handler for its kind of worker.

        An event for an unknown worker, or one without meaning for its kind, is ignored.
        """
        # The id alone shows what kind of worker an event concerns.
        workers, handlers = self._workers[kind_of(event.worker_id)]
        worker, handler = workers.get(event.worker_id), handlers.get(type(event))
        if worker is not None and handler is not None:
            handler(worker, event, now_ns, effects)
        # Regions have no worker of their own, but their timers carry their id in the same field.
        elif worker is None and isinstance(event, TimerFired):
            self.regions.on_timer(event, now_ns, effects)

    def _on_worker_unlisted(self, event: events.WorkerUnlisted, now_ns: int, effects: list[Effect]) -> None:
        # Whether the bytes are free depends on the bytes that others hold, which only the card's account has.
        if self._pool.is_shown_free(event, now_ns, effects):
            self._on_worker_event(events.ReclaimProved(event.worker_id), now_ns, effects)

    def _on_worker_ready(self, lease: Lease, event: events.WorkerReady, now_ns: int, effects: list[Effect]) -> None:
        if lease.park is not None and self._cold.on_worker_ready(lease, lease.park, now_ns, effects):
            return
        # Ignore a late report for an ended lease, and that of a worker that was requested before there was room.
        if lease.state is not LeaseState.PENDING or lease.awaited_bytes:
            return
        # `may_grant` may end the lease: a claim is never granted after the membership deadline.
        if lease.terms.is_claimed and not self._membership_deadlines.may_grant(lease, now_ns, effects):
            return
        # The time to live counts from now. Write the deadline to the page before the grant is reported to the tenant.
        lease.move(Trigger.WORKER_READY, now_ns)
        self._store.leave_pending(lease)
        self._set_deadline(lease, now_ns + lease.terms.ttl_ms * NS_PER_MS, effects)
        if lease.park is not None:
            self.parking.on_granted(lease, lease.park, now_ns, effects)
        effects.append(Granted(lease.request, lease.snapshot()))

    def _on_worker_failed(self, lease: Lease, event: events.WorkerFailed, now_ns: int, effects: list[Effect]) -> None:
        # A worker that is ready reports faults, not failures: a failure after the grant is ignored.
        if lease.state is LeaseState.PENDING:
            self._teardown.begin(lease, Cause.SPAWN_FAILED, event.reason, now_ns, effects)

    def _on_worker_exited(self, lease: Lease, event: events.WorkerExited, now_ns: int, effects: list[Effect]) -> None:
        # If the lease's warm context has died, start a new worker in its place.
        if lease.state is LeaseState.PENDING and lease.warm_id:
            self._pool.replace_worker(lease, event.reason, now_ns, effects, is_gone=True)
        # If a new worker exits before it is ready, end the lease. The denial shows the client whether a retry may help.
        elif lease.state is LeaseState.PENDING:
            lease.is_worker_gone = True
            denial = denials.no_worker_now(event.reason) if event.is_busy else None
            self._teardown.begin(lease, Cause.SPAWN_FAILED, event.reason, now_ns, effects, denial)
        elif self._cold.on_worker_lost(lease, event.reason, now_ns, effects):
            return
        elif lease.state is LeaseState.ACTIVE:
            lease.is_worker_gone = True
            self._teardown.on_active_worker_lost(lease, event.reason, now_ns, effects)
        else:
            self._teardown.on_worker_exited(lease, now_ns, effects)

    def _on_session_faulted(self, event: events.SessionFaulted, now_ns: int, effects: list[Effect]) -> None:
        lease = self._store.live.get(event.worker_id)
        # Keep the first fault: once the context is lost, everything fails.
        if lease is not None and lease.state is LeaseState.ACTIVE and not lease.fault:
            lease.fault = event.reason or "it gave no reason"
        self._teardown.give_up_scrub(lease, now_ns, effects)

    def _on_session_opened(self, event: events.SessionOpened, now_ns: int, effects: list[Effect]) -> None:
        lease = self._store.live.get(event.lease_id)
        if lease is not None and lease.state is LeaseState.ACTIVE and not lease.own_submit_bytes:
            lease.has_session = True

    def _on_session_condemned(
        self, lease: Lease, event: events.SessionCondemned, now_ns: int, effects: list[Effect]
    ) -> None:
        if not self._cold.on_worker_hung(lease, event.cause, effects):
            self._teardown.condemn(lease, event.cause, event.reason, now_ns, effects)

    def _on_region_proved(self, event: events.RegionProved, now_ns: int, effects: list[Effect]) -> None:
        # The id names a lease that was parked or resized, or a region.
        if (lease := self._store.live.get(event.region_id)) is not None:
            if not self.parking.on_proved(lease, now_ns, effects):
                self._resizes.on_proved(lease, effects)
        else:
            self.regions.on_proved(event, now_ns, effects)

    def _on_reclaim_proved(self, lease: Lease, event: events.ReclaimProved, now_ns: int, effects: list[Effect]) -> None:
        self._teardown.on_reclaim_proved(lease, now_ns, effects)

    def _on_reclaim_failed(self, lease: Lease, event: events.ReclaimFailed, now_ns: int, effects: list[Effect]) -> None:
        self._teardown.on_reclaim_failed(lease, event.reason, now_ns, effects)

    # --- timers ---

    def _on_wait_timer(self, event: events.WaitTimerFired, now_ns: int, effects: list[Effect]) -> None:
        # The request waits for a submit, a resize, a session's return or room. Ask each of them in turn.
        is_handled = self.submits.on_wait_timer(event.request, now_ns, effects)
        is_handled = is_handled or self._resizes.on_wait_timer(event.request, now_ns, effects)
        if not (is_handled or self.parking.deferred.on_wait_timer(event.request, now_ns, effects)):
            self._admission.on_wait_timer(event.request, now_ns, effects)

    def _on_timer_fired(self, lease: Lease, event: events.TimerFired, now_ns: int, effects: list[Effect]) -> None:
        due_ns = timer_due_ns(lease, event.kind)
        # A timer of an earlier generation is outdated: a renewal has armed another one.
        if lease.generation != event.generation or due_ns is None:
            return
        # The deadline has moved since the timer was armed, or the timer fired early.
        if now_ns < due_ns:
            effects.append(ArmTimer(event, due_ns))
        elif event.kind is TimerKind.SPAWN:
            self._on_spawn_timer(lease, now_ns, effects)
        else:
            self._teardown.on_timer(lease, event.kind, now_ns, effects)

    def _on_spawn_timer(self, lease: Lease, now_ns: int, effects: list[Effect]) -> None:
        # Replace a warm context that misses its short timeout. A new worker that misses its long one ends the lease.
        if lease.warm_id and not lease.awaited_bytes:
            reason = f"it did not take its lease within {self._limits.adopt_timeout_s} s"
            self._pool.replace_worker(lease, reason, now_ns, effects, is_gone=False)
            return
        reason = f"it was not ready within {self._limits.spawn_timeout_s} s"
        self._teardown.begin(lease, Cause.SPAWN_FAILED, reason, now_ns, effects)

    # --- shared steps ---

    def _past_outcome(self, lease_id: int) -> RevokeOutcome:
        """Return the outcome of an earlier revoke.

        A repeated revoke gets the same answer as the first, even after a fence was cleared.
        """
        if lease_id in self._store.cleared:
            return RevokeOutcome.FENCED
        is_known = self._store.get_ended(lease_id) is not None or lease_id in self._store.revoked
        return RevokeOutcome.TORN_DOWN if is_known else RevokeOutcome.NOT_FOUND

    def _set_deadline(self, lease: Lease, deadline_ns: int, effects: list[Effect]) -> None:
        lease.deadline_ns = deadline_ns
        effects.append(SetDeadline(lease.lease_id, lease.generation, deadline_ns))
        if lease.submit_id:
            # The submit ends at its lease's deadline or its own, whichever is first.
            self.submits.on_deadline(lease, effects)
        effects.append(ArmTimer(TimerFired(lease.lease_id, lease.generation, TimerKind.EXPIRY), deadline_ns))
        if lease.membership_deadline is not None:
            due_ns = lease.membership_deadline.at_ns
            effects.append(ArmTimer(TimerFired(lease.lease_id, lease.generation, TimerKind.MEMBERSHIP), due_ns))
