"""Cold parking: a parked session's worker ends, and another worker continues the session, on any card.

1. A session that is parked warm is ordered to leave its process: after it has been parked for `cold_park_s`, at the
   request of an operator or its tenant, or for a move. Its worker exports its image, which the broker keeps. If the
   session contains something that another process can't make again, it stays, and the lease shows that until the
   session's next park.
2. The worker, which still has bytes of the card (above all its context), is passed to the pool as a warm context to
   drop. So the pool kills it, proves its bytes free, and fences them if that fails. The lease is charged nothing. The
   kill waits until the record of the cold session is durable: a table that is restored from an earlier record continues
   the session in the former worker, because the image was lost with the broker.
3. The session returns as from a warm park: it is charged in full and waits in the queue of acquires. Once it has room,
   a warm context or a new worker adopts the image. If it gets no room in time, a worker adopts the session in its
   parked state and refuses the requests that wait, provided that the card has room for this worker's context. If a
   worker ends before it receives the image, the session stays cold. If it ends with the image, the lease ends, because
   the session may have done anything by then.
4. A session is not resumed if its addresses, functions or memory would differ from before. Then another worker is
   tried, of the other kind if possible: a warm context may have other addresses than a new one, and the CUDA driver
   sometimes gives one worker other addresses than the next. After MAX_MISFITS of them the lease ends. If its former
   worker still has the session, as in an upgrade, at most one worker of each kind is tried, and then the former one
   takes the session back (`WorkerUpgrades`). Until another worker has continued such a session, it is not parked cold,
   and its former worker is kept during any move.
5. A move is a cold park followed by a return to another card. The lease changes its card while it is charged nothing.
   If the cards are peers, its bytes go from card to card instead, and its former worker is kept until then
   (`direct_moves`).
6. The image is kept in the broker's process. So a table that restores a cold lease ends it.
"""

from collections.abc import Callable
from typing import Final, Protocol

from gpulease.daemon.leases import denials, devices, events
from gpulease.daemon.leases.deferred_requests import DeferredRequests
from gpulease.daemon.leases.denials import Denial
from gpulease.daemon.leases.devices import CardAccount
from gpulease.daemon.leases.direct_moves import FOR_NEED, change_card, way_of
from gpulease.daemon.leases.events import (
    AdoptSession,
    ArmTimer,
    Effect,
    EndRegion,
    KillWorker,
    LeaseLeft,
    LeaseMoved,
    LeaveSession,
    ParkFailed,
    RefuseWaitingOperations,
    RequestDenied,
    RestartWorker,
    SessionMoved,
    SetDeadline,
    StaySession,
    TimerFired,
    TimerKind,
    WatchClients,
)
from gpulease.daemon.leases.membership_events import SetMembershipDeadline
from gpulease.daemon.leases.model import ENDED_REGIONS, Cause, Lease, LeaseState, RegionState
from gpulease.daemon.leases.need_moves import MOVED_STAY_NS, may_take
from gpulease.daemon.leases.park_state import ParkCause, ParkDepth, ParkFailure, ParkPhase, ParkState, SessionMove
from gpulease.daemon.leases.table_state import LeaseStore
from gpulease.daemon.leases.worker_upgrades import HeldWorkers, WorkerUpgrades
from gpulease.protocol.time_units import NS_PER_S

MAX_MISFITS: Final = 4
"""Maximum number of workers that fail to adopt a cold session in one return.

A few are tried because CUDA does not promise equal addresses. They differed occasionally (H200, driver 580) until all
threads of a worker had one malloc arena (host/malloc_arenas.py). The limit ends the attempts for a session that fits no
worker at all, for example after an update of the driver.
"""

MAX_HELD_MISFITS: Final = 2
"""The same limit while the former worker still has the session: one worker of each kind, warm and new."""

_HANGS: Final = frozenset({Cause.UNRESPONSIVE, Cause.LOAD_TIMEOUT})
"""Causes that mean that a worker hangs, although it has broken no rule about the lease's bytes or kernels."""

_LEAVE_TASK: Final = "send its image"

