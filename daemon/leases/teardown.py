"""The teardown of a lease, from its end until its bytes are proved free or its slice is fenced.

The order is: refuse new work, give work in flight a grace period, kill, wait for the reap, wait for the proof. Each
step is taken once, even if events come twice, late or out of order. No step waits for the tenant. A worker that may be
recycled is not killed: it is scrubbed during the grace period. If the scrub is not proved by then, it is killed.
"""

from typing import Final

from gpulease.daemon.leases import denials
from gpulease.daemon.leases.denials import Denial
from gpulease.daemon.leases.events import (
    ArmTimer,
    Effect,
    FreeDone,
    KillWorker,
    LeaseEnded,
    ProveReclaimed,
    RefuseWork,
    RequestDenied,
    RevokeDone,
    ScrubWorker,
    TimerFired,
    TimerKind,
)
from gpulease.daemon.leases.model import Cause, Lease, LeaseSnapshot, LeaseState, Trigger
from gpulease.daemon.leases.parking import Parking, park_due_ns
from gpulease.daemon.leases.regions import Regions
from gpulease.daemon.leases.resizes import Resizes
from gpulease.daemon.leases.submits import Submits
from gpulease.daemon.leases.table_state import LeaseStore
from gpulease.protocol.opcodes import RevokeOutcome
from gpulease.protocol.time_units import NS_PER_MS, NS_PER_S

SCRUB_TIMEOUT_MS: Final = 500
"""Milliseconds after which a worker is killed if its scrub is not proved. Stops a kernel that keeps running, or a
worker that hangs, from keeping the slice. A busy host loses only warm contexts by it."""


def timer_due_ns(lease: Lease, kind: TimerKind) -> int | None:
    """Return the time at which a lease's timer of that kind is due; None if the timer can be dropped.

    A timer that fires early is armed again for that time.
    """
    # Each kind of timer belongs to one state; in any other state it is outdated.
    match kind:
        case TimerKind.SPAWN:
            return lease.spawn_due_ns if lease.state is LeaseState.PENDING else None
        case TimerKind.EXPIRY:
            return lease.deadline_ns if lease.state is LeaseState.ACTIVE else None
        case TimerKind.ORPHAN:
            return lease.orphan_due_ns if lease.state is LeaseState.ACTIVE else None
        case TimerKind.PARK:
            return park_due_ns(lease)
        case TimerKind.MEMBERSHIP if lease.membership_deadline is not None:
            return lease.membership_deadline.at_ns if lease.state is LeaseState.ACTIVE else None
        case TimerKind.GRACE if not (lease.is_kill_sent or lease.is_worker_gone):
            return lease.grace_due_ns if lease.state is LeaseState.DRAINING else None
        case TimerKind.RECLAIM:
            return lease.reclaim_due_ns if lease.state is LeaseState.DRAINING else None
    return None


