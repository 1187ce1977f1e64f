"""Submits: a lease's second worker, from the request until its bytes are proved free.

1. A lease acquired with `submit_bytes` keeps that part of its size for submits and is charged for a second context.
   Such a submit uses only memory that the lease holds, so it always has room. Without `submit_bytes`, a submit runs in
   place of a session that was never opened, and gets the whole slice. Its context is charged to the card if there is
   room, otherwise to the slice. Until that submit's bytes are proved free, no client may attach to the session, and its
   worker holds only its context.
2. A lease has one submit at a time. One more may wait for its bytes, for `MAX_WAIT_S`; others are refused.
3. A submit ends with its connection, its own time, its lease, or any rule that it breaks. Its lease continues.
4. A submit's bytes belong to its lease. No lease is torn down before its submit's bytes are proved free. If that fails,
   the lease gets no further submits, and is fenced when it ends.
5. A submit takes over a warm context if there is one; otherwise it gets a new context. If the warm context is lost
   before the submit is ready, a new one replaces it. The new one waits until the lost one's bytes are proved free,
   because the lease has bytes for only one.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from gpulease.daemon.leases import denials, events
from gpulease.daemon.leases.denials import Denial
from gpulease.daemon.leases.devices import CardAccount
from gpulease.daemon.leases.events import (
    ArmTimer,
    Effect,
    KillWorker,
    ProveReclaimed,
    RefuseSubmit,
    RequestDenied,
    SetDeadline,
    SpawnSubmit,
    SubmitEnded,
    SubmitFenced,
    SubmitReady,
    TimerFired,
    TimerKind,
    WaitTimerFired,
)
from gpulease.daemon.leases.membership_events import SetMembershipDeadline
from gpulease.daemon.leases.model import (
    FIRST_SUBMIT_ID,
    Cause,
    Lease,
    LeaseState,
    Submit,
    SubmitRequested,
    SubmitSnapshot,
    SubmitState,
)
from gpulease.daemon.leases.park_state import ParkPhase
from gpulease.daemon.leases.table_state import LeaseStore
from gpulease.daemon.leases.waiting_requests import answered
from gpulease.protocol.time_units import NS_PER_MS, NS_PER_S

GRACE_MS: Final = 20
"""Time within which an ended submit can report the reason to its client. A kernel that never ends outlives its submit
by at most this time."""


MAX_WAIT_S: Final = 30
"""Longest wait for the previous submit. Stops a tenant's calls from waiting unnoticed for a submit that runs as long as
its lease."""


_GENERATION: Final = 0
"""Generation of a submit's timers: submits have no generations."""


Handler = Callable[[Submit, Any, int, list[Effect]], None]


OnFreed = Callable[[Lease, int, list[Effect]], None]


OnStuck = Callable[[Lease, str, int, list[Effect]], None]


class WarmContexts(Protocol):
    def has_ready(self, card_uuid: str) -> bool:
        """Return whether a context is ready that served no tenant."""

    def give(self, submit: Submit, now_ns: int, effects: list[Effect]) -> bool:
        """Give a starting submit a context; return False if none is ready."""

    def on_submit_lost(self, card_uuid: str, now_ns: int) -> None:
        """Record that a submit lost the context that it had taken over, before the submit was ready."""