_REGION_MOVES: Final = "one of its regions is being opened or ended"

Condemn = Callable[[Lease, Cause, str, int, list[Effect]], None]
"""Ends an active lease because its session broke a rule, for a cause and a reason."""


class ContextPool(HeldWorkers, Protocol):
    """The part of the warm pool that cold parking uses: contexts for sessions that return."""

    def drop_behind(
        self, lease: Lease, charge_bytes: int, now_ns: int, effects: list[Effect], *, is_gone: bool = False
    ) -> None:
        """Take over a lease's worker, which holds `charge_bytes`, and drop it as one of the pool's contexts."""

    def give_to(self, lease: Lease, now_ns: int, effects: list[Effect]) -> bool:
        """Give a lease without a worker a warm context of its card; return whether one was ready."""


class ColdParking:
    """Makes sessions leave their workers and return in others. Each method appends what to execute to `effects`.

    Args:
        store: The table's state.
        pool: The warm pool.
        await_return: Brings a parked session back, or queues it for room.
        park: Parks a resident session for a cause; returns the denial if it can't be parked now.
        condemn: Ends a lease after its session broke a rule.
        deferred: The requests that wait for sessions' returns.
    """

    def __init__(
        self,
        store: LeaseStore,
        pool: ContextPool,
        await_return: Callable[[Lease, ParkState, int, list[Effect]], None],
        park: Callable[[Lease, ParkCause, int, list[Effect]], Denial | None],
        condemn: Condemn,
        deferred: DeferredRequests,
    ) -> None:
        self._store = store
        self._deferred = deferred
        self._pool = pool
        self._await_return = await_return
        self._park = park
        self._condemn = condemn
        self._upgrades = WorkerUpgrades(store, pool, await_return, park)

    # --- leaving ---

    def on_parked(self, lease: Lease, now_ns: int, effects: list[Effect]) -> None:
        """Order a session that was just parked to leave its process: at once if it is being moved, else later."""
        state = lease.park
        if state is None:
            return
        state.stays_here = ""
        if state.move is not None:
            self._leave(lease, state, now_ns, effects)
        else:
            self._arm_leaving(lease, state, now_ns, effects)

    def on_return_refused(
        self, lease: Lease, state: ParkState, reason: str, now_ns: int, effects: list[Effect]
    ) -> None:
        """Record that a session stays parked because it found no room in time."""
        # A return for a move was not requested by a client. If a client waits as well, its request comes next.
        is_move, denial = state.move is not None, denials.return_refused(reason)
        is_back = state.held_id and self._upgrades.take_back(lease, state, denial.message, now_ns, effects)
        self.refuse_move(lease, denial, now_ns, effects)
        if is_back:
            # The former worker takes the session back, which needs less room than a second worker.
            return
        if self._end_if_lent(lease, state, reason, now_ns, effects):
            return
        if state.depth is ParkDepth.WARM:
            self._arm_leaving(lease, state, now_ns, effects)
        elif is_move or not self._refuse_in_worker(lease, state, reason, now_ns, effects):
            effects.append(WatchClients(lease.lease_id))

    def _refuse_in_worker(
        self, lease: Lease, state: ParkState, reason: str, now_ns: int, effects: list[Effect]
    ) -> bool:
        """Have a new worker adopt a cold session in its parked state, because only a worker can answer requests.

        Returns False if the worker's context does not fit. `reason`: Why the requests are refused.
        """
        account = self._store.account_by_uuid[lease.card_uuid]
        # The session's own bytes stay in the host's memory; only the context and the code need room.
        rest_bytes = lease.terms.size_bytes - state.code_bytes
        needed_bytes = state.off_bytes - rest_bytes
        if needed_bytes > account.free_bytes or lease.card_uuid in self._store.queue.held_cards():
            return False
        state.refusal, state.phase, state.off_bytes = reason, ParkPhase.RETURNING, rest_bytes
        account.take_parked(lease, needed_bytes)
        # The pool starts the worker when bytes become free. If none are missing, start it here.
        if not needed_bytes:
            self.start_return(lease, state, now_ns, effects)
        return True

    def on_refused_in_worker(self, lease: Lease, state: ParkState, now_ns: int, effects: list[Effect]) -> None:
        """Record that a new worker has adopted a parked session, so that it can refuse the operations that wait."""
        reason, state.refusal = state.refusal, ""
        state.phase, state.kept_bytes, state.is_awaited = ParkPhase.PARKED, state.code_bytes, False
        refuse_parks(state, denials.park_refused(lease.lease_id, reason), effects)
        effects.append(RefuseWaitingOperations(lease.lease_id, state.number, reason))
        self._arm_leaving(lease, state, now_ns, effects)

    def _arm_leaving(self, lease: Lease, state: ParkState, now_ns: int, effects: list[Effect]) -> None:
        if self._store.limits.cold_park_s and not state.stays_here:
            state.due_ns = now_ns + self._store.limits.cold_park_s * NS_PER_S
            arm_park_timer(lease, state.due_ns, effects)

    def _leave(self, lease: Lease, state: ParkState, now_ns: int, effects: list[Effect]) -> None:
        # An image can have only active regions, so wait while one is being opened or ended.
        if any(region.state is not RegionState.ACTIVE for region in lease.slots.values()):
            self._give_up(lease, state, _REGION_MOVES, now_ns, effects, is_lasting=False)
            return
        # Without its worker, a session that fits no other would be lost.
        if state.misfit and (state.move is None or not state.move.card_uuid):
            state.stays_here = state.misfit
            self._give_up(lease, state, state.misfit, now_ns, effects)
            return
        state.depth, state.ordered_ns = ParkDepth.LEAVING, now_ns
        state.due_ns = now_ns + self._store.limits.session_timeout_s * NS_PER_S
        carries = state.move is not None and bool(state.move.card_uuid)
        is_upgrade = state.move is not None and bool(state.move.from_version)
        by_ring = state.is_in_place and state.move is not None and state.move.by_ring
        effects.append(LeaveSession(lease.lease_id, state.number, carries, is_upgrade, state.is_in_place, by_ring))
        arm_park_timer(lease, state.due_ns, effects)

    def on_imaged(self, event: events.SessionImaged, now_ns: int, effects: list[Effect]) -> None:
        """End the worker of a session after the broker has received the session's image."""
        lease = self._leaving(event.lease_id, event.number)
        if lease is None or lease.park is None:
            return
        state = lease.park
        # From now on the broker keeps the image, and watches the session's clients.
        effects.append(LeaseLeft(lease.snapshot(), event.image_bytes, now_ns - state.ordered_ns))
        if self._upgrades.set_aside(lease, state, lease.charge_bytes, effects):
            self._discharge(lease, state)
            self._note_cold(lease, state, effects)
        else:
            self._drop_worker(lease, state, now_ns, effects)
        if (move := state.move) is None:
            return
        if not move.card_uuid:
            self._end_move(lease, state, now_ns, effects)
            return
        account = self._store.account_by_uuid[move.card_uuid]
        # By now the other card may be drained or leased exclusively. Then the session stays cold, on its own card.
        denial = None if account.card.uuid == lease.card_uuid else self._check_card(lease, account, now_ns)
        if denial is not None:
            if state.held_id:
                self._upgrades.take_back(lease, state, denial.message, now_ns, effects)
            self.refuse_move(lease, denial, now_ns, effects)
            return
        change_card(self._store, lease, state, account, now_ns, effects)
        state.is_awaited = True
        self._await_return(lease, state, now_ns, effects)

    def on_stays(self, event: events.SessionStays, now_ns: int, effects: list[Effect]) -> None:
        """Keep a session that can't leave in its worker."""
        lease = self._leaving(event.lease_id, event.number)
        if lease is not None and lease.park is not None:
            if event.is_lasting:
                lease.park.stays_here = event.reason
            self._give_up(lease, lease.park, event.reason, now_ns, effects, is_lasting=event.is_lasting)

    def _give_up(
        self,
        lease: Lease,
        state: ParkState,
        reason: str,
        now_ns: int,
        effects: list[Effect],
        *,
        is_lasting: bool = True,
    ) -> None:
        state.depth, state.due_ns = ParkDepth.WARM, None
        failure = ParkFailure.DIRECT_MOVE if state.is_in_place else ParkFailure.LEAVE
        effects.append(ParkFailed(lease.snapshot(), state.cause, f"it stays in its process: {reason}", failure))
        was_on_card = state.move is not None and bool(state.move.from_version) and not state.move.was_parked
        if state.is_in_place:
            was_on_card, state.direct_failure = True, reason
        self.refuse_move(lease, denials.cant_leave(lease.lease_id, reason, is_lasting=is_lasting), now_ns, effects)
        if was_on_card:
            # The session was parked only for its upgrade, or in place, so bring it back.
            state.is_awaited = True
            self._await_return(lease, state, now_ns, effects)
            return
        self._arm_leaving(lease, state, now_ns, effects)

    def _drop_worker(
        self, lease: Lease, state: ParkState, now_ns: int, effects: list[Effect], *, is_gone: bool = False
    ) -> None:
        """Pass a lease's worker to the pool, which drops it, and charge the lease nothing."""
        held_bytes = self._discharge(lease, state)
        self._pool.drop_behind(lease, held_bytes, now_ns, effects, is_gone=is_gone)
        self._note_cold(lease, state, effects)

    def _discharge(self, lease: Lease, state: ParkState) -> int:
        """Enter COLD, which charges the lease nothing. Returns the bytes that it was charged before."""
        held_bytes = lease.charge_bytes
        self._store.account_by_uuid[lease.card_uuid].free_parked(lease, held_bytes)
        self._store.has_freed_room = True
        state.off_bytes += held_bytes
        state.phase, state.depth, state.due_ns = ParkPhase.PARKED, ParkDepth.COLD, None
        state.kept_bytes, lease.warm_id, lease.served, state.refusal = 0, 0, 0, ""
        return held_bytes

    def _note_cold(self, lease: Lease, state: ParkState, effects: list[Effect]) -> None:
        # The worker ends, perhaps before it has answered. From now on the broker wipes regions that end.
        for region in lease.slots.values():
            if region.state in ENDED_REGIONS:
                effects.append(EndRegion(lease.lease_id, region.region_id, 0))
        # Refuse the parks that were requested during the return and waited for its end.
        refuse_parks(state, denials.is_returning(lease.lease_id), effects)

    def _leaving(self, lease_id: int, number: int) -> Lease | None:
        """Return the active lease of an answer to LeaveSession; None if the answer is late."""
        lease = self._store.parkable.get(lease_id)
        if lease is None or lease.park is None or lease.state is not LeaseState.ACTIVE:
            return None
        return lease if lease.park.depth is ParkDepth.LEAVING and lease.park.number == number else None

    # --- returning ---

    def start_return(self, lease: Lease, state: ParkState, now_ns: int, effects: list[Effect]) -> None:
        """Order a worker for a cold session that has room."""
        state.depth, state.ordered_ns = ParkDepth.ARRIVING, now_ns
        state.due_ns = now_ns + self._store.limits.spawn_timeout_s * NS_PER_S
        # Prefer a warm context; but if the session has just not fitted a warm context, start a new worker.
        was_on_warm = state.misfits > 0 and state.is_on_warm
        state.is_on_warm = not was_on_warm and self._pool.give_to(lease, now_ns, effects)
        if state.held_id and state.misfits and state.is_on_warm == was_on_warm:
            reason = f"{state.misfit_reason.rstrip('.')}, and no worker of another kind is ready"
            self._end_misfit(lease, reason, now_ns, effects)
            return
        effects.append(RestartWorker(lease.lease_id, lease.card_uuid, lease.terms))
        arm_park_timer(lease, state.due_ns, effects)

    def on_worker_ready(self, lease: Lease, state: ParkState, now_ns: int, effects: list[Effect]) -> bool:
        """Make a worker adopt the session for which it was ordered. Returns False for any other worker."""
        if state.depth is not ParkDepth.ARRIVING or lease.state is not LeaseState.ACTIVE:
            return False
        if lease.deadline_ns is None:
            return False
        # This worker's page has no deadlines yet. From now on the only time limit is the lease's deadline; the watchdog
        # notices if the worker stops.
        state.depth, state.due_ns = ParkDepth.ADOPTING, None
        effects.append(SetDeadline(lease.lease_id, lease.generation, lease.deadline_ns))
        if lease.membership_deadline is not None:
            effects.append(SetMembershipDeadline(lease.lease_id, lease.membership_deadline.boot_ns))
        effects.append(AdoptSession(lease.lease_id, state.number, state.refusal))
        return True

    def on_worker_lost(self, lease: Lease, reason: str, now_ns: int, effects: list[Effect]) -> bool:
        """Keep a session cold if its new worker ended before it received the image. Returns False for any other worker.

        A session that is being upgraded goes back to its former worker, even if the new one had the image: the new one
        would have reported the return before it served anything.
        """
        state = lease.park
        if state is None or lease.state is not LeaseState.ACTIVE:
            return False
        if state.depth is not ParkDepth.ARRIVING and not (state.depth is ParkDepth.ADOPTING and state.held_id):
            return False
        self._fall_back(lease, state, reason, now_ns, effects, is_gone=True)
        return True

    def on_worker_hung(self, lease: Lease, cause: Cause, effects: list[Effect]) -> bool:
        """Kill a new worker that hangs while the session's former worker is set aside. Returns False for any other.

        When the worker has ended, `on_worker_lost` decides how the session continues: the worker may have restored the
        session, reported that, and served requests before it hung.
        """
        state = lease.park
        if state is None or lease.state is not LeaseState.ACTIVE or cause not in _HANGS:
            return False
        if state.depth is not ParkDepth.ADOPTING or not state.held_id:
            return False
        effects.append(KillWorker(lease.lease_id))
        return True

    def _fall_back(
        self, lease: Lease, state: ParkState, reason: str, now_ns: int, effects: list[Effect], *, is_gone: bool
    ) -> None:
        effects.append(ParkFailed(lease.snapshot(), None, reason, ParkFailure.WORKER))
        self._drop_worker(lease, state, now_ns, effects, is_gone=is_gone)
        if state.held_id and self._upgrades.take_back(lease, state, reason, now_ns, effects):
            self.refuse_move(lease, denials.park_refused(lease.lease_id, reason), now_ns, effects)
            return
        if self._end_if_lent(lease, state, reason, now_ns, effects):
            return
        # A client that still waits will ask again: the broker watches the session's clients.
        state.is_awaited = False
        failure = denials.return_refused(denials.return_failed(lease.lease_id, reason))
        self._deferred.refuse(lease.lease_id, failure, effects)
        self.refuse_move(lease, denials.park_refused(lease.lease_id, reason), now_ns, effects)
        effects.append(WatchClients(lease.lease_id))

    def _end_if_lent(self, lease: Lease, state: ParkState, reason: str, now_ns: int, effects: list[Effect]) -> bool:
        """End a lease that was parked in place, because its former worker ended before another worker had the bytes.

        Returns False if the session's bytes are in the host's memory.
        """
        if not state.is_in_place:
            return False
        reason = f"its worker ended during a move, before another worker had its session: {reason}"
        self._condemn(lease, Cause.WORKER_DIED, reason, now_ns, effects)
        return True

    def on_returned(self, lease: Lease, state: ParkState, now_ns: int, effects: list[Effect]) -> None:
        """Record that a session is complete on a card again, from whichever depth of parking it returned."""
        state.depth, state.misfits, state.is_in_place = ParkDepth.WARM, 0, False
        if (move := state.move) is not None:
            # If an operation came before the session left its worker, it has only been parked, not moved.
            has_left = state.held_id != 0 if move.from_version else lease.card_uuid == move.card_uuid
            if has_left:
                state.misfit = ""
                self._end_move(lease, state, now_ns, effects)
            else:
                self.refuse_move(lease, denials.is_returning(lease.lease_id), now_ns, effects)
        # The upgrade was abandoned, but the new worker has restored the session nevertheless.
        self._upgrades.drop(state, f"the session of lease {lease.lease_id:032x} is in another worker", now_ns, effects)

    def on_return_failed(
        self, lease: Lease, event: events.SessionReturnFailed, now_ns: int, effects: list[Effect]
    ) -> bool:
        """End a lease if its session can't be restored exactly. Returns False if the session is parked warm again."""
        state = lease.park
        # In a direct move, the former worker still has the bytes, whatever has failed.
        is_mismatch = event.is_mismatch or (state is not None and state.is_in_place and state.held_id != 0)
        if state is None or not is_mismatch:
            if state is not None:
                # The new worker has restored the session; only room for its bytes is missing.
                state.depth, state.misfits = ParkDepth.WARM, 0
                self._upgrades.drop(
                    state, f"the session of lease {lease.lease_id:032x} is in another worker", now_ns, effects
                )
            self.refuse_move(lease, denials.park_refused(lease.lease_id, event.reason), now_ns, effects)
            return False
        state.misfits, state.misfit_reason = state.misfits + 1, event.reason
        if state.misfits >= (MAX_HELD_MISFITS if state.held_id else MAX_MISFITS):
            if state.held_id:
                effects.append(ParkFailed(lease.snapshot(), None, event.reason, ParkFailure.MISFIT))
            self._end_misfit(lease, event.reason, now_ns, effects)
            return True
        # The broker still has the image, and the worker has not served any request of the session.
        effects.append(ParkFailed(lease.snapshot(), None, event.reason, ParkFailure.MISFIT))
        self._drop_worker(lease, state, now_ns, effects)
        state.is_awaited = True
        self._await_return(lease, state, now_ns, effects)
        return True

    def _end_misfit(self, lease: Lease, reason: str, now_ns: int, effects: list[Effect]) -> None:
        if (state := lease.park) is not None and state.held_id:
            # The former worker still has the session unchanged.
            if state.depth is ParkDepth.ADOPTING:
                self._drop_worker(lease, state, now_ns, effects)
            else:
                self._discharge(lease, state)
            if self._upgrades.take_back(lease, state, reason, now_ns, effects):
                state.misfit = reason
                if not state.is_in_place:
                    effects.append(ParkFailed(lease.snapshot(), None, reason, ParkFailure.LEAVE))
                self.refuse_move(lease, denials.cant_leave(lease.lease_id, reason), now_ns, effects)
                return
            # The former worker has ended, and only it had the bytes of a direct move.
            if self._end_if_lent(lease, state, reason, now_ns, effects):
                return
        effects.append(ParkFailed(lease.snapshot(), None, reason, ParkFailure.MISMATCH))
        self._condemn(lease, Cause.FAULTED, f"its session can't continue in another process: {reason}", now_ns, effects)

    # --- moves ---

    def on_move_requested(self, event: events.MoveRequested, now_ns: int, effects: list[Effect]) -> None:
        """Begin to move a session to another card, or out of its process; or refuse the request."""
        parkable = find_parkable(self._store, event, now_ns)
        if isinstance(parkable, Denial):
            effects.append(RequestDenied(event.request, parkable))
            return
        lease, state = parkable
        if state.move is not None:
            effects.append(RequestDenied(event.request, denials.is_moving(lease.lease_id)))
            return
        denial = self._begin_move(lease, state, event, now_ns, effects)
        if denial is not None:
            state.move = None
            effects.append(RequestDenied(event.request, denial))

    def _begin_move(
        self, lease: Lease, state: ParkState, event: events.MoveRequested, now_ns: int, effects: list[Effect]
    ) -> Denial | None:
        card_uuid = ""
        if event.card is not None:
            selected = devices.select(self._store.accounts, event.card)
            if not selected:
                return denials.unknown_card(event.card, [account.card for account in self._store.accounts])
            is_upgrade = bool(event.from_version) and selected[0].card.uuid == lease.card_uuid
            if not is_upgrade and (denial := self._check_card(lease, selected[0], now_ns)) is not None:
                return denial
            card_uuid = selected[0].card.uuid
        from_version = event.from_version if card_uuid == lease.card_uuid else ""
        was_parked = state.phase is ParkPhase.PARKED and not state.is_awaited
        way = way_of(self._store, lease, state, self._store.account_by_uuid[card_uuid]) if card_uuid else ("", False)
        state.move = SessionMove(event.request, card_uuid, lease.card_uuid, now_ns, from_version, was_parked, *way)
        if card_uuid and not from_version:
            self._stop_waiting(lease, state)
        match state.phase, state.depth:
            case ParkPhase.RESIDENT, _:
                return self._park(lease, requester_of(event, lease), now_ns, effects)
            case ((ParkPhase.PARKING | ParkPhase.PROVING), _):
                return None
            case ParkPhase.PARKED, ParkDepth.WARM if state.stays_here:
                return denials.cant_leave(lease.lease_id, state.stays_here)
            case ParkPhase.PARKED, ParkDepth.WARM if not state.is_awaited:
                self._leave(lease, state, now_ns, effects)
                return None
            case ParkPhase.PARKED, ParkDepth.LEAVING:
                return None
            case ParkPhase.PARKED, ParkDepth.COLD if not state.is_awaited:
                if not card_uuid:
                    self._end_move(lease, state, now_ns, effects)
                    return None
                change_card(self._store, lease, state, self._store.account_by_uuid[card_uuid], now_ns, effects)
                state.is_awaited = True
                self._await_return(lease, state, now_ns, effects)
                return None
        return denials.is_returning(lease.lease_id)

    def _stop_waiting(self, lease: Lease, state: ParkState) -> None:
        """Take a session that waits for room on its own card out of the queue: it may find room on the next card."""
        waiter = self._store.queue.get(-lease.lease_id)
        if waiter is None or (state.depth is ParkDepth.WARM and state.stays_here):
            return
        self._store.queue.leave(waiter)
        self._store.has_freed_room, state.is_awaited = True, False

    def move_for_need(self, lease: Lease, card_uuid: str, now_ns: int) -> None:
        """Make a session that is about to be parked move to another card, to make room for another lease."""
        if lease.park is not None:
            lease.park.move = SessionMove(None, card_uuid, lease.card_uuid, now_ns, why_through_host=FOR_NEED)
            lease.park.need_move_ns = now_ns + MOVED_STAY_NS

    def arriving(self) -> dict[str, int]:
        """Return, by card, the bytes that moves in progress will take and that the card is not charged for yet."""
        bytes_by_card: dict[str, int] = {}
        for lease in self._store.parkable.values():
            state = lease.park
            if state is None or state.move is None or not state.move.card_uuid:
                continue
            uuid = state.move.card_uuid
            is_charged = lease.card_uuid == uuid and not state.off_bytes
            charge_bytes = 0 if is_charged else self._store.account_by_uuid[uuid].charge_bytes(lease.terms)
            bytes_by_card[uuid] = bytes_by_card.get(uuid, 0) + charge_bytes
        return bytes_by_card

    def _check_card(self, lease: Lease, account: CardAccount, now_ns: int) -> Denial | None:
        """Return the denial for a move to a card; None if the lease may go there once there is room."""
        uuid = account.card.uuid
        if uuid == lease.card_uuid:
            return denials.is_there(lease.lease_id, uuid)
        if account.drain_ns is not None:
            return denials.card_is_drained(uuid)
        if not self._store.limits.tenants.of(lease.tenant).may_use(account.card):
            return denials.not_its_card(lease.lease_id, lease.tenant, uuid)
        return None if may_take(account, lease) else denials.no_place(lease.lease_id, uuid)

    def _end_move(self, lease: Lease, state: ParkState, now_ns: int, effects: list[Effect]) -> None:
        move = state.move
        if move is None:
            return
        state.move = None
        if move.from_version:
            self._upgrades.on_done(lease, state, move, now_ns, effects)
        elif move.card_uuid:
            self._record_move(lease, state, move, now_ns, effects)
        if move.request is not None:
            effects.append(SessionMoved(move.request, lease.snapshot(), state.moved_bytes, now_ns - move.since_ns))

    def _record_move(
        self, lease: Lease, state: ParkState, move: SessionMove, now_ns: int, effects: list[Effect]
    ) -> None:
        took_ns, state.last_move, state.direct_failure = now_ns - move.since_ns, move.why_through_host, ""
        effects.append(LeaseMoved(lease.snapshot(), move.from_uuid, state.moved_bytes, took_ns, move.why_through_host))

    def refuse_move(self, lease: Lease, denial: Denial, now_ns: int, effects: list[Effect]) -> None:
        """Refuse the move in progress, if any. The session stays on its present card."""
        if lease.park is None or (move := lease.park.move) is None:
            return
        lease.park.move = None
        # The lease has changed its card, although its session has not returned. Record that.
        if lease.card_uuid != move.from_uuid:
            self._record_move(lease, lease.park, move, now_ns, effects)
        if move.request is not None:
            effects.append(RequestDenied(move.request, denial))

    # --- timers and ends ---

    def on_timer(self, lease: Lease, state: ParkState, now_ns: int, effects: list[Effect]) -> bool:
        """Handle the timer of a session that is parked or that a new worker is to continue.

        Returns False for any other.
        """
        if state.depth is ParkDepth.LEAVING:
            # The worker may have sent the image by now, so order it to serve the session again.
            effects.append(StaySession(lease.lease_id, state.number))
            waited_s = self._store.limits.session_timeout_s
            self._give_up(lease, state, f"it did not {_LEAVE_TASK} within {waited_s} s", now_ns, effects)
        elif state.depth is ParkDepth.ARRIVING:
            reason = f"its new worker was not ready within {self._store.limits.spawn_timeout_s} s"
            self._fall_back(lease, state, reason, now_ns, effects, is_gone=False)
        elif state.phase is ParkPhase.PARKED and state.depth is ParkDepth.WARM and not state.is_awaited:
            self._leave(lease, state, now_ns, effects)
        else:
            return False
        return True

    def end_with_lease(self, lease: Lease, state: ParkState, now_ns: int, effects: list[Effect]) -> None:
        """Answer the requests that wait for an ended lease.

        A cold lease is over at once, as it has no worker to end.
        """
        self.refuse_move(lease, denials.lease_ended(lease.snapshot()), now_ns, effects)
        self._upgrades.drop(state, f"lease {lease.lease_id:032x} has ended", now_ns, effects)
        if state.depth is ParkDepth.COLD:
            lease.is_worker_gone = True


