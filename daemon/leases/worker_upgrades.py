"""Worker upgrades: a session moves from a worker of another version of the daemon to one of this version.

1. An upgrade is a move to the session's own card. The session is parked, its worker sends its image, and another worker
   adopts the image.
2. Unlike in other moves, the former worker does not end: it is set aside until the new one has restored the whole
   session. It takes the session back if the session does not fit the new version, if the image can't be read, if no
   worker can be started, or if both contexts do not fit in time. So an upgrade that fails costs its tenant only a
   pause.
3. During the upgrade the card is charged for both workers.
4. A session that was parked is parked again.
5. A table that restores a lease in the middle of its upgrade continues with the former worker, unless the new one may
   have served the session already: then the lease ends, like that of a cold session.
"""

from collections.abc import Callable
from typing import Protocol

from gpulease.daemon.leases.denials import Denial
from gpulease.daemon.leases.direct_moves import change_card
from gpulease.daemon.leases.events import Effect, ParkFailed, SetDeadline, StaySession, WorkerReplaced
from gpulease.daemon.leases.membership_events import SetMembershipDeadline
from gpulease.daemon.leases.model import Lease
from gpulease.daemon.leases.park_state import ParkCause, ParkDepth, ParkFailure, ParkState, SessionMove
from gpulease.daemon.leases.table_state import LeaseStore


class HeldWorkers(Protocol):
    """The part of the warm pool that keeps workers that were set aside."""

    def hold(self, lease: Lease, charge_bytes: int, effects: list[Effect]) -> int:
        """Set aside the worker of a lease, which holds these bytes. Returns its id as a context."""

    def take_held(self, lease: Lease, warm_id: int, effects: list[Effect]) -> tuple[str, int] | None:
        """Give the worker that was set aside back to its lease.

        Returns its card's UUID and the bytes that it holds there; None if it has ended.
        """

    def drop_held(self, warm_id: int, reason: str, now_ns: int, effects: list[Effect]) -> None:
        """Drop a worker that was set aside, unless it has ended."""


class WorkerUpgrades:
    """Sets former workers aside, and returns to them the sessions that can't be upgraded.

    Args:
        store: The table's state.
        held_workers: Keeps the workers that are set aside.
        await_return: Brings a parked session back, or queues it for room.
        park: Parks a resident session for a cause; returns the denial if it can't be parked now.
    """

    def __init__(
        self,
        store: LeaseStore,
        held_workers: HeldWorkers,
        await_return: Callable[[Lease, ParkState, int, list[Effect]], None],
        park: Callable[[Lease, ParkCause, int, list[Effect]], Denial | None],
    ) -> None:
        self._store = store
        self._held = held_workers
        self._await_return = await_return
        self._park = park

    def set_aside(self, lease: Lease, state: ParkState, held_bytes: int, effects: list[Effect]) -> bool:
        """Set aside the worker that a session has left for its upgrade, for a direct move, or after a misfit.

        Returns False if the session left for another reason. `held_bytes`: Bytes that the worker holds and that the
        lease's charge no longer includes.
        """
        if state.move is None or not (state.move.from_version or state.is_in_place or state.misfit):
            return False
        state.held_id = self._held.hold(lease, held_bytes, effects)
        return True

    def take_back(self, lease: Lease, state: ParkState, reason: str, now_ns: int, effects: list[Effect]) -> bool:
        """Return a cold session to its former worker, on that worker's card. Returns False if there is none.

        `reason` says why no other worker can continue the session.
        """
        held_id, state.held_id = state.held_id, 0
        if not held_id or (held := self._held.take_held(lease, held_id, effects)) is None:
            return False
        # Step 1: charge the lease for the bytes that the worker kept, on the worker's card. The session is parked warm
        # again.
        card_uuid, held_bytes = held
        account = self._store.account_by_uuid[card_uuid]
        if card_uuid != lease.card_uuid:
            change_card(self._store, lease, state, account, now_ns, effects)
        if state.is_in_place:
            state.direct_failure = reason
            failure = f"its direct move failed: {reason}"
            effects.append(ParkFailed(lease.snapshot(), None, failure, ParkFailure.DIRECT_MOVE))
        account.take_parked(lease, held_bytes)
        account.await_bytes(lease, 0)
        state.off_bytes -= held_bytes
        state.kept_bytes = lease.terms.size_bytes - state.off_bytes
        state.depth, state.misfits, state.stays_here = ParkDepth.WARM, 0, reason
        # Step 2: give the worker the deadline, which may have been renewed, and make it serve its connections again.
        if lease.deadline_ns is not None:
            effects.append(SetDeadline(lease.lease_id, lease.generation, lease.deadline_ns))
        if lease.membership_deadline is not None:
            effects.append(SetMembershipDeadline(lease.lease_id, lease.membership_deadline.boot_ns))
        effects.append(StaySession(lease.lease_id, state.number))
        # Step 3: bring the session back to the card.
        state.is_awaited = True
        self._await_return(lease, state, now_ns, effects)
        return True

    def on_done(self, lease: Lease, state: ParkState, move: SessionMove, now_ns: int, effects: list[Effect]) -> None:
        """End the former worker of a session that the new worker has restored completely."""
        took_ns = now_ns - move.since_ns
        effects.append(WorkerReplaced(lease.snapshot(), move.from_version, state.moved_bytes, took_ns))
        self.drop(state, f"the session of lease {lease.lease_id:032x} has left it", now_ns, effects)
        if move.was_parked and not state.requests:
            # If the session can't be parked now, it is parked later, when it is idle or another lease needs its room.
            self._park(lease, ParkCause.OPERATOR, now_ns, effects)

    def drop(self, state: ParkState, reason: str, now_ns: int, effects: list[Effect]) -> None:
        """End the former worker, if one is set aside."""
        held_id, state.held_id = state.held_id, 0
        if held_id:
            self._held.drop_held(held_id, reason, now_ns, effects)
