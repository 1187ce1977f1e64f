"""Parking: the bytes of an idle session are moved from the card to host memory, and back before its next operation.

1. A session is parked because its tenant or an operator asks for it, because it was idle for its lease's idle time, or
   because an acquire or a returning session lacks room on the card. In the last case the sessions that were used least
   recently are parked first. Only parkable leases are parked; the slices of others stay on their cards.
2. The context stays on the card, and so do the bytes that the worker reports to keep, such as code. The other bytes are
   released once the card shows that the worker no longer holds them. Until then, also after a refusal, the lease is
   charged for all of its bytes.
3. When an operation waits, the worker asks for the return. The card is charged first, then the worker receives the
   order. Without room, the session waits in the queue of acquires, first come, first served, for the longest wait that
   its acquire allowed or for `session_timeout_s`, whichever is longer. Then the operation fails as BUSY, and the
   session stays parked.
4. Host memory is held for the whole slice: from the grant on if enough is free, otherwise from the order to park on. A
   session on the card keeps its host memory until another one needs it for a park. When a session that was parked for
   others' need returns, memory is prepared for the sessions of its card that will be parked next, and its own is
   released if no other is left. All host memory of a session is returned when its worker's process ends. With
   overcommit, each park for others' need makes the session that will be parked next copy its bytes ahead while it is
   idle. That session stays on the card, and all rules treat it as if nothing was copied: its worker forgets the copy
   when the session is used.
5. Thrashing is limited: a session that has returned, or that is in use, is not parked for others' need for
   `park_stay_ms`, and a card has at most `parks_per_minute`, of which some are kept for others' need. With
   `moves_for_need`, sessions are moved to cards that have room for them, and parked only if there are none.
6. Regions are parked with their session. If one ends while the session is parked, its bytes are wiped in host memory,
   and need no other proof than the park's. While a region is being opened or ended, or is fenced, its session is not
   parked.
7. A lease with a submit or a resize in progress is not parked. If kernels do not end within PARK_GRACE_MS, the session
   stays on its card, and the worker reports that.
8. A session of an earlier table may be parked, parking or returning. It is charged in full, and its worker gets the
   order that its record requires. A worker that has already done that answers again. If a park was not recorded, the
   session returns at once, even if no operation waits for it, because requests to the broker may wait.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from gpulease.daemon.leases import denials, events
from gpulease.daemon.leases.cold_parking import (
    ColdParking,
    Condemn,
    ContextPool,
    arm_park_timer,
    find_parkable,
    refuse_parks,
    requester_of,
)
from gpulease.daemon.leases.deferred_requests import DeferredRequests
from gpulease.daemon.leases.denials import Denial
from gpulease.daemon.leases.devices import CardAccount
from gpulease.daemon.leases.direct_moves import NO_PAGES
from gpulease.daemon.leases.events import (
    AcquireRequested,
    ArmTimer,
    CopyAhead,
    DropParkMemory,
    Effect,
    GiveParkMemory,
    LeaseParked,
    LeaseReturned,
    ParkFailed,
    ParkSession,
    ParkTimerFired,
    ProveRegion,
    RefuseWaitingOperations,
    RequestDenied,
    ReturnSession,
    SessionParkDone,
    SetDeadline,
    WaitTimerFired,
)
from gpulease.daemon.leases.model import ALONE, Cause, Lease, LeaseState, LeaseTerms, RegionState
from gpulease.daemon.leases.need_moves import NeedMoves, plan_moves
from gpulease.daemon.leases.park_state import ParkCause, ParkDepth, ParkFailure, ParkPhase, ParkSnapshot, ParkState
from gpulease.daemon.leases.quotas import Rates
from gpulease.daemon.leases.table_state import LeaseStore
from gpulease.daemon.leases.wait_queue import Waiter
from gpulease.protocol.sizes import size_text
from gpulease.protocol.time_units import NS_PER_MINUTE, NS_PER_MS, NS_PER_S

PARK_GRACE_MS: Final = 1000
"""Time in milliseconds within which launched work must end before a park; otherwise the session is not parked. During
this time its tenant's next operations wait."""

PARK_GRANULE_BYTES: Final = 2 << 20
"""Granule of a parkable session's pages: host memory is held in multiples of it."""

PARK_BURST: Final = 32
"""Number of parks that one card may have at once, before `parks_per_minute` spaces them out."""

KEPT_SHARE: Final = 0.5
"""Share of PARK_BURST that is reserved for others' need for room and for operators. Stops a tenant that parks its
session all the time from keeping others waiting for room."""

_KEPT_PARKS: Final = int(PARK_BURST * KEPT_SHARE)

_LEAVES_SHARE: Final = (ParkCause.TENANT, ParkCause.IDLE)
"""The causes of parks that may not use KEPT_SHARE."""


class ParkPace(NamedTuple):
    """How long a card's next park has to wait because of `parks_per_minute`; each is 0 if it may begin at once.

    Attributes:
        need_wait_ns: The wait of a park for others' need, or of one that an operator requests.
        tenant_wait_ns: The wait of a park that its tenant requests, or that idleness causes.
    """

    need_wait_ns: int
    tenant_wait_ns: int


class ParksTogether:
    """Parks that are to begin at the same time, and the host memory that they need.

    The sums are computed once, because a plan may have to consider every session of a card.

    Attributes:
        parks: Number of these parks.
        host_bytes: Host memory in use once they have begun: that of these parks, and that of all sessions off their
            cards. The memory that sessions on a card keep for their next park is excluded, because these parks may take
            it.
    """

    def __init__(self, store: LeaseStore) -> None:
        self._store = store
        self._bytes_by_tenant: Counter[str] = Counter()
        self._has_parked_bytes = False
        resident = (lease.park for lease in store.parkable.values() if _is_resident(lease))
        self.parks = 0
        self.host_bytes = store.parked_host_bytes - sum(state.host_bytes for state in resident if state is not None)

    def add(self, lease: Lease) -> None:
        self.parks += 1
        self.host_bytes += host_bytes_of(lease.terms.size_bytes)
        self._bytes_by_tenant[lease.tenant] += lease.terms.size_bytes

    def parked_bytes(self, tenant: str) -> int:
        """Return how many bytes of a tenant's slices are, may be, or are to be in the host's memory."""
        # Few tenants have a bound, so most plans need no sum.
        if not self._has_parked_bytes:
            self._has_parked_bytes = True
            for lease in self._store.parkable.values():
                if lease.park is not None and lease.park.is_off:
                    self._bytes_by_tenant[lease.tenant] += lease.terms.size_bytes
        return self._bytes_by_tenant[tenant]