def find_parkable(
    store: LeaseStore, event: events.ParkRequested | events.MoveRequested, now_ns: int
) -> tuple[Lease, ParkState] | Denial:
    """Return the parkable lease that a request names and its parking state, or the denial for the request."""
    lease = store.live.get(event.lease_id)
    denial = store.denial_unless_owner(event.lease_id, event.tenant, event.is_operator)
    denial = denial or store.denial_for(event.lease_id, now_ns)
    if denial is not None:
        return denial
    if lease is None or lease.park is None:
        return denials.not_parkable(event.lease_id)
    return lease, lease.park


def requester_of(event: events.ParkRequested | events.MoveRequested, lease: Lease) -> ParkCause:
    """Return who requests a park or a move of a lease: its tenant, or an operator."""
    return ParkCause.TENANT if event.tenant == lease.tenant else ParkCause.OPERATOR


def refuse_parks(state: ParkState, denial: Denial, effects: list[Effect]) -> None:
    """Refuse the requests that wait for a park."""
    effects.extend(RequestDenied(request, denial) for request in state.requests)
    state.requests.clear()


def arm_park_timer(lease: Lease, due_ns: int, effects: list[Effect]) -> None:
    effects.append(ArmTimer(TimerFired(lease.lease_id, lease.generation, TimerKind.PARK), due_ns))
