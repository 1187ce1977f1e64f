"""Regions: leases inside the session of another lease, from the request until their memory is proved free.

1. A lease's tenant or an operator opens a region. Its bytes are part of the lease's slice. The region's own tenant (or
   an operator) renews and frees it. The tenant of the surrounding lease can also renew it, and can revoke it like an
   operator.
2. An end first changes the region's word, so that no launch that names it starts. Then the worker removes the memory,
   and the bytes are returned to the slice once that is proved. Bytes that are not proved free in time stay fenced and
   charged until the lease ends or an operator vouches for them.
3. If the worker can't remove the memory because a launch still uses it, the lease ends with KERNEL_TIMEOUT. If the
   worker does not answer, the lease ends with UNRESPONSIVE.
4. The lease's end ends all its regions, with its cause. Their bytes are proved free, or fenced, with the lease's own.
5. The bytes kept in an ended region's place stay charged until the session releases the address.
6. A slot is used again once its region is returned, with a number that no region of the lease had before.
7. Regions are parked and moved with their lease's session. If a region ends in a parked session, the worker wipes the
   host's copy of it; if the session has no worker, the broker does.
"""

from collections.abc import Callable
from typing import Final

from gpulease.daemon.contract.regions_page import MAX_NUMBER
from gpulease.daemon.leases import denials, events
from gpulease.daemon.leases.denials import Denial
from gpulease.daemon.leases.events import (
    ArmTimer,
    Effect,
    EndRegion,
    FreeDone,
    LeaseEnded,
    OpenRegion,
    ProveRegion,
    RegionCancelSet,
    RegionGranted,
    Renewed,
    RequestDenied,
    RevokeDone,
    SetRegion,
    TimerFired,
    TimerKind,
)
from gpulease.daemon.leases.model import (
    ENDED_REGIONS,
    FIRST_WARM_ID,
    Cause,
    Lease,
    LeaseSnapshot,
    LeaseState,
    RegionState,
    TableRegion,
    Trigger,
)
from gpulease.daemon.leases.persisted import RegionRow, region_row, revive_region
from gpulease.daemon.leases.quotas import LeasePhase, check_ttl, region_phase_of, renewed_until
from gpulease.daemon.leases.table_state import LeaseStore
from gpulease.protocol.failures import REGION_KEPT
from gpulease.protocol.limits import MAX_REGIONS
from gpulease.protocol.opcodes import RevokeOutcome
from gpulease.protocol.time_units import NS_PER_MS, NS_PER_S

MAX_PLACES: Final = 65_536
"""Maximum number of ended regions of a lease that still keep their addresses. Stops a driver with small granules from
making the broker remember millions."""

_ABANDONED: Final = "the connection of its request was closed"

_LIVE: Final = (RegionState.OPENING, RegionState.ACTIVE)

Condemn = Callable[[Lease, Cause, str, int, list[Effect]], None]


class RegionViews:
    """Queries about regions, which change nothing."""

    def __init__(self, store: LeaseStore) -> None:
        self._store = store

    def snapshots(self) -> tuple[LeaseSnapshot, ...]:
        """Return every region that is not returned, oldest first; `parent_id` is the lease that contains it."""
        unreturned = (region for region in self._store.regions.values() if region.state is not RegionState.RETURNED)
        return tuple(region.snapshot() for region in unreturned)

    def open_ids(self) -> tuple[int, ...]:
        """Return the ids of all regions that are not returned, oldest first."""
        regions = self._store.regions
        return tuple(number for number, region in regions.items() if region.state is not RegionState.RETURNED)

    def lease_ids_of(self, tenant: str | None) -> tuple[int, ...]:
        """Return the ids of a tenant's live leases and of leases that contain its regions; for None, of all leases."""
        live = self._store.live
        if tenant is None:
            return tuple(live)
        return tuple(
            lease.lease_id
            for lease in live.values()
            if lease.tenant == tenant
            or (lease.regions and any(region.tenant == tenant for region in lease.regions.values()))
        )

    def of(self, lease_id: int) -> tuple[LeaseSnapshot, ...]:
        """Return the regions of a live lease that are not returned, by slot."""
        lease = self._store.live.get(lease_id)
        return () if lease is None else tuple(lease.slots[slot].snapshot() for slot in sorted(lease.slots))

    def get(self, region_id: int) -> RegionRow | None:
        """Return the record of a region, for the journal and the worker; None once its last bytes are released."""
        region = self._store.regions.get(region_id)
        return None if region is None else region_row(region)

    def held_bytes(self, lease_id: int) -> int:
        """Return the bytes of a live lease's slice that its regions hold."""
        lease = self._store.live.get(lease_id)
        return 0 if lease is None else lease.region_bytes

    def allowed_bytes(self, lease_id: int) -> int:
        """Return the bytes that a live lease's session may hold on its card while its fenced regions are proved free.

        That is its charge less the bytes that its fenced regions have released. A region with a lasting fence keeps its
        bytes.
        """
        lease = self._store.live.get(lease_id)
        if lease is None:
            return 0
        # The worker has removed the memory of these regions. The proof waits until the card no longer shows it.
        fenced = (region for region in lease.slots.values() if region.state is RegionState.FENCED)
        gone_bytes = sum(region.size_bytes - region.kept_bytes for region in fenced if not region.is_given_up)
        return self._store.charge_bytes(lease_id) - gone_bytes

    def phase(self, region_id: int, now_ns: int) -> LeasePhase | None:
        """Return the phase of a region of a live lease; None if it is unknown or was never open."""
        region = self._store.regions.get(region_id)
        if region is None or region.deadline_ns is None:
            return None
        lease = self._store.live[region.lease_id]
        return region_phase_of(region, lease, self._store.drain_of(lease.card_uuid), now_ns)


