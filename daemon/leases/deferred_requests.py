"""Deferred requests: a region, a resize, a submit or a move, requested while the session is parked or returns.

1. Such a request needs the session on its card. So, like an operation of the session, it brings the session back. When
   the session has returned, the request is checked again and handled. Only a move can begin while the session is
   parked.
2. The request may come after its tenant was notified of the session's return but before this table was: the worker
   answers the operation and reports the return to the broker at the same time.
3. The wait is as long as that of an operation that waits for the return. If the session can't return, the request is
   refused with the same reason.
4. A request that would be denied anyway, or that comes from a caller who may not make it, does not bring the session
   back.
"""

from collections.abc import Callable, Iterator
from typing import Final

from gpulease.daemon.leases import denials, events
from gpulease.daemon.leases.denials import Denial
from gpulease.daemon.leases.events import ArmTimer, Effect, RequestDenied, WaitTimerFired
from gpulease.daemon.leases.model import Lease, LeaseState, SubmitRequested
from gpulease.daemon.leases.park_state import ParkDepth, ParkPhase, ParkState
from gpulease.daemon.leases.table_state import DeferrableRequest, DeferredGroup, DeferredRequest, LeaseStore
from gpulease.protocol.time_units import NS_PER_MS, NS_PER_S

MAX_DEFERRED: Final = 64
"""Maximum number of requests that wait for the return of one session. Stops a tenant from filling the broker's memory
with them."""


class DeferredRequests:
    """Defers requests until the session of their lease has returned.

    Args:
        store: The table's state.
        await_return: Brings a parked session back, or queues it for room.
    """

    def __init__(self, store: LeaseStore, await_return: Callable[[Lease, ParkState, int, list[Effect]], None]) -> None:
        self._store = store
        self._await_return = await_return
        # The group of each request.
        self._groups: dict[int, DeferredGroup] = {}

    def defer(self, event: DeferrableRequest, now_ns: int, effects: list[Effect]) -> bool:
        """Defer a request if the state of its session requires that. Returns False if it must be handled now."""
        lease = self._store.parkable.get(event.lease_id)
        is_move = isinstance(event, events.MoveRequested)
        if lease is None or lease.park is None or not must_wait(lease.park, is_move=is_move):
            return False
        # The handler denies it for the same reason.
        is_operator = not isinstance(event, SubmitRequested) and event.is_operator
        denial = self._store.denial_unless_owner(event.lease_id, event.tenant, is_operator)
        if denial is not None or self._store.denial_for(event.lease_id, now_ns) is not None:
            return False
        if len(self._of(lease.lease_id)) >= MAX_DEFERRED:
            effects.append(RequestDenied(event.request, denials.too_many_deferred(lease.lease_id, MAX_DEFERRED)))
            return True
        wait_ns = max(lease.wait_ms * NS_PER_MS, self._store.limits.session_timeout_s * NS_PER_S)
        group = DeferredGroup(lease.lease_id, is_move)
        self._groups[event.request] = group
        self._store.deferred.setdefault(group, {})[event.request] = DeferredRequest(event, now_ns + wait_ns)
        # The session's own wait for room begins now, too. Its timer fires first, with the more precise reason.
        self._bring_back(lease, lease.park, now_ns, effects)
        effects.append(ArmTimer(WaitTimerFired(event.request), now_ns + wait_ns))
        return True

    def take_ready(self, now_ns: int, effects: list[Effect]) -> Iterator[DeferrableRequest]:
        """Yield the requests that can be handled now, and bring back sessions that have been parked again since."""
        for group, requests in list(self._store.deferred.items()):
            lease = self._store.parkable.get(group.lease_id)
            if lease is None or lease.park is None:
                continue
            if must_wait(lease.park, is_move=group.is_move):
                self._bring_back(lease, lease.park, now_ns, effects)
                continue
            # Handling one may change the state for the next.
            for request in list(requests):
                if request in requests and not must_wait(lease.park, is_move=group.is_move):
                    yield self._remove(request).event

    def need_session(self, lease_id: int) -> bool:
        """Return whether any waiting request can be handled only while a lease's session is on its card."""
        return DeferredGroup(lease_id, is_move=False) in self._store.deferred

    def has_ready(self) -> bool:
        """Return whether a request can be handled now."""
        leases = ((self._store.parkable.get(group.lease_id), group) for group in self._store.deferred)
        return any(lease and lease.park and not must_wait(lease.park, is_move=group.is_move) for lease, group in leases)

    def _bring_back(self, lease: Lease, state: ParkState, now_ns: int, effects: list[Effect]) -> None:
        # In every other phase or depth, the next answer causes another check.
        is_settled = state.phase is ParkPhase.PARKED and state.depth in (ParkDepth.WARM, ParkDepth.COLD)
        if is_settled and not state.is_awaited and lease.state is LeaseState.ACTIVE:
            state.is_awaited = True
            self._await_return(lease, state, now_ns, effects)

    def refuse(self, lease_id: int, denial: Denial, effects: list[Effect]) -> None:
        """Refuse the requests that wait for a session that can't return now, or that has ended with its lease."""
        for request in self._of(lease_id):
            self._remove(request)
            effects.append(RequestDenied(request, denial))

    def on_wait_timer(self, request: int, now_ns: int, effects: list[Effect]) -> bool:
        """Refuse a request that has waited too long; return False if it is not a deferred one."""
        group = self._groups.get(request)
        if group is None:
            return False
        deferred = self._store.deferred[group][request]
        if now_ns < deferred.due_ns:
            effects.append(ArmTimer(WaitTimerFired(request), deferred.due_ns))
            return True
        self._remove(request)
        reason = denials.return_failed(group.lease_id, "the session was not back on its card in time")
        effects.append(RequestDenied(request, denials.return_refused(reason)))
        return True

    def on_requester_gone(self, request: int) -> bool:
        """Forget the request of a client that disconnected; return False if it is not a deferred one."""
        if request not in self._groups:
            return False
        self._remove(request)
        return True

    def _remove(self, request: int) -> DeferredRequest:
        group = self._groups.pop(request)
        requests = self._store.deferred[group]
        deferred = requests.pop(request)
        if not requests:
            del self._store.deferred[group]
        return deferred

    def _of(self, lease_id: int) -> list[int]:
        groups = (DeferredGroup(lease_id, is_move) for is_move in (False, True))
        return [request for group in groups for request in self._store.deferred.get(group, ())]


def must_wait(state: ParkState, *, is_move: bool) -> bool:
    """Return whether a move, or any other request, has to wait for the session's return."""
    if is_move:
        # A session that is parked, or being parked, can be moved without returning first, even while it waits for room.
        is_wanted = state.is_leaving and state.is_awaited
        return state.move is None and (is_wanted or state.phase is ParkPhase.RETURNING)
    return state.is_off