class SubmitViews:
    """Queries about submits, which change nothing."""

    def __init__(self, store: LeaseStore) -> None:
        self._store = store

    def snapshots(self) -> tuple[SubmitSnapshot, ...]:
        """Return every submit with bytes that are not proved free yet, oldest first."""
        return tuple(submit.snapshot() for submit in self._store.submits.values())

    def of(self, lease_id: int) -> SubmitSnapshot | None:
        """Return a live lease's submit; None if it has none."""
        lease = self._store.live.get(lease_id)
        submit = None if lease is None else self._store.submits.get(lease.submit_id)
        return None if submit is None else submit.snapshot()

    def in_place_of_session(self, lease_id: int) -> SubmitSnapshot | None:
        """Return the submit that runs in place of a live lease's session; None if there is none."""
        lease = self._store.live.get(lease_id)
        return None if lease is None or not lease.own_submit_bytes else self.of(lease_id)

    def last_of(self, lease_id: int) -> SubmitSnapshot | None:
        """Return the last submit of a live lease that ended with its bytes proved free; None if there was none yet."""
        lease = self._store.live.get(lease_id)
        return None if lease is None else lease.last_submit

    def lease_of(self, submit_id: int) -> int:
        """Return the lease of a submit with bytes that are not proved free yet; 0 for any other number."""
        submit = self._store.submits.get(submit_id)
        return 0 if submit is None else submit.lease_id

    def may_hold(self, number: int) -> tuple[str, int] | None:
        """Return the card that a worker may use and the bytes it may hold there; None if it may hold none.

        Workers that are starting or ending are excluded: the former may not have their contexts yet, the latter may
        have exited already.
        """
        card_uuid = self._store.card_of(number)
        return None if card_uuid is None else (card_uuid, self._store.charge_bytes(number))

    def is_stuck(self, lease: Lease) -> bool:
        """Return whether a lease has a submit with bytes that could not be proved free."""
        submit = self._store.submits.get(lease.submit_id)
        return submit is not None and submit.state is SubmitState.FENCED