class Regions(RegionViews):
    """Manages the regions. Each method appends what to execute to `effects`.

    Args:
        condemn: Called with an active lease, the cause for which its session must end, and the reason in words.
    """

    def __init__(self, store: LeaseStore, condemn: Condemn) -> None:
        super().__init__(store)
        self._condemn = condemn

    # --- requests ---

    def on_requested(self, event: events.RegionRequested, now_ns: int, effects: list[Effect]) -> None:
        """Order the worker to open a region, or refuse the request."""
        lease = self._store.live.get(event.lease_id)
        denial = self._check_request(lease, event, now_ns)
        if denial is not None or lease is None:
            effects.append(RequestDenied(event.request, denial or denials.not_found(event.lease_id)))
            return
        # Record the region before the worker answers: its bytes and its slot are taken from now on.
        region = TableRegion(
            region_id=event.region_id,
            lease_id=lease.lease_id,
            tenant=event.owner or lease.tenant,
            card_uuid=lease.card_uuid,
            exclusivity=lease.terms.exclusivity,
            size_bytes=_rounded(event),
            ttl_ms=event.ttl_ms,
            slot=next(slot for slot in range(MAX_REGIONS) if slot not in lease.slots),
            number=lease.region_number + 1,
            request=event.request,
            created_ns=now_ns,
            open_due_ns=now_ns + self._store.limits.session_timeout_s * NS_PER_S,
            max_story_entries=self._store.limits.max_story_entries,
        )
        self._store.enter_region(lease, region)
        # The request stays open until the worker answers or the timer fires, so that its client always gets a reply.
        self._store.region_requests[event.request] = region.region_id
        effects.append(OpenRegion(lease.lease_id, region.region_id, region.slot, region.number, region.size_bytes))
        effects.append(ArmTimer(TimerFired(region.region_id, region.generation, TimerKind.SPAWN), region.open_due_ns))

    def _check_request(self, lease: Lease | None, event: events.RegionRequested, now_ns: int) -> Denial | None:
        denial = self._store.denial_unless_owner(event.lease_id, event.tenant, event.is_operator)
        # Check in this order: who asks, the lease's state, the driver, the id, the size, the drain, the time.
        denial = denial or self._store.denial_for(event.lease_id, now_ns)
        if denial is not None or lease is None:
            # A region can't contain regions.
            return denial or denials.no_regions(event.lease_id)
        if event.granule_bytes < 1:
            return denials.no_regions(lease.lease_id)
        if not 0 < event.region_id < FIRST_WARM_ID or self._store.is_used(event.region_id):
            return denials.id_used(event.region_id)
        if event.size_bytes < 1:
            return denials.invalid(f"A region can't have {event.size_bytes} bytes.", "Request at least 1 byte.")
        denial = self._store.check_drains(self._store.account_by_uuid[lease.card_uuid])
        denial = denial or check_ttl(event.ttl_ms, self._store.limits, event.owner or lease.tenant)
        return denial or _check_room(lease, _rounded(event))

    def on_renew(self, region: TableRegion, event: events.RenewRequested, now_ns: int, effects: list[Effect]) -> None:
        """Extend an active region's time for its tenant, its lease's tenant or an operator.

        A renewal never shortens the time that was granted before.
        """
        # As for leases: an overdue region can't be renewed, even if its timer is late.
        self._expire_if_due(region, now_ns, effects)
        denial = self._store.denial_without_access(region.region_id, event.tenant, event.is_operator)
        denial = denial or self._store.denial_for(region.region_id, now_ns)
        denial = denial or check_ttl(event.ttl_ms, self._store.limits, region.tenant)
        if denial is not None or region.deadline_ns is None:
            effects.append(RequestDenied(event.request, denial or denials.not_found(region.region_id)))
            return
        # The new generation invalidates the tokens and timers of the old one.
        region.generation += 1
        region.move(Trigger.RENEWED, now_ns)
        region.ttl_ms = event.ttl_ms
        drain_ns = self._store.drain_ns_of(self._store.live[region.lease_id].card_uuid)
        deadline_ns = renewed_until(now_ns, event.ttl_ms, drain_ns)
        self._set_deadline(region, max(region.deadline_ns, deadline_ns), effects)
        effects.append(Renewed(event.request, region.snapshot()))

    def on_free(self, region: TableRegion, event: events.FreeRequested, now_ns: int, effects: list[Effect]) -> None:
        """End a region that its tenant frees, or an operator on the tenant's behalf."""
        self._expire_if_due(region, now_ns, effects)
        denial = self._store.denial_unless_owner(region.region_id, event.tenant, event.is_operator)
        denial = denial or self._store.denial_for(region.region_id, now_ns)
        if denial is not None:
            effects.append(RequestDenied(event.request, denial))
            return
        region.free_request = event.request
        by_whom = "an operator" if event.tenant != region.tenant else "its tenant"
        self._end(region, Cause.FREED, f"freed by {by_whom}", now_ns, effects)

    def on_revoke(self, region: TableRegion, event: events.RevokeRequested, now_ns: int, effects: list[Effect]) -> None:
        """End a region at the request of an operator or of its lease's tenant."""
        self._expire_if_due(region, now_ns, effects)
        # The region's end has been reported already; only its fence remains.
        if region.is_given_up:
            effects.append(RevokeDone(event.request, RevokeOutcome.FENCED))
            return
        # A region that is already ending answers this request too, once its end is proved.
        region.revoke_requests.append(event.request)
        if region.state in _LIVE:
            self._end(region, Cause.REVOKED, event.reason, now_ns, effects)

    def on_cancel_requested(self, event: events.RegionCancelRequested, now_ns: int, effects: list[Effect]) -> None:
        """Make the session refuse launches in an active region, or accept them again."""
        region = self._store.regions.get(event.region_id)
        denial = self._store.denial_without_access(event.region_id, event.tenant, event.is_operator)
        if region is not None and denial is None:
            self._expire_if_due(region, now_ns, effects)
        denial = denial or self._store.denial_for(event.region_id, now_ns)
        if denial is not None or region is None:
            effects.append(RequestDenied(event.request, denial or denials.not_a_region(event.region_id)))
            return
        # Write the word only if it changes: raising the epoch makes the worker read the page again.
        if region.is_cancelled != event.is_cancelled:
            region.is_cancelled = event.is_cancelled
            effects.append(_set_word(region))
        effects.append(RegionCancelSet(event.request, region.region_id))

    def on_requester_gone(self, request: int, now_ns: int, effects: list[Effect]) -> bool:
        """End the region of a client that disconnected; return False if the request was not for a region."""
        # No client has the region's id, so nobody would free it before its time ends.
        region = self._store.regions.get(self._store.region_requests.pop(request, 0))
        if region is None:
            return False
        self._end(region, Cause.ABANDONED, _ABANDONED, now_ns, effects)
        return True

    # --- life ---

    def on_opened(self, event: events.RegionOpened, now_ns: int, effects: list[Effect]) -> None:
        """Grant a region now that its memory is mapped. Its time to live counts from now."""
        region = self._store.regions.get(event.region_id)
        # The region may have ended while the worker mapped it; the order to remove it is already on its way.
        if region is None or region.state is not RegionState.OPENING:
            return
        region.move(Trigger.REGION_OPENED, now_ns)
        region.address = event.address
        del self._store.region_requests[region.request]
        self._set_deadline(region, now_ns + region.ttl_ms * NS_PER_MS, effects)
        effects.append(
            RegionGranted(region.request, region.snapshot(), region.address, region.slot, region.number),
        )

    def on_refused(self, event: events.RegionRefused, now_ns: int, effects: list[Effect]) -> None:
        """Process the answer that the worker does not have a region."""
        match = self._find(event.region_id)
        if match is None or match[1].state not in (RegionState.OPENING, *ENDED_REGIONS):
            return
        lease, region = match
        if region.state is RegionState.OPENING:
            self._change_word(
                region, Cause.SPAWN_FAILED, event.reason, now_ns, effects, denials.region_refused(event.reason)
            )
        region.move(Trigger.REGION_TAKEN, now_ns)
        if region.address and not _was_shown_free(lease):
            # The region was open, so the worker's answer alone does not prove that its memory is free.
            self._prove(lease, region, now_ns, effects)
        else:
            self._return(lease, region, Trigger.RECLAIM_PROVED, now_ns, effects)

    def on_timer(self, event: events.TimerFired, now_ns: int, effects: list[Effect]) -> None:
        """Act on a region's timer if it is due; arm it again if the time has moved."""
        region = self._store.regions.get(event.worker_id)
        # A timer of an earlier generation is outdated: a renewal has armed another one.
        due_ns = None if region is None else _due_ns(region, event.kind)
        if region is None or due_ns is None or region.generation != event.generation:
            return
        limits = self._store.limits
        if now_ns < due_ns:
            effects.append(ArmTimer(event, due_ns))
        elif event.kind is TimerKind.SPAWN:
            waited_s = limits.session_timeout_s
            denial = denials.session_silent(region.lease_id, "open the region", waited_s)
            self._end(region, Cause.SPAWN_FAILED, f"it was not open within {waited_s} s", now_ns, effects, denial)
        elif event.kind is TimerKind.EXPIRY:
            self._expire_if_due(region, now_ns, effects)
        # The region's memory was removed, but the card never showed it as free.
        elif region.state is RegionState.FENCED:
            self._give_up(region, f"its memory was not shown free within {limits.reclaim_timeout_s} s", now_ns, effects)
        # The worker has not removed the memory in time, so end the whole session.
        else:
            self._on_stuck(region, Cause.UNRESPONSIVE, "the session did not answer", now_ns, effects)

    # --- ends ---

    def _end(
        self,
        region: TableRegion,
        cause: Cause,
        reason: str,
        now_ns: int,
        effects: list[Effect],
        denial: Denial | None = None,
    ) -> None:
        """End a region while its lease continues, and order its memory removed."""
        self._change_word(region, cause, reason, now_ns, effects, denial)
        self._order_end(region, now_ns, effects)

    def _order_end(self, region: TableRegion, now_ns: int, effects: list[Effect]) -> None:
        grace_ms = self._store.limits.region_grace_ms
        # The worker waits for launches that name the region, for the grace, before it removes the memory.
        effects.append(EndRegion(region.lease_id, region.region_id, grace_ms))
        self._arm_reclaim(region, now_ns + grace_ms * NS_PER_MS, effects)

    def _arm_reclaim(self, region: TableRegion, since_ns: int, effects: list[Effect]) -> None:
        # Arm a timer for the current wait: first for the worker's answer, later for the proof.
        region.end_due_ns = since_ns + self._store.limits.reclaim_timeout_s * NS_PER_S
        effects.append(ArmTimer(TimerFired(region.region_id, region.generation, TimerKind.RECLAIM), region.end_due_ns))

    def _change_word(
        self, region: TableRegion, cause: Cause, reason: str, now_ns: int, effects: list[Effect], denial: Denial | None
    ) -> None:
        """Change the word of a region that ends, and refuse its client if it still waits for the grant.

        The new word is the first effect of the end, so that afterwards no launch that names the region starts.
        """
        # The state changes first: the word is made from it.
        region.move(cause, now_ns)
        region.cause, region.reason = cause, reason
        effects.append(_set_word(region))
        if self._store.region_requests.pop(region.request, None) is not None:
            effects.append(RequestDenied(region.request, denial or denials.lease_ended(region.snapshot())))

    def _expire_if_due(self, region: TableRegion, now_ns: int, effects: list[Effect]) -> None:
        if region.is_expired(now_ns):
            self._end(region, Cause.EXPIRED, "it was not renewed in time", now_ns, effects)

    def on_ended(self, event: events.RegionEnded, now_ns: int, effects: list[Effect]) -> None:
        """Return the memory that the worker removed if the driver shows it as free; otherwise have the card polled."""
        match = self._find(event.region_id)
        if match is None:
            return
        lease, region = match
        if region.state is RegionState.ACTIVE and region.is_restored:
            # The earlier daemon changed the region's word, and was killed before it recorded that in the journal.
            self._change_word(
                region, Cause.REVOKED, "it had ended before the daemon was restarted", now_ns, effects, None
            )
        if region.state not in ENDED_REGIONS:
            return
        region.move(Trigger.REGION_TAKEN, now_ns)
        # Bytes that neither figure accounts for stay charged.
        region.kept_bytes = min(region.size_bytes, max(event.kept_bytes, region.size_bytes - event.freed_bytes))
        if event.is_shown or _was_shown_free(lease):
            self._return(lease, region, Trigger.RECLAIM_PROVED, now_ns, effects)
        else:
            self._prove(lease, region, now_ns, effects)

    def _prove(self, lease: Lease, region: TableRegion, now_ns: int, effects: list[Effect]) -> None:
        allowed_bytes = self.allowed_bytes(lease.lease_id)
        effects.append(ProveRegion(lease.lease_id, region.region_id, lease.card_uuid, allowed_bytes))
        self._arm_reclaim(region, now_ns, effects)

    def on_stuck(self, event: events.RegionStuck, now_ns: int, effects: list[Effect]) -> None:
        """End the session of a worker that can't remove a region's memory."""
        region = self._store.regions.get(event.region_id)
        is_restored = region is not None and region.state is RegionState.ACTIVE and region.is_restored
        if region is not None and (region.state in ENDED_REGIONS or is_restored):
            self._on_stuck(region, event.cause, event.reason, now_ns, effects)

    def _on_stuck(self, region: TableRegion, cause: Cause, reason: str, now_ns: int, effects: list[Effect]) -> None:
        region.end_due_ns = None
        because = f"region {region.region_id:032x} {REGION_KEPT}: {reason.rstrip('.')}"
        self._condemn(self._store.live[region.lease_id], cause, because, now_ns, effects)

    def on_proved(self, event: events.RegionProved, now_ns: int, effects: list[Effect]) -> None:
        """Return a region after the card has shown its memory free. A lasting fence is not lifted by a proof."""
        match = self._find(event.region_id)
        if match is not None and match[1].state is RegionState.FENCED and not match[1].is_given_up:
            self._return(*match, Trigger.RECLAIM_PROVED, now_ns, effects)

    def on_released(self, event: events.RegionReleased, now_ns: int, effects: list[Effect]) -> None:
        """Give the bytes kept in a region's place back to the slice."""
        match = self._find(event.region_id)
        if match is None:
            return
        if match[1].state is RegionState.RETURNED:
            self._store.forget_region(*match)
        # The fence is not lifted yet. When it is lifted, no bytes remain in the region's place.
        elif match[1].state is RegionState.FENCED:
            match[1].kept_bytes = 0

    def _find(self, region_id: int) -> tuple[Lease, TableRegion] | None:
        """Return a region and its lease while the lease is active, otherwise None.

        A lease that ends handles its regions itself.
        """
        region = self._store.regions.get(region_id)
        lease = None if region is None else self._store.live.get(region.lease_id)
        if region is None or lease is None or lease.state is not LeaseState.ACTIVE:
            return None
        return lease, region

    def _return(self, lease: Lease, region: TableRegion, trigger: Trigger, now_ns: int, effects: list[Effect]) -> None:
        self._store.return_region(lease, region, trigger, now_ns)
        if region.free_request is not None:
            effects.append(FreeDone(region.free_request, region.snapshot()))
        self._report(region, RevokeOutcome.TORN_DOWN, effects)

    def _give_up(self, region: TableRegion, reason: str, now_ns: int, effects: list[Effect]) -> None:
        """Make a fence lasting: until the lease ends, or an operator vouches for the memory."""
        # Answer everyone who waits for the end now. The bytes stay charged to the lease.
        region.is_given_up, region.ended_ns, region.end_due_ns = True, now_ns, None
        region.reason = f"{region.reason.rstrip('.')}; {reason}" if region.reason else reason
        if region.free_request is not None:
            effects.append(RequestDenied(region.free_request, denials.lease_ended(region.snapshot())))
        self._report(region, RevokeOutcome.FENCED, effects)
        # These requests are answered now, and must not be answered again when the fence is cleared.
        region.free_request, region.revoke_requests = None, []

    def _report(self, region: TableRegion, outcome: RevokeOutcome, effects: list[Effect]) -> None:
        effects.extend(RevokeDone(request, outcome) for request in region.revoke_requests)
        if region.cause is not None:
            effects.append(LeaseEnded(region.snapshot(), region.cause, tuple(region.history)))

    # --- with the lease ---

    def end_with_lease(self, lease: Lease, now_ns: int, effects: list[Effect]) -> None:
        """End the regions of a lease that was ended. The proof of the lease's bytes covers theirs."""
        for region in lease.slots.values():
            region.end_due_ns = None
            if region.state in _LIVE and lease.cause is not None:
                reason = f"its lease ended: {lease.reason}" if lease.reason else "its lease ended"
                self._change_word(region, lease.cause, reason, now_ns, effects, None)

    def fence_with(self, lease: Lease, now_ns: int, effects: list[Effect]) -> None:
        """Fence the regions of a lease, because the lease's bytes could not be proved free."""
        for region in lease.slots.values():
            if region.state in ENDED_REGIONS:
                region.move(Trigger.REGION_TAKEN, now_ns)
            if not region.is_given_up:
                self._give_up(region, "the memory of its lease was not shown free", now_ns, effects)

    def return_with(self, lease: Lease, trigger: Trigger, now_ns: int, effects: list[Effect]) -> tuple[int, ...]:
        """Forget all regions of a lease, because the lease's bytes are free.

        Args:
            lease: The lease.
            trigger: RECLAIM_PROVED, or FENCE_CLEARED if an operator vouches for the bytes.
            now_ns: Monotonic time.
            effects: Receives the effects.

        Returns:
            The ids of the regions that were not returned before.
        """
        # The proof of the lease's bytes covers its regions, so they end with it, whatever state they are in.
        unreturned = tuple(lease.slots.values())
        for region in unreturned:
            region.kept_bytes = 0
            if region.state in ENDED_REGIONS:
                region.move(Trigger.REGION_TAKEN, now_ns)
            # The end of a region with a lasting fence was reported already. Report the others now.
            if region.is_given_up:
                self._store.return_region(lease, region, trigger, now_ns)
            else:
                self._return(lease, region, trigger, now_ns, effects)
        for region in tuple(lease.regions.values()):
            self._store.forget_region(lease, region)
        return tuple(region.region_id for region in unreturned)

    def clear_fences(self, card_uuids: set[str], now_ns: int) -> tuple[int, ...]:
        """Return regions with lasting fences, because an operator vouches for them; return their ids.

        The regions of a fenced lease are returned with that lease.
        """
        fenced = [region for region in self._store.regions.values() if region.state is RegionState.FENCED]
        cleared = [region for region in fenced if region.is_given_up and region.card_uuid in card_uuids]
        for region in cleared:
            self._store.return_region(self._store.live[region.lease_id], region, Trigger.FENCE_CLEARED, now_ns)
        return tuple(region.region_id for region in cleared)

    # --- regions of an earlier table ---

    def on_restored(self, event: events.RegionRestored, now_ns: int, effects: list[Effect]) -> None:
        """Add a region of an earlier table. The region continues if its lease continues."""
        row, lease = event.kept, self._store.live.get(event.kept.lease_id)
        # A returned region that keeps bytes in its place is also remembered as ended.
        is_known = self._store.get(row.region_id) is not None
        if is_known and (lease is None or row.state is not RegionState.RETURNED):
            return
        # The region's lease is over, so only the record of its end is needed.
        if lease is None:
            self._record_ended(row, now_ns, effects)
            return
        region = revive_region(row, lease)
        self._store.enter_region(lease, region)
        if region.state is RegionState.RETURNED:
            return
        if lease.state is LeaseState.ACTIVE:
            self._continue(lease, region, now_ns, effects)
            return
        self.end_with_lease(lease, now_ns, effects)
        if lease.state is LeaseState.FENCED:
            self.fence_with(lease, now_ns, effects)

    def _continue(self, lease: Lease, region: TableRegion, now_ns: int, effects: list[Effect]) -> None:
        # The grant of an OPENING region was never reported, so no client has its id.
        if region.state is RegionState.OPENING:
            self._end(region, Cause.ABANDONED, "its grant was not reported before the daemon ended", now_ns, effects)
        elif region.is_expired(now_ns):
            self._expire_if_due(region, now_ns, effects)
        # Write the word and arm the timer again: the earlier broker's timers died with it.
        elif region.state is RegionState.ACTIVE and region.deadline_ns is not None:
            self._set_deadline(region, region.deadline_ns, effects)
        else:
            # The region had ended. Write its word again in case the page lacks it, and continue its end where it was.
            effects.append(_set_word(region))
            if region.state in ENDED_REGIONS:
                self._order_end(region, now_ns, effects)
            elif not region.is_given_up:
                self._prove(lease, region, now_ns, effects)

    def _record_ended(self, row: RegionRow, now_ns: int, effects: list[Effect]) -> None:
        """Record a region of a lease that is already over as ended, and report its end unless that was reported."""
        cause = row.cause or Cause.WORKER_DIED
        was_reported = row.is_given_up or row.state is RegionState.RETURNED
        # Without a record of its lease, the tenant is not known either.
        if lease := self._store.get(row.lease_id):
            ended = lease._replace(
                lease_id=row.region_id,
                tenant=row.tenant,
                size_bytes=row.size_bytes,
                generation=row.generation,
                cause=cause,
                reason=row.reason or "its lease was gone when the daemon was restarted",
                fault="",
                created_ns=row.created_ns,
                deadline_ns=row.deadline_ns,
                ended_ns=row.ended_ns or now_ns,
                ttl_ms=row.ttl_ms,
                parent_id=row.lease_id,
            )
            self._store.remember(ended)
            if not was_reported:
                effects.append(LeaseEnded(ended, cause, ()))

    def _set_deadline(self, region: TableRegion, deadline_ns: int, effects: list[Effect]) -> None:
        region.deadline_ns = deadline_ns
        effects.append(_set_word(region))
        effects.append(ArmTimer(TimerFired(region.region_id, region.generation, TimerKind.EXPIRY), deadline_ns))