class ParkingViews:
    """Queries about parking, which change nothing."""

    def __init__(self, store: LeaseStore) -> None:
        self._store = store

    def of(self, lease_id: int) -> ParkSnapshot | None:
        """Return the parking state of a live lease; None if it is not parkable, or unknown."""
        lease = self._store.parkable.get(lease_id)
        return None if lease is None or lease.park is None else lease.park.snapshot(lease.terms.park_idle_ms or 0)

    def snapshots(self) -> dict[int, ParkSnapshot]:
        """Return the parking state of each live parkable lease, by id."""
        snapshots = {lease_id: self.of(lease_id) for lease_id in self._store.parkable}
        return {lease_id: park for lease_id, park in snapshots.items() if park is not None}

    def host_bytes(self) -> tuple[int, int]:
        """Return the host memory that is held for sessions, and its maximum."""
        return self._store.parked_host_bytes, self._store.limits.park_memory_bytes

    def leases(self) -> tuple[int, ...]:
        """Return all live parkable leases."""
        return tuple(self._store.parkable)

    def watched(self) -> tuple[int, ...]:
        """Return the leases with sessions that are on a card and may leave it, so that their use must be observed."""
        return tuple(lease.lease_id for lease in self._store.parkable.values() if _is_resident(lease))


class Parking(ParkingViews):
    """Parks sessions and brings them back. Each method appends what to execute to `effects`."""

    def __init__(self, store: LeaseStore, condemn: Condemn) -> None:
        super().__init__(store)
        self._condemn = condemn
        # The rate of parks, by card.
        self._paces = Rates()
        # Time for which the node's timer is armed; None if it is not.
        self._armed_ns: int | None = None
        self.deferred = DeferredRequests(store, self._await_return)

    def use_pool(self, pool: ContextPool) -> None:
        """Set the pool, which takes over the workers that sessions have left, and provides others."""
        self.cold = ColdParking(
            self._store, pool, self._await_return, self._park_if_allowed, self._condemn, self.deferred
        )

    # --- requests ---

    def on_requested(self, event: events.ParkRequested, now_ns: int, effects: list[Effect]) -> None:
        """Park a session for its tenant or an operator, or refuse the request."""
        parkable = find_parkable(self._store, event, now_ns)
        if isinstance(parkable, Denial):
            effects.append(RequestDenied(event.request, parkable))
            return
        # If the session is parked already, or is being parked, that answers this request as well.
        lease, state = parkable
        if state.phase is ParkPhase.PARKED and not state.is_awaited:
            effects.append(SessionParkDone(event.request, lease.snapshot(), state.moved_bytes))
            return
        if state.phase is ParkPhase.PARKED:
            effects.append(RequestDenied(event.request, denials.is_returning(lease.lease_id)))
            return
        # The tenant may be notified of its session's return before this table is, because the worker answers both at
        # the same time.
        cause = requester_of(event, lease)
        if state.phase is ParkPhase.RESIDENT:
            if (denial := self._park_if_allowed(lease, cause, now_ns, effects)) is not None:
                effects.append(RequestDenied(event.request, denial))
                return
        elif state.phase is ParkPhase.RETURNING and not state.requests:
            state.cause = cause
        state.requests.append(event.request)

    def _park_if_allowed(self, lease: Lease, cause: ParkCause, now_ns: int, effects: list[Effect]) -> Denial | None:
        """Park a resident session, or return the denial."""
        if (denial := self._check_park(lease, cause, now_ns)) is None:
            self._park(lease, cause, now_ns, effects)
        return denial

    def _check_park(
        self, lease: Lease, cause: ParkCause, now_ns: int, others: "ParksTogether | None" = None
    ) -> Denial | None:
        """Return the denial for a park of a resident session; None if it may be parked now.

        Args:
            lease: Its lease.
            cause: Why it would be parked.
            now_ns: The time.
            others: The parks that are to begin with this one; None without any.
        """
        if (denial := _check_work(lease)) is not None:
            return denial
        others = others or ParksTogether(self._store)
        return self._check_host(lease, others) or self._check_pace(lease, cause, others.parks + 1, now_ns)

    def _check_host(self, lease: Lease, others: "ParksTogether") -> Denial | None:
        """Return the denial if the host memory, or its tenant's part of it, can't hold a session together with others.

        Every park that this table begins must pass this check; these bounds are checked nowhere else.
        """
        most_bytes = self._store.limits.park_memory_bytes
        if not most_bytes:
            return denials.parking_off(lease.lease_id)
        needed_bytes = host_bytes_of(lease.terms.size_bytes)
        if others.host_bytes + needed_bytes > most_bytes:
            return denials.no_host_memory(lease.lease_id, needed_bytes, most_bytes - others.host_bytes)
        bound = self._store.limits.tenants.of(lease.tenant).max_parked_bytes
        if bound is None:
            return None
        tenant_bytes = others.parked_bytes(lease.tenant)
        if tenant_bytes + lease.terms.size_bytes <= bound:
            return None
        return denials.over_tenant_limit(
            lease.tenant,
            "parked_bytes",
            f"{size_text(lease.terms.size_bytes)} were to be parked; this tenant has "
            f"{size_text(tenant_bytes)} parked and may have at most {size_text(bound)}",
            "Free a parked lease, or bring one back to its card by using it.",
        )

    def _check_pace(self, lease: Lease, cause: ParkCause, parks: int, now_ns: int) -> Denial | None:
        kept = _KEPT_PARKS if cause in _LEAVES_SHARE else 0
        wait_ns = self._pace_wait_ns(lease.card_uuid, parks, now_ns, kept)
        return denials.too_many_parks(lease.lease_id, -(-wait_ns // NS_PER_MS)) if wait_ns else None

    def paces(self, now_ns: int) -> dict[str, ParkPace]:
        """Return the pace of each card's parks, by the card's UUID."""
        uuids = [account.card.uuid for account in self._store.accounts]
        waits = {uuid: [self._pace_wait_ns(uuid, 1, now_ns, kept) for kept in (0, _KEPT_PARKS)] for uuid in uuids}
        return {uuid: ParkPace(*wait_ns) for uuid, wait_ns in waits.items()}

    def _pace_wait_ns(self, card_uuid: str, parks: int, now_ns: int, kept: int = 0) -> int:
        """Return the time until a card may begin `parks` parks together, and `kept` more; 0 if it may now."""
        # If more parks are needed than the burst allows, allow them as soon as the card may have a whole burst.
        burst = PARK_BURST - kept
        return self._paces.early_ns(card_uuid, self._park_interval_ns, burst, now_ns, min(parks, burst))

    @property
    def _park_interval_ns(self) -> int:
        return NS_PER_MINUTE // self._store.limits.parks_per_minute

    # --- parking ---

    def _park(self, lease: Lease, cause: ParkCause, now_ns: int, effects: list[Effect]) -> None:
        """Order a worker to park its session, which `_check_park` has allowed."""
        state = lease.park
        if state is None:
            return
        self._paces.count(lease.card_uuid, self._park_interval_ns, now_ns)
        self._hold_host(lease, effects)
        state.cause, state.is_repeated = cause, False
        self._order(lease, state, now_ns, effects)

    def _hold_host(self, lease: Lease, effects: list[Effect]) -> None:
        """Hold host memory for a session.

        If necessary, take it from sessions on a card that keep memory for their next park.
        """
        needed_bytes = host_bytes_of(lease.terms.size_bytes)
        more_bytes = needed_bytes - (lease.park.host_bytes if lease.park is not None else 0)
        if more_bytes <= 0:
            return
        if self._store.parked_host_bytes + more_bytes > self._store.limits.park_memory_bytes:
            self._take_host(lease, more_bytes, effects)
        self._give_host(lease, needed_bytes, effects)

    def _take_host(self, lease: Lease, more_bytes: int, effects: list[Effect]) -> None:
        keepers = [keeper for keeper in self._store.parkable.values() if keeper is not lease and _is_resident(keeper)]
        # Begin with the session that was used last: the one used least recently will be parked next, and would then be
        # slow.
        for other in sorted(keepers, key=_used_ns, reverse=True):
            if self._store.parked_host_bytes + more_bytes <= self._store.limits.park_memory_bytes:
                break
            if other.park is not None and other.park.host_bytes:
                self._store.hold_host(other, 0)
                effects.append(DropParkMemory(other.lease_id))

    def _give_host(self, lease: Lease, host_bytes: int, effects: list[Effect]) -> None:
        self._store.hold_host(lease, host_bytes)
        effects.append(GiveParkMemory(lease.lease_id, host_bytes))

    def _prepare_host(self, lease: Lease, effects: list[Effect]) -> None:
        """Hold host memory for a session before it is parked, if enough for its whole slice is free."""
        # Allocating host memory takes ten times as long as copying into it, so a park is fast only if this is done.
        needed_bytes = host_bytes_of(lease.terms.size_bytes)
        if self._store.parked_host_bytes + needed_bytes <= self._store.limits.park_memory_bytes:
            self._give_host(lease, needed_bytes, effects)

    def _pass_host_on(self, lease: Lease, effects: list[Effect]) -> None:
        """Hold host memory for the sessions that will be parked next for others' need, if they have none.

        `lease`: The session that was used last. If no other memory is left, its memory is taken.
        """
        on_card = [other for other in self._store.parkable.values() if other.card_uuid == lease.card_uuid]
        others = [other for other in on_card if other is not lease and _is_resident(other)]
        own_bytes = 0 if lease.park is None else lease.park.host_bytes
        free_bytes = self._store.limits.park_memory_bytes - self._store.parked_host_bytes
        receivers, more_bytes = list[Lease](), 0
        for other in sorted(others, key=_used_ns):
            lacking_bytes = host_bytes_of(other.terms.size_bytes) - (other.park.host_bytes if other.park else 0)
            if lacking_bytes <= 0:
                continue
            if more_bytes + lacking_bytes > free_bytes + own_bytes:
                break
            receivers.append(other)
            more_bytes += lacking_bytes
        if receivers and more_bytes > free_bytes:
            self._store.hold_host(lease, 0)
            effects.append(DropParkMemory(lease.lease_id))
        for other in receivers:
            self._give_host(other, host_bytes_of(other.terms.size_bytes), effects)

    def _copy_next_ahead(self, card_uuid: str, effects: list[Effect]) -> None:
        """Make the session that others' need would park next on a card copy its bytes ahead, if it has host memory."""
        if self._store.limits.overcommit <= 1.0:
            return
        on_card = [lease for lease in self._store.parkable.values() if lease.card_uuid == card_uuid]
        able = [lease for lease in on_card if _is_resident(lease) and _check_work(lease) is None]
        lease = min(able, key=_used_ns, default=None)
        if lease is None or lease.park is None:
            return
        if lease.park.host_bytes >= host_bytes_of(lease.terms.size_bytes):
            effects.append(CopyAhead(lease.lease_id))

    def _order(self, lease: Lease, state: ParkState, now_ns: int, effects: list[Effect]) -> None:
        state.phase, state.number, state.ordered_ns = ParkPhase.PARKING, max(now_ns, state.number + 1), now_ns
        state.due_ns = now_ns + PARK_GRACE_MS * NS_PER_MS + self._store.limits.session_timeout_s * NS_PER_S
        in_place = state.move is not None and state.move.keeps_pages
        effects.append(ParkSession(lease.lease_id, state.number, PARK_GRACE_MS, in_place))
        arm_park_timer(lease, state.due_ns, effects)

    def on_parked(self, event: events.SessionParked, now_ns: int, effects: list[Effect]) -> None:
        """Process the worker's answer: have the card polled before any of the bytes is granted to others."""
        if self._repeat_return(event.lease_id, event.number, effects):
            return
        lease = self._awaiting_answer(event.lease_id, event.number, ParkPhase.PARKING)
        if lease is None or lease.park is None:
            return
        state = lease.park
        state.moved_bytes, state.ahead_bytes = event.moved_bytes, event.ahead_bytes
        if (move := state.move) is not None and move.keeps_pages:
            if event.is_in_place:
                self._park_in_place(lease, state, now_ns, effects)
                return
            state.move = move._replace(why_through_host=move.why_through_host or NO_PAGES, by_ring=False)
        state.phase = ParkPhase.PROVING
        state.kept_bytes = state.code_bytes = min(event.kept_bytes, lease.terms.size_bytes)
        self._prove(lease, state, effects)

    def _park_in_place(self, lease: Lease, state: ParkState, now_ns: int, effects: list[Effect]) -> None:
        """Let a session that moves directly leave its process.

        No proof is needed: all of its bytes stay on its card.
        """
        state.phase, state.due_ns, state.is_in_place = ParkPhase.PARKED, None, True
        state.kept_bytes, state.off_bytes = lease.terms.size_bytes, 0
        # Requests to park that arrived since the move began can't be fulfilled.
        refuse_parks(state, denials.is_moving(lease.lease_id), effects)
        self.cold.on_parked(lease, now_ns, effects)

    def _prove(self, lease: Lease, state: ParkState, effects: list[Effect]) -> None:
        """Have the card polled until it shows that the worker holds only the bytes that it keeps."""
        allowed_bytes = self._store.charge_bytes(lease.lease_id) - lease.terms.size_bytes + state.kept_bytes
        effects.append(ProveRegion(lease.lease_id, lease.lease_id, lease.card_uuid, allowed_bytes))

    def on_proved(self, lease: Lease, now_ns: int, effects: list[Effect]) -> bool:
        """Release the bytes that the card shows free; return False if the proof is not of a park."""
        state = lease.park
        if state is None or state.phase is not ParkPhase.PROVING or lease.state is not LeaseState.ACTIVE:
            return False
        state.phase, state.due_ns = ParkPhase.PARKED, None
        state.off_bytes = lease.terms.size_bytes - state.kept_bytes
        self._store.account_by_uuid[lease.card_uuid].free_parked(lease, state.off_bytes)
        self._store.has_freed_room = True
        # Answer the requests after the bytes are released, because a client that receives the answer may acquire at
        # once. A session that could not return, or that an earlier daemon parked, is recorded as parked already.
        if not state.parked_ns:
            state.parked_ns = now_ns
            state.parks += 1
            cause = state.cause or ParkCause.TENANT
            took_ns = now_ns - state.ordered_ns
            effects.append(LeaseParked(lease.snapshot(), cause, state.moved_bytes, took_ns, state.ahead_bytes))
        for request in state.requests:
            effects.append(SessionParkDone(request, lease.snapshot(), state.moved_bytes))
        state.requests.clear()
        if state.cause is ParkCause.NEED and state.move is None:
            self._copy_next_ahead(lease.card_uuid, effects)
        # An operation arrived while the bytes were being moved.
        if state.is_awaited:
            self.cold.refuse_move(lease, denials.is_returning(lease.lease_id), now_ns, effects)
            self._await_return(lease, state, now_ns, effects)
        else:
            self.cold.on_parked(lease, now_ns, effects)
        return True

    def on_park_refused(self, event: events.SessionParkRefused, now_ns: int, effects: list[Effect]) -> None:
        """Keep a session on the card after its worker failed to park it, and report why."""
        lease = self._awaiting_answer(event.lease_id, event.number, ParkPhase.PARKING)
        if lease is None or lease.park is None:
            return
        cause = lease.park.cause or ParkCause.TENANT
        effects.append(ParkFailed(lease.snapshot(), cause, event.reason, ParkFailure.PARK))
        denial = denials.park_refused(lease.lease_id, event.reason)
        refuse_parks(lease.park, denial, effects)
        self.cold.refuse_move(lease, denial, now_ns, effects)
        if event.lacks_memory:
            # The worker could not be given any memory, or an earlier daemon gave it less: give it other memory for the
            # next park.
            self._store.hold_host(lease, 0)
            effects.append(DropParkMemory(lease.lease_id))
        # An earlier daemon recorded the park, but the session had returned before this daemon repeated the order.
        _record_return(lease, lease.park, 0, now_ns, effects)
        # A kernel that still runs counts as use of the session. After any other refusal, wait for another idle time.
        _postpone_idle(lease, lease.park, now_ns)
        self._become_resident(lease, lease.park, now_ns, effects)

    def _become_resident(self, lease: Lease, state: ParkState, now_ns: int, effects: list[Effect]) -> None:
        """Enter RESIDENT: the whole session is on its card."""
        state.phase, state.cause, state.due_ns = ParkPhase.RESIDENT, None, None
        state.parked_ns = state.kept_bytes = 0
        state.is_in_place = False
        state.is_awaited = False
        state.stays_until_ns = now_ns + self._store.limits.park_stay_ms * NS_PER_MS
        self._arm_idle(lease, effects)

    # --- returning ---

    def on_return_wanted(self, event: events.ReturnWanted, now_ns: int, effects: list[Effect]) -> None:
        """Bring back a session for which its tenant waits, now or once it fits. Repeated reports are harmless."""
        if self._repeat_return(event.lease_id, event.number, effects):
            return
        lease = self._store.parkable.get(event.lease_id)
        state = None if lease is None else lease.park
        if lease is None or state is None or lease.state is not LeaseState.ACTIVE or event.number != state.number:
            return
        # A session that is leaving its process must answer first. Then it asks again, or the broker does for its
        # clients.
        if state.depth is ParkDepth.LEAVING:
            return
        is_known = state.is_awaited and state.phase is ParkPhase.PARKED
        if is_known or state.phase not in (ParkPhase.PARKED, ParkPhase.PROVING):
            return
        # A session that is being moved returns anyway, on the other card, and the waiting requests move with it.
        if state.phase is ParkPhase.PROVING and state.move is not None and state.move.card_uuid:
            return
        state.is_awaited = True
        # The lease is still charged for its bytes, so the return needs no room.
        if state.phase is ParkPhase.PROVING:
            # But an earlier table may have granted these bytes to others. In that case the proof and the wait for room
            # come first.
            if self._store.account_by_uuid[lease.card_uuid].free_bytes < 0:
                return
            # This is the second operation: the tenant uses the session, and another park would only delay it.
            if state.is_repeated:
                refuse_parks(state, denials.is_returning(lease.lease_id), effects)
            self.cold.refuse_move(lease, denials.is_returning(lease.lease_id), now_ns, effects)
            self._order_return(lease, state, now_ns, effects)
        else:
            self._await_return(lease, state, now_ns, effects)

    def _repeat_return(self, lease_id: int, number: int, effects: list[Effect]) -> bool:
        """Order the return again from a worker in a park that an earlier daemon ordered; return False for any other.

        The worker carried out that park only after this daemon had ordered the return, so the order has another number.
        """
        lease = self._store.parkable.get(lease_id)
        state = None if lease is None else lease.park
        if lease is None or state is None or lease.state is not LeaseState.ACTIVE or lease.awaited_bytes:
            return False
        if state.phase is not ParkPhase.RETURNING or number == state.number:
            return False
        state.number = number
        effects.append(ReturnSession(lease_id, number))
        return True

    def _await_return(self, lease: Lease, state: ParkState, now_ns: int, effects: list[Effect]) -> None:
        """Bring back a parked session if it fits and no waiter holds its card; otherwise add it to the queue."""
        account = self._store.account_by_uuid[lease.card_uuid]
        if not state.off_bytes:
            # All of its bytes are on the card.
            self.give_room(lease, now_ns, effects)
            self._order_return(lease, state, now_ns, effects)
            return
        is_held = lease.card_uuid in self._store.queue.held_cards()
        if not is_held and state.off_bytes <= account.free_bytes:
            self.give_room(lease, now_ns, effects)
            return
        acquire = AcquireRequested(-lease.lease_id, lease.tenant, lease.lease_id, lease.terms, wait_ms=lease.wait_ms)
        wait_ns = max(lease.wait_ms * NS_PER_MS, self.patience_ns)
        holds_until_ns = self._store.queue.terms.end_for(lease.tenant, now_ns)
        waiter = Waiter(acquire, (account,), now_ns, now_ns + wait_ns, holds_until_ns, lease)
        self._store.queue.join(waiter)
        effects.append(ArmTimer(WaitTimerFired(acquire.request), waiter.due_ns))
        if (hold_end_ns := self._store.queue.next_hold_end_ns()) is not None:
            effects.append(ArmTimer(events.HoldTimerFired(), hold_end_ns))

    def give_room(self, lease: Lease, now_ns: int, effects: list[Effect]) -> None:
        """Charge the card for a parked session. The return is ordered once warm contexts have left."""
        state = lease.park
        if state is None:
            return
        off_bytes, state.off_bytes = state.off_bytes, 0
        state.phase = ParkPhase.RETURNING
        self._store.account_by_uuid[lease.card_uuid].take_parked(lease, off_bytes)

    def start_return(self, lease: Lease, now_ns: int, effects: list[Effect]) -> None:
        """Order the return of a session that has room. The pool calls this."""
        if lease.park is not None and lease.park.depth is ParkDepth.COLD:
            self.cold.start_return(lease, lease.park, now_ns, effects)
        elif lease.park is not None:
            self._order_return(lease, lease.park, now_ns, effects)

    def _order_return(self, lease: Lease, state: ParkState, now_ns: int, effects: list[Effect]) -> None:
        state.phase, state.due_ns = ParkPhase.RETURNING, None
        state.ordered_ns = now_ns
        effects.append(ReturnSession(lease.lease_id, state.number))

    def refuse_return(self, waiter: Waiter, now_ns: int, effects: list[Effect]) -> None:
        """Refuse the operations that wait for a session after its wait for room is over. The session stays parked."""
        lease = waiter.returning
        if lease is None or lease.park is None:
            return
        lease.park.is_awaited = False
        waited_ms = max(1, (now_ns - waiter.since_ns) // NS_PER_MS)
        account = self._store.account_by_uuid[lease.card_uuid]
        reason = denials.no_room_to_return(lease.lease_id, lease.park.off_bytes, max(0, account.free_bytes), waited_ms)
        effects.append(RefuseWaitingOperations(lease.lease_id, lease.park.number, reason))
        self.deferred.refuse(lease.lease_id, denials.return_refused(reason), effects)
        effects.append(ParkFailed(lease.snapshot(), None, reason, ParkFailure.NO_ROOM))
        self.cold.on_return_refused(lease, lease.park, reason, now_ns, effects)

    def take_room_back(self, lease: Lease, now_ns: int, effects: list[Effect]) -> None:
        """Make a session wait again, if its return was not ordered yet, because its card has less room now."""
        state, account = lease.park, self._store.account_by_uuid[lease.card_uuid]
        if state is None:
            return
        freed_bytes, state.refusal = lease.awaited_bytes, ""
        state.off_bytes += freed_bytes
        account.await_bytes(lease, 0)
        account.free_parked(lease, freed_bytes)
        state.phase, state.is_awaited = ParkPhase.PARKED, True
        refuse_parks(state, denials.is_returning(lease.lease_id), effects)
        self._await_return(lease, state, now_ns, effects)

    def on_returned(self, event: events.SessionReturned, now_ns: int, effects: list[Effect]) -> None:
        """Process the worker's answer: the whole session is on its card."""
        lease = self._awaiting_answer(event.lease_id, event.number, ParkPhase.RETURNING)
        if lease is None or lease.park is None or lease.awaited_bytes:
            return
        state = lease.park
        # The worker was ordered to leave the session parked, so the card is not charged for its bytes.
        if state.refusal:
            return
        _record_return(lease, state, event.moved_bytes, now_ns, effects)
        if not state.host_bytes:
            # This daemon has no record of the memory that an earlier daemon gave the worker, so replace it or drop it.
            effects.append(DropParkMemory(lease.lease_id))
            self._prepare_host(lease, effects)
        # An operation was waiting, so the session counts as used now.
        state.used_ns = max(state.used_ns, now_ns)
        cause = state.cause or ParkCause.TENANT
        # Sessions are parked for need in the order of their last use, so this one would be the last.
        if cause is ParkCause.NEED and state.move is None and not state.requests:
            self._pass_host_on(lease, effects)
            self._copy_next_ahead(lease.card_uuid, effects)
        self._become_resident(lease, state, now_ns, effects)
        self.cold.on_returned(lease, state, now_ns, effects)
        # The operation that brought the session back was sent before the park was requested, or during it. It has ended
        # or will end soon, so park again for the requests that still wait.
        if state.requests and self.deferred.need_session(lease.lease_id):
            # Those deferred requests are handled next. Another park would only make them wait for another return.
            refuse_parks(state, denials.is_returning(lease.lease_id), effects)
        elif state.requests and (denial := self._park_if_allowed(lease, cause, now_ns, effects)) is not None:
            refuse_parks(state, denial, effects)
        elif state.requests:
            state.is_repeated = True

    def on_return_failed(self, event: events.SessionReturnFailed, now_ns: int, effects: list[Effect]) -> None:
        """Have the card polled again after a failed return, to prove that the session's bytes are not on it."""
        lease = self._awaiting_answer(event.lease_id, event.number, ParkPhase.RETURNING)
        if lease is None or lease.park is None or lease.awaited_bytes:
            return
        if self.cold.on_return_failed(lease, event, now_ns, effects):
            return
        if lease.park.refusal:
            self.cold.on_refused_in_worker(lease, lease.park, now_ns, effects)
            return
        # A restored lease: while a submit runs, its session is on the card. The submit may hold the bytes that would be
        # given back now.
        if lease.submit_id:
            self._condemn(lease, Cause.WORKER_DIED, f"its session was lost: {event.reason}", now_ns, effects)
            return
        effects.append(ParkFailed(lease.snapshot(), None, event.reason, ParkFailure.RETURN))
        # The worker still has the image and would ask again at once. Refuse the waiting operations instead.
        refuse_parks(lease.park, denials.park_refused(lease.lease_id, event.reason), effects)
        reason = denials.return_failed(lease.lease_id, event.reason)
        effects.append(RefuseWaitingOperations(lease.lease_id, lease.park.number, reason))
        self.deferred.refuse(lease.lease_id, denials.return_refused(reason), effects)
        if not lease.park.host_bytes:
            # An earlier daemon gave the worker host memory, and was killed before it recorded the park.
            self._store.hold_host(lease, host_bytes_of(lease.terms.size_bytes))
        lease.park.phase, lease.park.is_awaited = ParkPhase.PROVING, False
        lease.park.cause = lease.park.cause or ParkCause.ADOPTED
        self._prove(lease, lease.park, effects)

    # --- idleness and need ---

    def on_used(self, event: events.SessionsUsed, now_ns: int, effects: list[Effect]) -> None:
        """Record which sessions were in use since the last poll."""
        for lease_id in event.lease_ids:
            lease = self._store.parkable.get(lease_id)
            if lease is not None and lease.park is not None:
                # Timers are not moved here: one that fires too early is armed again for the later time.
                lease.park.used_ns = max(lease.park.used_ns, now_ns)

    def on_stay_claimed(self, event: events.StayClaimed, _now_ns: int, _effects: list[Effect]) -> None:
        """Record what keeps a session in its process, according to its worker. Requests to move it are tried anyway."""
        lease = self._store.parkable.get(event.lease_id)
        if lease is not None and lease.park is not None:
            lease.park.claimed_stay = event.reason

    def on_timer(self, lease: Lease, now_ns: int, effects: list[Effect]) -> None:
        """Park a session that was idle for long enough, or answer requests that have waited too long for a park."""
        state = lease.park
        if state is None:
            return
        if state.phase is ParkPhase.RESIDENT:
            if self._park_if_allowed(lease, ParkCause.IDLE, now_ns, effects) is not None:
                # The host's memory is full, a region is being moved, or the pace is exceeded: try again after another
                # idle time.
                _postpone_idle(lease, state, now_ns)
                self._arm_idle(lease, effects)
            return
        if self.cold.on_timer(lease, state, now_ns, effects):
            return
        # Answer only the requests: the worker's answer, or the card's proof, may still come.
        state.due_ns = None
        task = "show the bytes free" if state.phase is ParkPhase.PROVING else "park its session"
        waited_s = self._store.limits.session_timeout_s
        refuse_parks(state, denials.session_silent(lease.lease_id, task, waited_s), effects)

    @property
    def patience_ns(self) -> int:
        """Time for which an acquire waits while sessions are parked for it, even if it asked not to wait for room."""
        return self._store.limits.session_timeout_s * NS_PER_S

    def may_make_room(self, candidates: tuple[CardAccount, ...], terms: LeaseTerms, now_ns: int) -> bool:
        """Return whether parks, in progress or possible now, could make room for an acquire."""
        # Parks can't empty a card for a lease that needs the whole card, because parked leases keep their contexts
        # there.
        if terms.exclusivity in ALONE or not self._store.parkable:
            return False
        able = [account for account in candidates if account.has_parkable_room(terms) and not account.exclusive_leases]
        able = [account for account in able if account.drain_ns is None]
        # A session that can be moved can also be parked.
        return any(self._plan(account, account.charge_bytes(terms), now_ns) is not None for account in able)

    def update(self, now_ns: int, effects: list[Effect]) -> None:
        """Park idle sessions for the first waiter of each card. Called after each event that may allow more parks."""
        if not len(self._store.queue):
            return
        served: set[str] = set()
        again_ns: list[int] = []
        servable = {account.card.uuid for account in self._store.accounts if not account.exclusive_leases}
        for waiter in self._store.queue:
            # Each card serves only its first waiter. Hundreds may wait behind those.
            if len(served) == len(servable):
                break
            if (moves := self._plan_moves(waiter, served, now_ns)) is not None:
                for lease, card_uuid in moves.moves:
                    self.cold.move_for_need(lease, card_uuid, now_ns)
                    self._park(lease, ParkCause.NEED, now_ns, effects)
                continue
            for account in waiter.open_candidates():
                uuid = account.card.uuid
                if uuid in served or account.exclusive_leases or waiter.acquire.terms.exclusivity in ALONE:
                    continue
                if waiter.returning is None and not account.has_parkable_room(waiter.acquire.terms):
                    continue
                victims = self._plan(account, waiter.needed_bytes(account), now_ns)
                served.add(uuid)
                if victims is None:
                    again_ns += [due_ns for due_ns in self._next_park_times(account, now_ns) if due_ns > now_ns]
                    continue
                for lease in victims:
                    self._park(lease, ParkCause.NEED, now_ns, effects)
                # One card is enough for this waiter.
                break
        # A session that can't be parked yet may be parkable later without any other event, so arm a timer.
        if again_ns and (self._armed_ns is None or self._armed_ns <= now_ns or min(again_ns) < self._armed_ns):
            self._armed_ns = min(again_ns)
            effects.append(ArmTimer(ParkTimerFired(), self._armed_ns))

    def on_park_timer(self) -> None:
        """Record that the node's timer has fired. `update`, which is called after this event, then checks again."""
        self._armed_ns = None

    def _plan(self, account: CardAccount, needed_bytes: int, now_ns: int) -> list[Lease] | None:
        """Return the sessions to park now so that a card will have room; None if no parks could make it."""
        on_card = [lease for lease in self._store.parkable.values() if lease.card_uuid == account.card.uuid]
        coming_bytes = sum(
            lease.terms.size_bytes for lease in on_card if lease.park is not None and lease.park.is_leaving
        )
        missing_bytes = needed_bytes - account.free_bytes - coming_bytes
        if missing_bytes <= 0:
            # No bytes are missing: either enough will become free, or the waiter waits for its turn and not for room.
            return [] if coming_bytes else None
        victims, together = list[Lease](), ParksTogether(self._store)
        if self._is_at_most(account, together, now_ns):
            return None
        idle = [lease for lease in on_card if _is_resident(lease) and self._parkable_from_ns(lease) <= now_ns]
        for lease in sorted(idle, key=_used_ns):
            # Check it together with the sessions found so far, because they are parked at the same time.
            if self._check_park(lease, ParkCause.NEED, now_ns, together) is not None:
                continue
            victims.append(lease)
            together.add(lease)
            missing_bytes -= lease.terms.size_bytes
            if missing_bytes <= 0:
                # The card's pace delays the rest.
                return victims[:PARK_BURST]
            if self._is_at_most(account, together, now_ns):
                return None
        return None

    def _is_at_most(self, account: CardAccount, together: "ParksTogether", now_ns: int) -> bool:
        """Return whether these parks use up the host memory or the card's pace, so that no other park is possible."""
        is_full = together.host_bytes + PARK_GRANULE_BYTES > self._store.limits.park_memory_bytes
        return is_full or self._pace_wait_ns(account.card.uuid, together.parks + 1, now_ns) > 0

    def _plan_moves(self, waiter: Waiter, served: set[str], now_ns: int) -> NeedMoves | None:
        """Return the moves with the fewest bytes that make room for an acquire on one of its cards; None without any.

        That card then counts as served. Nothing moves if sessions that are leaving the card already make enough room.
        """
        terms = waiter.acquire.terms
        if not self._store.limits.moves_for_need or waiter.returning is not None or terms.exclusivity in ALONE:
            return None
        open_candidates = [account for account in waiter.open_candidates() if account.card.uuid not in served]
        arriving, plans = self.cold.arriving() if open_candidates else {}, list[NeedMoves]()
        for account in open_candidates:
            uuid = account.card.uuid
            if account.exclusive_leases or not account.has_parkable_room(terms):
                continue
            missing_bytes = account.charge_bytes(terms) - account.free_bytes
            if missing_bytes <= 0:
                continue
            on_card = [lease for lease in self._store.parkable.values() if lease.card_uuid == uuid]
            leaving = [lease for lease in on_card if lease.park is not None and lease.park.is_leaving]
            if leaving and missing_bytes <= sum(lease.terms.size_bytes for lease in leaving):
                served.add(uuid)
                return NeedMoves(uuid, ())
            if leaving:
                continue
            movable = [lease for lease in on_card if self._may_move(lease, now_ns)]
            targets = [candidate for candidate in self._store.accounts if candidate is not account]
            rules = self._store.limits.tenants
            moves = plan_moves(movable, missing_bytes, targets, arriving, rules, PARK_BURST)
            if moves is not None and self._may_park_all([lease for lease, _ in moves], now_ns):
                plans.append(NeedMoves(uuid, moves))
        plan = min(plans, key=lambda plan: plan.moved_bytes, default=None)
        if plan is not None:
            served.add(plan.from_uuid)
        return plan

    def _may_park_all(self, leases: Iterable[Lease], now_ns: int) -> bool:
        """Return whether sessions of one card may be parked now, all at the same time."""
        together = ParksTogether(self._store)
        for lease in leases:
            # Together they must not exceed the host's memory or the card's pace.
            if self._check_park(lease, ParkCause.NEED, now_ns, together) is not None:
                return False
            together.add(lease)
        return True

    def _may_move(self, lease: Lease, now_ns: int) -> bool:
        state = lease.park
        if state is None or not _is_resident(lease) or state.move is not None:
            return False
        if state.stays_here or state.claimed_stay:
            return False
        return max(self._parkable_from_ns(lease), state.need_move_ns) <= now_ns

    def _parkable_from_ns(self, lease: Lease) -> int:
        """Return the time from which others' need for room may park a resident session."""
        state = lease.park
        stay_ns = self._store.limits.park_stay_ms * NS_PER_MS
        return 0 if state is None else max(state.stays_until_ns, state.used_ns + stay_ns)

    def _next_park_times(self, account: CardAccount, now_ns: int) -> Iterator[int]:
        """Yield the times at which a card's sessions, or its pace, allow another park."""
        resident = [
            lease
            for lease in self._store.parkable.values()
            if lease.card_uuid == account.card.uuid and _is_resident(lease)
        ]
        for parks in range(1, min(len(resident), PARK_BURST) + 1):
            yield now_ns + self._pace_wait_ns(account.card.uuid, parks, now_ns)
        yield from map(self._parkable_from_ns, resident)

    # --- a lease's life ---

    def on_granted(self, lease: Lease, park: ParkState, now_ns: int, effects: list[Effect]) -> None:
        park.used_ns = now_ns
        park.stays_until_ns = now_ns + self._store.limits.park_stay_ms * NS_PER_MS
        self._prepare_host(lease, effects)
        self._arm_idle(lease, effects)

    def on_generation(self, lease: Lease, effects: list[Effect]) -> None:
        """Arm the timer again, with the number of the new generation."""
        if (due_ns := park_due_ns(lease)) is not None:
            arm_park_timer(lease, due_ns, effects)
        if lease.park is not None and lease.park.held_id and lease.deadline_ns is not None:
            # The session's former worker may have to continue it, so it needs the deadline as well.
            effects.append(SetDeadline(lease.park.held_id, lease.generation, lease.deadline_ns))

    def on_restored(self, lease: Lease, park_number: int, now_ns: int, effects: list[Effect]) -> None:
        """Send the worker of an earlier table's lease the order from its record. The lease is charged in full.

        `park_number`: The number of the park that the worker's session is in; 0 if it is not parked.
        """
        state = lease.park
        if state is None:
            return
        state.used_ns = now_ns
        if state.parked_ns:
            self._store.hold_host(lease, host_bytes_of(lease.terms.size_bytes))
            state.cause = ParkCause.ADOPTED
            self._order(lease, state, now_ns, effects)
        else:
            # If the session was parked without a record, its worker accepts only an order with the number of that park.
            state.number = park_number or now_ns
            self._order_return(lease, state, now_ns, effects)

    def end_with_lease(self, lease: Lease, now_ns: int, effects: list[Effect]) -> None:
        """Answer the requests that wait for an ended lease to be parked.

        Its bytes are released with those of its worker.
        """
        state = lease.park
        if state is None:
            return
        self.deferred.refuse(lease.lease_id, denials.lease_ended(lease.snapshot()), effects)
        refuse_parks(state, denials.lease_ended(lease.snapshot()), effects)
        if (waiter := self._store.queue.get(-lease.lease_id)) is not None:
            self._store.queue.leave(waiter)
            self._store.has_freed_room = True
        # The lease no longer waits for warm contexts to leave. Its teardown releases its charge.
        self._store.account_by_uuid[lease.card_uuid].awaiting.pop(lease.lease_id, None)
        state.is_awaited, state.due_ns = False, None
        self.cold.end_with_lease(lease, state, now_ns, effects)

    # --- shared steps ---

    def _awaiting_answer(self, lease_id: int, number: int, phase: ParkPhase) -> Lease | None:
        """Return the active lease that awaits this answer; None if the answer is late."""
        lease = self._store.parkable.get(lease_id)
        if lease is None or lease.park is None or lease.state is not LeaseState.ACTIVE:
            return None
        return lease if lease.park.phase is phase and lease.park.number == number else None

    def _arm_idle(self, lease: Lease, effects: list[Effect]) -> None:
        if (due_ns := park_due_ns(lease)) is not None:
            arm_park_timer(lease, due_ns, effects)


def _check_work(lease: Lease) -> Denial | None:
    """Return the denial for a park of a lease with a region, submit or resize that prevents it now; else None."""
    if (denial := _check_regions(lease)) is not None:
        return denial
    if lease.submit_id or lease.own_submit_bytes or lease.next_submit is not None:
        return denials.has_submit(lease.lease_id)
    return None if lease.resize is None else denials.is_resizing(lease.lease_id)


def _check_regions(lease: Lease) -> Denial | None:
    """Return the denial for a park of a lease, if the bytes of one of its regions are in doubt; else None."""
    # A park's proof covers the whole slice, so no proof of a region may be awaited at the same time.
    states = {region.state for region in lease.slots.values()} - {RegionState.ACTIVE}
    if not states:
        return None
    has_lasting_fence = any(region.is_given_up for region in lease.slots.values())
    return denials.has_fenced_region(lease.lease_id) if has_lasting_fence else denials.region_moves(lease.lease_id)


def check_parkable(terms: LeaseTerms) -> Denial | None:
    """Return the denial for an acquire with terms that rule out parking; None if the lease can be parkable."""
    if terms.submit_bytes:
        return denials.invalid(
            "A parkable lease can't reserve memory for submits.", "Request one of the two, or use two leases."
        )
    if terms.exclusivity in ALONE:
        return denials.invalid(
            "A lease with exclusive use of its card can't be parkable: no other tenant could use the memory it leaves.",
            "Leave out .parkable(), or request a lease that shares its card.",
        )
    return None


def park_due_ns(lease: Lease) -> int | None:
    """Return the time at which a lease's parking timer is due; None if it is not needed."""
    state = lease.park
    if state is None or lease.state is not LeaseState.ACTIVE:
        return None
    if state.phase is ParkPhase.RESIDENT:
        idle_ns = (lease.terms.park_idle_ms or 0) * NS_PER_MS
        return max(state.used_ns + idle_ns, state.idle_retry_ns) if idle_ns else None
    return state.due_ns


def _postpone_idle(lease: Lease, state: ParkState, now_ns: int) -> None:
    """After a refused park, wait for another idle time before idleness parks the session. Need may park it earlier."""
    state.idle_retry_ns = now_ns + (lease.terms.park_idle_ms or 0) * NS_PER_MS


def _record_return(lease: Lease, state: ParkState, moved_bytes: int, now_ns: int, effects: list[Effect]) -> None:
    # Record the return only if the park was recorded: it may have been requested before the card showed the bytes free.
    if state.parked_ns:
        parked_for_ns, took_ns = now_ns - state.parked_ns, now_ns - state.ordered_ns
        effects.append(LeaseReturned(lease.snapshot(), moved_bytes, parked_for_ns, took_ns))


def _is_resident(lease: Lease) -> bool:
    state = lease.park
    return state is not None and lease.state is LeaseState.ACTIVE and state.phase is ParkPhase.RESIDENT


def _used_ns(lease: Lease) -> int:
    return 0 if lease.park is None else lease.park.used_ns


def host_bytes_of(size_bytes: int) -> int:
    """Return the host memory for a number of bytes of a session, in whole granules."""
    return -(-size_bytes // PARK_GRANULE_BYTES) * PARK_GRANULE_BYTES