class Teardown:
    """Ends leases. Each method appends its effects to `effects`.

    Attributes:
        submits: The leases' submits, which end with them.
        regions: Their regions, which end with them too.
        resizes: The changes of their sizes.
        parking: The parking of their sessions.
    """

    def __init__(self, store: LeaseStore) -> None:
        self._store = store
        self._reclaim_timeout_ns = store.limits.reclaim_timeout_s * NS_PER_S
        # The submits call back, because a lease's teardown waits until its submit has been torn down.
        self.submits = Submits(store, self._on_submit_freed, self.on_reclaim_failed)
        self.regions = Regions(store, self.condemn)
        self.resizes = Resizes(store)
        self.parking = Parking(store, self.condemn)

    def begin(
        self,
        lease: Lease,
        cause: Cause,
        reason: str,
        now_ns: int,
        effects: list[Effect],
        denial: Denial | None = None,
    ) -> None:
        """End a pending or active lease, and refuse the acquire that still waits for it.

        Args:
            lease: The lease to end.
            cause: Why the lease ends.
            reason: The cause as a sentence for people.
            now_ns: Monotonic time.
            effects: Receives the effects.
            denial: Reply to the acquire; None for a reply that says how the lease ended.
        """
        # Step 1: record the end. A revoked id is kept forever.
        was_pending = lease.state is LeaseState.PENDING
        lease.move(cause, now_ns)
        lease.cause = cause
        lease.reason = reason
        if cause is Cause.REVOKED:
            self._store.revoked.add(lease.lease_id)
        # Step 2: refuse new work. The revocation flag is set before any other effect, so that no launch starts later.
        effects.append(RefuseWork(lease.lease_id, cause))
        # If the session is passing from one worker to another, and the daemon is killed now, the next daemon may have
        # an earlier record and continue the session in the former worker. So that worker's page must show the end, too.
        effects += [RefuseWork(worker_id, cause) for worker_id in self._store.left_workers(lease)]
        # Step 3: end everything inside the lease, with the lease's cause.
        self.regions.end_with_lease(lease, now_ns, effects)
        self.resizes.end_with_lease(lease, effects)
        self.parking.end_with_lease(lease, now_ns, effects)
        self.submits.end_with_lease(lease, cause, now_ns, effects)
        # Step 4: answer the acquire that still waits, unless its client has disconnected.
        if was_pending:
            self._store.leave_pending(lease)
            if cause is not Cause.ABANDONED:
                effects.append(RequestDenied(lease.request, denial or denials.lease_ended(lease.snapshot())))
        # Step 5: if the worker is already dead, skip the kill and order the proof of its bytes.
        if lease.is_worker_gone:
            self._prove(lease, now_ns, effects)
            return
        # Step 6: give work in flight its grace period, then kill. A worker that was never ready has nothing in flight.
        grace_ns = 0 if was_pending else self._grace_ns(lease, cause, effects)
        if grace_ns:
            lease.grace_due_ns = now_ns + grace_ns
            effects.append(ArmTimer(TimerFired(lease.lease_id, lease.generation, TimerKind.GRACE), lease.grace_due_ns))
        else:
            self._kill(lease, now_ns, effects)

    def _grace_ns(self, lease: Lease, cause: Cause, effects: list[Effect]) -> int:
        """Return the time until the kill in nanoseconds; if the context may be recycled, order a scrub first."""
        # Scrub only after a tenant's own free: after any other end something may be wrong with the session.
        if cause is not Cause.FREED or not self._store.may_recycle(lease):
            return self._store.limits.grace_ns(cause)
        # The scrub uses the grace period: the tenant has freed the lease, so none of its work is in flight.
        lease.is_scrubbing = True
        effects.append(ScrubWorker(lease.lease_id))
        return SCRUB_TIMEOUT_MS * NS_PER_MS

    def give_up_scrub(self, lease: Lease | None, now_ns: int, effects: list[Effect]) -> None:
        """Kill the worker of a lease that was to be scrubbed, because something is in doubt."""
        if lease is not None and lease.is_scrubbing and not lease.is_worker_gone:
            self._kill(lease, now_ns, effects)

    def release_recycled(self, lease: Lease, now_ns: int, effects: list[Effect]) -> None:
        """Release the bytes of a lease after its scrubbed context was charged to the pool."""
        lease.is_scrubbing = False
        self._release(lease, now_ns, effects)

    def resume(self, lease: Lease, now_ns: int, effects: list[Effect]) -> None:
        """Continue a teardown that an earlier table began.

        Its grace period is over, but its revocation word may not be flipped yet.
        """
        # The earlier daemon may have been killed between the journal and the page.
        if lease.cause is not None:
            effects.append(RefuseWork(lease.lease_id, lease.cause))
        if lease.is_worker_gone:
            self._prove(lease, now_ns, effects)
        else:
            self._kill(lease, now_ns, effects)

    def expire_if_due(self, lease: Lease | None, now_ns: int, effects: list[Effect]) -> None:
        """End a lease that has reached its deadline.

        Both the timer and any request that finds the lease overdue call this, whichever comes first.
        """
        if lease is not None and lease.is_expired(now_ns):
            self.begin(lease, Cause.EXPIRED, "it was not renewed in time", now_ns, effects)
        elif lease is not None and lease.is_isolated(now_ns):
            self.begin(lease, Cause.ISOLATED, denials.MEMBERSHIP_LOST, now_ns, effects)

    def on_timer(self, lease: Lease, kind: TimerKind, now_ns: int, effects: list[Effect]) -> None:
        """Act on a timer that `timer_due_ns` found due."""
        if kind in (TimerKind.EXPIRY, TimerKind.MEMBERSHIP):
            self.expire_if_due(lease, now_ns, effects)
        elif kind is TimerKind.ORPHAN:
            self._orphan(lease, now_ns, effects)
        elif kind is TimerKind.PARK:
            self.parking.on_timer(lease, now_ns, effects)
        elif kind is TimerKind.GRACE:
            self._kill(lease, now_ns, effects)
        else:
            # The reclaim took too long. The reason says whether memory or a process's end is missing.
            of_what = "its submit's" if lease.is_proved else "its"
            missing = (
                f"{of_what} memory was not shown free" if lease.is_worker_gone else "its worker could not be reaped"
            )
            reason = f"{missing} within {self._store.limits.reclaim_timeout_s} s"
            self.on_reclaim_failed(lease, reason, now_ns, effects)

    def _orphan(self, lease: Lease, now_ns: int, effects: list[Effect]) -> None:
        # If its deadline has passed as well, report that as the cause.
        self.expire_if_due(lease, now_ns, effects)
        if lease.state is LeaseState.ACTIVE:
            reason = f"no client was connected to it for {denials.duration_text(lease.orphan_ms)}"
            self.begin(lease, Cause.ORPHANED, reason, now_ns, effects)

    def on_active_worker_lost(self, lease: Lease, reason: str, now_ns: int, effects: list[Effect]) -> None:
        """End an active lease after its worker was reaped."""
        # The zygote kills a worker at the lease's deadline even if the broker is late, so an overdue lease has expired.
        if lease.is_expired(now_ns) or lease.is_isolated(now_ns):
            self.expire_if_due(lease, now_ns, effects)
        # The fault came first and explains why the worker died.
        elif lease.fault:
            self.begin(lease, Cause.FAULTED, f"{lease.fault.rstrip('.')}; {reason}", now_ns, effects)
        else:
            self.begin(lease, Cause.WORKER_DIED, reason, now_ns, effects)

    def on_worker_exited(self, lease: Lease, now_ns: int, effects: list[Effect]) -> None:
        """Order the proof of a draining lease's bytes, because its process is reaped now."""
        if lease.state is LeaseState.DRAINING and not lease.is_worker_gone:
            lease.is_worker_gone = True
            lease.is_scrubbing = False
            self._prove(lease, now_ns, effects)

    def on_reclaim_proved(self, lease: Lease, now_ns: int, effects: list[Effect]) -> None:
        """Release the bytes. A proof from before the reap is not valid, and a fence is never lifted by a proof."""
        if lease.state is not LeaseState.DRAINING or not lease.is_worker_gone:
            return
        # The submit's bytes are part of the lease's, so the lease is fenced if they can't be proved free.
        if self.submits.is_stuck(lease):
            self.on_reclaim_failed(lease, "the memory of a submit was not shown free", now_ns, effects)
            return
        # If a submit is still ending, its proof continues the teardown (`_on_submit_freed`).
        lease.is_proved = True
        if not lease.submit_id:
            self._release(lease, now_ns, effects)

    def _release(self, lease: Lease, now_ns: int, effects: list[Effect]) -> None:
        self.regions.return_with(lease, Trigger.RECLAIM_PROVED, now_ns, effects)
        # Release the bytes before the answers are sent, because a client may acquire at once when it has its answer.
        ended = self._store.close(lease, Trigger.RECLAIM_PROVED, now_ns)
        if lease.free_request is not None:
            effects.append(FreeDone(lease.free_request, ended))
        self._report(lease, ended, RevokeOutcome.TORN_DOWN, effects)

    def condemn(self, lease: Lease, cause: Cause, reason: str, now_ns: int, effects: list[Effect]) -> None:
        """End an active lease because its session broke a rule, unless its deadline has passed already."""
        self.expire_if_due(lease, now_ns, effects)
        if lease.state is LeaseState.ACTIVE:
            self.begin(lease, cause, reason, now_ns, effects)
        else:
            self.give_up_scrub(lease, now_ns, effects)

    def _on_submit_freed(self, lease: Lease, now_ns: int, effects: list[Effect]) -> None:
        if lease.is_proved:
            self.on_reclaim_proved(lease, now_ns, effects)

    def on_reclaim_failed(self, lease: Lease, reason: str, now_ns: int, effects: list[Effect]) -> None:
        """Fence the slice. The lease keeps the cause that ended it; its reason then says why it is fenced."""
        if lease.state is not LeaseState.DRAINING:
            return
        lease.reason = f"{lease.reason.rstrip('.')}; {reason}" if lease.reason else reason
        # The fence covers everything inside the lease: its regions' and its submit's bytes are part of its charge.
        self._store.fence(lease, now_ns)
        self.regions.fence_with(lease, now_ns, effects)
        self.submits.fence_with(lease, effects)
        fenced = lease.snapshot()
        if lease.free_request is not None:
            effects.append(RequestDenied(lease.free_request, denials.lease_ended(fenced)))
        self._report(lease, fenced, RevokeOutcome.FENCED, effects)

    def _kill(self, lease: Lease, now_ns: int, effects: list[Effect]) -> None:
        # The kill also ends a scrub that is in progress. If that took too long, no event says so.
        is_late = lease.is_scrubbing and now_ns >= (lease.grace_due_ns or 0)
        lease.is_kill_sent = True
        lease.is_scrubbing = False
        doubt = f"its scrub was not proved within {SCRUB_TIMEOUT_MS} ms" if is_late else ""
        effects.append(KillWorker(lease.lease_id, doubt=doubt))
        self._start_reclaim_clock(lease, now_ns, effects)

    def _prove(self, lease: Lease, now_ns: int, effects: list[Effect]) -> None:
        effects.append(ProveReclaimed(lease.lease_id, lease.card_uuid))
        self._start_reclaim_clock(lease, now_ns, effects)

    def _start_reclaim_clock(self, lease: Lease, now_ns: int, effects: list[Effect]) -> None:
        # One time limit runs from the kill to the proof, so that a worker that dies late does not get a second one.
        if lease.reclaim_due_ns is None:
            lease.reclaim_due_ns = now_ns + self._reclaim_timeout_ns
            effects.append(
                ArmTimer(TimerFired(lease.lease_id, lease.generation, TimerKind.RECLAIM), lease.reclaim_due_ns)
            )

    def _report(self, lease: Lease, ended: LeaseSnapshot, outcome: RevokeOutcome, effects: list[Effect]) -> None:
        effects.extend(RevokeDone(request, outcome) for request in lease.revoke_requests)
        if lease.cause is not None:
            effects.append(LeaseEnded(ended, lease.cause, tuple(lease.history)))