def _rounded(event: events.RegionRequested) -> int:
    """Return the requested size, rounded up to a multiple of the session's granularity."""
    return -(-event.size_bytes // event.granule_bytes) * event.granule_bytes


def _was_shown_free(lease: Lease) -> bool:
    """Return whether a lease's session is parked, so that the card has shown its regions' bytes free already."""
    return lease.park is not None and lease.park.is_shown_off


def _check_room(lease: Lease, size_bytes: int) -> Denial | None:
    """Return the denial for a region that does not fit into an active lease; None if it fits."""
    room_bytes = lease.region_room_bytes
    # Check the bounds from the session down to the bytes, so that the denial names the one that the tenant can act on.
    if lease.own_submit_bytes:
        return denials.session_taken(lease.lease_id)
    if len(lease.slots) >= MAX_REGIONS:
        return denials.too_many_regions(lease.lease_id)
    if len(lease.regions) - len(lease.slots) >= MAX_PLACES:
        return denials.too_many_places(lease.lease_id)
    if lease.region_number >= MAX_NUMBER:
        return denials.regions_used_up(lease.lease_id)
    if size_bytes > room_bytes:
        return denials.region_too_large(lease.lease_id, size_bytes, room_bytes)
    left_bytes = room_bytes - lease.region_bytes
    return None if size_bytes <= left_bytes else denials.regions_full(lease.lease_id, size_bytes, left_bytes)


def _set_word(region: TableRegion) -> SetRegion:
    """Return the order to write a region's current word and deadline."""
    deadline_ns = region.deadline_ns or 0
    return SetRegion(region.lease_id, region.region_id, region.slot, region.number, region.word, deadline_ns)


def _due_ns(region: TableRegion, kind: TimerKind) -> int | None:
    """Return the time at which a region's timer of that kind is due; None if it can be dropped."""
    match (region.state, kind):
        case (RegionState.OPENING, TimerKind.SPAWN):
            return region.open_due_ns
        case (RegionState.ACTIVE, TimerKind.EXPIRY):
            return region.deadline_ns
        case (_, TimerKind.RECLAIM):
            return region.end_due_ns
    return None