class Submits(SubmitViews):
    """Manages the submits. Each method appends what to execute to `effects`.

    Args:
        on_freed: Called with a draining lease after its submit's bytes were proved free.
        on_stuck: Called with a draining lease if its submit's bytes can't be proved free.
    """

    def __init__(self, store: LeaseStore, on_freed: OnFreed, on_stuck: OnStuck) -> None:
        super().__init__(store)
        self._on_freed = on_freed
        self._on_stuck = on_stuck
        self._pool: WarmContexts | None = None
        self._last_id = FIRST_SUBMIT_ID - 1
        # Per open request: the lease, and the time at which its wait for the previous submit ends.
        self._due_by_request: dict[int, tuple[int, int]] = {}
        self.handlers: Mapping[type, Handler] = {
            events.WorkerReady: self._on_ready,
            events.WorkerFailed: self._on_failed,
            events.WorkerExited: self._on_exited,
            events.SessionCondemned: self._on_condemned,
            events.SubmitAbandoned: self._on_abandoned,
            events.TimerFired: self._on_timer,
            events.ReclaimProved: self._on_proved,
            events.ReclaimFailed: self._on_not_proved,
        }

    def use_pool(self, pool: WarmContexts) -> None:
        """Let submits take over contexts from this pool."""
        self._pool = pool

    def open_requests(self) -> set[int]:
        """Return the requests that are not answered yet."""
        return set(self._due_by_request)

    # --- leases ---

    def end_with_lease(self, lease: Lease, cause: Cause, now_ns: int, effects: list[Effect]) -> None:
        submit = self._store.submits.get(lease.submit_id)
        if submit is None and lease.next_submit is None:
            return
        # Report the lease's end as the reason to two clients: the one with the current submit, and the one that waits.
        denial = denials.lease_ended(lease.snapshot())
        self._refuse_next(lease, denial, effects)
        if submit is not None:
            self._end(submit, cause, f"its lease ended: {cause.value}", denial, now_ns, effects)

    def on_deadline(self, lease: Lease, effects: list[Effect]) -> None:
        """Extend a running submit's deadline to its lease's new one."""
        submit = self._store.submits.get(lease.submit_id)
        if submit is not None and submit.state is SubmitState.RUNNING and lease.deadline_ns is not None:
            effects.append(SetDeadline(submit.submit_id, lease.generation, lease.deadline_ns))

    def on_membership_deadline(self, lease: Lease, effects: list[Effect]) -> None:
        """Give a running submit the new membership deadline of its claimed lease."""
        submit = self._store.submits.get(lease.submit_id)
        if lease.membership_deadline is not None and submit is not None and submit.state is SubmitState.RUNNING:
            effects.append(SetMembershipDeadline(submit.submit_id, lease.membership_deadline.boot_ns))

    def fence_with(self, lease: Lease, effects: list[Effect]) -> None:
        """Make a submit's bytes part of its lease's fence."""
        submit = self._store.submits.get(lease.submit_id)
        if submit is None:
            return
        if not submit.is_kill_sent and not submit.is_worker_gone:
            effects.append(KillWorker(submit.submit_id))
        self._forget(submit, lease, effects)

    def clear_fences(self, card_uuids: set[str], effects: list[Effect]) -> int:
        """Release submits with fenced bytes, because an operator vouches for them; return their number."""
        fenced = [submit for submit in self._store.submits.values() if submit.state is SubmitState.FENCED]
        cleared = [submit for submit in fenced if submit.card_uuid in card_uuids]
        for submit in cleared:
            self._forget(submit, self._store.live[submit.lease_id], effects, is_proved=True)
        return len(cleared)

    def restore(self, event: events.SubmitFound, now_ns: int, effects: list[Effect]) -> bool:
        """Add a submit of an earlier daemon after its lease was restored.

        Returns False if the lease can't have it, and the caller then kills the worker and holds its bytes.
        """
        # Numbers are never used twice: a late event about an old submit must not be applied to a new one.
        self._last_id = max(self._last_id, event.submit_id)
        lease = self._store.live.get(event.lease_id)
        if lease is None or lease.state is LeaseState.FENCED or lease.submit_id:
            return False
        if not lease.terms.submit_bytes and event.size_bytes < 1:
            return False
        # A running submit shows that the session was on the card. But if the session's return was not recorded, the
        # session is parked again, and its bytes can't be proved free while the lease's charge includes a submit.
        is_returning = lease.park is not None and lease.park.phase is ParkPhase.RETURNING
        if lease.park is not None and lease.park.is_off and not (is_returning and event.is_running):
            return False
        # Charge it as it was charged before: if its buffers and its context exceed the lease, the card had lent the
        # context.
        if not lease.terms.submit_bytes:
            account = self._store.account_by_uuid[lease.card_uuid]
            self._take_session_place(
                lease, account, is_lent=event.size_bytes + account.card.overhead_bytes > lease.terms.size_bytes
            )
        submit = self._enter(lease, event.submit_id, 0, event.timeout_ms, now_ns)
        if event.is_running and lease.state is LeaseState.ACTIVE:
            self._run(submit, lease, now_ns, effects)
        # The client never got a reply from the earlier daemon, or the submit was ending. So no client waits for it.
        else:
            self._end(submit, lease.cause, "its daemon ended while it began or ended", None, now_ns, effects)
        return True

    # --- requests ---

    def on_requested(self, event: SubmitRequested, now_ns: int, effects: list[Effect]) -> None:
        """Start a submit, let it wait for the previous one, or refuse it."""
        lease = self._store.live.get(event.lease_id)
        denial = _check_request(self._store, lease, event, now_ns)
        if denial is not None or lease is None:
            effects.append(RequestDenied(event.request, denial or denials.not_found(event.lease_id)))
            return
        # Record the request even if the submit starts at once: a client that disconnects is found by its request.
        due_ns = now_ns + MAX_WAIT_S * NS_PER_S
        self._due_by_request[event.request] = lease.lease_id, due_ns
        if lease.submit_id:
            lease.next_submit = event
            effects.append(ArmTimer(WaitTimerFired(event.request), due_ns))
        else:
            self._start(lease, event.request, event.timeout_ms, now_ns, effects)

    def on_requester_gone(self, request: int, now_ns: int, effects: list[Effect]) -> bool:
        """End the submit of a client that disconnected; return False if the request was not for a submit."""
        lease = self._store.live.get(self._due_by_request.pop(request, (0, 0))[0])
        if lease is None:
            return False
        # A waiting submit has no worker, so only drop it. End a running one.
        if lease.next_submit is not None and lease.next_submit.request == request:
            lease.next_submit = None
        else:
            self._end(self._store.submits[lease.submit_id], None, "its client disconnected", None, now_ns, effects)
        return True

    def on_wait_timer(self, request: int, now_ns: int, effects: list[Effect]) -> bool:
        """Refuse a submit that waited too long for the previous one.

        Returns False if the request was not for a submit.
        """
        lease_id, due_ns = self._due_by_request.get(request, (0, 0))
        lease = self._store.live.get(lease_id)
        if lease is None:
            return False
        # The submit has started, so the wait is over.
        if lease.next_submit is None or lease.next_submit.request != request:
            return True
        if now_ns < due_ns:
            effects.append(ArmTimer(WaitTimerFired(request), due_ns))
        else:
            self._refuse_next(lease, denials.waited_in_vain(lease.lease_id, MAX_WAIT_S), effects)
        return True

    # --- life ---

    def _take_session_place(self, lease: Lease, account: CardAccount, *, is_lent: bool) -> None:
        """Let a lease's submit hold all of the lease's bytes except the session's context.

        With `is_lent`, the card has room for the submit's context and lends it to the lease.
        """
        if is_lent:
            account.lend_context(lease)
        lease.own_submit_bytes = lease.charge_bytes - account.card.overhead_bytes

    def _make_place(self, lease: Lease, *, is_warm: bool) -> bool:
        """Make room for a submit that takes over a warm context or gets a new one; return False if that fails."""
        if lease.terms.submit_bytes:
            return True
        # While the slice changes its size, the submit's share of it is unknown.
        if lease.resize is not None:
            return False
        account = self._store.account_by_uuid[lease.card_uuid]
        overhead_bytes = account.card.overhead_bytes
        # Borrow room from the card for the submit's context, unless a waiter holds the card. Otherwise the slice is
        # charged for the context, and must be larger than one context.
        is_held_back = account.card.uuid in self._store.queue.held_cards()
        is_lent = not is_held_back and account.has_room_for_context(overhead_bytes if is_warm else 0)
        if not is_lent and lease.terms.size_bytes <= overhead_bytes:
            return False
        self._take_session_place(lease, account, is_lent=is_lent)
        return True

    def _enter(self, lease: Lease, submit_id: int, request: int, timeout_ms: int, now_ns: int) -> Submit:
        due_ns = now_ns + self._store.limits.spawn_timeout_s * NS_PER_S
        charge_bytes = lease.submit_charge_bytes
        # The kernel gets the reserved bytes or, in the session's place, the slice less one context.
        overhead_bytes = self._store.account_by_uuid[lease.card_uuid].card.overhead_bytes
        size_bytes = lease.terms.submit_bytes or charge_bytes - overhead_bytes
        submit = Submit(
            submit_id, lease.lease_id, lease.card_uuid, size_bytes, charge_bytes, request, timeout_ms, due_ns
        )
        self._store.submits[submit_id] = submit
        lease.submit_id = submit_id
        return submit

    def _start(
        self,
        lease: Lease,
        request: int,
        timeout_ms: int,
        now_ns: int,
        effects: list[Effect],
        *,
        may_be_warm: bool = True,
    ) -> None:
        # Decide about the warm context before making room, because a warm context brings its own bytes.
        is_warm = may_be_warm and self._pool is not None and self._pool.has_ready(lease.card_uuid)
        if not self._make_place(lease, is_warm=is_warm):
            del self._due_by_request[request]
            effects.append(RequestDenied(request, denials.no_context(lease.lease_id)))
            return
        self._last_id += 1
        submit = self._enter(lease, self._last_id, request, timeout_ms, now_ns)
        if is_warm and self._pool is not None and self._pool.give(submit, now_ns, effects):
            # A warm context answers quickly, so use a shorter timeout, which detects one that hangs.
            submit.is_warm = True
            submit.spawn_due_ns = now_ns + self._store.limits.adopt_timeout_s * NS_PER_S
        effects.append(
            SpawnSubmit(
                submit.submit_id,
                lease.lease_id,
                lease.card_uuid,
                submit.size_bytes,
                submit.timeout_ms,
                lease.terms,
                submit.is_warm,
            )
        )
        effects.append(ArmTimer(TimerFired(submit.submit_id, _GENERATION, TimerKind.SPAWN), submit.spawn_due_ns))

    def _run(self, submit: Submit, lease: Lease, now_ns: int, effects: list[Effect]) -> None:
        # The submit's own time starts when its context is ready, not when it was requested.
        submit.state = SubmitState.RUNNING
        submit.due_ns = now_ns + submit.timeout_ms * NS_PER_MS
        # Set both deadlines before the submit is reported ready: the worker applies whichever comes first.
        self.on_membership_deadline(lease, effects)
        self.on_deadline(lease, effects)
        effects.append(ArmTimer(TimerFired(submit.submit_id, _GENERATION, TimerKind.EXPIRY), submit.due_ns))

    def _on_ready(self, submit: Submit, event: events.WorkerReady, now_ns: int, effects: list[Effect]) -> None:
        if submit.state is SubmitState.STARTING:
            self._run(submit, self._store.live[submit.lease_id], now_ns, effects)
            del self._due_by_request[submit.request]
            effects.append(SubmitReady(submit.request, submit.submit_id, submit.lease_id, submit.size_bytes))

    def _on_failed(self, submit: Submit, event: events.WorkerFailed, now_ns: int, effects: list[Effect]) -> None:
        if submit.state is SubmitState.STARTING:
            denial = denials.not_started(submit.lease_id, event.reason)
            self._end(submit, None, event.reason, denial, now_ns, effects)

    def _on_exited(self, submit: Submit, event: events.WorkerExited, now_ns: int, effects: list[Effect]) -> None:
        # The exit may be reported after the worker was replaced or ended.
        if submit.is_worker_gone:
            return
        submit.is_worker_gone = True
        # The warm context died before the submit was ready. The submit gets a new worker; its client keeps waiting.
        if submit.state is SubmitState.STARTING and submit.is_warm:
            self._replace(submit, event.reason, now_ns, effects)
        elif submit.state is SubmitState.RUNNING and submit.due_ns is not None and now_ns >= submit.due_ns:
            # The zygote ended the submit while the daemon hung, so report the timeout, not a lost worker.
            self._on_too_long(submit, now_ns, effects)
        elif submit.state in (SubmitState.STARTING, SubmitState.RUNNING):
            denial = denials.not_started(submit.lease_id, event.reason)
            denial = denials.no_worker_now(event.reason) if event.is_busy else denial
            self._end(submit, None, event.reason, denial, now_ns, effects)
        elif submit.state is SubmitState.ENDING:
            self._prove(submit, now_ns, effects)

    def _on_condemned(self, submit: Submit, event: events.SessionCondemned, now_ns: int, effects: list[Effect]) -> None:
        if submit.state is SubmitState.ENDING:
            return
        denial = denials.not_started(submit.lease_id, event.reason)
        # The submit's client gets a timeout if the cause is a time limit.
        if submit.state is SubmitState.RUNNING:
            submit.is_timed_out = event.cause.row.is_time_limit
        self._end(submit, event.cause, event.reason, denial, now_ns, effects)

    def _on_abandoned(self, submit: Submit, event: events.SubmitAbandoned, now_ns: int, effects: list[Effect]) -> None:
        self._end(submit, None, "its connection could not be handed over", None, now_ns, effects)

    def _on_timer(self, submit: Submit, event: events.TimerFired, now_ns: int, effects: list[Effect]) -> None:
        # As for leases, each timer is checked against the submit's own time.
        due_ns = _due_ns(submit, event.kind)
        if due_ns is None:
            return
        if now_ns < due_ns:
            effects.append(ArmTimer(TimerFired(submit.submit_id, _GENERATION, event.kind), due_ns))
        elif event.kind is TimerKind.SPAWN and submit.is_warm:
            reason = f"its context did not take it over within {self._store.limits.adopt_timeout_s} s"
            self._replace(submit, reason, now_ns, effects)
        elif event.kind is TimerKind.SPAWN:
            reason = f"it was not ready within {self._store.limits.spawn_timeout_s} s"
            self._end(submit, None, reason, denials.not_started(submit.lease_id, reason), now_ns, effects)
        elif event.kind is TimerKind.EXPIRY:
            self._on_too_long(submit, now_ns, effects)
        elif event.kind is TimerKind.RECLAIM:
            missing = "its memory was not shown free" if submit.is_worker_gone else "it could not be reaped"
            self._fence(submit, f"{missing} within {self._store.limits.reclaim_timeout_s} s", now_ns, effects)
        elif not submit.is_kill_sent and not submit.is_worker_gone:
            self._kill(submit, now_ns, effects)

    # --- ends ---

    def _on_too_long(self, submit: Submit, now_ns: int, effects: list[Effect]) -> None:
        submit.is_timed_out = True
        self._end(submit, None, f"it took more than {denials.duration_text(submit.timeout_ms)}", None, now_ns, effects)

    def _end(
        self,
        submit: Submit,
        cause: Cause | None,
        reason: str,
        denial: Denial | None,
        now_ns: int,
        effects: list[Effect],
    ) -> None:
        """End a submit that has not ended. `denial` is the reply to its client if the client still waits."""
        self._refuse(submit, denial, effects)
        if submit.state in (SubmitState.STARTING, SubmitState.RUNNING):
            self._stop(submit, cause, reason, now_ns, effects)

    def _replace(self, submit: Submit, reason: str, now_ns: int, effects: list[Effect]) -> None:
        """End a submit's dead or hung warm context; its client keeps waiting for the replacement."""
        if self._pool is not None:
            self._pool.on_submit_lost(submit.card_uuid, now_ns)
        submit.is_replaced = True
        self._stop(submit, None, reason, now_ns, effects)

    def _stop(self, submit: Submit, cause: Cause | None, reason: str, now_ns: int, effects: list[Effect]) -> None:
        state_before, submit.state, submit.reason = submit.state, SubmitState.ENDING, reason
        # Set the revocation word first, so that the worker starts nothing from then on.
        effects.append(RefuseSubmit(submit.submit_id, cause))
        if submit.is_worker_gone:
            self._prove(submit, now_ns, effects)
        # Give a running submit a moment to report its end to the client. A submit that never ran has nothing to report.
        elif state_before is SubmitState.RUNNING:
            submit.grace_due_ns = now_ns + GRACE_MS * NS_PER_MS
            effects.append(ArmTimer(TimerFired(submit.submit_id, _GENERATION, TimerKind.GRACE), submit.grace_due_ns))
        else:
            self._kill(submit, now_ns, effects)

    def _kill(self, submit: Submit, now_ns: int, effects: list[Effect]) -> None:
        submit.is_kill_sent = True
        effects.append(KillWorker(submit.submit_id))
        self._start_reclaim_clock(submit, now_ns, effects)

    def _prove(self, submit: Submit, now_ns: int, effects: list[Effect]) -> None:
        effects.append(ProveReclaimed(submit.submit_id, submit.card_uuid))
        self._start_reclaim_clock(submit, now_ns, effects)

    def _start_reclaim_clock(self, submit: Submit, now_ns: int, effects: list[Effect]) -> None:
        # One time limit runs from the kill to the proof, so that a worker that dies late does not get a second one.
        if submit.reclaim_due_ns is None:
            submit.reclaim_due_ns = now_ns + self._store.limits.reclaim_timeout_s * NS_PER_S
            effects.append(
                ArmTimer(TimerFired(submit.submit_id, _GENERATION, TimerKind.RECLAIM), submit.reclaim_due_ns)
            )

    def _on_proved(self, submit: Submit, event: events.ReclaimProved, now_ns: int, effects: list[Effect]) -> None:
        # A proof from before the reap is not valid: the process could still hold memory.
        if submit.state is not SubmitState.ENDING or not submit.is_worker_gone:
            return
        lease = self._store.live[submit.lease_id]
        self._forget(submit, lease, effects, is_proved=True)
        waiting = lease.next_submit
        # The bytes are free: end the lease that waited for them, replace the lost warm context, or start the waiting
        # submit. A replacement does not take a warm context, so that a pool of dead contexts can't cause a loop.
        if lease.state is LeaseState.DRAINING:
            self._on_freed(lease, now_ns, effects)
        elif submit.is_replaced:
            self._start(lease, submit.request, submit.timeout_ms, now_ns, effects, may_be_warm=False)
        elif waiting is not None:
            lease.next_submit = None
            with answered(waiting.request, effects):
                self._start(lease, waiting.request, waiting.timeout_ms, now_ns, effects)

    def _on_not_proved(self, submit: Submit, event: events.ReclaimFailed, now_ns: int, effects: list[Effect]) -> None:
        if submit.state is SubmitState.ENDING:
            self._fence(submit, event.reason, now_ns, effects)

    def _fence(self, submit: Submit, reason: str, now_ns: int, effects: list[Effect]) -> None:
        lease = self._store.live[submit.lease_id]
        # From now on the lease itself is in doubt: it gets no further submit, and its context serves no other lease.
        submit.state, lease.is_in_doubt = SubmitState.FENCED, True
        submit.reason = f"{submit.reason}; {reason}" if submit.reason else reason
        effects.append(SubmitFenced(submit.submit_id, lease.lease_id, submit.reason))
        self._refuse(submit, denials.stuck(lease.lease_id), effects)
        self._refuse_next(lease, denials.stuck(lease.lease_id), effects)
        if lease.state is LeaseState.DRAINING:
            self._on_stuck(lease, f"of a submit, {reason}", now_ns, effects)

    def _refuse(self, submit: Submit, denial: Denial | None, effects: list[Effect]) -> None:
        """Refuse the client that waits for the submit or for its replacement."""
        submit.is_replaced = False
        if self._due_by_request.pop(submit.request, None) is not None and denial is not None:
            effects.append(RequestDenied(submit.request, denial))

    def _refuse_next(self, lease: Lease, denial: Denial, effects: list[Effect]) -> None:
        waiting, lease.next_submit = lease.next_submit, None
        if waiting is not None:
            del self._due_by_request[waiting.request]
            effects.append(RequestDenied(waiting.request, denial))

    def _forget(self, submit: Submit, lease: Lease, effects: list[Effect], *, is_proved: bool = False) -> None:
        """Forget a submit: its bytes are free (`is_proved`: proved, or vouched for) or part of its lease's fence."""
        del self._store.submits[submit.submit_id]
        lease.submit_id = lease.own_submit_bytes = 0
        # Return the lent context's bytes to the card only if they are free. In a fence they stay with the lease.
        if is_proved and lease.extra_bytes:
            self._store.account_by_uuid[lease.card_uuid].take_context_back(lease)
            self._store.has_freed_room = True
        lease.last_submit = submit.snapshot()
        effects.append(SubmitEnded(submit.submit_id, lease.lease_id, submit.reason))


def _check_request(store: LeaseStore, lease: Lease | None, event: SubmitRequested, now_ns: int) -> Denial | None:
    """Return the denial for a submit that the lease may not have now; None if it may.

    An admitted submit counts as an acquire towards its tenant's rate, so the rate is checked last.
    """
    # Check from the lease's state to the tenant's rate. The rate is last, because the check itself counts the request.
    if lease is None or lease.tenant != event.tenant:
        return denials.not_found(event.lease_id)
    if lease.state is LeaseState.PENDING:
        return denials.lease_pending(lease.snapshot())
    if lease.state is not LeaseState.ACTIVE:
        return denials.lease_ended(lease.snapshot())
    if lease.is_expired(now_ns):
        return denials.lease_expired(lease.snapshot())
    if lease.is_isolated(now_ns):
        return denials.lease_isolated(lease.snapshot())
    # A session that was opened may hold the whole slice.
    if not lease.terms.submit_bytes and lease.has_session:
        return denials.has_session(lease.lease_id)
    if event.timeout_ms < 1:
        return denials.no_time(event.timeout_ms)
    earlier = store.submits.get(lease.submit_id)
    if earlier is not None and earlier.state is SubmitState.FENCED:
        return denials.stuck(lease.lease_id)
    if earlier is not None and lease.next_submit is not None:
        return denials.busy(lease.lease_id)
    return store.rates.denial(event.tenant, store.limits.tenants.of(event.tenant), now_ns)


def _due_ns(submit: Submit, kind: TimerKind) -> int | None:
    """Return the time at which a submit's timer of that kind is due; None if it can be dropped."""
    match (submit.state, kind):
        case (SubmitState.STARTING, TimerKind.SPAWN):
            return submit.spawn_due_ns
        case (SubmitState.RUNNING, TimerKind.EXPIRY):
            return submit.due_ns
        case (SubmitState.ENDING, TimerKind.GRACE):
            return submit.grace_due_ns
        case (SubmitState.ENDING, TimerKind.RECLAIM):
            return submit.reclaim_due_ns
    return None
